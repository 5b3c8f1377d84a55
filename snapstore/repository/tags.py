"""Pointing names at snapshots that exist already, and going back in a name's history.

The order is that of a push that has nothing to store (R6 of `format_spec/SEMANTICS.md`): lease;
what the snapshot needs is looked for, claimed from a pruner by its marks, and looked for again;
lease *committed*; ref. Without the lease a pruner that had looked at all names before could remove
what was found: it waits for leases that were there when it condemned, and *committed* is a root.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING

from snapstore.backend.base import Backend, ObjectKind
from snapstore.errors import (
    DanglingRef,
    FormatError,
    MissingPack,
    ObjectNotFound,
    RefConflict,
    RefNotFound,
    SnapError,
    UsageError,
)
from snapstore.format.lease import LeaseState
from snapstore.repository.leases import PushLease, revive
from snapstore.repository.refs import (
    ResolvedRef,
    move_ref,
    read_generations,
    resolve_ref,
    write_ref,
)
from snapstore.repository.roots import newest_leases
from snapstore.repository.snapshot import Snapshot, load_snapshot

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapstore.clock import Clock
    from snapstore.format.lease import Lease
    from snapstore.ids import RefName
    from snapstore.repository.refs import NameGeneration

__all__ = ["name_history", "roll_back", "tag_snapshot"]


def tag_snapshot(backend: Backend, clock: Clock, snapshot: Snapshot, name: RefName) -> ResolvedRef:
    """Let a name point to a snapshot; writes nothing if it does so already.

    Raises:
        IntegrityError: Something that the snapshot needs is gone or damaged.
        ConcurrencyError: It is being removed, or others moved the name again and again.
    """
    with contextlib.suppress(RefNotFound, FormatError):
        found = resolve_ref(backend, name)
        if found.snapshot == snapshot.id:
            return found
    _claim(backend, clock, snapshot)
    written = write_ref(backend, clock, name, snapshot.id)
    return ResolvedRef(name, snapshot.id, written.number, written.created)


def roll_back(
    backend: Backend, clock: Clock, name: RefName, *, to: int | None = None
) -> ResolvedRef:
    """Let a name point again to what an earlier generation pointed to, as a new generation.

    Args:
        backend: The store.
        clock: For the new generation.
        name: Which name; may be deleted.
        to: Number of the generation; by default the newest one before the current with another
            snapshot.

    Raises:
        RefNotFound: There is no such name or generation.
        UsageError: The generation has no snapshot.
        IntegrityError: Something that the snapshot needs is gone or damaged.
        RefConflict: Somebody else has moved the name meanwhile.
    """
    generations = _read(backend, name)
    newest = generations[-1]
    target = _target(name, generations, to)
    assert target.snapshot is not None, target.number
    if target.snapshot == newest.snapshot:
        return ResolvedRef(name, target.snapshot, newest.number, newest.created)
    named = f"generation {target.number} of {name}"
    _claim(backend, clock, load_snapshot(backend, target.snapshot, named=named))
    try:
        written = move_ref(backend, clock, name, target.snapshot, after=newest.number)
    except RefConflict as error:
        raise RefConflict(
            f"{name} was moved by somebody else meanwhile, and was left as it is",
            next_step=f"look at `snapstore tag history {name}` and decide anew",
        ) from error
    return ResolvedRef(name, target.snapshot, written.number, written.created)


def name_history(backend: Backend, name: RefName) -> tuple[NameGeneration, ...]:
    """Tell all generations of a name that are still there, the newest first.

    Who wrote one is not part of a ref: it is taken from the lease under which the snapshot was
    committed last before, and is empty when that lease is gone.

    Raises:
        RefNotFound: Nobody ever wrote one.
    """
    generations = _read(backend, name)
    leases = [lease for lease in newest_leases(backend, []) if lease.state is LeaseState.COMMITTED]
    return tuple(
        dataclasses.replace(one, holder=_holder(one, leases), present=_is_present(backend, one))
        for one in reversed(generations)
    )


def _read(backend: Backend, name: RefName) -> list[NameGeneration]:
    generations = read_generations(backend, name)
    if not generations:
        raise RefNotFound(
            f"nothing was ever named {name}", next_step="`snapstore ls` lists what there is"
        )
    return generations


def _target(name: RefName, generations: list[NameGeneration], to: int | None) -> NameGeneration:
    history = f"`snapstore tag history {name}` lists them"
    if to is None:
        current = generations[-1].snapshot
        for one in reversed(generations[:-1]):
            if one.snapshot is not None and one.snapshot != current:
                return one
        raise RefNotFound(f"{name} never pointed to another snapshot", next_step=history)
    for one in generations:
        if one.number == to:
            if one.snapshot is None:
                raise UsageError(f"generation {to} of {name} is {one.state}", next_step=history)
            return one
    raise RefNotFound(f"{name} has no generation {to}", next_step=history)


def _holder(generation: NameGeneration, leases: list[Lease]) -> str:
    if generation.snapshot is None:
        return ""
    # Times are of one form and in UTC, so that they compare as text.
    found = [
        (lease.created, lease.holder)
        for lease in leases
        if lease.snapshot == generation.snapshot.hex and lease.created <= generation.created
    ]
    return max(found, default=("", ""))[1]


def _is_present(backend: Backend, generation: NameGeneration) -> bool:
    if generation.snapshot is None:
        return False
    try:
        backend.stat(ObjectKind.SNAPSHOT, generation.snapshot.hex)
    except ObjectNotFound:
        return False
    return True


def _claim(backend: Backend, clock: Clock, snapshot: Snapshot) -> None:
    """See that everything of a snapshot is there and stays there (R3), and commit to it."""
    lease = PushLease(backend, clock)
    try:
        needed = dict(_needed(backend, snapshot))
        _check_present(backend, snapshot, needed)
        for kind, names in needed.items():
            revive(backend, clock, kind, names)
        # What was marked *deleted* in between could be revived, and is gone all the same.
        _check_present(backend, snapshot, needed)
        lease.commit(snapshot.id)
    finally:
        # Does nothing after the commit.
        with contextlib.suppress(SnapError):
            lease.release()


def _needed(backend: Backend, snapshot: Snapshot) -> Iterator[tuple[ObjectKind, list[str]]]:
    """Names of all that a snapshot needs, by kind; reads its rank manifests and layouts."""
    ranks = snapshot.ranks()
    packs: dict[bytes, None] = {}
    for rank in ranks:
        assert rank.meta.rank == rank.number, rank.number  # and refused by then if it is not
        packs.update(dict.fromkeys(rank.layout.packs["id"].tolist()))
    yield ObjectKind.PACK, [bytes(raw).hex() for raw in packs]
    yield ObjectKind.RANK, [rank.id.hex for rank in ranks]
    yield ObjectKind.SNAPSHOT, [snapshot.id.hex]


def _check_present(
    backend: Backend, snapshot: Snapshot, needed: dict[ObjectKind, list[str]]
) -> None:
    step = "push the same tree again, or take another snapshot"
    for kind, names in needed.items():
        # Only packs are many: one listing instead of a request for each.
        listed = {info.name for info in backend.list(kind)} if kind is ObjectKind.PACK else set()
        gone = [name for name in names if name not in listed and not _exists(backend, kind, name)]
        if gone:
            error = MissingPack if kind is ObjectKind.PACK else DanglingRef
            raise error(
                f"snapshot {snapshot.id.short} cannot be used: {len(gone)} of its {kind.value} "
                f"are gone from the store, the first is {gone[0][:12]}",
                next_step=step,
            )


def _exists(backend: Backend, kind: ObjectKind, name: str) -> bool:
    try:
        backend.stat(kind, name)
    except ObjectNotFound:
        return False
    return True
