"""Taking names away, and what that lets a later prune free.

A name is not erased: a *deleted* generation ends it, and `tag rollback` brings it back while its
data are there. That needs no lease: it adds nothing to what anybody may rely on. Bytes come back
only when packs are removed: at once those that nothing else needs, others when they are rewritten.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from snapstore.backend.base import Backend, ObjectKind
from snapstore.errors import FormatError, ObjectNotFound, RefConflict, SnapError
from snapstore.repository.chains import head_number
from snapstore.repository.frames import FrameTable
from snapstore.repository.refs import chain_of, move_ref, resolve_ref
from snapstore.repository.roots import Roots, find_roots
from snapstore.repository.spool import KeySpool, begins_of
from snapstore.repository.usage import RankUsers, add_frames

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from snapstore.clock import Clock
    from snapstore.ids import RankId, RefName, SnapshotId

__all__ = [
    "Freed",
    "RemoveResult",
    "RemovedName",
    "freed_without",
    "metadata_bytes",
    "remove_names",
]

_GOING, _STAYING = 0, 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Freed:
    """What nothing in the store would need any more.

    Attributes:
        stored_bytes: Stored bytes of the frames that nothing else needs.
        packs: Packs that hold no frame of anything else; they can be removed whole.
        pack_bytes: Bytes of these packs.
        metadata_bytes: Manifests and layouts that nothing else needs.
        pushes: Pushes under way, which may come to need some of it.
        damaged: What could not be read, so that it may need some of it.
    """

    stored_bytes: int
    packs: int
    pack_bytes: int
    metadata_bytes: int
    pushes: int
    damaged: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class RemovedName:
    """A name that was deleted, or would be.

    Attributes:
        name: The name.
        snapshot: What it pointed to; None if its newest generation is damaged.
        generation: Number of the generation that deletes it.
        others: Names that still point to the same snapshot.
    """

    name: RefName
    snapshot: SnapshotId | None
    generation: int
    others: tuple[RefName, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RemoveResult:
    """What a removal of names did, or would do."""

    removed: tuple[RemovedName, ...]
    dry_run: bool
    freed: Freed


def remove_names(
    backend: Backend,
    clock: Clock,
    names: Sequence[RefName],
    *,
    dry_run: bool,
    memory_bytes: int,
) -> RemoveResult:
    """Delete names, all or, if one is missing, none; see `freed_without` for what it costs.

    Raises:
        RefNotFound: A name points to nothing.
        RefConflict: Somebody moved a name meanwhile; it was left as it is.
        AccessDenied: The store cannot be written.
    """
    wanted = list(dict.fromkeys(names))
    found = {name: _newest(backend, name) for name in wanted}
    roots = find_roots(backend, clock)
    dropped = {snapshot for snapshot, _ in found.values() if snapshot is not None}
    kept = roots.snapshots(without=found)
    freed = freed_without(backend, roots, dropped, kept, memory_bytes=memory_bytes)
    removed: list[RemovedName] = []
    for name, (snapshot, number) in found.items():
        others = roots.names_of(snapshot) if snapshot is not None else ()
        others = tuple(other for other in others if other not in found)
        if not dry_run:
            _delete(backend, clock, name, number, removed)
        removed.append(RemovedName(name, snapshot, number + 1, others))
    return RemoveResult(removed=tuple(removed), dry_run=dry_run, freed=freed)


def freed_without(
    backend: Backend,
    roots: Roots,
    dropped: Iterable[SnapshotId],
    kept: frozenset[SnapshotId],
    *,
    memory_bytes: int,
) -> Freed:
    """Add up what only some snapshots need, if `kept` are all that stay.

    Reads the root manifests of all, and the layouts of all if there is a rank that only the
    dropped ones have: about 50 MB for a terabyte of snapshots. Memory stays within the budget, but
    for one layout.
    """
    ranks = RankUsers(backend)
    ranks.damaged.extend(roots.damaged)
    titles = roots.titles()
    going = sorted(set(dropped) - kept)
    for group, snapshots in ((_STAYING, sorted(kept)), (_GOING, going)):
        for snapshot in snapshots:
            ranks.add(snapshot, [group], named=titles.get(snapshot, "what is to be removed"))
    gone = [rank for rank, users in ranks.users.items() if users == {_GOING}]
    stored_bytes, lengths = _only_going(ranks, gone, memory_bytes=memory_bytes)
    return Freed(
        stored_bytes=stored_bytes,
        packs=len(lengths),
        pack_bytes=sum(lengths),
        metadata_bytes=metadata_bytes(backend, going, gone),
        pushes=roots.pushes,
        damaged=tuple(ranks.damaged),
    )


def metadata_bytes(
    backend: Backend, snapshots: Iterable[SnapshotId], ranks: Iterable[RankId]
) -> int:
    """Stored bytes of root manifests, of rank manifests and of all their layouts."""
    wanted = [(ObjectKind.SNAPSHOT, one.hex) for one in snapshots]
    listed = 0
    for rank in ranks:
        wanted.append((ObjectKind.RANK, rank.hex))
        listed += sum(info.size_bytes for info in backend.list(ObjectKind.LAYOUT, f"{rank.hex}/"))
    return listed + sum(_size(backend, kind, name) for kind, name in wanted)


def _size(backend: Backend, kind: ObjectKind, name: str) -> int:
    try:
        return backend.stat(kind, name).size_bytes
    except ObjectNotFound:
        return 0


def _only_going(
    ranks: RankUsers, gone: list[RankId], *, memory_bytes: int
) -> tuple[int, list[int]]:
    """Stored bytes of frames that only these ranks use, and the lengths of packs likewise."""
    if not gone:
        return 0, []
    packs = FrameTable()
    used: tuple[set[int], set[int]] = set(), set()
    stored_bytes = 0
    with KeySpool(memory_bytes=memory_bytes) as spool:
        for rank, users in ranks.users.items():
            group = _GOING if users == {_GOING} else _STAYING
            with ranks.passing_over():
                layout = ranks.load(rank).layout
                used[group].update(add_frames(spool, layout, packs, group).tolist())
        for rows in spool.buckets():
            begins = np.flatnonzero(begins_of(rows))
            if len(begins):
                only = np.maximum.reduceat(rows["group"], begins) == _GOING
                stored_bytes += int(rows["size"][begins[only]].sum(dtype=np.int64))
    whole = np.array(sorted(used[_GOING] - used[_STAYING]), np.int64)
    return stored_bytes, packs.pack_rows(whole)["length"].tolist()


def _newest(backend: Backend, name: RefName) -> tuple[SnapshotId | None, int]:
    """What a name points to, and the number of that generation."""
    try:
        found = resolve_ref(backend, name)
    except FormatError:
        # A damaged name is in the way of listings: it can be removed like any other.
        return None, head_number(backend, ObjectKind.REF, chain_of(name))
    return found.snapshot, found.generation


def _delete(
    backend: Backend, clock: Clock, name: RefName, number: int, removed: list[RemovedName]
) -> None:
    try:
        move_ref(backend, clock, name, None, after=number)
    except SnapError as error:
        failed: SnapError = error
        if isinstance(error, RefConflict):
            failed = RefConflict(
                f"{name} was moved by somebody else meanwhile, and was left as it is",
                next_step=f"look at `snapstore show {name}` and decide anew",
            )
        if removed:
            done = ", ".join(str(one.name) for one in removed)
            failed.add_note(f"removed before: {done}")
        raise failed from error
