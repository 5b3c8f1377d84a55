"""How the kernels of `blake3.cu` are launched to hash many pieces of memory at once. Pure.

The tables that the kernels read are made with numpy, all pieces at a time: a piece of the usual
length costs the GPU less than a Python call costs the processor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["LEAF_BYTES", "VALUE_BYTES", "HashPlan", "Level", "batches", "plan_hashes"]

LEAF_BYTES: Final = 1024
VALUE_BYTES: Final = 32
_LEAVES_MAX: Final = 1 << 31

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Level:
    """One level of all trees; the lowest is that of the leaves.

    Attributes:
        values: How many chaining values there are, of all pieces together.
        first: Where in the tables it says which values are whose.
    """

    values: int
    first: int


@dataclass(frozen=True, slots=True)
class HashPlan:
    """What to upload and what to launch.

    Attributes:
        pieces: How many there are.
        tables: What the kernels read, to be copied to the device as it is.
        addresses: Where in the tables the addresses of the pieces are.
        lengths: Where in the tables their lengths are.
        levels: From the leaves to the digests, which are the values of the last, in order.
    """

    pieces: int
    tables: npt.NDArray[np.uint8]
    addresses: int
    lengths: int
    levels: tuple[Level, ...]

    @property
    def work_bytes(self) -> tuple[int, int]:
        """What the two buffers have to hold that levels are written to in turns."""
        lower = self.levels[0].values * VALUE_BYTES
        upper = self.levels[1].values * VALUE_BYTES if len(self.levels) > 1 else 0
        return lower, upper


def plan_hashes(addresses: Numbers, lengths: Numbers) -> HashPlan:
    """Plan the hashing of pieces, none of which is empty; their leaves must fit one launch."""
    assert len(addresses) == len(lengths), (len(addresses), len(lengths))
    assert len(lengths), "nothing to hash"
    assert int(lengths.min()) > 0, int(lengths.min())
    counts = -(-lengths // LEAF_BYTES)
    assert int(counts.sum()) <= _LEAVES_MAX, int(counts.sum())
    parts = [addresses.astype("<u8").view(np.uint8), lengths.astype("<u8").view(np.uint8)]
    used = sum(len(part) for part in parts)
    levels = []
    while True:
        first = np.zeros(len(counts) + 1, "<u4")
        np.cumsum(counts, out=first[1:], dtype=np.uint32)
        levels.append(Level(int(first[-1]), used))
        parts.append(first.view(np.uint8))
        used += len(parts[-1])
        if int(counts.max()) == 1:
            break
        counts = (counts + 1) // 2
    return HashPlan(
        pieces=len(lengths),
        tables=np.concatenate(parts),
        addresses=0,
        lengths=len(parts[0]),
        levels=tuple(levels),
    )


def batches(lengths: Numbers, *, leaves_max: int, pieces_max: int) -> Iterator[slice]:
    """Divide pieces, in order, into batches that are small enough; no piece has more leaves."""
    ends = np.cumsum(-(-lengths // LEAF_BYTES))
    begin = 0
    while begin < len(lengths):
        done = int(ends[begin - 1]) if begin else 0
        end = int(np.searchsorted(ends, done + leaves_max, side="right"))
        end = min(end, begin + pieces_max)
        assert end > begin, int(lengths[begin])
        yield slice(begin, end)
        begin = end
