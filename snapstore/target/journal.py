"""The journal of a partial pull: what it is of, what is there already, and who works on it.

A file of JSON lines beside the tree, appended to while data arrives and locked by the process
that does so. Advisory: losing it costs time, believing too much of it would cost data. Hence data
that was not synced counts only within the boot in which it was written: the page cache outlives a
process, but not the machine.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import fcntl
import json
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from snapstore.errors import OutOfSpace, TargetError
from snapstore.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["NO_SPACE", "Journal", "JournalHeldError"]

JOURNAL_BYTES_MAX = 256 * MIB
"""A record of some 80 bytes for every 4 MiB of a terabyte makes 20 MB."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_FORMAT = "snapstore/partial"
NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})


class JournalHeldError(Exception):
    """Another process has the journal locked."""


class Journal:
    """Which ranges of which files are done. Safe from several threads.

    Without a descriptor it is kept in memory only, for places where no journal can be.
    """

    def __init__(self, fd: int | None, identity: str) -> None:
        self._fd = fd
        self._identity = identity
        self._boot = _boot_id()
        self._lock = threading.Lock()
        self._done: dict[bytes, list[tuple[int, int]]] = {}
        self._made: set[bytes] = set()

    @classmethod
    def open(cls, parent_fd: int, name: bytes, identity: str) -> Journal:
        """Open or create a journal and lock it until `close`.

        Raises:
            JournalHeldError: Somebody else has it locked.
            TargetError: It belongs to another user.
            OSError: As `open` has it.
        """
        while True:
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(name, flags, 0o600, dir_fd=parent_fd)
            try:
                _lock(fd, name)
                # Between the two, its last holder may have finished and removed it.
                if _is_still_named(fd, parent_fd, name):
                    return cls(fd, identity)
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def close(self) -> None:
        """Give the lock back; the file stays."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def load(self) -> bool:
        """Read what an earlier process wrote; say whether it was about the same identity.

        A torn last line, as a crash leaves it, is cut off.
        """
        if self._fd is None:
            return False
        data = _read_all(self._fd)
        records, good_bytes = _parse_lines(data)
        head = records[0] if records else {}
        if head.get("format") != _FORMAT or head.get("identity") != self._identity:
            return False
        if good_bytes < len(data):
            os.ftruncate(self._fd, good_bytes)
        self._believe(records)
        self._append({"boot": self._boot})
        return True

    def _believe(self, records: list[dict[str, object]]) -> None:
        """Take what was synced, and what was written since the machine started."""
        boot = None
        unsynced: dict[bytes, list[tuple[int, int, object]]] = {}
        for record in records:
            boot = record.get("boot", boot)
            made = _path_of(record, "made")
            if made is not None:
                self._made.add(made)
            path = _path_of(record, "done")
            start, size = record.get("at"), record.get("size")
            if path is not None and isinstance(start, int) and isinstance(size, int):
                unsynced.setdefault(path, []).append((start, start + size, boot))
            synced = _path_of(record, "durable")
            if synced is not None:
                ranges = self._done.setdefault(synced, [])
                for begin, end, _ in unsynced.pop(synced, ()):
                    _add_range(ranges, begin, end)
        for path, written in unsynced.items():
            for begin, end, in_boot in written:
                if in_boot is not None and in_boot == self._boot:
                    _add_range(self._done.setdefault(path, []), begin, end)

    def start(self) -> None:
        """Begin an empty journal about the identity, durably."""
        self._done.clear()
        self._made.clear()
        if self._fd is not None:
            os.ftruncate(self._fd, 0)
        self._append(
            {"format": _FORMAT, "version": 1, "identity": self._identity, "boot": self._boot}
        )
        if self._fd is not None:
            with _translated():
                os.fsync(self._fd)

    def mark_done(self, path: bytes, offset: int, size_bytes: int) -> None:
        """Note that these bytes of a file are written. Does not block on the disk."""
        self.mark_all_done({path: [(offset, offset + size_bytes)]})

    def mark_all_done(self, ranges: Mapping[bytes, list[tuple[int, int]]]) -> None:
        """Note what is written of several files, as `(begin, end)`, with one write."""
        records: list[Mapping[str, str | int | None]] = []
        with self._lock:
            for path, written in ranges.items():
                done = self._done.setdefault(path, [])
                for begin, end in _merged(written):
                    _add_range(done, begin, end)
                    records.append({"done": _text(path), "at": begin, "size": end - begin})
            self._append(*records)

    def mark_made(self, path: bytes) -> None:
        """Note that a file or link is about to be made by us, where nothing was."""
        with self._lock:
            self._made.add(path)
            self._append({"made": _text(path)})

    def is_made(self, path: bytes) -> bool:
        """Say whether a path was made by a pull that this journal is about."""
        with self._lock:
            return path in self._made

    def mark_durable(self, path: bytes) -> None:
        """Note that what is marked done of a file has been synced, so that it outlives a crash."""
        with self._lock:
            self._append({"durable": _text(path)})

    def is_done(self, path: bytes, offset: int, size_bytes: int) -> bool:
        """Say whether all of a range was marked done."""
        with self._lock:
            ranges = self._done.get(path, [])
            index = bisect.bisect_right(ranges, (offset, _INFINITE)) - 1
            return index >= 0 and offset + size_bytes <= ranges[index][1]

    def done_ranges(self, path: bytes) -> list[tuple[int, int]]:
        """Return offset and length of what is done of a file, in order and merged."""
        with self._lock:
            return [(start, end - start) for start, end in self._done.get(path, [])]

    @property
    def is_empty(self) -> bool:
        """Whether nothing is done yet."""
        return not self._done and not self._made

    def _append(self, *records: Mapping[str, str | int | None]) -> None:
        if self._fd is None:
            return
        lines = "".join(f"{json.dumps(record)}\n" for record in records).encode("ascii")
        with _translated():
            # One write, so that lines of several threads or a crash never mix.
            if os.write(self._fd, lines) < len(lines):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        is_full = error.errno in NO_SPACE
        raise (OutOfSpace if is_full else TargetError)(
            f"cannot write the journal of the pull: {error.strerror}",
            next_step="make room and run it again with --resume" if is_full else "",
        ) from error


_INFINITE = 1 << 64


def _add_range(ranges: list[tuple[int, int]], start: int, end: int) -> None:
    """Add a range to sorted disjoint ones, merging what touches it."""
    first = bisect.bisect_left(ranges, (start, -1))
    if first and ranges[first - 1][1] >= start:
        first -= 1
    last = first
    while last < len(ranges) and ranges[last][0] <= end:
        start, end = min(start, ranges[last][0]), max(end, ranges[last][1])
        last += 1
    ranges[first:last] = [(start, end)]


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sort ranges and join those that touch, so that few records say the same as many."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _lock(fd: int, name: bytes) -> None:
    if os.fstat(fd).st_uid != os.geteuid():
        raise TargetError(
            f"{os.fsdecode(name)!r} belongs to another user",
            next_step="have it removed, or pull as that user",
        )
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise JournalHeldError from error


def _is_still_named(fd: int, parent_fd: int, name: bytes) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(
            os.fstat(fd), os.stat(name, dir_fd=parent_fd, follow_symlinks=False)
        )
    return False


def _read_all(fd: int) -> bytes:
    """Read the journal; one of an impossible size counts as empty."""
    size = os.fstat(fd).st_size
    if size > JOURNAL_BYTES_MAX:
        return b""
    parts = []
    position = 0
    while position < size:
        part = os.pread(fd, size - position, position)
        if not part:
            break
        parts.append(part)
        position += len(part)
    return b"".join(parts)


def _parse_lines(data: bytes) -> tuple[list[dict[str, object]], int]:
    """Decode lines up to the first bad one; return them and how many bytes they take."""
    records: list[dict[str, object]] = []
    good_bytes = 0
    for line in data.splitlines(keepends=True):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not line.endswith(b"\n") or not isinstance(record, dict):
            break
        records.append(record)
        good_bytes += len(line)
    return records, good_bytes


def _path_of(record: dict[str, object], key: str) -> bytes | None:
    text = record.get(key)
    if not isinstance(text, str):
        return None
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # not written by us
        return None


def _text(path: bytes) -> str:
    return path.decode("utf-8", "surrogateescape")


def _boot_id() -> str | None:
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return None
