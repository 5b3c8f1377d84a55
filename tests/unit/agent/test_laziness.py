"""Marks for pages that come later, against a model that looks at one page after the other."""

import mmap

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from snapagent.criu.laziness import with_lazy_marks
from snapstore.criu import PageFlag, Pagemap, Vmas, VmaStatus

PAGE = 4096
MAP_LOCKED, MAP_HUGETLB = 0x2000, 0x40000
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
KINDS = [
    (PRIVATE, VmaStatus.REGULAR | VmaStatus.ANON_PRIVATE, True),
    (PRIVATE, VmaStatus.REGULAR | VmaStatus.STACK | VmaStatus.ANON_PRIVATE, True),
    (PRIVATE | MAP_LOCKED, VmaStatus.REGULAR | VmaStatus.ANON_PRIVATE, False),
    (PRIVATE | MAP_HUGETLB, VmaStatus.REGULAR | VmaStatus.ANON_PRIVATE, False),
    (PRIVATE, VmaStatus.REGULAR | VmaStatus.VDSO | VmaStatus.ANON_PRIVATE, False),
    (mmap.MAP_PRIVATE, VmaStatus.REGULAR | VmaStatus.FILE_PRIVATE, False),
    (mmap.MAP_SHARED | mmap.MAP_ANONYMOUS, VmaStatus.REGULAR | VmaStatus.ANON_SHARED, False),
]


def column(values: list[int]) -> np.ndarray:
    return np.array(values, np.uint64)


def vmas_of(rows: list[tuple[int, int, int]]) -> Vmas:
    """Mappings of `(first page, pages, kind)`."""
    count = len(rows)
    return Vmas(
        starts=column([first * PAGE for first, _, _ in rows]),
        ends=column([(first + pages) * PAGE for first, pages, _ in rows]),
        offsets=column([0] * count),
        object_ids=column([0] * count),
        protections=column([3] * count),
        flags=column([KINDS[kind][0] for _, _, kind in rows]),
        statuses=column([KINDS[kind][1] for _, _, kind in rows]),
    )


def pagemap_of(rows: list[tuple[int, int, int]]) -> Pagemap:
    """Entries of `(first page, pages, flags)`; what is present follows one another in the image."""
    offsets, position = [], 0
    for _, pages, flags in rows:
        offsets.append(position if flags & PageFlag.PRESENT else (1 << 64) - 1)
        position += pages * PAGE if flags & PageFlag.PRESENT else 0
    return Pagemap(
        pages_id=1,
        vaddrs=column([first * PAGE for first, _, _ in rows]),
        counts=column([pages for _, pages, _ in rows]),
        flags=column([flags for _, _, flags in rows]),
        offsets=column(offsets),
        present_bytes=position,
        has_wide_counts=True,
    )


def by_page(pagemap: Pagemap) -> dict[int, tuple[int, int | None]]:
    """Flags and offset of each page."""
    pages: dict[int, tuple[int, int | None]] = {}
    for vaddr, count, flags, offset in pagemap.entries():
        for number in range(count):
            at = None if offset is None else offset + number * PAGE
            pages[vaddr // PAGE + number] = (flags, at)
    return pages


@st.composite
def neighbours(draw: st.DrawFn, third: st.SearchStrategy[int]) -> list[tuple[int, int, int]]:
    """Ascending runs of pages with gaps, some without, and something about each."""
    rows, page = [], draw(st.integers(1, 4))
    for _ in range(draw(st.integers(0, 8))):
        page += draw(st.integers(0, 2))
        count = draw(st.integers(1, 6))
        rows.append((page, count, draw(third)))
        page += count
    return rows


FLAGS = st.sampled_from(
    [PageFlag.PRESENT, PageFlag.PRESENT | PageFlag.LAZY, PageFlag.LAZY, PageFlag.PARENT]
)


@given(neighbours(FLAGS), neighbours(st.integers(0, len(KINDS) - 1)))
def test_marks_page_by_page(
    entries: list[tuple[int, int, int]], mappings: list[tuple[int, int, int]]
) -> None:
    pagemap = pagemap_of(entries)
    marked = with_lazy_marks(pagemap, vmas_of(mappings))
    lazy_pages = {
        page
        for first, count, kind in mappings
        if KINDS[kind][2]
        for page in range(first, first + count)
    }
    expected = {
        page: (
            flags | PageFlag.LAZY if flags == PageFlag.PRESENT and page in lazy_pages else flags,
            offset,
        )
        for page, (flags, offset) in by_page(pagemap).items()
    }
    assert by_page(marked) == expected
    assert (marked.counts > 0).all()
    assert (marked.vaddrs[1:] > marked.vaddrs[:-1]).all()
    if expected == by_page(pagemap):
        assert marked is pagemap


def test_guard_ranges_are_no_mappings() -> None:
    vmas = vmas_of([(1, 4, 0), (2, 1, 0)])
    vmas.statuses[1] |= np.uint64(VmaStatus.GUARD)
    marked = with_lazy_marks(pagemap_of([(1, 4, PageFlag.PRESENT)]), vmas)
    assert list(marked.flags) == [PageFlag.PRESENT | PageFlag.LAZY]
