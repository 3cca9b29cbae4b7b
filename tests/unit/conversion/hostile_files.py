"""Damage for files of a checkpoint, the same for the same seed: bytes changed, and values of JSON that make trouble."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

NASTY: list[Any] = [
    None, True, -1, 0, 0.5, 2**31, 2**63, 2**64, 10**400, "", "..", "../outside", "/etc/passwd", "a\x00b", "é" * 5000,
    [], {}, [-1, 2], [2**62, 2**62], [0, 2**63], [1] * 100, ["x"], {"a": {"b": []}},
]  # fmt: skip

RAW = [b"NaN", b"1e999", b"-Infinity", b"[" * 100_000, b'{"a":' * 50_000, b"\xff\xfe", b'{"a":1,"a":2}', b"9" * 10_000]
"""Values that only the text of a JSON file can hold."""


def damaged_bytes(content: bytes, chance: random.Random) -> bytes:
    """Bytes flipped, cut out, doubled, put in, or the end cut off."""
    at, span = chance.randrange(len(content)), chance.randrange(1, 40)
    made = bytearray(content)
    kind = chance.randrange(6)
    if kind == 0:
        for _ in range(chance.randrange(1, 8)):
            made[chance.randrange(len(made))] ^= 1 << chance.randrange(8)
    elif kind == 1:
        del made[at:]
    elif kind == 2:
        del made[at : at + span]
    elif kind == 3:
        made[at:at] = made[at : at + span]
    elif kind == 4:
        made[at : at + span] = bytes(chance.randrange(256) for _ in range(span))
    else:
        made[at : at + 8] = b"\xff" * 8
    return bytes(made)


def damaged_json(content: bytes, chance: random.Random) -> bytes:
    """One value replaced, removed or renamed."""
    tree = json.loads(content)
    holder, key = chance.choice(list(_places(tree)))
    kind = chance.randrange(10)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[chance.choice(["", "x" * 3000, "__metadata__", "../up"])] = holder.pop(key)
    elif kind == 2:
        mark = "here it goes"
        holder[key] = mark
        return json.dumps(tree).encode().replace(json.dumps(mark).encode(), chance.choice(RAW))
    else:
        holder[key] = chance.choice(NASTY)
    return json.dumps(tree).encode()


def damaged_header(content: bytes, chance: random.Random) -> bytes:
    """A safetensors file with other JSON in its header, whose length is right but for one time in five."""
    length = int.from_bytes(content[:8], "little")
    header = damaged_json(content[8 : 8 + length], chance)
    announced = len(header) if chance.randrange(5) else chance.choice([0, 1, length * 2, 2**40, 2**63, 2**64 - 1])
    return announced.to_bytes(8, "little") + header + content[8 + length :]


def damage(path: Path, kinds: list[Callable[[bytes, random.Random], bytes]], seed: int) -> None:
    """Damage a file in one of the ways."""
    chance = random.Random(seed)
    path.write_bytes(chance.choice(kinds)(path.read_bytes(), chance))


def _places(tree: Any) -> Any:
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in entries:
        yield tree, key
        yield from _places(value)
