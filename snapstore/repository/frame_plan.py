"""Grouping neighbouring new chunks into frames of one texture. Pure."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from snapstore.units import KIB, MIB

if TYPE_CHECKING:
    from snapstore.repository.frames import Numbers

__all__ = ["FramePlan", "RawFrames", "plan_frames", "plan_raw_frames"]

RAW_FRAME_BYTES = 4 * MIB
CODED_FRAME_BYTES = 1 * MIB
_RUN_BYTES_MIN = 64 * KIB
"""A shorter run of another texture is not worth a frame of its own."""

_WITHOUT_NUMBERS = frozenset({0b0000, 0b1111})
"""Textures of noise and of text, which is all the same to their codecs how spans line up."""


@dataclasses.dataclass(frozen=True, slots=True)
class FramePlan:
    """Chunks that will share a frame.

    Attributes:
        rows: Numbers of the chunks among those of the window.
        spans: `(start, end)` in the window of the runs of bytes that make up the frame.
        texture: Bit mask of the byte positions modulo 4 that repeat.
        phase: Offset in the window of the frame's first byte modulo 4; for all spans alike if the
            texture tells of numbers.
        length: Bytes of the frame.
    """

    rows: npt.NDArray[np.int64]
    spans: list[tuple[int, int]]
    texture: int
    phase: int
    length: int


class RawFrames(NamedTuple):
    """Frames of chunks whose texture nobody asks for.

    Attributes:
        firsts: Which is the first chunk of each.
        spans: Of each, `(start, end)` of the runs of bytes that make it up.
    """

    firsts: Numbers
    spans: list[list[tuple[int, int]]]


def plan_raw_frames(starts: Numbers, ends: Numbers) -> RawFrames:
    """Group new chunks, of which there are some, into frames that are as long as they can be.

    As `plan_frames` does for chunks without texture, without looking at each of them in turn.
    """
    firsts = _firsts(ends - starts)
    joint = np.ones(len(starts), np.bool_)
    joint[1:] = starts[1:] != ends[:-1]
    joint[firsts] = True
    heads = np.flatnonzero(joint)
    tails = np.append(heads[1:], len(starts)) - 1
    runs = list(zip(starts[heads].tolist(), ends[tails].tolist(), strict=True))
    bounds = [*np.searchsorted(heads, firsts).tolist(), len(runs)]
    return RawFrames(firsts, [runs[a:b] for a, b in itertools.pairwise(bounds)])


def _firsts(lengths: Numbers) -> Numbers:
    """Where frames begin that take chunks for as long as these fit."""
    done = np.cumsum(lengths)
    firsts = []
    first = before = 0
    while first < len(lengths):
        firsts.append(first)
        fitting = int(np.searchsorted(done, before + RAW_FRAME_BYTES, side="right"))
        first = max(fitting, first + 1)
        before = int(done[first - 1])
    return np.array(firsts, np.int64)


def plan_frames(
    rows: npt.NDArray[np.int64],
    starts: Numbers,
    ends: Numbers,
    textures: npt.NDArray[np.uint8],
) -> list[FramePlan]:
    """Group the chunks `rows` of a window into frames.

    Args:
        rows: Which chunks are new, ascending.
        starts: Start of every chunk of the window, relative to it.
        ends: End of every chunk.
        textures: Texture of each of `rows`.

    Returns:
        Frames in order; every row is in exactly one.
    """
    if not len(rows):
        return []
    begin, end = starts[rows], ends[rows]
    mask = _settled_textures(textures, end - begin)
    plans: list[FramePlan] = []
    first = 0
    length = 0
    limit = _frame_bytes(int(mask[0]))
    for index, (start, stop) in enumerate(zip(begin.tolist(), end.tolist(), strict=True)):
        size = stop - start
        # Spans of one frame must agree in their offset modulo 4, or numbers would not line up.
        apart = index > first and (start - int(end[index - 1])) % 4 != 0
        apart = apart and int(mask[first]) not in _WITHOUT_NUMBERS
        if index > first and (mask[index] != mask[first] or length + size > limit or apart):
            plans.append(_plan(rows, begin, end, int(mask[first]), first, index))
            first, length = index, 0
            limit = _frame_bytes(int(mask[index]))
        length += size
    plans.append(_plan(rows, begin, end, int(mask[first]), first, len(rows)))
    return plans


def _frame_bytes(texture: int) -> int:
    return CODED_FRAME_BYTES if texture else RAW_FRAME_BYTES


def _settled_textures(textures: npt.NDArray[np.uint8], lengths: Numbers) -> npt.NDArray[np.uint8]:
    """Give short runs of another texture that of the run before them."""
    change = np.concatenate(([True], textures[1:] != textures[:-1]))
    begins = np.flatnonzero(change)
    long_enough = np.add.reduceat(lengths, begins) >= _RUN_BYTES_MIN
    long_enough[0] = True
    source = np.maximum.accumulate(np.where(long_enough, np.arange(len(begins)), 0))
    settled: npt.NDArray[np.uint8] = textures[begins[source]][np.cumsum(change) - 1]
    return settled


def _plan(
    rows: npt.NDArray[np.int64], begin: Numbers, end: Numbers, texture: int, first: int, last: int
) -> FramePlan:
    starts, stops = begin[first:last], end[first:last]
    joint = np.concatenate(([True], starts[1:] != stops[:-1]))
    heads = np.flatnonzero(joint)
    tails = np.concatenate((heads[1:], [last - first])) - 1
    spans = list(zip(starts[heads].tolist(), stops[tails].tolist(), strict=True))
    return FramePlan(rows[first:last], spans, texture, spans[0][0] % 4, int((stops - starts).sum()))
