"""Carrying out a read plan: fetch, check, decode and place, many reads at once.

Threads take reads from the plan; each borrows one buffer for stored and one for decoded bytes, so
memory is their number times these sizes, whatever the snapshot. The first error stops all.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from snapstore.compression import decode_frame
from snapstore.format import limits
from snapstore.joining import wait_for_all
from snapstore.repository.buffers import BufferPool
from snapstore.repository.read_plan import Destination, PlannedFrame, ReadPlan, ReadUnit
from snapstore.repository.stored_frames import FrameErrors, check_stored, is_stored_raw, read_unit

if TYPE_CHECKING:
    from snapstore.backend.base import Backend
    from snapstore.ids import PackId
    from snapstore.repository.verifier import ChunkVerifier

__all__ = ["fetch_plan"]

Place = Callable[[Destination, memoryview], None]
"""Takes bytes to where they belong; called from many threads; the view is valid only meanwhile."""


def fetch_plan(  # noqa: PLR0913 - named, and each of them is one decision of the caller's
    backend: Backend,
    plan: ReadPlan,
    place: Place,
    *,
    threads: int,
    read_bytes_max: int,
    verifiers: Sequence[ChunkVerifier] = (),
    skip: Callable[[ReadUnit], bool] = lambda _: False,
    done: Callable[[ReadUnit], None] = lambda _: None,
    elsewhere: Callable[[ReadUnit], bool] = lambda _: False,
) -> None:
    """Read all that a plan says and hand every run of bytes to `place`.

    Args:
        backend: Where the packs are.
        plan: What to read.
        place: Called with checked bytes only.
        threads: Reads in flight.
        read_bytes_max: As given to the planner.
        verifiers: One per layout of the plan for strong integrity; none for fast.
        skip: Reads that need not be done again.
        done: Told of each read whose bytes are all placed.
        elsewhere: Places the bytes of a read from somewhere else, and says whether it did; called
            from many threads.

    Raises:
        MissingPack: A pack is gone.
        DigestMismatch: Bytes are not what they should be.
        Malformed: A frame does not decode.
    """
    _Fetch(backend, plan, place, verifiers, read_bytes_max, threads).run(
        threads, skip, done, elsewhere
    )


class _Fetch:
    def __init__(
        self,
        backend: Backend,
        plan: ReadPlan,
        place: Place,
        verifiers: Sequence[ChunkVerifier],
        read_bytes_max: int,
        threads: int,
    ) -> None:
        self._backend = backend
        self._plan = plan
        self._place = place
        self._verifiers = verifiers
        stored = max(read_bytes_max, limits.FRAME_STORED_BYTES_MAX)
        self._stored = BufferPool(count=threads, size_bytes=stored)
        self._decoded = BufferPool(count=threads, size_bytes=limits.FRAME_PLAIN_BYTES_MAX)
        self._stop = threading.Event()

    def run(
        self,
        threads: int,
        skip: Callable[[ReadUnit], bool],
        done: Callable[[ReadUnit], None],
        elsewhere: Callable[[ReadUnit], bool],
    ) -> None:
        pending = _Shares([unit for unit in self._plan.units if not skip(unit)], threads)

        def work(worker: int) -> None:
            try:
                while not self._stop.is_set():
                    unit = pending.take(worker)
                    if unit is None:
                        return
                    if not elsewhere(unit):
                        self._read(unit)
                    done(unit)
            except BaseException:
                self._stop.set()
                raise

        futures: list[Future[None]] = []
        with ThreadPoolExecutor(threads, thread_name_prefix="snapstore-fetch") as executor:
            try:
                futures.extend(executor.submit(work, worker) for worker in range(threads))
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                self._stop.set()
                wait_for_all(futures)
        for future in futures:
            future.result()

    def _read(self, unit: ReadUnit) -> None:
        with self._stored.borrowed() as buffer:
            stored = buffer[: unit.length].data
            read_unit(self._backend, unit, stored)
            errors = FrameErrors(unit.pack)
            for frame in self._plan.frames_of(unit):
                with errors.about(frame):
                    self._frame(unit.pack, frame, stored[frame.offset - unit.offset :])

    def _frame(self, pack: PackId, frame: PlannedFrame, stored: memoryview) -> None:
        data = stored[: frame.stored_length]
        check_stored(self._backend, pack, frame, data)
        if is_stored_raw(frame):
            self._distribute(frame.row, data)
            return
        with self._decoded.borrowed() as buffer:
            decoded = buffer[: frame.plain_length].data
            decode_frame(frame.codec, data, decoded)
            self._distribute(frame.row, decoded)

    def _distribute(self, row: int, decoded: memoryview) -> None:
        for destination in self._plan.destinations(row):
            if self._verifiers:
                self._verifiers[destination.source].check(destination, decoded)
            end = destination.offset + destination.length
            self._place(destination, decoded[destination.offset : end])


class _Shares:
    """Reads dealt out so that each worker goes on where it was, and none is idle at the end.

    Neighbours in a pack mostly belong to one file, whose writers would wait for one another.
    """

    def __init__(self, units: Sequence[ReadUnit], workers: int) -> None:
        share = -(-len(units) // workers)
        self._shares = [
            collections.deque(units[worker * share : (worker + 1) * share])
            for worker in range(workers)
        ]
        self._lock = threading.Lock()

    def take(self, worker: int) -> ReadUnit | None:
        """Give a worker its next read, else the last one of whoever has most left."""
        with self._lock:
            if self._shares[worker]:
                return self._shares[worker].popleft()
            longest = max(self._shares, key=len)
            return longest.pop() if longest else None
