"""Filling packs and writing them: frames in, immutable objects and their indexes out.

Frames arrive in order from one thread; a pack that is full is hashed and stored by a thread of its
own while the next one fills. After every pack an index follows, so a writer that is killed loses
at most the packs that were not stored yet (I3 of `format_spec/SEMANTICS.md`). Packs that are loaded
while they are stored (`loaded_pack`) come faster: of these an index lists sixteen.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import secrets
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from snapstore.backend.base import Backend, ObjectKind
from snapstore.backend.drafts import begin_draft, has_drafts
from snapstore.compression import Codec
from snapstore.errors import ObjectExists
from snapstore.format import index as index_format
from snapstore.format import limits
from snapstore.format import pack as pack_format
from snapstore.ids import Digest, PackId
from snapstore.repository.buffers import BufferPool
from snapstore.repository.frames import FrameTable, GrowingRows
from snapstore.units import MIB, align_up

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from snapstore.compression import EncodedFrame
    from snapstore.format.tables import Rows
    from snapstore.repository.loaded_pack import LoadedFrame, LoadedPack, LoadedRun
    from snapstore.repository.memory import MemoryPlan
    from snapstore.units import BytesLike

__all__ = ["Packer", "PackerTotals"]

_MERGE_CHUNKS_MAX = 4 * MIB
"""Above this many chunks a push leaves merging its indexes to maintenance: 200 MB of tables."""

_COPIED_ELSEWHERE_BYTES_MIN = 2 * MIB
"""Copying less takes the thread that decides about windows no longer than handing it over."""

_LISTED_TOGETHER = 16
"""Packs that come as fast as they are loaded share an index: it would cost as much as they do, and
a gibibyte is not much to lose with the writer."""

_OTHERS_SHARE = 8
"""One thread in so many does not load packs: who decides what to load needs a processor, too."""

_OWN_PACK = 8
"""What is left in the end is a pack of its own if it is one part in so many of the longest."""

_SHARED_COLUMNS = ("offset", "stored_length", "plain_length", "codec", "checksum")
"""Columns of a frame that a footer and an index both have."""


@dataclasses.dataclass(slots=True)
class PackerTotals:
    """What was written so far."""

    packs: int = 0
    frames: int = 0
    chunks: int = 0
    pack_bytes: int = 0
    index_bytes: int = 0
    coded_bytes: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(slots=True)
class _OpenPack:
    number: int
    buffer: npt.NDArray[np.uint8]
    used: int
    frames: GrowingRows
    chunks: GrowingRows
    numbers: list[int]
    copying: list[Future[None]] = dataclasses.field(default_factory=list)
    """Frames on their way into the buffer."""
    checksums: dict[int, bytes] = dataclasses.field(default_factory=dict)
    """Those that were known only then, by row of the frame."""
    placed_later: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """The rows of these frames, and their numbers in the frame table."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Footer:
    """What a pack's footer says, and where it begins."""

    frames: Rows
    chunks: Rows
    offset: int

    def encode(self, *, salt: bytes | None = None) -> bytes:
        """Encode it, with its trailer."""
        return pack_format.encode_footer(self.frames, self.chunks, offset=self.offset, salt=salt)


@dataclasses.dataclass(frozen=True, slots=True)
class _IndexPart:
    """The rows of an index, kept to be merged with others."""

    packs: Rows
    frames: Rows
    chunks: Rows


@dataclasses.dataclass(frozen=True, slots=True)
class _WrittenIndex:
    """An index that was stored: its rows, name and length."""

    part: _IndexPart
    name: Digest
    length: int


@dataclasses.dataclass(frozen=True, slots=True)
class _SealedPack:
    """A pack that was stored, and its index.

    Attributes:
        number: Its number in the frame table.
        id: Its name.
        length: Bytes.
        part: What an index says of it.
        index: One that was written with it, if it was.
        placed_later: See `_OpenPack`.
    """

    number: int
    id: PackId
    length: int
    part: _IndexPart
    index: _WrittenIndex | None
    placed_later: list[tuple[int, int]]


class Packer:
    """Collects frames into packs. One thread appends; `finish` or `abort` ends it."""

    def __init__(
        self,
        backend: Backend,
        frames: FrameTable,
        *,
        plan: MemoryPlan,
        deleting: Callable[[str], bool],
        damaged_indexes: Collection[str] = (),
        copiers: ThreadPoolExecutor | None = None,
    ) -> None:
        """Prepare to write.

        Args:
            backend: Where packs and indexes go.
            frames: Learns where each frame was put.
            plan: When a pack is closed, and how many there may be at once.
            deleting: Whether a pack of this name is being removed, so that it must not be used.
            damaged_indexes: Names of indexes that cannot be read.
            copiers: Copy long frames; they outlive this.
        """
        self._copiers = copiers
        self._backend = backend
        self.loads_packs = has_drafts(backend)
        """Whether `append_loaded` needs no memory, and so never waits for any."""
        self._frames = frames
        self._pool = BufferPool(
            count=plan.packs_in_flight,
            size_bytes=plan.pack_bytes + limits.FRAME_STORED_BYTES_MAX,
        )
        self._pack_bytes = plan.pack_bytes
        self._loaded_pack_bytes = plan.loaded_pack_bytes
        self._deleting = deleting
        self._damaged_indexes = damaged_indexes
        # One pack is filled meanwhile.
        self._executor = ThreadPoolExecutor(
            max(plan.packs_in_flight - 1, 1), thread_name_prefix="snapstore-pack"
        )
        self._fill_threads = plan.threads - plan.threads // _OTHERS_SHARE
        self._fillers = ThreadPoolExecutor(self._fill_threads, thread_name_prefix="snapstore-fill")
        self._open: _OpenPack | None = None
        self._sealing: list[Future[_SealedPack]] = []
        self._parts: dict[Digest, _IndexPart] = {}
        self._merge_rows = 0
        self._unlisted: list[_IndexPart] = []
        """Of packs that were loaded and that no index lists yet."""
        self._unlisted_lock = threading.Lock()
        self.totals = PackerTotals()

    def append(
        self, number: int, frame: EncodedFrame, plain_length: int, checksum: bytes, chunks: Rows
    ) -> Future[None] | None:
        """Put a frame into the current pack; its bytes are copied.

        A long frame is copied by another thread: then its bytes must stay as they are until what
        is returned is done.

        Args:
            number: The frame's reserved number in the frame table.
            frame: The encoded bytes.
            plain_length: Their decoded length.
            checksum: XXH3-128 of the encoded bytes.
            chunks: What it holds, rows of the pack's `CHUNK_DTYPE`.
        """
        self._reap(wait=False)
        pack = self._room_for(frame.length, len(chunks))
        offset = pack.used
        pack.used = align_up(offset + frame.length, limits.ALIGNMENT_FRAME_BYTES)
        room = pack.buffer[offset : pack.used]
        copying = None
        if frame.length >= _COPIED_ELSEWHERE_BYTES_MIN and self._copiers is not None:
            copying = self._copiers.submit(_copy_frame, frame, room)
            pack.copying.append(copying)
        else:
            _copy_frame(frame, room)
        row = np.zeros(1, pack_format.FRAME_DTYPE)
        row["offset"], row["stored_length"], row["plain_length"] = (
            offset,
            frame.length,
            plain_length,
        )
        row["first_chunk"], row["chunk_count"] = len(pack.chunks), len(chunks)
        row["codec"], row["checksum"] = int(frame.codec), checksum
        pack.frames.extend(row)
        pack.chunks.extend(chunks)
        pack.numbers.append(number)
        placed = np.zeros(1, index_format.FRAME_DTYPE)
        for name in _SHARED_COLUMNS:
            placed[name] = row[name]
        placed["pack"] = pack.number
        self._frames.place_frame(number, placed)
        codec = frame.codec.name.lower()
        self.totals.coded_bytes[codec] = self.totals.coded_bytes.get(codec, 0) + frame.length
        self.totals.frames += 1
        self.totals.chunks += len(chunks)
        return copying

    @property
    def can_fill(self) -> bool:
        """Whether others can fill frames, as `append_filled` wants it."""
        return self._copiers is not None

    def append_filled(
        self, number: int, length: int, chunks: Rows, fill: Callable[[memoryview], bytes]
    ) -> Future[None]:
        """Put a raw frame into the current pack that another thread fills there.

        Args:
            number: The frame's reserved number in the frame table.
            length: Its bytes.
            chunks: What it holds, rows of the pack's `CHUNK_DTYPE`.
            fill: Fills all of a buffer and returns the XXH3-128 of it.

        Returns:
            Done when it is filled; what `fill` raises is raised by a later call as well.
        """
        assert self._copiers is not None, "asked before"
        self._reap(wait=False)
        pack = self._room_for(length, len(chunks))
        offset = pack.used
        pack.used = align_up(offset + length, limits.ALIGNMENT_FRAME_BYTES)
        frame_row = len(pack.frames)
        row = np.zeros(1, pack_format.FRAME_DTYPE)
        row["offset"], row["stored_length"], row["plain_length"] = offset, length, length
        row["first_chunk"], row["chunk_count"] = len(pack.chunks), len(chunks)
        row["codec"] = int(Codec.RAW)
        pack.frames.extend(row)
        pack.chunks.extend(chunks)
        pack.placed_later.append((frame_row, number))
        room = pack.buffer[offset : pack.used]

        def work() -> None:
            pack.checksums[frame_row] = fill(room[:length].data)
            room[length:] = 0

        filling = self._copiers.submit(work)
        pack.copying.append(filling)
        self._count_raw(length, len(chunks))
        self.totals.frames += 1
        return filling

    def append_loaded(self, run: LoadedRun, frames: Sequence[LoadedFrame]) -> list[Future[Any]]:
        """Put raw frames that have to be loaded into packs of such, or into the current one.

        Args:
            run: What they belong to; they may wait there for others.
            frames: They.

        Returns:
            Of frames that are on their way now: done when all of them were loaded. What goes wrong
            is raised by a later call as well.
        """
        begun = []
        for frame in frames:
            size = run.pack_bytes(self._loaded_pack_bytes, self._fill_threads)
            if self.loads_packs and not run.has_room(frame, size):
                begun.append(self._fill_pack(run))
            run.add(frame)
        return begun if self.loads_packs else self._append_waiting(run)

    def end_loaded(self, run: LoadedRun) -> list[Future[Any]]:
        """Let no frame wait any longer; see `append_loaded`."""
        if self.loads_packs and run.used >= self._loaded_pack_bytes // _OWN_PACK:
            return [self._fill_pack(run)]
        return self._append_waiting(run)

    def _append_waiting(self, run: LoadedRun) -> list[Future[Any]]:
        """Put frames into the current pack, which others go on with."""
        return [
            self.append_filled(
                frame.number,
                frame.length,
                frame.chunks,
                functools.partial(run.loads.fill, frame.spans, frame.chunks),
            )
            for frame in run.take()
        ]

    def _fill_pack(self, run: LoadedRun) -> Future[Any]:
        """Make a pack of what waits; a thread of its own loads, hashes and stores it."""
        self._reap(wait=False)
        pack = run.take_pack(self._frames.reserve_pack())
        self._count_raw(sum(frame.length for frame in pack.frames), len(pack.chunk_rows))
        self.totals.frames += len(pack.frames)
        storing = self._fillers.submit(self._load_and_store, pack)
        self._sealing.append(storing)
        return storing

    def _count_raw(self, length: int, chunks: int) -> None:
        codec = Codec.RAW.name.lower()
        self.totals.coded_bytes[codec] = self.totals.coded_bytes.get(codec, 0) + length
        self.totals.chunks += chunks

    def finish(self) -> None:
        """Store what is open, wait for all, and merge the indexes written here into one."""
        self._seal_open()
        self._reap(wait=True)
        self._write_last_index()
        self._executor.shutdown()
        self._fillers.shutdown()

    def abort(self) -> None:
        """Drop what is open; what was handed over for storing ends as it may. Idempotent."""
        self._open = None
        self._pool.close()
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._fillers.shutdown(wait=True, cancel_futures=True)

    def _room_for(self, length: int, chunk_count: int) -> _OpenPack:
        pack = self._open
        if pack is not None and (
            pack.used + length > self._pack_bytes
            or len(pack.frames) >= limits.PACK_FRAMES_MAX
            or len(pack.chunks) + chunk_count > limits.PACK_CHUNKS_MAX
        ):
            self._seal_open()
            pack = None
        if pack is None:
            pack = _OpenPack(
                number=self._frames.reserve_pack(),
                buffer=self._pool.acquire(),
                used=0,
                frames=GrowingRows(pack_format.FRAME_DTYPE),
                chunks=GrowingRows(pack_format.CHUNK_DTYPE),
                numbers=[],
            )
            self._open = pack
        return pack

    def _seal_open(self) -> None:
        if self._open is not None:
            self._sealing.append(self._executor.submit(self._store, self._open))
            self._open = None

    def _store(self, pack: _OpenPack) -> _SealedPack:
        """Hash and store a full pack, then its index; on a thread of the packer's own."""
        try:
            # All of them first: nobody may write to the buffer any more when others get it.
            wait_for(pack.copying)
            for copying in pack.copying:
                copying.result()
            for row, checksum in pack.checksums.items():
                pack.frames.rows["checksum"][row] = checksum
            body = pack.buffer[: pack.used]
            pack_id, length = self._name_and_put(
                _Footer(pack.frames.rows, pack.chunks.rows, pack.used),
                functools.partial(_hash_pack, body),
                lambda name, footer: self._backend.put_new(
                    ObjectKind.PACK, name.hex, [body.data, footer]
                ),
            )
        finally:
            self._pool.release(pack.buffer)
        part = _index_part(pack.frames.rows, pack.chunks.rows, pack_id, length)
        index = self._put_index(part)
        return _SealedPack(pack.number, pack_id, length, part, index, pack.placed_later)

    def _load_and_store(self, pack: LoadedPack) -> _SealedPack:
        """Load and store a pack that is not held in memory; on a thread of its own."""
        draft = begin_draft(self._backend)

        def put(name: PackId, footer: bytes) -> None:
            draft.write(pack.used, [memoryview(footer)])
            draft.publish(ObjectKind.PACK, name.hex)

        try:
            pack.load(draft)
            footer = _Footer(pack.frame_rows, pack.chunk_rows, pack.used)
            pack_id, length = self._name_and_put(footer, pack.name_with, put)
        finally:
            draft.discard()
        part = _index_part(pack.frame_rows, pack.chunk_rows, pack_id, length)
        index = self._list_loaded(part)
        placed_later = [(row, frame.number) for row, frame in enumerate(pack.frames)]
        return _SealedPack(pack.number, pack_id, length, part, index, placed_later)

    def _list_loaded(self, part: _IndexPart) -> _WrittenIndex | None:
        """Write an index with the pack that makes enough of those that no index lists yet."""
        with self._unlisted_lock:
            self._unlisted.append(part)
            if len(self._unlisted) < _LISTED_TOGETHER:
                return None
            parts, self._unlisted = self._unlisted, []
        return self._put_index(_merged(parts))

    def _name_and_put(
        self,
        footer: _Footer,
        name_with: Callable[[bytes], PackId],
        put: Callable[[PackId, bytes], None],
    ) -> tuple[PackId, int]:
        """Store a pack under its name, or with salt under another; returns it and the length."""
        encoded = footer.encode()
        pack_id = name_with(encoded)
        if not self._deleting(pack_id.hex):
            # A name that is taken by other bytes, which only damage can do, is as bad.
            with contextlib.suppress(ObjectExists):
                put(pack_id, encoded)
                return pack_id, footer.offset + len(encoded)
        encoded = footer.encode(salt=secrets.token_bytes(limits.PACK_SALT_BYTES))
        pack_id = name_with(encoded)
        put(pack_id, encoded)
        return pack_id, footer.offset + len(encoded)

    def _keep_part(self, index: _WrittenIndex) -> None:
        """Keep the rows of an index to be merged with others, unless there are too many."""
        self._merge_rows += len(index.part.chunks)
        if self._merge_rows <= _MERGE_CHUNKS_MAX:
            self._parts[index.name] = index.part
        else:
            self._parts.clear()

    def _write_last_index(self) -> None:
        """Write one index of all that this push wrote, and say so, or of what none lists yet."""
        unlisted, self._unlisted = self._unlisted, []
        rows = self._merge_rows + sum(len(part.chunks) for part in unlisted)
        parts = {**self._parts} if rows <= _MERGE_CHUNKS_MAX else {}
        if len(parts) > 1 or unlisted:
            merged = _merged([*parts.values(), *unlisted])
            self.totals.index_bytes += self._put_index(merged, list(parts)).length

    def _put_index(self, part: _IndexPart, supersedes: Sequence[Digest] = ()) -> _WrittenIndex:
        """Store an index; where a damaged one has its name, one that says to contain that one."""
        while True:
            built = index_format.build_index(
                part.packs, part.frames, part.chunks, supersedes=supersedes
            )
            is_usable = built.root.hex not in self._damaged_indexes
            if is_usable and self._put(ObjectKind.INDEX, built.root, built.pieces):
                return _WrittenIndex(part, built.root, built.length)
            supersedes = [*supersedes, built.root]

    def _put(self, kind: ObjectKind, name: Digest, pieces: Sequence[BytesLike]) -> bool:
        """Store an object unless its name is taken by other bytes, which only damage can do."""
        try:
            self._backend.put_new(kind, name.hex, pieces)
        except ObjectExists:
            return False
        return True

    def _reap(self, *, wait: bool) -> None:
        """Take note of packs that were stored; raises what went wrong with one."""
        while self._sealing and (wait or self._sealing[0].done()):
            sealed = self._sealing.pop(0).result()
            self._frames.seal_pack(sealed.number, sealed.id, sealed.length)
            if sealed.placed_later:
                rows, numbers = np.array(sealed.placed_later).T
                placed = sealed.part.frames[rows]
                placed["pack"] = sealed.number
                self._frames.place_frames(numbers, placed)
            self.totals.packs += 1
            self.totals.pack_bytes += sealed.length
            if sealed.index is not None:
                self._keep_part(sealed.index)
                self.totals.index_bytes += sealed.index.length


def _index_part(frame_rows: Rows, chunk_rows: Rows, pack_id: PackId, length: int) -> _IndexPart:
    packs = np.zeros(1, index_format.PACK_DTYPE)
    packs[0] = (pack_id.raw, length)
    frames = np.zeros(len(frame_rows), index_format.FRAME_DTYPE)
    for name in _SHARED_COLUMNS:
        frames[name] = frame_rows[name]
    return _IndexPart(packs, frames, _index_chunks(frame_rows, chunk_rows))


def _merged(parts: Sequence[_IndexPart]) -> _IndexPart:
    """Put rows of several indexes into one, and let them refer to each other there."""
    pack_bases = np.cumsum([0, *(len(part.packs) for part in parts)])
    frame_bases = np.cumsum([0, *(len(part.frames) for part in parts)])
    frames = np.concatenate([part.frames for part in parts])
    chunks = np.concatenate([part.chunks for part in parts])
    frames["pack"] += np.repeat(pack_bases[:-1], np.diff(frame_bases)).astype(np.uint32)
    counts = [len(part.chunks) for part in parts]
    chunks["frame"] += np.repeat(frame_bases[:-1], counts).astype(np.uint32)
    return _IndexPart(np.concatenate([part.packs for part in parts]), frames, chunks)


def _copy_frame(frame: EncodedFrame, room: npt.NDArray[np.uint8]) -> None:
    """Copy a frame to where it belongs in a pack, with zeros up to the next one."""
    end = 0
    for piece in frame.pieces:
        data = np.frombuffer(piece, np.uint8)
        np.copyto(room[end : end + len(data)], data)
        end += len(data)
    assert end == frame.length, (end, frame.length)
    room[end:] = 0


def _hash_pack(body: npt.NDArray[np.uint8], footer: bytes) -> PackId:
    hasher = blake3()
    hasher.update(body.data)
    hasher.update(footer)
    return PackId(hasher.digest())


def _index_chunks(frames: Rows, chunks: Rows) -> Rows:
    """Turn a footer's chunk table into index rows: with frame row and offset in the frame."""
    rows = np.zeros(len(chunks), index_format.CHUNK_DTYPE)
    counts = frames["chunk_count"].astype(np.int64)
    rows["id"], rows["length"] = chunks["id"], chunks["length"]
    rows["frame"] = np.repeat(np.arange(len(frames)), counts)
    ends = np.cumsum(chunks["length"], dtype=np.int64)
    starts = ends - chunks["length"]
    rows["offset"] = starts - np.repeat(starts[frames["first_chunk"]], counts)
    return rows
