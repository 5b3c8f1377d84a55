"""One rank whose files arrive: their streams, small files together, and the tree at the end."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from snapstore.repository.arriving_file import Allowance, held_by_small_file, is_loaded
from snapstore.repository.file_streams import (
    CUTTERS,
    SMALL_CLASS,
    origin_of_file,
    origin_of_small_files,
)
from snapstore.repository.ingest import IngestStream, window_data
from snapstore.repository.windows import WINDOW_BYTES, Window
from snapstore.source.classes import DataClass

if TYPE_CHECKING:
    from snapstore.format.tree import TreeEntry
    from snapstore.repository.rank_builder import RankBuilder
    from snapstore.repository.window_feed import WindowFeed

__all__ = ["ArrivingRank"]


class _SmallFile(NamedTuple):
    path: bytes
    data: bytes


class ArrivingRank:
    """Files of one rank, in any order and from any threads. Thread-safe, but for `entries`."""

    def __init__(self, builder: RankBuilder, feed: WindowFeed, held: Allowance) -> None:
        """Prepare.

        Args:
            builder: Of its manifest; only the pipeline adds to its streams.
            feed: Takes windows of small files.
            held: What small files hold is given back to it.
        """
        self.builder = builder
        self._feed = feed
        self._held = held
        self._lock = threading.Lock()
        self._files: dict[bytes, TreeEntry] = {}
        self._large: dict[bytes, int] = {}
        """The builder's stream of each file that has one of its own."""
        self._waiting: list[_SmallFile] = []
        self._waiting_bytes = 0
        self._filling = threading.Lock()
        """Taken for as long as a window of small files is filled, so that they stay in order."""
        self._small: IngestStream | None = None
        self._small_bytes = 0
        self._offsets: dict[bytes, int] = {}
        """Where in the shared stream each small file is."""

    def begin_stream(self, path: bytes, kind: DataClass) -> IngestStream:
        """Make a stream of a large file."""
        with self._lock:
            number = self.builder.add_stream(data_class=kind.value, origin=origin_of_file(path))
            self._large[path] = number
        return IngestStream(CUTTERS[kind], self.builder, number)

    def add_small(self, path: bytes, data: bytes) -> None:
        """Let a small file wait for others, and keep what `held_by_small_file` says of it.

        Raises:
            SnapError: The writing failed or was aborted.
        """
        with self._lock:
            is_full = self._waiting_bytes + len(data) > WINDOW_BYTES
        if is_full:
            self.flush_small()
        with self._lock:
            self._waiting.append(_SmallFile(path, data))
            self._waiting_bytes += len(data)

    def end_file(self, entry: TreeEntry) -> None:
        """Take note of a complete file and its size."""
        with self._lock:
            self._files[entry.path] = entry

    def flush_small(self) -> None:
        """Let the small files that wait fill windows, sorted by path as a push has them.

        Raises:
            SnapError: The writing failed or was aborted.
        """
        with self._filling:
            with self._lock:
                waiting = sorted(self._waiting)
                self._waiting, self._waiting_bytes = [], 0
            batch: list[_SmallFile] = []
            size = 0
            # More than one window only where several threads added to it at once.
            for file in waiting:
                if size + len(file.data) > WINDOW_BYTES:
                    self._fill_window(batch)
                    batch, size = [], 0
                batch.append(file)
                size += len(file.data)
            if batch:
                self._fill_window(batch)

    def _fill_window(self, batch: list[_SmallFile]) -> None:
        if self._small is None:
            with self._lock:
                number = self.builder.add_stream(data_class=SMALL_CLASS, origin="")
            self._small = IngestStream(CUTTERS[DataClass.GENERIC], self.builder, number)
        buffer = self._feed.acquire()
        data = window_data(buffer)
        ends = np.cumsum([len(file.data) for file in batch], dtype=np.int64)
        for file, end in zip(batch, ends.tolist(), strict=True):
            begin = end - len(file.data)
            data[begin:end] = np.frombuffer(file.data, np.uint8)
            self._offsets[file.path] = self._small_bytes + begin
        length = int(ends[-1])
        self._small_bytes += length
        self._feed.submit(self._small, Window(length, is_loaded, ends), buffer, final=False)
        self._held.give(sum(held_by_small_file(len(file.data)) for file in batch))

    def entries(self) -> list[TreeEntry]:
        """Number the streams as a push does, and say where each file is.

        Called once, when all files are complete and all windows went through.
        """
        order = [self._large[path] for path in sorted(self._large)]
        if self._small is not None:
            self.builder.set_origin(self._small.number, origin_of_small_files(len(self._offsets)))
            order.insert(0, self._small.number)
        self.builder.arrange(order)
        place = {number: index for index, number in enumerate(order)}
        found = []
        for path, entry in self._files.items():
            stream, offset = 0, self._offsets.get(path, 0)
            if path in self._large:
                stream = place[self._large[path]]
            found.append(msgspec.structs.replace(entry, stream=stream, offset=offset))
        return found
