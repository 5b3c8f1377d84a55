"""Refs: mutable names of snapshots, as chains (`format_spec/05-names-refs.md`, section 2)."""

from __future__ import annotations

import dataclasses
import secrets
from typing import TYPE_CHECKING

from snapstore.backend.base import Backend, ObjectKind
from snapstore.clock import Clock, format_utc
from snapstore.errors import Malformed, RefConflict, RefNotFound
from snapstore.format.ref import Ref, decode_ref, encode_ref
from snapstore.ids import RefName, SnapshotId
from snapstore.repository.chains import append_generation, head_number, read_head
from snapstore.repository.objects import about

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["ResolvedRef", "list_refs", "resolve_ref", "set_ref"]

_ATTEMPTS = 16


@dataclasses.dataclass(frozen=True, slots=True)
class ResolvedRef:
    """What a name points to at one moment."""

    name: RefName
    snapshot: SnapshotId
    generation: int
    created: str


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
    if head is None or ref is None or ref.snapshot_id is None:
        raise RefNotFound(
            f"no snapshot is named {name}", next_step="`snapstore ls` lists what there is"
        )
    return ResolvedRef(name, ref.snapshot_id, head.number, ref.created)


def set_ref(backend: Backend, clock: Clock, name: RefName, snapshot: SnapshotId | None) -> int:
    """Let a name point to a snapshot, or to nothing; returns the new generation's number.

    Raises:
        RefConflict: Others moved the name each time we tried.
    """
    for _ in range(_ATTEMPTS):
        # The number is enough: a name whose newest generation is damaged can be pushed to.
        newest = head_number(backend, ObjectKind.REF, chain_of(name))
        body = encode_ref(
            Ref(
                created=format_utc(clock.now_ns()),
                nonce=secrets.token_hex(16),
                snapshot=None if snapshot is None else snapshot.hex,
            )
        )
        try:
            return append_generation(backend, ObjectKind.REF, chain_of(name), body, after=newest)
        except RefConflict:
            continue
    raise RefConflict(
        f"{name} was moved by others {_ATTEMPTS} times in a row",
        next_step="run it again when fewer push to that name",
    )


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
