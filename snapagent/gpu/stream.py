"""Files of a snapshot into the memory of one GPU, as fast as the bus takes them.

Some threads each take the next pieces, in the order in which they lie in the store: read them into
slots of page-locked memory, check them there or not at all, and let the GPU fetch one slot while
they read into the next. What is checked on the GPU instead is hashed there when a file is whole.
What lies in page-locked memory already, as in a registered cache, is fetched from there by the GPU
alone; what a cache has that is not registered is read from there instead of from the store.

Python's interpreter runs one thread at a time. So a plan has groups of pieces, made of the tables
as a whole within milliseconds, and who takes a group makes its items: beside reading, hashing and
copying, which let others run, an item costs microseconds. Raw frames that lie one after the other
are read as if they were one, where the GPU checks them.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import functools
import os
import queue
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, Self

from xxhash import xxh3_128_digest

from snapagent.gpu.arena import SLOT_BYTES, near_gpu
from snapagent.gpu.checking import ChunkPlace, DeviceChunks, place_of
from snapagent.precedence import Precedence
from snapstore import Integrity, PieceGroup, ReadCheck
from snapstore.clock import SystemClock
from snapstore.errors import DigestMismatch, FormatError, IntegrityError, SnapError
from snapstore.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from snapagent.gpu.arena import PinnedArena, Slot
    from snapagent.gpu.driver import Gpu, Lane
    from snapagent.gpu.hashing import PieceHasher
    from snapstore import FilePiece, FilePieces, SnapshotFile
    from snapstore.ids import PackId

__all__ = ["DirectSource", "GpuStream", "ReadySource", "StreamReport", "StreamTarget"]

_SLOTS_PER_WORKER: Final = 2
_BATCH_BYTES: Final = 16 * MIB
"""Taken at a time by a worker: little enough that all of them end at about the same time."""
_DIRECT_BYTES: Final = 32 * MIB
"""Fetched at a time from memory that is page-locked already: so that a stop is noticed soon."""


class DirectSource(Protocol):
    """A whole file in page-locked memory, checked when it was put there."""

    @property
    def address(self) -> int:
        """Where in this process its first byte is."""
        ...


class ReadySource(Protocol):
    """A file of which parts lie decoded in another file, checked when they were put there."""

    @property
    def fd(self) -> int:
        """For reading those that are `filled`, at the offsets that they have in the file."""
        ...

    def filled(self, offset: int, length: int) -> bool:
        """Tell whether all of a range is there."""
        ...


class StreamTarget(NamedTuple):
    """A file, and where in the GPU's memory it goes.

    Attributes:
        rank: Whose it is, for messages.
        file: Opened from the snapshot; what its store was opened with says what is checked.
        address: Of the GPU's memory, which has at least as many bytes as the file.
        source: Where the file lies ready, if it does.
        ready: Where else parts of it may lie decoded.
    """

    rank: int | str
    file: SnapshotFile
    address: int
    source: DirectSource | None = None
    ready: ReadySource | None = None


@dataclass(slots=True)
class StreamReport:
    """What a stream did, and where its time went; seconds of threads are summed up over them.

    Attributes:
        gpu: Its UUID.
        bytes: Of data that arrived; zeros do not count.
        zero_bytes: That the GPU filled in by itself.
        direct_bytes: Of `bytes`, those fetched from page-locked memory where they lay ready.
        ready_bytes: Of `bytes`, those read from where they lay decoded.
        hashed_bytes: That were hashed on the GPU.
        seconds: From the first to the last.
        plan_s: Of these, until it was known what to do.
        threads: How many worked.
        read_s: What threads took to read, check and decode.
        wait_s: What they waited for the GPU to fetch.
        hash_s: What hashing on the GPU took.
        suspects: Numbers of targets that came damaged, not from the store alone. Nobody was told
            that they are done: fill them again without `source` and `ready`.
    """

    gpu: str
    bytes: int = 0
    zero_bytes: int = 0
    direct_bytes: int = 0
    ready_bytes: int = 0
    hashed_bytes: int = 0
    seconds: float = 0.0
    plan_s: float = 0.0
    threads: int = 0
    read_s: float = 0.0
    wait_s: float = 0.0
    hash_s: float = 0.0
    suspects: list[int] = field(default_factory=list)

    @property
    def store_bytes(self) -> int:
        """Of `bytes`, those that came from the store."""
        return self.bytes - self.direct_bytes - self.ready_bytes

    def add(self, other: StreamReport) -> None:
        """Take over what a later stream into the same GPU did."""
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.threads = max(self.threads, other.threads)
        self.suspects += other.suspects

    @property
    def bottleneck(self) -> str:
        """Which step the others waited for: `read`, `copy` or `hash`."""
        steps = {"read": self.read_s, "copy": self.wait_s, "hash": self.hash_s}
        return max(steps, key=lambda step: steps[step])


_SUMMED: Final = (
    *("bytes", "zero_bytes", "direct_bytes", "ready_bytes", "hashed_bytes"),
    *("seconds", "plan_s", "read_s", "wait_s", "hash_s"),
)


@dataclass(slots=True)
class _Target:
    """A file on its way."""

    number: int
    what: StreamTarget
    check: ReadCheck
    chunks: DeviceChunks | None
    left: int = 0
    """Batches that have not arrived."""

    @property
    def by_processor(self) -> bool:
        """Whether the processor checks every chunk: then it has to read all of it by the store."""
        return self.chunks is None and self.what.file.integrity is Integrity.STRONG

    @property
    def source(self) -> DirectSource | None:
        """Where it is taken from page-locked memory."""
        return None if self.by_processor else self.what.source

    @property
    def ready(self) -> ReadySource | None:
        """Where parts are taken that lie decoded."""
        return None if self.by_processor else self.what.ready


class _How(enum.Enum):
    """Where an item comes from."""

    RAW = enum.auto()
    """One read at a place of a pack gives all of it."""
    STORE = enum.auto()
    """The store reads the piece."""
    READY = enum.auto()
    """It lies decoded in another file."""
    DIRECT = enum.auto()
    """It lies in page-locked memory."""
    ZEROS = enum.auto()
    """From nowhere."""


class _Item(NamedTuple):
    """What is copied at once.

    Attributes:
        how: Where it comes from.
        offset: In the file.
        length: Bytes.
        at: Where in the pack it lies, or its address, or where in the other file.
        checksum: XXH3-128 that it must have; empty if the GPU checks it.
        piece: Which the store has to read.
    """

    how: _How
    offset: int
    length: int
    at: int = -1
    checksum: bytes = b""
    piece: FilePiece | None = None


class _Batch(NamedTuple):
    """A part of a file for one worker: a group of pieces, or what lies in page-locked memory."""

    target: _Target
    group: PieceGroup
    pieces: FilePieces | None

    @property
    def needed_pack(self) -> PackId | None:
        """Which pack it is read from past the store, as far as that works."""
        ready = self.target.ready
        is_ready = ready is not None and ready.filled(self.group.offset, self.group.length)
        return None if is_ready or self.target.by_processor else self.group.pack


class GpuStream:
    """Fills memory of one GPU. Thread-safe; several fills share the slots of the arena.

    A context manager.
    """

    def __init__(
        self,
        gpu: Gpu,
        arena: PinnedArena,
        hasher: PieceHasher | None,
        *,
        workers: int,
        part_bytes: int = SLOT_BYTES,
        blocking: bool = False,
    ) -> None:
        """Prepare.

        Args:
            gpu: Which; all three stay open for as long as this is used.
            arena: Slots near it.
            hasher: Hashes on it; without one the processor does.
            workers: Threads at most; each takes two slots.
            part_bytes: How much is read at a time that the GPU checks, 4 MiB at
                most. What all threads of a machine hold should fit its processor's cache.
            blocking: Threads that wait for the GPU sleep, where they would spin otherwise.
        """
        self.gpu = gpu
        self.arena = arena
        self.hasher = hasher
        self.part_bytes = min(part_bytes, SLOT_BYTES)
        self.workers = max(1, min(workers, arena.slots // _SLOTS_PER_WORKER))
        # Making one takes the driver ten milliseconds, in which no other can be made.
        self._lanes: queue.LifoQueue[Lane] = queue.LifoQueue()
        self._stack = contextlib.ExitStack()
        for _ in range(self.workers):
            lane = self._stack.enter_context(gpu.lane(_SLOTS_PER_WORKER, blocking=blocking))
            self._lanes.put(lane)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the streams back; nobody fills any more. Idempotent."""
        self._stack.close()

    @contextlib.contextmanager
    def lane(self) -> Iterator[Lane]:
        """Lend a stream to the calling thread, which waits until there is one."""
        lane = self._lanes.get()
        try:
            lane.bind()
            try:
                yield lane
            finally:
                # Whatever happened, nothing may still be copied when others get what was used.
                lane.finish()
        finally:
            self._lanes.put(lane)

    def fill(
        self,
        targets: Sequence[StreamTarget],
        *,
        stop: threading.Event,
        target_done: Callable[[int], None],
        progress: Callable[[int], None],
        precedence: Precedence | None = None,
    ) -> StreamReport:
        """Fill the memory of all targets; returns when the last is whole, or `stop` is set.

        Args:
            targets: What to fill.
            stop: Ends it early, from any thread.
            target_done: Called with the number of each target when all of it is in the GPU's memory
                and was checked; on any thread.
            progress: Called with bytes as they arrive, on any thread.
            precedence: What it gives way to.

        Raises:
            SnapError: The first thing that went wrong; it names rank, file, offset and chunk. What
                is in the memory then must not be used.
        """
        clock = SystemClock()
        begin = clock.monotonic_s()
        run = _Run(self, targets, stop, target_done, progress, precedence or Precedence())
        run.report.plan_s = clock.monotonic_s() - begin
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
        precedence: Precedence,
    ) -> None:
        self.stream = stream
        self.stop = stop
        self.clock = SystemClock()
        self.error: BaseException | None = None
        self.report = StreamReport(stream.gpu.device.uuid)
        self._target_done = target_done
        self._progress = progress
        self._precedence = precedence
        self._lock = threading.Lock()
        self._failed = threading.Event()
        self._empty: list[_Target] = []
        batches: list[_Batch] = []
        for number, what in enumerate(targets):
            target = _plan_target(number, what, stream.hasher)
            more = _batches_of(target)
            target.left = len(more)
            batches += more
            if not more:
                self._empty.append(target)
        # Neighbours in the store are read one after the other, whatever files they belong to.
        batches.sort(key=lambda one: one.group.order)
        self._ready = collections.deque(batches)
        self.packs = _OpenPacks(self._ready)

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
        self.packs.close()

    def next(self) -> _Batch | None:
        """Take what to do next; none if there is no more, or all is over."""
        try:
            batch = self._ready.popleft()
        except IndexError:
            return None
        if batch.pieces is not None:
            # Copies out of registered memory need the interpreter for next to nothing.
            self._precedence.give_way(lambda: self.is_over)
        return None if self.is_over else batch

    def arrived(self, target: _Target, items: list[_Item]) -> None:
        """Take note of a batch that is in the GPU's memory; the last one makes its file whole."""
        by_kind: collections.Counter[_How] = collections.Counter()
        for item in items:
            by_kind[item.how] += item.length
        data = by_kind.total() - by_kind[_How.ZEROS]
        with self._lock:
            report = self.report
            report.bytes += data
            report.zero_bytes += by_kind[_How.ZEROS]
            report.direct_bytes += by_kind[_How.DIRECT]
            report.ready_bytes += by_kind[_How.READY]
            target.left -= 1
            is_whole = not target.left
        if data:
            self._progress(data)
        if is_whole and not self.is_over:
            self.finish(target)

    def finish(self, target: _Target) -> None:
        """Check what is to be checked on the GPU, and say that a file is there."""
        what, hasher = target.what, self.stream.hasher
        if target.chunks is not None and hasher is not None:
            begin = self.clock.monotonic_s()
            wrong = target.chunks.first_wrong(hasher, what.address)
            with self._lock:
                self.report.hash_s += self.clock.monotonic_s() - begin
                self.report.hashed_bytes += what.file.size_bytes
            if wrong is not None and (what.source is not None or what.ready is not None):
                with self._lock:
                    self.report.suspects.append(target.number)
                return
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


class _OpenPacks:
    """Descriptors of the packs that batches under way are read from. Thread-safe."""

    def __init__(self, batches: Iterable[_Batch]) -> None:
        self._lock = threading.Lock()
        self._left = collections.Counter(one.group.pack for one in batches)
        self._fds: dict[PackId, int | None] = {}

    def open(self, batch: _Batch) -> int | None:
        """Return the descriptor for a batch; none if the store is to read it, or to say why not."""
        pack = batch.needed_pack
        if pack is None:
            return None
        with self._lock:
            if pack not in self._fds:
                try:
                    self._fds[pack] = batch.target.what.file.open_pack(pack)
                except SnapError:
                    self._fds[pack] = None
            return self._fds[pack]

    def done(self, batch: _Batch) -> None:
        """Say that a batch needs its pack no more."""
        pack = batch.group.pack
        if pack is None:
            return
        with self._lock:
            self._left[pack] -= 1
            fd = None if self._left[pack] else self._fds.pop(pack, None)
        if fd is not None:
            os.close(fd)

    def close(self) -> None:
        """Close what is left when it ended early."""
        with self._lock:
            for fd in self._fds.values():
                if fd is not None:
                    os.close(fd)
            self._fds.clear()


def _work(run: _Run) -> None:
    """What each thread does."""
    stream = run.stream
    with (
        near_gpu(stream.gpu),
        stream.arena.borrow(_SLOTS_PER_WORKER) as slots,
        stream.lane() as lane,
    ):
        worker = _Worker(run, lane, slots)
        try:
            worker.work()
        finally:
            run.took(worker.read_s, worker.wait_s)


class _Worker:
    """One thread with its stream and its slots."""

    def __init__(self, run: _Run, lane: Lane, slots: list[Slot]) -> None:
        self._run = run
        self._lane = lane
        self._slots = slots
        self._used = 0
        self._clock = SystemClock()
        self.read_s = 0.0
        self.wait_s = 0.0

    def work(self) -> None:
        """Take batches until there is none left, or all is over."""
        run = self._run
        pending: collections.deque[tuple[_Target, list[_Item], int]] = collections.deque()
        while (batch := run.next()) is not None:
            items = self._begin_batch(batch, run.packs.open(batch))
            if items is None:
                return
            run.packs.done(batch)
            pending.append((batch.target, items, self._used))
            # A place is used again only after what was there has arrived.
            while pending and pending[0][2] <= self._used - len(self._slots):
                target, items, _ = pending.popleft()
                run.arrived(target, items)
        for place in range(len(self._slots)):
            self._wait(place)
        for target, items, _ in pending:
            run.arrived(target, items)

    def _begin_batch(self, batch: _Batch, fd: int | None) -> list[_Item] | None:
        """Read a batch and let the GPU fetch it; returns what was, or none if all is over."""
        run, begun = self._run, list[_Item]()
        left = collections.deque(_items_of(batch, run.stream.part_bytes, reads_pack=fd is not None))
        while left:
            place, item = self._free_place(), left.popleft()
            if run.is_over:
                return None
            if self._begin(place, batch.target, item, fd):
                begun.append(item)
                continue
            # The rest by the store, which says what is wrong if anything is, from the beginning of
            # a piece on: what was begun of that comes again.
            left = collections.deque(_by_the_store(batch, item.offset))
            start = left[0].offset
            begun = [
                one._replace(length=min(one.length, start - one.offset))
                for one in begun
                if one.offset < start
            ]
        return begun

    def _free_place(self) -> int:
        place = self._used % len(self._slots)
        if self._used >= len(self._slots):
            self._wait(place)
        self._used += 1
        return place

    def _wait(self, place: int) -> None:
        begin = self._clock.monotonic_s()
        self._lane.wait(place)
        self.wait_s += self._clock.monotonic_s() - begin

    def _begin(self, place: int, target: _Target, item: _Item, fd: int | None) -> bool:
        """Read an item, unless it lies ready, and let the GPU fetch it; False if the store has to.

        That may be for the system, which wants aligned what is read past the page cache.
        """
        to, slot = target.what.address + item.offset, self._slots[place]
        if item.how is _How.ZEROS:
            self._lane.fill(place, to, 0, item.length)
            return True
        if item.how is _How.DIRECT:
            self._lane.copy_in(place, to, item.at, item.length)
            return True
        begin = self._clock.monotonic_s()
        is_read = _read_item(target, item, fd, slot.view)
        self.read_s += self._clock.monotonic_s() - begin
        if is_read:
            self._lane.copy_in(place, to, slot.address, item.length)
        return is_read


def _read_item(target: _Target, item: _Item, fd: int | None, slot: memoryview) -> bool:
    """Read an item into a slot; False if it cannot be had from the pack past the store."""
    if item.how is _How.RAW:
        return fd is not None and _read_raw(item, fd, slot)
    if item.piece is not None:
        _read(target, item.piece, slot)
    else:
        _read_ready(target.what, item, slot)
    return True


def _read_raw(item: _Item, fd: int, slot: memoryview) -> bool:
    """Read what is raw with one call; False if it is not as it should be."""
    view = slot if item.length == SLOT_BYTES else slot[: item.length]
    try:
        count = os.preadv(fd, [view], item.at)
    except OSError:
        return False
    if count != item.length:
        return False
    return not item.checksum or xxh3_128_digest(view) == item.checksum


def _read_ready(what: StreamTarget, item: _Item, slot: memoryview) -> None:
    """Read what lies decoded, or what it stands for if that cannot be read any more."""
    with slot[: item.length] as view:
        with contextlib.suppress(OSError):
            if what.ready is not None and os.preadv(what.ready.fd, [view], item.at) == item.length:
                return
        try:
            view[:] = what.file.read_exactly(item.at, item.length)
        except (FormatError, IntegrityError) as error:
            where = _words(what, ChunkPlace(item.offset, item.length, "unknown"))
            raise type(error)(f"{where}: {error}", next_step=error.next_step) from error


def _plan_target(number: int, what: StreamTarget, hasher: PieceHasher | None) -> _Target:
    """Decide who checks a file: the GPU all chunks afterwards, or the processor on the way."""
    chunks = None
    if hasher is not None and what.file.integrity is Integrity.STRONG:
        chunks = DeviceChunks.of(what.file.chunks())
    check = ReadCheck.ALL if chunks is None else ReadCheck.NOTHING
    return _Target(number, what, check, chunks)


def _batches_of(target: _Target) -> list[_Batch]:
    """What to do for a file."""
    size = target.what.file.size_bytes
    if target.source is None:
        pieces = target.what.file.pieces()
        return [_Batch(target, group, pieces) for group in pieces.groups(_BATCH_BYTES)]
    found = []
    for offset in range(0, size, _DIRECT_BYTES):
        group = PieceGroup(0, 0, offset, min(_DIRECT_BYTES, size - offset), -1, None, -1)
        found.append(_Batch(target, group, None))
    return found


def _items_of(batch: _Batch, part_bytes: int, *, reads_pack: bool) -> list[_Item]:
    """Divide a batch into what is copied at once.

    Args:
        batch: Of one file.
        part_bytes: How much is read at a time that need not be read as a whole.
        reads_pack: Whether the pack can be read past the store.
    """
    target, group, pieces = batch
    if pieces is None:
        assert target.source is not None, "planned so"
        at = target.source.address + group.offset
        return [_Item(_How.DIRECT, group.offset, group.length, at)]
    ready = target.ready
    if ready is None and reads_pack and group.at >= 0 and target.check is ReadCheck.NOTHING:
        return _parts(_How.RAW, group.offset, group.length, group.at, part_bytes)
    found = []
    for piece in pieces[group.first : group.last]:
        offset, length = piece.offset, piece.length
        if piece.is_zeros:
            found.append(_Item(_How.ZEROS, offset, length))
        elif ready is not None and ready.filled(offset, length):
            found += _parts(_How.READY, offset, length, offset, part_bytes)
        elif piece.stored is None or not reads_pack:
            found.append(_from_store(piece))
        elif target.check is ReadCheck.NOTHING:
            found += _parts(_How.RAW, offset, length, piece.stored.frame.offset, part_bytes)
        else:
            frame = piece.stored.frame
            found.append(_Item(_How.RAW, offset, length, frame.offset, frame.checksum))
    return found


def _parts(how: _How, offset: int, length: int, at: int, part_bytes: int) -> list[_Item]:
    return [
        _Item(how, offset + begin, min(part_bytes, length - begin), at + begin)
        for begin in range(0, length, part_bytes)
    ]


def _from_store(piece: FilePiece) -> _Item:
    return _Item(_How.STORE, piece.offset, piece.length, piece=piece)


def _by_the_store(batch: _Batch, offset: int) -> list[_Item]:
    """All pieces of a batch from the one on that has this byte of the file."""
    assert batch.pieces is not None, "nothing else is read from packs"
    pieces = batch.pieces[batch.group.first : batch.group.last]
    return [_from_store(piece) for piece in pieces if piece.offset + piece.length > offset]


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
        what.file.read_exactly(place.offset, place.length)
    except (FormatError, IntegrityError) as error:
        return DigestMismatch(f"{words}: {error}", next_step=error.next_step)
    return DigestMismatch(
        f"{words}: it arrived damaged on {gpu}; in the store it is whole",
        next_step="restore it again; if that happens more than once, test the GPU and the memory "
        "of this machine",
    )
