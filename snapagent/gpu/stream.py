"""Files of a snapshot into the memory of one GPU, as fast as the bus takes them.

Some threads each take the next piece, in the order in which pieces lie in the store: read it into a
slot of page-locked memory, check it there or not at all, and let the GPU fetch it while they read
the next one. What is checked on the GPU instead is hashed there when a file is whole. What lies in
page-locked memory already, as in a registered cache, is fetched from there by the GPU alone.

Python's interpreter runs one thread at a time, so everything that can be known of a piece before is
in the plan: beside reading, hashing and copying, which let others run, a piece costs microseconds.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from snapagent.gpu.arena import Slot, near_gpu
from snapagent.gpu.checking import ChunkPlace, DeviceChunks, place_of
from snapstore import Integrity, ReadCheck
from snapstore.clock import SystemClock
from snapstore.errors import DigestMismatch, FormatError, IntegrityError
from snapstore.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from snapagent.gpu.arena import PinnedArena
    from snapagent.gpu.driver import Gpu
    from snapagent.gpu.hashing import PieceHasher
    from snapstore import FilePiece, SnapshotFile

__all__ = ["DirectSource", "GpuStream", "StreamReport", "StreamTarget"]

_SLOTS_PER_WORKER: Final = 2
_DIRECT_BYTES: Final = 32 * MIB
"""Fetched at a time from memory that is page-locked already: so that a stop is noticed soon."""


class DirectSource(Protocol):
    """A whole file in page-locked memory, checked when it was put there."""

    @property
    def address(self) -> int:
        """Where in this process its first byte is."""
        ...


class StreamTarget(NamedTuple):
    """A file, and where in the GPU's memory it goes.

    Attributes:
        rank: Whose it is, for messages.
        file: Opened from the snapshot; what its store was opened with says what is checked.
        address: Of the GPU's memory, which has at least as many bytes as the file.
        source: Where the file lies ready, if it does.
    """

    rank: int | str
    file: SnapshotFile
    address: int
    source: DirectSource | None = None


@dataclass(slots=True)
class StreamReport:
    """What a stream did, and where its time went; seconds of threads are summed up over them.

    Attributes:
        gpu: Its UUID.
        bytes: Of data that arrived; zeros do not count.
        zero_bytes: That the GPU filled in by itself.
        direct_bytes: Of `bytes`, those fetched from where they lay ready.
        hashed_bytes: That were hashed on the GPU.
        seconds: From the first to the last.
        threads: How many worked.
        read_s: What threads took to read, check and decode.
        wait_s: What they waited for the GPU to fetch.
        hash_s: What hashing on the GPU took.
    """

    gpu: str
    bytes: int = 0
    zero_bytes: int = 0
    direct_bytes: int = 0
    hashed_bytes: int = 0
    seconds: float = 0.0
    threads: int = 0
    read_s: float = 0.0
    wait_s: float = 0.0
    hash_s: float = 0.0

    @property
    def bottleneck(self) -> str:
        """Which step the others waited for: `read`, `copy` or `hash`."""
        steps = {"read": self.read_s, "copy": self.wait_s, "hash": self.hash_s}
        return max(steps, key=lambda step: steps[step])


@dataclass(slots=True)
class _Target:
    """A file on its way."""

    number: int
    what: StreamTarget
    check: ReadCheck
    chunks: DeviceChunks | None
    left: int = 0


class _Item(NamedTuple):
    """A piece on its way; from memory that is ready if it has an address."""

    target: _Target
    piece: FilePiece | None
    offset: int
    length: int
    source: int


@dataclass(slots=True)
class _Place:
    """What one worker has one piece in at a time."""

    slot: Slot
    event: int
    item: _Item | None = None


class GpuStream:
    """Fills memory of one GPU. Thread-safe; several fills share the slots of the arena."""

    def __init__(
        self,
        gpu: Gpu,
        arena: PinnedArena,
        hasher: PieceHasher | None,
        *,
        workers: int,
        blocking: bool = False,
    ) -> None:
        """Prepare.

        Args:
            gpu: Which; all three stay open for as long as this is used.
            arena: Slots near it.
            hasher: Hashes on it; without one the processor does.
            workers: Threads at most; each takes two slots.
            blocking: Threads that wait for the GPU sleep, where they would spin otherwise.
        """
        self.gpu = gpu
        self.arena = arena
        self.hasher = hasher
        self.workers = max(1, min(workers, arena.slots // _SLOTS_PER_WORKER))
        self.blocking = blocking

    def fill(
        self,
        targets: Sequence[StreamTarget],
        *,
        stop: threading.Event,
        target_done: Callable[[int], None],
        progress: Callable[[int], None],
    ) -> StreamReport:
        """Fill the memory of all targets; returns when the last is whole, or `stop` is set.

        Args:
            targets: What to fill.
            stop: Ends it early, from any thread.
            target_done: Called with the number of each target when all of it is in the GPU's memory
                and was checked; on any thread.
            progress: Called with bytes as they arrive, on any thread.

        Raises:
            SnapError: The first thing that went wrong; it names rank, file, offset and chunk. What
                is in the memory then must not be used.
        """
        clock = SystemClock()
        begin = clock.monotonic_s()
        run = _Run(self, targets, stop, target_done, progress)
        run.work()
        run.report.seconds = clock.monotonic_s() - begin
        if run.error is not None:
            raise run.error
        return run.report


class _Run:
    """One call of `fill`."""

    def __init__(
        self,
        stream: GpuStream,
        targets: Sequence[StreamTarget],
        stop: threading.Event,
        target_done: Callable[[int], None],
        progress: Callable[[int], None],
    ) -> None:
        self.stream = stream
        self.stop = stop
        self.clock = SystemClock()
        self.error: BaseException | None = None
        self.report = StreamReport(stream.gpu.device.uuid)
        self._target_done = target_done
        self._progress = progress
        self._lock = threading.Lock()
        self._failed = threading.Event()
        self._ready = collections.deque[_Item]()
        items: list[tuple[int, _Item]] = []
        self._empty: list[_Target] = []
        for number, what in enumerate(targets):
            target = _plan_target(number, what, stream.hasher)
            more = _items_of(target)
            target.left = len(more)
            items += more
            if not more:
                self._empty.append(target)
        # Neighbours in the store are read one after the other, whatever files they belong to.
        items.sort(key=lambda one: one[0])
        self._ready.extend(item for _, item in items)

    @property
    def is_over(self) -> bool:
        """Whether to begin nothing more."""
        return self._failed.is_set() or self.stop.is_set()

    def work(self) -> None:
        """Do all of it, with as many threads as there is work for."""
        count = min(self.stream.workers, len(self._ready))
        self.report.threads = count
        threads = [
            threading.Thread(target=self._attempt, args=(_work,), name=f"snapagent-gpu-{number}")
            for number in range(count)
        ]
        for thread in threads:
            thread.start()
        for target in self._empty:
            self._attempt(functools.partial(_Run.finish, target=target))
        for thread in threads:
            thread.join()

    def next(self) -> _Item | None:
        """Take the next piece; none if there is no more, or all is over."""
        if self.is_over:
            return None
        try:
            return self._ready.popleft()
        except IndexError:
            return None

    def arrived(self, item: _Item) -> None:
        """Take note of a piece that is in the GPU's memory; the last one makes its file whole."""
        data = 0 if item.piece is not None and item.piece.is_zeros else item.length
        with self._lock:
            report = self.report
            report.bytes += data
            report.zero_bytes += item.length - data
            report.direct_bytes += item.length if item.piece is None else 0
            item.target.left -= 1
            is_whole = not item.target.left
        if data:
            self._progress(data)
        if is_whole and not self.is_over:
            self.finish(item.target)

    def finish(self, target: _Target) -> None:
        """Check what is to be checked on the GPU, and say that a file is there."""
        what, hasher = target.what, self.stream.hasher
        if target.chunks is not None and hasher is not None:
            begin = self.clock.monotonic_s()
            wrong = target.chunks.first_wrong(hasher, what.address)
            with self._lock:
                self.report.hash_s += self.clock.monotonic_s() - begin
                self.report.hashed_bytes += what.file.size_bytes
            if wrong is not None:
                raise _damage_on_gpu(what, wrong, self.report.gpu)
        self._target_done(target.number)

    def took(self, read_s: float, wait_s: float) -> None:
        """Add up where the time of a thread went."""
        with self._lock:
            self.report.read_s += read_s
            self.report.wait_s += wait_s

    def _attempt(self, do: Callable[[_Run], None]) -> None:
        try:
            do(self)
        except BaseException as error:  # noqa: BLE001 - raised by `fill`
            with self._lock:
                self.error = self.error or error
            self._failed.set()


def _work(run: _Run) -> None:
    """What each thread does."""
    gpu = run.stream.gpu
    with contextlib.ExitStack() as stack:
        stack.enter_context(near_gpu(gpu))
        slots = stack.enter_context(run.stream.arena.borrow(_SLOTS_PER_WORKER))
        stream = gpu.stream_create()
        stack.callback(gpu.stream_destroy, stream)
        places = []
        for slot in slots:
            event = gpu.event_create(blocking=run.stream.blocking)
            stack.callback(gpu.event_destroy, event)
            places.append(_Place(slot, event))
        # Whatever happens, no copy may be under way when the slots go back.
        stack.callback(gpu.stream_synchronize, stream)
        _Worker(run, gpu, stream, places).work()


@dataclass(slots=True)
class _Worker:
    """One thread with its stream and its places."""

    run: _Run
    gpu: Gpu
    stream: int
    places: list[_Place]
    read_s: float = field(default=0.0)
    wait_s: float = field(default=0.0)

    def work(self) -> None:
        """Take pieces until there is none left, or all is over."""
        number = 0
        while (item := self.run.next()) is not None:
            place = self.places[number % len(self.places)]
            self._settle(place)
            self._begin(place, item)
            number += 1
        for _ in self.places:
            self._settle(self.places[number % len(self.places)])
            number += 1
        self.run.took(self.read_s, self.wait_s)

    def _settle(self, place: _Place) -> None:
        """Wait until the piece that is in a place has arrived."""
        item, place.item = place.item, None
        if item is not None:
            begin = self.run.clock.monotonic_s()
            self.gpu.event_synchronize(place.event)
            self.wait_s += self.run.clock.monotonic_s() - begin
            self.run.arrived(item)

    def _begin(self, place: _Place, item: _Item) -> None:
        """Read a piece, unless it is ready, and let the GPU fetch it."""
        to = item.target.what.address + item.offset
        piece = item.piece
        if piece is None:
            self.gpu.copy_in(to, item.source, item.length, self.stream)
        elif piece.is_zeros:
            self.gpu.fill(to, 0, item.length, self.stream)
        else:
            begin = self.run.clock.monotonic_s()
            _read(item.target, piece, place.slot.view)
            self.read_s += self.run.clock.monotonic_s() - begin
            self.gpu.copy_in(to, place.slot.address, item.length, self.stream)
        self.gpu.event_record(place.event, self.stream)
        place.item = item


def _plan_target(number: int, what: StreamTarget, hasher: PieceHasher | None) -> _Target:
    """Decide who checks a file: the GPU all chunks afterwards, or the processor on the way."""
    chunks = None
    if hasher is not None and what.file.integrity is Integrity.STRONG:
        chunks = DeviceChunks.of(what.file.chunks())
    check = ReadCheck.ALL if chunks is None else ReadCheck.NOTHING
    return _Target(number, what, check, chunks)


def _items_of(target: _Target) -> list[tuple[int, _Item]]:
    """The pieces of a file, each with where it lies in the store."""
    source, size = target.what.source, target.what.file.size_bytes
    # Strong integrity that the GPU does not check would need the processor to read it all the same.
    is_checked = target.chunks is not None or target.what.file.integrity is Integrity.FAST
    if source is None or not is_checked:
        return [
            (piece.order, _Item(target, piece, piece.offset, piece.length, 0))
            for piece in target.what.file.pieces()
        ]
    return [
        (
            -1,
            _Item(target, None, offset, min(_DIRECT_BYTES, size - offset), source.address + offset),
        )
        for offset in range(0, size, _DIRECT_BYTES)
    ]


def _read(target: _Target, piece: FilePiece, into: memoryview) -> None:
    file = target.what.file
    try:
        file.read_piece(piece, into, check=target.check)
    except (FormatError, IntegrityError) as error:
        with into[: piece.length] as data:
            where = _named(target.what, piece, data)
        raise type(error)(f"{where}: {error}", next_step=error.next_step) from error


def _named(what: StreamTarget, piece: FilePiece, data: memoryview) -> str:
    """Say what is wrong with which chunk, as well as can be told from what was read."""
    try:
        place = place_of(what.file.chunks(), piece.offset, data)
    except (FormatError, IntegrityError):
        return _words(what, ChunkPlace(piece.offset, piece.length, "unknown"))
    return _words(what, place)


def _words(what: StreamTarget, place: ChunkPlace) -> str:
    return (
        f"chunk {place.chunk} of {place.length} bytes at offset {place.offset} of "
        f"{what.file.name}, rank {what.rank}"
    )


def _damage_on_gpu(what: StreamTarget, place: ChunkPlace, gpu: str) -> IntegrityError:
    """Find out where a chunk was damaged that does not hash to its id on the GPU."""
    words = _words(what, place)
    try:
        # Through the processor, which checks the frame first, and then the chunk.
        what.file.read_at(place.offset, place.length)
    except (FormatError, IntegrityError) as error:
        return DigestMismatch(f"{words}: {error}", next_step=error.next_step)
    return DigestMismatch(
        f"{words}: it arrived damaged on {gpu}; in the store it is whole",
        next_step="restore it again; if that happens more than once, test the GPU and the memory "
        "of this machine",
    )
