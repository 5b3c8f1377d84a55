"""Sorted runs of known chunks, in memory and in temporary files, and finding ids in them."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import tempfile
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from snapstore.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import IO

    from snapstore.format.tables import U64, Rows
    from snapstore.repository.frames import Numbers

__all__ = ["MISSING", "Places", "Run", "SpilledRun", "find_ids", "merge_runs", "merge_spilled"]

MISSING = -1

_TIED_IDS_MAX = 8

_SPILLED_DTYPE = np.dtype(
    [("words", "<u8", 4), ("frame", "<i8"), ("offset", "<u4"), ("length", "<u4")]
)
_GUIDE_ROWS = 64
"""Rows between two ids of a spilled run that stay in memory: one read of 3 KiB finds a chunk."""

_PART_ROWS = 1 << 15


@dataclasses.dataclass(frozen=True, slots=True)
class Places:
    """Where chunks are; one element per chunk.

    Attributes:
        frames: Frame numbers of the frame table, or `MISSING`.
        offsets: Offsets in the decoded frames.
        lengths: Lengths of the chunks.
    """

    frames: Numbers
    offsets: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]

    @classmethod
    def unknown(cls, count: int) -> Self:
        """Places of which none is known yet."""
        return cls(
            np.full(count, MISSING, np.int64), np.zeros(count, np.int64), np.zeros(count, np.int64)
        )

    def take(self, rows: Numbers, found: Places) -> Numbers:
        """Fill in what was found for these rows; returns those that are still unknown."""
        hit = found.frames != MISSING
        at: Numbers = rows[hit]
        self.frames[at] = found.frames[hit]
        self.offsets[at] = found.offsets[hit]
        self.lengths[at] = found.lengths[hit]
        unknown: Numbers = rows[~hit]
        return unknown


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """Chunks sorted by id; `words` has four numbers per id that compare as its bytes do.

    `first` is the first of the four, on its own so that a search in it needs no copy.
    """

    first: U64
    words: U64
    frames: Numbers
    offsets: npt.NDArray[np.uint32]
    lengths: npt.NDArray[np.uint32]

    def __len__(self) -> int:
        return len(self.frames)

    @classmethod
    def of(
        cls,
        words: U64,
        frames: Numbers,
        offsets: npt.NDArray[np.uint32],
        lengths: npt.NDArray[np.uint32],
    ) -> Self:
        """A run of rows that are sorted already."""
        first: U64 = np.ascontiguousarray(words[:, 0])
        return cls(first, words, frames, offsets, lengths)

    def lookup(self, wanted: U64) -> Places:
        """Find the places of chunks in this run alone."""
        places = Places.unknown(len(wanted))
        if len(self):
            found = find_ids(self.first, self.words, wanted)
            hit = found != MISSING
            found = found[hit]
            places.frames[hit] = self.frames[found]
            places.offsets[hit] = self.offsets[found]
            places.lengths[hit] = self.lengths[found]
        return places


def find_ids(first: U64, words: U64, wanted: U64) -> Numbers:
    """Find the row of each id, or `MISSING`.

    Args:
        first: The first eight bytes of the ids that are searched, as numbers in ascending order.
        words: These ids whole.
        wanted: The ids to find.
    """
    count = len(first)
    if not count:
        return np.full(len(wanted), MISSING, np.int64)
    at = np.searchsorted(first, wanted[:, 0])
    at[at == count] = 0
    found = np.where((words[at] == wanted).all(axis=1), at, MISSING)
    # Ids that share their first eight bytes with another are not in chunks that anybody has by
    # chance. A few are looked for, so that such a pair is no way to make a chunk unreadable.
    open_rows = np.flatnonzero((found == MISSING) & (first[at] == wanted[:, 0]))
    for step in range(1, _TIED_IDS_MAX):
        next_at = np.minimum(at[open_rows] + step, count - 1)
        tied = first[next_at] == wanted[open_rows, 0]
        open_rows, next_at = open_rows[tied], next_at[tied]
        hit = (words[next_at] == wanted[open_rows]).all(axis=1)
        found[open_rows[hit]] = next_at[hit]
        open_rows = open_rows[~hit]
    return found


def merge_runs(runs: list[Run]) -> Run:
    """Merge runs into one; of equal ids the one in the earlier run stays."""
    words = np.concatenate([run.words for run in runs])
    order = np.argsort(words[:, 0], kind="stable")
    words = words[order]
    # Equal ids follow one another unless two ids share their first eight bytes; then one more row
    # survives, behind the newer one, which is found first.
    keep = np.ones(len(words), np.bool_)
    keep[1:] = (words[1:] != words[:-1]).any(axis=1)
    order = order[keep]
    return Run.of(
        words[keep],
        np.concatenate([run.frames for run in runs])[order],
        np.concatenate([run.offsets for run in runs])[order],
        np.concatenate([run.lengths for run in runs])[order],
    )


class SpilledRun:
    """A run in an anonymous temporary file; every 64th id is in memory. Used by one thread."""

    def __init__(self, file: IO[bytes], guide: U64, count: int) -> None:
        self._file = file
        self._guide = guide
        self._count = count

    def __len__(self) -> int:
        return self._count

    @classmethod
    def write(cls, parts: Iterable[Run]) -> Self:
        """Write runs of which each goes on where the one before ended.

        Raises:
            OSError: There is no room; nothing is left behind.
        """
        guides: list[U64] = []
        count = 0
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(tempfile.TemporaryFile())
            for part in parts:
                guides.append(part.first[-count % _GUIDE_ROWS :: _GUIDE_ROWS].copy())
                count += len(part)
                for at in range(0, len(part), _PART_ROWS):
                    file.write(_to_rows(part, slice(at, at + _PART_ROWS)).view(np.uint8).data)
            file.flush()
            stack.pop_all()
        return cls(file, np.concatenate([np.zeros(0, np.uint64), *guides]), count)

    def lookup(self, wanted: U64) -> Places:
        """Find the places of chunks in this run alone.

        Raises:
            BackendError: The temporary file cannot be read.
        """
        if not self._count or not len(wanted):
            return Places.unknown(len(wanted))
        # The part before the first that begins with the same word or a greater one, and the next.
        part = np.maximum(np.searchsorted(self._guide, wanted[:, 0]) - 1, 0)
        parts = np.unique(np.concatenate((part, np.minimum(part + 1, len(self._guide) - 1))))
        cuts = np.flatnonzero(np.diff(parts) != 1)
        begins = parts[np.concatenate(([0], cuts + 1))] * _GUIDE_ROWS
        ends = (parts[np.concatenate((cuts, [len(parts) - 1]))] + 1) * _GUIDE_ROWS
        return _to_run(self._read(begins.tolist(), ends.tolist())).lookup(wanted)

    def between(self, low: int, high: int) -> Run:
        """The rows whose first word is at least `low` and below `high` (which may be 2^64)."""
        end = len(self._guide)
        if high < 1 << 64:
            end = int(np.searchsorted(self._guide, np.uint64(high)))
        begin = min(max(int(np.searchsorted(self._guide, np.uint64(low))) - 1, 0), end)
        rows = self._read([begin * _GUIDE_ROWS], [end * _GUIDE_ROWS])
        first = rows["words"][:, 0]
        keep = first >= np.uint64(low)
        if high < 1 << 64:
            keep &= first < np.uint64(high)
        return _to_run(rows[keep])

    def close(self) -> None:
        """Give the file back. Idempotent."""
        self._file.close()

    def _read(self, begins: list[int], ends: list[int]) -> Rows:
        """Read some ranges of rows, one after the other; the last may end beyond the end."""
        ends[-1] = min(ends[-1], self._count)
        rows = np.empty(sum(ends) - sum(begins), _SPILLED_DTYPE)
        view, row_bytes = rows.view(np.uint8).data, _SPILLED_DTYPE.itemsize
        for begin, end in zip(begins, ends, strict=True):
            size = (end - begin) * row_bytes
            self._fill(view[:size], begin * row_bytes)
            view = view[size:]
        return rows

    def _fill(self, view: memoryview, offset: int) -> None:
        while view.nbytes:
            try:
                done = os.preadv(self._file.fileno(), [view], offset)
            except OSError as error:
                raise BackendError(f"read a temporary file: {error.strerror}") from error
            if not done:
                raise BackendError(f"a temporary file has no byte {offset} any more")
            view, offset = view[done:], offset + done


def merge_spilled(runs: list[SpilledRun]) -> SpilledRun:
    """Merge spilled runs into one, a part at a time; of equal ids that of the earlier run stays.

    Raises:
        OSError: There is no room; the runs are as they were.
    """
    total = sum(map(len, runs))
    count = -(-total // _PART_ROWS) or 1
    bounds = [(part << 64) // count for part in range(count + 1)]

    def parts() -> Iterator[Run]:
        for low, high in itertools.pairwise(bounds):
            yield merge_runs([run.between(low, high) for run in runs])

    return SpilledRun.write(parts())


def _to_rows(run: Run, some: slice) -> Rows:
    rows = np.empty(len(run.frames[some]), _SPILLED_DTYPE)
    rows["words"], rows["frame"] = run.words[some], run.frames[some]
    rows["offset"], rows["length"] = run.offsets[some], run.lengths[some]
    return rows


def _to_run(rows: Rows) -> Run:
    words: U64 = np.ascontiguousarray(rows["words"])
    frames: Numbers = rows["frame"].astype(np.int64)
    return Run.of(words, frames, rows["offset"].astype(np.uint32), rows["length"].astype(np.uint32))
