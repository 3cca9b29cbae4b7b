"""Sets of `exgrpo eval`: columns of ARC, GPQA and MMLU-Pro, and what of a row is refused."""

import json

import pytest

from exgrpo_megatron.config import DataConfig, EvalSetConfig
from exgrpo_megatron.data.eval_sets import load_eval_set
from exgrpo_megatron.errors import DataError

DATA = DataConfig.model_validate(
    {"train": {"generator": "chain_arithmetic"}, "prompt_template": "Q: {question}", "max_input_seq_length": 4096}
)
ARC = {"question": "Which is hot?", "choices": {"text": ["ice", "fire"], "label": ["1", "2"]}, "answerKey": "2"}
GPQA = {"Question": "Spin?", "Correct Answer": "1/2 ", "Incorrect Answer 1": "0", "Incorrect Answer 2": "1"}
MMLU = {"question": "2+2?", "options": ["4", "5", "6"], "answer": "A", "answer_index": 0, "category": "math"}
COLUMNS = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2")
LETTERED = {"choices_key": "options"}


def load(tmp_path, tokenizer, rows, seed=1, **keys):
    path = tmp_path / "set.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_eval_set("s", EvalSetConfig(path=str(path), **keys), DATA, tokenizer, seed).questions


@pytest.mark.parametrize(
    ("row", "keys", "text", "answer"),
    [
        (ARC, {"choices_key": "choices", "answer_key": "answerKey"}, "Which is hot?\n\nA. ice\nB. fire", "B"),
        (
            GPQA,
            {"question_key": "Question", "answer_key": COLUMNS[0], "choices_key": COLUMNS, "answer_form": "text"},
            "Spin?\n\nA. 1/2\nB. 0\nC. 1",
            "A",
        ),
        (MMLU, LETTERED, "2+2?\n\nA. 4\nB. 5\nC. 6", "A"),
        (
            {**MMLU, "answer_index": 2},
            {**LETTERED, "answer_key": "answer_index", "answer_form": "index"},
            "2+2?\n\nA. 4\nB. 5\nC. 6",
            "C",
        ),
        ({"question": "2+2?", "answer": 4}, {}, "2+2?", "4"),
        (
            {"question": "Größer?", "options": ["β ≤ δ", "„zwei“", "三"], "answer": "三"},
            {**LETTERED, "answer_form": "text"},
            "Größer?\n\nA. β ≤ δ\nB. „zwei“\nC. 三",
            "C",
        ),
        (
            {"question": "Which?", "options": [f"no {n}" for n in range(12)], "answer": "L"},  # MMLU-Pro ends with J
            LETTERED,
            "Which?\n\n" + "\n".join(f"{letter}. no {n}" for n, letter in enumerate("ABCDEFGHIJKL")),
            "L",
        ),
    ],
)
def test_questions_end_in_their_choices_and_answers_are_letters(row, keys, text, answer, tmp_path, byte_tokenizer):
    (question,) = load(tmp_path, byte_tokenizer, [row], **keys)
    assert (question.text, question.answer) == (text, answer)
    assert f"Q: {text}" in byte_tokenizer.decode(question.prompt_ids, special_tokens=True)


def test_shuffled_choices_keep_the_right_one_and_follow_the_seed(tmp_path, byte_tokenizer):
    rows = [{"question": f"{n}?", "options": ["right", "b", "c", "d"], "answer": "A"} for n in range(12)]
    shuffled = {**LETTERED, "shuffle_choices": True}
    first, again, other = (load(tmp_path, byte_tokenizer, rows, seed, **shuffled) for seed in (1, 1, 2))
    assert [q.text for q in first] == [q.text for q in again] != [q.text for q in other]
    assert {q.answer for q in first} == set("ABCD")
    assert all(f"\n{q.answer}. right" in q.text for q in [*first, *other])
    plain = load(tmp_path, byte_tokenizer, rows, **LETTERED)
    assert [q.id for q in plain] == [q.id for q in first] == [q.id for q in other]


def test_the_same_question_with_other_choices_is_another_question(tmp_path, byte_tokenizer):
    rows = [MMLU, {**MMLU, "options": ["4", "7"]}, MMLU]
    assert len(load(tmp_path, byte_tokenizer, rows, **LETTERED)) == 2


def test_a_template_of_its_own(tmp_path, byte_tokenizer):
    (question,) = load(tmp_path, byte_tokenizer, [MMLU], prompt_template="Pick. {question}", **LETTERED)
    assert "Pick. 2+2?\n\nA. 4" in byte_tokenizer.decode(question.prompt_ids)


@pytest.mark.parametrize(
    ("row", "keys", "text"),
    [
        ({**MMLU, "answer": "D"}, LETTERED, "\"answer\" = 'D' is the label of 0 choices, must be that of one of"),
        ({**MMLU, "options": "4"}, LETTERED, '"options" must be a list of choices'),
        ({**MMLU, "options": ["4"]}, LETTERED, "found 1 choices"),
        ({**MMLU, "options": ["4", None]}, LETTERED, '"options" must be text or a number, found nothing (null)'),
        ({**ARC, "choices": {"text": ["a", "b"], "label": ["1"]}, "answer": "1"}, {"choices_key": "choices"}, "['1']"),
        (
            {**MMLU, "options": ["4", "4"], "answer": "4"},
            {**LETTERED, "answer_form": "text"},
            "is the text of 2 choices",
        ),
        ({"question": "2+2?", "answer": "A"}, LETTERED, 'no column "options"'),
    ],
)
def test_rows_that_are_refused(row, keys, text, tmp_path, byte_tokenizer):
    with pytest.raises(DataError) as caught:
        load(tmp_path, byte_tokenizer, [row], **keys)
    assert text in str(caught.value)
