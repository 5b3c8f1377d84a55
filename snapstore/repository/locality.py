"""Restore speed before the last per cent of deduplication: which known chunks to store again.

A frame is read and decoded whole, even for one chunk of it. A snapshot that refers to a little of
many old frames would restore slowly, and more so with every generation. So each window may cost at
most a quarter more decoding than it has bytes; what refers to the least used frames beyond that is
stored again, next to its neighbours. What is stored again never exceeds what is new, so the same
tree pushed again stores nothing. Measured in `format_spec/decisions/0006-locality.md`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from snapstore.repository.frames import FrameTable, Numbers

__all__ = ["Locality"]

AMPLIFICATION_MAX = 1.25


class Locality:
    """Watches how much of the frames stored earlier the snapshot being written uses."""

    def __init__(self, frames: FrameTable) -> None:
        self._frames = frames
        self._touched = np.zeros(len(frames), np.bool_)
        self._allowed_bytes = 0

    def rejected(self, frames: Numbers, lengths: Numbers, new_bytes: int) -> npt.NDArray[np.bool_]:
        """Say which known chunks of a window to store again.

        Args:
            frames: Frame number of each known chunk of the window, in order of the stream.
            lengths: Their lengths.
            new_bytes: Bytes of the window that are stored anyway.

        Returns:
            One flag per chunk.
        """
        self._allowed_bytes += new_bytes
        old = self._frames.were_stored(frames)
        if not old.any():
            return np.zeros(len(frames), np.bool_)
        self._grow()
        numbers, which = np.unique(frames[old], return_inverse=True)
        used = np.bincount(which, weights=lengths[old]).astype(np.int64)
        cost = np.maximum(self._frames.rows["plain_length"][numbers].astype(np.int64), used)
        # What an earlier window decodes anyway costs nothing here, and the frames at both ends
        # are most likely shared with the windows before and after.
        free = self._touched[numbers]
        free |= (numbers == frames[old][0]) | (numbers == frames[old][-1])
        cost = np.where(free, used, cost)
        order = np.argsort(used / cost, kind="stable")
        # Dropping the k worst frames turns their used bytes into new ones.
        dropped_used = np.concatenate(([0], np.cumsum(used[order])))
        dropped_cost = np.concatenate(([0], np.cumsum(cost[order])))
        useful = new_bytes + used.sum()
        decoded = new_bytes + cost.sum() - dropped_cost + dropped_used
        drop = int(np.argmax(decoded <= AMPLIFICATION_MAX * useful))
        drop = min(drop, int(np.searchsorted(dropped_used, self._allowed_bytes, side="right")) - 1)
        self._allowed_bytes -= int(dropped_used[drop])
        bad = np.zeros(len(numbers), np.bool_)
        bad[order[:drop]] = True
        self._touched[numbers[~bad]] = True
        result = np.zeros(len(frames), np.bool_)
        result[old] = bad[which]
        return result

    def _grow(self) -> None:
        """Make room for frames that were found in an index since."""
        count = len(self._frames)
        if count > len(self._touched):
            touched = np.zeros(max(count, 2 * len(self._touched)), np.bool_)
            touched[: len(self._touched)] = self._touched
            self._touched = touched
