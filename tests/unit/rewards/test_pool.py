"""What happens to worker processes: killed, interrupted, orphaned, closed, and what they inherit."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from exgrpo_megatron.config import MathEnvConfig
from exgrpo_megatron.errors import UserError
from exgrpo_megatron.rewards import pool as pool_module
from exgrpo_megatron.rewards.pool import WorkerPool
from exgrpo_megatron.rewards.verifier import MathVerifier

ROOT = Path(__file__).resolve().parents[3]
Children = Callable[[], list[psutil.Process]]

TOWER = (r"\boxed{9^{9^{9}}}", r"\boxed{9}")


def right_and_wrong(count: int) -> tuple[list[tuple[str, str]], list[float]]:
    """Answers that are right, wrong, right, ..., and what is to come out."""
    requests = [(f"\\boxed{{{n + n % 2}}}", f"\\boxed{{{n}}}") for n in range(count)]
    return requests, [0.0 if n % 2 else 1.0 for n in range(count)]


def wait_for(condition: Callable[[], bool], limit_s: float = 60) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_worker_killed_in_the_middle_of_a_batch_costs_nothing(new_children: Children) -> None:
    settled: list[int] = []
    pool = WorkerPool(num_workers=2, timeout_s=10, on_progress=lambda: settled.append(1))
    requests, expected = right_and_wrong(600)
    pool.run(requests[:8])
    outcomes: list[str] = []
    grading = threading.Thread(target=lambda: outcomes.extend(pool.run(requests)))
    grading.start()
    time.sleep(0.1)
    victims = new_children()
    for victim in victims:
        victim.kill()
    grading.join(60)
    assert len(victims) == 2
    assert outcomes == expected
    assert len(settled) == 8 + 600  # once an answer, however often it was tried
    assert pool.run(requests[:50]) == expected[:50]
    assert not {victim.pid for victim in victims} & {child.pid for child in new_children()}
    pool.close()
    assert new_children() == []


def test_a_worker_killed_between_batches_is_replaced(new_children: Children) -> None:
    pool = WorkerPool(num_workers=1, timeout_s=10)
    requests, expected = right_and_wrong(20)
    assert pool.run(requests) == expected
    new_children()[0].kill()
    assert pool.run(requests) == expected
    pool.close()


def test_an_answer_over_which_two_workers_die_is_an_error_and_the_rest_is_graded(new_children: Children) -> None:
    pool = WorkerPool(num_workers=1, timeout_s=300)
    requests, expected = right_and_wrong(20)
    outcomes: list[str] = []
    grading = threading.Thread(target=lambda: outcomes.extend(pool.run([TOWER, *requests])))
    grading.start()
    for _ in range(2):
        # The tower is at the head of what the one worker has been sent.
        wait_for(lambda: len(new_children()) == len(pool._workers) == 1 and len(pool._workers[0].in_flight) > 0)
        (worker,) = new_children()
        worker.kill()
        wait_for(lambda old=worker: old not in new_children())  # type: ignore[misc]
    grading.join(60)
    assert outcomes == ["error", *expected]
    pool.close()


def test_the_time_limit_counts_for_each_answer_and_not_for_those_before_it() -> None:
    pool = WorkerPool(num_workers=1, timeout_s=3)
    # Each takes about 22 ms on an idle core, hence all of them more than the limit, and one far less on a busy core.
    requests = [(f"\\boxed{{\\sqrt{{{n}}} + \\frac{{x^{n}}}{{7}}}}", r"\boxed{8}") for n in range(260)]
    pool.run([(r"\boxed{1}", r"\boxed{1}")])
    start = time.perf_counter()
    assert pool.run(requests) == [0.0] * len(requests)
    assert time.perf_counter() - start > 3
    pool.close()


def test_a_batch_that_was_interrupted_does_not_disturb_the_next() -> None:
    pool = WorkerPool(num_workers=1, timeout_s=300)
    requests, expected = right_and_wrong(20)
    pool.run(requests[:1])

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            pool.run([TOWER, *requests])
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert pool.run(requests) == expected
    pool.close()


def test_a_verifier_works_from_several_threads_at_once() -> None:
    with MathVerifier(MathEnvConfig(num_workers=2)) as verifier:
        results: dict[int, list[str]] = {}

        def grade(start: int) -> None:
            items = [(f"\\boxed{{{n + n % 2}}}", str(n)) for n in range(start, start + 40)]
            results[start] = [verdict.status for verdict in verifier.grade(items)]

        threads = [threading.Thread(target=grade, args=(start,)) for start in (0, 100, 200)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert results == dict.fromkeys((0, 100, 200), ["correct", "wrong"] * 20)


def test_close_leaves_no_process_and_may_be_repeated(new_children: Children) -> None:
    with MathVerifier(MathEnvConfig(num_workers=2, timeout_s=0.5)) as verifier:
        verifier.grade([(TOWER[0], "9"), (r"\boxed{9}", "9")])
        assert len(new_children()) == 2
    assert new_children() == []
    verifier.close()
    with pytest.raises(RuntimeError, match="closed"):
        verifier.grade([(r"\boxed{1}", "1")])


def test_a_worker_inherits_no_open_file_and_its_memory_is_bounded(new_children: Children) -> None:
    with socket.socket() as listener:
        listener.set_inheritable(True)
        pool = WorkerPool(num_workers=1, timeout_s=10)
        pool.run([(r"\boxed{1}", r"\boxed{1}")])
        (worker,) = new_children()
        open_files = [os.readlink(descriptor) for descriptor in Path(f"/proc/{worker.pid}/fd").iterdir()]
        pool_limit = worker.rlimit(psutil.RLIMIT_AS)
        pool.close()
    assert not any(name.startswith("socket:") for name in open_files)
    assert pool_limit[0] == 1 << 30


UNGUARDED_SCRIPT = """
import sys, types
print("main ran", flush=True)
import torch
import psutil
from exgrpo_megatron.config import MathEnvConfig
from exgrpo_megatron.rewards.verifier import MathVerifier
verifier = MathVerifier(MathEnvConfig(num_workers=1))
print(verifier.grade([("\\\\boxed{1}", "1")])[0].status)
(worker,) = psutil.Process().children()
print("torch in parent", any("libtorch" in region.path for region in psutil.Process().memory_maps()))
print("torch in worker", any("libtorch" in region.path for region in worker.memory_maps()))
verifier.close()
print("children", psutil.Process().children())
print("math_verify in parent", "math_verify" in sys.modules)
"""


def test_workers_neither_run_the_main_program_nor_load_torch(tmp_path: Path) -> None:
    script = tmp_path / "console_script.py"  # no `if __name__ == "__main__"`: multiprocessing would run it again
    script.write_text(UNGUARDED_SCRIPT)
    done = subprocess.run([sys.executable, script], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "main ran",
        "correct",
        "torch in parent True",
        "torch in worker False",
        "children []",
        "math_verify in parent False",
    ]


ABANDONING_SCRIPT = r"""
import psutil
from exgrpo_megatron.rewards.pool import WorkerPool
pool = WorkerPool(num_workers=2, timeout_s=2)
pool.run([("\\boxed{1}", "\\boxed{1}")] * 8)
print(*[child.pid for child in psutil.Process().children()], flush=True)
pool.run([("\\boxed{9^{9^{9}}}", "\\boxed{9}")])
"""


def test_workers_end_soon_after_a_parent_that_was_killed(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", ABANDONING_SCRIPT], env=environment(), stdout=subprocess.PIPE)
    assert parent.stdout is not None
    workers = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
    time.sleep(0.3)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert len(workers) == 2
    # One is idle and sees the end of its input; one is at the tower, until its own alarm 2 s after the limit.
    wait_for(lambda: not any(worker.is_running() and worker.status() != "zombie" for worker in workers), limit_s=30)


def test_workers_that_cannot_start_are_reported_with_their_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_children: Children
) -> None:
    (tmp_path / "math_verify.py").write_text("raise ImportError('antlr4 is too old')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # found before the installed package
    pool = WorkerPool(num_workers=2, timeout_s=1)
    with pytest.raises(UserError, match=r"do not start \(exit code 1\).*antlr4 is too old.*import math_verify"):
        pool.run([(r"\boxed{1}", r"\boxed{1}")])
    pool.close()
    assert new_children() == []


def test_a_worker_that_misjudges_a_known_pair_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The silent failure to fear is a verifier that calls everything wrong.
    (tmp_path / "math_verify.py").write_text("parse = lambda *a, **k: []\nverify = lambda *a, **k: False")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    pool = WorkerPool(num_workers=1, timeout_s=1)
    with pytest.raises(UserError, match="misjudges"):
        pool.run([(r"\boxed{1}", r"\boxed{1}")])
    pool.close()


def test_a_worker_that_has_grown_large_is_replaced_without_loss(
    monkeypatch: pytest.MonkeyPatch, new_children: Children
) -> None:
    # Below twice what a fresh worker uses, each makes room for the next after its first answer.
    show = "import math_verify, psutil; print(psutil.Process().memory_info().vms)"
    fresh_bytes = int(subprocess.run([sys.executable, "-c", show], capture_output=True, check=True).stdout)
    monkeypatch.setattr(pool_module, "MEMORY_LIMIT_BYTES", int(1.7 * fresh_bytes))
    pool = WorkerPool(num_workers=1, timeout_s=10)
    (first,) = new_children()
    requests, expected = right_and_wrong(4)
    assert pool.run(requests) == expected
    assert first not in new_children()
    pool.close()


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
