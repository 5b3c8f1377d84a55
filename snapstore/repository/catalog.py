"""Which chunks the store already has, and where: the merged view of its indexes.

Three places, all below one byte budget, asked one after the other:

*Runs in memory*, sorted arrays of 56 bytes per chunk: the newest indexes, and what this push adds.
*Spilled runs*, sorted in anonymous temporary files: what did not fit, in small indexes.
*Indexes where they lie*, read a bucket at a time: what did not fit, in large ones.

So a chunk that any index lists is found, however small the budget. Only where a temporary file
cannot be written are runs dropped; then some chunks are stored again, which costs space and never
correctness. Not thread-safe: only the thread that plans touches it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from snapstore.backend.base import Backend, ObjectInfo, ObjectKind
from snapstore.errors import FormatError, IntegrityError, ObjectNotFound, RangeNotSatisfiable
from snapstore.format import limits
from snapstore.format.index import IndexTables, parse_index
from snapstore.format.tables import U64, Mask, Rows, id_words
from snapstore.ids import Digest
from snapstore.repository.chunk_runs import (
    MISSING,
    Places,
    Run,
    SpilledRun,
    merge_runs,
    merge_spilled,
)
from snapstore.repository.index_lookup import INDEX_READERS, IndexLookup, open_blocks
from snapstore.repository.objects import read_object
from snapstore.units import MIB

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from concurrent.futures import Future

    from snapstore.repository.frames import FrameTable, Numbers
    from snapstore.repository.index_cache import IndexCache

__all__ = ["MISSING", "Catalog", "Loaded", "Places"]

_ROW_BYTES = 56
_ROWS_MIN = 4096
_MERGE_RATIO = 4
_SPILLED_RUNS_MAX = 8
_SPILLED_RUNS_MERGED = 4

_TINY_BYTES = 1 * MIB
"""What a push writes after some packs is mostly smaller."""

_LISTED_ROW_BYTES = 48
"""About what a chunk takes in an index, its share of a frame's row included."""

_NOT_USABLE = (FormatError, IntegrityError, RangeNotSatisfiable)


@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    """What was passed over when the store's indexes were read; both grow while they are used.

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
    """Chunk id to place. A context manager; `close` gives back files and threads."""

    def __init__(
        self, frames: FrameTable, *, budget_bytes: int, cache: IndexCache | None = None
    ) -> None:
        """Begin without chunks.

        Args:
            frames: Numbers the frames that chunks are in.
            budget_bytes: What may be held in memory.
            cache: What this machine keeps of large indexes.
        """
        self._frames = frames
        self._cache = cache
        self._rows_max = max(budget_bytes // _ROW_BYTES, _ROWS_MIN)
        self._runs: list[Run] = []
        # The newest first, both.
        self._spilled: list[SpilledRun] = []
        self._indexes: list[IndexLookup] = []
        self._damaged: dict[str, str] = {}
        self._executor: ThreadPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def load(self, backend: Backend, *, without: Collection[str] = ()) -> Loaded:
        """Take the store's indexes in, newest first: into memory until the budget is full.

        Where a chunk has several places the newest index in memory wins: its frames are more likely
        to hold what today's snapshots need next to each other. What cannot be relied on is passed
        over: damaged indexes, and packs that are gone or have another length than they should.
        Chunks that only these have count as unknown.

        Args:
            backend: The store.
            without: Packs that must not be relied on.
        """
        infos = sorted(
            backend.list(ObjectKind.INDEX), key=lambda info: (-info.modified_ns, info.name)
        )
        present = _PresentPacks(backend, without)
        superseded: set[str] = set()
        small: list[Run] = []
        for info, data in self._read_ahead(backend, infos, superseded):
            if info.name in superseded:
                continue
            try:
                superseded.update(self._take_in(backend, info, data, present, small))
            except ObjectNotFound:
                continue  # A listing may be stale: the index was merged into another since.
            except _NOT_USABLE as error:
                self._damaged[info.name] = str(error)
        self._spill_older(small)
        self._merge_all()
        for name in superseded:
            self._damaged.pop(name, None)
        return Loaded(self._damaged, present.lost)

    def add(
        self,
        words: U64,
        frames: Numbers,
        offsets: npt.NDArray[np.uint32],
        lengths: npt.NDArray[np.uint32],
    ) -> None:
        """Learn of chunks; those known already get the new place as well, which then wins."""
        order = np.argsort(words[:, 0], kind="stable")
        self._runs.append(Run.of(words[order], frames[order], offsets[order], lengths[order]))
        while len(self._runs) > 1 and len(self._runs[-1]) * _MERGE_RATIO > len(self._runs[-2]):
            newer, older = self._runs.pop(), self._runs.pop()
            self._runs.append(merge_runs([newer, older]))
        self._respect_budget()

    def lookup(self, words: U64) -> Places:
        """Find the places of chunks.

        An index that turns out to be damaged is passed over from then on.

        Raises:
            BackendError: The storage failed.
        """
        places = Places.unknown(len(words))
        open_rows: Numbers = np.arange(len(words))
        runs: list[Run | SpilledRun] = [*reversed(self._runs), *self._spilled]
        for run in runs:
            if len(open_rows) and len(run):
                open_rows = places.take(open_rows, run.lookup(words[open_rows]))
        for index in tuple(self._indexes):
            if not len(open_rows):
                break
            try:
                open_rows = places.take(open_rows, index.lookup(words[open_rows]))
            except ObjectNotFound:
                self._indexes.remove(index)  # Merged into another since.
            except _NOT_USABLE as error:
                self._indexes.remove(index)
                self._damaged[index.name] = str(error)
        return places

    def close(self) -> None:
        """Give back temporary files and threads. Idempotent."""
        for run in self._spilled:
            run.close()
        self._spilled.clear()
        self._indexes.clear()
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None

    def _read_ahead(
        self, backend: Backend, infos: list[ObjectInfo], superseded: Collection[str]
    ) -> Iterator[tuple[ObjectInfo, Future[bytearray] | None]]:
        """Give the indexes in order; some of those that are tiny are being read already.

        There may be thousands of them, and a request to a remote store takes its time.
        """
        pending: collections.deque[tuple[ObjectInfo, Future[bytearray] | None]]
        pending = collections.deque()
        for info in infos:
            if info.name in superseded:
                continue
            reading = None
            if len(infos) > 1 and info.size_bytes <= _TINY_BYTES:
                reading = self._threads().submit(_read_index, backend, info.name)
            pending.append((info, reading))
            if len(pending) > INDEX_READERS:
                yield pending.popleft()
        yield from pending

    def _take_in(
        self,
        backend: Backend,
        info: ObjectInfo,
        data: Future[bytearray] | None,
        present: _PresentPacks,
        small: list[Run],
    ) -> tuple[str, ...]:
        """Take in one index, and name those that it contains."""
        rows = info.size_bytes // _LISTED_ROW_BYTES
        # A quarter is left for what is added later.
        fits = sum(map(len, self._runs)) + rows <= self._rows_max - self._rows_max // 4
        if not fits and rows > self._rows_max // 4:
            index = self._open(backend, info, present)
            self._indexes.append(index)
            return index.supersedes()
        found = _read_index(backend, info.name) if data is None else data.result()
        tables = parse_index(found, root=Digest.parse(info.name))
        run = self._to_run(present.only(tables))
        if fits:
            self._runs.insert(0, run)
        else:
            small.append(run)
            if sum(map(len, small)) > self._rows_max // 4:
                self._spill_older(small)
        return tuple(digest.hex for digest in tables.supersedes)

    def _open(self, backend: Backend, info: ObjectInfo, present: _PresentPacks) -> IndexLookup:
        blocks = open_blocks(backend, info, self._threads(), self._cache)
        index = IndexLookup(
            info.name,
            blocks,
            self._frames,
            present.usable,
            fanout_bytes_max=self._rows_max * _ROW_BYTES // 8,
        )
        self._rows_max = max(self._rows_max - index.held_bytes // _ROW_BYTES, _ROWS_MIN)
        return index

    def _threads(self) -> ThreadPoolExecutor:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(INDEX_READERS, thread_name_prefix="snapstore-index")
        return self._executor

    def _to_run(self, tables: IndexTables) -> Run:
        packs = self._frames.add_packs(tables.packs)
        first = self._frames.add_frames(tables.frames, packs)
        chunks = tables.chunks
        return Run.of(
            id_words(chunks["id"]),
            chunks["frame"].astype(np.int64) + first,
            chunks["offset"].astype(np.uint32),
            chunks["length"].astype(np.uint32),
        )

    def _merge_all(self) -> None:
        if len(self._runs) > 1:
            self._runs = [merge_runs(self._runs[::-1])]

    def _respect_budget(self) -> None:
        while sum(map(len, self._runs)) > self._rows_max and len(self._runs) > 1:
            largest = max(self._runs, key=len)
            self._runs.remove(largest)
            with contextlib.suppress(OSError):
                self._spilled.insert(0, SpilledRun.write([largest]))
            self._merge_spilled()

    def _spill_older(self, runs: list[Run]) -> None:
        """Move runs, the newest first, behind all that is spilled."""
        if runs:
            with contextlib.suppress(OSError):
                self._spilled.append(SpilledRun.write([merge_runs(runs)]))
            runs.clear()
            self._merge_spilled()

    def _merge_spilled(self) -> None:
        """Keep spilled runs few: merge the neighbours that are the least work."""
        if len(self._spilled) > _SPILLED_RUNS_MAX:
            sizes = [len(run) for run in self._spilled]
            starts = range(len(sizes) - _SPILLED_RUNS_MERGED + 1)
            begin = min(starts, key=lambda at: sum(sizes[at : at + _SPILLED_RUNS_MERGED]))
            some = slice(begin, begin + _SPILLED_RUNS_MERGED)
            with contextlib.suppress(OSError):
                merged = merge_spilled(self._spilled[some])
                for run in self._spilled[some]:
                    run.close()
                self._spilled[some] = [merged]


def _read_index(backend: Backend, name: str) -> bytearray:
    return read_object(backend, ObjectKind.INDEX, name, limit_bytes=limits.INDEX_BYTES_MAX)


class _PresentPacks:
    """Tells which packs of an index are there, so that nothing is believed to be stored in vain."""

    def __init__(self, backend: Backend, without: Collection[str]) -> None:
        self._backend = backend
        self._without = without
        self._sizes = {info.name: info.size_bytes for info in backend.list(ObjectKind.PACK)}
        self.lost: set[str] = set()

    def usable(self, packs: Rows) -> Mask:
        """Which of these packs can be relied on, one flag a row."""
        return np.array(
            [self._is_usable(bytes(raw).hex(), length) for raw, length in packs.tolist()],
            np.bool_,
        )

    def only(self, tables: IndexTables) -> IndexTables:
        """Leave out of an index what lies in packs that cannot be relied on."""
        usable = self.usable(tables.packs)
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
