"""Reading any range of the streams of one rank, frame by frame through a cache.

What is checked is what a pull checks: the checksum of every frame always, and with strong
integrity the chunks of every run of bytes before it is handed out (I6).
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from snapstore.backend.direct import copy_bytes, page_aligned
from snapstore.compression import decode_frame
from snapstore.format.layout import ZEROS
from snapstore.options import Integrity
from snapstore.repository.frame_cache import DecodedFrame, FrameCache, FrameKey
from snapstore.repository.read_plan import Destination, PlannedFrame, join_reads, planned_frames
from snapstore.repository.segments import Segments
from snapstore.repository.stored_frames import (
    FrameErrors,
    check_stored,
    is_stored_raw,
    read_unit,
)
from snapstore.repository.verifier import ChunkVerifier

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from snapstore.backend.base import Backend
    from snapstore.format.tables import Rows
    from snapstore.repository.snapshot import LoadedRank

__all__ = ["StreamReader"]


class StreamReader:
    """The streams of one rank. Thread-safe.

    Attributes:
        segments: Where they lie in frames.

    One call holds, besides what the cache keeps, at most twice `read_bytes_max` at a time.
    """

    def __init__(
        self,
        backend: Backend,
        rank: LoadedRank,
        cache: FrameCache,
        *,
        integrity: Integrity,
        read_bytes_max: int,
    ) -> None:
        """Load the layout.

        Raises:
            IntegrityError: It cannot be had.
        """
        self._rank = rank
        self._is_strong = integrity is Integrity.STRONG
        self._lock = threading.Lock()
        self._backend = backend
        self._cache = cache
        self._read_bytes_max = read_bytes_max
        self._layout = rank.layout
        self.segments = Segments(rank.layout)
        self._verifier: ChunkVerifier | None = None

    @property
    def verifier(self) -> ChunkVerifier | None:
        """Knows the chunks; None unless integrity is strong.

        The chunk table is read when this is first asked for: it is many times the layout, and who
        only looks at a tree needs neither.

        Raises:
            IntegrityError: It contradicts the layout, or cannot be had.
        """
        if self._verifier is None and self._is_strong:
            # Under the lock: reading it twice would take twice its memory.
            with self._lock:
                if self._verifier is None:
                    rank = self._rank
                    verifier = ChunkVerifier(rank.id, rank.streams, rank.read_extents())
                    verifier.check_zeros(self._layout)
                    self._verifier = verifier
        return self._verifier

    def check_zeros(self) -> None:
        """With strong integrity, check that what the layout calls zeros are zeros.

        Raises:
            IntegrityError: They are not.
        """
        # Done with the chunk table, once.
        _ = self.verifier

    def read_into(self, stream: int, offset: int, into: memoryview) -> None:
        """Fill all of `into` with a stream's bytes from `offset` on; they must be within it.

        The buffer's content is undefined after an error.

        Raises:
            MissingPack: A pack is gone.
            DigestMismatch: Bytes are not what they should be.
            Malformed: A frame does not decode.
        """
        if not into.nbytes:
            return
        begin = self.segments.base(stream) + offset
        for rows in self._batches(self.segments.rows(begin, begin + into.nbytes)):
            self._read_batch(stream, rows, into, begin)

    def _read_batch(self, stream: int, rows: range, into: memoryview, begin: int) -> None:
        """Fill what some segments hold of `into`, which begins at offset `begin` of all streams."""
        segments = self._layout.segments[rows.start : rows.stop]
        frames = self._load_frames(segments)
        base = self.segments.base(stream)
        position = self.segments.start(rows.start)
        verifier = self.verifier
        for length, frame, offset in segments.tolist():
            start = max(position, begin)
            end = min(position + length, begin + into.nbytes)
            target = into[start - begin : end - begin]
            if frame == ZEROS:
                np.frombuffer(target, np.uint8)[:] = 0
            else:
                decoded = frames[frame]
                skip = offset + start - position
                if verifier is not None:
                    # Of a small read only the chunks that it touches: it is waited for.
                    place = Destination(0, stream, start - base, end - start, skip)
                    verifier.check(place, decoded.data, decoded.checked)
                copy_bytes(target, decoded.data[skip : skip + len(target)])
            position += length

    def _batches(self, rows: range) -> Iterator[range]:
        """Divide segments so that the frames of a batch, stored or decoded, fit one read."""
        used = self._layout.segments["frame"][rows.start : rows.stop].tolist()
        frames = self._layout.frames
        begin, total, seen = rows.start, 0, set[int]()
        for row, frame in enumerate(used, rows.start):
            if frame == ZEROS or frame in seen:
                continue
            size = max(int(frames["stored_length"][frame]), int(frames["plain_length"][frame]))
            if total and total + size > self._read_bytes_max:
                yield range(begin, row)
                begin, total = row, 0
                seen.clear()
            seen.add(frame)
            total += size
        yield range(begin, rows.stop)

    def _load_frames(self, segments: Rows) -> dict[int, DecodedFrame]:
        """Get the decoded frames that segments lie in, by row of the layout."""
        used = dict.fromkeys(segments["frame"].tolist())
        used.pop(ZEROS, None)
        keys = self._keys([*used])
        row_of = {key: row for row, key in keys.items()}
        found = self._cache.get(
            list(row_of), lambda missing: self._fetch([row_of[key] for key in missing])
        )
        return {row: found[key] for row, key in keys.items()}

    def _keys(self, rows: list[int]) -> dict[int, FrameKey]:
        frames = self._layout.frames[rows]
        columns = [frames[name].tolist() for name in ("pack", *FrameKey._fields[1:])]
        packs = self._layout.packs["id"]
        return {
            row: FrameKey(packs[pack].tobytes(), *place)
            for row, pack, *place in zip(rows, *columns, strict=True)
        }

    def _fetch(self, rows: Sequence[int]) -> Iterator[tuple[FrameKey, DecodedFrame]]:
        """Read frames from their packs, neighbours together, and check and decode them."""
        frames = self._layout.frames[list(rows)].copy()
        frames = frames[np.lexsort((frames["offset"], frames["pack"]))]
        used, numbers = np.unique(frames["pack"], return_inverse=True)
        frames["pack"] = numbers
        packs = self._layout.packs[used]
        for unit in join_reads(frames, packs, read_bytes_max=self._read_bytes_max):
            stored = page_aligned(unit.length).data
            read_unit(self._backend, unit, stored)
            errors = FrameErrors(unit.pack)
            for frame in planned_frames(frames, unit):
                with errors.about(frame):
                    start = frame.offset - unit.offset
                    data = stored[start : start + frame.stored_length]
                    check_stored(self._backend, unit.pack, frame, data)
                    data = _decoded(frame, data)
                key = FrameKey(unit.pack.raw, *frame[1:])
                yield key, DecodedFrame(data.toreadonly())


def _decoded(frame: PlannedFrame, stored: memoryview) -> memoryview:
    if is_stored_raw(frame):
        # A copy: a view would keep all of the read alive for as long as one frame of it is.
        data = np.empty(len(stored), np.uint8).data
        copy_bytes(data, stored)
        return data
    data = np.empty(frame.plain_length, np.uint8).data
    decode_frame(frame.codec, stored, data)
    return data
