"""What a whole store holds: by namespace, and how much of it no name needs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from snapstore.backend.base import Backend, ObjectKind
from snapstore.errors import ObjectNotFound, UsageError
from snapstore.ids import PackId, SnapshotId
from snapstore.repository.frames import FrameTable
from snapstore.repository.roots import find_roots
from snapstore.repository.spool import KeySpool, begins_of
from snapstore.repository.usage import RankUsers, add_chunks, add_frames

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from snapstore.clock import Clock
    from snapstore.ids import RankId
    from snapstore.repository.frames import Numbers
    from snapstore.repository.roots import Roots

__all__ = ["NamespaceStats", "ObjectTotals", "StoreStats", "measure_store"]


@dataclasses.dataclass(frozen=True, slots=True)
class ObjectTotals:
    """How many objects, and their bytes."""

    objects: int
    bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceStats:
    """What the names of one namespace point to; a snapshot counts once, however many names it has.

    Attributes:
        namespace: The first components of the names; empty for all names together.
        names: Names that point to a snapshot.
        snapshots: Different snapshots among these.
        logical_bytes: Length of all their streams.
        data_bytes: Without zeros.
        unique_bytes: Different chunks, each counted once.
        shared_bytes: Those of them that another namespace has too.
        exclusive_bytes: Those that no other has; with `shared_bytes` all of `unique_bytes`.
        stored_bytes: Stored bytes of the frames that they need.
        exclusive_stored_bytes: Those of frames that no other namespace needs.
    """

    namespace: str
    names: int
    snapshots: int
    logical_bytes: int
    data_bytes: int
    unique_bytes: int
    shared_bytes: int
    exclusive_bytes: int
    stored_bytes: int
    exclusive_stored_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """A store in numbers.

    Attributes:
        total: All names that start with the prefix; shared is what more than one namespace has.
        namespaces: By namespace, sorted.
        packs: All packs of the store.
        indexes: All indexes.
        manifests: All root and rank manifests.
        layouts: All layouts.
        unused_packs: Packs that no name and no push that is ending needs. Running pushes may have
            written them.
        loose_bytes: What is in the other packs and in no frame that is needed: frames of what was
            deleted, footers and gaps. Rewriting packs can give back no more than this.
        unnamed_snapshots: Root manifests that no name points to.
        pushes: Pushes under way.
        damaged: What could not be read or is gone, and is not in these numbers.
    """

    total: NamespaceStats
    namespaces: Sequence[NamespaceStats]
    packs: ObjectTotals
    indexes: ObjectTotals
    manifests: ObjectTotals
    layouts: ObjectTotals
    unused_packs: ObjectTotals
    loose_bytes: int
    unnamed_snapshots: int
    pushes: int
    damaged: tuple[str, ...]


def measure_store(
    backend: Backend, clock: Clock, *, prefix: str, depth: int, memory_bytes: int
) -> StoreStats:
    """Count what a store holds.

    Reads every rank manifest and every newest layout once: 48 bytes for each chunk of each. Costs
    O(n log n) for n such chunks. Memory stays within the budget, but for the chunk table of the
    largest rank manifest, which with its checks takes about 120 bytes a chunk; what does not fit
    waits in a temporary file, at 32 bytes a chunk.

    Args:
        backend: The store.
        clock: To tell which pushes are under way.
        prefix: Count only names that start so; others matter only as those shared with.
        depth: How many components of a name make its namespace.
        memory_bytes: The budget.

    Raises:
        UsageError: `depth` is not positive.
    """
    if depth < 1:
        raise UsageError(f"a namespace of {depth} components", next_step="give 1 or more")
    roots = find_roots(backend, clock)
    count = _Count(backend, roots, prefix, depth)
    with (
        KeySpool(memory_bytes=memory_bytes // 2) as chunks,
        KeySpool(memory_bytes=memory_bytes // 2) as frames,
    ):
        for rank in list(count.ranks.users):
            count.read(rank, chunks, frames)
        unique = _Shares.of(chunks, len(count.spaces))
        stored = _Shares.of(frames, len(count.spaces))
    namespaces = [
        count.stats_of([number], space, unique.of_space(number), stored.of_space(number))
        for number, space in enumerate(count.spaces)
    ]
    total = count.stats_of(range(len(count.spaces)), "", unique.total, stored.total)
    return _with_objects(backend, roots, count, total, namespaces, stored.all_bytes)


class _Count:
    """Who has what: names by namespace, snapshots, ranks and packs."""

    def __init__(self, backend: Backend, roots: Roots, prefix: str, depth: int) -> None:
        inside = {
            name: "/".join(name.name.split("/")[:depth])
            for name in roots.names
            if str(name).startswith(prefix)
        }
        self.spaces = sorted(set(inside.values()))
        numbers = {space: number for number, space in enumerate(self.spaces)}
        # The last number is what is outside of the prefix, or is about to get its first name.
        outside = len(self.spaces)
        self._names = [0] * (outside + 1)
        self._snapshots: list[set[SnapshotId]] = [set() for _ in self._names]
        self.ranks = RankUsers(backend)
        self.ranks.damaged.extend(roots.damaged)
        self.packs = FrameTable()
        self.used_packs: set[int] = set()
        self._sizes: dict[RankId, tuple[int, int]] = {}
        users: dict[SnapshotId, set[int]] = {}
        for snapshot in roots.committed:
            users[snapshot] = {outside}
        for name, snapshot in roots.names.items():
            space = numbers[inside[name]] if name in inside else outside
            self._names[space] += 1
            self._snapshots[space].add(snapshot)
            users.setdefault(snapshot, set()).add(space)
        titles = roots.titles()
        self._ranks = {
            snapshot: self.ranks.add(snapshot, spaces, named=titles[snapshot])
            for snapshot, spaces in users.items()
        }

    def read(self, rank: RankId, chunks: KeySpool, frames: KeySpool) -> None:
        """Add a rank's chunks and frames to what its users have."""
        users = sorted(self.ranks.users[rank])
        # The frames first: what still holds packs should be known even if chunks are not.
        with self.ranks.passing_over():
            loaded = self.ranks.load(rank)
            for user in users:
                self.used_packs |= {*add_frames(frames, loaded.layout, self.packs, user).tolist()}
            extents = loaded.read_extents()
            data = extents["chunk_length"] != 0
            lengths = extents["length"].astype(np.int64)
            self._sizes[rank] = int(lengths.sum()), int(lengths[data].sum())
            for user in users:
                add_chunks(chunks, extents, np.broadcast_to(np.int64(user), len(extents)))

    def stats_of(
        self, spaces: Sequence[int], title: str, unique: tuple[int, int], stored: tuple[int, int]
    ) -> NamespaceStats:
        """Put together what is known of some namespaces."""
        snapshots = set[SnapshotId]().union(*(self._snapshots[space] for space in spaces))
        sizes = [self._sizes.get(rank, (0, 0)) for one in snapshots for rank in self._ranks[one]]
        return NamespaceStats(
            namespace=title,
            names=sum(self._names[space] for space in spaces),
            snapshots=len(snapshots),
            logical_bytes=sum(logical for logical, _ in sizes),
            data_bytes=sum(data for _, data in sizes),
            unique_bytes=unique[0],
            shared_bytes=unique[0] - unique[1],
            exclusive_bytes=unique[1],
            stored_bytes=stored[0],
            exclusive_stored_bytes=stored[1],
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Shares:
    """Sizes of different keys by namespace: all that it has, and what only it has."""

    unique: Numbers
    exclusive: Numbers
    total: tuple[int, int]
    all_bytes: int

    @classmethod
    def of(cls, spool: KeySpool, spaces: int) -> _Shares:
        """Add up; the group after the last namespace is all that is outside."""
        unique, exclusive = np.zeros(spaces + 1, np.int64), np.zeros(spaces + 1, np.int64)
        total = total_exclusive = all_bytes = 0
        for table in spool.buckets():
            rows = table[begins_of(table, with_group=True)]
            begins = np.flatnonzero(begins_of(rows))
            if not len(begins):
                continue
            users = np.diff(np.append(begins, len(rows)))
            sizes = rows["size"][begins].astype(np.int64)
            groups = rows["group"].astype(np.int64)
            np.add.at(unique, groups, np.repeat(sizes, users))
            alone = users == 1
            np.add.at(exclusive, groups[begins[alone]], sizes[alone])
            # Rows of a key are sorted by group: if the first is inside, one is.
            inside = groups[begins] < spaces
            total += int(sizes[inside].sum())
            total_exclusive += int(sizes[inside & alone].sum())
            all_bytes += int(sizes.sum())
        return cls(unique, exclusive, (total, total_exclusive), all_bytes)

    def of_space(self, number: int) -> tuple[int, int]:
        return int(self.unique[number]), int(self.exclusive[number])


def _with_objects(
    backend: Backend,
    roots: Roots,
    count: _Count,
    total: NamespaceStats,
    namespaces: list[NamespaceStats],
    needed_bytes: int,
) -> StoreStats:
    packs = {info.name: info.size_bytes for info in backend.list(ObjectKind.PACK)}
    snapshots = {info.name: info.size_bytes for info in backend.list(ObjectKind.SNAPSHOT)}
    ranks = [info.size_bytes for info in backend.list(ObjectKind.RANK)]
    used = count.packs.pack_rows(np.array(sorted(count.used_packs), np.int64))
    names = {PackId(bytes(raw)).hex for raw in used["id"].tolist()}
    lost = sorted(name for name in names - set(packs) if not _add_size(backend, packs, name))
    damaged = list(count.ranks.damaged)
    if lost:
        damaged.append(f"{len(lost)} packs that are needed are gone, the first is {lost[0][:12]}")
    unused = [size for name, size in packs.items() if name not in names]
    named = {snapshot.hex for snapshot in roots.names.values()}
    return StoreStats(
        total=total,
        namespaces=namespaces,
        packs=_totals(packs.values()),
        indexes=_totals([info.size_bytes for info in backend.list(ObjectKind.INDEX)]),
        manifests=_totals([*snapshots.values(), *ranks]),
        layouts=_totals([info.size_bytes for info in backend.list(ObjectKind.LAYOUT)]),
        unused_packs=_totals(unused),
        loose_bytes=max(sum(packs.values()) - sum(unused) - needed_bytes, 0),
        unnamed_snapshots=len(set(snapshots) - named),
        pushes=roots.pushes,
        damaged=tuple(damaged),
    )


def _totals(sizes: Iterable[int]) -> ObjectTotals:
    listed = list(sizes)
    return ObjectTotals(len(listed), sum(listed))


def _add_size(backend: Backend, packs: dict[str, int], name: str) -> bool:
    """Ask for a pack by its name, since a listing may be stale; says whether it is there."""
    try:
        packs[name] = backend.stat(ObjectKind.PACK, name).size_bytes
    except ObjectNotFound:
        return False
    return True
