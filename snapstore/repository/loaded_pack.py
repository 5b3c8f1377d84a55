"""A pack that one thread loads and stores part by part, so that it never lies in memory.

Each part goes into the pack's file while it is still in the processor's cache: checked, hashed if
nobody else does that, and written. Files of packs side by side are written by as many threads at
once, which one file is not.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
from blake3 import blake3

from snapstore.compression import Codec
from snapstore.errors import DigestMismatch
from snapstore.format import limits
from snapstore.format import pack as pack_format
from snapstore.ids import PackId
from snapstore.repository.chunk_source import CheckedFrame
from snapstore.repository.windows import WINDOW_BYTES
from snapstore.units import align_up

if TYPE_CHECKING:
    from collections.abc import Sequence

    from snapstore.backend.drafts import Draft
    from snapstore.format.tables import Rows
    from snapstore.repository.chunk_source import Loads, Span

__all__ = ["LoadedFrame", "LoadedPack", "LoadedRun"]

_HASHED_HERE = 16
"""One pack in so many is hashed by the processor as well, where the source hashes packs."""

_SHORTEST_PACK = 4
"""A pack has at least one part in so many of what it may have, unless nothing more comes."""

_CHECKED_BYTES = WINDOW_BYTES
"""One chunk in so many bytes is hashed again, as of what goes through windows."""


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedFrame:
    """A raw frame whose bytes are still to be loaded.

    Attributes:
        number: Its reserved number in the frame table.
        spans: Where its bytes are in the file.
        length: How many.
        chunks: What it holds, rows of the pack's `CHUNK_DTYPE`.
    """

    number: int
    spans: Sequence[Span]
    length: int
    chunks: Rows

    @property
    def room(self) -> int:
        """What it takes of a pack."""
        return align_up(self.length, limits.ALIGNMENT_FRAME_BYTES)


class LoadedRun:
    """Frames of one call of `write_hashed` that wait until they fill a pack. One thread."""

    def __init__(self, loads: Loads, *, left_bytes: int) -> None:
        """Begin; at most so many bytes will be loaded."""
        self.loads = loads
        self._left_bytes = left_bytes
        self.waiting: list[LoadedFrame] = []
        self.used = 0
        self._chunks = 0
        self._packs = 0

    def skip(self, length: int) -> None:
        """Note that bytes will not be loaded."""
        self._left_bytes -= length

    def pack_bytes(self, limit: int, threads: int) -> int:
        """Say how long a pack is to be: shorter in the end, so that all threads end at once."""
        share = (self._left_bytes + self.used) // threads
        return min(limit, max(share, limit // _SHORTEST_PACK))

    def has_room(self, frame: LoadedFrame, pack_bytes: int) -> bool:
        """Whether a frame still fits into the pack that those who wait will be."""
        frames, chunks = len(self.waiting) + 1, self._chunks + len(frame.chunks)
        footer_bytes = pack_format.footer_bytes_max(frames, chunks)
        return (
            self.used + frame.length <= pack_bytes
            and frames <= limits.PACK_FRAMES_MAX
            and chunks <= limits.PACK_CHUNKS_MAX
            and self.used + frame.room + footer_bytes <= limits.PACK_BYTES_MAX
        )

    def add(self, frame: LoadedFrame) -> None:
        """Let a frame wait."""
        self.waiting.append(frame)
        self._left_bytes -= frame.length
        self.used += frame.room
        self._chunks += len(frame.chunks)

    def take(self) -> list[LoadedFrame]:
        """Let all of them go."""
        frames, self.waiting = self.waiting, []
        self.used = self._chunks = 0
        return frames

    def take_pack(self, number: int) -> LoadedPack:
        """Let all of them go as a pack of that number."""
        is_hashed_here = self.loads.check_all or self._packs % _HASHED_HERE == 0
        self._packs += 1
        return LoadedPack(number, self.take(), self.loads, is_hashed_here=is_hashed_here)


class LoadedPack:
    """One such pack.

    Attributes:
        number: Of the pack, in the frame table.
        frames: Its frames.
        frame_rows: Those of its footer; complete once it is loaded.
        chunk_rows: Those of its footer.
        used: Where the footer begins.
    """

    def __init__(
        self, number: int, frames: Sequence[LoadedFrame], loads: Loads, *, is_hashed_here: bool
    ) -> None:
        """Prepare.

        Args:
            number: Of the pack, in the frame table.
            frames: What goes into it, in this order.
            loads: Loads them.
            is_hashed_here: Whether the processor hashes it even if the source of the bytes does.
        """
        self.number = number
        self.frames = frames
        self._loads = loads
        self._is_hashed_here = is_hashed_here
        self._is_hashed_there = False
        self._hasher: blake3 | None = None
        self._unchecked = _CHECKED_BYTES
        self._row = 0
        """Of the frame that comes."""
        self._done = 0
        """How much of it came."""
        self._checked: CheckedFrame | None = None
        rooms = np.array([frame.room for frame in frames], np.int64)
        counts = np.array([len(frame.chunks) for frame in frames], np.int64)
        rows = np.zeros(len(frames), pack_format.FRAME_DTYPE)
        rows["offset"] = np.cumsum(rooms) - rooms
        rows["stored_length"] = rows["plain_length"] = [frame.length for frame in frames]
        rows["first_chunk"], rows["chunk_count"] = np.cumsum(counts) - counts, counts
        rows["codec"] = int(Codec.RAW)
        self.frame_rows = rows
        # As plain bytes, since numpy joins rows with fields a hundred times more slowly.
        row_bytes = f"V{pack_format.CHUNK_DTYPE.itemsize}"
        joined = np.concatenate([frame.chunks.view(row_bytes) for frame in frames])
        self.chunk_rows = joined.view(pack_format.CHUNK_DTYPE)
        self.used = int(rooms.sum())

    def load(self, draft: Draft) -> None:
        """Load all frames into a draft; one thread, once.

        Raises:
            DigestMismatch: What was loaded is not what was hashed.
            Interrupted: Nobody wants it any more.
            SnapError: The storage failed, or whatever the source of the bytes raises.
        """
        footer_bytes = pack_format.footer_bytes_max(len(self.frame_rows), len(self.chunk_rows))
        self._is_hashed_there = self.used + footer_bytes <= self._loads.source.joined_bytes_max
        if self._is_hashed_here or not self._is_hashed_there:
            self._hasher = blake3()
        spans = [span for frame in self.frames for span in frame.spans]
        with self._loads.parts(spans) as groups:
            for group in groups:
                writes = _Writes(draft)
                for part in group:
                    # First what reads it, while it is in the cache, and then the copy.
                    writes.add(self._take(part), part)
                writes.flush()
        assert self._row == len(self.frames), (self._row, len(self.frames))

    def _take(self, part: memoryview) -> int:
        """Look at what follows; says where in the pack it belongs."""
        frame = self.frames[self._row]
        if self._checked is None:
            self._checked = CheckedFrame(self._chunks_to_check(frame))
        offset = int(self.frame_rows["offset"][self._row]) + self._done
        self._checked.add(part)
        if self._hasher is not None:
            self._hasher.update(part)
        self._done += part.nbytes
        if self._done == frame.length:
            self._end_frame(frame, self._checked)
        return offset

    def _end_frame(self, frame: LoadedFrame, checked: CheckedFrame) -> None:
        self.frame_rows["checksum"][self._row] = checked.finish()
        if self._hasher is not None:
            self._hasher.update(bytes(frame.room - frame.length))
        self._row += 1
        self._done = 0
        self._checked = None

    def _chunks_to_check(self, frame: LoadedFrame) -> Rows:
        """Choose what is hashed of a frame that begins: all, or enough for one in so many bytes."""
        if self._loads.check_all:
            return frame.chunks
        self._unchecked += frame.length
        if self._unchecked <= _CHECKED_BYTES:
            return frame.chunks[:0]
        self._unchecked = frame.length
        return frame.chunks[:1]

    def name_with(self, footer: bytes) -> PackId:
        """Return what the pack is called with that footer, once it is loaded.

        Raises:
            DigestMismatch: The source of the bytes hashes them to something else.
        """
        here = None
        if self._hasher is not None:
            hasher = self._hasher.copy()
            hasher.update(footer)
            here = PackId(hasher.digest())
        if not self._is_hashed_there:
            assert here is not None, "hashed while it was loaded"
            return here
        there = PackId(self._loads.joined_digest(self._pieces(footer)))
        if here is not None and here != there:
            raise DigestMismatch(
                f"a pack of {self.used} bytes is {here.short}, and was hashed as {there.short} "
                "where its bytes came from",
                next_step="nothing may change the memory while it is captured: capture again",
            )
        return there

    def _pieces(self, footer: bytes) -> list[Span | bytes]:
        pieces: list[Span | bytes] = []
        for frame in self.frames:
            pieces += frame.spans
            if frame.room > frame.length:
                pieces.append(bytes(frame.room - frame.length))
        return [*pieces, footer]


class _Writes:
    """Writes parts that lie next to each other in a draft together."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._begin = self._end = 0
        self._pieces: list[memoryview] = []

    def add(self, offset: int, part: memoryview) -> None:
        """Take a part, which stays as it is until `flush`."""
        if offset != self._end:
            self.flush()
        if not self._pieces:
            self._begin = offset
        self._pieces.append(part)
        self._end = offset + part.nbytes

    def flush(self) -> None:
        """Write all of them."""
        if self._pieces:
            pieces, self._pieces = self._pieces, []
            self._draft.write(self._begin, pieces)
