"""Reading what a snapshot is: root manifest, rank manifests, layouts, with their checks.

Nothing here reads data. Reading order and fallbacks follow `format_spec/SEMANTICS.md`, section 5.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from snapstore.backend.base import Backend, ObjectKind
from snapstore.backend.layout import key_of
from snapstore.errors import (
    DanglingRef,
    DigestMismatch,
    FormatError,
    IntegrityError,
    LimitExceeded,
    Malformed,
    ObjectNotFound,
    RangeNotSatisfiable,
    SnapshotNotFound,
    UsageError,
)
from snapstore.format import layout as layout_format
from snapstore.format import limits
from snapstore.format import rank as rank_format
from snapstore.format.envelope import LAYOUT_MAGIC, RANK_MAGIC, parse_header
from snapstore.format.snapshot import RankEntry, RootManifest, decode_snapshot
from snapstore.ids import RankId, SnapshotId
from snapstore.options import StoreOptions
from snapstore.repository.chains import generation_numbers
from snapstore.repository.layouts import derive_layout
from snapstore.repository.lazy import lazy
from snapstore.repository.objects import EnvelopeReader, about, forget_cached, read_object

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Iterator, Sequence

    from snapstore.cache.node_cache import NodeCache
    from snapstore.format.rank import RankNumber
    from snapstore.format.tables import Rows
    from snapstore.format.tree import TreeEntry
    from snapstore.repository.file_reader import SnapshotEntry, SnapshotFile, SnapshotFiles
    from snapstore.repository.frame_cache import FrameCache

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
            with self._about():
                self._reader = EnvelopeReader(
                    backend, ObjectKind.RANK, self.id.hex, magic=RANK_MAGIC
                )
                self._reader.envelope.check_root(self.id)
        except ObjectNotFound as error:
            raise DanglingRef(
                f"the manifest {self.id.short} of rank {entry.rank} is not in the store",
                next_step="push the same tree again, or pull another snapshot",
            ) from error

    @property
    def number(self) -> RankNumber:
        """Its number, or `host`."""
        return self.entry.rank

    @lazy
    def meta(self) -> rank_format.RankMeta:
        """Streams and placement."""
        with self._about():
            data = self._reader.section(b"META", limit_bytes=limits.RANK_META_BYTES_MAX)
            meta = rank_format.parse_meta(data)
            if meta.rank != self.entry.rank:
                raise DigestMismatch(f"manifest {self.id.short} is of rank {meta.rank}")
            if len(meta.streams) != len(self.streams):
                raise Malformed(f"{len(self.streams)} streams, but META has {len(meta.streams)}")
            return meta

    @lazy
    def streams(self) -> Rows:
        """The stream table."""
        limit_bytes = limits.RANK_STREAMS_MAX * limits.STREAM_ROW_BYTES
        with self._about():
            data = self._reader.section(b"STRM", limit_bytes=limit_bytes)
            return rank_format.parse_streams(data)

    @lazy
    def tree(self) -> list[TreeEntry]:
        """The file tree."""
        with self._about():
            data = self._reader.section(b"TREE", limit_bytes=limits.RANK_TREE_BYTES_MAX)
            tree = rank_format.parse_tree(data)
            rank_format.check_tree_against_streams(tree, self.streams)
            return tree

    def read_extents(self) -> Rows:
        """Fetch the chunk table: 48 bytes a chunk, so ask for it only to verify."""
        with self._about():
            data = self._reader.section(b"XTNT", limit_bytes=limits.RANK_BYTES_MAX)
            return rank_format.parse_extents(data, self.streams)

    @lazy
    def layout(self) -> layout_format.LayoutTables:
        """The newest layout that can be read, else one derived from the indexes.

        Raises:
            MissingChunk: There is no usable layout and the indexes lack a chunk.
        """
        for number in generation_numbers(self._backend, ObjectKind.LAYOUT, self.id.hex):
            layout = self._read_layout(number)
            name = f"{self.id.hex}/{number:08d}"
            if layout is None and forget_cached(self._backend, ObjectKind.LAYOUT, name):
                layout = self._read_layout(number)
            if layout is not None:
                return layout
        return derive_layout(self._backend, self.id, self.streams, self.read_extents())

    def _read_layout(self, number: int) -> layout_format.LayoutTables | None:
        name = f"{self.id.hex}/{number:08d}"
        limit_bytes = self._layout_bytes_max()
        try:
            data = read_object(self._backend, ObjectKind.LAYOUT, name, limit_bytes=limit_bytes)
            envelope = parse_header(data, magic=LAYOUT_MAGIC, object_length=len(data))
            if sum(info.plain_length for info in envelope.sections) > limit_bytes:
                raise LimitExceeded(f"layout {name}: more than {limit_bytes} bytes decoded")
            layout = layout_format.parse_layout(data, rank=self.id)
        except (FormatError, IntegrityError, ObjectNotFound, RangeNotSatisfiable):
            return None  # Layouts are derived: an older one or the indexes do as well.
        if not _same_lengths(layout.streams, self.streams):
            return None
        return layout

    def _layout_bytes_max(self) -> int:
        """How long a layout of this rank can be: it has no more segments than there are extents.

        The limit of the format alone would let a few kilobytes of a hostile layout decode to
        gigabytes, and tiny segments make a reader check large chunks again and again.
        """
        with self._about():
            info = self._reader.envelope.require(b"XTNT")
        extents = info.plain_length // limits.EXTENT_ROW_BYTES
        # Each segment may be the only one of its frame, and that the only one of its pack.
        row_bytes = (
            limits.SEGMENT_ROW_BYTES + limits.INDEX_FRAME_ROW_BYTES + limits.INDEX_PACK_ROW_BYTES
        )
        tables = extents * row_bytes + len(self.streams) * limits.STREAM_ROW_BYTES
        rest = 2 * limits.LAYOUT_META_BYTES_MAX  # the header, and sections of later versions
        return min(tables + rest, limits.LAYOUT_PLAIN_BYTES_MAX)

    def _about(self) -> contextlib.AbstractContextManager[None]:
        key = key_of(ObjectKind.RANK, self.id.hex)
        step = f"pull another snapshot, or move {key} away and push the same tree again"
        return about(f"rank {self.entry.rank}", next_step=step)


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A snapshot whose root manifest was read and checked. Thread-safe.

    Attributes:
        id: Which.
        manifest: When it was taken, of what, and its ranks.
        backend: Where it is.
        options: What is checked when files of it are read.
        cache: Decoded frames of files that are read; the store's snapshots share one.
        node_cache: The cache of the node, which files are read through.
    """

    id: SnapshotId
    manifest: RootManifest
    backend: Backend
    options: StoreOptions = dataclasses.field(
        default_factory=StoreOptions, repr=False, compare=False
    )
    cache: FrameCache | None = dataclasses.field(default=None, repr=False, compare=False)
    node_cache: NodeCache | None = dataclasses.field(default=None, repr=False, compare=False)

    def walk(self) -> Iterator[SnapshotEntry]:
        """Give all paths of the tree as it was pushed, the root first.

        Raises:
            FormatError: The trees of the ranks are not what a pull would recreate.
            IntegrityError: They are damaged or gone.
        """
        return self._files.walk()

    def entry(self, path: str | bytes) -> SnapshotEntry:
        """Look one path up; symbolic links are not followed.

        Raises:
            PathNotFound: There is none.
        """
        return self._files.entry(path)

    def resolve(self, path: str | bytes) -> SnapshotEntry:
        """Look one path up, following symbolic links that stay within the snapshot.

        Raises:
            PathNotFound: There is none, or a link leads out of the snapshot or in a circle.
        """
        return self._files.resolve(path)

    def open(self, path: str | bytes) -> SnapshotFile:
        """Open a file for reading; symbolic links within the snapshot are followed.

        Nothing is recreated on disk: what is read is fetched, checked as `pull` does, and kept in
        a bounded cache. The store must stay open.

        Args:
            path: From the root of the tree as it was pushed, without a slash at its start.

        Raises:
            PathNotFound: There is none.
            UsageError: It is a directory.
        """
        return self._files.open(path)

    @lazy
    def _files(self) -> SnapshotFiles:
        from snapstore.repository.file_reader import files_of

        return files_of(self)

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


def load_snapshot(
    backend: Backend,
    snapshot: SnapshotId,
    *,
    named: str = "",
    options: StoreOptions | None = None,
    cache: FrameCache | None = None,
    node_cache: NodeCache | None = None,
) -> Snapshot:
    """Read a root manifest and check that it is what its id says.

    Args:
        backend: The store.
        snapshot: Which.
        named: The ref that points to it, for messages; without one the user gave the id.
        options: For reading its files.
        cache: For reading its files; without one the snapshot makes its own.
        node_cache: For reading its files; without one they come from the store.

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
                next_step="push to it again, or pull another snapshot by its id: NAME@b3:ID",
            ) from error
        raise SnapshotNotFound(f"no snapshot has the id {snapshot.hex}") from error
    if SnapshotId.of(data) != snapshot:
        raise DigestMismatch(
            f"the root manifest of snapshot {snapshot.short} is damaged: its digest differs",
            next_step="push the same tree again, or pull another snapshot",
        )
    with about(f"snapshot {snapshot.short}", next_step="pull another snapshot"):
        manifest = decode_snapshot(data)
    return Snapshot(snapshot, manifest, backend, options or StoreOptions(), cache, node_cache)


def _same_lengths(one: Rows, other: Rows) -> bool:
    return len(one) == len(other) and bool((one["length"] == other["length"]).all())
