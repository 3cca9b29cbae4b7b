"""The commands of the documentation that take seconds, one after another in one folder, as the register says."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import documented
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from cli_project import write_lines
from documented import ROOT

ENTRIES, PLACEHOLDERS = documented.register()
SHORTER = yaml.safe_load(documented.REGISTER.read_text())["shorter"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkout as far as the commands look at it, with the files that a reader has by then."""
    folder = tmp_path_factory.mktemp("documented_run")
    for name in ("recipes", "kernels", "conversion", "benchmarks", "exgrpo_megatron", "Makefile"):
        (folder / name).symlink_to(ROOT / name)
    sums = [{"question": f"{n}+{n}", "answer": 2 * n, "solution": f"\\boxed{{{2 * n}}}"} for n in range(1, 41)]
    write_lines(folder / "train.jsonl", *sums)
    write_lines(folder / "held_out.jsonl", {"question": "50+1", "answer": 51})
    own = {
        "defaults": "recipes/own_questions.yaml",
        "data": {"train": {"path": "train.jsonl", "solution_key": "solution"}, "validation": None},
        "experience": {"prefill_path": "prefill"},
    }
    (folder / "my.yaml").write_text(yaml.safe_dump(own))
    for name in ("data/openr1", "data/openr1_46k", "models/Qwen2.5-Math-1.5B-16k"):
        (folder / name).mkdir(parents=True)
    (folder / "models" / "Qwen2.5-Math-1.5B-16k" / "config.json").write_text("{}")
    verified = {"question_type": "math-word-problem", "correctness_math_verify": [True]}
    openr1 = [{"problem": f"{n}+1", "answer": str(n + 1), **verified} for n in range(300)]
    pq.write_table(pa.Table.from_pylist(openr1), folder / "data/openr1/a.parquet")
    shutil.copy(folder / "data/openr1/a.parquet", folder / "data/openr1_46k/a.parquet")
    chat = [{"role": "user", "content": "1+2"}]
    dapo = [{"prompt": chat, "reward_model": {"ground_truth": "3"}}]
    pq.write_table(pa.Table.from_pylist(dapo), folder / "data/dapo-math-17k.parquet")
    return folder


def words_of(entry):
    """The command as the register shortens it."""
    text = entry.command if entry.how["run"] is True else entry.how["run"]
    for old, new in entry.how.get("swap", {}).items():
        text, count = re.subn(rf"(?<=\s){re.escape(old)}(?=\s|$)", new, text)
        assert count == 1, f"{old!r} stands {count} times in {text}"
    for name in entry.how.get("with", "").split():
        text += f" {SHORTER.get(name, name).strip()}"
    return text


def test_they_run_one_after_another(exgrpo, folder, monkeypatch):
    monkeypatch.chdir(folder)
    ran = [run(words_of(entry), exgrpo) for entry in ENTRIES if "run" in entry.how]
    assert len(ran) > 25
    seed7 = [json.loads(line) for line in Path("runs/seed7/metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in seed7] == [0, 1, 2]
    assert Path("runs/quickstart/hf/README.md").is_file()
    prepared = Path("data/train.jsonl").read_text().splitlines(), Path("data/held_out.jsonl").read_text().splitlines()
    assert len(prepared[0]) + len(prepared[1]) == 300
    assert json.loads(Path("models/Qwen2.5-Math-1.5B-16k/config.json").read_text())["rope_theta"] == 40000.0


def run(text, exgrpo):
    """`exgrpo` in this process, anything else by a shell with this Python; it must end well."""
    if text.startswith("exgrpo ") and "$(" not in text:
        words = [word for part in shlex.split(text) for word in expanded(part)]
        result = exgrpo(*words[1:])
        assert result.code == 0, f"{text}: {result.err}"
        return result.out
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "conversion")))
    exe = shlex.quote(sys.executable)
    shims = f'python() {{ {exe} "$@"; }}; exgrpo() {{ {exe} -m exgrpo_megatron "$@"; }}'
    done = subprocess.run(
        ["bash", "-c", f"{shims}\n{text}"],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{text}: {done.stderr}"
    return done.stdout


def expanded(word):
    """A word as the shell gives it: file names for a pattern."""
    return sorted(map(str, Path().glob(word))) if "*" in word else [documented.placeholder(word, PLACEHOLDERS)]


def test_the_training_snippet(joined_group, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    (snippet,) = (one.text for one in documented.all_snippets() if "import load_recipe, train" in one.text)
    given = dict(word.split("=") for word in SHORTER["tiny"].split())
    shorter = {name: yaml.safe_load(value) for name, value in given.items()}
    small = snippet.replace(
        '{"grpo.seed": 7, "logger.log_dir": "runs/seed7"}', repr({**shorter, "logger.log_dir": "runs/py"})
    )
    assert small != snippet
    exec(small, {"__name__": "__main__"})
    assert capsys.readouterr().out.splitlines()[-1].startswith("True 0.")
    assert Path("runs/py/hf/config.json").is_file()
