"""Append-only files of records: written by one process, read by slice, linked into checkpoints when sealed."""

from __future__ import annotations

import logging
import os
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from exgrpo_megatron.errors import CheckpointError
from exgrpo_megatron.experience.encoding import HEADER_BYTES, is_whole, record_length

logger = logging.getLogger(__name__)

MAGIC = b"EXGRPO answers 1"
"""What every segment begins with: the name and the version of the format."""


@dataclass(frozen=True)
class Sealed:
    """What a segment must be found to be: its file may be linked, copied and moved, and never changes."""

    size: int
    checksum: int
    """CRC-32 of the whole file."""


class Segment:
    """One file of records after `MAGIC`, or the same bytes in memory where there is no path.

    Only its last records, appended and not flushed, are in this process alone. A sealed segment takes no more.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.size = 0
        self.checksum = 0
        self.live_bytes = 0
        """Of records that somebody still needs; kept by the store."""
        self.sealed = False
        self._holed = False
        self._memory = bytearray()
        self._waiting: list[bytes] = []
        self._pins = _Pins()
        if path is not None:
            path.open("xb").close()
        self.append(MAGIC)

    @classmethod
    def existing(cls, path: Path | None, content: bytes | None, sealed: Sealed) -> Segment:
        """A segment that is there already: the file at `path`, or `content` in memory."""
        segment = cls.__new__(cls)
        segment.path, segment.size, segment.checksum = path, sealed.size, sealed.checksum
        segment.live_bytes, segment.sealed, segment._holed = 0, True, False
        segment._memory, segment._waiting, segment._pins = bytearray(content or b""), [], _Pins()
        return segment

    @property
    def fixed(self) -> Sealed:
        """Raises AssertionError where it is not sealed."""
        assert self.sealed, "a segment that still grows"
        return Sealed(self.size, self.checksum)

    @property
    def dead_bytes(self) -> int:
        return self.size - len(MAGIC) - self.live_bytes

    def append(self, data: bytes) -> int:
        """Take in a record; returns its offset. It is written by the next `flush`."""
        assert not self.sealed, "a sealed segment takes no more"
        offset = self.size
        self._waiting.append(data)
        self.size += len(data)
        self.checksum = zlib.crc32(data, self.checksum)
        return offset

    def flush(self) -> None:
        """Write what was appended, in one go; a process that is killed later loses none of it.

        Raises:
            CheckpointError: it cannot be written, for want of room for example.
        """
        data, self._waiting = b"".join(self._waiting), []
        if self.path is None:
            self._memory += data
        elif data:
            try:
                _append_to(self.path, data)
            except OSError as error:
                raise CheckpointError(
                    f"{self.path}: answers cannot be stored ({error.strerror}): make room, or set "
                    f"experience.store_dir to a folder on another disk"
                ) from error

    def seal(self) -> None:
        """Take no more records."""
        self.flush()
        self.sealed = True

    def read(self, offset: int, length: int) -> bytes:
        """So many bytes; fewer where the file ends, none where it cannot be read."""
        if self._waiting:
            self.flush()
        if self.path is None:
            return bytes(self._memory[offset : offset + length])
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
            try:
                return os.pread(descriptor, length, offset)
            finally:
                os.close(descriptor)
        except OSError as error:
            logger.warning("%s: cannot be read (%s)", self.path, error)
            return b""

    def is_there(self) -> bool:
        """Whether the file has every byte that was flushed; not whether they are the same."""
        if self.path is None:
            return True
        try:
            return not self._holed and self.path.stat().st_size >= self._flushed
        except OSError as error:
            logger.warning("%s: cannot be read (%s)", self.path, error)
            return False

    def fill_up(self) -> None:
        """Where the file is not there as `is_there` says, make it as long again, so that what follows finds its place;
        raises OSError where that cannot be done."""
        if self.path is not None and not self.is_there():
            self._holed = True
            with self.path.open("ab") as file:
                file.truncate(self._flushed)

    def is_unchanged(self) -> bool:
        """Whether a sealed segment is what was sealed, every byte of it."""
        return checksum_of(self) == self.fixed

    def put_into(self, target: Path) -> None:
        """Make `target` the same file by a hard link, or a copy of it where file systems differ or know no links."""
        self.sync()
        if self.path is None:
            target.write_bytes(self._memory)
        else:
            link_or_copy(self.path, target)

    def sync(self) -> None:
        """Onto the disk, whatever happens to the machine."""
        if self.path is not None:
            with self.path.open("rb") as file:
                os.fsync(file.fileno())

    def pin(self) -> None:
        """Keep the file until `unpin`, even if it is dropped."""
        self._pins.add()

    def unpin(self) -> None:
        if self._pins.release():
            self._unlink()

    def drop(self) -> None:
        """Delete the file, once it is not pinned; checkpoints have links of their own."""
        if self._pins.doom():
            self._unlink()

    @property
    def _flushed(self) -> int:
        return self.size - sum(map(len, self._waiting))

    def _unlink(self) -> None:
        self._memory.clear()
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def records(segment: Segment) -> Iterator[tuple[int, bytes]]:
    """(offset, record) of those that are whole, up to the end or to where no record follows; a warning says how much is
    passed over: a process that is killed leaves part of a record, a damaged file more."""
    known = segment.read(0, len(MAGIC)) == MAGIC
    offset, left_out = (len(MAGIC), 0) if known else (segment.size, segment.size)
    while offset < segment.size:
        record = _record_at(segment, offset)
        if is_whole(record):
            yield offset, record
        elif is_whole(_record_at(segment, offset + len(record))):
            left_out += len(record)
        else:
            left_out += segment.size - offset
            break
        offset += len(record)
    if left_out:
        logger.warning("%s: %d of %d bytes are no whole answers and are left out", segment.path, left_out, segment.size)


def scan(segment: Segment) -> Iterator[tuple[int, bytes]]:
    """(offset, bytes) of everything that its header says is a record, whole or not, as long as one follows that can be
    told: a damaged one stands between whole ones, and what breaks off at the end is left out."""
    offset = len(MAGIC)
    while offset < segment.size:
        record = _record_at(segment, offset)
        follows = offset + len(record)
        if not is_whole(record) and not (
            len(record) > HEADER_BYTES
            and len(record) == record_length(record)
            and (follows == segment.size or is_whole(_record_at(segment, follows)))
        ):
            return
        yield offset, record
        offset = follows


def open_unsealed(path: Path) -> Segment:
    """A segment that a process may have been killed in, to be read by `records`: a prefix of what was appended."""
    return Segment.existing(path, None, Sealed(path.stat().st_size, 0))


def checksum_of(segment: Segment) -> Sealed:
    """Size and checksum as they are found to be."""
    checksum, size, piece = 0, 0, 1 << 22
    while data := segment.read(size, piece):
        checksum, size = zlib.crc32(data, checksum), size + len(data)
    return Sealed(size, checksum)


def link_or_copy(source: Path, target: Path) -> None:
    """Replaces `target`, if there is one; raises OSError where neither can be done."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError as error:
        logger.debug("%s is copied to %s: no hard link (%s)", source, target, error)
        shutil.copyfile(source, target)
        with target.open("rb") as file:
            os.fsync(file.fileno())


def _record_at(segment: Segment, offset: int) -> bytes:
    """What stands there, as long as its header says."""
    header = segment.read(offset, HEADER_BYTES)
    return segment.read(offset, record_length(header)) if len(header) == HEADER_BYTES else header


def _append_to(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
    finally:
        os.close(descriptor)


@dataclass
class _Pins:
    """Who still needs a file that another thread may want to delete."""

    count: int = 0
    doomed: bool = False
    lock: Lock = field(default_factory=Lock)

    def add(self) -> None:
        with self.lock:
            self.count += 1

    def release(self) -> bool:
        """Whether it is now to be deleted."""
        with self.lock:
            self.count -= 1
            return self.doomed and self.count == 0

    def doom(self) -> bool:
        """Whether it can be deleted at once."""
        with self.lock:
            self.doomed = True
            return self.count == 0
