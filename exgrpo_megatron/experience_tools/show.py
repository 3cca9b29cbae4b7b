"""One question: what happened to it in the run, and the answers stored for it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from rich.console import Console

from exgrpo_megatron.errors import DataError
from exgrpo_megatron.experience.files import Row
from exgrpo_megatron.experience.history import Event, read_history
from exgrpo_megatron.experience_tools.sources import Source
from exgrpo_megatron.experience_tools.texts import Texts

MAX_FOUND = 10
"""Questions that a search names."""


def show_question(source: Source, wanted: str, texts: Texts, last: int | None, console: Console) -> None:
    """Print the question that `wanted` names (see `find_question`), the last events of its history (None: all) and its
    stored answers.

    Raises:
        DataError: no question or several match, or a file cannot be read.
    """
    name = find_question(source, wanted, texts)
    rows = list(source.reader().rows(only={name}))
    steps = list(read_history(source.history, name)) if source.history else None
    _say(console, f"question {name}")
    if texts.questions.get(name):
        _say(console, _indented(texts.questions[name]))
    _say(console, _state(source, name, rows))
    for line in _history_lines(steps, last):
        _say(console, line)
    for row in rows:
        _say(console, _answer_line(row))
        text = texts.of_answer(row.answer)
        if text is not None:
            _say(console, _indented(text))
    for note in texts.notes:
        _say(console, f"note: {note}")


def find_question(source: Source, wanted: str, texts: Texts) -> str:
    """The id `wanted`, or the one id that begins with it, or the one question whose text has it (in any case).

    Raises:
        DataError: there is none, or more than one; names the first of them.
    """
    ids = _known_ids(source)
    if wanted in ids or wanted in texts.questions:
        return wanted
    begins = [name for name in {**ids, **texts.questions} if name.startswith(wanted)]
    if begins:
        return _only_one(wanted, "ids begin with it", begins, texts)
    needle = wanted.casefold()
    found = [name for name, text in texts.questions.items() if needle in text.casefold()]
    if found:
        return _only_one(wanted, "questions have it in their text", found, texts)
    searched = "their texts" if texts.questions else "(texts of questions are not at hand)"
    notes = "".join(f"; {note}" for note in texts.notes)
    raise DataError(f"{wanted!r}: no question of {source.path} by id, beginning of an id, or text {searched}{notes}")


def _known_ids(source: Source) -> dict[str, None]:
    """Of stored and retired questions, and those of the history."""
    ids = dict.fromkeys(source.reader().ids())
    summary = source.summary()
    ids |= dict.fromkeys(summary.retired if summary else ())
    if source.history:
        ids |= {event.question_id: None for _, events in read_history(source.history) for event in events}
    return ids


def _only_one(wanted: str, what: str, found: list[str], texts: Texts) -> str:
    if len(found) == 1:
        return found[0]
    listed = "; ".join(f"{name!r} {texts.questions.get(name, '')[:60]}".strip() for name in found[:MAX_FOUND])
    more = f"; and {len(found) - MAX_FOUND} more" if len(found) > MAX_FOUND else ""
    raise DataError(f"{wanted!r}: {len(found)} {what}: {listed}{more}")


def _state(source: Source, name: str, rows: list[Row]) -> str:
    summary = source.summary()
    if summary and name in summary.retired:
        return "retired: solved by every answer of a group"
    if not rows:
        return "no stored answer"
    size = source.reader().group_size
    of = f" of {size}" if size else ""
    return f"stored answers: {len(rows)}; last answered correctly {rows[0].bucket}{of} times"


def _history_lines(steps: list[tuple[int, list[Event]]] | None, last: int | None) -> Iterable[str]:
    if not steps:
        return ["history: none is kept beside these answers"]
    events = [(step, event) for step, listed in steps for event in listed]
    shown = events[max(0, len(events) - last) :] if last is not None else events
    hidden = len(events) - len(shown)
    width = len(str(steps[-1][0]))
    return [
        f"history of {len(steps)} steps, {steps[0][0]} to {steps[-1][0]}"
        + ("" if events else ": nothing happened to it"),
        *([f"  ... {hidden} earlier events"] if hidden else []),
        *(f"  step {step:>{width}}  {event.describe()}" for step, event in shown),
    ]


def _answer_line(row: Row) -> str:
    answer = row.answer
    serial = f" {answer.serial}" if answer.serial >= 0 else ""
    entropy = -float(np.mean(answer.logprobs, dtype=np.float64))
    return (
        f"answer{serial}: stored in step {answer.step} from version {answer.policy_version} of the weights, "
        f"{len(answer.token_ids)} tokens, mean -log-prob {entropy:.3f}"
    )


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
