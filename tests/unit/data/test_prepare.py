"""Question files from others' sets. The files here have the real schemas, written with pyarrow:

* OpenR1-Math-220k: the dataset card of open-r1/OpenR1-Math-220k (`dataset_info` in its README.md);
* DAPO-Math-17k: the card of LuyiCui/DAPO-Math-17k, a copy of BytedTsinghua-SIA/DAPO-Math-17k (text as
  `extra_info.index`);
* verl with demonstrations: the card of SII-Enigma/OpenR1-Math-R1-8.5k, made with LUFFY's script (`target`);
* NuminaMath: the card of AI-MO/NuminaMath-1.5, which writes "proof" and "notfound" as answers.
"""

import hashlib
import json
import os
import resource
import signal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from exgrpo_megatron.config import DataConfig
from exgrpo_megatron.data.foreign import ForeignFile, source_format
from exgrpo_megatron.data.foreign_kinds import SolutionOf, SourceFormat
from exgrpo_megatron.data.prepare import PrepareRequest, prepare
from exgrpo_megatron.data.questions import load_questions
from exgrpo_megatron.errors import ConfigError, DataError, UserError

MESSAGES = pa.list_(pa.struct([("content", pa.string()), ("role", pa.string())]))
REWARD_MODEL = pa.struct([("ground_truth", pa.string()), ("style", pa.string())])
OPENR1 = pa.schema(
    [(name, pa.string()) for name in
     ("problem", "solution", "answer", "problem_type", "question_type", "source", "uuid")]
    + [("is_reasoning_complete", pa.list_(pa.bool_())), ("generations", pa.list_(pa.string())),
       ("correctness_math_verify", pa.list_(pa.bool_())), ("correctness_llama", pa.list_(pa.bool_())),
       ("finish_reasons", pa.list_(pa.string())), ("correctness_count", pa.int64()), ("messages", MESSAGES)]
)  # fmt: skip
DAPO = pa.schema(
    [("data_source", pa.string()), ("prompt", MESSAGES), ("ability", pa.string()), ("reward_model", REWARD_MODEL),
     ("extra_info", pa.struct([("index", pa.string())]))]
)  # fmt: skip
LUFFY = pa.schema(
    [("data_source", pa.string()), ("prompt", MESSAGES), ("target", MESSAGES), ("ability", pa.string()),
     ("reward_model", REWARD_MODEL), ("extra_info", pa.struct([("index", pa.int64()), ("split", pa.string())]))]
)  # fmt: skip
NUMINA = pa.schema(
    [(name, pa.string()) for name in ("problem", "solution", "answer", "problem_type", "question_type",
                                      "problem_is_valid", "solution_is_valid", "source")] + [("synthetic", pa.bool_())]
)  # fmt: skip


def openr1(problem, answer, **other):
    row = {
        "problem": problem, "solution": f"So it is {answer}.", "answer": answer, "problem_type": "Algebra",
        "question_type": "math-word-problem", "source": "olympiads", "uuid": f"u-{problem}",
        "is_reasoning_complete": [True, True], "generations": ["<think>..</think>", "<think>.</think>"],
        "correctness_math_verify": [True, False], "correctness_llama": None, "finish_reasons": None,
        "correctness_count": 1,
        "messages": [{"role": "user", "content": problem},
                     {"role": "assistant", "content": f"<think>hm</think> \\boxed{{{answer}}}"}],
    }  # fmt: skip
    return {**row, **other}


def dapo(problem, answer, index, **other):
    content = (
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
        f"$Answer (without quotes) where $Answer is the answer to the problem.\n\n{problem}\n\n"
        'Remember to put your answer on its own line after "Answer:".'
    )
    row = {
        "data_source": "math_dapo", "prompt": [{"role": "user", "content": content}], "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"}, "extra_info": {"index": index},
    }  # fmt: skip
    return {**row, **other}


def write(path, rows, schema=None):
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read(path):
    if path.suffix == ".parquet":
        return pq.read_table(path).to_pylist()
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def unchecked(files, out, **other):
    """Without Math-Verify's processes, which take half a second to start."""
    return prepare(PrepareRequest(files, out, **{"check_answers": False, **other}))


def test_a_raw_file_as_training_questions_is_answered_with_how_to_prepare_it(tmp_path, chain_tokenizer):
    path = write(tmp_path / "dapo.parquet", [dapo("1+1", "2", "a")], DAPO)

    def refused(**keys):
        data = DataConfig(train={"path": str(path), **keys}, max_input_seq_length=64)
        with pytest.raises(DataError) as error:
            load_questions(data.train, data, chain_tokenizer, held_out=False)
        return str(error.value)

    assert 'no column "question", "answer"; there are "data_source", "prompt"' in refused()
    assert refused().endswith("(verl), `exgrpo data prepare FILE --out train.jsonl` makes one of questions")
    assert refused(question_key="prompt", answer_key="ability").endswith(
        "; `exgrpo data prepare` makes a question file of such a one"
    )


def test_openr1_math_becomes_a_question_file_and_every_row_left_out_has_its_reason(tmp_path):
    rows = [
        openr1("What is $1+1$?", "2"),
        openr1("Prove it.", "proof", question_type="proof"),
        openr1("Which?  (A) 1 (B) 2", "B", question_type="MCQ"),
        openr1("No answer", None),
        openr1("", "3"),
        openr1("Wrong everywhere", "4", correctness_math_verify=[False, False], correctness_llama=[False]),
        openr1("What  is\n$1+1$?", "2", uuid="other"),
        openr1("x" * 101, "5"),
        openr1("Half of one?", "\\frac{1}{2}", correctness_math_verify=[False], correctness_llama=[True], uuid=None),
        openr1("Contradiction", "7", uuid="c1"),
        openr1("Contradiction", "8", uuid="c2"),
    ]
    source, out = write(tmp_path / "train.parquet", rows, OPENR1), tmp_path / "q.jsonl"
    report = unchecked(
        [source], out, drop_types=["mcq", "riddle"], verified=True, max_question_chars=100, solutions=SolutionOf.written
    )
    # By hand: two of eleven stay; "contradictory" takes both rows; white space alone makes no new question.
    assert read(out) == [
        {"id": "u-What is $1+1$?", "question": "What is $1+1$?", "answer": "2", "category": "Algebra",
         "solution": "So it is 2."},
        {"id": hashlib.sha256(b"Half of one?").hexdigest()[:16], "question": "Half of one?",
         "answer": "\\frac{1}{2}", "category": "Algebra", "solution": "So it is \\frac{1}{2}."},
    ]  # fmt: skip
    written = json.loads((tmp_path / "q.report.json").read_text())
    assert (written["rows"], written["kept"], written["inputs"][str(source)]["format"]) == (11, 2, "openr1")
    assert written["dropped"] == {
        "no_question": 1, "no_answer": 2, "question_type": 1, "not_verified": 1, "too_many_characters": 1,
        "contradictory": 2, "duplicate": 1,
    }  # fmt: skip
    assert written["examples"]["question_type"][0]["place"] == f"{source}, row 3"
    assert (written["types_not_found"], written["ids_made"]) == (["riddle"], 1)
    assert written["question_types"] == {"math-word-problem": 9, "proof": 1, "MCQ": 1}
    assert report.num_rows == report.num_kept + sum(report.dropped.values())


def test_reasoning_is_the_assistants_message_of_openr1_and_the_target_of_verl(tmp_path):
    one = write(tmp_path / "one.parquet", [openr1("Q", "2")], OPENR1)
    target = [{"role": "assistant", "content": "<think>aha</think> \\boxed{3}"}]
    prompt = [{"role": "system", "content": "Think."}, {"role": "user", "content": "R"}]
    two = write(
        tmp_path / "two.parquet",
        [dapo("R", "3", 5, prompt=prompt, target=target, extra_info={"index": 5, "split": "default"})],
        LUFFY,
    )
    report = unchecked([one, two], tmp_path / "q.parquet", solutions=SolutionOf.reasoning)
    assert [(row["solution"], row["id"], row["category"]) for row in read(tmp_path / "q.parquet")] == [
        ("<think>hm</think> \\boxed{2}", "u-Q", "Algebra"),
        ("<think>aha</think> \\boxed{3}", "5", "math_dapo"),
    ]
    assert report.num_system_prompts == 1


def test_dapos_instructions_are_cut_and_its_hundredfold_rows_kept_once(tmp_path):
    # The published file has 1,791,700 rows of about 17,400 questions.
    rows = [dapo(f"Find {n}.", str(n), f"i{n}") for n in range(5)] * 100
    out = tmp_path / "q.parquet"
    report = unchecked([write(tmp_path / "dapo.parquet", rows, DAPO)], out)
    assert [(row["id"], row["question"], row["answer"]) for row in read(out)] == [
        (f"i{n}", f"Find {n}.", str(n)) for n in range(5)
    ]
    assert report.dropped == {"duplicate": 495}
    assert list(report.instructions.values()) == [500]


def test_rows_of_verl_that_are_no_single_question_are_left_out(tmp_path):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    rows = [
        dapo("A", "1", "same"),
        dapo("B", "2", "same"),
        dapo("C", "3", "c", prompt=turns),
        dapo("D", None, "d"),
        {"data_source": "gsm8k", "prompt": 'E Let\'s think step by step and output the final answer after "####".',
         "reward_model": {"ground_truth": ["12"]}},
        {"data_source": "gsm8k", "prompt": "F", "reward_model": {"ground_truth": {"target": "1"}}},
        {"data_source": "gsm8k", "prompt": "\ud800", "reward_model": {"ground_truth": "1"}},
        {"prompt": "G", "reward_model": {"ground_truth": 2.0}},
    ]  # fmt: skip
    report = unchecked([write(tmp_path / "verl.jsonl", rows)], tmp_path / "q.jsonl")
    kept = read(tmp_path / "q.jsonl")
    assert [(row["question"], row["answer"], row["category"]) for row in kept] == [
        ("A", "1", "math_dapo"), ("B", "2", "math_dapo"), ("E", "12", "gsm8k"), ("G", "2", "unknown"),
    ]  # fmt: skip
    assert report.dropped == {"not_one_turn": 1, "no_answer": 2, "no_question": 1}
    assert (report.num_ids_replaced, report.num_ids_made) == (1, 2)
    assert len({row["id"] for row in kept}) == 4


def test_the_answer_of_verl_files_is_never_taken_for_a_worked_solution(tmp_path):
    # open-r1/DAPO-Math-17k-Processed: `prompt` is the bare question, `solution` the answer.
    rows = [{"prompt": "Q", "solution": "34", "data_source": "math_dapo", "reward_model": {"ground_truth": "34"}}]
    source = write(tmp_path / "processed.jsonl", rows)
    with pytest.raises(DataError, match="has them in no column"):
        ForeignFile(source, None, SolutionOf.written)
    assert [found.question for found in ForeignFile(source)] == ["Q"]


def test_numinamath_has_words_for_no_answer_and_flags_of_validity(tmp_path):
    def row(problem, answer, valid="Yes"):
        other = {"problem_type": "Algebra", "question_type": "other", "source": "s", "synthetic": False}
        return {"problem": problem, "answer": answer, "solution": "s", **other,
                "problem_is_valid": "Yes", "solution_is_valid": valid}  # fmt: skip

    rows = [row("a", "1"), row("b", "notfound"), row("c", "proof"), row("d", "2", "Incomplete")]
    report = unchecked([write(tmp_path / "n.parquet", rows, NUMINA)], tmp_path / "q.jsonl", verified=True)
    assert (report.num_kept, dict(report.dropped)) == (1, {"no_answer": 2, "not_verified": 1})


def test_math_verify_decides_which_answers_are_understood_and_which_are_the_same(tmp_path):
    rows = [
        openr1("half", "\\frac{1}{2}"), openr1("half", "0.5"),  # the same: the first stays
        openr1("other", "1"), openr1("other", "2"),  # not the same
        openr1("long", "1+" * 200 + "1"),  # more than env.math.max_boxed_chars
        openr1("mixed", "1+" * 200 + "1"), openr1("mixed", "201"),  # the one that is understood stays
    ]  # fmt: skip
    report = prepare(PrepareRequest([write(tmp_path / "t.parquet", rows, OPENR1)], tmp_path / "q.jsonl", num_workers=1))
    kept = [(row["question"], row["answer"]) for row in read(tmp_path / "q.jsonl")]
    assert kept == [("half", "\\frac{1}{2}"), ("mixed", "201")]
    assert report.dropped == {"duplicate": 1, "contradictory": 2, "not_understood": 2}


def test_tokens_are_counted_with_the_models_own_tokenizer(tmp_path, byte_folder):
    rows = [openr1("x" * length, "1", uuid=f"{length}") for length in (10, 30)] + [openr1("<|im_end|>", "1")]
    source = write(tmp_path / "t.parquet", rows, OPENR1)
    # One token a byte: <|im_start|> user newline ... <|im_end|> newline, <|im_start|> assistant newline: 6+1+1+11 = 19.
    report = unchecked([source], tmp_path / "q.jsonl", tokenizer=byte_folder, max_prompt_tokens=19 + 10)
    assert [row["id"] for row in read(tmp_path / "q.jsonl")] == ["10"]
    assert report.dropped == {"too_many_tokens": 1, "tokenizer_cannot_write": 1}


def test_the_files_are_what_a_recipe_reads_and_held_out_questions_do_not_depend_on_the_rest(tmp_path, byte_tokenizer):
    rows = [dapo(f"Find {n}.", str(n), f"i{n}") for n in range(400)]
    source = write(tmp_path / "dapo.parquet", rows, DAPO)
    first, second = tmp_path / "held.jsonl", tmp_path / "held_2.jsonl"
    report = unchecked([source], tmp_path / "q.parquet", held_out=first, held_out_share=0.1)
    unchecked([write(tmp_path / "part.parquet", rows[:200], DAPO)], tmp_path / "q2.jsonl", held_out=second,
              held_out_share=0.1)  # fmt: skip
    # Binomial(400, 0.1): 40, deviation 6.
    assert 22 <= report.num_held_out <= 58
    assert [row for row in read(first) if int(row["answer"]) < 200] == read(second)
    data = DataConfig.model_validate({
        "train": {"path": str(tmp_path / "q.parquet"), "id_key": "id", "category_key": "category"},
        "max_input_seq_length": 1024,
    })  # fmt: skip
    loaded = load_questions(data.train, data, byte_tokenizer, held_out=False)
    assert len(loaded.questions) + report.num_held_out == 400
    assert loaded.questions[0].category == "math_dapo"


@pytest.mark.parametrize(
    ("columns", "named", "text"),
    [
        ({"problem": "a", "answer": "b", "prompt": "c", "reward_model": {}}, None, "the columns fit openr1 and verl"),
        ({"text": "a"}, None, "of no known format"),
        ({"text": "a"}, SourceFormat.verl, "--format verl needs the columns prompt, reward_model; there are text"),
    ],
)
def test_a_format_that_the_columns_do_not_decide_must_be_named(tmp_path, columns, named, text):
    with pytest.raises(DataError, match=text):
        source_format(write(tmp_path / "a.jsonl", [columns]), named)


def test_a_named_format_decides(tmp_path):
    rows = [{"problem": "a", "answer": "b", "prompt": "c", "reward_model": {}}]
    assert source_format(write(tmp_path / "a.jsonl", rows), SourceFormat.openr1) is SourceFormat.openr1


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"held_out_share": 0.1}, "--held-out-share is for --held-out"),
        ({"max_prompt_tokens": 5}, "--tokenizer and --max-prompt-tokens"),
        ({"category": "level"}, "--category level: no such column"),
        ({"held_out": "q.jsonl"}, "a file of its own"),
        ({"max_question_chars": 0.5}, r"no question of 1 rows is left \(1 too_many_characters\)"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(tmp_path, other, text):
    source = write(tmp_path / "t.jsonl", [openr1("Q", "2")])
    if "held_out" in other:
        other["held_out"] = tmp_path / other["held_out"]
    with pytest.raises(UserError, match=text):
        unchecked([source], tmp_path / "q.jsonl", **other)
    assert os.listdir(tmp_path) == ["t.jsonl"]


def test_a_damaged_last_row_leaves_nothing_half_written_and_what_exists_is_never_replaced(tmp_path):
    source = write(tmp_path / "t.jsonl", [openr1(f"Q{n}", "2") for n in range(3000)])
    with source.open("a") as file:
        file.write('{"problem": "cut o')
    with pytest.raises(DataError, match="line 3001: not JSON"):
        unchecked([source], tmp_path / "q.parquet")
    assert os.listdir(tmp_path) == ["t.jsonl"]
    (tmp_path / "q.parquet").write_text("precious")
    with pytest.raises(ConfigError, match="there is something already"):
        unchecked([source], tmp_path / "q.parquet")


def test_a_full_disk_leaves_nothing(tmp_path):
    source = write(tmp_path / "t.jsonl", [openr1(f"{n:0400d}", "2") for n in range(3000)])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # A limit on the size of files fails a write as a full disk does.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(UserError, match="make room"):
            unchecked([source], tmp_path / "q.jsonl")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == ["t.jsonl"]


def test_the_command_says_what_it_left_out(tmp_path, capsys):
    from exgrpo_megatron import cli

    source = write(tmp_path / "t.parquet", [openr1("Q", "2"), openr1("R", None)], OPENR1)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        cli.main(["data", "prepare", str(source), "--out", str(tmp_path / "q.jsonl"), "--no-check-answers"])
    said = capsys.readouterr().out
    assert ended.value.code == 0
    assert "2 rows of 1 files (1 of format openr1): 1 kept" in said
    assert f"1 left out: no answer ({source}, row 2)" in said
    assert signal.getsignal(signal.SIGTERM) is before
