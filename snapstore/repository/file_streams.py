"""Files of a scanned tree as streams: one stream for each large file, one for all small ones.

Small files share a stream so that a tree of a hundred thousand of them costs a few large frames
and not a frame each; every small file is one chunk, so it still deduplicates by itself.
"""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from snapstore.chunking.content import ContentCutter
from snapstore.chunking.grid import GridCutter
from snapstore.chunking.pages import PageCutter
from snapstore.errors import SourceChanged, SourceError
from snapstore.format.tree import EntryType, TreeEntry
from snapstore.fstree import show_path
from snapstore.repository.windows import WINDOW_BYTES, ByteArray, StreamSource, Window
from snapstore.source.classes import DataClass
from snapstore.source.scan import ScannedTree, check_unchanged, data_ranges, open_source_file
from snapstore.units import KIB

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from snapstore.chunking.base import Cutter
    from snapstore.source.recognise import SourceEntry

__all__ = [
    "CUTTERS",
    "SMALL_CLASS",
    "SMALL_FILE_BYTES",
    "origin_of_file",
    "origin_of_small_files",
    "plan_file_streams",
]

SMALL_FILE_BYTES = 64 * KIB
"""Files below this size share a stream."""

SMALL_CLASS = "small"
CUTTERS: dict[DataClass, Cutter] = {
    DataClass.PAGES: PageCutter(),
    DataClass.TENSORS: ContentCutter(mean_bytes=256 * KIB),
    DataClass.GENERIC: ContentCutter(mean_bytes=64 * KIB),
    DataClass.DEVICE: GridCutter(),
}


def plan_file_streams(
    tree: ScannedTree, items: Sequence[SourceEntry]
) -> tuple[list[StreamSource], list[TreeEntry]]:
    """Assign the files of one rank to streams.

    Args:
        tree: The tree they are in.
        items: All paths of the rank in order.

    Returns:
        The streams in order of their numbers, and the entries with stream and offset filled in.
    """
    files = [item for item in items if item.entry.type is EntryType.FILE]
    small = [item.entry for item in files if 0 < item.entry.size_bytes < SMALL_FILE_BYTES]
    streams: list[StreamSource] = []
    placed: dict[bytes, TreeEntry] = {}
    if small:
        streams.append(_SmallFiles(tree, small))
        offset = 0
        for entry in small:
            placed[entry.path] = msgspec.structs.replace(entry, stream=0, offset=offset)
            offset += entry.size_bytes
    for item in files:
        if item.entry.size_bytes >= SMALL_FILE_BYTES:
            place = msgspec.structs.replace(item.entry, stream=len(streams), offset=0)
            placed[item.entry.path] = place
            streams.append(_LargeFile(tree, item.entry, item.data_class))
    return streams, [placed.get(item.entry.path, item.entry) for item in items]


def origin_of_file(path: bytes) -> str:
    """Say in a manifest where the stream of a large file comes from."""
    return path.decode("utf-8", "backslashreplace")


def origin_of_small_files(count: int) -> str:
    """Say in a manifest where the stream that small files share comes from."""
    return f"{count} files below {SMALL_FILE_BYTES // KIB} KiB"


@dataclasses.dataclass(slots=True)
class _LargeFile:
    """One file as a stream."""

    tree: ScannedTree
    entry: TreeEntry
    kind: DataClass
    fd: int = -1

    @property
    def cutter(self) -> Cutter:
        return CUTTERS[self.kind]

    @property
    def data_class(self) -> str:
        return self.kind.value

    @property
    def origin(self) -> str:
        return origin_of_file(self.entry.path)

    def windows(self) -> Iterator[Window]:
        self.fd = open_source_file(self.tree, self.entry)
        size = self.entry.size_bytes
        position = 0
        for offset, length in data_ranges(self.fd, size):
            begin = max(offset // WINDOW_BYTES * WINDOW_BYTES, position)
            if begin > position:
                yield Window(begin - position, None)
            end = min(-(-(offset + length) // WINDOW_BYTES) * WINDOW_BYTES, size)
            for start in range(begin, end, WINDOW_BYTES):
                yield self._window(start, min(WINDOW_BYTES, end - start))
            position = max(position, end)
        # What is not a whole window is cut as if it were there, so that a file has the same chunks
        # whether its zeros were written or not.
        whole = size // WINDOW_BYTES * WINDOW_BYTES
        if position < whole:
            yield Window(whole - position, None)
        if max(position, whole) < size:
            yield self._window(whole, size - whole)

    def finish(self) -> None:
        check_unchanged(self.fd, self.tree.identities[self.entry.path])
        self.close()

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _window(self, start: int, length: int) -> Window:
        return Window(length, lambda data: _read_exactly(self.fd, data, start, self.entry))


@dataclasses.dataclass(slots=True)
class _SmallFiles:
    """Many files, one after the other, as one stream."""

    tree: ScannedTree
    entries: list[TreeEntry]

    @property
    def cutter(self) -> Cutter:
        return CUTTERS[DataClass.GENERIC]

    @property
    def data_class(self) -> str:
        return SMALL_CLASS

    @property
    def origin(self) -> str:
        return origin_of_small_files(len(self.entries))

    def windows(self) -> Iterator[Window]:
        batch: list[TreeEntry] = []
        length = 0
        for entry in self.entries:
            if length + entry.size_bytes > WINDOW_BYTES:
                yield self._window(batch)
                batch, length = [], 0
            batch.append(entry)
            length += entry.size_bytes
        yield self._window(batch)

    def finish(self) -> None:
        """Nothing to check: each file was checked when it was read."""

    def close(self) -> None:
        """Nothing to release."""

    def _window(self, batch: list[TreeEntry]) -> Window:
        ends = np.cumsum([entry.size_bytes for entry in batch], dtype=np.int64)
        return Window(int(ends[-1]), lambda data: self._load(data, batch), ends)

    def _load(self, data: ByteArray, batch: list[TreeEntry]) -> None:
        position = 0
        for entry in batch:
            fd = open_source_file(self.tree, entry)
            try:
                _read_exactly(fd, data[position : position + entry.size_bytes], 0, entry)
                check_unchanged(fd, self.tree.identities[entry.path])
            finally:
                os.close(fd)
            position += entry.size_bytes


def _read_exactly(fd: int, data: ByteArray, offset: int, entry: TreeEntry) -> None:
    view = data.data
    done = 0
    while done < len(view):
        try:
            got = os.preadv(fd, [view[done:]], offset + done)
        except OSError as error:
            raise SourceError(
                f"cannot read {show_path(entry.path)} at offset {offset + done}: {error.strerror}"
            ) from error
        if got == 0:
            raise SourceChanged(
                f"{show_path(entry.path)} became shorter while it was read",
                next_step="push again when nothing writes to the tree any more",
            )
        done += got
