"""Collecting what a rank manifest and its layout will say, while the streams are being stored.

Extents cost 48 bytes a chunk and are only needed at the end, so beyond a limit they wait in an
anonymous temporary file; segments are few and stay in memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import mmap
import tempfile
from typing import TYPE_CHECKING

import msgspec
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
_GATHERED_ROWS = 1 << 14
"""Copied at a time when extents are brought into order."""


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
    """Zeros at the end so far, which are no extent yet: more may follow."""
    runs: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """Where its extents are in the spool: first row and number of rows."""
    segments: list[SegmentTable] = dataclasses.field(default_factory=list)


class RankBuilder:
    """One rank in the making. Used by one thread; `close` gives the temporary file back.

    Streams grow in any order. Their extents wait in the order in which they came, and are brought
    together stream by stream at the end.
    """

    def __init__(self, rank: rank_format.RankNumber) -> None:
        self.rank = rank
        self.data_bytes = 0
        self._streams: list[_Stream] = []
        self._rows = 0
        self._spool = _new_spool()

    @property
    def logical_bytes(self) -> int:
        """Length of all streams so far."""
        return sum(stream.length for stream in self._streams)

    def add_stream(self, *, data_class: str, origin: str) -> int:
        """Begin a stream and return its number."""
        info = rank_format.StreamInfo(data_class=data_class, origin=origin)
        self._streams.append(_Stream(info))
        return len(self._streams) - 1

    def set_origin(self, number: int, origin: str) -> None:
        """Say where a stream came from, if that was not known when it began."""
        stream = self._streams[number]
        stream.info = msgspec.structs.replace(stream.info, origin=origin)

    def arrange(self, order: Sequence[int]) -> None:
        """Number the streams anew: stream `order[n]` becomes stream n."""
        assert sorted(order) == list(range(len(self._streams))), order
        self._streams = [self._streams[number] for number in order]

    def add_pieces(self, number: int, pieces: Pieces) -> None:
        """Append pieces to a stream."""
        stream = self._streams[number]
        data = pieces.frames != ZERO_FRAME
        extents = np.zeros(len(data), rank_format.EXTENT_DTYPE)
        extents["length"], extents["id"] = pieces.lengths, pieces.ids
        extents["chunk_length"] = np.where(data, pieces.lengths, 0)
        stream.length += int(pieces.lengths.sum())
        self.data_bytes += int(pieces.lengths[data].sum())
        stream.segments.append(join_segments(pieces.lengths, pieces.frames, pieces.offsets))
        if not len(data):
            return
        # Zeros are one extent however the windows lie: a hole is one, what was written is not.
        if data[0]:
            self._write_zeros(stream)
        else:
            extents["length"][0] += stream.zeros
        stream.zeros = 0 if data[-1] else int(extents["length"][-1])
        self._write(stream, extents if data[-1] else extents[:-1])

    def _write_zeros(self, stream: _Stream) -> None:
        if stream.zeros:
            extent = np.zeros(1, rank_format.EXTENT_DTYPE)
            extent["length"] = stream.zeros
            stream.zeros = 0
            self._write(stream, extent)

    def _write(self, stream: _Stream, extents: Rows) -> None:
        if not len(extents):
            return
        with temporary_file_errors():
            self._spool.write(extents.tobytes())
        first, count = stream.runs[-1] if stream.runs else (0, 0)
        if first + count == self._rows and count:
            stream.runs[-1] = (first, count + len(extents))
        else:
            stream.runs.append((self._rows, len(extents)))
        self._rows += len(extents)
        stream.extents += len(extents)

    def build_manifest(self, tree: Sequence[TreeEntry], placement: dict[str, object]) -> Built:
        """Encode the rank manifest; nothing can be added afterwards."""
        for stream in self._streams:
            self._write_zeros(stream)
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
        self._gather()
        row_bytes = rank_format.EXTENT_DTYPE.itemsize
        if self._rows == 0:
            return np.zeros(0, rank_format.EXTENT_DTYPE)
        if self._rows * row_bytes > _SPOOL_BYTES:
            with temporary_file_errors():
                self._spool.flush()
            size = self._rows * row_bytes
            mapped = mmap.mmap(self._spool.fileno(), size, prot=mmap.PROT_READ)
            return np.frombuffer(mapped, rank_format.EXTENT_DTYPE)
        self._spool.seek(0)
        return np.frombuffer(self._spool.read(), rank_format.EXTENT_DTYPE)

    def _gather(self) -> None:
        """Bring the extents into the order of the streams, where they are not in it already."""
        runs = [run for stream in self._streams for run in stream.runs]
        begins = itertools.accumulate((count for _, count in runs), initial=0)
        if all(first == begin for (first, _), begin in zip(runs, begins, strict=False)):
            return
        row_bytes = rank_format.EXTENT_DTYPE.itemsize
        gathered = _new_spool()
        try:
            with temporary_file_errors():
                for first, count in runs:
                    self._spool.seek(first * row_bytes)
                    for begin in range(0, count, _GATHERED_ROWS):
                        rows = min(_GATHERED_ROWS, count - begin)
                        gathered.write(self._spool.read(rows * row_bytes))
        except BaseException:
            gathered.close()
            raise
        self.close()
        self._spool = gathered


def _new_spool() -> tempfile.SpooledTemporaryFile[bytes]:
    return tempfile.SpooledTemporaryFile(max_size=_SPOOL_BYTES)


def _joined(parts: list[SegmentTable]) -> SegmentTable:
    """Join across the windows what was joined within each."""
    table = np.concatenate([np.zeros((0, 3), np.int64), *parts])
    return join_segments(table[:, 0], table[:, 1], table[:, 2])
