"""Windows that arrive in parts are cut as whole windows are."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from snapstore.chunking.base import Before, Cutter
from snapstore.chunking.content import ContentCutter
from snapstore.chunking.pages import PageCutter
from snapstore.chunking.parts import PART_BYTES_MIN, divide
from snapstore.units import KIB, MIB, PAGE_BYTES
from tests.support.samples import ByteArray, random_bytes
from tests.unit.chunking.cutting import Piece

WINDOW_BYTES = 512 * KIB

CUTTERS: list[Cutter] = [
    PageCutter(),
    ContentCutter(mean_bytes=64 * KIB),
    ContentCutter(mean_bytes=8 * KIB),
]


def cut_in_parts(cutter: Cutter, data: ByteArray, held: list[int]) -> list[Piece]:
    """Cut a stream whose bytes come in such amounts at a time; one is a window without parts."""
    pieces: list[Piece] = []
    carried = offset = 0
    before: Before | None = None
    amounts = itertools.cycle(held)
    while offset < len(data):
        left = min(WINDOW_BYTES - offset % WINDOW_BYTES, len(data) - offset)
        length, after = min(next(amounts), left), None
        if length < left:
            length, after = divide(data[offset : offset + length])
        analysis = cutter.analyse(data[offset : offset + length], before)
        cut = cutter.cut(analysis, carried=carried, final=offset + length == len(data))
        for start, end, zero in zip(
            cut.starts.tolist(), cut.ends.tolist(), cut.zero.tolist(), strict=True
        ):
            if zero and pieces and pieces[-1][2]:
                pieces[-1] = (pieces[-1][0], offset + end, True)
            else:
                pieces.append((offset + start, offset + end, zero))
        carried, offset, before = cut.carried, offset + length, after
    return pieces


# Runs of blocks: zeros, zeros but for a byte at one place, or random bytes.
run = st.tuples(st.integers(1, 40), st.sampled_from(["zero", "data", "first", "middle", "last"]))


def stream_of(runs: list[tuple[int, str]], tail: int, seed: int) -> ByteArray:
    parts = []
    for number, (blocks, kind) in enumerate(runs):
        block = np.zeros((blocks, PAGE_BYTES), np.uint8)
        if kind == "data":
            block[:] = random_bytes(block.size, seed + number).reshape(block.shape)
        elif kind != "zero":
            block[:, {"first": 0, "middle": 2000, "last": -1}[kind]] = 1
        parts.append(block.reshape(-1))
    return np.concatenate([*parts, np.zeros(tail, np.uint8)])


@pytest.mark.parametrize("cutter", CUTTERS, ids=repr)
@given(
    st.lists(run, min_size=1, max_size=25),
    st.sampled_from([0, 1, 4095]),
    st.integers(0, 99),
    st.lists(st.sampled_from([PART_BYTES_MIN, 17 * PAGE_BYTES, 33 * PAGE_BYTES]), min_size=1),
)
@example([(200, "zero")], 1, 0, [PART_BYTES_MIN])
@example([(8, "zero"), (1, "middle")] * 40, 0, 0, [17 * PAGE_BYTES])
@example([(7, "zero"), (1, "first")] * 40, 0, 0, [17 * PAGE_BYTES])
def test_parts_are_cut_as_the_whole(
    cutter: Cutter, runs: list[tuple[int, str]], tail: int, seed: int, held: list[int]
) -> None:
    data = stream_of(runs, tail, seed)
    assert cut_in_parts(cutter, data, held) == cut_in_parts(cutter, data, [WINDOW_BYTES])


@given(st.lists(run, min_size=1, max_size=25), st.integers(0, 99))
def test_only_a_little_is_kept_back(runs: list[tuple[int, str]], seed: int) -> None:
    data = stream_of([(16, "zero"), *runs], 0, seed)
    length, before = divide(data)
    assert 0 <= len(data) - length <= 8 * PAGE_BYTES
    assert length % PAGE_BYTES == 0
    assert before.word == data[length - 4 : length].tobytes()


def test_words_across_the_border_are_seen() -> None:
    """Of random bytes some cuts depend on words that begin in the part before."""
    cutter = ContentCutter(mean_bytes=1 * KIB)
    data = random_bytes(4 * MIB, 5)
    whole = cutter.analyse(data)
    found = 0
    for offset in range(PAGE_BYTES, len(data), PAGE_BYTES):
        part = data[offset : offset + PAGE_BYTES]
        analysis = cutter.analyse(part, Before(data[offset - 4 : offset].tobytes(), zeros=False))
        inside = (whole.ends > offset) & (whole.ends <= offset + len(part))
        assert analysis.ends.tolist() == (whole.ends[inside] - offset).tolist()
        assert analysis.strong.tolist() == whole.strong[inside].tolist()
        found += int((analysis.ends < 4).sum())
    assert found > 0
