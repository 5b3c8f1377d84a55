"""Chunks that were hashed elsewhere, before any of their bytes came here.

Whoever has a device hash its own memory knows all chunk ids first. Then the store is asked which it
has, and only the bytes of the others are loaded, into windows that are stored like all others.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from snapstore.chunking.base import Cut
from snapstore.errors import UsageError
from snapstore.format import limits
from snapstore.repository.chunk_source import check_chunk
from snapstore.repository.windows import WINDOW_BYTES
from snapstore.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from snapstore.format.tables import Mask, Rows
    from snapstore.repository.frames import Numbers
    from snapstore.repository.windows import ByteArray

__all__ = [
    "ASKED_ROWS",
    "Answer",
    "HashedChunks",
    "HashedWindow",
    "check_hashed",
    "divide_hashed",
]

ASKED_ROWS = 4096
"""Asked at once: so many that asking costs nothing each, too few to hold others up."""

_KNOWN_BYTES_MAX = 4096 * MIB


@dataclasses.dataclass(frozen=True, slots=True)
class HashedChunks:
    """Consecutive chunks of a file; arrays of equal length.

    Attributes:
        lengths: Bytes of each, 1 byte to 1 MiB.
        ids: The BLAKE3-256 of each, as rows of 32 bytes.
        zeros: Which are zeros and nothing else, and are no chunks.
    """

    lengths: npt.NDArray[np.int64]
    ids: npt.NDArray[np.uint8]
    zeros: npt.NDArray[np.bool_]


class Answer(NamedTuple):
    """What the store says of chunks, zeros left out.

    Attributes:
        known: Which it has; what it would rather store again it has not.
        frames: Where those are.
        offsets: Where in these frames.
        needed: Which have to be loaded: of those that are the same only the first.
        again: Which it has all the same.
    """

    known: Mask
    frames: Numbers
    offsets: Numbers
    needed: Mask
    again: Mask

    def part(self, rows: slice) -> Answer:
        """What it says of some of the chunks."""
        return Answer(
            self.known[rows],
            self.frames[rows],
            self.offsets[rows],
            self.needed[rows],
            self.again[rows],
        )


@dataclasses.dataclass(frozen=True, slots=True)
class HashedWindow:
    """A run of such chunks that goes through the pipeline as one.

    Attributes:
        length: Bytes.
        cut: The pieces, zeros joined.
        ids: Of the chunks.
        answer: Of the chunks.
        spans: Which bytes have to be loaded, `(begin, end)` relative to the window.
        load: Fills a buffer with the window's bytes from an offset on.
        check_all: Whether all that is loaded is hashed again, or one chunk of it.
    """

    length: int
    cut: Cut
    ids: Rows
    answer: Answer
    spans: list[tuple[int, int]]
    load: Callable[[int, memoryview], None]
    check_all: bool

    def fill(self, buffer: ByteArray) -> None:
        """Load what is needed, and see that it is what was hashed.

        Raises:
            DigestMismatch: It is not.
        """
        for begin, end in self.spans:
            self.load(begin, buffer[begin:end].data)
        chunk = ~self.cut.zero
        starts, ends = self.cut.starts[chunk], self.cut.ends[chunk]
        rows = np.flatnonzero(self.answer.needed).tolist()
        for row in rows if self.check_all else rows[:1]:
            data = buffer[int(starts[row]) : int(ends[row])].data
            check_chunk(blake3(data).digest(), bytes(self.ids[row]), data.nbytes)


def check_hashed(chunks: HashedChunks) -> None:
    """See that these can be chunks.

    Raises:
        UsageError: They cannot.
    """
    count = len(chunks.lengths)
    if chunks.ids.shape != (count, 32) or chunks.zeros.shape != (count,):
        raise UsageError(
            f"{count} chunks with {chunks.ids.shape} ids", next_step="give one row for each"
        )
    if count and not 0 < int(chunks.lengths.min()) <= int(chunks.lengths.max()) <= (
        limits.CHUNK_BYTES_MAX
    ):
        raise UsageError(
            f"chunks of {int(chunks.lengths.min())} to {int(chunks.lengths.max())} bytes",
            next_step=f"give chunks of 1 to {limits.CHUNK_BYTES_MAX} bytes",
        )


def divide_hashed(
    chunks: HashedChunks,
    answer: Answer,
    load: Callable[[int, int, memoryview], None],
    base: int,
    *,
    check_all: bool,
) -> Iterator[HashedWindow]:
    """Divide chunks into windows, of which those that have to be loaded fit a buffer.

    Args:
        chunks: What to divide.
        answer: What the store says of them.
        load: Gets an offset in the file, a length and a buffer of that length.
        base: Where in the file the first chunk begins.
        check_all: See `HashedWindow`.
    """
    needed = np.zeros(len(chunks.lengths), np.bool_)
    needed[~chunks.zeros] = answer.needed
    data_before = np.concatenate(([0], np.cumsum(~chunks.zeros)))
    offset = base
    for first, last in _runs(chunks.lengths, needed):
        some = slice(first, last)
        data = slice(int(data_before[first]), int(data_before[last]))
        lengths = chunks.lengths[some]
        ends = np.cumsum(lengths)
        window = HashedWindow(
            length=int(ends[-1]),
            cut=join_zeros(ends - lengths, ends, chunks.zeros[some]),
            ids=np.ascontiguousarray(chunks.ids[some][~chunks.zeros[some]]).view("V32").reshape(-1),
            answer=answer.part(data),
            spans=_spans(ends - lengths, ends, needed[some]),
            load=_at(load, offset),
            check_all=check_all,
        )
        offset += window.length
        yield window


def _at(
    load: Callable[[int, int, memoryview], None], base: int
) -> Callable[[int, memoryview], None]:
    return lambda begin, into: load(base + begin, into.nbytes, into)


def _runs(lengths: Numbers, needed: Mask) -> Iterator[tuple[int, int]]:
    """Where windows begin and end: those with nothing to load may be long."""
    listed, flags = lengths.tolist(), needed.tolist()
    first, size, loads = 0, 0, False
    for row, (length, is_needed) in enumerate(zip(listed, flags, strict=True)):
        limit = WINDOW_BYTES if loads or is_needed else _KNOWN_BYTES_MAX
        if row > first and (size + length > limit):
            yield first, row
            first, size, loads = row, 0, False
        size += length
        loads |= is_needed
    if listed:
        yield first, len(listed)


def join_zeros(starts: Numbers, ends: Numbers, zeros: Mask) -> Cut:
    """Make pieces of chunks, of neighbouring zeros one."""
    first = np.ones(len(starts), np.bool_)
    first[1:] = ~(zeros[1:] & zeros[:-1])
    last = np.append(first[1:], np.True_)
    return Cut(starts[first], ends[last], zeros[first], 0)


def _spans(starts: Numbers, ends: Numbers, needed: Mask) -> list[tuple[int, int]]:
    edges = np.diff(needed.astype(np.int8), prepend=0, append=0)
    begins, stops = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1) - 1
    return list(zip(starts[begins].tolist(), ends[stops].tolist(), strict=True))
