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
from snapstore.errors import FormatError, IntegrityError, ObjectNotFound, RangeNotSatisfiable
from snapstore.format import limits
from snapstore.format.index import IndexTables, parse_index
from snapstore.format.tables import U64, id_words
from snapstore.ids import Digest
from snapstore.repository.objects import read_object

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from snapstore.repository.frames import FrameTable, Numbers

__all__ = ["MISSING", "Catalog", "Loaded", "Places"]

MISSING = -1
_ROW_BYTES = 56
_MERGE_RATIO = 4
_TIED_IDS_MAX = 8


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


@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    """What was passed over when the store's indexes were read.

    Attributes:
        damaged: Indexes by name, and what is wrong with each.
        lost: Packs that indexes list, and that are gone or have another length.
    """

    damaged: Mapping[str, str]
    lost: Collection[str]

    @property
    def warnings(self) -> list[str]:
        """It in sentences."""
        found = [
            f"index {name[:12]} is damaged ({reason}): what only it lists counts as unknown"
            for name, reason in sorted(self.damaged.items())
        ]
        if self.lost:
            found.append(
                f"{len(self.lost)} packs that indexes list are gone or cut short, the first is "
                f"{min(self.lost)[:12]}: what only they hold counts as unknown"
            )
        return found


class Catalog:
    """Chunk id to place, for as many chunks as the budget allows."""

    def __init__(self, frames: FrameTable, *, budget_bytes: int) -> None:
        self._frames = frames
        self._rows_max = max(budget_bytes // _ROW_BYTES, 4096)
        self._runs: list[_Run] = []

    def load(self, backend: Backend, *, without: Collection[str] = ()) -> Loaded:
        """Read the store's indexes, newest first, until the budget is full.

        Where a chunk has several places the newest index wins: its frames are more likely to hold
        what today's snapshots need next to each other. What cannot be relied on is passed over:
        damaged indexes, and packs that are gone or have another length than they should. Chunks
        that only these have count as unknown.

        Args:
            backend: The store.
            without: Packs that must not be relied on.
        """
        infos = sorted(
            backend.list(ObjectKind.INDEX), key=lambda info: (-info.modified_ns, info.name)
        )
        present = _PresentPacks(backend, without)
        damaged: dict[str, str] = {}
        superseded: set[str] = set()
        loaded = 0
        for info in infos:
            if info.name in superseded or loaded + info.size_bytes // 48 > self._rows_max:
                continue
            try:
                data = read_object(
                    backend, ObjectKind.INDEX, info.name, limit_bytes=limits.INDEX_BYTES_MAX
                )
                tables = parse_index(data, root=Digest.parse(info.name))
            except ObjectNotFound:
                continue  # A listing may be stale: the index was merged into another since.
            except (FormatError, IntegrityError, RangeNotSatisfiable) as error:
                damaged[info.name] = str(error)
                continue
            superseded.update(digest.hex for digest in tables.supersedes)
            tables = present.only(tables)
            self._add_tables(tables)
            loaded += len(tables.chunks)
        self._merge_all()
        for name in superseded:
            damaged.pop(name, None)
        return Loaded(damaged, present.lost)

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
            found = _find(run, words[open_rows])
            hit = found != MISSING
            rows, found = open_rows[hit], found[hit]
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


class _PresentPacks:
    """Tells which packs of an index are there, so that nothing is believed to be stored in vain."""

    def __init__(self, backend: Backend, without: Collection[str]) -> None:
        self._backend = backend
        self._without = without
        self._sizes = {info.name: info.size_bytes for info in backend.list(ObjectKind.PACK)}
        self.lost: set[str] = set()

    def only(self, tables: IndexTables) -> IndexTables:
        """Leave out of an index what lies in packs that cannot be relied on."""
        usable = np.array(
            [self._is_usable(bytes(raw).hex(), length) for raw, length in tables.packs.tolist()],
            np.bool_,
        )
        if usable.all():
            return tables
        in_frames = usable[tables.frames["pack"]]
        frames = tables.frames[in_frames]
        frames["pack"] = (np.cumsum(usable) - 1)[frames["pack"]]
        chunks = tables.chunks[in_frames[tables.chunks["frame"]]]
        chunks["frame"] = (np.cumsum(in_frames) - 1)[chunks["frame"]]
        packs = tables.packs[usable]
        return dataclasses.replace(tables, packs=packs, frames=frames, chunks=chunks)

    def _is_usable(self, name: str, length: int) -> bool:
        if name in self._without:
            return False
        if name not in self._sizes:
            # A listing may be stale: reads by name are not.
            try:
                self._sizes[name] = self._backend.stat(ObjectKind.PACK, name).size_bytes
            except ObjectNotFound:
                self._sizes[name] = -1
        if self._sizes[name] != length:
            self.lost.add(name)
            return False
        return True


def _find(run: _Run, wanted: U64) -> npt.NDArray[np.int64]:
    """Find the row of each id in a run, or `MISSING`."""
    at = np.searchsorted(run.first, wanted[:, 0])
    at[at == len(run)] = 0
    found = np.where((run.words[at] == wanted).all(axis=1), at, MISSING)
    # Ids that share their first eight bytes with another are not in chunks that anybody has by
    # chance. A few are looked for, so that such a pair is no way to make a chunk unreadable.
    open_rows = np.flatnonzero((found == MISSING) & (run.first[at] == wanted[:, 0]))
    for step in range(1, _TIED_IDS_MAX):
        next_at = np.minimum(at[open_rows] + step, len(run) - 1)
        tied = run.first[next_at] == wanted[open_rows, 0]
        open_rows, next_at = open_rows[tied], next_at[tied]
        hit = (run.words[next_at] == wanted[open_rows]).all(axis=1)
        found[open_rows[hit]] = next_at[hit]
        open_rows = open_rows[~hit]
    return found


def _merge(runs: list[_Run]) -> _Run:
    """Merge runs into one; of equal ids the one in the earlier run stays."""
    words = np.concatenate([run.words for run in runs])
    order = np.argsort(words[:, 0], kind="stable")
    words = words[order]
    # Equal ids follow one another unless two ids share their first eight bytes; then one more row
    # survives, behind the newer one, which is found first.
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
