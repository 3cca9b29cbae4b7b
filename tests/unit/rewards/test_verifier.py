r"""Verdicts of the real Math-Verify 0.9 on real strings.

What it accepts and rejects was established by hand with `parse` and `verify` in a plain process, without this
package; the comments say where that is more than equality of numbers.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from exgrpo_megatron.config import MathEnvConfig
from exgrpo_megatron.rewards.rules import is_literal
from exgrpo_megatron.rewards.verifier import MathVerifier, Verdict

Children = Callable[[], list[psutil.Process]]

HOSTILE = {
    "tower of tens": r"\boxed{10^{10^{10}}}",
    "tower of nines": r"\boxed{9^{9^{9}}}",
    "factorial": r"\boxed{100000000!}",
    "nested parentheses": "\\boxed{" + "(" * 120 + "9" + ")" * 120 + "}",
    "nested braces": "\\boxed{" + "{" * 120 + "9" + "}" * 120 + "}",
}


def statuses(verdicts: list[Verdict]) -> list[str]:
    return [verdict.status for verdict in verdicts]


@pytest.mark.parametrize(
    ("response", "gold", "status"),
    [
        (r"7+5=12, so \boxed{9}", "9", "correct"),
        (r"\boxed{8}", "9", "wrong"),
        (r"\boxed{9.0}", "9", "correct"),
        (r"\boxed{\frac{1}{2}}", "0.5", "correct"),
        (r"\boxed{1,000}", "1000", "correct"),
        (r"\boxed{50\%}", "50", "correct"),
        (r"\boxed{50\%}", "0.5", "correct"),
        (r"\boxed{x+x}", "2x", "correct"),
        (r"\boxed{\left( 3, \frac{\pi}{2} \right)}", r"\left( 3, \frac{\pi}{2} \right)", "correct"),
        (r"\boxed{9", "9", "no_box"),
        ("7+5-3", "9", "no_box"),
        ("the answer is 3+6", "9", "no_box"),
        ("", "9", "no_box"),
        (r"\boxed{}", "9", "wrong"),
        # Without `require_literal` Math-Verify works out, or looks through, what is in the box.
        (r"\boxed{7+5-3}", "9", "correct"),
        (r"\boxed{x=59}", "59", "correct"),
        (r"\boxed{--59}", "59", "correct"),
        # Math-Verify itself makes a set of two boxes and rejects both orders; here the last closed box counts.
        (r"\boxed{58}\boxed{59}", "59", "correct"),
        (r"\boxed{59}\boxed{58}", "59", "wrong"),
        (r"\boxed{59} \boxed{58", "59", "correct"),
        # Math-Verify prefers "final answer is" to a box; what follows the box must not bring in another answer.
        (r"\boxed{5} The final answer is $9$. I hope it is correct.", "9", "wrong"),
        (r"\boxed{9} The final answer is $5$. I hope it is correct.", "9", "correct"),
    ],
)
def test_verdicts_with_the_default_rules(verifier: MathVerifier, response: str, gold: str, status: str) -> None:
    expected = Verdict(reward=1.0 if status == "correct" else 0.0, status=status)  # type: ignore[arg-type]
    assert verifier.grade([(response, gold)]) == [expected]


def test_plain_numbers_are_accepted_as_gold_answers_so_that_nobody_has_to_ask(verifier: MathVerifier) -> None:
    # `exgrpo data prepare` does not ask about short texts that `is_literal` accepts.
    numbers = ["0", "-0", "007", "+3", "1,000", "1{,}000", "12.50", ".5", "5%", "5\\%", "3/4", "-\\frac{3}{4}", "1/0"]
    assert all(is_literal(number) for number in numbers)
    assert verifier.check_gold(numbers) == []


def test_without_the_box_rule_math_verify_searches_the_end_of_the_response() -> None:
    with MathVerifier(MathEnvConfig(num_workers=1, require_box=False)) as verifier:
        items = [
            ("7+5-3", "9"),
            ("the answer is 3+6", "9"),
            (r"\boxed{9", "9"),
            ("the answer is 9" + " filler" * 200, "9"),  # 1400 characters of filler: out of the last 1000
            ("the answer is 9" + " filler" * 100, "9"),
            (r"the answer is 9 but \boxed{8}", "9"),
        ]
        assert statuses(verifier.grade(items)) == ["correct", "correct", "wrong", "wrong", "correct", "wrong"]


def test_the_literal_rule_refuses_work_that_is_left_undone() -> None:
    with MathVerifier(MathEnvConfig(num_workers=1, require_literal=True)) as verifier:
        refused = [r"\boxed{7+5-3}", r"\boxed{9^{9}}", r"\boxed{--59}", r"\boxed{x=59}", r"\boxed{10^{10^{10}}}"]
        kept = [r"\boxed{9}", r"\boxed{ 9.0 }", r"\boxed{18/2}", r"\boxed{\frac{18}{2}}", r"\boxed{8}"]
        verdicts = verifier.grade([(response, "9") for response in refused + kept])
        assert statuses(verdicts) == ["not_literal"] * 5 + ["correct"] * 4 + ["wrong"]


@pytest.mark.parametrize(("response", "status"), [(r"\boxed{0000009}", "correct"), (r"\boxed{00000009}", "too_long")])
def test_a_box_may_be_as_long_as_the_limit_and_no_longer(response: str, status: str) -> None:
    with MathVerifier(MathEnvConfig(num_workers=1, max_boxed_chars=7)) as verifier:
        assert statuses(verifier.grade([(response, "9")])) == [status]


def test_hostile_expressions_cost_only_themselves_and_the_time_limit() -> None:
    with MathVerifier(MathEnvConfig(num_workers=2, timeout_s=0.5)) as verifier:
        easy = [(f"\\boxed{{{n}}}", str(n)) for n in range(len(HOSTILE))]
        verifier.grade([(r"\boxed{1}", "2")])
        items = [item for pair in zip(easy, [(text, "9") for text in HOSTILE.values()], strict=True) for item in pair]
        start = time.perf_counter()
        verdicts = verifier.grade(items)
        elapsed_s = time.perf_counter() - start
    assert statuses(verdicts[::2]) == ["correct"] * len(HOSTILE)
    by_name = dict(zip(HOSTILE, statuses(verdicts[1::2]), strict=True))
    assert {by_name[name] for name in ("tower of tens", "tower of nines", "factorial")} == {"timeout"}
    assert set(by_name.values()) <= {"timeout", "wrong"}
    # 5 x 0.5 s over 2 workers, and at most 5 new workers: 0.6 s each on an idle core, far more on a busy one.
    assert elapsed_s < 30


@pytest.mark.parametrize(
    ("response", "status"),
    [
        ("\\boxed{" + "1" * 1_000_000 + "}", "too_long"),
        ("\\boxed{" + "(" * 1_000_000 + "}", "too_long"),
        ("\\boxed{" * 150_000, "no_box"),
        ("x" * 1_000_000, "no_box"),
        ("9 " * 500_000 + "\\boxed{9}" + " 8" * 500_000, "correct"),
        ("\\boxed{9}\x00", "correct"),
        ("\\boxed{9\x00}", "wrong"),
        ("\x00", "no_box"),
        ("\\boxed{\ud800}", "wrong"),
        ("\udfff\\boxed{9}\ud800", "correct"),
        ("\\boxed{\u202e9\u202c}", "wrong"),
        ("\u202e שלום \\boxed{9}", "correct"),
        ("\\boxed{٩}", "wrong"),
        ("\\boxed{9\n}", "correct"),
        ("\\boxed{]\n[}", "wrong"),
    ],
    ids=range(15),
)
def test_odd_text_gets_an_ordinary_verdict(verifier: MathVerifier, response: str, status: str) -> None:
    assert statuses(verifier.grade([(response, "9")])) == [status]


def test_a_gold_answer_larger_than_a_pipe_is_graded(verifier: MathVerifier) -> None:
    # 200,000 characters, three times what a Linux pipe holds. Nonsense to Math-Verify, hence not equal.
    assert statuses(verifier.grade([(r"\boxed{9}", "?" * 200_000), (r"\boxed{9}", "9")])) == ["wrong", "correct"]


def test_no_answers_give_no_verdicts(verifier: MathVerifier) -> None:
    assert verifier.grade([]) == []


def freeze(workers: list[psutil.Process]) -> None:
    for worker in workers:
        worker.suspend()


def test_a_remembered_verdict_does_not_ask_a_worker(new_children: Children) -> None:
    with MathVerifier(MathEnvConfig(num_workers=1, timeout_s=1)) as verifier:
        first = verifier.grade([(r"so \boxed{9}", "9"), (r"\boxed{8}", "9")])
        freeze(new_children())
        # Another text before the same box is the same answer. The worker that could grade a new one stands still.
        assert verifier.grade([(r"hence \boxed{9}", "9"), (r"\boxed{8}", "9")]) == first
        assert statuses(verifier.grade([(r"\boxed{7}", "9")])) == ["timeout"]


def test_a_time_out_is_not_remembered(new_children: Children) -> None:
    with MathVerifier(MathEnvConfig(num_workers=1, timeout_s=1)) as verifier:
        verifier.grade([(r"\boxed{1}", "9")])
        freeze(new_children())
        assert statuses(verifier.grade([(r"\boxed{9}", "9")])) == ["timeout"]
        assert statuses(verifier.grade([(r"\boxed{9}", "9")])) == ["correct"]


def test_equal_answers_of_a_batch_are_graded_once() -> None:
    with MathVerifier(MathEnvConfig(num_workers=1, timeout_s=1, cache_size=0)) as verifier:
        verifier.grade([(r"\boxed{1}", "9")])
        start = time.perf_counter()
        verdicts = verifier.grade([(r"\boxed{9^{9^{9}}}", "9")] * 64)
        # 64 time-outs would take 64 s.
        assert time.perf_counter() - start < 20
    assert statuses(verdicts) == ["timeout"] * 64


def test_the_cache_forgets_the_verdict_used_longest_ago(new_children: Children) -> None:
    with MathVerifier(MathEnvConfig(num_workers=1, timeout_s=1, cache_size=2)) as verifier:
        for answer in ("1", "2", "1", "3"):  # 1 was used after 2, so 3 displaces 2
            verifier.grade([(f"\\boxed{{{answer}}}", "9")])
        freeze(new_children())
        assert statuses(verifier.grade([(r"\boxed{1}", "9"), (r"\boxed{3}", "9")])) == ["wrong", "wrong"]
        assert statuses(verifier.grade([(r"\boxed{2}", "9")])) == ["timeout"]


def test_gold_answers_nothing_can_earn_are_reported(verifier: MathVerifier) -> None:
    answers = ["9", "", "p - q", "1" * 300, r"\frac{1}{2}"]  # an empty answer; one longer than max_boxed_chars
    assert verifier.check_gold(answers) == [1, 3]


def test_gold_answers_that_break_the_literal_rule_are_reported() -> None:
    with MathVerifier(MathEnvConfig(num_workers=1, require_literal=True)) as verifier:
        assert verifier.check_gold(["9", "p - q", "1,000", r"\boxed{7}", r"\boxed{7+1}"]) == [1, 4]


def test_math_500_gold_answers_equal_themselves(verifier: MathVerifier) -> None:
    answers = [json.loads(line)["answer"] for line in data_file("math500.jsonl").read_text().splitlines()]
    rejected = [answers[index] for index in verifier.check_gold(answers)]
    # Measured: all 500. Up to 2 may fall to a busy machine's time limit.
    assert len(answers) == 500
    assert len(rejected) <= 2, rejected


def test_gsm8k_gold_answers_are_literals_and_equal_themselves() -> None:
    lines = data_file("gsm8k_test.jsonl").read_text().splitlines()
    answers = [json.loads(line)["answer"].rsplit("####", 1)[-1].strip() for line in lines]
    with MathVerifier(MathEnvConfig(num_workers=2, require_literal=True)) as verifier:
        assert verifier.check_gold(answers) == []


def data_file(name: str) -> Path:
    """A file of `shared/data` beside the repository, or beside one of the folders above it."""
    root = Path(__file__).resolve().parents[3]
    for folder in root.parents:
        if (folder / "shared" / "data" / name).is_file():
            return folder / "shared" / "data" / name
    pytest.skip(f"no shared/data/{name} beside {root} or above")
