"""`exgrpo eval` on the sets of a recipe: files, numbers against the answers, going on, and what is refused."""

import json
import shutil
from collections import Counter
from math import comb
from pathlib import Path

import pytest
import torch
import yaml
from cli_project import RECIPE, assert_refused, contents, write_lines

FOLDER = Path("run/eval/models-tiny-sets")
CHATML = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
ARGS = ("eval", "recipe.yaml", "--checkpoint", "models/tiny")


@pytest.fixture(scope="session")
def _tiny(tmp_path_factory):
    """A random model that writes bytes, so that any question can be put to it."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

    folder = tmp_path_factory.mktemp("models") / "tiny"
    vocabulary = {character: index for index, character in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[], eos_token="<|im_end|>", pad_token="<|im_end|>")
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "max_position_embeddings": 128}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    Qwen2ForCausalLM(Qwen2Config(vocab_size=264, **shape, **heads)).save_pretrained(folder)
    return folder


@pytest.fixture
def sets(_tiny, tmp_path, monkeypatch):
    """The current folder, with the model, two sets, and no training questions."""
    shutil.copytree(_tiny, tmp_path / "models" / "tiny")
    monkeypatch.chdir(tmp_path)
    write_lines(Path("sums.jsonl"), *({"q": f"{n}+1", "a": n + 1, "kind": "ab"[n % 2]} for n in range(5)))
    write_lines(Path("arc.jsonl"), *({"q": f"{n}?", "choices": ["x", "y", "z"], "a": "B"} for n in range(3)))
    columns = {"question_key": "q", "answer_key": "a"}
    recipe = {
        **RECIPE,
        "data": {"train": {"path": "absent.jsonl"}, "max_input_seq_length": 60},
        "policy": {
            **RECIPE["policy"],
            "model_name": "models/tiny",
            "max_total_sequence_length": 72,
            "generation": {"max_new_tokens": 12},
        },
        "eval": {
            "sets": {
                "sums": {
                    "path": "sums.jsonl",
                    **columns,
                    "group": "ID",
                    "category_key": "kind",
                    "num_samples": 4,
                    "temperature": 0.6,
                },
                "arc": {
                    "path": "arc.jsonl",
                    **columns,
                    "group": "OOD",
                    "choices_key": "choices",
                    "shuffle_choices": True,
                    "prompt_template": "Choose. {question}",
                },
            },
            "save_every": 8,
            "bootstrap_samples": 100,
        },
    }
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    return tmp_path


def read(name):
    return [json.loads(line) for line in (FOLDER / f"{name}.generations.jsonl").open()]


def results():
    return json.loads((FOLDER / "results.json").read_text())


def test_sets_are_evaluated_and_summed_up(exgrpo, sets):
    """The reward is 1 for responses of an even length, so that a random model has some right answers."""
    Path("even.py").write_text("def reward(*, question, response, answer):\n    return 1.0 - len(response) % 2\n")
    result = exgrpo(*ARGS, "env.reward_function=even:reward")
    assert result.code == 0, result.err
    found, sums, arc = results(), read("sums"), read("arc")
    assert (found["missing"], list(found["sets"]), list(found["macro_average"])) == ([], ["sums", "arc"], ["ID", "OOD"])
    assert [(row["sample"], row["category"]) for row in sums[:5]] == [(0, "a"), (1, "a"), (2, "a"), (3, "a"), (0, "b")]
    assert (len(sums), len(arc)) == (20, 3)
    assert len({row["seed"] for row in sums}) == 20
    assert {tuple(row["question"].splitlines()[0] for row in arc)} == {("0?", "1?", "2?")}
    assert all(f"\n{row['answer']}. y" in row["question"] for row in arc)

    assert all(row["correct"] == (len(row["response"]) % 2 == 0) for row in sums)
    right = Counter(row["question_id"] for row in sums if row["correct"])
    ids = dict.fromkeys(row["question_id"] for row in sums)
    metrics = {name: entry["value"] for name, entry in found["sets"]["sums"]["metrics"].items()}
    assert list(metrics) == ["avg@4", "pass@2", "pass@4", "maj@4"]
    assert metrics["avg@4"] == pytest.approx(sum(right.values()) / 20)
    assert 0 < metrics["avg@4"] < 1
    assert metrics["pass@2"] == pytest.approx(sum(1 - comb(4 - right[i], 2) / 6 for i in ids) / 5)

    identity = found["sets"]["sums"]["identity"]
    assert (identity["set"]["temperature"], identity["seed"]) == (0.6, 123)
    assert found["sets"]["arc"]["identity"]["set"]["temperature"] == 1.0  # eval.temperature
    assert identity["engine"]["backend"] == "embedded"
    assert identity["versions"]["torch"] == torch.__version__
    assert (FOLDER / "results.md").read_text() in result.out


def test_an_interrupted_evaluation_goes_on_and_ends_alike(exgrpo, sets):
    """Cut off in the first set, within a line of the second batch of 8 answers."""
    exgrpo(*ARGS)
    whole, numbers = {name: read(name) for name in ("sums", "arc")}, results()
    path = FOLDER / "sums.generations.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:10]) + lines[10][:30])
    for name in ("arc.json", "arc.generations.jsonl", "results.json", "results.md"):
        (FOLDER / name).unlink()

    result = exgrpo(*ARGS)
    assert result.code == 0, result.err
    assert "2 questions are done, 3 of a batch that was cut off are sampled again" in result.out
    assert "sums: 4 of 5 questions" in result.out
    assert {name: read(name) for name in whole} == whole
    assert results() == numbers


def test_a_finished_evaluation_samples_nothing_and_takes_new_groups(exgrpo, sets):
    exgrpo(*ARGS, "eval.save_every=100")
    before = contents(FOLDER)
    result = exgrpo(*ARGS, "eval.sets.arc.group=ID", "eval.sets.sums.pass_at=[3]")
    assert result.code == 0, result.err
    assert "of 5 questions" not in result.out
    assert list(results()["macro_average"]) == ["ID"]
    assert list(results()["sets"]["sums"]["metrics"]) == ["avg@4", "pass@3", "maj@4"]
    changed = {path.name for path, digest in contents(FOLDER).items() if before.get(path) != digest}
    assert changed == {"results.json", "results.md"}


def test_answers_of_another_evaluation_are_not_mixed(exgrpo, sets):
    exgrpo(*ARGS)
    before = contents(sets)
    assert_refused(
        exgrpo(*ARGS, "eval.seed=5"), before, "sums.json: the answers there are of another", "seed: 123 -> 5"
    )
    changed = exgrpo(*ARGS, "eval.sets.sums.temperature=0.7")
    assert_refused(changed, before, "set.temperature: 0.6 -> 0.7", "move the folder run/eval/models-tiny-sets away")
    Path("arc.jsonl").write_text(Path("arc.jsonl").read_text().replace("2?", "7?"))
    assert_refused(exgrpo(*ARGS), contents(sets), "arc.json: the answers there", "questions: ")


def test_answers_of_another_checkpoint_are_not_mixed(exgrpo, sets):
    from safetensors.torch import load_file, save_file

    exgrpo(*ARGS)
    path = "models/tiny/model.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(path).items()}, path, metadata={"format": "pt"})
    assert_refused(exgrpo(*ARGS), contents(sets), "(checkpoint: ")


@pytest.mark.parametrize(
    ("args", "texts"),
    [
        (["--entropy"], ["--entropy is for --questions validation or train"]),
        (["--questions", "validation"], ["data.validation: an evaluation needs held-out questions"]),
        (["eval.sets={}", "--questions", "sets"], ["eval.sets: an evaluation of sets needs some"]),
        (["eval.sets.a/b={path: x.jsonl}"], ["eval.sets: 'a/b' is no name of a set"]),
        (["eval.sets.Arc={path: x.jsonl}"], ["differ in case alone"]),
        (["eval.sets.sums.path=gone.jsonl"], ["eval.sets.sums.path = gone.jsonl: there is no such file"]),
        (["eval.sets.sums.pass_at=[8]"], ["eval.sets.sums: pass_at = [8]: 8 is above num_samples = 4"]),
        (["eval.sets.sums.temperature=0"], ["eval.sets.sums: temperature = 0 with num_samples = 4"]),
        (["eval.sets.sums.temperature=1e-4"], ["temperature = 0.0001: must be 0 (greedy) or at least 0.001"]),
        (["eval.sets.sums.shuffle_choices=true"], ["shuffle_choices = true has no effect while choices_key is null"]),
        (["eval.sets.arc.answer_marker='#'"], ["answer_marker = '#' is for free answers"]),
        (["eval.sets.arc.prompt_template=Choose"], ["eval.sets.arc: prompt_template must contain {question}"]),
        (
            ["eval.sets.arc.num_sample=2"],
            ["eval.sets.arc.num_sample: unknown key; nearest: eval.sets.<name>.num_samples"],
        ),
    ],
    ids=lambda value: value[0][:40],
)
def test_what_is_refused(args, texts, exgrpo, sets):
    assert_refused(exgrpo(*ARGS, *args), contents(sets), *texts)
    assert not FOLDER.exists()
