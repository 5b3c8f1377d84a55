"""Reading what a snapshot is: root manifest, rank manifests, layouts, with their checks.

Nothing here reads data. Reading order and fallbacks follow `format_spec/SEMANTICS.md`, section 5.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import TYPE_CHECKING

from snapstore.backend.base import Backend, ObjectKind
from snapstore.errors import (
    DanglingRef,
    DigestMismatch,
    FormatError,
    IntegrityError,
    ObjectNotFound,
    SnapshotNotFound,
    UsageError,
)
from snapstore.format import layout as layout_format
from snapstore.format import limits
from snapstore.format import rank as rank_format
from snapstore.format.envelope import RANK_MAGIC
from snapstore.format.snapshot import RankEntry, RootManifest, decode_snapshot
from snapstore.ids import RankId, SnapshotId
from snapstore.repository.chains import head_number
from snapstore.repository.layouts import derive_layout
from snapstore.repository.objects import EnvelopeReader, read_object

if TYPE_CHECKING:
    from collections.abc import Sequence

    from snapstore.format.rank import RankNumber
    from snapstore.format.tables import Rows
    from snapstore.format.tree import TreeEntry

__all__ = ["LoadedRank", "Snapshot", "load_snapshot"]


class LoadedRank:
    """One rank of a snapshot; each part is fetched and checked when it is first asked for."""

    def __init__(self, backend: Backend, entry: RankEntry) -> None:
        """Read the rank manifest's header.

        Raises:
            DanglingRef: The manifest is not in the store.
            DigestMismatch: What is stored under its id is something else.
        """
        self._backend = backend
        self.entry = entry
        self.id: RankId = entry.rank_id
        try:
            self._reader = EnvelopeReader(backend, ObjectKind.RANK, self.id.hex, magic=RANK_MAGIC)
        except ObjectNotFound as error:
            raise DanglingRef(
                f"the manifest {self.id.short} of rank {entry.rank} is not in the store",
                next_step="pull another snapshot; `snapstore verify` tells what else is missing",
            ) from error
        self._reader.envelope.check_root(self.id)

    @property
    def number(self) -> RankNumber:
        """Its number, or `host`."""
        return self.entry.rank

    @cached_property
    def meta(self) -> rank_format.RankMeta:
        """Streams and placement."""
        data = self._reader.section(b"META", limit_bytes=limits.RANK_META_BYTES_MAX)
        meta = rank_format.parse_meta(data)
        if meta.rank != self.entry.rank:
            raise DigestMismatch(f"manifest {self.id.short} is of rank {meta.rank}")
        return meta

    @cached_property
    def streams(self) -> Rows:
        """The stream table."""
        data = self._reader.section(b"STRM", limit_bytes=limits.RANK_STREAMS_MAX * 24)
        return rank_format.parse_streams(data)

    @cached_property
    def tree(self) -> list[TreeEntry]:
        """The file tree."""
        data = self._reader.section(b"TREE", limit_bytes=limits.RANK_TREE_BYTES_MAX)
        tree = rank_format.parse_tree(data)
        rank_format.check_tree_against_streams(tree, self.streams)
        return tree

    def read_extents(self) -> Rows:
        """Fetch the chunk table: 48 bytes a chunk, so ask for it only to verify."""
        data = self._reader.section(b"XTNT", limit_bytes=limits.RANK_BYTES_MAX)
        return rank_format.parse_extents(data, self.streams)

    @cached_property
    def layout(self) -> layout_format.LayoutTables:
        """The newest layout that can be read, else one derived from the indexes.

        Raises:
            MissingChunk: There is no usable layout and the indexes lack a chunk.
        """
        newest = head_number(self._backend, ObjectKind.LAYOUT, self.id.hex)
        for number in range(newest, 0, -1):
            layout = self._read_layout(number)
            if layout is not None:
                return layout
        return derive_layout(self._backend, self.id, self.streams, self.read_extents())

    def _read_layout(self, number: int) -> layout_format.LayoutTables | None:
        name = f"{self.id.hex}/{number:08d}"
        try:
            data = read_object(
                self._backend,
                ObjectKind.LAYOUT,
                name,
                limit_bytes=limits.LAYOUT_PLAIN_BYTES_MAX,
            )
            layout = layout_format.parse_layout(data, rank=self.id)
        except (FormatError, IntegrityError, ObjectNotFound):
            return None  # Layouts are derived: an older one or the indexes do as well.
        if not _same_lengths(layout.streams, self.streams):
            return None
        return layout


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot whose root manifest was read and checked."""

    id: SnapshotId
    manifest: RootManifest
    backend: Backend

    def rank(self, number: RankNumber) -> LoadedRank:
        """Load one rank.

        Raises:
            UsageError: The snapshot has no such rank.
        """
        for entry in self.manifest.ranks:
            if entry.rank == number:
                return LoadedRank(self.backend, entry)
        there = ", ".join(str(entry.rank) for entry in self.manifest.ranks)
        raise UsageError(
            f"snapshot {self.id.short} has no rank {number}", next_step=f"it has {there}"
        )

    def ranks(self, numbers: Sequence[RankNumber] = ()) -> list[LoadedRank]:
        """Load the given ranks, or all."""
        wanted = numbers or [entry.rank for entry in self.manifest.ranks]
        return [self.rank(number) for number in dict.fromkeys(wanted)]


def load_snapshot(backend: Backend, snapshot: SnapshotId, *, named: str = "") -> Snapshot:
    """Read a root manifest and check that it is what its id says.

    Args:
        backend: The store.
        snapshot: Which.
        named: The ref that points to it, for messages; without one the user gave the id.

    Raises:
        SnapshotNotFound: There is none of that id.
        DanglingRef: A ref points to it, and there is none of that id.
        DigestMismatch: It is damaged.
    """
    try:
        data = read_object(
            backend, ObjectKind.SNAPSHOT, snapshot.hex, limit_bytes=limits.SNAPSHOT_BYTES_MAX
        )
    except ObjectNotFound as error:
        if named:
            raise DanglingRef(
                f"{named} points to snapshot {snapshot.short}, which is not in the store",
                next_step="point it elsewhere with `snapstore tag`",
            ) from error
        raise SnapshotNotFound(f"no snapshot has the id {snapshot.hex}") from error
    if SnapshotId.of(data) != snapshot:
        raise DigestMismatch(
            f"the root manifest of snapshot {snapshot.short} is damaged: its digest differs"
        )
    return Snapshot(snapshot, decode_snapshot(data), backend)


def _same_lengths(one: Rows, other: Rows) -> bool:
    return len(one) == len(other) and bool((one["length"] == other["length"]).all())
