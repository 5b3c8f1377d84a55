"""Cuts whole streams the way the pipeline does, window by window, for the tests of this folder."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from blake3 import blake3

from snapstore.chunking.base import Analysis, Cutter
from snapstore.units import PAGE_BYTES
from tests.support.samples import ByteArray

__all__ = [
    "Piece",
    "chunk_ids",
    "chunks",
    "cut_stream",
    "joined",
    "new_bytes",
    "windows_of",
    "zeros",
]

Piece = tuple[int, int, bool]
"""Begin and end in the stream, and whether it is zeros."""

Analyse = Callable[[Cutter, list[ByteArray]], list[Analysis]]


def windows_of(data: ByteArray, sizes: Iterable[int]) -> list[ByteArray]:
    """Divide a stream into windows; the sizes are repeated, and multiples of a page."""
    windows = []
    position = 0
    for size in itertools.cycle(sizes):
        assert size % PAGE_BYTES == 0, size
        window = data[position : position + size]
        window.flags.writeable = False
        windows.append(window)
        position += size
        if position >= len(data):
            return windows
    raise AssertionError("no sizes given")


def analyse_in_order(cutter: Cutter, windows: list[ByteArray]) -> list[Analysis]:
    """Analyse one window after the other."""
    return [cutter.analyse(window) for window in windows]


def cut_stream(
    cutter: Cutter, data: ByteArray, sizes: Sequence[int], analyse: Analyse = analyse_in_order
) -> list[Piece]:
    """Cut a stream and check what every cut must be like."""
    windows = windows_of(data, sizes)
    pieces: list[Piece] = []
    carried = base = 0
    for number, analysis in enumerate(analyse(cutter, windows)):
        final = number == len(windows) - 1
        cut = cutter.cut(analysis, carried=carried, final=final)
        for start, end, zero in zip(
            cut.starts.tolist(), cut.ends.tolist(), cut.zero.tolist(), strict=True
        ):
            pieces.append((base + start, base + end, zero))
        base += analysis.length
        carried = cut.carried
        assert 0 <= carried < cutter.chunk_bytes_max
        assert base - carried == (pieces[-1][1] if pieces else 0)
        assert not (final and carried)
    check_tiling(cutter, data, pieces)
    return pieces


def check_tiling(cutter: Cutter, data: ByteArray, pieces: list[Piece]) -> None:
    """Check that pieces abut, cover everything, are short enough, and are zeros if they say so."""
    position = 0
    for start, end, zero in pieces:
        assert start == position, (start, position)
        assert end > start, (start, end)
        if zero:
            assert not data[start:end].any(), (start, end)
        else:
            assert end - start <= cutter.chunk_bytes_max, (start, end)
        position = end
    assert position == len(data)


def joined(pieces: list[Piece]) -> list[Piece]:
    """Join zeros that abut: where windows meet they are two pieces."""
    result: list[Piece] = []
    for start, end, zero in pieces:
        if zero and result and result[-1][2]:
            result[-1] = (result[-1][0], end, True)
        else:
            result.append((start, end, zero))
    return result


def chunks(pieces: list[Piece]) -> list[tuple[int, int]]:
    """The pieces that are not zeros."""
    return [(start, end) for start, end, zero in pieces if not zero]


def zeros(pieces: list[Piece]) -> list[tuple[int, int]]:
    """The runs of zeros, each whole."""
    return [(start, end) for start, end, zero in joined(pieces) if zero]


def chunk_ids(data: ByteArray, pieces: list[Piece]) -> Iterator[tuple[bytes, int]]:
    """Name each chunk, with its length."""
    for start, end in chunks(pieces):
        yield blake3(np.ascontiguousarray(data[start:end]).data).digest(), end - start


def new_bytes(
    cutter: Cutter, before: ByteArray, after: ByteArray, *, window_bytes: int = 8 << 20
) -> int:
    """Count the bytes that storing one stream adds to a store that has another."""
    known = {digest for digest, _ in chunk_ids(before, cut_stream(cutter, before, [window_bytes]))}
    added = dict(chunk_ids(after, cut_stream(cutter, after, [window_bytes])))
    return sum(length for digest, length in added.items() if digest not in known)
