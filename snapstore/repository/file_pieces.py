"""Dividing a file into pieces that can be read with the least work each, and what chunks it has.

Where a file goes to a device as fast as the bus allows, there are microseconds for each mebibyte.
So what can be known of a piece before is: a raw frame is the file's bytes, and reading one needs no
more than its place and its checksum. Pure.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from snapstore.compression import Codec
from snapstore.format import limits
from snapstore.format.layout import ZEROS
from snapstore.ids import PackId
from snapstore.repository.file_ranges import pack_order
from snapstore.repository.read_plan import PlannedFrame

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapstore.format.tables import Mask, Rows
    from snapstore.repository.frames import Numbers
    from snapstore.repository.segments import Segments

__all__ = ["PIECE_BYTES_MAX", "FileChunks", "FilePiece", "StoredFrame", "chunks_of", "pieces_of"]

PIECE_BYTES_MAX = limits.FRAME_PLAIN_BYTES_MAX
"""A frame is no longer, so no piece has to be."""

_FRAME_BYTES_MIN = 64 * 1024
"""Of shorter frames several are read together."""


class StoredFrame(NamedTuple):
    """A raw frame, and the pack that it lies in."""

    pack: PackId
    frame: PlannedFrame


@dataclasses.dataclass(frozen=True, slots=True)
class FilePiece:
    """A part of a file that is best read as one; `SnapshotFile.pieces` makes it.

    Attributes:
        offset: Where in the file it begins, at any byte.
        length: Bytes; at most 4 MiB unless it is zeros.
        is_zeros: All of it is zeros, and nothing of it is stored.
        order: Tells where in the store it begins, as in `FileRange`.
        stored: For the library: the one raw frame that it is, if it is one.
    """

    offset: int
    length: int
    is_zeros: bool
    order: int
    stored: StoredFrame | None = dataclasses.field(default=None, repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class FileChunks:
    """The chunks that make up a file, in order; arrays of equal length.

    Attributes:
        offsets: Where in the file each begins.
        lengths: Bytes of each that are in the file.
        ids: Chunk ids, as rows of 32 bytes; undefined for zeros.
        zeros: Which are no chunks but zeros, of any length.
        whole: Which are whole chunks, so that hashing these bytes gives the id; not of zeros.
    """

    offsets: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    ids: npt.NDArray[np.uint8]
    zeros: npt.NDArray[np.bool_]
    whole: npt.NDArray[np.bool_]


def chunks_of(extents: Rows, base: int, begin: int, size_bytes: int) -> FileChunks:
    """List the chunks of a file.

    Args:
        extents: Those of its stream.
        base: Where in the stream the first of them begins.
        begin: Where in the stream the file begins.
        size_bytes: How long the file is.
    """
    lengths = extents["length"].astype(np.int64)
    ends = base + np.cumsum(lengths)
    first = int(np.searchsorted(ends, begin, side="right"))
    last = int(np.searchsorted(ends, begin + size_bytes, side="left")) + 1 if size_bytes else first
    rows = extents[first:last]
    starts = np.maximum(ends[first:last] - lengths[first:last], begin)
    stops = np.minimum(ends[first:last], begin + size_bytes)
    zeros = rows["chunk_length"] == 0
    return FileChunks(
        offsets=starts - begin,
        lengths=stops - starts,
        ids=np.ascontiguousarray(rows["id"]).view(np.uint8).reshape(-1, 32),
        zeros=zeros,
        whole=~zeros & (rows["chunk_length"] == stops - starts),
    )


def pieces_of(segments: Segments, begin: int, size_bytes: int) -> list[FilePiece]:
    """Divide the file whose first byte has the position `begin`; see `SnapshotFile.pieces`."""
    if not size_bytes:
        return []
    rows = segments.rows(begin, begin + size_bytes)
    table = segments.layout.segments[rows.start : rows.stop]
    ends = segments.ends[rows.start : rows.stop] - begin
    starts = ends - table["length"].astype(np.int64)
    starts, ends = np.maximum(starts, 0), np.minimum(ends, size_bytes)
    raw = _raw_frames(segments, rows, ends - starts)
    data = table["frame"] != ZEROS
    orders = np.full(len(table), -1, np.int64)
    orders[data] = pack_order(segments.layout, table["frame"][data].astype(np.int64))
    kinds = np.where(data, np.where(raw, _RAW, _OTHER), _ZEROS)
    begins, stops, firsts = starts.tolist(), ends.tolist(), orders.tolist()
    raw_frames = _stored(segments, table["frame"][raw].astype(np.int64))
    found = []
    for kind, first, last in _groups(kinds, ends - starts):
        stored = next(raw_frames) if kind == _RAW else None
        offset, length = begins[first], stops[last - 1] - begins[first]
        found.append(FilePiece(offset, length, kind == _ZEROS, firsts[first], stored))
    return found


_ZEROS, _RAW, _OTHER = range(3)


def _raw_frames(segments: Segments, rows: range, lengths: Numbers) -> Mask:
    """Which segments are a whole raw frame that nothing else needs."""
    layout = segments.layout
    table = layout.segments[rows.start : rows.stop]
    raw: Mask = (table["frame"] != ZEROS) & (table["offset"] == 0) & (lengths >= _FRAME_BYTES_MIN)
    if raw.any():
        numbers = np.where(raw, table["frame"], 0).astype(np.int64)
        frames = layout.frames[numbers]
        first, last = segments.uses
        raw &= (frames["codec"] == Codec.RAW) & (frames["stored_length"] == lengths)
        raw &= (frames["plain_length"] == lengths) & (first[numbers] == last[numbers])
    return raw


def _groups(
    kinds: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> Iterator[tuple[int, int, int]]:
    """Join neighbours that are zeros, or that are neither zeros nor whole raw frames."""
    first, size = 0, 0
    listed = kinds.tolist()
    for row, (kind, length) in enumerate(zip(listed, lengths.tolist(), strict=True)):
        joins = row and kind == listed[row - 1] and kind != _RAW
        if joins and (kind == _ZEROS or size + length <= PIECE_BYTES_MAX):
            size += length
            continue
        if row:
            yield listed[first], first, row
        first, size = row, length
    yield listed[first], first, len(listed)


def _stored(segments: Segments, numbers: Numbers) -> Iterator[StoredFrame]:
    """Give raw frames by number; in columns, since there may be very many."""
    layout = segments.layout
    rows = layout.frames[numbers]
    # Only those of this file: a snapshot has many files and many packs.
    used = np.unique(rows["pack"])
    ids = [PackId(bytes(raw)) for raw in layout.packs["id"][used].tolist()]
    packs = dict(zip(used.tolist(), ids, strict=True))
    columns = (rows[name].tolist() for name in PlannedFrame._fields[1:])
    frames = map(PlannedFrame, numbers.tolist(), *columns)
    return map(StoredFrame, map(packs.__getitem__, rows["pack"].tolist()), frames)
