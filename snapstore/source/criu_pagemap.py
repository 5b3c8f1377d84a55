"""Read CRIU's pagemaps: which pages of a process lie where in its pages image.

Pure: bytes in, values out; the images are hostile until proven otherwise. A terabyte of memory
makes a million entries, so those of the usual shape are decoded all at once, column by column.
Only where some entry has another shape does the field reader go through them one by one; both
ways say the same of the same bytes.
"""

from __future__ import annotations

import dataclasses
import struct
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from snapstore.errors import LimitExceeded
from snapstore.source.criu_columns import decode_columns
from snapstore.source.criu_reader import ENTRY_BYTES_MAX, UINT64_END, ImageReader
from snapstore.units import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from snapstore.source.criu_columns import Column

__all__ = ["PageFlag", "Pagemap", "PagemapEntry", "parse_pagemap"]

MAGIC_PAGEMAP = 0x56084025

PAGEMAP_ENTRIES_MAX = 1 << 22
"""Some 100 bytes of memory each while it is parsed. CRIU cuts entries at 1 MiB, so that four
terabytes reach this."""

_FILE_BYTES_END = 1 << 63
_NO_DATA = UINT64_END - 1
_PAGE_SHIFT = np.uint64(PAGE_BYTES.bit_length() - 1)
_LENGTH = struct.Struct("<I")


class _HeadField:
    PAGES_ID = 1


class _EntryField:
    VADDR = 1
    COMPAT_NR_PAGES = 2
    IN_PARENT = 3
    FLAGS = 4
    NR_PAGES = 5


class PageFlag:
    """Bits of a pagemap entry's flags."""

    PARENT = 1
    """The data is in the parent images."""
    LAZY = 2
    """Private anonymous memory, which a userfaultfd may fill after the restore."""
    PRESENT = 4
    """The data is in this pages image."""
    KNOWN = 7
    """All of them: with an unknown one, nothing can be said of where the data is."""


class PagemapEntry(NamedTuple):
    """A run of pages that follow one another in memory."""

    vaddr: int
    nr_pages: int
    flags: int
    offset: int | None
    """Where in the pages image the data begins; none if it is elsewhere."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Pagemap:
    """What one `pagemap-*.img` says, in columns of one row an entry, in the order of the file.

    Attributes:
        pages_id: The data is in `pages-<pages_id>.img`.
        vaddrs: Address of the first page.
        counts: How many pages follow one another from there on.
        flags: Bits of `PageFlag`.
        offsets: Where in the pages image the data begins; the largest 64-bit
            number if it is elsewhere.
        present_bytes: How long the pages image must be at least.
        has_wide_counts: Whether page counts are in the field that CRIU 4.2 brought; CRIU 4.1
            would see no pages at all.
    """

    pages_id: int
    vaddrs: Column
    counts: Column
    flags: Column
    offsets: Column
    present_bytes: int
    has_wide_counts: bool

    @property
    def has_parent(self) -> bool:
        """Whether some data is in the images of an earlier dump."""
        only_parent = self.flags & np.uint64(PageFlag.PARENT | PageFlag.PRESENT)
        return bool((only_parent == PageFlag.PARENT).any())

    def entries(self) -> Iterator[PagemapEntry]:
        """Yield the rows one by one."""
        columns = (self.vaddrs, self.counts, self.flags, self.offsets)
        for vaddr, count, flags, offset in zip(*(c.tolist() for c in columns), strict=True):
            yield PagemapEntry(vaddr, count, flags, None if offset == _NO_DATA else offset)


def parse_pagemap(data: bytes, name: str = "pagemap") -> Pagemap:
    """Read a `pagemap-*.img`, of CRIU before 4.2 or since.

    Raises:
        Malformed: It is no pagemap, or cut short, or an address or count cannot be.
        LimitExceeded: It has more entries than any real one.
    """
    reader = ImageReader(data, name)
    reader.expect(MAGIC_PAGEMAP)
    head = next(reader.entries(), (len(data), len(data)))
    pages_id = None
    for field in reader.fields(*head):
        if field.number == _HeadField.PAGES_ID:
            pages_id = reader.number(field)
    if pages_id is None:
        reader.fail(head[0], "a pagemap without a pages id")
    starts, ends = _entry_spans(reader, head[1])
    columns = _decode_usual(data, starts, ends)
    if columns is None:
        columns = _decode_any(reader, starts, ends)
    return _checked(reader, pages_id, starts, columns)


class _Columns(NamedTuple):
    vaddrs: Column
    counts: Column
    flags: Column
    is_wide: NDArray[np.bool_]


def _entry_spans(reader: ImageReader, position: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Find where the message of each entry begins and ends."""
    data, size = reader.data, len(reader.data)
    starts: list[int] = []
    ends: list[int] = []
    while position < size:
        if size - position < _LENGTH.size:
            reader.fail(position, "the file ends in the middle of a length")
        start = position + _LENGTH.size
        position = start + _LENGTH.unpack_from(data, position)[0]
        if position > size or position - start > ENTRY_BYTES_MAX:
            reader.fail(start, f"an entry of {position - start} bytes, {size - start} are left,")
        starts.append(start)
        ends.append(position)
        if len(starts) > PAGEMAP_ENTRIES_MAX:
            raise LimitExceeded(f"{reader.name}: more than {PAGEMAP_ENTRIES_MAX} entries")
    return np.array(starts, dtype=np.int64), np.array(ends, dtype=np.int64)


def _decode_usual(
    data: bytes, starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> _Columns | None:
    """Decode entries with each field at most once, ascending, none unknown; else return none."""
    numbers = range(_EntryField.VADDR, _EntryField.NR_PAGES + 1)
    columns = decode_columns(data, starts, ends, numbers)
    if columns is None:
        return None
    narrow, wide = columns[_EntryField.COMPAT_NR_PAGES], columns[_EntryField.NR_PAGES]
    if not (columns[_EntryField.VADDR].present & (narrow.present | wide.present)).all():
        return None
    in_parent = columns[_EntryField.IN_PARENT].values != 0
    old_flags = np.where(in_parent, np.uint64(PageFlag.PARENT), np.uint64(PageFlag.PRESENT))
    flags = columns[_EntryField.FLAGS]
    return _Columns(
        vaddrs=columns[_EntryField.VADDR].values,
        counts=np.where(wide.present, wide.values, narrow.values),
        flags=np.where(flags.present, flags.values, old_flags),
        is_wide=wide.present,
    )


def _decode_any(
    reader: ImageReader, starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> _Columns:
    """Decode entries one by one, as protobuf allows them to be."""
    columns = np.zeros((3, len(starts)), dtype=np.uint64)
    is_wide = np.zeros(len(starts), dtype=np.bool_)
    for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        numbers: dict[int, int] = {}
        for field in reader.fields(start, end):
            if field.number <= _EntryField.NR_PAGES:
                numbers[field.number] = reader.number(field, below=UINT64_END)
        is_wide[row] = _EntryField.NR_PAGES in numbers
        counts = _EntryField.NR_PAGES if is_wide[row] else _EntryField.COMPAT_NR_PAGES
        if _EntryField.VADDR not in numbers or counts not in numbers:
            reader.fail(start, "a pagemap entry without address or count")
        in_parent = numbers.get(_EntryField.IN_PARENT, 0) != 0
        flags = numbers.get(_EntryField.FLAGS, PageFlag.PARENT if in_parent else PageFlag.PRESENT)
        columns[:, row] = (numbers[_EntryField.VADDR], numbers[counts], flags)
    return _Columns(columns[0], columns[1], columns[2], is_wide)


def _checked(
    reader: ImageReader, pages_id: int, starts: NDArray[np.int64], columns: _Columns
) -> Pagemap:
    """Refuse what cannot be, then lay the data out: it has the order of the entries."""
    vaddrs, counts, flags = columns.vaddrs, columns.counts, columns.flags
    pages_left = ((np.uint64(UINT64_END - 1) - vaddrs) >> _PAGE_SHIFT) + np.uint64(1)
    is_bad = (vaddrs % np.uint64(PAGE_BYTES) != 0) | (counts > pages_left)
    is_bad |= flags > np.uint64(PageFlag.KNOWN)
    if is_bad.any():
        row = int(is_bad.argmax())
        reader.fail(
            int(starts[row]),
            f"{counts[row]} pages from address {int(vaddrs[row]):#x} on with flags {flags[row]:#x}",
        )
    is_present = (flags & np.uint64(PageFlag.PRESENT)) != 0
    stored = np.where(is_present, counts, np.uint64(0))
    # In floating point, since the exact sum of hostile counts may overflow.
    if stored.sum(dtype=np.float64) * PAGE_BYTES >= _FILE_BYTES_END:
        reader.fail(0, "more pages than a file can hold")
    data_ends = np.cumsum(stored, dtype=np.uint64) << _PAGE_SHIFT
    offsets = np.where(is_present, data_ends - (stored << _PAGE_SHIFT), np.uint64(_NO_DATA))
    return Pagemap(
        pages_id=pages_id,
        vaddrs=vaddrs,
        counts=counts,
        flags=flags,
        offsets=offsets,
        present_bytes=int(data_ends[-1]) if len(data_ends) else 0,
        has_wide_counts=bool(columns.is_wide.any()),
    )
