"""Writing the bytes of streams into the files of a tree, from many threads.

Files are opened when their first byte arrives and finished when their last one has; in between
they are closed and opened again if too many are open at once. Errors of writing and closing are
believed.
"""

from __future__ import annotations

import bisect
import dataclasses
import errno
import os
import threading
from typing import TYPE_CHECKING

from snapstore.errors import OutOfSpace, TargetError
from snapstore.format.tree import EntryType, TreeEntry
from snapstore.fstree import show_path

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from snapstore.repository.read_plan import Destination
    from snapstore.target.place import TreeTarget

__all__ = ["FileShare", "FileSink", "StreamFiles"]

_OPEN_FILES_MAX = 256
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})


@dataclasses.dataclass(frozen=True, slots=True)
class FileShare:
    """The part of a destination that belongs to one file.

    Attributes:
        entry: The file.
        file_offset: Where in the file it goes.
        start: Where in the destination it begins.
        length: Bytes.
    """

    entry: TreeEntry
    file_offset: int
    start: int
    length: int


class StreamFiles:
    """Which files lie where in which stream. Immutable; thread-safe."""

    def __init__(self, trees: Sequence[Sequence[TreeEntry]]) -> None:
        self._files: dict[tuple[int, int], list[TreeEntry]] = {}
        self._ends: dict[tuple[int, int], list[int]] = {}
        for source, tree in enumerate(trees):
            for entry in tree:
                if entry.type is EntryType.FILE and entry.size_bytes:
                    self._files.setdefault((source, entry.stream), []).append(entry)
        for key, files in self._files.items():
            files.sort(key=lambda entry: entry.offset)
            # No two files overlap (`check_tree_against_streams`), so the ends are sorted too.
            self._ends[key] = [entry.offset + entry.size_bytes for entry in files]

    def pieces(self, place: Destination) -> Iterator[FileShare]:
        """Divide a destination among the files that it touches."""
        key = (place.source, place.stream)
        files = self._files.get(key, [])
        end = place.start + place.length
        first = bisect.bisect_right(self._ends.get(key, []), place.start)
        for number in range(first, len(files)):
            entry = files[number]
            if entry.offset >= end:
                break
            start = max(entry.offset, place.start)
            stop = min(entry.offset + entry.size_bytes, end)
            yield FileShare(entry, start - entry.offset, start - place.start, stop - start)


@dataclasses.dataclass(slots=True)
class _OpenFile:
    entry: TreeEntry
    missing_bytes: int
    fd: int = -1
    users: int = 0


class FileSink:
    """Takes decoded bytes to the files of one target. Thread-safe."""

    def __init__(
        self, target: TreeTarget, files: StreamFiles, places: Iterable[Destination]
    ) -> None:
        """Prepare for `places`, all that will be written: so the last byte of a file is known."""
        self._target = target
        self._files = files
        self._lock = threading.Lock()
        self._states: dict[bytes, _OpenFile] = {}
        self._idle: dict[bytes, None] = {}
        for place in places:
            for piece in files.pieces(place):
                state = self._states.setdefault(piece.entry.path, _OpenFile(piece.entry, 0))
                state.missing_bytes += piece.length

    def place(self, place: Destination, data: memoryview) -> None:
        """Write a run of bytes to where it belongs.

        Raises:
            OutOfSpace: There is no room.
            TargetError: A file cannot be written.
        """
        for piece in self._files.pieces(place):
            state = self._enter(piece.entry)
            try:
                _write_all(state, data[piece.start : piece.start + piece.length], piece)
            finally:
                self._leave(state, piece.length)

    def close(self) -> None:
        """Close what is open; after an error some files are. Idempotent."""
        with self._lock:
            for state in self._states.values():
                if state.fd >= 0:
                    os.close(state.fd)
                    state.fd = -1

    def _enter(self, entry: TreeEntry) -> _OpenFile:
        with self._lock:
            state = self._states[entry.path]
            if state.fd < 0:
                self._make_room()
                state.fd = self._target.open_file(entry)
            self._idle.pop(entry.path, None)
            state.users += 1
            return state

    def _leave(self, state: _OpenFile, written: int) -> None:
        with self._lock:
            state.users -= 1
            state.missing_bytes -= written
            if state.users:
                return
            if state.missing_bytes:
                self._idle[state.entry.path] = None
                return
            fd, state.fd = state.fd, -1
        try:
            self._target.finish_file(state.entry, fd)
        finally:
            _close(fd, state.entry)

    def _make_room(self) -> None:
        while len(self._idle) >= _OPEN_FILES_MAX:
            path = next(iter(self._idle))
            del self._idle[path]
            state = self._states[path]
            fd, state.fd = state.fd, -1
            _close(fd, state.entry)


def _write_all(state: _OpenFile, data: memoryview, piece: FileShare) -> None:
    done = 0
    while done < len(data):
        try:
            done += os.pwrite(state.fd, data[done:], piece.file_offset + done)
        except OSError as error:
            _refuse(error, piece.entry, f"at offset {piece.file_offset + done}")


def _close(fd: int, entry: TreeEntry) -> None:
    try:
        os.close(fd)
    except OSError as error:
        _refuse(error, entry, "when closing it")


def _refuse(error: OSError, entry: TreeEntry, where: str) -> None:
    kind = OutOfSpace if error.errno in _NO_SPACE else TargetError
    raise kind(f"cannot write {show_path(entry.path)} {where}: {error.strerror}") from error
