"""Token ids and log-probs of answers in few bytes: of each number its class, its leading bits and their place, which
deflate makes small, and the bits below them as they are, for they are as good as random.

With L leading bits numbers below 2^(L+1) are classes of their own; from there on a class is a power of two and the L
bits that follow it. A class is a byte: numbers below 2^32 have at most (31 - L) 2^L + 2^(L+1) of them.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
"""At least 0, below 2^31."""
Symbols = NDArray[np.intp]
"""Classes of ids, and classes of log-probs 256 above them."""

_ID_LEADING, _UNIT_LEADING = 3, 1
_LEAST_DEFLATED = 32
"""Shorter lists of classes stay as they are: deflate's own bytes would be more than it saves."""
_WINDOW = -15
"""Of deflate without header and checksum: records have their own."""
_SMALL_WINDOW, _SMALL_MEMORY = -9, 5
"""Where nothing is looked for, and what is ready sooner."""


def pack(ids: Numbers, units: Numbers, counts: Sequence[int]) -> list[bytes]:
    """Answers that lie one behind the other, of so many tokens each: classes of the ids, classes of the log-probs,
    given in whole units, and all bits below these.

    Of ids deflate also looks for what comes again; log-probs do not.
    """
    symbols = np.concatenate([_classes(ids, _ID_LEADING), _classes(units, _UNIT_LEADING) + 256])
    octets = symbols.astype(np.uint8).tobytes()
    bits = _packed(np.concatenate([ids, units]), symbols, [*counts, *counts])
    bodies, begin = [], 0
    for place, count in enumerate(counts):
        second = len(ids) + begin
        bodies.append(
            _deflated(octets[begin : begin + count], search=True)
            + _deflated(octets[second : second + count], search=False)
            + bits[place]
            + bits[len(counts) + place]
        )
        begin += count
    return bodies


def unpack(body: bytes, count: int) -> tuple[Numbers, Numbers]:
    """The ids and log-probs of one answer; raises ValueError where that is not what the bytes hold."""
    id_octets, rest = _inflated(body, count)
    unit_octets, bits = _inflated(rest, count)
    symbols = np.frombuffer(id_octets + unit_octets, np.uint8).astype(np.intp)
    symbols[count:] += 256
    numbers = _unpacked(bits, symbols, count)
    return numbers[:count], numbers[count:]


def _tables() -> tuple[Numbers, NDArray[np.uint64], NDArray[np.uint64]]:
    """By symbol: bits below the leading ones, the smallest number, and a mask of those bits."""
    classes = np.arange(256)
    below = [np.minimum(np.maximum((classes >> leading) - 1, 0), 32) for leading in (_ID_LEADING, _UNIT_LEADING)]
    bases = [
        (classes - (bits << leading)) << bits for bits, leading in zip(below, (_ID_LEADING, _UNIT_LEADING), strict=True)
    ]
    widths = np.concatenate(below)
    masks = (np.uint64(1) << widths.astype(np.uint64)) - np.uint64(1)
    return widths, np.concatenate(bases).astype(np.uint64), masks


_WIDTHS, _BASES, _MASKS = _tables()


def _classes(numbers: Numbers, leading: int) -> Symbols:
    exponents = numbers.astype(np.float64).view(np.int64) >> 52
    below = np.maximum(exponents - (1023 + leading), 0)
    classes: Symbols = (below << leading) + (numbers >> below)
    return classes


def _packed(values: Numbers, symbols: Symbols, counts: Sequence[int]) -> list[bytes]:
    """The bits of the values below their leading ones, without gaps, lot by lot: each from a byte on."""
    widths = _WIDTHS.take(symbols)
    ends = widths.cumsum()
    last = ends[np.cumsum(counts) - 1]
    lengths = np.diff(last, prepend=0)
    # Here each lot begins with a word of 32 bits.
    words = (lengths + 31) >> 5
    firsts = words.cumsum() - words
    starts = ends - widths + np.repeat((firsts << 5) - (last - lengths), counts)
    moved = values.view(np.uint64) & _MASKS.take(symbols)
    moved <<= (starts & 31).view(np.uint64)
    places = starts >> 5
    begins = np.flatnonzero(np.diff(places, prepend=-1))
    # No bit is set by two values: a sum is an or. What is beyond 32 bits belongs to the next word.
    joined = np.zeros(int(words.sum()) + 1, np.uint64)
    joined[places.take(begins)] = np.add.reduceat(moved, begins)
    joined[1:] += joined[:-1] >> np.uint64(32)
    data = joined.astype("<u4").tobytes()
    ranges = zip(firsts.tolist(), lengths.tolist(), strict=True)
    return [data[4 * first : 4 * first + (length + 7) // 8] for first, length in ranges]


def _unpacked(bits: bytes, symbols: Symbols, count: int) -> Numbers:
    """The numbers of two lots of so many, one behind the other."""
    widths = _WIDTHS.take(symbols)
    ends = widths.cumsum()
    starts = ends - widths
    if count:
        gap = -int(ends[count - 1]) % 8
        starts[count:] += gap
        length = (int(ends[-1]) + gap + 7) // 8
    else:
        length = 0
    if len(bits) != length:
        raise ValueError(f"{len(bits)} bytes in place of {length}")
    # From every byte on the eight that begin there, as one number.
    words = np.ndarray(length + 1, "<u8", bits + bytes(8), strides=(1,))
    numbers = words.take(starts >> 3)
    numbers >>= (starts & 7).view(np.uint64)
    numbers &= _MASKS.take(symbols)
    numbers += _BASES.take(symbols)
    return numbers.view(np.int64)


def _deflated(classes: bytes, *, search: bool) -> bytes:
    """`search`: for what comes again, beside counting how often each class comes."""
    if len(classes) < _LEAST_DEFLATED:
        return classes
    if search:
        packer = zlib.compressobj(6, zlib.DEFLATED, _WINDOW)
    else:
        packer = zlib.compressobj(6, zlib.DEFLATED, _SMALL_WINDOW, _SMALL_MEMORY, zlib.Z_HUFFMAN_ONLY)
    return packer.compress(classes) + packer.flush()


def _inflated(data: bytes, count: int) -> tuple[bytes, bytes]:
    """So many classes, and the bytes that follow them."""
    if count < _LEAST_DEFLATED:
        classes, rest = data[:count], data[count:]
    else:
        unpacker = zlib.decompressobj(_WINDOW)
        try:
            # One more than there should be: then the end of the stream is read as well.
            classes = unpacker.decompress(data, count + 1)
        except zlib.error as error:
            raise ValueError(str(error)) from error
        rest = unpacker.unused_data
    if len(classes) != count:
        raise ValueError(f"{len(classes)} classes in place of {count}")
    return classes, rest
