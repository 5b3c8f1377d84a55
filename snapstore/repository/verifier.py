"""Strong integrity while reading: chunks against the ids in the rank manifest (I6).

A layout is derived and signed by nobody, so with strong integrity nothing it says is believed:
every run of bytes that it places is checked against the chunk ids of the extents that it covers,
and what it calls zeros must be zeros in the manifest.
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING

import numpy as np
from blake3 import blake3

from snapstore.errors import DigestMismatch
from snapstore.format.layout import ZEROS, LayoutTables
from snapstore.ids import ChunkId, RankId

if TYPE_CHECKING:
    from snapstore.format.tables import Rows
    from snapstore.repository.read_plan import Destination

__all__ = ["ChunkVerifier", "Claim", "WholeChunks"]

Claim = tuple[bytes, int, int]
"""That the chunk of an extent lies in a frame: rank id, row of the extent, offset of the chunk."""

_ID_BYTES = 32


class ChunkVerifier:
    """Knows the chunks of one rank. Immutable; thread-safe."""

    def __init__(self, rank: RankId, streams: Rows, extents: Rows) -> None:
        self._rank = rank
        self._streams = streams
        self._extents = extents
        lengths = extents["length"].astype(np.int64)
        # Offsets run through all streams one after the other, so one search serves them all.
        self._ends = np.cumsum(lengths)
        self._bases = np.cumsum(streams["length"].astype(np.int64))
        self._bases -= streams["length"].astype(np.int64)

    @property
    def extents(self) -> Rows:
        """The chunk table of the rank."""
        return self._extents

    def check_zeros(self, layout: LayoutTables) -> None:
        """Check that the layout leaves out nothing but zeros.

        Raises:
            DigestMismatch: It calls data zeros.
        """
        data = self._extents["chunk_length"] != 0
        data_before = np.concatenate(([0], np.cumsum(np.where(data, self._lengths(), 0))))
        ends = np.cumsum(layout.segments["length"].astype(np.int64))
        starts = ends - layout.segments["length"].astype(np.int64)
        zeros = layout.segments["frame"] == ZEROS
        wrong = self._data_upto(ends[zeros], data, data_before) != self._data_upto(
            starts[zeros], data, data_before
        )
        if wrong.any():
            offset = int(starts[zeros][int(wrong.argmax())])
            raise DigestMismatch(
                f"the layout of rank manifest {self._rank.short} leaves out data at {offset}",
                next_step=self._next_step,
            )

    def check(
        self, place: Destination, decoded: memoryview, known: set[Claim] | None = None
    ) -> None:
        """Check the chunks that a run of a decoded frame is said to hold.

        Args:
            place: The run, and where in the frame it is.
            decoded: The whole frame.
            known: Claims about this frame that were found to be true, of any rank; grows.

        Raises:
            DigestMismatch: The bytes are not those of the manifest.
        """
        base = int(self._bases[place.stream]) + place.start
        first = int(np.searchsorted(self._ends, base, side="right"))
        last = int(np.searchsorted(self._ends, base + place.length, side="left"))
        rows = self._extents[first : last + 1].tolist()
        position = int(self._ends[first]) - rows[0][0]
        for row, (length, chunk_offset, chunk_length, chunk_id) in enumerate(rows, first):
            begin = place.offset + position - base - chunk_offset
            position += length
            claim = (self._rank.raw, row, begin)
            if known is not None and claim in known:
                continue
            if not chunk_length:
                end = min(begin + length, place.offset + place.length)
                inside = decoded[max(begin, place.offset) : end]
                matches = not np.frombuffer(inside, np.uint8).any()
            elif begin < 0 or begin + chunk_length > len(decoded):
                matches = False
            else:
                chunk = decoded[begin : begin + chunk_length]
                matches = blake3(chunk).digest() == bytes(chunk_id)
            if not matches:
                raise DigestMismatch(
                    f"chunk {ChunkId(bytes(chunk_id)).short} of stream {place.stream} at offset "
                    f"{position - length - int(self._bases[place.stream])} is not what it "
                    "should be",
                    next_step=self._next_step,
                )
            if known is not None and chunk_length:
                known.add(claim)

    def content_digest(self, stream: int, start: int, length: int) -> bytes:
        """Digest what the manifest says of a range of a stream that is not empty.

        Ranges with the same digest and length have the same bytes.
        """
        base = int(self._bases[stream]) + start
        first = int(np.searchsorted(self._ends, base, side="right"))
        last = int(np.searchsorted(self._ends, base + length, side="left"))
        skip = base - (int(self._ends[first]) - int(self._extents["length"][first]))
        hasher = blake3(b"content" + skip.to_bytes(8, "little"))
        hasher.update(np.ascontiguousarray(self._extents[first : last + 1]).view(np.uint8).data)
        return hasher.digest()

    def whole_chunks(self, stream: int, start: int, length: int) -> WholeChunks:
        """Prepare for checking runs of bytes within a range of a stream."""
        base = int(self._bases[stream])
        first = int(np.searchsorted(self._ends, base + start, side="right"))
        last = int(np.searchsorted(self._ends, base + start + length, side="left"))
        return WholeChunks(self._ends[first : last + 1] - base, self._extents[first : last + 1])

    @property
    def _next_step(self) -> str:
        # The checksum was right, so this is no accident of the disk.
        return f"the layout is wrong: move layouts/{self._rank.hex} away and pull again"

    def _lengths(self) -> np.ndarray:
        return self._extents["length"].astype(np.int64)

    def _data_upto(
        self, offsets: np.ndarray, data: np.ndarray, data_before: np.ndarray
    ) -> np.ndarray:
        """Count the data bytes before each offset."""
        row = np.searchsorted(self._ends, offsets, side="right")
        inside = np.minimum(row, len(data) - 1)
        start = self._ends[inside] - self._extents["length"][inside].astype(np.int64)
        partial = np.where((row < len(data)) & data[inside], offsets - start, 0)
        return data_before[row] + partial


class WholeChunks:
    """The chunks of a range of a stream, prepared for checking many runs of it quickly.

    A thread that hashes hands the GIL over and takes it back for every chunk; what it does in
    between decides how much threads hinder each other. Immutable; thread-safe.
    """

    def __init__(self, ends: np.ndarray, extents: Rows) -> None:
        lengths = extents["length"].astype(np.int64)
        self._ends: list[int] = ends.tolist()
        self._starts: list[int] = (ends - lengths).tolist()
        self._ids = np.ascontiguousarray(extents["id"]).tobytes()
        # Zeros, and parts of chunks.
        self._others: list[int] = np.flatnonzero(extents["chunk_length"] != lengths).tolist()

    def are_right(self, start: int, data: memoryview) -> bool:
        """Whether `data`, the stream's bytes from `start` on, are whole chunks and right.

        False says only that `ChunkVerifier.check` has to look at the whole frame.
        """
        first = bisect.bisect_left(self._starts, start)
        last = bisect.bisect_left(self._ends, start + len(data))
        if last >= len(self._ends) or first > last:
            return False
        if self._starts[first] != start or self._ends[last] != start + len(data):
            return False
        other = bisect.bisect_left(self._others, first)
        if other < len(self._others) and self._others[other] <= last:
            return False
        places = zip(self._starts[first : last + 1], self._ends[first : last + 1], strict=True)
        found = [blake3(data[begin - start : end - start]).digest() for begin, end in places]
        return b"".join(found) == self._ids[_ID_BYTES * first : _ID_BYTES * (last + 1)]
