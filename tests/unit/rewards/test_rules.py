r"""Where the last closed box is, and what counts as a literal. Expected values are read off the strings by hand."""

import time

import pytest

from exgrpo_megatron.rewards.rules import boxed, boxed_answer, is_literal


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{9}", "9"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}} done", r"\frac{1}{2}"),
        (r"\boxed{ 9 }", "9"),
        (r"\boxed {9}", "9"),
        (r"\boxed{}", ""),
        (r"\boxed{5} and \boxed{6", "5"),
        (r"\boxed{6", None),
        (r"\boxed{6{", None),
        (r"\boxed{6{}", None),
        (r"\boxed 6", None),
        ("no box", None),
        ("", None),
        (r"}} \boxed{7}} {", "7"),
        (r"{ \boxed{7}", "7"),
        (r"\boxed{\boxed{3}+1}", "3"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\{1}", r"\{1"),
        (r"x \\\boxed{4}", "4"),
        (r"\\boxed{4}", "4"),
        (r"\boxed{1\\{2}}", r"1\\{2}"),
        ("\\boxed{1\n2}", "1\n2"),
    ],
)
def test_the_last_closed_box_is_found_by_matching_braces(text: str, answer: str | None) -> None:
    assert boxed_answer(text) == answer


@pytest.mark.parametrize("text", ["\\boxed{" * 150_000, "\\boxed{" + "{" * 1_000_000, "\\boxed" * 150_000])
def test_a_megabyte_of_open_braces_is_searched_in_linear_time(text: str) -> None:
    start = time.perf_counter()
    assert boxed_answer(text) is None
    # Going back from the last box with one forward search each would take 150,000 passes over a megabyte.
    assert time.perf_counter() - start < 5


LITERALS = [
    *("9", "-9", "+9", "- 9", "0", "007", "3.14", "-3.14", ".5", "1,000", "12,345,678.9", "1{,}000", r"1\,000"),
    *(r"10,\!000", "50%", r"50\%", "1/2", "-1/2", "1 / 2", r"\frac{1}{2}", r"-\frac{1}{2}", r"\frac{-1}{2}"),
    *(r"\dfrac{3}{4}", r"\tfrac{3}{4}"),
]
NOT_LITERALS = [
    *("9^{9}", "9^9", "7+5-3", "--59", "x=59", "", " ", "-", "+-9", "1/2/3", "1//2", "3!", "2*3", r"2\cdot 3", "(9)"),
    *(r"\sqrt{4}", r"\frac{1+1}{2}", r"\frac12", r"-\frac{-1}{2}", "1,00", "1,0000", "1.2.3", "9 apples", r"\text{9}"),
    *("٩", "\uff19", "1e5", "0x10", "9\n8", "1 2", r"\frac{1}{2}+1", "50%%", "inf", "nan", "9\x00"),
]


@pytest.mark.parametrize("answer", LITERALS)
def test_a_plain_number_or_fraction_is_a_literal(answer: str) -> None:
    assert is_literal(answer)


@pytest.mark.parametrize("answer", NOT_LITERALS)
def test_anything_left_to_work_out_is_not_a_literal(answer: str) -> None:
    assert not is_literal(answer)


def test_a_bare_gold_answer_is_boxed_and_a_boxed_one_is_left_alone() -> None:
    assert boxed("p - q") == r"\boxed{p - q}"
    assert boxed(r"it is \boxed{9}") == r"it is \boxed{9}"
