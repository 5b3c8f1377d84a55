"""Collecting what a rank manifest and its layout will say, while the streams are being stored.

Extents cost 48 bytes a chunk and are only needed at the end, so beyond a limit they wait in an
anonymous temporary file; segments are few and stay in memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import os
import tempfile
from typing import TYPE_CHECKING

import numpy as np

from snapstore.clock import Clock, format_utc
from snapstore.format import rank as rank_format
from snapstore.repository.layouts import (
    ZERO_FRAME,
    SegmentTable,
    build_layout,
    join_segments,
    stream_rows,
)
from snapstore.repository.spool import temporary_file_errors
from snapstore.units import MIB

if TYPE_CHECKING:
    from collections.abc import Sequence

    from snapstore.format.envelope import Built
    from snapstore.format.tables import Rows
    from snapstore.format.tree import TreeEntry
    from snapstore.ids import Digest, PackId
    from snapstore.repository.frames import FrameTable, Numbers

__all__ = ["Pieces", "RankBuilder"]

_SPOOL_BYTES = 32 * MIB


@dataclasses.dataclass(frozen=True, slots=True)
class Pieces:
    """Consecutive pieces of one stream, with the place of each.

    Attributes:
        lengths: Bytes of each piece.
        ids: Chunk ids, `V32`; zero for zeros.
        frames: Frame numbers; `ZERO_FRAME` for zeros.
        offsets: Offsets in the decoded frames.
    """

    lengths: Numbers
    ids: Rows
    frames: Numbers
    offsets: Numbers


@dataclasses.dataclass(slots=True)
class _Stream:
    info: rank_format.StreamInfo
    extents: int = 0
    length: int = 0
    zeros: int = 0
    segments: list[SegmentTable] = dataclasses.field(default_factory=list)


class RankBuilder:
    """One rank in the making. Used by one thread; `close` gives the temporary file back."""

    def __init__(self, rank: rank_format.RankNumber) -> None:
        self.rank = rank
        self.data_bytes = 0
        self._streams: list[_Stream] = []
        self._spool = tempfile.SpooledTemporaryFile(max_size=_SPOOL_BYTES)  # noqa: SIM115

    @property
    def logical_bytes(self) -> int:
        """Length of all streams so far."""
        return sum(stream.length for stream in self._streams)

    def add_stream(self, *, data_class: str, origin: str) -> int:
        """Begin a stream and return its number."""
        info = rank_format.StreamInfo(data_class=data_class, origin=origin)
        self._streams.append(_Stream(info))
        return len(self._streams) - 1

    def add_pieces(self, number: int, pieces: Pieces) -> None:
        """Append pieces to a stream; streams must be completed in order of their numbers."""
        assert number == len(self._streams) - 1 or not any(
            stream.extents for stream in self._streams[number + 1 :]
        ), number
        stream = self._streams[number]
        extents = np.zeros(len(pieces.lengths), rank_format.EXTENT_DTYPE)
        data = pieces.frames != ZERO_FRAME
        extents["length"], extents["id"] = pieces.lengths, pieces.ids
        extents["chunk_length"] = np.where(data, pieces.lengths, 0)
        if stream.zeros and len(data) and not data[0]:
            # Zeros are one extent however the windows lie: a hole is one, what was written is not.
            extents["length"][0] += stream.zeros
            with temporary_file_errors():
                self._spool.seek(-extents.itemsize, os.SEEK_CUR)
            stream.extents -= 1
        if len(data):
            stream.zeros = 0 if data[-1] else int(extents["length"][-1])
        with temporary_file_errors():
            self._spool.write(extents.tobytes())
        stream.extents += len(extents)
        stream.length += int(pieces.lengths.sum())
        self.data_bytes += int(pieces.lengths[data].sum())
        stream.segments.append(join_segments(pieces.lengths, pieces.frames, pieces.offsets))

    def build_manifest(self, tree: Sequence[TreeEntry], placement: dict[str, object]) -> Built:
        """Encode the rank manifest."""
        meta = rank_format.RankMeta(
            rank=self.rank,
            streams=tuple(stream.info for stream in self._streams),
            placement=placement,
        )
        counts = [stream.extents for stream in self._streams]
        streams = stream_rows(counts, [stream.length for stream in self._streams])
        return rank_format.build_rank(meta, tree, streams, self._extents())

    def build_layout(
        self, rank_id: Digest, frames: FrameTable, clock: Clock
    ) -> tuple[Built, list[PackId]]:
        """Encode the layout and list its packs.

        All frames must have been placed and their packs sealed.
        """
        created = format_utc(clock.now_ns())
        per_stream = [_joined(stream.segments) for stream in self._streams]
        return build_layout(rank_id, created, frames, per_stream)

    def close(self) -> None:
        """Give the temporary file back. Idempotent."""
        # What could not be written is not wanted any more.
        with contextlib.suppress(OSError):
            self._spool.close()

    def _extents(self) -> Rows:
        row_bytes = rank_format.EXTENT_DTYPE.itemsize
        count = self._spool.tell() // row_bytes
        if count == 0:
            return np.zeros(0, rank_format.EXTENT_DTYPE)
        if count * row_bytes > _SPOOL_BYTES:
            with temporary_file_errors():
                self._spool.flush()
            mapped = mmap.mmap(self._spool.fileno(), count * row_bytes, prot=mmap.PROT_READ)
            return np.frombuffer(mapped, rank_format.EXTENT_DTYPE)
        self._spool.seek(0)
        return np.frombuffer(self._spool.read(), rank_format.EXTENT_DTYPE)


def _joined(parts: list[SegmentTable]) -> SegmentTable:
    """Join across the windows what was joined within each."""
    table = np.concatenate([np.zeros((0, 3), np.int64), *parts])
    return join_segments(table[:, 0], table[:, 1], table[:, 2])
