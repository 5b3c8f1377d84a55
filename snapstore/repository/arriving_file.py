"""One file that arrives: collected until there is enough of it, then handed on in windows.

What waits for more bytes must not hold what other files need. So a file collects in memory of its
own; only a few, as many as the budget has windows to spare, fill windows in place. The others hand
on parts of windows, which are cut as whole windows would be (`chunking/parts.py`).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading
from concurrent.futures import CancelledError, wait
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from snapstore.backend.direct import page_aligned
from snapstore.chunking.parts import PART_BYTES_MIN, divide
from snapstore.errors import UsageError
from snapstore.fstree import show_path
from snapstore.repository.chunk_source import Loads
from snapstore.repository.file_streams import SMALL_FILE_BYTES
from snapstore.repository.hashed_chunks import (
    ASKED_ROWS,
    HashedChunks,
    check_hashed,
    divide_hashed,
)
from snapstore.repository.ingest import IngestStream, window_data
from snapstore.repository.loaded_pack import LoadedRun
from snapstore.repository.windows import WINDOW_BYTES, Window
from snapstore.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from snapstore.chunking.base import Before
    from snapstore.repository.chunk_source import ChunkSource
    from snapstore.repository.hashed_chunks import HashedWindow
    from snapstore.repository.ingest import IngestJob
    from snapstore.repository.window_feed import WindowFeed
    from snapstore.repository.windows import ByteArray
    from snapstore.units import BytesLike

__all__ = [
    "HELD_BYTES_MIN",
    "Allowance",
    "FileWriter",
    "HashedTotals",
    "Landing",
    "held_by_small_file",
    "is_loaded",
]

HELD_BYTES_MIN = PART_BYTES_MIN + 4 * KIB
"""What a file that is open may always collect: more than a small file has."""

_LOADING_MAX = 256
"""Packs or frames that wait to be loaded: enough to keep all threads busy, few enough to remember
what each of them is."""

_HELD_BYTES_MAX = 1 * MIB
"""Beyond this, copying costs more than the waiting saves."""


def held_by_small_file(size_bytes: int) -> int:
    """What a small file takes until it goes into a window with others: more than its bytes."""
    return size_bytes + 1 * KIB


class Allowance:
    """A number that many take from and give back to, without ever waiting. Thread-safe."""

    def __init__(self, amount: int) -> None:
        self._amount = amount
        self._left = amount
        self._lock = threading.Lock()

    def try_take(self, amount: int, *, leaving_half: bool = False) -> bool:
        """Take all of an amount, or nothing.

        Args:
            amount: How much.
            leaving_half: Take nothing if less than half of all would be left for others.
        """
        with self._lock:
            if amount > self._left - (self._amount // 2 if leaving_half else 0):
                return False
            self._left -= amount
            return True

    def give(self, amount: int) -> None:
        """Give back."""
        with self._lock:
            self._left += amount


@dataclasses.dataclass(frozen=True, slots=True)
class Landing:
    """Where the bytes of one file go; what a `FileWriter` knows of the snapshot around it.

    Attributes:
        path: The file.
        feed: Takes its windows.
        held: Bytes that files may hold; `HELD_BYTES_MIN` of them are this file's already.
        begin: Makes a stream of the file.
        add_small: Takes the bytes of a small file, which goes on holding what it holds.
        ended: Told the size of the file when it is complete, or None if it never will be.
    """

    path: bytes
    feed: WindowFeed
    held: Allowance
    begin: Callable[[], IngestStream]
    add_small: Callable[[bytes], None]
    ended: Callable[[int | None], None]


@dataclasses.dataclass(slots=True)
class HashedTotals:
    """What became of chunks that were hashed elsewhere.

    Attributes:
        bytes: Of all of them.
        loaded_bytes: Of those that were loaded.
    """

    bytes: int = 0
    loaded_bytes: int = 0


class FileWriter:
    """One file of a snapshot that is being written; `SnapshotWriter.open_file` makes it.

    Used by one thread at a time, but different files by different threads at once. Leaving the
    `with` block completes the file; an exception leaves it incomplete, and then the snapshot cannot
    be committed.

    All methods may block while earlier bytes are stored, never for another file to go on, and raise
    what went wrong with the writing as a whole: `Interrupted` after an abort, an error of the
    storage, `LeaseLost`.
    """

    def __init__(self, landing: Landing) -> None:
        self._landing = landing
        self._stream: IngestStream | None = None
        self._before: Before | None = None
        self._window: ByteArray | None = None
        """The window that is filled in place, if any."""
        self._has_place = False
        self._data: ByteArray = np.empty(0, np.uint8)
        self._held_bytes = HELD_BYTES_MIN
        self._offset = 0
        """Where in the file the bytes begin that were not handed on yet."""
        self._used = 0
        self._given = 0
        """How many bytes of space the caller may have filled."""
        self._is_hashed = False
        self._closed = False

    @property
    def size_bytes(self) -> int:
        """How much of the file is there so far."""
        return self._offset + self._used

    def buffer(self) -> memoryview:
        """Give free space to be filled, at least one byte; `advance` says how much was.

        Blocks until there is some: this is the backpressure. The view is good until the next call
        of any method. As long as whole pages are filled, it begins at a page.

        Raises:
            UsageError: The file is closed.
            SnapError: The writing failed or was aborted.
        """
        self._check_open()
        if self._is_hashed:
            raise UsageError(f"{show_path(self._landing.path)} is written as chunks")
        self._landing.feed.check()
        if self._used == self._room:
            self._make_room()
        self._given = self._room - self._used
        return self._data[self._used : self._room].data

    def advance(self, count: int) -> None:
        """Say that the first `count` bytes of the last `buffer` are bytes of the file.

        Raises:
            UsageError: There were not that many, or the file is closed.
        """
        self._check_open()
        if not 0 <= count <= self._given:
            raise UsageError(
                f"cannot advance {show_path(self._landing.path)} by {count} bytes",
                next_step=f"fill the view of `buffer` first; it had {self._given} bytes left",
            )
        self._used += count
        self._given -= count

    def write(self, data: BytesLike) -> None:
        """Append bytes; they are copied.

        Raises:
            UsageError: The file is closed.
            SnapError: The writing failed or was aborted.
        """
        view = memoryview(data).cast("B")
        while view.nbytes:
            space = self.buffer()
            count = min(space.nbytes, view.nbytes)
            space[:count] = view[:count]
            self.advance(count)
            view = view[count:]

    def write_hashed(
        self,
        chunks: HashedChunks,
        source: ChunkSource,
        *,
        check_all: bool = True,
    ) -> HashedTotals:
        """Append chunks that were hashed where they are; loads only those that the store lacks.

        The ids are believed for what the store has already. What is loaded is hashed again, so that
        a wrong id cannot get into the store with other bytes. Returns when all of it was loaded. A
        chunk that the store has is relied on like one that a push finds: under the writer's lease,
        and its marks are read before the commit (R3).

        Args:
            chunks: What follows in the file.
            source: Has their bytes; it is asked for them on several threads at once, and not after
                this has returned.
            check_all: Without it one chunk of each 4 to 12 MiB is hashed again, which finds out
                whoever hashes wrongly, and not who has one chunk wrong: a reader with strong
                integrity refuses that one, in this snapshot and in all that share it.

        Raises:
            UsageError: They cannot be chunks, the file is closed, or bytes of it came otherwise.
            DigestMismatch: What was loaded is not what was hashed.
            SnapError: The writing failed or was aborted, or whatever `source` raises.
        """
        self._check_open()
        check_hashed(chunks)
        if self._used or (self._stream is not None and not self._is_hashed):
            raise UsageError(
                f"{show_path(self._landing.path)} has other bytes already",
                next_step="write a file either as bytes or as chunks",
            )
        self._is_hashed = True
        if self._stream is None:
            self._stream = self._landing.begin()
        return self._write_hashed(self._stream, chunks, source, check_all=check_all)

    def _write_hashed(
        self,
        stream: IngestStream,
        chunks: HashedChunks,
        source: ChunkSource,
        *,
        check_all: bool,
    ) -> HashedTotals:
        if self._landing.feed.stores_hashed:
            return self._store_hashed(stream, chunks, source, check_all=check_all)
        loading: list[IngestJob] = []
        try:
            divide = functools.partial(divide_hashed, load=source.load, check_all=check_all)
            totals = self._submit_hashed(stream, chunks, divide, loading)
        finally:
            # Whatever went wrong, nothing may be loaded any more when this returns.
            wait([job.analysis for job in loading])
        for job in loading:
            job.analysis.result()
        return totals

    def _store_hashed(
        self,
        stream: IngestStream,
        chunks: HashedChunks,
        source: ChunkSource,
        *,
        check_all: bool,
    ) -> HashedTotals:
        totals = HashedTotals()
        feed = self._landing.feed
        loads = Loads(source, check_all=check_all)
        run = LoadedRun(loads, left_bytes=int(chunks.lengths.sum()))
        loading: collections.deque[Future[Any]] = collections.deque()
        try:
            for some in _batches(chunks, feed.hashed_rows):
                loading += feed.store_hashed(stream, some, run, self._offset)
                size = int(some.lengths.sum())
                self._offset += size
                totals.bytes += size
                while len(loading) > _LOADING_MAX:
                    loading.popleft().result()
            loading += feed.end_hashed(run)
            for one in loading:
                one.result()
        except CancelledError:
            feed.check()
            raise
        finally:
            # Whatever went wrong, nothing may be loaded any more when this returns.
            loads.close()
        totals.loaded_bytes = loads.bytes
        return totals

    def _submit_hashed(
        self,
        stream: IngestStream,
        chunks: HashedChunks,
        divide: Callable[..., Iterator[HashedWindow]],
        loading: list[IngestJob],
    ) -> HashedTotals:
        totals = HashedTotals()
        feed = self._landing.feed
        for some in _batches(chunks, ASKED_ROWS):
            for hashed in divide(some, feed.ask(some), base=self._offset):
                buffer = feed.acquire() if hashed.spans else np.empty(0, np.uint8)
                window = Window(hashed.length, None, hashed=hashed)
                job = feed.submit(stream, window, buffer, final=False)
                if hashed.spans:
                    loading.append(job)
                self._offset += hashed.length
                totals.bytes += hashed.length
                totals.loaded_bytes += sum(end - start for start, end in hashed.spans)
        return totals

    def close(self) -> None:
        """Complete the file. Idempotent.

        Raises:
            SnapError: The writing failed or was aborted; the file is not complete.
        """
        if self._closed:
            return
        try:
            self._landing.feed.check()
            self._complete()
        except BaseException:
            self.discard()
            raise
        self._end(self.size_bytes)

    def discard(self) -> None:
        """Give up the file, and so the snapshot, which cannot be committed any more. Idempotent."""
        if not self._closed:
            self._end(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    @property
    def _room(self) -> int:
        """Up to where the buffer may be filled: a window ends where windows of the file end."""
        return min(len(self._data), WINDOW_BYTES - self._offset % WINDOW_BYTES)

    @property
    def _ends_window(self) -> bool:
        return self._used > 0 and (self._offset + self._used) % WINDOW_BYTES == 0

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(
                f"{show_path(self._landing.path)} is closed",
                next_step="a file is written once, from its beginning to its end",
            )

    def _make_room(self) -> None:
        if self._ends_window:
            self._hand_over(self._used, None)
            if self._has_place:
                self._fill_in_place()
        elif self._grow():
            pass
        elif self._landing.feed.take_place():
            self._has_place = True
            self._fill_in_place()
        else:
            self._hand_over(*divide(self._data[: self._used]))

    def _grow(self) -> bool:
        """Collect more before anything is handed over, if the budget has room for it."""
        size = min(2 * len(self._data), _HELD_BYTES_MAX) or HELD_BYTES_MIN
        more = size - self._held_bytes
        if size == len(self._data):
            return False
        # The other half is for files that are still to be opened.
        if more > 0 and not self._landing.held.try_take(more, leaving_half=True):
            return False
        self._held_bytes += more
        larger = page_aligned(size)
        larger[: self._used] = self._data[: self._used]
        self._data = larger
        return True

    def _fill_in_place(self) -> None:
        """Take a window and go on in it, behind what was collected."""
        self._window = self._landing.feed.acquire()
        data = window_data(self._window)
        data[: self._used] = self._data[: self._used]
        self._data = data
        self._landing.held.give(self._held_bytes)
        self._held_bytes = 0

    def _hand_over(self, length: int, before: Before | None, *, final: bool = False) -> None:
        """Let the first bytes go; `before` is for what follows them in the same window."""
        if self._stream is None:
            self._stream = self._landing.begin()
        window = Window(length, is_loaded if length else None, before=self._before)
        if self._window is not None:
            assert length == self._used, "a window that is filled in place goes whole"
            buffer, self._window = self._window, None
            self._data = self._data[:0]
        else:
            buffer = self._landing.feed.acquire()
            window_data(buffer)[:length] = self._data[:length]
            rest = self._data[length : self._used].copy()
            self._data[: len(rest)] = rest
        self._offset += length
        self._used -= length
        self._before = before
        self._landing.feed.submit(self._stream, window, buffer, final=final)

    def _complete(self) -> None:
        size = self.size_bytes
        if self._stream is None and size < SMALL_FILE_BYTES:
            if size:
                self._held_bytes -= held_by_small_file(size)
                self._landing.add_small(self._data[:size].tobytes())
        else:
            self._hand_over(self._used, None, final=True)

    def _end(self, size_bytes: int | None) -> None:
        self._closed = True
        self._given = 0
        if self._window is not None:
            self._landing.feed.give_back(self._window)
            self._window = None
        self._data = np.empty(0, np.uint8)
        self._landing.held.give(self._held_bytes)
        self._held_bytes = 0
        if self._has_place:
            self._landing.feed.leave_place()
            self._has_place = False
        self._landing.ended(size_bytes)


def _batches(chunks: HashedChunks, rows: int) -> Iterator[HashedChunks]:
    """Divide chunks; there are fewer in the first batch, so that whoever loads can begin."""
    begin, end = 0, min(rows, ASKED_ROWS)
    while begin < len(chunks.lengths):
        some = slice(begin, end)
        yield HashedChunks(chunks.lengths[some], chunks.ids[some], chunks.zeros[some])
        begin, end = end, end + rows


def is_loaded(_: ByteArray) -> None:
    """The bytes are in the window's buffer already."""
