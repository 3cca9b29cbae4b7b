"""Sets of `eval.sets` that are evaluated while a run trains, and the best checkpoint by what is measured of them."""

import pytest
from pydantic import ValidationError
from scripted import make_config, write_questions

from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.metric_sinks import read_metrics


def config_of(folder, **checkpointing):
    """Every step is evaluated and saved; `later` is for `exgrpo eval` alone, and need not be there."""
    write_questions(folder / "sums.jsonl", 2)
    file = {"path": str(folder / "sums.jsonl"), "id_key": "id", "in_training": True}
    sets = {
        "sums": {**file, "num_samples": 2, "group": "ID"},
        "alone": {**file},
        "once": {**file, "group": "OOD"},
        "later": {"path": str(folder / "absent.jsonl")},
    }
    return make_config(
        folder,
        eval={"sets": sets},
        grpo={"val_period": 1, "val_at_start": False},
        checkpointing={"export_hf": False, "save_period": 1, "keep_last_n": 1, **checkpointing},
    )


def test_they_are_measured_with_every_evaluation_and_decide_what_is_best(tmp_path, run_steps):
    """The script has one right of two answers until step 2, and two from step 3 on; the first is always right.

    By hand, of `sums` before step 3: avg@2 is 1/2, pass@2 is 1, and of two answers with a vote each the mean is 1/2.
    """
    config = config_of(tmp_path, metric_name="validation/maj/sums", higher_is_better=False)
    _, notes = run_steps(config, 2)
    assert "held out, after step 1: sums 50.0%, alone 100.0%, once 100.0%" in notes
    resumed, _ = run_steps(config, 2)
    found = [
        {name.removeprefix("validation/"): value for name, value in record.items() if name.startswith("validation/")}
        for record in read_metrics(tmp_path / "run" / "metrics.jsonl")
    ]
    early = {
        "avg/sums": 0.5, "pass/sums/2": 1.0, "maj/sums": 0.5, "avg/alone": 1.0, "avg/once": 1.0,
        "macro_avg/ID": 0.5, "macro_avg/OOD": 1.0,
    }  # fmt: skip
    late = {**early, "avg/sums": 1.0, "maj/sums": 1.0, "macro_avg/ID": 1.0}
    assert found == [early, early, late, late]
    # The least maj@2 is 1/2, of two steps the newer.
    assert [path.name for path in resumed.store.whole()] == ["step_000002", "step_000004"]
    assert resumed.store.best() == resumed.store.at(2)
    assert set(resumed.data) == {"train", "eval.sets.sums", "eval.sets.alone", "eval.sets.once"}


@pytest.mark.parametrize(
    "name",
    ["avg/later", "avg/nothing", "maj/once", "pass/sums/4", "macro_avg/all"],
    ids=lambda name: name.replace("/", " "),
)
def test_a_metric_that_no_set_in_training_has_is_refused(tmp_path, name):
    with pytest.raises((ConfigError, ValidationError)) as caught:
        config_of(tmp_path, metric_name=f"validation/{name}")
    for text in (f"'validation/{name}' is not measured in training", "validation/pass/sums/2, validation/maj/sums"):
        assert text in str(caught.value)
