"""Experience made from worked solutions, and a run that begins with it.

The model is the embedded one with untrained weights; its vocabulary is digits, + - * = ?, newline, \\boxed{ and }.
"""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scripted import ScriptedEngine, build_trainer, make_config, wrong

from exgrpo_megatron import run_inputs
from exgrpo_megatron.errors import ConfigError, DataError
from exgrpo_megatron.prefill import check_prefill_target, load_prefill, record_solutions
from exgrpo_megatron.recipe import parse_recipe

BOX = "\\boxed{{answer}}"
GSM8K_LIKE = {"answer_marker": "####", "solution_key": "answer", "solution_remove": "<<.*?>>"}


def rows_of(count):
    """Question i is `i+1`, its answer column as GSM8K writes it: working with a calculator mark, #### and i + 1."""
    return [
        {"id": f"q{i}", "question": f"{i}+1", "answer": f"{i}+1=<<{i}+1={i + 1}>>{i + 1}\n#### {i + 1}"}
        for i in range(1, count + 1)
    ]


@pytest.fixture
def make_trainer(tmp_path, data_parallel):
    """A trainer on these rows (12 GSM8K-like ones where none are given), whose new answers are all wrong."""
    built = []

    def make(rows=None, source=GSM8K_LIKE, **sections):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows or rows_of(12)))
        data = {"train": {"path": str(path), "id_key": "id", **source}, "max_input_seq_length": 16}
        trainer = build_trainer(tmp_path, lambda name, samples: [wrong(name)] * samples, comm=data_parallel,
                                data=data, **sections)  # fmt: skip
        built.append(trainer)
        return trainer

    yield make
    for trainer in built:
        trainer.parts.verifier.close()


def texts(parts, question_id):
    decode = parts.tokenizer.decode
    return [decode(answer.token_ids) for answer in parts.experience.answers(question_id)]


def test_a_solution_is_stored_boxed_with_the_log_probs_of_the_policy(make_trainer):
    parts = make_trainer().parts
    report = record_solutions(parts, [BOX])
    assert (report.stored, report.questions) == (12, 12)
    assert texts(parts, "q4") == ["4+1=5\n\\boxed{5}"]
    (stored,) = parts.experience.answers("q4")
    assert stored.token_ids[-1] == parts.tokenizer.eos_id
    assert (stored.policy_version, stored.step) == (0, 0)
    question = next(question for question in parts.train.questions if question.id == "q4")
    (scored,) = parts.policy.score([(question.prompt_ids, stored.token_ids)], temperature=1.0)
    np.testing.assert_allclose(stored.logprobs, scored.logprobs, atol=1e-5)


def test_a_solution_nobody_has_tried_counts_as_correct_once_in_a_group(make_trainer):
    parts = make_trainer().parts
    record_solutions(parts, [BOX])
    assert parts.experience.bucket_sizes() == {1: 12, 2: 0, 3: 0}
    assert parts.experience.retired == frozenset()


def test_every_ending_gives_an_answer_of_its_own(make_trainer):
    parts = make_trainer().parts
    report = record_solutions(parts, [BOX, "{answer}=\\boxed{{answer}}"])
    assert (report.stored, report.questions) == (24, 12)
    assert texts(parts, "q2") == ["2+1=3\n\\boxed{3}", "2+1=3\n3=\\boxed{3}"]


def test_a_solution_with_a_box_stays_as_it_is(make_trainer):
    rows = [{"question": f"{i}+1", "answer": str(i + 1), "solution": f"\\boxed{{{i + 1}}}", "id": f"q{i}"}
            for i in range(1, 5)]  # fmt: skip
    parts = make_trainer(rows, {"solution_key": "solution"}).parts
    assert record_solutions(parts, [BOX, "{answer}=\\boxed{{answer}}"]).stored == 4
    assert texts(parts, "q1") == ["\\boxed{2}"]


def test_what_cannot_be_replayed_is_left_out_and_counted(make_trainer):
    """Of 8 rows: 2 are right, one each is wrong, too long, unwritable and there twice; 2 have questions not used."""
    solutions = ["\\boxed{2}", "\\boxed{9}", "1+" * 60 + "\\boxed{4}", "so \\boxed{5}", "\\boxed{6}"]
    rows = [{"id": f"q{i}", "question": f"{i}+1", "answer": i + 1, "solution": solution}
            for i, solution in enumerate([*solutions, "\\boxed{7}", "\\boxed{8}"], start=1)]  # fmt: skip
    rows.insert(5, rows[4])
    parts = make_trainer(rows, {"solution_key": "solution", "max_questions": 5}).parts
    report = record_solutions(parts, [BOX])
    found = (report.stored, report.wrong, report.too_long, report.unwritable, report.duplicates, report.no_question)
    assert found == (2, 1, 1, 1, 1, 2)


def test_no_usable_solution_at_all_is_an_error(make_trainer):
    rows = [{**row, "solution": "\\boxed{99}", "answer": "7"} for row in rows_of(4)]
    parts = make_trainer(rows, {"solution_key": "solution"}).parts
    with pytest.raises(DataError, match=r"no worked solution can be replayed: 0 answers .* 4 the verifier rejects"):
        record_solutions(parts, [BOX])


def test_a_run_replays_prefilled_answers_from_its_first_step(make_trainer, tmp_path):
    """B = 4, rho = 0.5: 2 questions are replayed with K - 1 = 3 new answers each, 2 are new with K = 4."""
    parts = make_trainer().parts
    record_solutions(parts, [BOX, "{answer}=\\boxed{{answer}}"])
    parts.experience.save(tmp_path / "solutions")
    trainer = make_trainer()
    note = load_prefill(trainer.parts, tmp_path / "solutions")
    assert note.startswith("experience: 24 answers of 12 questions from ")
    result = trainer.step()
    assert isinstance(trainer.parts.engine, ScriptedEngine)
    assert sorted(samples for _, samples in trainer.parts.engine.calls) == [3, 3, 4, 4]
    assert result.metrics["experience/replayed_questions"] == 2
    assert result.metrics["experience/scored_answers"] == 4
    assert result.metrics["groups/mixed"] == 0.5
    # The recorded log-probs are those of the very policy that begins the run.
    assert result.metrics["ratio_replayed/min"] == pytest.approx(1.0, abs=1e-5)
    assert result.metrics["ratio_replayed/max"] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"policy": {"generation": {"max_new_tokens": 4}}}, "answers of up to 13 tokens, more than policy.generation"),
        ({"source": {**GSM8K_LIKE, "id_key": "question"}}, "none of its questions is in data.train"),
    ],
)
def test_a_file_that_does_not_fit_the_recipe_is_refused(make_trainer, tmp_path, sections, message):
    """The longest solution is `12+1=13`, newline, box, 13, } and the end token: 13 tokens."""
    parts = make_trainer().parts
    record_solutions(parts, [BOX])
    parts.experience.save(tmp_path / "solutions")
    policy = {"model_name": "embedded:chain-qwen2", "train_global_batch_size": 16, "max_total_sequence_length": 128}
    other = make_trainer(**{**sections, "policy": {**policy, **sections.get("policy", {})}})
    with pytest.raises(ConfigError, match=message):
        load_prefill(other.parts, tmp_path / "solutions")


def test_a_file_of_another_tokenizer_is_refused(make_trainer, tmp_path):
    parts = make_trainer().parts
    record_solutions(parts, [BOX])
    parts.experience.save(tmp_path / "solutions")
    path = tmp_path / "solutions" / "answers-00000-of-00001.parquet"
    table = pq.read_table(path)
    rows = table.to_pydict()
    rows["token_ids"][0][0] = 40_000
    pq.write_table(pa.table(rows, schema=table.schema), path)
    with pytest.raises(ConfigError, match="token id 40000, but the tokenizer only 21 tokens"):
        load_prefill(make_trainer().parts, tmp_path / "solutions")


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({}, "experience.prefill_path: required"),
        ({"experience": {"prefill_path": "{tmp}"}}, "exists: move it away"),
        ({"experience": {"prefill_path": "{tmp}/new", "enabled": False}}, "experience.enabled = false"),
        ({"experience": {"prefill_path": "{tmp}/new"}, "sft": {"warm_start": True}}, "sft.warm_start = true"),
        ({"experience": {"prefill_path": "{tmp}/new"}}, "data.train.solution_key is null"),
    ],
)
def test_a_recipe_that_cannot_be_prefilled_says_which_key_to_change(tmp_path, sections, message):
    raw = make_config(tmp_path).model_dump(mode="json")
    for name, values in sections.items():
        raw[name] |= {key: str(value).format(tmp=tmp_path) if key == "prefill_path" else value
                      for key, value in values.items()}  # fmt: skip
    with pytest.raises(ConfigError, match=message):
        check_prefill_target(parse_recipe(raw))


def test_a_prefill_that_is_not_there_is_named_with_the_command_that_makes_it(tmp_path):
    absent = {"prefill_path": str(tmp_path / "absent")}
    with pytest.raises(ConfigError, match=r"absent'.*exgrpo prefill RECIPE"):
        run_inputs.check_prefill(make_config(tmp_path, experience=absent), tmp_path / "run")
    run_inputs.check_prefill(make_config(tmp_path, experience={**absent, "enabled": False}), tmp_path / "run")
    run_inputs.check_prefill(make_config(tmp_path), tmp_path / "run")


def test_a_run_does_not_begin_with_the_folder_that_it_would_empty_first(tmp_path):
    own = tmp_path / "run" / "experience"
    own.mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"experience\.prefill_path = .*emptied first: move it away"):
        run_inputs.check_prefill(make_config(tmp_path, experience={"prefill_path": str(own)}), own)
