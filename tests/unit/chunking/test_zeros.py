"""What is zero is left out exactly: pages one by one, long runs of anything else to the byte."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapstore.chunking.base import block_sums, zero_block_runs
from snapstore.chunking.content import ContentCutter
from snapstore.chunking.pages import PageCutter
from snapstore.units import KIB, MIB, PAGE_BYTES
from tests.support.samples import nonzero_bytes, pages, random_bytes
from tests.unit.chunking.cutting import chunks, cut_stream, zeros

PAGES = PageCutter()
CONTENT = ContentCutter(mean_bytes=64 * KIB)


def runs_of(flags: list[bool]) -> list[tuple[int, int]]:
    """Runs of true flags, by the most obvious program."""
    runs = []
    for place, flag in enumerate([*flags, False]):
        if flag and (place == 0 or not flags[place - 1]):
            runs.append([place, place])
        if flag:
            runs[-1][1] = place + 1
    return [(begin, end) for begin, end in runs]


@given(st.lists(st.booleans(), min_size=1, max_size=80), st.integers(1, 9))
def test_exactly_the_zero_pages_are_left_out(is_zero: list[bool], window_pages: int) -> None:
    data = random_bytes(len(is_zero) * PAGE_BYTES, 1).reshape(-1, PAGE_BYTES).copy()
    data[:, 17] |= 1
    data[is_zero] = 0
    pieces = cut_stream(PAGES, data.reshape(-1), [window_pages * PAGE_BYTES])
    assert zeros(pieces) == [
        (begin * PAGE_BYTES, end * PAGE_BYTES) for begin, end in runs_of(is_zero)
    ]


def test_one_bit_makes_a_page_data() -> None:
    data = np.zeros(4 * PAGE_BYTES, np.uint8)
    for place in (0, 1, 7, 8, 4094, 4095):
        one = data.copy()
        one[PAGE_BYTES + place] = 0x80
        assert chunks(cut_stream(PAGES, one, [MIB])) == [(PAGE_BYTES, 2 * PAGE_BYTES)]


def test_a_page_whose_words_add_up_to_zero_is_data() -> None:
    words = np.zeros((3, 512), "<u8")
    words[1, 3], words[1, 400] = 1, 2**64 - 1
    data = words.reshape(-1).view(np.uint8)
    assert block_sums(data).tolist() == [0, 0, 0]
    assert zero_block_runs(data, block_sums(data) == 0).tolist() == [[0, 4096], [8192, 12288]]
    assert chunks(cut_stream(PAGES, data, [MIB])) == [(4096, 8192)]


def test_zeros_behind_the_last_whole_page_are_data_of_its_chunk() -> None:
    data = np.zeros(PAGE_BYTES + 100, np.uint8)
    assert cut_stream(PAGES, data, [MIB]) == [(0, 4096, True), (4096, 4196, False)]


@given(
    before=st.integers(0, 3 * PAGE_BYTES),
    zero=st.integers(40 * KIB, 90 * KIB),
    after=st.integers(0, 3 * PAGE_BYTES),
)
def test_long_zero_runs_are_left_out_to_the_byte(before: int, zero: int, after: int) -> None:
    data = np.concatenate(
        (
            nonzero_bytes(before, 1),
            np.zeros(zero, np.uint8),
            nonzero_bytes(after, 2),
        )
    )
    pieces = cut_stream(CONTENT, data, [8 * MIB])
    assert zeros(pieces) == [(before, before + zero)]


def test_runs_at_both_sides_of_a_few_bytes_are_both_whole() -> None:
    data = np.zeros(200 * KIB, np.uint8)
    data[100_001:100_004] = 7
    pieces = cut_stream(CONTENT, data, [8 * MIB])
    assert zeros(pieces) == [(0, 100_001), (100_004, 200 * KIB)]
    assert chunks(pieces) == [(100_001, 100_004)]


@pytest.mark.parametrize("offset", [0, 1, 4095])
def test_short_zero_runs_of_content_are_data(offset: int) -> None:
    data = nonzero_bytes(128 * KIB, 4)
    data[20_000 + offset : 20_000 + offset + 32 * KIB - 1] = 0
    assert zeros(cut_stream(CONTENT, data, [8 * MIB])) == []


def test_the_shortest_run_that_always_counts() -> None:
    """Eight whole blocks are always inside 32 KiB and 8190 bytes, however they lie."""
    for offset in (0, 1, 2048, 4095):
        data = nonzero_bytes(128 * KIB, 4)
        begin, end = 20_480 + offset, 20_480 + offset + 32 * KIB + 2 * 4095
        data[begin:end] = 0
        assert zeros(cut_stream(CONTENT, data, [8 * MIB])) == [(begin, end)]


def test_what_follows_a_zero_run_is_cut_the_same_wherever_it_lies() -> None:
    tail = nonzero_bytes(1 * MIB, 6)
    cuts = []
    for length in (50_000, 50_001, 77_777, 123_456):
        data = np.concatenate((nonzero_bytes(10_000, 1), np.zeros(length, np.uint8), tail))
        base = 10_000 + length
        pieces = chunks(cut_stream(CONTENT, data, [8 * MIB]))
        cuts.append([(start - base, end - base) for start, end in pieces if start >= base])
    assert cuts[1:] == cuts[:-1]
    assert cuts[0][0][0] == 0


@pytest.mark.parametrize("share", [0.05, 0.5, 0.95])
def test_share_of_zero_pages(share: float) -> None:
    data = pages(2000, 8, zero_share=share)
    expected = runs_of([not page.any() for page in data.reshape(-1, PAGE_BYTES)])
    found = zeros(cut_stream(PAGES, data, [256 * KIB]))
    assert found == [(begin * PAGE_BYTES, end * PAGE_BYTES) for begin, end in expected]
