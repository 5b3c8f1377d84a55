"""Dividing a file into pieces that can be read with the least work each, and what chunks it has.

Where a file goes to a device as fast as the bus allows, there are microseconds for each mebibyte.
So what can be known of a piece before is: a raw frame is the file's bytes, and reading one needs no
more than its place and its checksum. And what need not be known to begin is not asked: tables are
divided as a whole, and pieces are made when somebody takes them. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, overload

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from snapstore.compression import Codec
from snapstore.errors import UsageError
from snapstore.format import limits
from snapstore.format.layout import ZEROS
from snapstore.ids import PackId
from snapstore.repository.file_ranges import pack_order
from snapstore.repository.read_plan import PlannedFrame

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapstore.format.layout import LayoutTables
    from snapstore.format.tables import Mask, Rows
    from snapstore.repository.frames import Numbers
    from snapstore.repository.segments import Segments

__all__ = [
    "PIECE_BYTES_MAX",
    "FileChunks",
    "FilePiece",
    "FilePieces",
    "PieceGroup",
    "StoredFrame",
    "chunks_of",
    "pieces_of",
]

PIECE_BYTES_MAX = limits.FRAME_PLAIN_BYTES_MAX
"""A frame is no longer, so no piece has to be."""

_FRAME_BYTES_MIN = 64 * 1024
"""Of shorter frames several are read together."""

_ZEROS, _RAW, _OTHER = range(3)
_MADE_AT_ONCE = 1024


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


class PieceGroup(NamedTuple):
    """Neighbouring pieces of a file that are best read by one thread.

    Attributes:
        first: Number of the first piece.
        last: Number of the piece behind the last.
        offset: Where in the file it begins.
        length: Bytes.
        order: Tells where in the store it begins, as in `FileRange`.
        pack: All pieces are raw frames of this pack; none if it is one piece that is not raw.
        at: Where in the pack all of it lies, as it is in the file; -1 if it does not.
    """

    first: int
    last: int
    offset: int
    length: int
    order: int
    pack: PackId | None
    at: int


class FilePieces(Sequence[FilePiece]):
    """The pieces of a file, in order; each is made when it is asked for. Immutable; thread-safe.

    `SnapshotFile.pieces` makes it.
    """

    def __init__(
        self,
        layout: LayoutTables,
        kinds: Numbers,
        offsets: Numbers,
        lengths: Numbers,
        frames: Numbers,
    ) -> None:
        """Arrays of equal length, one row a piece; `frames` counts where there is data."""
        self._layout = layout
        self._kinds = kinds
        self._offsets = offsets
        self._lengths = lengths
        self._frames = frames
        self._packs: dict[int, PackId] = {}
        data = kinds != _ZEROS
        self._orders: Numbers = np.full(len(kinds), -1, np.int64)
        self._orders[data] = pack_order(layout, frames[data])

    @override
    def __len__(self) -> int:
        return len(self._kinds)

    @overload
    def __getitem__(self, index: int) -> FilePiece: ...

    @overload
    def __getitem__(self, index: slice) -> list[FilePiece]: ...

    @override
    def __getitem__(self, index: int | slice) -> FilePiece | list[FilePiece]:
        if isinstance(index, slice):
            return self._made(index)
        number = range(len(self))[index]
        return self._made(slice(number, number + 1))[0]

    @override
    def __iter__(self) -> Iterator[FilePiece]:
        for begin in range(0, len(self), _MADE_AT_ONCE):
            yield from self._made(slice(begin, begin + _MADE_AT_ONCE))

    def _made(self, rows: slice) -> list[FilePiece]:
        kinds = self._kinds[rows]
        stored = self._stored(self._frames[rows][kinds == _RAW])
        columns = (self._offsets[rows], self._lengths[rows], kinds == _ZEROS, self._orders[rows])
        listed = (column.tolist() for column in columns)
        frames = [next(stored) if kind == _RAW else None for kind in kinds.tolist()]
        return list(map(FilePiece, *listed, frames))

    def _stored(self, numbers: Numbers) -> Iterator[StoredFrame]:
        """Give raw frames by number; in columns, since there may be very many."""
        rows = self._layout.frames[numbers]
        columns = (rows[name].tolist() for name in PlannedFrame._fields[1:])
        frames = map(PlannedFrame, numbers.tolist(), *columns)
        return map(StoredFrame, map(self._pack, rows["pack"].tolist()), frames)

    def groups(self, about_bytes: int) -> list[PieceGroup]:
        """Group raw pieces that follow each other and lie in one pack; others stay alone.

        Args:
            about_bytes: Of a group, 4 MiB less or more.

        Raises:
            UsageError: That is less than a piece may have.
        """
        if about_bytes < PIECE_BYTES_MAX:
            raise UsageError(
                f"cannot group pieces to {about_bytes} bytes",
                next_step=f"give at least {PIECE_BYTES_MAX}",
            )
        count = len(self)
        if not count:
            return []
        packs, places = self._places()
        follows = np.zeros(count, np.bool_)
        follows[1:] = (packs[1:] == packs[:-1]) & (packs[1:] >= 0)
        heads = self._offsets[~follows][np.cumsum(~follows) - 1]
        blocks = (self._offsets - heads) // about_bytes
        follows[1:] &= blocks[1:] == blocks[:-1]
        breaks = follows.copy()
        breaks[1:] &= places[1:] != places[:-1] + self._lengths[:-1]
        broken = np.cumsum(breaks)
        firsts = np.flatnonzero(~follows)
        lasts = np.append(firsts[1:], count)
        starts, ends = self._offsets[firsts], (self._offsets + self._lengths)[lasts - 1]
        ats = np.where(broken[lasts - 1] == broken[firsts], places[firsts], -1)
        used, which = np.unique(packs[firsts], return_inverse=True)
        ids = [self._pack(pack) if pack >= 0 else None for pack in used.tolist()]
        columns = (firsts, lasts, starts, ends - starts, self._orders[firsts])
        listed = (column.tolist() for column in columns)
        names = map(ids.__getitem__, which.tolist())
        return list(map(PieceGroup, *listed, names, ats.tolist()))

    def _places(self) -> tuple[Numbers, Numbers]:
        """The pack of each raw frame and where it is in there; -1 for what is none."""
        raw = self._kinds == _RAW
        rows = self._layout.frames[self._frames[raw]]
        packs, places = np.full((2, len(self)), -1, np.int64)
        packs[raw], places[raw] = rows["pack"], rows["offset"]
        return packs, places

    def _pack(self, number: int) -> PackId:
        found = self._packs.get(number)
        if found is None:
            found = self._packs[number] = PackId(bytes(self._layout.packs["id"][number]))
        return found


def pieces_of(segments: Segments, begin: int, size_bytes: int) -> FilePieces:
    """Divide the file whose first byte has the position `begin`; see `SnapshotFile.pieces`."""
    layout = segments.layout
    if not size_bytes:
        none = np.empty(0, np.int64)
        return FilePieces(layout, none, none, none, none)
    rows = segments.rows(begin, begin + size_bytes)
    table = layout.segments[rows.start : rows.stop]
    ends = segments.ends[rows.start : rows.stop] - begin
    starts = ends - table["length"].astype(np.int64)
    starts, ends = np.maximum(starts, 0), np.minimum(ends, size_bytes)
    raw = _raw_frames(segments, rows, ends - starts)
    data = table["frame"] != ZEROS
    kinds = np.where(data, np.where(raw, _RAW, _OTHER), _ZEROS)
    firsts = _firsts(kinds, starts, ends)
    offsets = starts[firsts]
    lengths = np.append(offsets[1:], size_bytes) - offsets
    frames = table["frame"][firsts].astype(np.int64)
    return FilePieces(layout, kinds[firsts], offsets, lengths, frames)


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


def _firsts(kinds: Numbers, starts: Numbers, ends: Numbers) -> Numbers:
    """Where pieces begin: neighbours that are zeros are joined, or neither zeros nor raw frames."""
    joins = np.zeros(len(kinds), np.bool_)
    joins[1:] = (kinds[1:] == kinds[:-1]) & (kinds[1:] != _RAW)
    others = np.flatnonzero(kinds == _OTHER)
    begin = 0
    for row, start, end in zip(
        others.tolist(), starts[others].tolist(), ends[others].tolist(), strict=True
    ):
        if not joins[row] or end - begin > PIECE_BYTES_MAX:
            joins[row] = False
            begin = start
    return np.flatnonzero(~joins)
