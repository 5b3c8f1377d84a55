"""Any bytes, any windows: pieces abut, cover everything, are short enough and say the truth."""

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapstore.chunking.base import Analysis, Cutter
from snapstore.chunking.content import ContentCutter
from snapstore.chunking.grid import GridCutter
from snapstore.chunking.pages import PageCutter
from snapstore.units import KIB, MIB, PAGE_BYTES
from tests.support.samples import ByteArray, bf16, constant, pages, random_bytes, text
from tests.unit.chunking.cutting import analyse_in_order, chunks, cut_stream, joined, windows_of

PAGES = PageCutter()
CONTENT = ContentCutter(mean_bytes=64 * KIB)
FINE = ContentCutter(mean_bytes=16 * KIB, zero_run_bytes=8 * KIB)
CUTTERS = [
    pytest.param(PAGES, id="pages"),
    pytest.param(CONTENT, id="content"),
    pytest.param(ContentCutter(mean_bytes=256 * KIB), id="tensors"),
    pytest.param(GridCutter(), id="grid"),
    pytest.param(GridCutter(12 * KIB), id="fine grid"),
]
SIZES_ODD = [0, 1, 2, 3, 4, 5, 4095, 4096, 4097, 8191, 8192, 65535, 65536, 65537, 300_001]


@pytest.mark.parametrize("size", SIZES_ODD)
@pytest.mark.parametrize("cutter", CUTTERS)
@pytest.mark.parametrize(
    "make",
    [
        lambda size: np.zeros(size, np.uint8),
        lambda size: np.full(size, 0xFF, np.uint8),
        lambda size: random_bytes(size, 5),
        constant,
    ],
    ids=["zeros", "ff", "random", "one-word"],
)
def test_every_size(cutter: Cutter, size: int, make: Callable[[int], ByteArray]) -> None:
    data = make(size)
    for sizes in ([16 * MIB], [4 * KIB], [8 * KIB, 64 * KIB]):
        cut_stream(cutter, data, sizes)


def test_an_empty_stream_has_no_pieces() -> None:
    for cutter in (PAGES, CONTENT):
        cut = cutter.cut(cutter.analyse(np.zeros(0, np.uint8)), carried=0, final=True)
        assert (len(cut.starts), len(cut.ends), len(cut.zero), cut.carried) == (0, 0, 0, 0)


@pytest.mark.parametrize("cutter", CUTTERS)
def test_an_empty_window_ends_what_was_carried(cutter: Cutter) -> None:
    empty = cutter.analyse(np.zeros(0, np.uint8))
    ended = cutter.cut(empty, carried=777, final=True)
    assert (ended.starts.tolist(), ended.ends.tolist(), ended.carried) == ([-777], [0], 0)
    kept = cutter.cut(empty, carried=777, final=False)
    assert (len(kept.starts), kept.carried) == (0, 777)


@pytest.mark.parametrize("cutter", CUTTERS)
@pytest.mark.parametrize("word", [b"\x80\x3f", b"\x00\x00\x80\x3f", b"\xff", b"\x01\x02\x03"])
def test_one_word_again_and_again_makes_chunks_of_few_kinds(cutter: Cutter, word: bytes) -> None:
    """Every position looks alike, so a hash may suggest all cuts or none; neither may hurt."""
    data = constant(3 * MIB + 1, word)
    pieces = chunks(cut_stream(cutter, data, [MIB]))
    lengths = {end - start for start, end in pieces}
    assert len(lengths) <= 3
    assert len(pieces) <= len(data) // (4 * KIB) + 1


@st.composite
def streams(draw: st.DrawFn) -> ByteArray:
    """Runs of zeros, noise, one byte, numbers and text, of lengths around what matters."""
    lengths = st.one_of(
        st.integers(1, 9),
        st.integers(4090, 4100),
        st.integers(8180, 12300),
        st.integers(32 * KIB - 5, 40 * KIB),
        st.integers(60 * KIB, 300 * KIB),
    )
    parts = []
    for length in draw(st.lists(lengths, max_size=7)):
        seed = draw(st.integers(0, 9))
        kind = draw(st.sampled_from(["zeros", "noise", "byte", "numbers", "text"]))
        if kind == "zeros":
            parts.append(np.zeros(length, np.uint8))
        elif kind == "byte":
            parts.append(np.full(length, seed * 25 + 5, np.uint8))
        elif kind == "numbers":
            parts.append(bf16(length // 2 + 1, seed)[:length])
        else:
            parts.append(random_bytes(length, seed) if kind == "noise" else text(length, seed))
    return np.concatenate([np.zeros(0, np.uint8), *parts])


window_sizes = st.lists(st.integers(1, 70).map(lambda count: count * PAGE_BYTES), min_size=1)


@given(streams(), window_sizes)
def test_pages_are_cut_the_same_whatever_the_windows(data: ByteArray, sizes: list[int]) -> None:
    assert joined(cut_stream(PAGES, data, sizes)) == joined(cut_stream(PAGES, data, [MIB]))


@given(streams(), window_sizes, st.sampled_from([CONTENT, FINE]))
def test_content_is_tiled_whatever_the_windows(
    data: ByteArray, sizes: list[int], cutter: ContentCutter
) -> None:
    pieces = cut_stream(cutter, data, sizes)
    whole = cut_stream(cutter, data, [2 * MIB])
    for start, end in chunks(whole)[:-1]:
        ends_data = end == len(data) or not data[end : end + cutter.zero_run_bytes].any()
        assert end - start >= cutter.mean_bytes // 4 or ends_data
    assert sum(end - start for start, end in chunks(pieces)) >= np.count_nonzero(data)


@pytest.mark.parametrize("cutter", CUTTERS)
def test_much_may_be_carried_over_many_small_windows(cutter: Cutter) -> None:
    """Goal: a chunk may grow over dozens of windows of a page each, up to its maximum.

    Method: a page that suggests no cut, repeated, in windows of one page: the carried bytes must
    grow by a page a window, until the maximum ends the chunk, and the cuts must be those of one
    large window. Afterwards the stream ends in the middle of a chunk.
    """
    page = _page_without_cuts(cutter)
    count = cutter.chunk_bytes_max // PAGE_BYTES
    data = np.tile(page, 2 * count + 3)
    carried = 0
    for number in range(count - 1):
        cut = cutter.cut(cutter.analyse(page), carried=carried, final=False)
        assert len(cut.starts) == 0
        carried = cut.carried
        assert carried == (number + 1) * PAGE_BYTES
    cut = cutter.cut(cutter.analyse(page), carried=carried, final=False)
    assert (cut.starts.tolist(), cut.ends.tolist()) == ([-carried], [PAGE_BYTES])
    assert cut.carried == 0
    small = cut_stream(cutter, data, [PAGE_BYTES])
    assert small == cut_stream(cutter, data, [64 * MIB])
    assert [end - start for start, end, _ in small] == [
        cutter.chunk_bytes_max,
        cutter.chunk_bytes_max,
        3 * PAGE_BYTES,
    ]


def _page_without_cuts(cutter: Cutter) -> ByteArray:
    for value in range(1, 256):
        page = np.full(PAGE_BYTES, value, np.uint8)
        if not len(cutter.analyse(page).ends):
            return page
    raise AssertionError("every page suggests a cut")


def _analyse_in_threads(seed: int) -> Callable[[Cutter, list[ByteArray]], list[Analysis]]:
    def analyse(cutter: Cutter, windows: list[ByteArray]) -> list[Analysis]:
        order = list(range(len(windows)))
        random.Random(seed).shuffle(order)
        results: dict[int, Analysis] = {}
        start = threading.Barrier(4)

        def work(numbers: list[int]) -> None:
            start.wait()
            for number in numbers:
                results[number] = cutter.analyse(windows[number])

        with ThreadPoolExecutor(4) as executor:
            for future in [executor.submit(work, order[worker::4]) for worker in range(4)]:
                future.result()
        return [results[number] for number in range(len(windows))]

    return analyse


@pytest.mark.parametrize("cutter", CUTTERS)
def test_threads_do_not_change_the_result(cutter: Cutter) -> None:
    """Goal: the analyses are pure, so that cuts do not depend on who was first. Proves: I5.

    Method: four threads analyse the windows, which cannot be written to, in shuffled order and
    all at once; the cuts must be those of one thread.
    """
    data = np.concatenate(
        (
            pages(300, 1, zero_share=0.3),
            bf16(400_001, 2),
            np.zeros(100_001, np.uint8),
            text(300_007),
        )
    )
    sizes = [64 * KIB, 256 * KIB, 4 * KIB]
    alone = cut_stream(cutter, data, sizes)
    for seed in range(3):
        assert cut_stream(cutter, data, sizes, _analyse_in_threads(seed)) == alone


def test_analysing_twice_gives_the_same() -> None:
    window = windows_of(random_bytes(MIB, 3), [MIB])[0]
    for cutter in (PAGES, CONTENT):
        one, two = analyse_in_order(cutter, [window, window])
        assert one.length == two.length
        for name in ("zero_runs", "ends", "strong"):
            np.testing.assert_array_equal(getattr(one, name), getattr(two, name))
