"""Rewards by a function of the user's: what it gets, what becomes of what it gives, and of what goes wrong in it."""

import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from exgrpo_megatron.config import EnvConfig, MathEnvConfig
from exgrpo_megatron.data.chain_arithmetic import partial_credit
from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.rewards.function import FunctionVerifier, check_reward_function
from exgrpo_megatron.rewards.verifier import Verdict

REWARDS = """
import os, subprocess, sys, time

def reward(question, response, answer):
    print("seen by nobody")
    if response == "hangs":
        time.sleep(600)
    if response == "dies":
        os._exit(3)
    if response == "raises":
        raise RuntimeError(f"no reward for {question}")
    if response == "nan":
        return float("nan")
    if response == "exits":
        sys.exit(0)
    if response == "exits at once":
        os._exit(0)
    if response == "reads":
        return sys.stdin.read() == ""
    if response == "prints":
        print("x" * 2**21)
    if response == "raises much":
        raise RuntimeError("x" * 2**20)
    if response == "starts another":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        open(answer, "w").write(str(child.pid))
        child.wait()
    if response == "pid":
        return os.getpid()
    return len(response) / len(answer)

class Odd:
    def __call__(self, **texts):
        return -1

odd, number = Odd(), 3

async def awaited(question, response, answer):
    return 1.0

def yielding(question, response, answer):
    yield 1.0
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "my_rewards.py").write_text(REWARDS)
    (folder / "ends.py").write_text("import sys\nsys.exit(0)\n")
    (folder / "ends_at_once.py").write_text("import os\nos._exit(0)\n")
    return folder


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


@pytest.fixture(scope="module")
def verifier(folder: Path) -> Iterator[FunctionVerifier]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        made = FunctionVerifier(env())
        made.grade([("a", "ab", "q")])
        yield made
        made.close()


def env(function: str = "my_rewards:reward", memory_mib: int = 1024) -> EnvConfig:
    math = MathEnvConfig(num_workers=1, timeout_s=2, cache_size=3)
    return EnvConfig(math=math, reward_function=function, correct_above=0.5, worker_memory_mib=memory_mib)


def test_rewards_are_what_the_function_says_and_correct_above_the_threshold(verifier: FunctionVerifier) -> None:
    items = [("", "1234", "q"), ("ab", "1234", "q"), ("abc", "1234", "q"), ("a" * 9, "1234", "q")]
    assert verifier.grade(items) == [
        Verdict(0.0, "wrong"),
        Verdict(0.5, "wrong"),  # not above
        Verdict(0.75, "correct"),
        Verdict(2.25, "correct"),
    ]
    assert [verdict.correct for verdict in verifier.grade(items)] == [False, False, True, True]


def test_what_goes_wrong_in_the_function_is_counted_and_said(
    verifier: FunctionVerifier, caplog: pytest.LogCaptureFixture
) -> None:
    items = [("hangs", "1", "q1"), ("dies", "1", "q1"), ("raises", "1", "q1"), ("nan", "1", "q1"), ("a", "1", "q1")]
    with caplog.at_level(logging.WARNING, logger="exgrpo_megatron"):
        verdicts = verifier.grade(items)
    assert [(verdict.reward, verdict.status) for verdict in verdicts] == [
        (0.0, "timeout"),
        (0.0, "error"),
        (0.0, "error"),
        (0.0, "error"),
        (1.0, "correct"),
    ]
    assert "RuntimeError: no reward for q1" in caplog.text
    assert "the reward is nan, not a finite number" in caplog.text


@pytest.mark.parametrize("how", ["exits", "exits at once"])
def test_a_function_that_ends_its_process_costs_its_own_answer_alone(verifier: FunctionVerifier, how: str) -> None:
    """Exit code 0 included: such an answer must not be asked for again and again."""
    verdicts = verifier.grade([("a", "ab", how), (how, "ab", how), ("ab", "ab", how)])
    assert verdicts == [Verdict(0.5, "wrong"), Verdict(0.0, "error"), Verdict(1.0, "correct")]


def test_a_function_that_reads_standard_input_finds_it_empty_and_takes_no_answers_away(
    verifier: FunctionVerifier,
) -> None:
    verdicts = verifier.grade([("reads", "x", "q"), ("a", "ab", "r"), ("ab", "ab", "r")])
    assert verdicts == [Verdict(1.0, "correct"), Verdict(0.5, "wrong"), Verdict(1.0, "correct")]


def test_what_a_function_prints_does_not_pile_up_and_long_errors_are_cut(
    verifier: FunctionVerifier, caplog: pytest.LogCaptureFixture
) -> None:
    verifier.grade([("prints", "a" * 6, "q"), ("raises much", "a", "q")])
    kept = [worker._stderr.seek(0, os.SEEK_END) for worker in verifier._pool._workers]
    assert max(kept) < 2**20
    assert max(len(record.getMessage()) for record in caplog.records) < 1000


def test_processes_that_a_function_has_started_end_with_it(verifier: FunctionVerifier, tmp_path: Path) -> None:
    assert verifier.grade([("starts another", str(tmp_path / "pid"), "q")])[0].status == "timeout"
    child = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 20
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_an_answer_is_graded_once_while_it_is_remembered(
    verifier: FunctionVerifier, new_children: Callable[[], list[psutil.Process]]
) -> None:
    def pid_of(answer: str) -> float:
        return verifier.grade([("pid", answer, "q")])[0].reward

    first = pid_of("1")
    psutil.Process(int(first)).kill()
    assert pid_of("1") == first  # nobody was asked
    assert pid_of("2") != first
    for answer in "345":  # three are remembered
        pid_of(answer)
    assert pid_of("1") != first


def test_an_answer_without_its_question_is_refused(verifier: FunctionVerifier) -> None:
    with pytest.raises(ValueError, match="without its question"):
        verifier.grade([("a", "1")])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("my_reward:reward", "No module named 'my_reward'"),
        ("ends:reward", "cannot import ends: SystemExit: 0"),
        ("ends_at_once:reward", "exit code 0"),
        ("my_rewards:missing", "my_rewards.py) has no function 'missing'"),
        ("my_rewards:number", "my_rewards.py) has no function 'number'"),
        ("my_rewards:awaited", "my_rewards:awaited is an `async def`: a call must return the reward itself"),
        ("my_rewards:yielding", "my_rewards:yielding is a generator (it has a `yield`): a call must return"),
    ],
)
@pytest.mark.usefixtures("here")
def test_a_function_that_is_not_there_is_refused_before_anything_is_loaded(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=r"env\.reward_function") as caught:
        check_reward_function(env(name))
    assert text in str(caught.value)


@pytest.mark.usefixtures("here")
def test_whatever_can_be_called_is_admitted() -> None:
    check_reward_function(EnvConfig())
    check_reward_function(env("my_rewards:odd"))


@pytest.mark.usefixtures("here")
def test_a_function_that_needs_more_memory_than_it_may_have_is_refused(folder: Path) -> None:
    (folder / "large.py").write_text("import mmap\nheld = mmap.mmap(-1, 200 << 20)\nreward = len\n")
    with pytest.raises(ConfigError, match=r"twice as much .*env.worker_memory_mib = 256"):
        check_reward_function(env("large:reward", memory_mib=256))
    check_reward_function(env("large:reward"))


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        # 7+5-3: two lines of working and the box.
        ("7+5=12\n12-3=9\n\\boxed{9}", 1.0),
        ("\\boxed{9}", 0.5),
        ("7+5=12\n12-3=8\n\\boxed{8}", 0.25),
        ("7+5=12\n12-3=8\n\\boxed{9}", 0.75),
        ("7+5=11\n12-3=9\n\\boxed{9}", 0.5),
        ("7+5=12\n12-3=9", 0.5),
        ("\\boxed{8}", 0.0),
        ("", 0.0),
    ],
)
def test_the_embedded_example_gives_half_for_the_box_and_half_for_the_lines_before_the_first_wrong_one(
    response: str, reward: float
) -> None:
    assert partial_credit(question="7+5-3", response=response, answer="9") == reward
