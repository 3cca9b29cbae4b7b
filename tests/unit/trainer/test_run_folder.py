"""The lock of a run's folders, on every process."""

import sys
from pathlib import Path

import pytest
from scripted import make_config

from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.run_folder import locked_folder

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "experience"))

from ranks import on_ranks


def test_every_process_of_a_second_run_is_refused(tmp_path, data_parallel):
    """Each of them would take the first one's stored answers for left over, and delete them."""
    config = make_config(tmp_path)

    def second(comm):
        with pytest.raises(ConfigError, match=r"logger\.log_dir = .*another run"), locked_folder(config, comm):
            pytest.fail("it goes on")

    with locked_folder(config, data_parallel):
        on_ranks(2, 2, second)


def test_the_folder_of_stored_answers_may_be_that_of_the_run_and_is_made_only_where_answers_are_stored(
    tmp_path, data_parallel
):
    same = make_config(tmp_path, experience={"store_dir": str(tmp_path / "run")})
    with locked_folder(same, data_parallel):
        pass
    without = {"enabled": False, "store_dir": str(tmp_path / "scratch")}
    with locked_folder(make_config(tmp_path, experience=without), data_parallel):
        assert not (tmp_path / "scratch").exists()
