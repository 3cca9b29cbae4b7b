"""Questions that a function of the user's gives: the same as from a file, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from exgrpo_megatron.config import DataConfig, DataSourceConfig
from exgrpo_megatron.data.questions import QuestionSet, load_questions
from exgrpo_megatron.data.sft import SFTBatches
from exgrpo_megatron.errors import ConfigError, DataError

MODULE = """
import itertools
import numpy as np
from beside import ROWS

def rows():
    return ROWS

def without_end():
    for n in itertools.count(1):
        yield {"question": f"{n}+1", "answer": n + 1}

def third_without_answer():
    yield from ROWS[:2]
    yield {"question": "3+1", "answer": None}

def second_raises():
    yield ROWS[0]
    raise KeyError("no more")

def second_exits():
    yield ROWS[0]
    raise SystemExit(0)

def exits():
    exit()

def numbers():
    return [
        {"question": str(n), "answer": answer}
        for n, answer in enumerate((np.int64(12), np.float64(0.5), np.float32(0.1), np.uint8(7), np.float32(3)))
    ]

def no_number():
    return [{"question": "1", "answer": np.float32("nan")}]

def truth():
    return [{"question": "1", "answer": np.bool_(True)}]

def third_is_text():
    yield from ROWS[:2]
    yield "3+1"

def one_row():
    return ROWS[0]

def nothing():
    yield from ()
"""
ROWS = [
    {"question": "1+1", "answer": 2, "level": "easy", "solution": "1+1=2\n[2]"},
    {"question": "2+3", "answer": "5", "level": "hard", "solution": "2+3=5\n[5]"},
    {"question": "2+3", "answer": "5", "level": "hard", "solution": "2+3=5\n[5]"},
]


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with functions, and one beside it that it imports."""
    folder = tmp_path_factory.mktemp("sources")
    (folder / "beside.py").write_text(f"ROWS = {ROWS!r}\n")
    path = folder / "my_questions.py"
    path.write_text(MODULE)
    return path


@pytest.fixture
def load(module: Path, byte_tokenizer) -> Callable[..., QuestionSet]:
    def load(function: str, **keys: object) -> QuestionSet:
        source = DataSourceConfig.model_validate({"source_function": f"{module}:{function}", **keys})
        return load_questions(source, DataConfig(train=source), byte_tokenizer, held_out=False)

    return load


def test_rows_of_a_function_are_the_questions_that_a_file_of_them_has(load, write_jsonl, byte_tokenizer) -> None:
    given = load("rows", category_key="level")
    source = DataSourceConfig(path=str(write_jsonl(*ROWS)), category_key="level")
    of_file = load_questions(source, DataConfig(train=source), byte_tokenizer, held_out=False)
    assert given.fingerprint == of_file.fingerprint
    assert [(q.id, q.text, q.answer, q.category) for q in given.questions] == [
        (q.id, q.text, q.answer, q.category) for q in of_file.questions
    ]
    assert (len(given.questions), given.num_duplicates) == (2, 1)
    assert given.source.endswith("my_questions.py:rows")
    assert given.record()["source"] == "my_questions.py:rows"


def test_a_function_without_end_is_asked_for_as_many_as_are_used(load) -> None:
    assert [question.answer for question in load("without_end", max_questions=3).questions] == ["2", "3", "4"]


def test_numbers_of_numpy_are_numbers(load) -> None:
    assert [question.answer for question in load("numbers").questions] == ["12", "0.5", "0.1", "7", "3"]


def test_solutions_come_from_a_function_too(module, make_recipe, byte_tokenizer) -> None:
    data = {"source_function": f"{module}:rows", "solution_key": "solution"}
    config = make_recipe({"generator": "chain_arithmetic"}, {"data": data, "train_global_batch_size": 3})
    batches = SFTBatches(config, byte_tokenizer)
    assert batches.num_examples == 3  # rows, duplicates included, as of a file
    texts = sorted(byte_tokenizer.decode(response) for _, response in batches.batch(0))
    assert [text.partition("<|")[0] for text in texts] == ["1+1=2\n[2]", "2+3=5\n[5]", "2+3=5\n[5]"]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            "third_without_answer",
            ':third_without_answer, row 3: "answer" must be text or a number, found nothing',
        ),
        ("third_is_text", ':third_is_text, row 3: must be a mapping with the columns "question", "answer", found str'),
        ("second_raises", ":second_raises', row 2: KeyError: 'no more' ("),
        ("second_raises", "my_questions.py, line 19)"),
        ("second_exits", ":second_exits', row 2: SystemExit: 0 ("),
        ("exits", ":exits', row 1: SystemExit: None ("),
        ("no_number", ':no_number, row 1: "answer" must be text or a number, found float32 '),
        ("truth", ':truth, row 1: "answer" must be text or a number, found bool'),
        ("one_row", "gives dict, not rows: it must return a list of them, or yield them"),
        ("nothing", ":nothing': it gives no row"),
    ],
)
def test_a_bad_row_is_refused_with_its_number(load, function: str, message: str) -> None:
    with pytest.raises(DataError) as refused:
        load(function)
    assert message in str(refused.value)


def test_a_function_that_is_not_there_is_refused_with_its_key(load, module) -> None:
    with pytest.raises(ConfigError, match=r"data\.train\.source_function = '.*:absent': .* has no function 'absent'"):
        load("absent")
    with pytest.raises(ConfigError, match=r"cannot import .*nowhere\.py: FileNotFoundError"):
        load("", source_function=f"{module.parent}/nowhere.py:rows")


def test_a_section_has_one_source() -> None:
    with pytest.raises(ValueError, match=r"path \('a.jsonl'\), source_function \('m:f'\), generator \(None\)"):
        DataSourceConfig(path="a.jsonl", source_function="m:f")
    with pytest.raises(ValueError, match=r"generator: null beside another one replaces a generator"):
        DataSourceConfig(generator="chain_arithmetic", source_function="m:f")
    with pytest.raises(ValueError, match=r"'digits.py' is not package.module:function, nor path/of/file.py:function"):
        DataSourceConfig(source_function="digits.py")
