"""The tree of one snapshot, as nodes: what was pushed, and `.snapstore`."""

from __future__ import annotations

import collections
import datetime as dt
import logging
import os
import stat
import threading
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from snapstore.errors import FormatError, IntegrityError
from snapstore.format.rank import encode_meta
from snapstore.format.snapshot import encode_snapshot
from snapstore.format.tree import EntryType, encode_tree
from snapstore.mount.control import ControlFiles
from snapstore.mount.nodes import CONTROL, CONTROL_NAME, ROOT, Attributes, inode_of
from snapstore.mount.parallel import in_parallel
from snapstore.repository.file_reader import SnapshotFile, files_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from snapstore.format.rank import RankNumber
    from snapstore.repository.file_reader import SnapshotEntry, SnapshotFiles
    from snapstore.repository.snapshot import LoadedRank, Snapshot

__all__ = ["SnapshotTree"]

log = logging.getLogger(__name__)

_TYPES = {
    EntryType.DIRECTORY: stat.S_IFDIR,
    EntryType.FILE: stat.S_IFREG,
    EntryType.HARDLINK: stat.S_IFREG,
    EntryType.SYMLINK: stat.S_IFLNK,
}
_TABLE_READERS = 8


class _Loaded(NamedTuple):
    """All that is known of a snapshot once its trees and layouts were read. Immutable."""

    files: SnapshotFiles
    entries: list[SnapshotEntry]
    children: dict[int, dict[bytes, int]]
    first_names: dict[int, int]
    links: collections.Counter[int]
    control: ControlFiles
    without_tables: frozenset[RankNumber]


class SnapshotTree:
    """One snapshot as a tree of a forest (`Tree`)."""

    def __init__(
        self,
        number: int,
        find: Callable[[], Snapshot],
        *,
        ranks: Sequence[RankNumber] = (),
        describe: Callable[[Snapshot], bytes],
        created_ns: int = 0,
        at: str = "",
        forgotten: Callable[[SnapshotTree], None] | None = None,
    ) -> None:
        """Make a tree that reads nothing yet.

        Args:
            number: Of the tree.
            find: Gives the snapshot.
            ranks: Only these; empty for all.
            describe: Makes the document about the mount.
            created_ns: The time of the root while it is not known.
            at: Where in the mount it is, for messages.
            forgotten: Told when the kernel knows nothing of it any more.
        """
        self.number = number
        self._find = find
        self._ranks = ranks
        self._describe = describe
        self._created_ns = created_ns
        self._at = at
        self._forgotten = forgotten
        self._lock = threading.Lock()
        self._now: _Loaded | None = None

    @property
    def is_loaded(self) -> bool:
        """Whether all is in memory."""
        return self._now is not None

    def load(self) -> _Loaded:
        """Read trees and layouts, if that is still to do; blocks.

        Raises:
            LookupFailed: There is no such snapshot.
            FormatError: The trees are not what a pull would recreate.
            IntegrityError: They are damaged or gone.
        """
        with self._lock:
            if self._now is None:
                snapshot = self._find()
                files = files_of(snapshot, self._ranks)
                damaged = self._load_tables(files)
                self._now = _arrange(self.number, files, self._control(snapshot, files), damaged)
            return self._now

    def _load_tables(self, files: SnapshotFiles) -> frozenset[RankNumber]:
        """Read the layouts of all ranks; those that cannot be read are told of with each byte."""

        def load(number: int) -> RankNumber | None:
            try:
                files.load_tables(number)
            except (FormatError, IntegrityError) as error:
                log.error("%s: %s", self._at or "/", error)  # noqa: TRY400 - no bug of ours
                return files.ranks[number].number
            return None

        damaged = in_parallel(load, len(files.ranks), threads=_TABLE_READERS)
        return frozenset(number for number in damaged if number is not None)

    def _control(self, snapshot: Snapshot, files: SnapshotFiles) -> ControlFiles:
        ranks = {f"{rank.number}.json".encode(): _rank_document(rank) for rank in files.ranks}
        documents = {
            b"mount.json": lambda: self._describe(snapshot),
            b"snapshot.json": lambda: encode_snapshot(snapshot.manifest)[0],
        }
        created = dt.datetime.fromisoformat(snapshot.manifest.created)
        mtime_ns = int(created.timestamp()) * 1_000_000_000
        return ControlFiles(self.number, documents, ranks, mtime_ns=mtime_ns)

    # -- what the kernel asks

    def may_block(self, local: int) -> bool:
        """See `Tree.may_block`."""
        return self._now is None or local >= CONTROL

    def child(self, local: int, name: bytes) -> int | None:
        """See `Tree.child`."""
        now = self._now or self.load()
        if local >= CONTROL:
            return now.control.child(local, name)
        index = now.children.get(local - 1, {}).get(name)
        if index is not None:
            return self._inode(now, index)
        if local == ROOT and name == CONTROL_NAME:
            return inode_of(self.number, CONTROL)
        return None

    def children(self, local: int) -> Sequence[tuple[bytes, int]]:
        """See `Tree.children`."""
        now = self._now or self.load()
        if local >= CONTROL:
            return now.control.children(local)
        found = now.children.get(local - 1, {})
        return [(name, self._inode(now, index)) for name, index in found.items()]

    def attributes(self, local: int) -> Attributes:
        """See `Tree.attributes`."""
        now = self._now
        if now is None:
            if local != ROOT:
                now = self.load()
            else:
                return Attributes(
                    inode=inode_of(self.number, ROOT),
                    mode=stat.S_IFDIR | 0o755,
                    links=2,
                    mtime_ns=self._created_ns,
                    settled=False,
                    keeps_name=False,
                )
        if local >= CONTROL:
            return now.control.attributes(local)
        entry = now.entries[local - 1]
        return Attributes(
            inode=inode_of(self.number, local),
            mode=_TYPES[entry.type] | entry.mode,
            links=now.links[local - 1],
            uid=entry.uid,
            gid=entry.gid,
            size_bytes=len(entry.target) if entry.type is EntryType.SYMLINK else entry.size_bytes,
            data_bytes=self._data_bytes(now, entry),
            mtime_ns=entry.mtime_ns,
            keeps_name=local != ROOT,
        )

    def target(self, local: int) -> bytes:
        """See `Tree.target`."""
        return self._entry(local).target

    def xattrs(self, local: int) -> tuple[tuple[bytes, bytes], ...]:
        """See `Tree.xattrs`."""
        return () if local >= CONTROL else self._entry(local).xattrs

    def document(self, local: int) -> bytes | None:
        """See `Tree.document`."""
        now = self._now or self.load()
        return now.control.document(local) if local >= CONTROL else None

    def open(self, local: int) -> SnapshotFile:
        """See `Tree.open`."""
        now = self._now or self.load()
        return SnapshotFile(now.files, now.entries[local - 1])

    def path(self, local: int) -> str:
        """See `Tree.path`."""
        if local >= CONTROL:
            return f"{self._at}/.snapstore"
        return f"{self._at}/{os.fsdecode(self._entry(local).path)}"

    def files(self) -> list[int]:
        """The inodes of all files that have bytes, in the order of their paths."""
        now = self._now or self.load()
        return [
            inode_of(self.number, index + 1)
            for index, entry in enumerate(now.entries)
            if entry.type is EntryType.FILE and entry.size_bytes
        ]

    def find(self, path: bytes) -> int | None:
        """The inode of a file with bytes, by its path from the root; None if there is none."""
        now = self._now or self.load()
        at = 0
        for name in path.split(b"/"):
            below = now.children.get(at, {}).get(name)
            if below is None:
                return None
            at = below
        entry = now.entries[at]
        return self._inode(now, at) if entry.is_file and entry.size_bytes else None

    def forgotten(self) -> None:
        """See `Tree.forgotten`."""
        if self._forgotten is not None:
            self._forgotten(self)

    def let_go(self) -> None:
        """Let all go from memory; it is read again when it is needed."""
        with self._lock:
            self._now = None

    def _entry(self, local: int) -> SnapshotEntry:
        now = self._now or self.load()
        return now.entries[local - 1]

    def _inode(self, now: _Loaded, index: int) -> int:
        return inode_of(self.number, now.first_names.get(index, index) + 1)

    @staticmethod
    def _data_bytes(now: _Loaded, entry: SnapshotEntry) -> int:
        if not entry.is_file or entry.rank in now.without_tables:
            return entry.size_bytes
        return now.files.data_bytes(entry)


def _arrange(
    number: int,
    files: SnapshotFiles,
    control: ControlFiles,
    without_tables: frozenset[RankNumber],
) -> _Loaded:
    """Bring entries, which are in order of their paths, into the order of directories."""
    entries = [*files.walk()]
    places = {entry.path: index for index, entry in enumerate(entries)}
    children: dict[int, dict[bytes, int]] = {}
    first_names: dict[int, int] = {}
    links: collections.Counter[int] = collections.Counter()
    for index, entry in enumerate(entries):
        if index:
            path, _, name = entry.path.rpartition(b"/")
            above = places[path]
            children.setdefault(above, {})[name] = index
            links[above] += entry.type is EntryType.DIRECTORY
        if entry.type is EntryType.HARDLINK:
            first_names[index] = places[entry.target]
            links[places[entry.target]] += 1
        elif entry.type is EntryType.DIRECTORY:
            links[index] += 2
        else:
            links[index] += 1
    return _Loaded(files, entries, children, first_names, links, control, without_tables)


def _rank_document(rank: LoadedRank) -> Callable[[], bytes]:
    """Write a rank manifest as JSON: all but its chunk table."""

    def make() -> bytes:
        streams = [
            {"chunks": count, "length": length} for _, count, length in rank.streams.tolist()
        ]
        parts = (
            b'{"id":"' + rank.id.hex.encode() + b'"',
            b'"manifest":' + encode_meta(rank.meta),
            b'"streams":' + msgspec.json.encode(streams),
            b'"tree":' + encode_tree(rank.tree) + b"}\n",
        )
        return b",".join(parts)

    return make
