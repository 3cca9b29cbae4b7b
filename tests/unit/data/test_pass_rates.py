"""Measured pass rates: bands at their borders, files, and the questions a recipe keeps."""

import json

import pytest

from exgrpo_megatron.config import DataConfig
from exgrpo_megatron.data.pass_rates import BANDS, PassRate, measured, read_pass_rates, write_pass_rates
from exgrpo_megatron.data.questions import load_questions
from exgrpo_megatron.errors import DataError
from exgrpo_megatron.recipe import load_recipe


def test_bands_at_their_borders():
    """easy [75%, 100%), medium (25%, 75%], hard (0, 25%]: the paper's, with 75% in two and 0 and 100% in none."""
    borders = [0.0, 0.125, 0.25, 0.375, 0.75, 0.875, 1.0]
    inside = {name: [rate for rate in borders if rate in band] for name, band in BANDS.items()}
    assert inside == {"easy": [0.75, 0.875], "medium": [0.375, 0.75], "hard": [0.125, 0.25]}
    assert [band.describe() for band in BANDS.values()] == ["[75%, 100%)", "(25%, 75%]", "(0%, 25%]"]


def test_what_is_measured_is_what_is_read(tmp_path):
    """Two of three right, and none of one."""
    answers = [
        {"question_id": name, "category": category, "status": "correct" if reward else "wrong"}
        for name, category, reward in [("a", "x", 1.0), ("b", None, 0.0), ("a", "x", 0.0), ("a", "x", 1.0)]
    ]
    rates = measured(answers)
    assert rates == [PassRate("a", 2, 3, "x"), PassRate("b", 0, 1, None)]
    write_pass_rates(tmp_path / "rates.jsonl", rates)
    assert read_pass_rates(str(tmp_path / "rates.jsonl"), "key") == {"a": 2 / 3, "b": 0.0}


@pytest.mark.parametrize(
    ("rows", "texts"),
    [
        ([{"question_id": "a", "pass_rate": 1.5}], ["line 1", "from 0 to 1", "'1.5'"]),
        ([{"question_id": "a", "pass_rate": "half"}], ["line 1", "'half'"]),
        ([{"question_id": "a", "pass_rate": 0.5}] * 2, ["line 2", "'a' has a pass rate already"]),
        ([{"question_id": "a"}], ["line 1", "pass_rate"]),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_by_row(tmp_path, rows, texts):
    path = tmp_path / "rates.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError) as refused:
        read_pass_rates(str(path), "data.train.pass_rates_path")
    for text in texts:
        assert text in str(refused.value)


@pytest.fixture
def loaded(tmp_path, chain_tokenizer):
    """Loads four sums of pass rates 0, 25, 50 and 75 %, with keys of data.train set."""
    (tmp_path / "sums.jsonl").write_text(
        "".join(json.dumps({"id": f"q{n}", "question": f"{n}+1", "answer": str(n + 1)}) + "\n" for n in range(4))
    )
    write_pass_rates(tmp_path / "rates.jsonl", [PassRate(f"q{n}", n, 4) for n in range(4)])

    def load(**keys):
        source = {"path": str(tmp_path / "sums.jsonl"), "id_key": "id"}
        data = DataConfig(train={**source, **keys}, max_input_seq_length=16)
        return load_questions(data.train, data, chain_tokenizer, held_out=False)

    load.rates = str(tmp_path / "rates.jsonl")
    return load


@pytest.mark.parametrize(
    ("keys", "kept"),
    [
        ({"pass_rate_band": "easy"}, ["q3"]),
        ({"pass_rate_band": "medium"}, ["q2", "q3"]),
        ({"pass_rate_band": "hard"}, ["q1"]),
        ({"pass_rate_range": [0.0, 0.5]}, ["q0", "q1", "q2"]),
        ({"pass_rate_band": "medium", "max_questions": 1}, ["q2"]),
    ],
)
def test_only_questions_of_the_band_are_kept_and_the_others_counted(loaded, keys, kept):
    found = loaded(pass_rates_path=loaded.rates, **keys)
    assert [question.id for question in found.questions] == kept
    if "max_questions" not in keys:
        assert set(found.dropped_by_pass_rate) == {f"q{n}" for n in range(4)} - set(kept)
        assert found.record()["left_out"] == 4 - len(kept)
        assert f"{4 - len(kept)} of another pass rate" in found.describe()


def test_a_question_without_a_rate_and_a_band_without_questions_are_refused(loaded, tmp_path):
    write_pass_rates(tmp_path / "other.jsonl", [PassRate("q0", 0, 4)])
    with pytest.raises(DataError, match=r"other.jsonl' has no pass rate of question 'q1'.*--questions train"):
        loaded(pass_rates_path=str(tmp_path / "other.jsonl"), pass_rate_band="hard")
    with pytest.raises(DataError, match=r"4 are outside of data\.train\.pass_rate_band"):
        loaded(pass_rates_path=loaded.rates, pass_rate_range=[0.9, 1.0])


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"pass_rate_band": "easy"}, "pass_rates_path is null"),
        ({"pass_rates_path": "r.jsonl"}, "has no effect"),
        (
            {"pass_rates_path": "r.jsonl", "pass_rate_band": "easy", "pass_rate_range": [0, 1]},
            "set one of them to null",
        ),
        ({"pass_rates_path": "r.jsonl", "pass_rate_range": [0.7, 0.3]}, "must not be above"),
    ],
)
def test_keys_that_do_not_fit_each_other_are_refused(keys, text):
    with pytest.raises(ValueError, match=text):
        DataConfig(train={"path": "sums.jsonl", **keys})


def test_the_recipes_of_the_study_differ_in_the_band_alone():
    recipes = {}
    for band in BANDS:
        values = load_recipe(f"recipes/difficulty/{band}.yaml").model_dump(mode="json")
        assert values["data"]["train"].pop("pass_rate_band") == band
        assert values["logger"].pop("log_dir") == f"runs/difficulty_{band}"
        recipes[band] = values
    assert recipes["easy"] == recipes["medium"] == recipes["hard"]
