"""Refs: mutable names of snapshots, as chains (`format_spec/05-names-refs.md`, section 2)."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from typing import TYPE_CHECKING

from snapstore.backend.base import Backend, ObjectKind
from snapstore.clock import Clock, format_utc
from snapstore.errors import FormatError, Malformed, RefConflict, RefNotFound
from snapstore.format.ref import Ref, decode_ref, encode_ref
from snapstore.ids import RefName, SnapshotId
from snapstore.repository.chains import (
    append_generation,
    generation_numbers,
    head_number,
    read_generation,
    read_head,
)
from snapstore.repository.objects import about

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "NameGeneration",
    "ResolvedRef",
    "list_refs",
    "move_ref",
    "read_generations",
    "resolve_ref",
    "set_ref",
    "write_ref",
]

_ATTEMPTS = 16


@dataclasses.dataclass(frozen=True, slots=True)
class ResolvedRef:
    """What a name points to at one moment."""

    name: RefName
    snapshot: SnapshotId
    generation: int
    created: str


@dataclasses.dataclass(frozen=True, slots=True)
class NameGeneration:
    """One entry of a name's history.

    Attributes:
        number: Its number; numbers never restart.
        created: When it was written; empty if it is damaged.
        snapshot: What the name pointed to from then on; None if it was deleted, or is damaged.
        damaged: What is wrong with it; empty if nothing is.
        holder: Who wrote it, host and process, as far as the store still knows.
        present: Whether the snapshot's root manifest is still in the store.
    """

    number: int
    created: str
    snapshot: SnapshotId | None
    damaged: str = ""
    holder: str = ""
    present: bool = False

    @property
    def state(self) -> str:
        """`snapshot`, `deleted` or `damaged`."""
        if self.damaged:
            return "damaged"
        return "deleted" if self.snapshot is None else "snapshot"


def resolve_ref(backend: Backend, name: RefName) -> ResolvedRef:
    """Find what a name points to now.

    Raises:
        RefNotFound: Nothing, or it was deleted.
        Malformed: The newest generation is damaged.
    """
    step = "push to it again, or pull a snapshot by its id: NAME@b3:ID"
    with about(f"the name {name} is damaged", next_step=step):
        head = read_head(backend, ObjectKind.REF, chain_of(name))
        ref = decode_ref(head.body) if head is not None else None
    if head is None or ref is None:
        raise RefNotFound(
            f"no snapshot is named {name}", next_step="`snapstore ls` lists what there is"
        )
    if ref.snapshot_id is None:
        raise RefNotFound(
            f"no snapshot is named {name}: it was deleted on {ref.created}",
            next_step=f"`snapstore tag rollback {name}` brings it back while its data are there",
        )
    return ResolvedRef(name, ref.snapshot_id, head.number, ref.created)


def set_ref(backend: Backend, clock: Clock, name: RefName, snapshot: SnapshotId | None) -> int:
    """Let a name point to a snapshot, or to nothing; returns the new generation's number.

    Raises:
        RefConflict: Others moved the name each time we tried.
    """
    return write_ref(backend, clock, name, snapshot).number


def write_ref(
    backend: Backend, clock: Clock, name: RefName, snapshot: SnapshotId | None
) -> NameGeneration:
    """Write the next generation of a name, whatever the one before says.

    Raises:
        RefConflict: Others moved the name each time we tried.
    """
    for _ in range(_ATTEMPTS):
        # The number is enough: a name whose newest generation is damaged can be pushed to.
        newest = head_number(backend, ObjectKind.REF, chain_of(name))
        with contextlib.suppress(RefConflict):
            return move_ref(backend, clock, name, snapshot, after=newest)
    raise RefConflict(
        f"{name} was moved by others {_ATTEMPTS} times in a row",
        next_step="run it again when fewer push to that name",
    )


def move_ref(
    backend: Backend, clock: Clock, name: RefName, snapshot: SnapshotId | None, *, after: int
) -> NameGeneration:
    """Write generation `after` + 1 of a name, for who has seen number `after` and builds on it.

    Raises:
        RefConflict: Somebody else has moved the name meanwhile.
    """
    created = format_utc(clock.now_ns())
    ref = Ref(
        created=created,
        nonce=secrets.token_hex(16),
        snapshot=None if snapshot is None else snapshot.hex,
    )
    number = append_generation(
        backend, ObjectKind.REF, chain_of(name), encode_ref(ref), after=after
    )
    return NameGeneration(number, created, snapshot)


def read_generations(backend: Backend, name: RefName) -> list[NameGeneration]:
    """Read all generations of a name that are still there, oldest first, damaged ones included.

    Empty if nobody ever wrote one.
    """
    found = []
    for number in reversed(generation_numbers(backend, ObjectKind.REF, chain_of(name))):
        try:
            generation = read_generation(backend, ObjectKind.REF, chain_of(name), number)
            ref = decode_ref(generation.body) if generation is not None else None
        except FormatError as error:
            found.append(NameGeneration(number, "", None, damaged=str(error)))
            continue
        if ref is not None:
            found.append(NameGeneration(number, ref.created, ref.snapshot_id))
    return found


def list_refs(backend: Backend, prefix: str = "") -> Iterator[RefName]:
    """Give the names whose text starts with `prefix`, sorted, deleted ones included."""
    names = set()
    for info in backend.list(ObjectKind.REF):
        chain, _, _ = info.name.rpartition("/")
        name, at, tag = chain.rpartition("/@")
        if not at:
            raise Malformed(f"refs {info.name}: not the key of a ref")
        names.add(RefName(name, tag))
    yield from sorted(name for name in names if str(name).startswith(prefix))


def chain_of(name: RefName) -> str:
    """The chain of a name, as part of its keys."""
    return f"{name.name}/@{name.tag}"
