"""Dividing a file into ranges that can be read apart, by where its frames begin and end. Pure.

A frame has to be read and decoded whole, so a good place to divide a file is one that few frames
span. In a snapshot that shares nothing with others there is such a place every few mebibytes.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from snapstore.format.layout import ZEROS
from snapstore.units import PAGE_BYTES

if TYPE_CHECKING:
    from snapstore.format.layout import LayoutTables
    from snapstore.repository.frames import Numbers
    from snapstore.repository.segments import Segments

__all__ = ["FileRange", "divide_file", "pack_order"]

Mask = npt.NDArray[np.bool_]


@dataclasses.dataclass(frozen=True, slots=True)
class FileRange:
    """A part of a file that is best read as one.

    Attributes:
        offset: Where in the file it begins.
        length: Bytes.
        is_zeros: All of it is zeros, and nothing of it is stored.
        order: Tells where in the store it begins: ranges that are read in this order, also of
            several files and snapshots, are mostly neighbours in one object. Negative for zeros.
    """

    offset: int
    length: int
    is_zeros: bool
    order: int


class _Runs(NamedTuple):
    """What lies one after the other in a file: offsets in it, and frames (`ZEROS` for zeros)."""

    starts: Numbers
    ends: Numbers
    frames: Numbers
    frame_offsets: Numbers


def divide_file(
    segments: Segments, begin: int, size_bytes: int, *, about_bytes: int, zeros_bytes_min: int
) -> list[FileRange]:
    """Divide the file whose first byte has the position `begin`; see `SnapshotFile.ranges`."""
    if not size_bytes:
        return []
    runs = _runs(segments, begin, size_bytes)
    zeros_starts, zeros_ends = _long_zeros(runs, size_bytes, zeros_bytes_min)
    # Between two runs of long zeros lie data; before, after and between them there may be none.
    data_starts = np.concatenate(([0], zeros_ends))
    data_ends = np.concatenate((zeros_starts, [size_bytes]))
    some = data_ends > data_starts
    cuts = _cuts(runs, data_starts[some], data_ends[some], about_bytes)
    starts = np.unique(np.concatenate((data_starts[some], zeros_starts, cuts)))
    ends = np.append(starts[1:], size_bytes)
    is_zeros = np.isin(starts, zeros_starts)
    order = _order(segments.layout, runs, starts, is_zeros)
    columns = zip(starts.tolist(), (ends - starts).tolist(), is_zeros.tolist(), order, strict=True)
    return [FileRange(*row) for row in columns]


def _runs(segments: Segments, begin: int, size_bytes: int) -> _Runs:
    rows = segments.rows(begin, begin + size_bytes)
    table = segments.layout.segments[rows.start : rows.stop]
    full_ends = segments.ends[rows.start : rows.stop] - begin
    full_starts = full_ends - table["length"].astype(np.int64)
    starts = np.maximum(full_starts, 0)
    offsets = table["offset"].astype(np.int64) + starts - full_starts
    ends = np.minimum(full_ends, size_bytes)
    return _Runs(starts, ends, table["frame"].astype(np.int64), offsets)


def _long_zeros(runs: _Runs, size_bytes: int, bytes_min: int) -> tuple[Numbers, Numbers]:
    """Whole pages of zeros; the end of the file ends a page."""
    zeros = runs.frames == ZEROS
    starts = -(-runs.starts[zeros] // PAGE_BYTES) * PAGE_BYTES
    ends = runs.ends[zeros]
    ends = np.where(ends == size_bytes, ends, ends // PAGE_BYTES * PAGE_BYTES)
    long_enough = (ends - starts >= bytes_min) & (ends > starts)
    return starts[long_enough], ends[long_enough]


def _cuts(runs: _Runs, starts: Numbers, ends: Numbers, about_bytes: int) -> Numbers:
    """Where to cut stretches of data: once near each of the places that divide them evenly."""
    stretches = np.arange(len(starts))
    counts = -(-(ends - starts) // about_bytes)
    stretch = np.repeat(stretches, counts - 1)
    number = np.arange(len(stretch)) - np.repeat(np.cumsum(counts - 1) - counts, counts - 1)
    wanted: Numbers = starts[stretch] + (ends - starts)[stretch] * number // counts[stretch]
    wanted -= wanted % PAGE_BYTES
    places, spanned = _places(runs)
    if not len(places) or not len(wanted):
        return wanted
    # Each place can serve the wanted cut that is nearest to it. These are at least half of
    # `about_bytes` from each other and from zeros, and at most all of it; a quarter on both sides
    # makes one and a half times that, and never takes a place beyond the zeros.
    after = np.minimum(np.searchsorted(wanted, places), len(wanted) - 1)
    before = np.maximum(after - 1, 0)
    is_before = places - wanted[before] < wanted[after] - places
    nearest = np.where(is_before, before, after)
    distance = np.abs(places - wanted[nearest])
    near = distance <= about_bytes // 4
    places, spanned, nearest, distance = (
        column[near] for column in (places, spanned, nearest, distance)
    )
    best = np.lexsort((distance, spanned, nearest))
    served, first = np.unique(nearest[best], return_index=True)
    wanted[served] = places[best[first]]
    return wanted


def _places(runs: _Runs) -> tuple[Numbers, Numbers]:
    """Where segments end on a page, and how many frames have bytes on both sides."""
    data = np.flatnonzero(runs.frames != ZEROS)
    frames, first, inverse = np.unique(runs.frames[data], return_index=True, return_inverse=True)
    last = np.empty(len(frames), np.int64)
    last[inverse] = data
    changes = np.zeros(len(runs.frames) + 1, np.int64)
    np.add.at(changes, data[first], 1)
    np.add.at(changes, last, -1)
    spanned = np.cumsum(changes)[: len(runs.ends)]
    on_page = runs.ends % PAGE_BYTES == 0
    return runs.ends[on_page], spanned[on_page]


def _order(layout: LayoutTables, runs: _Runs, starts: Numbers, is_zeros: Mask) -> list[int]:
    """Pack and offset of the first data of each range as one number."""
    data = np.flatnonzero(runs.frames != ZEROS)
    order = np.full(len(starts), -1, np.int64)
    if len(data):
        run = np.searchsorted(runs.ends, starts, side="right")
        first = data[np.minimum(np.searchsorted(data, run), len(data) - 1)]
        order = pack_order(layout, runs.frames[first])
        order[is_zeros] = -1
    found: list[int] = order.tolist()
    return found


def pack_order(layout: LayoutTables, frames: Numbers) -> Numbers:
    """Pack and offset of each of these frames as one number, which orders them as they lie."""
    rows = layout.frames[frames]
    # The beginning of its id tells a pack from all others, in every layout alike.
    ids = np.ascontiguousarray(layout.packs["id"][rows["pack"]]).view(np.uint8)
    head = ids.reshape(-1, 32)[:, :4].astype(np.int64)
    pack = ((head[:, 0] << 8 | head[:, 1]) << 8 | head[:, 2]) << 7 | head[:, 3] >> 1
    order: Numbers = pack << 32 | rows["offset"].astype(np.int64)
    return order
