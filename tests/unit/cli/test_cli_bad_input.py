"""Bad input of every kind: one clear message, exit code 2, no traceback, and nothing lost that was there."""

import fcntl
import json
import shutil

import pytest
from cli_project import assert_refused, contents, rows, write_lines


@pytest.mark.parametrize(
    ("args", "texts"),
    [
        (["train", "nothing.yaml"], ["nothing.yaml", "no such recipe file"]),
        (["train", "."], ["a folder, not a recipe file"]),
        (["show", "recipe.yaml", "grpo.seed"], ["'grpo.seed'", "section.key=value"]),
        (["show", "recipe.yaml", "grpo.sead=1"], ["grpo.sead: unknown key", "grpo.seed"]),
        (["show", "recipe.yaml", "grpo.seed=[1"], ["not valid YAML"]),
        (["show", "recipe.yaml", "grpo.seed=-1"], ["grpo.seed = -1", "greater than or equal to 0"]),
        (["train", "recipe.yaml", "cluster.gpus_per_node=4"], ["= 4 is not the number of launched processes, 1"]),
        (["report", "nowhere"], ["nowhere/metrics.jsonl does not exist", "exgrpo train"]),
    ],
    ids=lambda value: " ".join(value) if value and value[0] in ("train", "show", "report") else "",
)
def test_a_command_that_cannot_begin_says_why(exgrpo, project, args, texts):
    before = contents(project)
    assert_refused(exgrpo(*args), before, *texts)
    assert contents(project) == before


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["bogus"], "No such command 'bogus'"),
        (["train"], "Missing argument"),
        (["train", "recipe.yaml", "--resume"], "No such option"),
    ],
)
def test_a_wrong_command_line_is_answered_with_its_usage(exgrpo, project, args, text):
    result = exgrpo(*args)
    assert result.code == 2
    assert text in result.err
    assert result.err.startswith("Usage: exgrpo")


@pytest.mark.parametrize(
    ("lines", "texts"),
    [
        (None, ["data.train.path = train.jsonl", "no such file"]),
        (["{}", '{"id": "q1", '], ["train.jsonl, line 1", "no column"]),
        ([rows(1, 1)[0], '{"id": "q1", '], ["train.jsonl, line 2", "not JSON"]),
        ([{"id": "q1", "question": "1+1", "answer": " "}], ["train.jsonl, line 1", '"answer" is empty']),
        ([{"id": "q1", "question": "1+1", "answer": None}], ["train.jsonl, line 1", "found nothing (null)"]),
        ([{"id": "q1", "question": "1+" * 20 + "1", "answer": 21}], ["longer than data.max_input_seq_length = 16"]),
        (
            rows(1, 1),
            [
                "grpo.num_prompts_per_step = 2",
                "1 training questions left after the length filter (0 were too long): lower",
            ],
        ),
        ([*rows(1, 2), {"id": "q9", "question": "1+1", "answer": 3}], ["line 3", "another answer ('3', not '2')"]),
    ],
    ids=["no file", "no column", "cut line", "empty answer", "null answer", "all too long", "too few", "contradiction"],
)
def test_questions_that_cannot_be_used_are_refused_with_their_line(exgrpo, project, lines, texts):
    if lines is None:
        (project / "train.jsonl").unlink()
    else:
        write_lines(project / "train.jsonl", *lines)
    assert_refused(exgrpo("train", "recipe.yaml"), contents(project), *texts)
    assert not (project / "run" / "checkpoints").exists()


def test_too_few_questions_are_explained_by_the_filters_in_use_alone(exgrpo, project):
    write_lines(project / "train.jsonl", *rows(1, 2))
    lines = [json.dumps({"question_id": f"q{n}", "pass_rate": rate}) for n, rate in ((1, 0.5), (2, 1.0))]
    (project / "rates.jsonl").write_text("\n".join(lines))
    given = ["data.train.pass_rates_path=rates.jsonl", "data.train.pass_rate_range=[0,0.5]"]
    message = exgrpo("train", "recipe.yaml", *given).err
    assert "(0 were too long) and data.train.pass_rate_range (1 were outside): lower it" in message


def test_what_is_left_out_shared_or_unlearnable_is_reported_once_at_the_start(exgrpo, project):
    long = {"id": "long", "question": "1+" * 20 + "1", "answer": 21}
    write_lines(project / "train.jsonl", *rows(1, 4), long, {"id": "odd", "question": "7+2", "answer": "the 9th"})
    write_lines(project / "held_out.jsonl", *rows(4, 2))
    options = ["grpo.max_num_steps=1", "env.math.require_literal=true", "checkpointing.export_hf=false"]
    result = exgrpo("train", "recipe.yaml", *options)
    assert result.code == 0, result.err
    assert "training questions: 5 from train.jsonl" in result.out
    assert "left out: 1 too long (long)" in result.out
    # q4 is the only one in both files.
    assert "warning: 1 of the 2 held-out questions are training questions too" in result.out
    assert "warning: 1 of 5 training gold answers are not accepted" in result.out
    assert "odd ('the 9th')" in result.out
    assert "held-out gold" not in result.out
    again = exgrpo("train", "recipe.yaml", *options, "grpo.max_num_steps=2")
    assert "gold answers" not in again.out


def test_the_check_of_gold_answers_can_be_left_out(exgrpo, project):
    write_lines(project / "train.jsonl", *rows(1, 4), {"id": "odd", "question": "7+2", "answer": "the 9th"})
    options = ["env.math.require_literal=true", "env.math.check_gold=false", "checkpointing.export_hf=false"]
    result = exgrpo("train", "recipe.yaml", *options, "grpo.max_num_steps=1", "grpo.val_at_start=false")
    assert result.code == 0, result.err
    assert "gold answers" not in result.out


def test_training_answers_none_of_which_can_be_rewarded_are_refused(exgrpo, project):
    write_lines(project / "train.jsonl", *({"id": f"q{n}", "question": f"{n}+1", "answer": "?"} for n in range(4)))
    result = exgrpo("train", "recipe.yaml", "env.math.require_literal=true")
    assert_refused(
        result, contents(project), "no gold answer of train.jsonl is accepted", "q0 ('?')", "require_literal"
    )


def copy_model(trained, name, **config):
    model = trained / name
    shutil.copytree(trained / "run" / "hf", model)
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**settings, **config}))
    return model


def test_a_missing_model_folder_is_named(exgrpo, project):
    result = exgrpo("train", "recipe.yaml", "policy.model_name=models/none")
    assert_refused(result, contents(project), "policy.model_name = 'models/none'", "no such model folder")


def test_a_model_of_an_unsupported_family_is_named(exgrpo, trained):
    copy_model(trained, "other", model_type="gpt_neox")
    result = exgrpo("train", "recipe.yaml", "policy.model_name=other", "logger.log_dir=new")
    assert_refused(result, contents(trained), "policy.model_name = 'other'", "gpt_neox", "qwen2")


def test_a_model_folder_with_missing_weights_is_refused(exgrpo, trained):
    (copy_model(trained, "other") / "model.safetensors").unlink()
    result = exgrpo("train", "recipe.yaml", "policy.model_name=other", "logger.log_dir=new")
    assert_refused(result, contents(trained), "policy.model_name = 'other'", "safetensors")


@pytest.mark.parametrize(
    ("damage", "texts"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), ["no tokenizer in other"]),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), ["the tokenizer in other", "copy the tokenizer"]),
    ],
    ids=["missing", "damaged"],
)
def test_a_tokenizer_that_cannot_be_read_is_named(exgrpo, trained, damage, texts):
    damage(copy_model(trained, "other"))
    result = exgrpo("train", "recipe.yaml", "policy.model_name=other", "logger.log_dir=new")
    assert_refused(result, contents(trained), "policy.tokenizer.name", *texts)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(exgrpo, trained):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(trained / "run" / "hf")
    tokenizer.add_tokens([f"<new{n}>" for n in range(200)])
    tokenizer.save_pretrained(trained / "bigger")
    result = exgrpo("train", "recipe.yaml", "policy.tokenizer.name=bigger", "logger.log_dir=new")
    assert_refused(result, contents(trained), "policy.tokenizer.name = 'bigger' has token ids up to 220, but")


def test_a_log_dir_that_cannot_be_made_is_named(exgrpo, project):
    (project / "file").write_text("in the way")
    result = exgrpo("train", "recipe.yaml", "logger.log_dir=file/run")
    assert_refused(result, contents(project), "logger.log_dir = 'file/run'", "Not a directory")


def test_a_second_run_in_the_same_folder_is_refused(exgrpo, project):
    (project / "run").mkdir()
    with (project / "run" / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        for command in ("train", "sft"):
            result = exgrpo(command, "recipe.yaml")
            assert_refused(result, contents(project), "logger.log_dir = 'run'", "another run is writing there")
    assert not (project / "run" / "metrics.jsonl").exists()
