"""Reads a pickle as plain data: named classes become records, nothing is imported, looked up or called.

`pickle.Unpickler` with an allow-list still lets a file set attributes of the admitted classes, ask for a memo of any
size, and hash tuples nested a million deep. This machine knows the opcodes that plain data needs; its memory is bounded
by the size of the file.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from exgrpo_conversion.errors import ModelFolderError

PERSISTENT = "persistent id"
"""Name of the record of something that lies outside the pickle, such as the bytes of a tensor."""


@dataclass(eq=False)
class Global:
    """A class or function that the pickle names, such as `torch.Size`."""

    name: str


@dataclass(eq=False)
class Record:
    """What a call of `name` with `args`, and then `state`, would have made."""

    name: str
    args: tuple[Any, ...]
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)
    """What was put into it, if it is a kind of dictionary."""

    def value(self, name: str) -> Any:
        """An entry of a state that is a dictionary; None where there is none."""
        return self.state.get(name) if isinstance(self.state, dict) else None


def read_records(data: bytes, admitted: Collection[str] | None, where: str) -> Any:
    """The object in a pickle: plain data, dictionaries, lists, tuples and records of the `admitted` names (None: any).

    Records compare by identity, also as keys of a dictionary. `where` names the file in messages.

    Raises:
        ModelFolderError: another name, another opcode than plain data needs, or damaged data.
    """
    machine = _Machine(admitted)
    try:
        for opcode, argument, _ in pickletools.genops(data):
            step = _STEPS.get(opcode.name)
            if step is None:
                raise ModelFolderError(f"{where} is refused: pickle opcode {opcode.name} has no place in plain data")
            step(machine, argument)
        return machine.pop(Any)
    except _RefusedNameError as error:
        raise ModelFolderError(
            f"{where} is refused: it asks for {error}, and reading it could run code of its author"
        ) from None
    except (ValueError, IndexError, KeyError, TypeError) as error:
        if isinstance(error, ModelFolderError):
            raise
        raise ModelFolderError(f"{where} is damaged: {error}") from error


class _RefusedNameError(Exception):
    pass


class _Mark:
    pass


class _Machine:
    def __init__(self, admitted: Collection[str] | None) -> None:
        self.admitted = admitted
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def pop(self, kind: Any) -> Any:
        value = self.stack.pop()
        if isinstance(value, _Mark) or (kind is not Any and not isinstance(value, kind)):
            raise ValueError(f"a {type(value).__name__.strip('_').lower()} stands where it has no meaning")
        return value

    def pop_to_mark(self) -> list[Any]:
        values = []
        while not isinstance(value := self.stack.pop(), _Mark):
            values.append(value)
        return values[::-1]

    def remember(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def push_global(self, name: str) -> None:
        if self.admitted is not None and name not in self.admitted:
            raise _RefusedNameError(name)
        self.stack.append(Global(name))

    def make(self) -> None:
        arguments, target = self.pop(tuple), self.pop(Global)
        self.stack.append(Record(target.name, arguments))

    def build(self) -> None:
        state, record = self.pop(Any), self.pop(Record)
        record.state = state
        self.stack.append(record)

    def append(self, values: list[Any]) -> None:
        target = self.pop(list)
        target.extend(values)
        self.stack.append(target)

    def set_items(self, flat: list[Any]) -> None:
        target = self.pop((dict, Record))
        items = target.items if isinstance(target, Record) else target
        for key, value in zip(flat[::2], flat[1::2], strict=True):
            if not isinstance(key, _KEYS) and not (isinstance(key, tuple) and all(isinstance(it, _KEYS) for it in key)):
                raise ValueError(f"a {type(key).__name__} is the key of a dictionary")
            items[key] = value
        self.stack.append(target)


# Tuples of tuples are left out: hashing one that is nested a million deep ends the process.
_KEYS = (str, int, float, bytes, Record, Global, type(None))


def _push(make: Callable[[Any], Any]) -> Callable[[_Machine, Any], None]:
    return lambda machine, argument: machine.stack.append(make(argument))


def _stack_global(machine: _Machine, _: Any) -> None:
    name, module = machine.pop(str), machine.pop(str)
    machine.push_global(f"{module}.{name}")


def _small_tuple(size: int) -> Callable[[_Machine, Any], None]:
    def step(machine: _Machine, _: Any) -> None:
        values = [machine.pop(Any) for _ in range(size)]
        machine.stack.append(tuple(values[::-1]))

    return step


_PLAIN = (
    "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "SHORT_BINBYTES", "BINBYTES",
)  # fmt: skip

_STEPS: dict[str, Callable[[_Machine, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda _machine, _argument: None),
    **dict.fromkeys(
        (
            "BININT",
            "BININT1",
            "BININT2",
            "LONG1",
            "BINFLOAT",
            "SHORT_BINUNICODE",
            "BINUNICODE",
            "SHORT_BINBYTES",
            "BINBYTES",
        ),
        _push(lambda it: it),
    ),
    "NONE": _push(lambda _: None),
    "NEWTRUE": _push(lambda _: True),
    "NEWFALSE": _push(lambda _: False),
    "EMPTY_DICT": _push(lambda _: {}),
    "EMPTY_LIST": _push(lambda _: []),
    "EMPTY_TUPLE": _push(lambda _: ()),
    "MARK": _push(lambda _: _Mark()),
    "TUPLE": lambda machine, _: machine.stack.append(tuple(machine.pop_to_mark())),
    "TUPLE1": _small_tuple(1),
    "TUPLE2": _small_tuple(2),
    "TUPLE3": _small_tuple(3),
    "MEMOIZE": lambda machine, _: machine.remember(len(machine.memo)),
    "BINPUT": lambda machine, index: machine.remember(index),
    "LONG_BINPUT": lambda machine, index: machine.remember(index),
    "BINGET": lambda machine, index: machine.stack.append(machine.memo[index]),
    "LONG_BINGET": lambda machine, index: machine.stack.append(machine.memo[index]),
    "GLOBAL": lambda machine, name: machine.push_global(name.replace(" ", ".")),
    "STACK_GLOBAL": _stack_global,
    "BINPERSID": lambda machine, _: machine.stack.append(Record(PERSISTENT, machine.pop(tuple))),
    "REDUCE": lambda machine, _: machine.make(),
    "NEWOBJ": lambda machine, _: machine.make(),
    "BUILD": lambda machine, _: machine.build(),
    "APPEND": lambda machine, _: machine.append([machine.pop(Any)]),
    "APPENDS": lambda machine, _: machine.append(machine.pop_to_mark()),
    "SETITEM": lambda machine, _: machine.set_items([machine.pop(Any), machine.pop(Any)][::-1]),
    "SETITEMS": lambda machine, _: machine.set_items(machine.pop_to_mark()),
}
