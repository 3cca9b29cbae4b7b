"""Where a run keeps its stored answers, and what it does about damaged ones."""

from pathlib import Path

import pytest
from scripted import make_config

from exgrpo_megatron.errors import CheckpointError

OPTIONS = {"checkpointing": {"export_hf": False, "save_period": 1}}


def damaged(folder: Path) -> Path:
    """One byte of the last answer in the newest checkpoint's last segment changed."""
    path = sorted((folder / "run" / "checkpoints" / "step_000002" / "experience" / "segments").iterdir())[-1]
    data = bytearray(path.read_bytes())
    path.unlink()
    data[-1] ^= 1
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("elsewhere", [False, True])
def test_answers_lie_in_the_store_while_a_run_lasts_and_nothing_is_left_there(tmp_path, run_steps, elsewhere):
    store = tmp_path / ("scratch" if elsewhere else "run/experience")
    options = {**OPTIONS, "experience": {"store_dir": str(store)} if elsewhere else {}}
    seen = []
    run_steps(make_config(tmp_path, **options), 2, lambda _: seen.append(sorted(store.glob("rank-00000/*.seg"))))
    assert all(seen)
    assert not store.exists()
    run_steps(make_config(tmp_path, **options), 1)


def test_a_damaged_answer_in_a_checkpoint_ends_the_run_or_is_lost_alone(tmp_path, run_steps, stored_rows):
    run_steps(make_config(tmp_path, **OPTIONS), 2)
    whole = stored_rows(tmp_path / "run" / "checkpoints" / "step_000002" / "experience")
    path = damaged(tmp_path)
    with pytest.raises(CheckpointError, match=f"{path} is not as it was saved"):
        run_steps(make_config(tmp_path, **OPTIONS), 1)
    lenient = {**OPTIONS, "experience": {"on_corruption": "quarantine"}}
    training, notes = run_steps(make_config(tmp_path, **lenient), 1)
    assert "experience: 1 answers lost to damaged files so far" in notes
    assert training.parts.experience.num_damaged == 1
    saved = tmp_path / "run" / "checkpoints" / "step_000003" / "experience"
    assert len(set(whole) - set(stored_rows(saved))) >= 1
    again, _ = run_steps(make_config(tmp_path, **OPTIONS), 1)
    assert again.parts.experience.num_damaged == 1
