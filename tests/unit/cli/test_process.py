"""What a process says as it ends, and to whom."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from exgrpo_megatron import process
from exgrpo_megatron.comm import SingleProcess
from exgrpo_megatron.errors import ConfigError, LostRankError
from exgrpo_megatron.recipe import parse_recipe
from exgrpo_megatron.stop import StopSignal


def ended(error):
    """Exit code of a command that raised `error` where it stops on signals."""
    with pytest.raises(SystemExit) as end, process.reported_errors(), StopSignal().installed():
        raise error
    return end.value.code


def test_torchrun_finds_the_message_and_the_time_of_a_failed_rank(tmp_path, monkeypatch):
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    assert ended(ConfigError("grpo.seed: no")) == 2
    read = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(path))
    assert read.message["message"] == "grpo.seed: no"
    assert abs(read.timestamp - path.stat().st_mtime) < 60


def test_a_rank_that_only_lost_another_leaves_no_message_to_take_for_the_cause(tmp_path, monkeypatch, capsys):
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    assert ended(LostRankError("rank 1 ended without a message", killed=(1,))) == 2
    assert not path.exists()
    assert capsys.readouterr().err == "error: rank 1 ended without a message\n"


@pytest.mark.parametrize(("rank", "said"), [("0", "warning: ours\nerror: theirs\n"), ("1", "error: theirs\n")])
def test_a_warning_of_ours_is_one_line_of_the_first_rank_and_of_libraries_only_errors_are_shown(rank, said):
    code = (
        "import logging\nfrom exgrpo_megatron.process import quiet_libraries\nquiet_libraries()\n"
        "logging.getLogger('exgrpo_megatron.policy').warning('ours')\n"
        "logging.getLogger('torch').warning('nothing')\nlogging.getLogger('torch').error('theirs')"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "RANK": rank}
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True, timeout=100
    )
    assert ended.stderr == said


def test_the_first_rank_left_on_a_machine_speaks_for_it(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "9")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert ended(LostRankError("rank 8 ended", killed=(8, 10))) == 2
    assert capsys.readouterr().err == "error: rank 9: rank 8 ended\n"


def test_a_signal_of_the_launcher_does_not_cut_the_message_off():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(LostRankError), StopSignal().installed():
        raise LostRankError("lost")
    try:
        os.kill(os.getpid(), signal.SIGTERM)  # would end this process
    finally:
        signal.signal(signal.SIGTERM, before)


class WaitsWhileTold(SingleProcess):
    """Is told to end whenever it waits for others."""

    def barrier(self):
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_run_that_is_over_is_not_ended_by_a_signal_while_it_waits_for_the_others(tmp_path, monkeypatch):
    told = []

    @contextmanager
    def group(config, *, advice):
        told.append(advice)
        yield (comm := WaitsWhileTold())
        comm.barrier()  # as `process_group` does

    monkeypatch.setattr(process, "process_group", group)
    before = signal.getsignal(signal.SIGTERM)
    with process.reported_errors():
        for enabled in (True, False):
            recipe = {
                "data": {"train": {"generator": "chain_arithmetic"}},
                "policy": {"model_name": "embedded:chain-qwen2"},
                "checkpointing": {"enabled": enabled},
                "logger": {"log_dir": str(tmp_path / "run")},
            }
            with process.whole_run(parse_recipe(recipe)) as (_, stop):
                assert not stop.requested
            assert stop.requested
            os.kill(os.getpid(), signal.SIGTERM)  # as it may come while Python ends
    assert signal.getsignal(signal.SIGTERM) == before
    assert told == ["the same command goes on from the newest checkpoint", "the same command begins again"]


def test_what_sigterm_does_stays_where_nothing_comes_after():
    before = signal.getsignal(signal.SIGTERM)
    try:
        with process.reported_errors(last=True), StopSignal().installed(to_the_end=True):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_handler_of_before_is_back_once_the_error_is_told():
    before = signal.getsignal(signal.SIGTERM)
    ended(ConfigError("no"))
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_process_that_is_gone_is_told_from_one_that_runs(data_parallel, monkeypatch):
    here = (data_parallel._machine, os.getpid())
    monkeypatch.setattr(data_parallel, "_processes", [here, (here[0], 2**22 + 1), ("elsewhere", 2**22 + 1)])
    assert data_parallel.killed_ranks() == (1,)
