"""What keeps snapshots: names, and pushes that are about to have one (SEMANTICS, R1).

Only the newest generation of a name keeps its snapshot. Nothing here decides what is removed: it
is for counting, so what cannot be read is said and passed over.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from snapstore.backend.base import Backend, ObjectKind
from snapstore.clock import Clock, format_utc
from snapstore.errors import FormatError, IntegrityError, RefNotFound
from snapstore.format.lease import Lease, LeaseState, decode_lease
from snapstore.ids import SnapshotId
from snapstore.repository.chains import read_head
from snapstore.repository.refs import list_refs, read_generations, resolve_ref

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from snapstore.ids import RefName

__all__ = ["Roots", "find_roots", "newest_leases"]

_LIVE = frozenset({LeaseState.ACQUIRED, LeaseState.RENEWED})


@dataclasses.dataclass(frozen=True, slots=True)
class Roots:
    """What keeps snapshots at one moment.

    Attributes:
        names: What each name points to; deleted names are not there.
        committed: Snapshots that are complete and have never had a name: their pushes are about
            to give them one, or died before they could.
        pushes: Pushes under way; what they need cannot be known yet.
        damaged: Names and leases that cannot be read.
    """

    names: Mapping[RefName, SnapshotId]
    committed: frozenset[SnapshotId]
    pushes: int
    damaged: tuple[str, ...]

    def snapshots(self, *, without: Collection[RefName] = ()) -> frozenset[SnapshotId]:
        """All that would be kept if some names were deleted."""
        named = {snapshot for name, snapshot in self.names.items() if name not in without}
        return self.committed | named

    def titles(self) -> dict[SnapshotId, str]:
        """What to call each snapshot in messages: one of its names, if it has any."""
        titles = dict.fromkeys(self.committed, "a push that is ending")
        for name, snapshot in sorted(self.names.items(), reverse=True):
            titles[snapshot] = str(name)
        return titles

    def names_of(self, snapshot: SnapshotId) -> tuple[RefName, ...]:
        """The names that point to a snapshot, sorted."""
        return tuple(sorted(name for name, found in self.names.items() if found == snapshot))


def find_roots(backend: Backend, clock: Clock) -> Roots:
    """Read all names and leases: some small reads for each.

    A lease whose time is over counts no more, and one that committed only until a name has had its
    snapshot: then it has done its work.
    """
    damaged: list[str] = []
    listed = list(list_refs(backend))
    names = {}
    for name in listed:
        try:
            names[name] = resolve_ref(backend, name).snapshot
        except RefNotFound:
            continue  # Deleted.
        except (FormatError, IntegrityError) as error:
            damaged.append(str(error))
    committed, pushes = set(), 0
    for lease in newest_leases(backend, damaged):
        if format_utc(clock.now_ns() - lease.ttl_s * 1_000_000_000) > lease.created:
            continue
        if lease.snapshot is not None:
            committed.add(SnapshotId.parse(lease.snapshot))
        pushes += lease.state in _LIVE
    committed -= set(names.values())
    if committed:
        for name in listed:
            committed -= {one.snapshot for one in read_generations(backend, name) if one.snapshot}
    return Roots(names, frozenset(committed), pushes, tuple(damaged))


def newest_leases(backend: Backend, damaged: list[str]) -> list[Lease]:
    """Read the newest generation of each lease; those that cannot be read go to `damaged`."""
    ids = {info.name.partition("/")[0] for info in backend.list(ObjectKind.LEASE)}
    leases = []
    for one in sorted(ids):
        try:
            head = read_head(backend, ObjectKind.LEASE, one)
            if head is not None:
                leases.append(decode_lease(head.body))
        except FormatError as error:
            damaged.append(f"lease {one[:12]}: {error}")
    return leases
