r"""Rewards that tell 06 from 6; every status by hand."""

import pytest
from pydantic import ValidationError

from exgrpo_megatron.config import MathEnvConfig
from exgrpo_megatron.rewards.exact_text import ExactTextVerifier


@pytest.mark.parametrize(
    ("response", "gold", "status"),
    [
        (r"9E=6 \boxed{06}", "06", "correct"),
        (r"\boxed{6}", "06", "wrong"),
        (r"\boxed{ 06 }", " 06 ", "correct"),
        (r"\boxed{6.0}", "6", "wrong"),
        (r"\boxed{1}\boxed{06}", "06", "correct"),
        (r"\boxed{06} or 7", "06", "correct"),
        (r"\boxed{\frac{1}{2}}", r"\boxed{\frac{1}{2}}", "correct"),
        ("06", "06", "no_box"),
        (r"\boxed{06", "06", "no_box"),
        (r"\boxed{0123456}", "0123456", "too_long"),
    ],
)
def test_the_box_holds_the_very_text_of_the_gold_answer(response, gold, status):
    verifier = ExactTextVerifier(MathEnvConfig(exact_text=True, max_boxed_chars=11 if "frac" in gold else 6))
    (verdict,) = verifier.grade([(response, gold)])
    assert (verdict.status, verdict.reward) == (status, float(status == "correct"))


def test_gold_answers_that_nothing_can_match_are_reported():
    verifier = ExactTextVerifier(MathEnvConfig(exact_text=True, max_boxed_chars=3))
    assert verifier.check_gold(["06", "1234", "x{", "3"]) == [1, 2]


@pytest.mark.parametrize(
    ("name", "value"),
    [("require_box", False), ("num_workers", 1), ("timeout_s", 1.0), ("require_literal", True), ("cache_size", 9)],
)
def test_keys_of_math_verify_are_refused_beside_it(name, value):
    with pytest.raises(ValidationError, match=rf"{name}.*exact_text = true|exact_text = true.*{name}"):
        MathEnvConfig(exact_text=True, **{name: value})
