r"""Rewards of multiple choice: the letter in the last box, or after "answer is"."""

from __future__ import annotations

import re
from collections.abc import Sequence

from exgrpo_megatron.rewards.rules import boxed_answer
from exgrpo_megatron.rewards.verifier import Graded, Status, Verdict


class ChoiceVerifier:
    """Compares the letter that a response chooses with that of the gold answer."""

    def grade(self, items: Sequence[Graded]) -> list[Verdict]:
        """The verdict on each (response text, gold letter), in order; `no_box` where no letter was chosen."""
        statuses = [_status(chosen_letter(response), gold) for response, gold, *_ in items]
        return [Verdict(reward=float(status == "correct"), status=status) for status in statuses]

    def check_gold(self, answers: Sequence[str]) -> list[int]:
        """Indices of the gold answers that are no letter."""
        return [index for index, answer in enumerate(answers) if chosen_letter(f"\\boxed{{{answer}}}") != answer]

    def close(self) -> None:
        """There is nothing to end."""


def chosen_letter(response: str) -> str | None:
    r"""The letter A to Z that a response chooses; None where it chooses none.

    If there is a closed box, what the last one holds: a letter, of either case, alone or with its text behind it
    (``C``, ``(C)``, ``\text{C}``, ``C. Paris``). Else the capital letter after the last "answer is" or "answer:".
    """
    content = boxed_answer(response)
    if content is not None:
        found = _IN_BOX.fullmatch(_LAYOUT.sub("", content).replace("{", "").replace("}", "").strip())
        return found[1].upper() if found else None
    stated = _STATED.findall(_LAYOUT.sub("", response))
    return stated[-1] if stated else None


def _status(letter: str | None, gold: str) -> Status:
    if letter is None:
        return "no_box"
    return "correct" if letter == gold else "wrong"


_LAYOUT = re.compile(r"\\(?:text|textbf|mathbf|mathrm|boldsymbol|rm|bf)\b\s*|\*\*|\\[ ,;!]|\$")
# Possessive, so that a response of nothing but spaces costs no more than another.
_IN_BOX = re.compile(r"\(?\s*+([A-Za-z])\s*+(?:\)?\s*+[.):].*|\))?", re.DOTALL)
# "The answer is I think B": the pronoun is no choice.
_STATED = re.compile(
    r"(?i:\banswer\s*+(?:is|:)\s*+:?\s*+(?:(?:option|choice)\s++)?)\\?\(?(?!I\s+[a-z])([A-Z])(?![\w'\u2019])"
)
