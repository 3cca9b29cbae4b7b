"""What stands between a run and tools of others: nothing twice, nothing that stops the run."""

import posixpath
import re
from importlib.util import find_spec
from threading import Event

import pytest

from exgrpo_megatron.config import LoggerConfig
from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.loggers import guarded, mlflow_store
from exgrpo_megatron.loggers.choice import check_loggers
from exgrpo_megatron.loggers.guarded import GuardedLogger, Memory
from exgrpo_megatron.loggers.mlflow_names import mlflow_name
from exgrpo_megatron.loggers.protocol import Ended

LONG = ["c" * 300, "c" * 299 + "d"]


class Kept:
    """A tool that keeps what it is told, and fails at steps `fails`."""

    run_id, where, look = "r1", "here", "here; look"

    def __init__(self, fails=(), wait_at=None):
        self.steps, self.ended, self.fails = [], None, fails
        self.wait_at, self.may_go_on = wait_at, Event()

    def metrics(self, step, values):
        if step == self.wait_at:
            self.may_go_on.wait(60)
        if step in self.fails:
            raise RuntimeError(f"step {step} is too much\nand more")
        self.steps.append((step, values["policy/loss"]))

    def answers(self, step, rows):
        raise AssertionError

    def finish(self, summary, files):
        self.summary = summary

    def close(self, ended):
        self.ended = ended


def logged(path, tool, steps):
    memory = Memory(path)
    memory.recall()
    log = GuardedLogger("Tool", tool, memory)
    for step in steps:
        log.write(step, {"policy/loss": float(step)})
    return log


def test_no_step_is_handed_over_twice_whatever_a_resume_does_again(tmp_path):
    first, second = Kept(), Kept()
    logged(tmp_path / "loggers" / "tool.json", first, [0, 1, 2, 3]).close()
    log = logged(tmp_path / "loggers" / "tool.json", second, [2, 3, 4])
    log.finish({"last_step": 4.0}, [])
    log.close()
    assert [step for step, _ in [*first.steps, *second.steps]] == [0, 1, 2, 3, 4]
    assert (first.ended, second.ended) == (Ended.stopped, Ended.finished)
    assert log.lost() == [
        "Tool: steps 2 to 3 were logged before the run was resumed, and stand there as they were; metrics.jsonl has "
        "what they are now"
    ]


def test_a_tool_that_fails_is_warned_of_once_and_counted(tmp_path, caplog):
    tool = Kept(fails=(2, 3))
    log = logged(tmp_path / "tool.json", tool, [1, 2, 3, 4])
    log.close(failed=True)
    assert tool.steps == [(1, 1.0), (4, 4.0)]
    assert tool.ended is Ended.failed
    assert log.lost() == ["Tool: 2 calls failed, the first: RuntimeError: step 2 is too much"]
    assert caplog.text.count("training goes on") == 1


def test_a_tool_that_hangs_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(guarded, "DRAIN_S", 0.05)
    tool = Kept(wait_at=2)
    log = logged(tmp_path / "tool.json", tool, [1, 2, 3])
    log.close()
    tool.may_go_on.set()
    # Step 2 was taken and never came back; step 3 and the end were not.
    assert log.lost() == ["Tool: 3 calls were not handed over within 0 s"]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_named_with_its_extra(name):
    if find_spec(name):
        pytest.skip(f"{name} is installed")
    with pytest.raises(ConfigError, match=rf"logger\.{name}_enabled = true.*pip install 'exgrpo-megatron\[{name}\]'"):
        check_loggers(LoggerConfig.model_validate({f"{name}_enabled": True}))


def test_what_a_failure_says_has_no_password(tmp_path):
    class Refuses(Kept):
        def metrics(self, step, values):
            raise RuntimeError("http://me:SECRET@host/api does not know tok-123")

    log = GuardedLogger("Tool", Refuses(), Memory(tmp_path / "tool.json"), ["tok-123"])
    log.write(1, {"policy/loss": 1.0})
    log.close()
    assert log.lost() == ["Tool: 1 calls failed, the first: RuntimeError: http://host/api does not know ***"]


@pytest.mark.parametrize("name", ["a%20b", "why?"])
def test_a_folder_that_is_another_one_in_the_address_of_its_database_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config = LoggerConfig.model_validate({"log_dir": str(tmp_path / name)})
    with pytest.raises(
        ConfigError, match=r"logger\.log_dir = .*name another folder, or set logger\.mlflow\.tracking_uri"
    ):
        mlflow_store.check(config)
    mlflow_store.check(LoggerConfig.model_validate({"log_dir": str(tmp_path / "50% #1 & more")}))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://host")
    mlflow_store.check(config)


def test_every_name_has_one_of_its_own_that_mlflow_takes():
    assert mlflow_name("validation/pass_rate_t1/number theory: x_1.5") == "validation/pass_rate_t1/number theory: x_1.5"
    # printf 'num+th' | sha256sum
    assert mlflow_name("num+th") == "num_th-46e68890"
    names = ["num+th", "num*th", "num_th", "a//b", "a/_/b", "a/", "/x", "x", "..", "../x", "..x", ".", "./x", "", *LONG]
    assert len({mlflow_name(name) for name in names}) == len(names)
    for name in names:
        found = mlflow_name(name)
        # MLflow's own rule: characters, length, and a path that is its own shortest form.
        assert re.fullmatch(r"[/\w.\- :]{1,250}", found)
        assert posixpath.normpath(found) == found
        assert not found.startswith(("/", ".."))
