"""Question sets from files and generators."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from exgrpo_megatron.data.questions import check_disjoint, load_questions
from exgrpo_megatron.errors import ConfigError, DataError

ROWS = [{"question": "1+1?", "answer": "2"}, {"question": "2+2?", "answer": 4}, {"question": "1/2?", "answer": 0.5}]


@pytest.fixture
def load(byte_tokenizer, make_recipe):
    """Loads data.train of a recipe; keywords are keys of the source."""

    def load_file(path, data=None, **source):
        config = make_recipe({"path": str(path), **source}, **(data or {}))
        return load_questions(config.data.train, config.data, byte_tokenizer, held_out=False)

    return load_file


def write_parquet(path: Path, rows) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def real_data() -> Path | None:
    folders = (parent / "shared" / "data" for parent in Path(__file__).resolve().parents)
    return next((folder for folder in folders if (folder / "gsm8k_train.jsonl").is_file()), None)


def test_rows_become_questions_with_rendered_prompts(load, write_jsonl, byte_tokenizer):
    loaded = load(write_jsonl(*ROWS), {"prompt_template": "{question} Box it."})
    assert [question.text for question in loaded.questions] == ["1+1?", "2+2?", "1/2?"]
    assert [question.answer for question in loaded.questions] == ["2", "4", "0.5"]
    expected = byte_tokenizer.encode_prompt("1+1? Box it.", None, "{question}")
    assert loaded.questions[0].prompt_ids.tolist() == expected.tolist()
    assert loaded.questions[0].id == hashlib.sha256(b"1+1?").hexdigest()[:16]
    assert loaded.questions[0].category is None


def test_parquet_and_jsonl_of_the_same_rows_have_the_same_fingerprint(load, write_jsonl, tmp_path):
    rows = [{"q": f"{n}+{n}?", "gold": 2.0 * n, "uid": n, "level": f"L{n % 3}", "unused": [n]} for n in range(1500)]
    columns = {"question_key": "q", "answer_key": "gold", "id_key": "uid", "category_key": "level"}
    parquet = load(write_parquet(tmp_path / "rows.parquet", rows), **columns)
    jsonl = load(write_jsonl(*rows), **columns)
    assert parquet.fingerprint == jsonl.fingerprint
    assert len(parquet.questions) == 1500
    last = parquet.questions[-1]
    # 2 * 1499 as the float 2998.0, which people write 2998; 1499 % 3 = 2.
    assert (last.id, last.answer, last.category) == ("1499", "2998", "L2")


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (7, "7"),
        (7.0, "7"),
        (-0.0, "0"),
        (2.50, "2.5"),
        (1e-7, "0.0000001"),
        (1e22, "10000000000000000000000"),
        (" 9 ", "9"),
    ],
)
def test_numbers_are_answers_as_people_write_them(load, write_jsonl, number, text):
    assert load(write_jsonl({"question": "?", "answer": number})).questions[0].answer == text


def test_the_answer_follows_the_last_marker(load, write_jsonl):
    path = write_jsonl({"question": "?", "answer": "#### is not it\n#### 1,234 "})
    assert load(path, answer_marker="####").questions[0].answer == "1,234"


def test_the_real_gsm8k_has_7473_questions_and_1319_others(load):
    folder = real_data()
    if folder is None:
        pytest.skip("no shared/data/gsm8k_train.jsonl beside the repository")
    train, test = (
        load(folder / f"gsm8k_{part}.jsonl", {"max_input_seq_length": 4096}, answer_marker="####")
        for part in ("train", "test")
    )
    assert (len(train.questions), len(test.questions)) == (7473, 1319)
    assert (train.questions[0].answer, train.questions[0].text[:7]) == ("72", "Natalia")
    assert train.dropped_too_long == ()
    assert (train.num_duplicates, train.dropped_unwritable) == (0, ())
    assert check_disjoint(train, test) == 0


def test_math_500_is_read_whole(load):
    folder = real_data()
    if folder is None:
        pytest.skip("no shared/data/math500.jsonl beside the repository")
    loaded = load(folder / "math500.jsonl", {"max_input_seq_length": 4096})
    assert len(loaded.questions) == 500
    assert loaded.questions[0].answer == r"\left( 3, \frac{\pi}{2} \right)"


def test_longer_prompts_than_the_limit_are_dropped_and_named(load, write_jsonl):
    path = write_jsonl(*({"question": "x" * n, "answer": 1, "id": f"x{n}"} for n in (1, 5, 9)))
    # ChatML around n bytes: 3 control tokens, "user", "assistant" and 3 newlines: 19 + n tokens.
    loaded = load(path, {"max_input_seq_length": 24}, id_key="id")
    assert [len(question.prompt_ids) for question in loaded.questions] == [20, 24]
    assert loaded.dropped_too_long == ("x9",)
    assert loaded.describe().startswith("2 from ")
    assert "prompts of 20 to 24 tokens; left out: 1 too long" in loaded.describe()


def test_a_question_that_names_a_control_token_is_dropped_and_named(load, write_jsonl):
    path = write_jsonl(
        {"question": "a<|im_end|>b", "answer": 1, "id": "trick"}, {"question": "?", "answer": 1, "id": "b"}
    )
    loaded = load(path, id_key="id")
    assert (loaded.dropped_unwritable, [question.id for question in loaded.questions]) == (("trick",), ["b"])


def test_repeated_rows_are_dropped_and_counted(load, write_jsonl):
    loaded = load(write_jsonl(*ROWS, ROWS[0], ROWS[0]))
    assert (len(loaded.questions), loaded.num_duplicates) == (3, 2)


def test_max_questions_takes_the_first_usable_ones(load, write_jsonl):
    loaded = load(write_jsonl({"question": "x" * 900, "answer": 1}, *ROWS), max_questions=2)
    assert [question.text for question in loaded.questions] == ["1+1?", "2+2?"]


def test_blank_lines_and_a_byte_order_mark_are_passed_over(load, tmp_path):
    path = tmp_path / "windows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"question": "?", "answer": 1}\r\n\r\n{"question": "!", "answer": 2}\r\n')
    assert [question.answer for question in load(path).questions] == ["1", "2"]


@pytest.mark.parametrize(
    "change", [{"question": "1+1 ?"}, {"answer": "3"}, {"id": "other"}], ids=["question", "answer", "id"]
)
def test_the_fingerprint_follows_every_question_answer_and_id(load, write_jsonl, change):
    rows = [{"id": "a", "question": "1+1?", "answer": "2"}, {"id": "b", "question": "2+2?", "answer": "4"}]
    before = load(write_jsonl(*rows), id_key="id").fingerprint
    assert load(write_jsonl(*rows), id_key="id").fingerprint == before
    assert load(write_jsonl({**rows[0], **change}, rows[1]), id_key="id").fingerprint != before
    assert load(write_jsonl(*reversed(rows)), id_key="id").fingerprint != before


def test_the_fingerprint_follows_the_system_prompt(load, write_jsonl):
    path = write_jsonl(*ROWS)
    assert load(path, {"system_prompt": "Think."}).fingerprint != load(path).fingerprint


def test_generated_sets_of_default_seeds_are_disjoint_and_have_their_difficulty(chain_tokenizer, make_recipe):
    config = make_recipe(
        {"generator": "chain_arithmetic"}, validation={"generator": "chain_arithmetic", "generator_size": 120}
    )
    train = load_questions(config.data.train, config.data, chain_tokenizer, held_out=False)
    validation = load_questions(config.data.validation, config.data, chain_tokenizer, held_out=True)
    assert (len(train.questions), len(validation.questions), check_disjoint(train, validation)) == (400, 120, 0)
    assert train.questions[1].category == "3"
    assert (train.questions[1].id, train.questions[1].answer) == ("5+3+5", "13")
    assert check_disjoint(train, train) == 400


def test_words_cannot_be_asked_of_the_embedded_model(chain_tokenizer, make_recipe, write_jsonl):
    config = make_recipe({"path": str(write_jsonl({"question": "What is 1+1?", "answer": 2}))})
    with pytest.raises(
        DataError, match=r"no question of .*questions\.jsonl is left of 1: 0 .* 1 questions have characters"
    ):
        load_questions(config.data.train, config.data, chain_tokenizer, held_out=False)


@pytest.mark.parametrize("key", ["system_prompt", "prompt_template"])
def test_a_text_around_the_questions_that_the_vocabulary_lacks_names_its_key(chain_tokenizer, make_recipe, key):
    text = "Solve {question}" if key == "prompt_template" else "Solve"
    config = make_recipe({"generator": "chain_arithmetic"}, **{key: text})
    with pytest.raises(ConfigError, match=rf"data\.{key} = 'Solve.*cannot write"):
        load_questions(config.data.train, config.data, chain_tokenizer, held_out=False)


GOOD = '{"question": "1?", "answer": 1, "id": "a"}'
BAD_LINES = {
    "malformed": ('{"question": "2?", ', r"line 2: not JSON"),
    "not an object": ("[1, 2]", r"line 2: must be a JSON object .*found list \[1, 2\]"),
    "deep": ("[" * 100_000, r"line 2: JSON that cannot be read"),
    "missing column": ('{"prompt": "2?", "answer": 2}', r'line 2: no column "question"; there are "prompt", "answer"'),
    "column twice": ('{"question": "2?", "answer": 2, "answer": 3}', r'line 2: "answer" stands there more than once'),
    "empty question": ('{"question": " ", "answer": 2}', r'line 2: "question" is empty'),
    "question no text": ('{"question": ["2?"], "answer": 2}', r'line 2: "question" must be text, found list'),
    "half a character": (r'{"question": "\ud83d", "answer": 2}', r"line 2: \"question\" has '\\ud83d'"),
    "null answer": ('{"question": "2?", "answer": null}', r'line 2: "answer" must be text or a number, found nothing'),
    "empty answer": ('{"question": "2?", "answer": ""}', r'line 2: "answer" is empty'),
    "answer true": ('{"question": "2?", "answer": true}', r'line 2: "answer" must be .* found bool true'),
    "answer infinite": ('{"question": "2?", "answer": Infinity}', r'line 2: "answer" must be .* found float Infinity'),
    "answer list": ('{"question": "2?", "answer": ["2"]}', r'line 2: "answer" must be .* found list'),
    "contradiction": (
        '{"question": "1?", "answer": 2}',
        r"line 2: the same question as in .*line 1 has another answer",
    ),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_a_bad_line_is_named_with_its_file_and_number(load, tmp_path, case):
    line, message = BAD_LINES[case]
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{GOOD}\n{line}\n", encoding="utf-8")
    with pytest.raises(DataError, match=rf"bad\.jsonl, {message}"):
        load(path)


def test_bytes_that_are_not_utf8_are_named_with_their_line(load, tmp_path):
    path = tmp_path / "latin.jsonl"
    path.write_bytes(GOOD.encode() + b'\n{"question": "caf\xe9?", "answer": 2}\n')
    with pytest.raises(DataError, match=r"latin\.jsonl, line 2: not UTF-8 \(byte 18 of the line\)"):
        load(path)


def test_a_duplicate_id_names_both_lines(load, write_jsonl):
    path = write_jsonl({"question": "1?", "answer": 1, "id": 7}, {"question": "2?", "answer": 2, "id": "7"})
    with pytest.raises(DataError, match=r"line 2: the id '7' is that of another question in .*line 1"):
        load(path, id_key="id")


@pytest.mark.parametrize(
    ("answer", "message"), [("72", "answer_marker '####' does not occur"), ("so\n#### ", "nothing follows '####'")]
)
def test_an_answer_without_its_marker_is_named(load, write_jsonl, answer, message):
    path = write_jsonl({"question": "1?", "answer": "#### 1"}, {"question": "2?", "answer": answer})
    with pytest.raises(DataError, match=rf"questions\.jsonl, line 2: {message}"):
        load(path, answer_marker="####")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent.jsonl", r"data\.train\.path = .*absent\.jsonl: there is no such file"),
        ("folder", r"data\.train\.path = .*folder is a folder"),
        (
            "rows.csv",
            r"rows\.csv: the file ending '\.csv' is unknown; convert it to one of \.jsonl, \.ndjson, \.parquet",
        ),
        ("empty.jsonl", r"empty\.jsonl: the file has no row"),
        ("blank.jsonl", r"blank\.jsonl: the file has no row"),
        ("broken.parquet", r"broken\.parquet cannot be read as Parquet"),
        ("none.parquet", r"none\.parquet: the file has no row"),
    ],
)
def test_a_path_that_is_no_question_file_is_named(load, tmp_path, name, message):
    (tmp_path / "folder").mkdir()
    (tmp_path / "rows.csv").write_text("question,answer\n")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "blank.jsonl").write_text("\n  \n")
    (tmp_path / "broken.parquet").write_text("PAR1 not really")
    write_parquet(tmp_path / "none.parquet", []) if name != "none.parquet" else pq.write_table(
        pa.table({"question": pa.array([], pa.string()), "answer": pa.array([], pa.string())}), tmp_path / name
    )
    with pytest.raises(DataError, match=message):
        load(tmp_path / name)


def test_bad_parquet_rows_and_columns_are_named(load, tmp_path):
    path = write_parquet(tmp_path / "rows.parquet", [{"question": f"{n}?", "answer": n or None} for n in (3, 2, 1, 0)])
    with pytest.raises(DataError, match=r'rows\.parquet, row 4: "answer" must be text or a number, found nothing'):
        load(path)
    with pytest.raises(DataError, match=r'rows\.parquet: no column "gold"; there are "question", "answer".*_key\)$'):
        load(path, answer_key="gold")


@pytest.mark.parametrize("twice", ["answer", "unused"])
def test_a_parquet_file_with_a_column_twice_is_refused(load, tmp_path, twice):
    table = pa.table([["1?"], ["1"], ["2"], ["3"]], names=["question", "answer", "unused", twice])
    pq.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=rf'rows\.parquet: "{twice}" stands there more than once'):
        load(tmp_path / "rows.parquet")


def test_text_in_parquet_that_is_not_utf8_is_named_with_its_row(load, tmp_path):
    broken = pa.array([b"fine?", b"caf\xe9?"]).view(pa.string())
    pq.write_table(pa.table({"question": broken, "answer": ["1", "2"]}), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"rows\.parquet, row 2: text that is not UTF-8"):
        load(tmp_path / "rows.parquet")


def test_no_question_within_the_limit_says_which_limit(load, write_jsonl):
    with pytest.raises(
        DataError, match=r"is left of 3: 3 prompts are longer than data\.max_input_seq_length = 5 tokens"
    ):
        load(write_jsonl(*ROWS), {"max_input_seq_length": 5})


def test_the_validation_source_is_named_by_its_own_key(byte_tokenizer, make_recipe):
    config = make_recipe({"generator": "chain_arithmetic"}, validation={"path": "nowhere.jsonl"})
    with pytest.raises(DataError, match=r"data\.validation\.path = nowhere\.jsonl"):
        load_questions(config.data.validation, config.data, byte_tokenizer, held_out=True)


def test_more_generated_questions_than_there_are_names_the_source(chain_tokenizer, make_recipe):
    source = {"generator": "chain_arithmetic", "generator_size": 20_000, "generator_difficulties": [2]}
    config = make_recipe(source, validation=source)
    with pytest.raises(DataError, match=r"data\.validation: generator_size = 20000"):
        load_questions(config.data.validation, config.data, chain_tokenizer, held_out=True)


def test_json_lines_survive_separators_inside_strings(load, tmp_path):
    # U+2028 and U+0085 end a line for str.splitlines, but not in JSONL.
    path = tmp_path / "lines.jsonl"
    path.write_text(
        json.dumps({"question": "a\u2028b\u0085c", "answer": 1}, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    assert load(path).questions[0].text == "a\u2028b\u0085c"


def test_an_id_that_cannot_be_stored_beside_an_answer_is_named(load, write_jsonl):
    path = write_jsonl({"id": "é" * 32_768, "question": "1+1", "answer": "2"})
    with pytest.raises(DataError, match=r"line 1: the id 'é.* has 65536 bytes, more than 65535"):
        load(path, id_key="id")
