"""A stored answer as bytes: a header with a checksum, the question's id, and token ids and log-probs as `compact` has
them.

Log-probs are rounded to multiples of 2^-20 (`rounded`), so that an importance ratio changes by a factor within
1 +- 4.8e-7: no more than the spacing of float32 numbers at -4 and below. The rounded values are exact in float32, and
rounding them again changes nothing: what is read is what was recorded.

Answers with a log-prob above 0, or too large, are byte by byte in zstd, as all answers of earlier versions are.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from exgrpo_megatron.experience.compact import pack, unpack
from exgrpo_megatron.types import Logprobs, StoredAnswer, TokenIds

LOGPROB_UNIT = 2.0**-20
"""Recorded log-probs are multiples of this, in nats."""
LARGEST_FIXED = 2.0**10
"""Answers with a log-prob of this size or more are kept as float32, unrounded."""
HEADER_BYTES = 32
_HEADER = struct.Struct("<IIIiqIHBB")
_FIXED, _FLOAT, _COMPACT = 0, 1, 2
_ZSTD_LEVEL = 3
_TOKENS_AT_ONCE = 2**12
"""Answers are encoded together up to so many tokens, which stay in the processor's cache."""


@dataclass(frozen=True)
class Record:
    """What one record holds."""

    question_id: str
    serial: int
    """Place in the order in which the run met its correct answers; the same on every number of ranks."""
    answer: StoredAnswer


def rounded(logprobs: Logprobs) -> Logprobs:
    """The log-probs as they are stored: the nearest multiples of `LOGPROB_UNIT`, or what is too large unchanged."""
    if _is_fixed(logprobs):
        return (np.rint(logprobs.astype(np.float64) / LOGPROB_UNIT) * LOGPROB_UNIT).astype(np.float32)
    return np.array(logprobs, np.float32)


def encode_all(items: Sequence[tuple[str, int, StoredAnswer]]) -> list[bytes]:
    """The records of answers with their question's id and their serial; ids are not negative, and log-probs are one a
    token."""
    records, begin = [], 0
    while begin < len(items):
        end, tokens = begin + 1, len(items[begin][2].token_ids)
        while end < len(items) and tokens + len(items[end][2].token_ids) <= _TOKENS_AT_ONCE:
            tokens += len(items[end][2].token_ids)
            end += 1
        records += _encoded(items[begin:end])
        begin = end
    return records


def encode(question_id: str, serial: int, answer: StoredAnswer) -> bytes:
    """`encode_all` for one."""
    return encode_all([(question_id, serial, answer)])[0]


def record_length(header: bytes) -> int:
    """Bytes of the whole record that begins with these `HEADER_BYTES`, if it is one."""
    return HEADER_BYTES + int.from_bytes(header[4:8], "little")


def is_whole(record: bytes) -> bool:
    """Whether the bytes are one record, unchanged since it was written."""
    if len(record) < HEADER_BYTES or len(record) != record_length(record):
        return False
    return zlib.crc32(memoryview(record)[4:]) == int.from_bytes(record[:4], "little")


def may_be_headers(rows: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Which rows of `HEADER_BYTES` could begin a record, by its kind and its bytes of an id."""
    kinds, id_bytes = rows[:, 30], rows[:, 31]
    return np.where(kinds == _COMPACT, id_bytes == 0, (kinds < _COMPACT) & (id_bytes >= 1) & (id_bytes <= 4))


def decode(record: bytes) -> Record:
    """Inverse of `encode`, for a record that is whole; raises ValueError where it is not."""
    _, _, serial, step, version, length, name_length, kind, id_bytes = _HEADER.unpack_from(record)
    name_end = HEADER_BYTES + name_length
    body = record[name_end:]
    if kind == _COMPACT:
        ids, units = unpack(body, length)
        # From 0: a log-prob of 0 is none of -0.
        logprobs = (0.0 - units * LOGPROB_UNIT).astype(np.float32)
    elif kind in (_FIXED, _FLOAT):
        ids, logprobs = _from_planes(body, length, kind, id_bytes)
    else:
        raise ValueError(f"a record of kind {kind}, of a later version")
    answer = StoredAnswer(_frozen(ids.astype(np.int32)), _frozen(logprobs), version, step, serial)
    return Record(record[HEADER_BYTES:name_end].decode(), serial, answer)


def serial_of(record: bytes) -> int:
    return int.from_bytes(record[8:12], "little")


def facts_of(header: bytes) -> tuple[int, int]:
    """(step, number of tokens) of the record that begins with these `HEADER_BYTES`."""
    _, _, _, step, _, length, _, _, _ = _HEADER.unpack(header)
    return step, length


def _encoded(items: Sequence[tuple[str, int, StoredAnswer]]) -> list[bytes]:
    counts = [len(answer.token_ids) for _, _, answer in items]
    units = np.rint(np.concatenate([answer.logprobs for _, _, answer in items], dtype=np.float64) / -LOGPROB_UNIT)
    fits = (units >= 0) & (units < LARGEST_FIXED / LOGPROB_UNIT)
    if not fits.all() or not all(counts):
        return [_record(item, *_planes_of(item[2])) if len(items) == 1 else _encoded([item])[0] for item in items]
    ids = np.concatenate([answer.token_ids for _, _, answer in items]).astype(np.int64)
    bodies = pack(ids, units.astype(np.int64), counts)
    return [_record(item, _COMPACT, 0, body) for item, body in zip(items, bodies, strict=True)]


def _record(item: tuple[str, int, StoredAnswer], kind: int, id_bytes: int, body: bytes) -> bytes:
    question_id, serial, answer = item
    name = question_id.encode()
    body = name + body
    length = len(answer.token_ids)
    rest = _HEADER.pack(0, len(body), serial, answer.step, answer.policy_version, length, len(name), kind, id_bytes)
    checksum = zlib.crc32(body, zlib.crc32(rest[4:]))
    return checksum.to_bytes(4, "little") + rest[4:] + body


def _planes_of(answer: StoredAnswer) -> tuple[int, int, bytes]:
    """Kind, bytes of an id, and body."""
    kind = _FIXED if _is_fixed(answer.logprobs) else _FLOAT
    planes = _token_planes(answer.token_ids)
    return kind, len(planes), _compressed([*planes, *_logprob_planes(answer.logprobs, kind)])


def _from_planes(body: bytes, length: int, kind: int, id_bytes: int) -> tuple[NDArray[np.int64], Logprobs]:
    wide = id_bytes + 4
    planes = np.frombuffer(_decompressed(body, wide * length), np.uint8).reshape(wide, length)
    return _joined(planes[:id_bytes]).astype(np.int64), _logprobs(_joined(planes[id_bytes:]), kind)


def _is_fixed(logprobs: Logprobs) -> bool:
    return bool(np.abs(logprobs).max(initial=0) < LARGEST_FIXED)


def _token_planes(token_ids: TokenIds) -> list[bytes]:
    """Byte by byte, least first; no more planes than the largest id needs."""
    count = max(1, (int(token_ids.max(initial=0)).bit_length() + 7) // 8)
    return _planes(token_ids.astype("<u4"), count)


def _logprob_planes(logprobs: Logprobs, kind: int) -> list[bytes]:
    if kind == _FLOAT:
        return _planes(logprobs.astype("<f4").view("<u4"), 4)
    # Nearly all are negative: zigzag keeps their upper bytes zero.
    units = np.rint(logprobs.astype(np.float64) / LOGPROB_UNIT).astype(np.int64)
    return _planes(np.where(units > 0, 2 * units - 1, -2 * units).astype("<u4"), 4)


def _logprobs(values: NDArray[np.uint32], kind: int) -> Logprobs:
    if kind == _FLOAT:
        return values.view(np.float32)
    whole = values.astype(np.int64)
    units = np.where(whole & 1, (whole + 1) // 2, -(whole // 2))
    return (units * LOGPROB_UNIT).astype(np.float32)


def _planes(values: NDArray[np.uint32], count: int) -> list[bytes]:
    octets = values.view(np.uint8).reshape(len(values), 4)
    return [octets[:, plane].tobytes() for plane in range(count)]


def _joined(planes: NDArray[np.uint8]) -> NDArray[np.uint32]:
    octets = np.zeros((planes.shape[1], 4), np.uint8)
    octets[:, : len(planes)] = planes.T
    return octets.view("<u4")[:, 0].copy()


def _compressed(planes: list[bytes]) -> bytes:
    return _codec().compress(b"".join(planes), asbytes=True)


def _decompressed(data: bytes, size: int) -> bytes:
    return _codec().decompress(data, decompressed_size=size, asbytes=True)


def _codec() -> Any:
    return pa.Codec("zstd", compression_level=_ZSTD_LEVEL)


def _frozen(values: Any) -> Any:
    values.flags.writeable = False
    return values
