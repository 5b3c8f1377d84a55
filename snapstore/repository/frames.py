"""The frames that one push or pull knows of, numbered as they become known.

Frame numbers stand for places long before these are settled: a chunk that is about to be encoded
already has one. Not thread-safe: only the thread that plans touches it.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from snapstore.errors import Malformed
from snapstore.format.index import FRAME_DTYPE, PACK_DTYPE
from snapstore.ids import PackId

if TYPE_CHECKING:
    from snapstore.format.tables import Mask, Rows

__all__ = ["FrameTable", "GrowingRows"]

Numbers = npt.NDArray[np.int64]

_STORED_DTYPE = np.dtype([("stored", "?")])


class GrowingRows:
    """A structured array that grows at its end without copying every time."""

    def __init__(self, dtype: np.dtype[np.void]) -> None:
        self._rows: Rows = np.zeros(1024, dtype)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def rows(self) -> Rows:
        """What is there now; a view that the next `extend` may leave behind."""
        return self._rows[: self._count]

    def extend(self, rows: Rows) -> int:
        """Append rows and return the number of the first."""
        first = self._count
        self._count += len(rows)
        if self._count > len(self._rows):
            grown = np.zeros(max(self._count, 2 * len(self._rows)), self._rows.dtype)
            grown[:first] = self._rows[:first]
            self._rows = grown
        self._rows[first : self._count] = rows
        return first


@dataclasses.dataclass(frozen=True, slots=True)
class _Pack:
    id: PackId
    length: int


class FrameTable:
    """Frames and the packs they lie in, under numbers that never change.

    The row of a frame is of the index's `FRAME_DTYPE`; its `pack` is a pack number of this table.
    """

    def __init__(self) -> None:
        self._frames = GrowingRows(FRAME_DTYPE)
        self._stored = GrowingRows(_STORED_DTYPE)
        self._packs: list[_Pack | None] = []
        self._numbers: dict[PackId, int] = {}

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def rows(self) -> Rows:
        """All frames by number; a view to read at once."""
        return self._frames.rows

    def reserve_pack(self) -> int:
        """Number a pack that is still being filled."""
        self._packs.append(None)
        return len(self._packs) - 1

    def seal_pack(self, number: int, pack_id: PackId, length: int) -> None:
        """Say under which id a reserved pack was stored."""
        assert self._packs[number] is None, number
        self._packs[number] = _Pack(pack_id, length)

    def add_packs(self, packs: Rows) -> Numbers:
        """Number packs of an index or layout (rows of its `PACK_DTYPE`); known ones keep theirs."""
        numbers = np.empty(len(packs), np.int64)
        for row, (raw, length) in enumerate(packs.tolist()):
            pack = _Pack(PackId(bytes(raw)), length)
            number = self._numbers.setdefault(pack.id, len(self._packs))
            if number == len(self._packs):
                self._packs.append(pack)
            elif self._packs[number] != pack:
                raise Malformed(
                    f"pack {pack.id.short} has two lengths in the store's tables",
                    next_step="move the layouts of the snapshot's ranks away and pull again",
                )
            numbers[row] = number
        return numbers

    def add_frames(self, frames: Rows, packs: Numbers) -> int:
        """Add stored frames whose `pack` is a row of `packs`; returns the first number."""
        rows = frames.copy()
        rows["pack"] = packs[frames["pack"].astype(np.int64)]
        self._stored.extend(np.ones(len(rows), _STORED_DTYPE))
        return self._frames.extend(rows)

    def were_stored(self, numbers: Numbers) -> Mask:
        """Which of these frames the store had already, those not reserved here."""
        found: Mask = self._stored.rows["stored"][numbers]
        return found

    def reserve_frames(self, plain_lengths: npt.NDArray[np.uint32]) -> int:
        """Number frames that are yet to be encoded; returns the first number."""
        rows = np.zeros(len(plain_lengths), FRAME_DTYPE)
        rows["plain_length"] = plain_lengths
        self._stored.extend(np.zeros(len(rows), _STORED_DTYPE))
        return self._frames.extend(rows)

    def place_frame(self, number: int, row: Rows) -> None:
        """Fill in where a reserved frame was put; `row` has one element."""
        assert self.rows[number]["plain_length"] == row[0]["plain_length"], number
        self._frames.rows[number] = row[0]

    def place_frames(self, numbers: Numbers, rows: Rows) -> None:
        """Fill in where several reserved frames were put."""
        assert (self.rows["plain_length"][numbers] == rows["plain_length"]).all(), numbers
        self._frames.rows[numbers] = rows

    def pack_rows(self, numbers: Numbers) -> Rows:
        """The packs with these numbers as rows of `PACK_DTYPE`; all must be sealed."""
        rows = np.zeros(len(numbers), PACK_DTYPE)
        for row, number in enumerate(numbers.tolist()):
            pack = self._packs[number]
            assert pack is not None, number
            rows[row] = (pack.id.raw, pack.length)
        return rows
