"""Which pages a restore may leave for later: decided by their mappings, as CRIU means to.

When CRIU dumps, it marks pages of private anonymous memory as lazy, except those with the stack of
a thread. Up to 4.3 it compares offsets within the page where it means to compare pages: if the
stack pointer of any thread happens to be at the very start of a page, *no* page of that process is
marked, and a restore would load all of it before the process runs. So the marks are set here. A
page of a stack needs no exception: whoever touches it waits for it like for any other.

Pure: columns in, columns out.
"""

from __future__ import annotations

import dataclasses
import mmap
from typing import TYPE_CHECKING, Final

import numpy as np

from snapstore.criu import PageFlag, VmaStatus
from snapstore.units import PAGE_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from snapstore.criu import Pagemap, Vmas

    Column = NDArray[np.uint64]

__all__ = ["with_lazy_marks"]

_PAGE_BYTES: Final = np.uint64(PAGE_BYTES)
_MAP_LOCKED: Final = 0x2000
_MAP_HUGETLB: Final = 0x40000
_WANTED: Final = mmap.MAP_ANONYMOUS | mmap.MAP_PRIVATE
_FLAGS: Final = np.uint64(_WANTED | _MAP_LOCKED | _MAP_HUGETLB)
_NEVER: Final = VmaStatus.VDSO | VmaStatus.VVAR | VmaStatus.VSYSCALL
_LAZY: Final = np.uint64(PageFlag.LAZY)


def with_lazy_marks(pagemap: Pagemap, vmas: Vmas) -> Pagemap:
    """Mark the pages of a task that may come later; entries are divided where that changes.

    Args:
        pagemap: Of the task, entries ascending; returned as it is if nothing has to change.
        vmas: Its mappings.
    """
    begins, ends = _lazy_spans(vmas)
    starts = pagemap.vaddrs
    stops = starts + pagemap.counts * _PAGE_BYTES
    open_entries = ((pagemap.flags & _LAZY) == 0) & ((pagemap.flags & PageFlag.PRESENT) != 0)
    if not (open_entries & _overlaps(starts, stops, begins, ends)).any():
        return pagemap
    rows, cuts = _cuts(starts, stops, open_entries, np.concatenate((begins, ends)))
    owner = np.concatenate((np.arange(len(starts)), rows))
    vaddrs = np.concatenate((starts, cuts))
    order = np.lexsort((vaddrs, owner))
    owner, vaddrs = owner[order], vaddrs[order]
    is_last = np.append(owner[1:] != owner[:-1], True)
    until = np.where(is_last, stops[owner], np.append(vaddrs[1:], np.uint64(0)))
    flags = pagemap.flags[owner]
    inside = open_entries[owner] & _contains(vaddrs, begins, ends)
    is_present = (flags & PageFlag.PRESENT) != 0
    shift = np.where(is_present, vaddrs - starts[owner], np.uint64(0))
    return dataclasses.replace(
        pagemap,
        vaddrs=vaddrs,
        counts=(until - vaddrs) // _PAGE_BYTES,
        flags=np.where(inside, flags | _LAZY, flags),
        offsets=pagemap.offsets[owner] + shift,
    )


def _lazy_spans(vmas: Vmas) -> tuple[Column, Column]:
    """Begins and ends of the mappings whose pages a userfaultfd can bring, ascending."""
    rows = vmas.mapped()
    is_lazy = ((rows.flags & _FLAGS) == _WANTED) & ((rows.statuses & np.uint64(_NEVER)) == 0)
    begins, ends = rows.starts[is_lazy], rows.ends[is_lazy]
    if not len(begins):
        return begins, ends
    # Those that abut are one: fewer places at which an entry could be divided.
    first = np.append(True, begins[1:] != ends[:-1])
    return begins[first], ends[np.append(first[1:], True)]


def _overlaps(starts: Column, stops: Column, begins: Column, ends: Column) -> NDArray[np.bool_]:
    before = np.searchsorted(begins, stops, side="left")
    has_begun = before > 0
    return has_begun & (ends[np.maximum(before, 1) - 1] > starts) if len(ends) else has_begun


def _contains(points: Column, begins: Column, ends: Column) -> NDArray[np.bool_]:
    return _overlaps(points, points + np.uint64(1), begins, ends)


def _cuts(
    starts: Column, stops: Column, wanted: NDArray[np.bool_], borders: Column
) -> tuple[NDArray[np.int64], Column]:
    """Which borders lie strictly inside which wanted entries."""
    borders = np.unique(borders)
    row = np.searchsorted(starts, borders, side="right") - 1
    at = np.maximum(row, 0)
    inside = (row >= 0) & (borders > starts[at]) & (borders < stops[at]) & wanted[at]
    return row[inside], borders[inside]
