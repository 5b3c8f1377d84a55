"""What two snapshots share, and what the second costs on top of the first.

Compared by chunks: bytes of B are shared if A has their chunk, in whatever rank or stream. Read
from manifests and layouts alone.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from snapstore.format.rank import HOST
from snapstore.repository.frames import FrameTable
from snapstore.repository.removal import Freed, freed_without, metadata_bytes
from snapstore.repository.roots import find_roots
from snapstore.repository.spool import KeySpool, begins_of
from snapstore.repository.usage import add_chunks, add_frames, sums_of_streams

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from snapstore.clock import Clock
    from snapstore.format.rank import RankNumber
    from snapstore.format.tables import Mask, Rows
    from snapstore.ids import RefName, SnapshotId
    from snapstore.repository.frames import Numbers
    from snapstore.repository.snapshot import LoadedRank, Snapshot

__all__ = ["DiffBytes", "SnapshotDiff", "StreamDiff", "compare"]

_A, _B = 0, 1
_SMALL_CLASS = "small"
"""The stream of all small files, of which a rank has one; its origin tells how many they are."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DiffBytes:
    """Bytes of A and B, before any codec. `shared`, `new` and `zero_b` add up to all of B.

    Attributes:
        logical_a_bytes: Length of A's streams.
        logical_b_bytes: Length of B's streams.
        zero_a_bytes: Zeros of A, which take no space.
        zero_b_bytes: Zeros of B, which take no space.
        shared_bytes: Bytes of B whose chunk A has, anywhere in A.
        new_bytes: Bytes of B whose chunk A does not have.
        gone_bytes: Bytes of A whose chunk B does not have, anywhere in B.
    """

    logical_a_bytes: int = 0
    logical_b_bytes: int = 0
    zero_a_bytes: int = 0
    zero_b_bytes: int = 0
    shared_bytes: int = 0
    new_bytes: int = 0
    gone_bytes: int = 0

    def plus(self, other: DiffBytes) -> DiffBytes:
        """Both together."""
        names = [field.name for field in dataclasses.fields(self)]
        return DiffBytes(**{name: getattr(self, name) + getattr(other, name) for name in names})


@dataclasses.dataclass(frozen=True, slots=True)
class StreamDiff:
    """One stream of A, of B or of both; those of one rank and origin are compared.

    Attributes:
        rank: Its rank.
        data_class: Its class; that of B if they differ.
        origin: Where it comes from.
        bytes: The comparison.
    """

    rank: RankNumber
    data_class: str
    origin: str
    bytes: DiffBytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotDiff:
    """Two snapshots compared.

    Attributes:
        a: The first.
        b: The second.
        streams: By rank and stream.
        new_unique_bytes: What is new in B, each chunk counted once.
        shared_unique_bytes: What both have, each chunk counted once.
        stored_a_bytes: Stored bytes of the frames that A uses.
        stored_b_bytes: Stored bytes of the frames that B uses.
        added_bytes: Stored bytes of the frames that B uses and A does not, each counted whole:
            also where a third snapshot brought it, or B needs a part of it only.
        added_metadata_bytes: B's manifests and layouts, without those of ranks that A has too.
        freed_without_b: What could be freed if B had no name.
        names_of_b: The names that B has.
    """

    a: SnapshotId
    b: SnapshotId
    streams: Sequence[StreamDiff]
    new_unique_bytes: int
    shared_unique_bytes: int
    stored_a_bytes: int
    stored_b_bytes: int
    added_bytes: int
    added_metadata_bytes: int
    freed_without_b: Freed
    names_of_b: tuple[RefName, ...]

    @property
    def total(self) -> DiffBytes:
        """All streams together."""
        return _summed(self.streams, lambda _: None).get(None, DiffBytes())

    @property
    def by_rank(self) -> Mapping[RankNumber, DiffBytes]:
        """Streams of each rank together."""
        return _summed(self.streams, lambda stream: stream.rank)

    @property
    def by_class(self) -> Mapping[str, DiffBytes]:
        """Streams of each class together."""
        return dict(sorted(_summed(self.streams, lambda stream: stream.data_class).items()))


Key = TypeVar("Key")


@dataclasses.dataclass(slots=True)
class _Pair:
    """A stream of A and its like in B, as far as there are such."""

    rank: RankNumber
    data_class: str
    origin: str
    logical: list[int] = dataclasses.field(default_factory=lambda: [0, 0])
    zero: list[int] = dataclasses.field(default_factory=lambda: [0, 0])


class _Comparison:
    """Collects both sides; a group of the spools is twice the number of a pair plus the side."""

    def __init__(self, memory_bytes: int) -> None:
        self.pairs: list[_Pair] = []
        self._numbers: dict[tuple[RankNumber, str, int], int] = {}
        self._packs = FrameTable()
        self.chunks = KeySpool(memory_bytes=memory_bytes // 2)
        self.frames = KeySpool(memory_bytes=memory_bytes // 2)

    def add(self, side: int, rank: LoadedRank) -> None:
        """Add one rank of one side."""
        extents = rank.read_extents()
        pairs = self._pairs_of(side, rank, extents)
        groups = np.repeat(2 * pairs + side, rank.streams["count"].astype(np.int64))
        add_chunks(self.chunks, extents, groups)
        add_frames(self.frames, rank.layout, self._packs, side)

    def _pairs_of(self, side: int, rank: LoadedRank, extents: Rows) -> Numbers:
        lengths = extents["length"].astype(np.int64)
        zeros = sums_of_streams(rank.streams, np.where(extents["chunk_length"] == 0, lengths, 0))
        seen: dict[tuple[RankNumber, str], int] = {}
        numbers = np.zeros(len(rank.streams), np.int64)
        for row, info in enumerate(rank.meta.streams):
            name = _SMALL_CLASS if info.data_class == _SMALL_CLASS else f"of {info.origin}"
            occurrence = seen[rank.number, name] = seen.get((rank.number, name), -1) + 1
            key = (rank.number, name, occurrence)
            number = self._numbers.setdefault(key, len(self.pairs))
            if number == len(self.pairs):
                self.pairs.append(_Pair(rank.number, info.data_class, info.origin))
            pair = self.pairs[number]
            if side == _B:
                pair.data_class, pair.origin = info.data_class, info.origin
            pair.logical[side] = int(rank.streams["length"][row])
            pair.zero[side] = int(zeros[row])
            numbers[row] = number
        return numbers


def compare(a: Snapshot, b: Snapshot, clock: Clock, *, memory_bytes: int) -> SnapshotDiff:
    """Compare two snapshots.

    Reads the chunk tables and layouts of both, and for what removing B would free the layouts of
    all that is kept. Costs O(n log n) for the n chunks of both. Memory stays within the budget,
    but for the largest rank's chunk table, which with its checks takes about 120 bytes a chunk.

    Raises:
        IntegrityError: A manifest of one of the two is damaged or gone.
    """
    both = _Comparison(memory_bytes)
    with both.chunks, both.frames:
        for side, snapshot in enumerate((a, b)):
            for number in [entry.rank for entry in snapshot.manifest.ranks]:
                both.add(side, snapshot.rank(number))
        common, unique = _common_bytes(both.chunks, len(both.pairs))
        stored = _side_bytes(both.frames)
    streams = [_stream_diff(pair, common[row]) for row, pair in enumerate(both.pairs)]
    roots = find_roots(b.backend, clock)
    names = roots.names_of(b.id)
    kept = roots.snapshots(without=names) - {b.id}
    of_a = {entry.rank_id for entry in a.manifest.ranks}
    added = [entry.rank_id for entry in b.manifest.ranks if entry.rank_id not in of_a]
    return SnapshotDiff(
        a=a.id,
        b=b.id,
        streams=sorted(streams, key=_rank_order),
        new_unique_bytes=unique[0],
        shared_unique_bytes=unique[1],
        stored_a_bytes=stored[0] + stored[2],
        stored_b_bytes=stored[1] + stored[2],
        added_bytes=stored[1],
        added_metadata_bytes=metadata_bytes(b.backend, {b.id} - {a.id}, added),
        freed_without_b=freed_without(b.backend, roots, [b.id], kept, memory_bytes=memory_bytes),
        names_of_b=names,
    )


def _common_bytes(chunks: KeySpool, pairs: int) -> tuple[Numbers, tuple[int, int]]:
    """For each pair and side the bytes that the other side has; and new and shared chunks once."""
    common = np.zeros(2 * pairs, np.int64)
    new = shared = 0
    for rows in chunks.buckets():
        is_b, key, in_a, in_b = _sides(rows)
        here_too = np.where(is_b, in_a[key], in_b[key])
        counted = np.where(here_too, rows["bytes"], 0).astype(np.int64)
        np.add.at(common, rows["group"].astype(np.int64), counted)
        sizes = rows["size"][begins_of(rows)].astype(np.int64)
        new += int(sizes[in_b & ~in_a].sum())
        shared += int(sizes[in_b & in_a].sum())
    return common.reshape(pairs, 2), (new, shared)


def _side_bytes(frames: KeySpool) -> tuple[int, int, int]:
    """Stored bytes of the frames that only A uses, only B, and both."""
    sums = [0, 0, 0]
    for rows in frames.buckets():
        _, _, in_a, in_b = _sides(rows)
        sizes = rows["size"][begins_of(rows)].astype(np.int64)
        for place, mask in enumerate((in_a & ~in_b, in_b & ~in_a, in_a & in_b)):
            sums[place] += int(sizes[mask].sum())
    return sums[0], sums[1], sums[2]


def _sides(rows: Rows) -> tuple[Mask, Numbers, Mask, Mask]:
    """For each row whether it is of B and the number of its key; for each key who has it."""
    is_b = (rows["group"] & 1) == _B
    begins = begins_of(rows)
    key = np.cumsum(begins) - 1
    in_a, in_b = np.zeros(int(begins.sum()), np.bool_), np.zeros(int(begins.sum()), np.bool_)
    in_a[key[~is_b]] = True
    in_b[key[is_b]] = True
    return is_b, key, in_a, in_b


def _stream_diff(pair: _Pair, common: Numbers) -> StreamDiff:
    (common_a, common_b), (logical_a, logical_b) = common.tolist(), pair.logical
    zero_a, zero_b = pair.zero
    found = DiffBytes(
        logical_a_bytes=logical_a,
        logical_b_bytes=logical_b,
        zero_a_bytes=zero_a,
        zero_b_bytes=zero_b,
        shared_bytes=common_b,
        new_bytes=logical_b - zero_b - common_b,
        gone_bytes=logical_a - zero_a - common_a,
    )
    return StreamDiff(pair.rank, pair.data_class, pair.origin, found)


def _rank_order(stream: StreamDiff) -> int:
    return -1 if stream.rank == HOST else int(stream.rank)


def _summed(
    streams: Sequence[StreamDiff], key_of: Callable[[StreamDiff], Key]
) -> dict[Key, DiffBytes]:
    sums: dict[Key, DiffBytes] = {}
    for stream in streams:
        key = key_of(stream)
        sums[key] = sums.get(key, DiffBytes()).plus(stream.bytes)
    return sums
