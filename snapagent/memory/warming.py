"""External memory of GPUs into the node's cache, after a restore, for those that follow.

The first restore is as fast as the store: nothing waits for the cache. What it has then is fetched
by the next restore from there, by the GPU alone as far as its pages are locked.

Some threads fetch parts of files, a few files at a time, since the kernel lets one thread at a time
write to a file. The one that fetches the last part of a file locks its pages, and those of files
that are whole when it has done so, while the others go on.
"""

from __future__ import annotations

import collections
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from snapagent.memory.filling import read_places
from snapagent.memory.placement import HOST
from snapagent.precedence import Precedence
from snapstore.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from snapagent.gpu.owned import GpuMemory
    from snapstore import CachedFile, NodeCache, Snapshot, StoreOptions

__all__ = ["CacheFill", "WarmedExternal", "warm_external", "warm_threads"]

_THREADS_MAX: Final = 12
"""More are no faster, as with filling GPUs."""
_THREAD_BYTES: Final = 64 * MIB
"""What a thread holds at most while it fetches: stored, decoded, and 16 MiB on their way."""
_THREADS_PER_FILE: Final = 2
"""While there are other files: one fetches and checks, one writes."""
_WHOLE_MAX: Final = 32
"""Files that wait for their pages to be locked, each with two descriptors."""


class WarmedExternal(NamedTuple):
    """What there is of a snapshot's GPU memory.

    Attributes:
        cached_bytes: Of files that are whole in the cache.
        registered_bytes: Of those whose pages are locked.
    """

    cached_bytes: int
    registered_bytes: int


def warm_threads(options: StoreOptions) -> int:
    """How many threads warm: of the cores half, what was restored has the others.

    Args:
        options: Of the store; its memory bounds them as well.
    """
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores // 2, _THREADS_MAX, options.memory_bytes // _THREAD_BYTES))


def warm_external(
    snapshot: Snapshot,
    gpus: GpuMemory,
    *,
    threads: int = 1,
    precedence: Precedence | None = None,
    stop: threading.Event | None = None,
) -> WarmedExternal:
    """Fetch into the node's cache what it lacks of GPU memory, and lock pages of what is whole.

    As much is kept as the cache and `registered_bytes` have room for; without a cache that keeps
    decoded files nothing is done. Safe to interrupt and to repeat, also by several at once.

    Args:
        snapshot: Its store stays open meanwhile.
        gpus: Of the broker; locked is only for GPUs that were used already.
        threads: How many do it, of which at most one at a time locks pages, mostly.
        precedence: What it gives way to.
        stop: Ends it early.

    Raises:
        IntegrityError: Bytes are damaged or gone.
        BackendError: The storage failed.
    """
    cache = snapshot.node_cache
    if cache is None or not cache.has_decoded:
        return WarmedExternal(0, 0)

    def register(kept: CachedFile) -> bool:
        engines = gpus.engines.made
        return bool(engines) and gpus.engines.registered.add(kept, engines[0].gpu)

    return CacheFill(
        _files(snapshot, cache), register, precedence or Precedence(), stop or threading.Event()
    ).run(threads)


def _files(snapshot: Snapshot, cache: NodeCache) -> Iterator[CachedFile]:
    """Open files in the cache, as many as it has room for: more would drive one another out."""
    left = cache.config.memory_bytes
    for _, place in read_places(snapshot):
        for region in place.regions:
            if region.device != HOST and region.length <= left:
                left -= region.length
                with snapshot.open(region.file) as file:
                    kept = cache.file(file)
                yield kept


@dataclass(eq=False, slots=True)
class _Open:
    """A file that is being fetched.

    Attributes:
        kept: It.
        parts: Those that nobody has taken, offset and length.
        busy: How many parts threads have in hand.
        has_room: The cache keeps all of it, as far as it is done.
    """

    kept: CachedFile
    parts: collections.deque[tuple[int, int]]
    busy: int = 0
    has_room: bool = True


class CacheFill:
    """Fetches files into a node's cache by some threads, once."""

    def __init__(
        self,
        files: Iterator[CachedFile],
        register: Callable[[CachedFile], bool],
        precedence: Precedence,
        stop: threading.Event,
    ) -> None:
        """Prepare.

        Args:
            files: Opened one after the other, as their turn comes, and closed here.
            register: Locks the pages of a whole file, if they may be; says whether they are.
            precedence: What it gives way to, between two parts or files.
            stop: Ends it early.
        """
        self._register = register
        self._precedence = precedence
        self._stop = stop
        self._lock = threading.Lock()
        self._taking = threading.Lock()
        """Apart from the other, for opening a file takes a moment."""
        self._files: Iterator[CachedFile] | None = files
        self._open: set[_Open] = set()
        self._coming: list[_Open] = []
        """Those of which there are parts to take, in the order of the files."""
        self._whole: collections.deque[_Open] = collections.deque()
        self._registering = 0
        self._error: BaseException | None = None
        self._cached_bytes = self._registered_bytes = 0

    def run(self, threads: int) -> WarmedExternal:
        """Do all of it, or what can be done before it is stopped.

        Raises:
            SnapError: The first thing that went wrong.
        """
        others = [
            # None waits for a store that does not answer when the program ends.
            threading.Thread(target=self._work, name=f"snapagent-warm-{number}", daemon=True)
            for number in range(1, threads)
        ]
        for thread in others:
            thread.start()
        self._work()
        for thread in others:
            thread.join()
        for one in self._open:
            one.kept.close()
        if self._error is not None:
            raise self._error
        return WarmedExternal(self._cached_bytes, self._registered_bytes)

    def _is_over(self) -> bool:
        return self._stop.is_set() or self._error is not None

    def _take(self) -> tuple[_Open, int, int] | None:
        """Take a part: of the first file that has few threads, or else of the one with fewest."""
        self._precedence.give_way(self._is_over)
        with self._taking:
            if self._is_over():
                return None
            while not any(one.busy < _THREADS_PER_FILE for one in self._coming):
                if not self._open_next():
                    break
            with self._lock:
                if not self._coming:
                    return None
                one = min(self._coming, key=lambda one: max(one.busy, _THREADS_PER_FILE - 1))
                one.busy += 1
                part = one.parts.popleft()
                if not one.parts:
                    self._coming.remove(one)
                return one, *part

    def _open_next(self) -> bool:
        kept = next(self._files, None) if self._files is not None else None
        if kept is None:
            self._files = None
            return False
        one = _Open(kept, collections.deque(kept.parts()))
        with self._lock:
            self._open.add(one)
            if one.parts:
                self._coming.append(one)
        return True

    def _work(self) -> None:
        try:
            while (part := self._take()) is not None:
                one, offset, length = part
                is_kept = one.has_room and one.kept.ensure(offset, length)
                with self._lock:
                    one.has_room &= is_kept
                    one.busy -= 1
                    is_last = not one.busy and not one.parts
                if is_last:
                    self._fetched(one)
        except BaseException as error:  # noqa: BLE001 - raised by `run`
            with self._lock:
                self._error = self._error or error

    def _fetched(self, one: _Open) -> None:
        """Let the pages of a file be locked, by this thread or by one that does so already."""
        if not one.has_room:
            self._close(one)
            return
        with self._lock:
            self._cached_bytes += one.kept.size_bytes
            self._whole.append(one)
            # Else the driver would make them wait for one another.
            if self._registering and len(self._whole) <= _WHOLE_MAX:
                return
            self._registering += 1
        while (whole := self._next_whole()) is not None:
            if self._register(whole.kept):
                with self._lock:
                    self._registered_bytes += whole.kept.size_bytes
            self._close(whole)

    def _next_whole(self) -> _Open | None:
        self._precedence.give_way(self._is_over)
        with self._lock:
            if self._whole and not self._is_over():
                return self._whole.popleft()
            # Together with the look: whoever adds one from now on sees that nobody takes it.
            self._registering -= 1
            return None

    def _close(self, one: _Open) -> None:
        one.kept.close()
        with self._lock:
            self._open.discard(one)
