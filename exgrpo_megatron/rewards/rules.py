r"""Rules about the final answer that need no mathematics: where the last box is, and whether it holds a literal."""

from __future__ import annotations

import re


def boxed_answer(text: str) -> str | None:
    r"""Content of the last closed ``\boxed{...}``, stripped; None where no box is closed.

    Braces are matched as in LaTeX: ``\{`` and ``\}`` do not count. One pass, so the cost is linear in the length
    of the text whatever it holds.
    """
    start = text.find("\\boxed")
    if start < 0:
        return None
    last: tuple[int, int] | None = None
    open_braces: list[int | None] = []  # where the content of a box starts; None for any other brace
    for token in _BRACES.finditer(text, start):
        symbol = token.group()
        if symbol.startswith("\\boxed"):
            open_braces.append(token.end())
        elif symbol == "{":
            open_braces.append(None)
        elif symbol == "}" and open_braces:
            content = open_braces.pop()
            if content is not None and (last is None or content > last[0]):
                last = (content, token.start())
    return None if last is None else text[last[0] : last[1]].strip()


def boxed(answer: str) -> str:
    r"""`answer` in a box, as Math-Verify must see a bare one: it takes ``p - q`` or ``\pi`` alone for prose."""
    return answer if "\\boxed" in answer else f"\\boxed{{{answer}}}"


def is_literal(answer: str) -> bool:
    r"""Whether `answer` is one number as it would be written down, with nothing left to work out.

    Integers and decimals with an optional sign, thousands separators and percent sign; ``a/b`` and ``\frac{a}{b}``
    of integers. Arabic digits 0-9 only.
    """
    return _LITERAL.fullmatch(answer) is not None


# A double backslash is a line break, so what follows it is not escaped; but `\\boxed{` (escaped twice) is a box.
_BRACES = re.compile(r"\\boxed\s*\{|\\\\(?!boxed)|\\[{}]|[{}]")

_INTEGER = r"\d+"
_GROUPED = r"\d{1,3}(?:(?:,\\!|\{,\}|\\,|,)\d{3})+"
_NUMBER = rf"(?:(?:{_GROUPED}|{_INTEGER})(?:\.\d+)?|\.\d+)(?:\s*\\?%)?"
_FRACTION = rf"{_INTEGER}\s*/\s*{_INTEGER}|\\[dt]?frac\s*\{{{_INTEGER}\}}\s*\{{{_INTEGER}\}}"
_NEGATIVE_NUMERATOR = rf"\\[dt]?frac\s*\{{-{_INTEGER}\}}\s*\{{{_INTEGER}\}}"
_LITERAL = re.compile(rf"[+-]?\s*(?:{_NUMBER}|{_FRACTION})|{_NEGATIVE_NUMERATOR}", re.ASCII)
