"""Which bytes of which packs to read, in which order, and where they go. Pure.

Every frame is read and decoded once, however many places of however many ranks it serves.
Neighbouring frames are read together; reads are ordered by pack and offset, and independent, so
any number of threads can take them.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from snapstore.format.layout import ZEROS, LayoutTables
from snapstore.format.limits import ALIGNMENT_FRAME_BYTES
from snapstore.ids import PackId
from snapstore.repository.frames import FrameTable
from snapstore.units import KIB, align_up

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from snapstore.format.tables import Rows

__all__ = [
    "Destination",
    "PlannedFrame",
    "ReadPlan",
    "ReadUnit",
    "join_reads",
    "plan_reads",
    "planned_frames",
]

_GAP_BYTES_MAX = 64 * KIB
"""A gap up to this size is read along: cheaper than another request."""

_SEGMENT_DTYPE = np.dtype(
    [
        ("source", "<i8"),
        ("stream", "<i8"),
        ("start", "<i8"),
        ("length", "<i8"),
        ("frame", "<i8"),
        ("offset", "<i8"),
    ]
)


@dataclasses.dataclass(frozen=True, slots=True)
class Destination:
    """One run of bytes of a decoded frame and where in a stream it belongs.

    Attributes:
        source: Number of the layout among those planned.
        stream: Number of the stream.
        start: Offset in the stream.
        length: Bytes.
        offset: Offset in the decoded frame.
    """

    source: int
    stream: int
    start: int
    length: int
    offset: int


@dataclasses.dataclass(frozen=True, slots=True)
class ReadUnit:
    """One read of one pack: neighbouring frames.

    Attributes:
        pack: Which pack.
        offset: Where the read starts.
        length: How long it is.
        first: First row of the plan's frames.
        last: One after the last row.
    """

    pack: PackId
    offset: int
    length: int
    first: int
    last: int


class PlannedFrame(NamedTuple):
    """One frame of a plan: its row there, and what the layout says of it."""

    row: int
    offset: int
    stored_length: int
    plain_length: int
    codec: int
    checksum: bytes


class ReadPlan:
    """Reads for a set of layouts. Immutable once made; thread-safe."""

    def __init__(self, units: list[ReadUnit], frames: Rows, segments: Rows) -> None:
        self.units = units
        self.frames = frames
        self._segments = segments
        self._first = np.searchsorted(segments["frame"], np.arange(len(frames) + 1))

    @property
    def data_bytes(self) -> int:
        """Bytes that will be placed; zeros are not among them."""
        return int(self._segments["length"].sum())

    @property
    def stored_bytes(self) -> int:
        """Bytes that will be read."""
        return sum(unit.length for unit in self.units)

    def frames_of(self, unit: ReadUnit) -> Iterator[PlannedFrame]:
        """The frames of one read, in order of their offsets."""
        return planned_frames(self.frames, unit)

    def destinations(self, frame: int) -> Iterator[Destination]:
        """Where the bytes of a frame (a row of `frames`) belong."""
        rows = self._segments[self._first[frame] : self._first[frame + 1]]
        for source, stream, start, length, _, offset in rows.tolist():
            yield Destination(source, stream, start, length, offset)


def planned_frames(frames: Rows, unit: ReadUnit) -> Iterator[PlannedFrame]:
    """The frames of one read of `join_reads`, in order of their offsets."""
    rows = frames[unit.first : unit.last]
    columns = (rows[name].tolist() for name in PlannedFrame._fields[1:])
    return map(PlannedFrame, itertools.count(unit.first), *columns)


def plan_reads(layouts: Sequence[LayoutTables], *, read_bytes_max: int) -> ReadPlan:
    """Plan reading all of some layouts; one read is at most `read_bytes_max` unless one frame is.

    Raises:
        Malformed: The layouts contradict each other.
    """
    table = FrameTable()
    parts = [np.zeros(0, _SEGMENT_DTYPE)]
    for source, layout in enumerate(layouts):
        first = table.add_frames(layout.frames, table.add_packs(layout.packs))
        parts.append(_segments_of(source, layout, first))
    segments = np.concatenate(parts)
    frames = table.rows
    order = np.lexsort((frames["offset"], frames["pack"]))
    frames = frames[order]
    same = np.zeros(len(frames), np.bool_)
    same[1:] = frames[1:] == frames[:-1]
    frames = frames[~same]
    row_of = np.empty(len(order), np.int64)
    row_of[order] = np.cumsum(~same) - 1
    segments["frame"] = row_of[segments["frame"]]
    segments = segments[np.argsort(segments["frame"], kind="stable")]
    packs = table.pack_rows(np.arange(int(frames["pack"].max()) + 1 if len(frames) else 0))
    return ReadPlan(join_reads(frames, packs, read_bytes_max=read_bytes_max), frames, segments)


def _segments_of(source: int, layout: LayoutTables, first_frame: int) -> Rows:
    lengths = layout.segments["length"].astype(np.int64)
    counts = layout.streams["count"].astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    stream = np.repeat(np.arange(len(counts)), counts)
    base = np.zeros(len(counts), np.int64)
    firsts = layout.streams["first"].astype(np.int64)
    base[counts > 0] = starts[firsts[counts > 0]]
    data = layout.segments["frame"] != ZEROS
    rows = np.zeros(int(data.sum()), _SEGMENT_DTYPE)
    rows["source"] = source
    rows["stream"] = stream[data]
    rows["start"] = (starts - base[stream])[data]
    rows["length"] = lengths[data]
    rows["frame"] = layout.segments["frame"][data].astype(np.int64) + first_frame
    rows["offset"] = layout.segments["offset"][data]
    return rows


def join_reads(frames: Rows, packs: Rows, *, read_bytes_max: int) -> list[ReadUnit]:
    """Join neighbouring frames into reads; `frames` are in order of pack and offset."""
    units: list[ReadUnit] = []
    begins = frames["offset"].astype(np.int64).tolist()
    ends = (frames["offset"] + frames["stored_length"]).astype(np.int64).tolist()
    pack_of = frames["pack"].tolist()
    lengths = packs["length"].tolist()
    ids = [PackId(bytes(raw)) for raw in packs["id"].tolist()]
    first = 0
    for row in range(1, len(frames) + 1):
        joins = (
            row < len(frames)
            and pack_of[row] == pack_of[first]
            and begins[row] - ends[row - 1] <= _GAP_BYTES_MAX
            and ends[row] - begins[first] <= read_bytes_max
        )
        if not joins:
            # To the end of a block, which makes the request whole for storage that reads blocks.
            end = min(align_up(ends[row - 1], ALIGNMENT_FRAME_BYTES), lengths[pack_of[first]])
            length = max(end, ends[row - 1]) - begins[first]
            units.append(ReadUnit(ids[pack_of[first]], begins[first], length, first, row))
            first = row
    return units
