"""Which chunks the store already has, and where: the merged view of its indexes.

Kept as a few sorted runs of plain arrays, at 56 bytes per chunk, below a byte budget. Beyond the
budget the largest run is dropped: then some chunks are stored again, which costs space and never
correctness. Not thread-safe: only the thread that plans touches it.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from snapstore.backend.base import Backend, ObjectKind
from snapstore.errors import ObjectNotFound
from snapstore.format import limits
from snapstore.format.index import IndexTables, parse_index
from snapstore.format.tables import U64, id_words
from snapstore.ids import Digest
from snapstore.repository.objects import read_object

if TYPE_CHECKING:
    from snapstore.repository.frames import FrameTable, Numbers

__all__ = ["MISSING", "Catalog", "Places"]

MISSING = -1
_ROW_BYTES = 56
_MERGE_RATIO = 4


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


@dataclasses.dataclass(frozen=True, slots=True)
class _Run:
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


class Catalog:
    """Chunk id to place, for as many chunks as the budget allows."""

    def __init__(self, frames: FrameTable, *, budget_bytes: int) -> None:
        self._frames = frames
        self._rows_max = max(budget_bytes // _ROW_BYTES, 4096)
        self._runs: list[_Run] = []

    def load(self, backend: Backend) -> None:
        """Read the store's indexes, newest first, until the budget is full.

        Where a chunk has several places the newest index wins: its frames are more likely to hold
        what today's snapshots need next to each other.
        """
        infos = sorted(
            backend.list(ObjectKind.INDEX), key=lambda info: (-info.modified_ns, info.name)
        )
        superseded: set[str] = set()
        loaded = 0
        for info in infos:
            if info.name in superseded or loaded + info.size_bytes // 48 > self._rows_max:
                continue
            try:
                data = read_object(
                    backend, ObjectKind.INDEX, info.name, limit_bytes=limits.INDEX_BYTES_MAX
                )
            except ObjectNotFound:
                continue  # A listing may be stale: the index was merged into another since.
            tables = parse_index(data, root=Digest.parse(info.name))
            superseded.update(digest.hex for digest in tables.supersedes)
            self._add_tables(tables)
            loaded += len(tables.chunks)
        self._merge_all()

    def add(
        self,
        words: U64,
        frames: Numbers,
        offsets: npt.NDArray[np.uint32],
        lengths: npt.NDArray[np.uint32],
    ) -> None:
        """Learn of chunks; those known already get the new place as well, which then wins."""
        order = np.argsort(words[:, 0], kind="stable")
        words = words[order]
        self._runs.append(_Run(_first(words), words, frames[order], offsets[order], lengths[order]))
        while len(self._runs) > 1 and len(self._runs[-1]) * _MERGE_RATIO > len(self._runs[-2]):
            newer, older = self._runs.pop(), self._runs.pop()
            self._runs.append(_merge([newer, older]))
        self._respect_budget()

    def lookup(self, words: U64) -> Places:
        """Find the places of chunks, the newest of each."""
        count = len(words)
        places = Places(
            np.full(count, MISSING, np.int64), np.zeros(count, np.int64), np.zeros(count, np.int64)
        )
        open_rows = np.arange(count)
        for run in reversed(self._runs):
            if not len(open_rows) or not len(run):
                continue
            wanted = words[open_rows]
            at = np.searchsorted(run.first, wanted[:, 0])
            at[at == len(run)] = 0
            hit = (run.words[at] == wanted).all(axis=1)
            rows, found = open_rows[hit], at[hit]
            places.frames[rows] = run.frames[found]
            places.offsets[rows] = run.offsets[found]
            places.lengths[rows] = run.lengths[found]
            open_rows = open_rows[~hit]
        return places

    def _add_tables(self, tables: IndexTables) -> None:
        packs = self._frames.add_packs(tables.packs)
        first = self._frames.add_frames(tables.frames, packs)
        chunks = tables.chunks
        words = id_words(chunks["id"])
        self._runs.insert(
            0,
            _Run(
                _first(words),
                words,
                chunks["frame"].astype(np.int64) + first,
                chunks["offset"].astype(np.uint32),
                chunks["length"].astype(np.uint32),
            ),
        )

    def _merge_all(self) -> None:
        if len(self._runs) > 1:
            self._runs = [_merge(self._runs[::-1])]

    def _respect_budget(self) -> None:
        while sum(map(len, self._runs)) > self._rows_max and len(self._runs) > 1:
            self._runs.remove(max(self._runs, key=len))


def _merge(runs: list[_Run]) -> _Run:
    """Merge runs into one; of equal ids the one in the earlier run stays."""
    words = np.concatenate([run.words for run in runs])
    order = np.argsort(words[:, 0], kind="stable")
    words = words[order]
    # Equal ids follow one another unless two ids share their first eight bytes; then one more row
    # survives, which is only ever found or not found, never wrong.
    keep = np.ones(len(words), np.bool_)
    keep[1:] = (words[1:] != words[:-1]).any(axis=1)
    order = order[keep]
    words = words[keep]
    return _Run(
        _first(words),
        words,
        np.concatenate([run.frames for run in runs])[order],
        np.concatenate([run.offsets for run in runs])[order],
        np.concatenate([run.lengths for run in runs])[order],
    )


def _first(words: U64) -> U64:
    first: U64 = np.ascontiguousarray(words[:, 0])
    return first
