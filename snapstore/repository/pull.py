"""Pulling a snapshot: the use case that puts the parts of the reading side in order.

Plan, fetch, check, decode, write, finish, rename (I6 and I8 of `format_spec/SEMANTICS.md`).
"""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

from snapstore.options import Integrity, StoreOptions
from snapstore.repository.fetch import fetch_plan
from snapstore.repository.file_sink import FileSink, StreamFiles
from snapstore.repository.found_files import FoundFiles
from snapstore.repository.memory import MemoryPlan
from snapstore.repository.objects import about
from snapstore.repository.read_plan import Destination, ReadPlan, ReadUnit, plan_reads
from snapstore.repository.verifier import ChunkVerifier
from snapstore.target.atomic import AtomicDirectory
from snapstore.target.place import TreeTarget

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from snapstore.format.rank import RankNumber
    from snapstore.ids import SnapshotId
    from snapstore.progress import ProgressMeter
    from snapstore.repository.snapshot import LoadedRank, Snapshot
    from snapstore.target.journal import Journal

__all__ = ["PullRequest", "PullResult", "pull_snapshot"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PullRequest:
    """What to pull and how; see `Store.pull`."""

    directory: Path
    ranks: tuple[RankNumber, ...] = ()
    resume: bool = False
    in_place: bool = False
    sync: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PullResult:
    """What a pull did.

    Attributes:
        snapshot: What was pulled.
        files: Files in the tree.
        logical_bytes: Their sizes.
        data_bytes: Bytes that were written; the rest are holes.
        read_bytes: Bytes that were read from packs: the store's, or what the node's cache has of
            them.
        resumed_bytes: Bytes that an earlier pull had written already.
        warnings: What could not be restored, such as owners without the privilege.
    """

    snapshot: SnapshotId
    files: int
    logical_bytes: int
    data_bytes: int
    read_bytes: int
    resumed_bytes: int
    warnings: tuple[str, ...]


def pull_snapshot(
    snapshot: Snapshot, options: StoreOptions, request: PullRequest, meter: ProgressMeter
) -> PullResult:
    """Recreate the tree of a snapshot, or of some of its ranks.

    Raises:
        IntegrityError: Bytes are damaged or gone; nothing has the final name.
        TargetError: The directory cannot be used.
    """
    meter.enter("plan")
    ranks = snapshot.ranks(request.ranks)
    for rank in ranks:
        assert rank.meta.rank == rank.number, rank.number  # and refused by then if it is not
    memory = MemoryPlan.of(options)
    wanted = snapshot.backend.capabilities.readers_in_parallel
    plan = plan_reads([rank.layout for rank in ranks], read_bytes_max=memory.read_bytes)
    verifiers = _verifiers(ranks) if options.integrity is Integrity.STRONG else []
    trees = [rank.tree for rank in ranks]
    files = StreamFiles(trees)
    with AtomicDirectory(
        request.directory,
        identity=_identity(snapshot, request),
        resume=request.resume,
        in_place=request.in_place,
    ) as place:
        entries = [entry for tree in trees for entry in tree]
        with about(f"snapshot {snapshot.id.short}", next_step="pull another snapshot"):
            target = TreeTarget(
                place.path,
                entries,
                fsync=request.sync,
                resume=place.is_resumed,
                journal=place.journal if request.in_place else None,
            )
        with target:
            target.make_directories()
            resume = _Resume(target, place.journal, plan, files, active=place.is_resumed)
            sink = FileSink(target, files, resume.missing_places())
            found = FoundFiles(snapshot, ranks, verifiers, plan, files)
            try:
                _make_empty_files(target, files, plan)
                meter.enter("fetch", plan.data_bytes)
                meter.add(resume.done_bytes)
                fetch_plan(
                    snapshot.backend,
                    plan,
                    sink.place,
                    threads=min(max(memory.readers, wanted), memory.readers_max),
                    read_bytes_max=memory.read_bytes,
                    verifiers=verifiers,
                    skip=resume.is_done,
                    done=_unit_done(plan, files, place.journal, meter),
                    elsewhere=lambda unit: found.take(unit, sink.place),
                )
            finally:
                found.close()
                sink.close()
            meter.enter("finish")
            report = target.finish()
        place.commit()
    return PullResult(
        snapshot=snapshot.id,
        files=len(target.files),
        logical_bytes=sum(entry.size_bytes for entry in target.files),
        data_bytes=plan.data_bytes,
        read_bytes=plan.stored_bytes - resume.done_stored_bytes - found.taken_bytes,
        resumed_bytes=resume.done_bytes,
        warnings=tuple(report.warnings()),
    )


class _Resume:
    """What an earlier pull of the same thing has written already."""

    def __init__(
        self,
        target: TreeTarget,
        journal: Journal,
        plan: ReadPlan,
        files: StreamFiles,
        *,
        active: bool,
    ) -> None:
        self._plan = plan
        self._done: set[ReadUnit] = set()
        self.done_bytes = 0
        self.done_stored_bytes = 0
        if not active:
            return
        survives = {entry.path for entry in target.files if target.survives(entry)}
        for unit in plan.units:
            pieces = [piece for place in _places(plan, unit) for piece in files.pieces(place)]
            if all(
                piece.entry.path in survives
                and journal.is_done(piece.entry.path, piece.file_offset, piece.length)
                for piece in pieces
            ):
                self._done.add(unit)
                self.done_bytes += sum(piece.length for piece in pieces)
                self.done_stored_bytes += unit.length

    def is_done(self, unit: ReadUnit) -> bool:
        return unit in self._done

    def missing_places(self) -> Iterator[Destination]:
        """All that is still to be written."""
        for unit in self._plan.units:
            if unit not in self._done:
                yield from _places(self._plan, unit)


def _identity(snapshot: Snapshot, request: PullRequest) -> str:
    ranks = ",".join(sorted(map(str, request.ranks))) or "all"
    return f"{snapshot.id.hex} {ranks}"


def _verifiers(ranks: list[LoadedRank]) -> list[ChunkVerifier]:
    verifiers = []
    for rank in ranks:
        verifier = ChunkVerifier(rank.id, rank.streams, rank.read_extents())
        verifier.check_zeros(rank.layout)
        verifiers.append(verifier)
    return verifiers


def _places(plan: ReadPlan, unit: ReadUnit) -> Iterator[Destination]:
    for frame in range(unit.first, unit.last):
        yield from plan.destinations(frame)


def _make_empty_files(target: TreeTarget, files: StreamFiles, plan: ReadPlan) -> None:
    """Make the files that no byte will be written to: the empty ones and the all-zero ones."""
    written = {
        piece.entry.path
        for unit in plan.units
        for place in _places(plan, unit)
        for piece in files.pieces(place)
    }
    for entry in target.files:
        if entry.path not in written:
            fd = target.open_file(entry)
            try:
                target.finish_file(entry, fd)
            finally:
                os.close(fd)


def _unit_done(
    plan: ReadPlan, files: StreamFiles, journal: Journal, meter: ProgressMeter
) -> Callable[[ReadUnit], None]:
    def done(unit: ReadUnit) -> None:
        count_bytes = 0
        ranges: dict[bytes, list[tuple[int, int]]] = {}
        for place in _places(plan, unit):
            count_bytes += place.length
            for piece in files.pieces(place):
                end = piece.file_offset + piece.length
                ranges.setdefault(piece.entry.path, []).append((piece.file_offset, end))
        journal.mark_all_done(ranges)
        meter.add(count_bytes)

    return done
