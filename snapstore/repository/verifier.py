"""Strong integrity while reading: chunks against the ids in the rank manifest (I6).

A layout is derived and signed by nobody, so with strong integrity nothing it says is believed:
every run of bytes that it places is checked against the chunk ids of the extents that it covers,
and what it calls zeros must be zeros in the manifest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from blake3 import blake3

from snapstore.errors import DigestMismatch
from snapstore.format.layout import ZEROS, LayoutTables
from snapstore.ids import ChunkId, RankId

if TYPE_CHECKING:
    from snapstore.format.tables import Rows
    from snapstore.repository.read_plan import Destination

__all__ = ["ChunkVerifier"]


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

    def check(self, place: Destination, decoded: memoryview) -> None:
        """Check the chunks that a run of a decoded frame is said to hold.

        Raises:
            DigestMismatch: The bytes are not those of the manifest.
        """
        base = int(self._bases[place.stream]) + place.start
        first = int(np.searchsorted(self._ends, base, side="right"))
        last = int(np.searchsorted(self._ends, base + place.length, side="left"))
        rows = self._extents[first : last + 1].tolist()
        position = int(self._ends[first]) - rows[0][0]
        for length, chunk_offset, chunk_length, chunk_id in rows:
            begin = place.offset + position - base - chunk_offset
            position += length
            if not chunk_length:
                inside = decoded[max(begin, place.offset) : min(begin + length, len(decoded))]
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
