"""What can become of a key of NeMo-RL, and the rows that the table of keys is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Given = Mapping[str, Any]
"""All leaves of the file, resolved, by dotted key."""


NEUTRAL = "off, or at the only value there is here"
"""Reason of a key that would be refused at another value."""


@dataclass(frozen=True)
class Take:
    """Ours, by dotted key; `note` where it is not the same key with the same value."""

    ours: dict[str, Any]
    note: str = ""


@dataclass(frozen=True)
class Leave:
    """It has no meaning here."""

    reason: str


@dataclass(frozen=True)
class Refuse:
    """It would change the result, and there is nothing like it here."""

    reason: str
    instead: str
    """Overrides that make the file acceptable, or what else to do."""


Verdict = Take | Leave | Refuse


@dataclass(frozen=True)
class Leaf:
    """A key of NeMo-RL's with its value, in its file."""

    key: str
    value: Any
    given: Given


Judge = Callable[[Leaf], Verdict]


@dataclass(frozen=True)
class Row:
    """One line of the table; `kind` and `meaning` are for people."""

    kind: str
    meaning: str
    judge: Judge


def same() -> Row:
    """The same key with the same meaning."""
    return Row("taken", "", lambda leaf: Take({leaf.key: leaf.value}))


def renamed(ours: str) -> Row:
    """The same meaning under another name."""
    return Row("taken", f"`{ours}`", lambda leaf: Take({ours: leaf.value}, f"is {ours}"))


def left(reason: str) -> Row:
    """No meaning here."""
    return Row("left out", reason, lambda _: Leave(reason))


def only(*admitted: Any, reason: str, instead: str = "") -> Row:
    """Refused unless it has one of the values with which it changes nothing."""

    def judge(leaf: Leaf) -> Verdict:
        if any(leaf.value == item and isinstance(leaf.value, bool) == isinstance(item, bool) for item in admitted):
            return Leave(NEUTRAL)
        return Refuse(reason, instead or f"{leaf.key}={shown(admitted[0])}")

    values = " or ".join(f"`{shown(item)}`" for item in admitted)
    return Row("refused", f"unless {values}: {reason}" if values else reason, judge)


def by(meaning: str, judge: Judge, kind: str = "converted") -> Row:
    """A rule of its own."""
    return Row(kind, meaning, judge)


def shown(value: Any) -> str:
    """As it stands in YAML."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
