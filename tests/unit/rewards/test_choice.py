r"""What counts as a choice: the letter in the last box, or after "answer is"."""

import pytest

from exgrpo_megatron.rewards.choice import ChoiceVerifier, chosen_letter


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        (r"so \boxed{C}", "C"),
        (r"\boxed{c}", "C"),
        (r"\boxed{(C)}", "C"),
        (r"\boxed{\text{C}}", "C"),
        (r"\boxed{\textbf{(C)}}", "C"),
        (r"\boxed{C.}", "C"),
        (r"\boxed{C. Paris}", "C"),
        (r"\boxed{(C) Paris, or so}", "C"),
        (r"\boxed{\text{C) } 42}", "C"),
        (r"\boxed{A} no, \boxed{B}", "B"),
        (r"The answer is (A). Or rather \boxed{B}", "B"),
        (r"\boxed{Paris}", None),
        (r"\boxed{A, C}", None),
        (r"\boxed{A or C}", None),
        (r"\boxed{42} so the answer is (C)", None),  # the box has the last word
        ("The answer is (C).", "C"),
        ("the correct answer is: C", "C"),
        ("**Answer:** D", "D"),
        ("Answer: **D**", "D"),
        (r"The answer is \(B\).", "B"),
        ("answer is option B", "B"),
        ("The answer is A because it is", "A"),
        ("First the answer is (A), but then the answer is (D)", "D"),
        ("the answer is a matter of taste", None),
        ("The answer is Paris", None),
        ("The answer is I think unclear", None),
        ("The answer is I.", "I"),
        ("The answer is A's friend", None),
        ("C", None),
        ("", None),
        ("the answer is" + " " * 20_000 + "?", None),
    ],
    ids=lambda value: str(value)[:40],
)
def test_the_letter_that_is_chosen(response, letter):
    assert chosen_letter(response) == letter


def test_verdicts():
    verdicts = ChoiceVerifier().grade([(r"\boxed{B}", "B"), (r"\boxed{C}", "B", "Which?"), ("hm", "B")])
    assert [(verdict.reward, verdict.status) for verdict in verdicts] == [(1, "correct"), (0, "wrong"), (0, "no_box")]
    assert ChoiceVerifier().check_gold(["A", "J", "AB"]) == [2]
