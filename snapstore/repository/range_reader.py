"""Reading long ranges of the streams of one rank straight into memory of the caller.

What is checked is what a pull checks (I6). Frames that lie in the range and nowhere else are
decoded in place and not kept; those that other ranges need as well go through the frame cache.
"""

from __future__ import annotations

import enum
import threading
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from snapstore.backend.base import ObjectKind
from snapstore.backend.direct import copy_bytes, page_aligned
from snapstore.backend.posix import PosixBackend
from snapstore.backend.retry import unwrapped
from snapstore.compression import Codec, decode_frame
from snapstore.errors import ObjectNotFound
from snapstore.format.layout import ZEROS
from snapstore.repository.read_plan import (
    Destination,
    PlannedFrame,
    ReadUnit,
    join_reads,
    planned_frames,
)
from snapstore.repository.stored_frames import (
    FrameErrors,
    check_stored,
    is_stored_raw,
    missing_pack,
    read_unit,
)
from snapstore.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapstore.backend.base import Backend
    from snapstore.format.tables import Rows
    from snapstore.ids import PackId
    from snapstore.repository.file_pieces import StoredFrame
    from snapstore.repository.segments import Segments
    from snapstore.repository.stream_reader import StreamReader
    from snapstore.repository.verifier import ChunkVerifier, WholeChunks

__all__ = ["RangeReader", "ReadCheck"]

ByteArray = npt.NDArray[np.uint8]

_PIECE_BYTES_MIN = 256 * KIB
_PIECE_BYTES_MIN_OF_SERVICE = 4 * MIB
"""What is read straight into the caller's memory is a request of its own: dear over a network."""

_READ_BYTES_BEST_OF_DISK = 4 * MIB


class ReadCheck(enum.Enum):
    """What is checked of bytes before they are given out.

    Only who checks every chunk afterwards, and gives nothing on before, may ask for less than all.
    """

    ALL = "all"
    """What the integrity that the store was opened with asks for."""
    FRAMES = "frames"
    """Checksums of frames alone."""
    NOTHING = "nothing"
    """Of a raw frame nothing; others keep their checksums, which cost little beside decoding."""


class _Piece(NamedTuple):
    """A run of bytes of a frame: where in the stream it is, in the frame, and in the buffer."""

    start: int
    length: int
    offset: int
    at: int


class _Division(NamedTuple):
    """What a range is made of; offsets in the caller's buffer."""

    zeros: list[tuple[int, int]]
    shared: list[tuple[int, int]]
    own: dict[int, list[_Piece]]


class _Scratch(threading.local):
    """Memory of one thread that is used again: fresh memory is paid for page by page."""

    def __init__(self) -> None:
        self._stored = np.empty(0, np.uint8)
        self._decoded = np.empty(0, np.uint8)

    def stored(self, size_bytes: int) -> memoryview:
        if len(self._stored) < size_bytes:
            self._stored = page_aligned(size_bytes)
        return self._stored[:size_bytes].data

    def decoded(self, size_bytes: int) -> memoryview:
        if len(self._decoded) < size_bytes:
            self._decoded = page_aligned(size_bytes)
        return self._decoded[:size_bytes].data


_scratch = _Scratch()


class RangeReader:
    """The streams of one rank, to be read in long ranges. Thread-safe.

    Each thread that reads keeps a buffer for stored bytes, one for a decoded frame and one for its
    planes for as long as it lives, together about 16 MiB, for all readers. What other ranges need
    as well is in the cache, and while it is loaded in memory as `StreamReader` says.
    """

    def __init__(self, backend: Backend, cached: StreamReader, *, read_bytes_max: int) -> None:
        """Share what `cached` has loaded; frames that several ranges need come from it."""
        self._backend = backend
        self._cached = cached
        self._segments = cached.segments
        best = backend.capabilities.read_bytes_best
        self._read_bytes_max = min(read_bytes_max, best)
        is_service = best > _READ_BYTES_BEST_OF_DISK
        self._piece_bytes_min = _PIECE_BYTES_MIN_OF_SERVICE if is_service else _PIECE_BYTES_MIN

    def read_into(
        self, stream: int, offset: int, into: memoryview, *, check: ReadCheck = ReadCheck.ALL
    ) -> None:
        """Fill all of `into` with a stream's bytes from `offset` on; they must be within it.

        The buffer's content is undefined after an error.

        Raises:
            MissingPack: A pack is gone.
            DigestMismatch: Bytes are not what they should be.
            Malformed: A frame does not decode.
        """
        if not into.nbytes:
            return
        self._cached.check_zeros()
        parts = self._divide(stream, offset, into.nbytes)
        for begin, end in parts.zeros:
            np.frombuffer(into[begin:end], np.uint8)[:] = 0
        if parts.own:
            verifier = self._cached.verifier if check is ReadCheck.ALL else None
            _Range(self._backend, self._segments, verifier, stream, into, parts.own).read(
                read_bytes_max=self._read_bytes_max, piece_bytes_min=self._piece_bytes_min
            )
        for begin, end in parts.shared:
            self._cached.read_into(stream, offset + begin, into[begin:end])

    def read_frame(
        self, stream: int, offset: int, stored: StoredFrame, into: memoryview, *, check: ReadCheck
    ) -> None:
        """Fill all of `into` with a raw frame, which is the stream's bytes from `offset` on.

        Raises:
            MissingPack: The pack is gone.
            DigestMismatch: Bytes are not what they should be.
        """
        pack, frame = stored
        unit = ReadUnit(pack, frame.offset, frame.stored_length, 0, 0)
        read_unit(self._backend, unit, into)
        if check is ReadCheck.NOTHING:
            return
        with FrameErrors(pack).about(frame):
            check_stored(self._backend, pack, frame, into)
            verifier = self._cached.verifier if check is ReadCheck.ALL else None
            if verifier is None:
                return
            if not verifier.whole_chunks(stream, offset, into.nbytes).are_right(offset, into):
                place = Destination(0, stream, offset, into.nbytes, 0)
                verifier.check(place, into)

    def open_pack(self, pack: PackId) -> int | None:
        """Return a descriptor of a pack, the caller's to close; None if packs are no files here.

        Raises:
            MissingPack: The pack is gone.
        """
        backend = unwrapped(self._backend)
        if not isinstance(backend, PosixBackend):
            return None
        try:
            return backend.descriptor(ObjectKind.PACK, pack.hex)
        except ObjectNotFound as error:
            raise missing_pack(pack, 0) from error

    def _divide(self, stream: int, offset: int, length: int) -> _Division:
        base = self._segments.base(stream)
        begin = base + offset
        rows = self._segments.rows(begin, begin + length)
        table = self._segments.layout.segments[rows.start : rows.stop]
        at = self._segments.start(rows.start) - begin
        parts = _Division([], [], {})
        for row, is_own in zip(table.tolist(), self._own(rows, begin, begin + length), strict=True):
            size, frame, frame_offset = row
            first, last = max(at, 0), min(at + size, length)
            if frame == ZEROS:
                parts.zeros.append((first, last))
            elif is_own:
                piece = _Piece(offset + at, size, frame_offset, at)
                parts.own.setdefault(frame, []).append(piece)
            elif parts.shared and parts.shared[-1][1] == first:
                parts.shared[-1] = (parts.shared[-1][0], last)
            else:
                parts.shared.append((first, last))
            at += size
        return parts

    def _own(self, rows: range, begin: int, end: int) -> list[bool]:
        """Which of these segments belong to frames that no other part of the rank needs."""
        used = self._segments.layout.segments["frame"][rows.start : rows.stop].astype(np.int64)
        used[used == ZEROS] = 0
        if not len(self._segments.layout.frames):
            return [False] * len(rows)
        first, last = self._segments.uses
        own = (first[used] >= rows.start) & (last[used] < rows.stop)
        # A segment that the range cuts is needed by who reads the rest of it.
        if self._segments.start(rows.start) < begin:
            own &= used != used[0]
        if int(self._segments.ends[rows.stop - 1]) > end:
            own &= used != used[-1]
        found: list[bool] = own.tolist()
        return found


class _Range:
    """The frames of one range that belong to it alone. Used by one thread."""

    def __init__(
        self,
        backend: Backend,
        segments: Segments,
        verifier: ChunkVerifier | None,
        stream: int,
        into: memoryview,
        pieces: dict[int, list[_Piece]],
    ) -> None:
        self._backend = backend
        self._verifier = verifier
        self._layout = segments.layout
        self._stream = stream
        self._into = into
        self._pieces = pieces
        self._errors: dict[PackId, FrameErrors] = {}
        self._chunks: WholeChunks | None = None
        if self._verifier is not None:
            start = min(run[0].start for run in pieces.values())
            end = max(run[-1].start + run[-1].length for run in pieces.values())
            self._chunks = self._verifier.whole_chunks(stream, start, end - start)

    def read(self, *, read_bytes_max: int, piece_bytes_min: int) -> None:
        """Read, check, decode and place all of them."""
        rows = np.fromiter(self._pieces, np.int64, len(self._pieces))
        frames = self._layout.frames[rows]
        order = np.lexsort((frames["offset"], frames["pack"]))
        rows, frames = rows[order], frames[order]
        raw = frames["codec"] == Codec.RAW
        raw &= frames["stored_length"] == frames["plain_length"]
        for index in np.flatnonzero(raw).tolist():
            pieces = self._pieces[int(rows[index])]
            raw[index] = _tile(pieces, int(frames["plain_length"][index]), piece_bytes_min)
        for unit, frame, row in self._planned(rows[raw], frames[raw], read_bytes_max=0):
            self._read_in_place(unit, frame, self._pieces[row])
        self._read_joined(rows[~raw], frames[~raw], read_bytes_max)

    def _planned(
        self, rows: npt.NDArray[np.int64], frames: Rows, *, read_bytes_max: int
    ) -> Iterator[tuple[ReadUnit, PlannedFrame, int]]:
        for unit, planned in self._units(frames, read_bytes_max):
            for frame in planned:
                yield unit, frame, int(rows[frame.row])

    def _units(
        self, frames: Rows, read_bytes_max: int
    ) -> Iterator[tuple[ReadUnit, Iterator[PlannedFrame]]]:
        frames = frames.copy()
        used, numbers = np.unique(frames["pack"], return_inverse=True)
        frames["pack"] = numbers
        packs = self._layout.packs[used]
        for unit in join_reads(frames, packs, read_bytes_max=read_bytes_max):
            yield unit, planned_frames(frames, unit)

    def _read_joined(self, rows: npt.NDArray[np.int64], frames: Rows, read_bytes_max: int) -> None:
        for unit, planned in self._units(frames, read_bytes_max):
            stored = _scratch.stored(unit.length)
            read_unit(self._backend, unit, stored)
            errors = self._errors_of(unit.pack)
            for frame in planned:
                begin = frame.offset - unit.offset
                with errors.about(frame):
                    data = stored[begin : begin + frame.stored_length]
                    check_stored(self._backend, unit.pack, frame, data)
                    self._place(frame, data, self._pieces[int(rows[frame.row])])

    def _place(self, frame: PlannedFrame, stored: memoryview, pieces: list[_Piece]) -> None:
        """Decode a frame, in place if it is one run of bytes of the range."""
        first = pieces[0]
        if len(pieces) == 1 and first.length == frame.plain_length:
            target = self._into[first.at : first.at + first.length]
            decode_frame(frame.codec, stored, target)
            self._check(first, target)
            return
        plain = stored
        if not is_stored_raw(frame):
            plain = _scratch.decoded(frame.plain_length)
            decode_frame(frame.codec, stored, plain)
        for piece in pieces:
            self._check(piece, plain)
            data = plain[piece.offset : piece.offset + piece.length]
            copy_bytes(self._into[piece.at : piece.at + piece.length], data)

    def _check(self, piece: _Piece, plain: memoryview) -> None:
        """ReadCheck the chunks of a piece of a decoded frame."""
        if self._verifier is None or self._chunks is None:
            return
        data = plain[piece.offset : piece.offset + piece.length]
        if not self._chunks.are_right(piece.start, data):
            place = Destination(0, self._stream, piece.start, piece.length, piece.offset)
            self._verifier.check(place, plain)

    def _read_in_place(self, unit: ReadUnit, frame: PlannedFrame, pieces: list[_Piece]) -> None:
        """Read a raw frame, whose pieces make it up in order, to where they belong."""
        checksum = xxhash.xxh3_128()
        for piece in pieces:
            target = self._into[piece.at : piece.at + piece.length]
            part = ReadUnit(unit.pack, frame.offset + piece.offset, piece.length, 0, 0)
            read_unit(self._backend, part, target)
            checksum.update(target)
        with self._errors_of(unit.pack).about(frame):
            is_whole = checksum.digest() == frame.checksum
            if is_whole and all(self._is_right(piece) for piece in pieces):
                return
            # A chunk that reaches beyond its piece can be checked in the whole frame only; and
            # what is damaged is not when it is fetched again, if it was the cache that had it so.
            stored = _scratch.stored(frame.stored_length)
            whole = ReadUnit(unit.pack, frame.offset, frame.stored_length, 0, 0)
            read_unit(self._backend, whole, stored)
            check_stored(self._backend, unit.pack, frame, stored)
            self._place(frame, stored, pieces)

    def _errors_of(self, pack: PackId) -> FrameErrors:
        found = self._errors.get(pack)
        if found is None:
            found = self._errors[pack] = FrameErrors(pack)
        return found

    def _is_right(self, piece: _Piece) -> bool:
        """Whether a piece that is in place can be checked there, and is what it should be."""
        target = self._into[piece.at : piece.at + piece.length]
        return self._chunks is None or self._chunks.are_right(piece.start, target)


def _tile(pieces: list[_Piece], length: int, bytes_min: int) -> bool:
    """Whether these pieces, each long enough, make up a frame in order."""
    done = 0
    for piece in pieces:
        if piece.offset != done or piece.length < bytes_min:
            return False
        done += piece.length
    return done == length
