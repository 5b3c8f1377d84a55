"""Memory of a GPU as what a writer stores chunks from: copied part by part, packs hashed there."""

from __future__ import annotations

import contextlib
import queue
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from typing_extensions import override

from snapagent.errors import GpuFailed
from snapagent.gpu.arena import SLOT_BYTES
from snapagent.gpu.driver import memory_at
from snapagent.gpu.hashing import JoinedPiece, device_buffer
from snapstore import ChunkSource
from snapstore.errors import Interrupted

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator, Sequence

    from snapagent.gpu.arena import PinnedArena, Slot
    from snapagent.gpu.driver import Gpu, Lane
    from snapagent.gpu.hashing import PieceHasher
    from snapstore import PartGroups, Span

__all__ = ["CaptureLanes", "DeviceSource"]

_SLOTS_MAX: Final = 6
"""For each stream: half of them are written with one call. More would cost page-locked memory, and
save little, since there is also a checksum for each."""

_JOINED_BYTES_MAX: Final = 122 << 20
"""A full pack with its footer: device memory that is kept for hashing one."""

_STAGED_BYTES: Final = 1 << 20
"""Page-locked memory for the footer, which has 10 KB with chunks of 256 KiB."""


class CaptureLanes:
    """What copies memory of one GPU to the host, for all captures. Thread-safe; a context manager.

    Attributes:
        joined_bytes_max: How much `joined_digest` can hash; 0 without kernels, or if the GPU has no
            memory left for it.
    """

    def __init__(self, gpu: Gpu, arena: PinnedArena, hasher: PieceHasher | None) -> None:
        """Prepare.

        Args:
            gpu: Which; all three stay open for as long as this is used.
            arena: Slots near it.
            hasher: Hashes on it.
        """
        self._arena = arena
        self._hasher = hasher
        self._lanes: queue.LifoQueue[Lane] = queue.LifoQueue()
        self._rooms: queue.SimpleQueue[_Room] = queue.SimpleQueue()
        """Memory to hash a pack in, while nobody does."""
        self.joined_bytes_max = 0
        with contextlib.ExitStack() as stack:
            assert arena.slots > 1, "half of them are used while the other half is filled"
            self._slots = min(_SLOTS_MAX, arena.slots)
            for _ in range(arena.slots // self._slots):
                self._lanes.put(stack.enter_context(gpu.lane(self._slots)))
            if hasher is not None:
                with contextlib.suppress(GpuFailed):
                    self._rooms.put(_make_room(gpu, stack))
                    self.joined_bytes_max = _JOINED_BYTES_MAX
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Give everything back; nobody copies any more. Idempotent."""
        self._stack.close()

    @contextlib.contextmanager
    def lend(self) -> Iterator[tuple[Lane, list[Slot]]]:
        """Lend a stream and slots, one for each of its places, to one thread."""
        lane = self._lanes.get()
        try:
            with self._arena.borrow(self._slots) as slots:
                lane.bind()
                try:
                    yield lane, slots
                finally:
                    lane.finish()
        finally:
            self._lanes.put(lane)

    def joined_digest(self, pieces: Sequence[tuple[int, int] | bytes]) -> bytes:
        """Hash memory of the GPU, as addresses and lengths, and bytes as if they were one."""
        assert self._hasher is not None, "there is room for it only with a hasher"
        room = self._rooms.get()
        try:
            return self._hasher.joined_digest(room.take(pieces), room.address)
        finally:
            self._rooms.put(room)


class DeviceSource(ChunkSource):
    """An allocation that is captured; see `ChunkSource`."""

    def __init__(self, lanes: CaptureLanes, address: int, stop: threading.Event) -> None:
        """Prepare.

        Args:
            lanes: Of its GPU.
            address: Of the allocation; nothing writes to it meanwhile.
            stop: Ends everything with `Interrupted` when it is set.
        """
        self._lanes = lanes
        self._address = address
        self._stop = stop

    @override
    def load(self, offset: int, length: int, into: memoryview) -> None:
        # Copied twice, since `into` is not page-locked: one part while the next comes.
        pieces = _divided([(offset, offset + length)], min(SLOT_BYTES, max(length // 2, 1)))
        target = np.frombuffer(into, np.uint8)
        done = 0
        with self._lanes.lend() as (lane, slots):
            for number in range(len(pieces) + len(slots) - 1):
                if number < len(pieces):
                    self._begin(lane, slots, number % len(slots), pieces[number])
                oldest = number - len(slots) + 1
                if oldest >= 0:
                    place, count = oldest % len(slots), pieces[oldest].length
                    lane.wait(place)
                    part = np.frombuffer(slots[place].view[:count], np.uint8)
                    np.copyto(target[done : done + count], part)
                    done += count

    @override
    def parts(self, spans: Sequence[Span]) -> PartGroups:
        # Half of the slots are filled while the other half is used.
        pieces = _divided(spans, SLOT_BYTES)
        with self._lanes.lend() as (lane, slots):
            half = len(slots) // 2
            groups = [range(at, min(at + half, len(pieces))) for at in range(0, len(pieces), half)]
            for ahead in range(len(groups) + 1):
                if ahead < len(groups):
                    for number in groups[ahead]:
                        self._begin(lane, slots, number % (2 * half), pieces[number])
                if ahead:
                    yield _arrived(lane, slots, groups[ahead - 1], pieces)

    def _begin(self, lane: Lane, slots: Sequence[Slot], place: int, piece: _Piece) -> None:
        if self._stop.is_set():
            raise Interrupted("the capture was stopped")
        lane.copy_out(place, slots[place].address, self._address + piece.offset, piece.length)

    @property
    @override
    def joined_bytes_max(self) -> int:
        return self._lanes.joined_bytes_max

    @override
    def joined_digest(self, pieces: Sequence[Span | bytes]) -> bytes:
        return self._lanes.joined_digest(
            [piece if isinstance(piece, bytes) else self._placed(*piece) for piece in pieces]
        )

    def _placed(self, begin: int, end: int) -> tuple[int, int]:
        return self._address + begin, end - begin


class _Piece(NamedTuple):
    """What fits a slot."""

    offset: int
    length: int


def _divided(spans: Sequence[Span], piece_bytes: int) -> list[_Piece]:
    return [
        _Piece(at, min(piece_bytes, end - at))
        for begin, end in spans
        for at in range(begin, end, piece_bytes)
    ]


def _arrived(
    lane: Lane, slots: Sequence[Slot], group: range, pieces: Sequence[_Piece]
) -> Iterator[memoryview]:
    """Give the pieces of a group as they arrive."""
    for number in group:
        place = number % (len(slots) // 2 * 2)
        lane.wait(place)
        yield slots[place].view[: pieces[number].length]


class _Room(NamedTuple):
    """Memory to hash a pack in: of the device for all of it, of the host for what comes from there.

    Attributes:
        address: Of the former.
        staged: The latter, page-locked.
        staged_at: Its address.
    """

    address: int
    staged: memoryview
    staged_at: int

    def take(self, pieces: Sequence[tuple[int, int] | bytes]) -> list[JoinedPiece]:
        """Stage bytes, and join memory that is joined already."""
        found: list[JoinedPiece] = []
        used = 0
        for piece in pieces:
            last = found[-1] if found else None
            if isinstance(piece, bytes):
                assert used + len(piece) <= _STAGED_BYTES, used + len(piece)
                self.staged[used : used + len(piece)] = piece
                found.append(JoinedPiece(self.staged_at + used, len(piece), is_on_host=True))
                used += len(piece)
            elif last and not last.is_on_host and last.address + last.length == piece[0]:
                found[-1] = JoinedPiece(last.address, last.length + piece[1])
            else:
                found.append(JoinedPiece(*piece))
        return found


def _make_room(gpu: Gpu, stack: contextlib.ExitStack) -> _Room:
    """Allocate both; the stack frees them."""
    address = stack.enter_context(device_buffer(gpu, _JOINED_BYTES_MAX))
    staged_at = gpu.host_alloc(_STAGED_BYTES)
    stack.callback(gpu.host_free, staged_at)
    return _Room(address, memory_at(staged_at, _STAGED_BYTES), staged_at)
