"""Reads what W&B wrote offline: records of wandb's own protocol in the frames of a LevelDB log."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, HEADER = 32_768, 7
FIRST, WHOLE, LAST = 2, 1, 4


def records(path: Path) -> Iterator[Any]:
    """Every `Record` of a `.wandb` file, in order. The file begins with 7 bytes of its own."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = path.read_bytes(), HEADER, b""
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:  # the rest of a block that holds no header is padding
            at += BLOCK - at % BLOCK
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (WHOLE, LAST):
            record = Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


def history(path: Path) -> list[dict[str, Any]]:
    """One dict a logged step."""
    return [_values(record.history.item) for record in records(path) if record.HasField("history")]


def summary(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for record in records(path):
        if record.HasField("summary"):
            found |= _values(record.summary.update)
    return found


def config(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for record in records(path):
        if record.HasField("run"):
            found |= _values(record.run.config.update)
    return found


def _values(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
