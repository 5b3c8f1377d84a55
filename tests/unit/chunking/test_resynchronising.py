"""After an insertion the cuts find themselves again: the share of new bytes is small."""

import numpy as np
import pytest

from snapstore.chunking.base import Cutter
from snapstore.chunking.content import ContentCutter
from snapstore.chunking.pages import PageCutter
from snapstore.units import KIB, MIB, PAGE_BYTES
from tests.support.samples import ByteArray, bf16, fp32, pages, random_bytes, text
from tests.unit.chunking.cutting import chunk_ids, chunks, cut_stream, new_bytes

PAGES = PageCutter()
TENSORS = ContentCutter(mean_bytes=256 * KIB)
GENERIC = ContentCutter(mean_bytes=64 * KIB)


def inserted(data: ByteArray, at: int, what: ByteArray) -> ByteArray:
    return np.concatenate((data[:at], what, data[at:]))


@pytest.mark.parametrize("count", [1, 3, 17, 255, 1027])
@pytest.mark.parametrize("zero_share", [0.0, 0.25])
def test_pages_after_an_insertion_of_pages(count: int, zero_share: float) -> None:
    before = pages(6000, 1, zero_share=zero_share)
    what = pages(count, 2)
    after = inserted(before, 1234 * PAGE_BYTES, what)
    # The chunks at both ends of what is new, and one at each border of a window that moved.
    assert new_bytes(PAGES, before, after) <= len(what) + 4 * PAGES.chunk_bytes_max


def test_pages_rewritten_here_and_there() -> None:
    """2 % of the pages in runs of eight: each run costs itself and about a chunk around it."""
    before = pages(8000, 1)
    after = before.copy().reshape(-1, PAGE_BYTES)
    rewritten = pages(160, 3).reshape(-1, 8, PAGE_BYTES)
    for number, run in enumerate(rewritten):
        after[400 * number + 7 : 400 * number + 15] = run
    cost = new_bytes(PAGES, before, after.reshape(-1))
    assert 160 * PAGE_BYTES <= cost <= 3 * 160 * PAGE_BYTES


@pytest.mark.parametrize(
    ("cutter", "make"),
    [
        pytest.param(TENSORS, lambda: bf16(12 * MIB, 1), id="bf16"),
        pytest.param(TENSORS, lambda: fp32(6 * MIB, 1), id="fp32"),
        pytest.param(TENSORS, lambda: random_bytes(24 * MIB, 1), id="random"),
        pytest.param(GENERIC, lambda: random_bytes(8 * MIB, 1), id="generic-random"),
        pytest.param(GENERIC, lambda: text(8 * MIB, 1), id="generic-text"),
    ],
)
@pytest.mark.parametrize("count", [1, 12_345, 1_234_513])
def test_content_after_an_insertion_of_an_odd_number_of_bytes(
    cutter: ContentCutter, make: object, count: int
) -> None:
    """Goal: what follows an insertion is found again, wherever windows and words now lie.

    Method: insert noise at a fifth of the stream. New are the noise itself, what it takes to find
    the old cuts again, and as much at each border of a window of 8 MiB, since those have moved.
    """
    assert callable(make)
    before: ByteArray = make()
    after = inserted(before, len(before) // 5, random_bytes(count, 9))
    windows = -(-len(after) // (8 * MIB))
    allowed = count + 3 * cutter.chunk_bytes_max + windows * cutter.chunk_bytes_max
    cost = new_bytes(cutter, before, after)
    assert count <= cost <= allowed
    assert cost - count <= 0.25 * len(before)


def test_tensors_in_another_order_are_found_again() -> None:
    tensors = [bf16(700_001 + 100_002 * seed, seed) for seed in range(12)]
    before = np.concatenate(tensors)
    after = np.concatenate([tensors[5 * place % 12] for place in range(12)])
    # Each tensor that moved costs what lies before its first cut and behind its last.
    assert new_bytes(TENSORS, before, after) <= 12 * 2 * TENSORS.mean_bytes
    assert new_bytes(TENSORS, before, after) <= len(after) // 4


@pytest.mark.parametrize(
    ("cutter", "mean"), [(TENSORS, 256 * KIB), (GENERIC, 64 * KIB)], ids=["tensors", "generic"]
)
@pytest.mark.parametrize("kind", ["random", "bf16"])
def test_chunks_have_about_the_mean_length(cutter: ContentCutter, mean: int, kind: str) -> None:
    data = random_bytes(32 * MIB, 2) if kind == "random" else bf16(16 * MIB, 2)
    lengths = [end - start for start, end in chunks(cut_stream(cutter, data, [8 * MIB]))]
    assert 0.6 * mean <= len(data) / len(lengths) <= 1.4 * mean
    assert min(lengths[:-1]) >= mean // 4


def test_chunks_of_pages_have_about_the_mean_length() -> None:
    lengths = [
        length
        for _, length in chunk_ids(pages(8000, 4), cut_stream(PAGES, pages(8000, 4), [8 * MIB]))
    ]
    assert 6.4 <= np.mean(lengths) / PAGE_BYTES <= 8.4
    assert all(length % PAGE_BYTES == 0 for length in lengths)


@pytest.mark.parametrize("cutter", [PAGES, TENSORS, GENERIC], ids=["pages", "tensors", "generic"])
def test_the_same_content_has_no_new_bytes(cutter: Cutter) -> None:
    data = pages(700, 5, zero_share=0.2)
    assert new_bytes(cutter, data, data.copy()) == 0
