"""What the commands do and show."""

import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from cli_project import assert_refused, contents, rows, write_lines
from rich.console import Console

from exgrpo_megatron import cli
from exgrpo_megatron.process import program
from exgrpo_megatron.recipe import load_recipe
from exgrpo_megatron.recipe_options import options
from exgrpo_megatron.report.tables import options_view

ROOT = Path(__file__).resolve().parents[3]


def test_training_again_after_the_last_step_goes_straight_to_the_summary(exgrpo, trained):
    before = contents(trained)
    result = exgrpo("train", "recipe.yaml")
    assert result.code == 0
    assert "nothing was left to train: all 2 steps are done" in result.out
    lines = [line.split() for line in result.out.splitlines()]
    for what, path in [
        ("dashboard", "run/dashboard.png"),
        ("metrics", "run/metrics.jsonl"),
        ("checkpoint", "run/checkpoints/step_000002"),
        ("export", "run/hf"),
    ]:
        assert [what, path] in lines
        assert Path(path).exists()
    assert "eval run/recipe.yaml --checkpoint run/hf" in result.out
    changed = {path for path, digest in contents(trained).items() if before.get(path) != digest}
    assert changed <= {trained / "run" / "dashboard.png"}


def test_fewer_steps_than_are_done_are_told_as_such(exgrpo, trained):
    done = exgrpo("train", "recipe.yaml", "grpo.max_num_steps=1")
    assert done.code == 0
    assert "nothing was left to train: 2 steps are done, more than grpo.max_num_steps = 1" in done.out


def test_more_steps_go_on_from_the_last_and_name_the_change(exgrpo, trained):
    result = exgrpo("train", "recipe.yaml", "grpo.max_num_steps=3")
    assert result.code == 0
    assert "resuming from run/checkpoints/step_000002: 2 of 3 steps are done" in result.out
    assert "the recipe changed since then: grpo.max_num_steps: 2 -> 3" in result.out
    assert "exported to run/hf and checked: 397,056 parameters" in result.out
    assert "PosixPath" not in result.out
    assert "Loading weights" not in result.err


def test_metrics_of_a_run_that_cannot_be_resumed_are_kept(exgrpo, trained):
    before = (trained / "run" / "metrics.jsonl").read_text()
    off = ("checkpointing.enabled=false", "checkpointing.export_hf=false", "experience.enabled=false")
    result = exgrpo("train", "recipe.yaml", *off, "experience.shaping_beta=0.2")
    assert result.code == 0
    assert "kept as run/metrics.1.jsonl" in result.out
    assert (trained / "run" / "metrics.1.jsonl").read_text() == before
    idle = [line for line in result.out.splitlines() if "experience.enabled = false, so these keys" in line]
    assert len(idle) == 1
    assert "experience.shaping_beta" in idle[0]


def test_eval_shows_a_table_by_category_and_writes_metrics_and_answers(exgrpo, trained):
    with_category = [{**row, "kind": kind} for row, kind in zip(rows(10, 2), ["easy", "hard"], strict=True)]
    write_lines(trained / "held_out.jsonl", *with_category)
    result = exgrpo("eval", "recipe.yaml", "data.validation.category_key=kind", "eval.num_tests_per_prompt=2")
    assert result.code == 0, result.err
    table = [line.split()[:2] for line in result.out.splitlines()]
    assert [line[0] for line in table if line and line[0] in ("questions", "all", "easy", "hard")] == [
        "questions",
        "all",
        "easy",
        "hard",
    ]
    written = json.loads((trained / "run" / "eval" / "step_000002.json").read_text())
    assert written["checkpoint"] == "run/checkpoints/step_000002"
    assert written["eval"]["num_tests_per_prompt"] == 2
    assert set(written["metrics"]) >= {"validation/pass_rate_t1/easy", "validation/pass_rate_greedy/hard"}
    answers = [json.loads(line) for line in (trained / "run" / "eval" / "step_000002.answers.jsonl").open()]
    # Two questions, each sampled twice and once greedily.
    assert [answer["mode"] for answer in answers] == ["t1"] * 4 + ["greedy"] * 2
    assert {answer["category"] for answer in answers} == {"easy", "hard"}


def test_a_checkpoint_and_its_export_evaluate_alike(exgrpo, trained):
    exgrpo("eval", "recipe.yaml")
    exgrpo("eval", "recipe.yaml", "--checkpoint", "run/hf")
    ours, exported = (trained / "run" / "eval" / f"{name}.answers.jsonl" for name in ("step_000002", "hf"))
    assert ours.read_text() == exported.read_text()


def test_a_checkpoint_and_its_export_have_the_same_answers_to_a_set(exgrpo, trained):
    sets = "eval.sets={sums: {path: held_out.jsonl, num_samples: 2}}"
    for checkpoint in ("run/checkpoints/step_000002", "run/hf"):
        result = exgrpo("eval", "recipe.yaml", sets, "--checkpoint", checkpoint)
        assert result.code == 0, result.err
    folders = [trained / "run" / "eval" / f"{name}-sets" for name in ("step_000002", "hf")]
    ours, exported = ((folder / "sums.generations.jsonl").read_text() for folder in folders)
    assert ours == exported
    digests = [json.loads((folder / "sums.json").read_text())["identity"]["checkpoint"] for folder in folders]
    assert digests[0] == hashlib.sha256((trained / "run/checkpoints/step_000002/files.json").read_bytes()).hexdigest()
    assert digests[1] != digests[0]


def test_eval_of_training_questions_measures_pass_rates_and_token_entropies(exgrpo, trained):
    """The entropies are those of transformers on the export: -sum p log p over the vocabulary, token by token."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    result = exgrpo("eval", "recipe.yaml", "--questions", "train", "--entropy", "eval.num_tests_per_prompt=3")
    assert result.code == 0, result.err
    assert "training pass rate" in result.out
    assert "never right 0%" in result.out
    folder = trained / "run" / "eval"
    rates = [json.loads(line) for line in (folder / "step_000002-train.pass_rates.jsonl").open()]
    assert [(rate["question_id"], rate["num_answers"]) for rate in rates] == [(f"q{n}", 3) for n in range(1, 5)]
    assert (folder / "step_000002-train.entropy.png").is_file()
    assert json.loads((folder / "step_000002-train.json").read_text())["entropy"][-1]["num_questions"] >= 1

    model = AutoModelForCausalLM.from_pretrained("run/hf", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained("run/hf")
    answers = [json.loads(line) for line in (folder / "step_000002-train.answers.jsonl").open()]
    sampled = [answer for answer in answers if answer["mode"] == "t1"]
    assert len(sampled) == 12
    for answer in sampled:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": answer["question"]}], add_generation_prompt=True, return_dict=False
        )
        response = tokenizer.encode(answer["response"], add_special_tokens=False)
        if len(response) + (answer["stop_reason"] == "stop") != answer["num_tokens"]:
            continue  # a special token in the midst of it, which the text does not show
        response += [tokenizer.eos_token_id] * (answer["stop_reason"] == "stop")
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        log_p = logits.log_softmax(-1)
        assert answer["mean_entropy"] == pytest.approx(float(-(log_p.exp() * log_p).sum(-1).mean()), abs=1e-4)


def test_a_run_on_the_questions_that_are_never_answered(exgrpo, trained):
    exgrpo("eval", "recipe.yaml", "--questions", "train")
    rates = "data.train.pass_rates_path=run/eval/step_000002-train.pass_rates.jsonl"
    result = exgrpo("train", "recipe.yaml", "logger.log_dir=never", rates, "data.train.pass_rate_range=[0,0]")
    assert result.code == 0, result.err
    assert "of another pass rate" in result.out or "4 from train.jsonl" in result.out


def test_evaluations_of_another_run_do_not_hide_ones_own(exgrpo, trained):
    shutil.copytree("run/hf", "other/hf")
    exgrpo("eval", "recipe.yaml", "--checkpoint", "other/hf")
    assert (trained / "run" / "eval" / "other-hf.json").is_file()


def test_sft_exports_a_model_and_says_how_to_go_on(exgrpo, trained):
    lines = [{**row, "how": f"\\boxed{{{row['answer']}}}"} for row in rows(1, 4)]
    write_lines(trained / "train.jsonl", *lines)
    result = exgrpo("sft", "recipe.yaml", "data.train.solution_key=how", "logger.log_dir=new")
    assert result.code == 0, result.err
    assert "exported to new/sft/hf" in result.out
    assert "eval new/sft/recipe.yaml --checkpoint new/sft/hf" in result.out
    assert exgrpo("eval", "new/sft/recipe.yaml", "--checkpoint", "new/sft/hf").code == 0


def test_sft_without_solutions_says_which_key_names_them(exgrpo, project):
    assert_refused(exgrpo("sft", "recipe.yaml"), contents(project), "solution_key")


@pytest.mark.parametrize("width", [80, 160])
def test_show_prints_a_recipe_that_loads_again_and_both_tables(exgrpo, project, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    result = exgrpo("show", "recipe.yaml", "grpo.seed=7", "cluster.gpus_per_node=2")
    text, _, tables = result.out.partition("What the numbers mean")
    (project / "again.yaml").write_text(text)
    assert load_recipe("again.yaml") == load_recipe("recipe.yaml", ["grpo.seed=7", "cluster.gpus_per_node=2"])
    assert max(map(len, tables.splitlines())) <= width
    shown = " ".join(tables.split())
    assert "questions a step 2, of which at most 1 replayed" in shown
    assert "on each of 2 data-parallel rank(s)" in shown
    assert "loss_fn.normalizer global_width paper: per_answer_length, code: rank_width" in shown
    assert "loss_fn.clip_in_mixed_phase false paper: true" in shown


def test_options_give_every_default_as_a_recipe_would_write_it(exgrpo):
    lines = exgrpo("options").out.splitlines()
    for start in (
        "grpo.val_at_start = true: ",
        # The default of the section, not that of the class it shares with policy.megatron_cfg.optimizer (1e-6).
        "sft.optimizer.lr = 1.0e-05: ",
        "policy.megatron_cfg.optimizer.lr = 1.0e-06: ",
        "sft.scheduler.lr_decay_style = linear: ",
        "data.train.generator_difficulties = null: ",
        "policy.model_name = required [path]: ",
        "env.math.check_gold = true: ",
        "experience.prefill_path = null [path]: ",
    ):
        assert any(line.startswith(start) for line in lines), start


def test_the_next_command_can_be_typed_where_the_environment_is_not_activated(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / ".venv" / "bin" / "exgrpo")])
    monkeypatch.setenv("PATH", "/nowhere")
    assert program() == ".venv/bin/exgrpo"
    monkeypatch.setattr(sys, "argv", ["/a/package/__main__.py"])
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert program() == "python -m exgrpo_megatron"
    monkeypatch.setattr(sys, "executable", "/opt/python")
    assert program() == "/opt/python -m exgrpo_megatron"
    (tmp_path / "exgrpo").write_text("#!/bin/sh\n")
    (tmp_path / "exgrpo").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert program() == "exgrpo"


@pytest.mark.parametrize(("width", "first"), [(80, "variant = corrected"), (160, "Recipe keys")])
def test_options_fit_the_terminal(width, first):
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(options_view(options(), width))
    lines = re.sub(r"\x1b\[[0-9;]*m", "", console.file.getvalue()).splitlines()
    assert lines[0].strip() == first
    assert max(map(len, lines)) <= width
    assert sum("generator_worked_share" in line for line in lines) == 1


def test_the_version_is_told(exgrpo):
    from exgrpo_megatron import __version__

    assert exgrpo("--version").out == f"exgrpo-megatron {__version__}\n"


@pytest.mark.parametrize("args", [["--help"], ["train", "--help"], ["show", "recipe.yaml"], ["options"], ["--version"]])
def test_commands_that_need_no_model_do_not_import_torch(project, args):
    script = (
        "import sys\nfrom exgrpo_megatron.cli import main\n"
        "try:\n    main(sys.argv[1:])\nfinally:\n"
        "    heavy = {'torch', 'transformers', 'megatron', 'pyarrow', 'matplotlib', 'numpy'} & set(sys.modules)\n"
        "    assert not heavy, heavy\n"
    )
    paths = ":".join(str(ROOT / name) for name in (".", "kernels", "conversion"))
    done = subprocess.run(
        [sys.executable, "-c", script, *args], env={"PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("error", [KeyboardInterrupt, typer.Abort])
def test_ctrl_c_before_the_first_step_ends_with_one_line(exgrpo, project, monkeypatch, error):
    def interrupted(*_):
        raise error

    monkeypatch.setattr(cli, "load_with_report", interrupted)
    result = exgrpo("train", "recipe.yaml")
    assert (result.code, result.out, result.err) == (130, "", "error: stopped by Ctrl-C\n")


@pytest.mark.parametrize(("rank", "line"), [("0", "error: stopped by Ctrl-C\n"), ("1", "")])
def test_ctrl_c_while_the_command_is_imported_ends_with_one_line_of_rank_0(rank, line):
    script = (
        "import sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'typer':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "from exgrpo_megatron.__main__ import main\nmain()\n"
    )
    paths = ":".join(str(ROOT / name) for name in (".", "kernels", "conversion"))
    environment = {"PYTHONPATH": paths, "RANK": rank}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, line)


def test_simulate_shows_tables_and_writes_what_report_reads(exgrpo, project):
    """Every rate 1: the 2 questions of a step are retired, and nothing is stored."""
    command = ("simulate", "recipe.yaml", "--questions", "24", "--rates", "constant:1", "grpo.max_num_steps=2")
    result = exgrpo(*command, "--out", "sim")
    assert result.code == 0
    assert re.search(r"retired questions +4\b", result.out)
    assert [step["experience/retired"] for step in json.loads(exgrpo(*command, "--json").out)["steps"]] == [2, 4]
    assert exgrpo("report", "sim").code == 0
    refused = exgrpo("simulate", "recipe.yaml", "--rates", "nothing")
    assert refused.code == 2
    assert "neither a distribution" in refused.err


def test_report_writes_a_page_that_opens_from_disk(exgrpo, trained):
    result = exgrpo("report", "run", "--html")
    assert (result.code, Path("run/report.html").is_file()) == (0, True)
    assert "report: run/report.html" in result.out
    assert exgrpo("report", "run", "--html", "--out", "page.html").code == 0
    refused = exgrpo("report", "run", "--max-answer-texts", "3")
    assert refused.code == 2
    assert "are for --html" in refused.err
