"""Snapshots as a read-only fsspec file system: `snapstore://NAME:TAG/path/in/the/tree`.

Needs the extra `fsspec`, which registers the protocol; nothing else in the library imports this.

Above a snapshot are the names of the store as directories. In a URL the first `:` or `@`, which
no name can contain, ends the name; the tag or exact id goes on to the next `/`; the rest is a path
in the tree as it was pushed, whatever it contains. So::

    snapstore://                              the first components of all names
    snapstore://team                          what is below, such as team/model:v1
    snapstore://team/model:v1                 the tree
    snapstore://team/model:v1/rank-0/file     a file
    snapstore://team/model:/config.json       an empty tag is the default one, `latest`
    snapstore://team/model@b3:<64 hex>/rank-0/pages-1.img

A name is looked up once and then stands for the same snapshot until `invalidate_cache`, so that
two files of it never come from two pushes.
"""

from __future__ import annotations

import collections
import contextlib
import datetime as dt
import errno
import io
import os
import re
import stat
import threading
import weakref
from typing import TYPE_CHECKING, Any, NoReturn

from fsspec.spec import AbstractFileSystem
from typing_extensions import override

from snapstore.errors import LookupFailed, UsageError
from snapstore.format.tree import EntryType
from snapstore.ids import TAG_DEFAULT, RefName, SnapshotRef, parse_snapshot_ref
from snapstore.options import STORE_URL_VARIABLE, Integrity, StoreOptions, store_url_default
from snapstore.repository.store import open_store
from snapstore.units import MIB, parse_bytes

if TYPE_CHECKING:
    from snapstore.ids import SnapshotId
    from snapstore.repository.file_reader import SnapshotEntry, SnapshotFile
    from snapstore.repository.snapshot import Snapshot
    from snapstore.repository.store import Store

__all__ = ["SnapstoreFileSystem", "split_path"]

Info = dict[str, Any]
"""What fsspec knows of a path."""

_NAME_END = re.compile("[:@]")
_BUFFER_BYTES = 1 * MIB
_NO_NAME = "No name begins so; what is in a snapshot has a tag or id before it: NAME:TAG/PATH"
_TREES_MAX = 16
"""Snapshots whose trees and tables are kept."""


def split_path(path: str) -> tuple[str, SnapshotRef | None, str]:
    """Divide a path without protocol into the part that says which snapshot, and the rest.

    Returns:
        The first part as it was written; what it means, or None if it has no tag and so is a
        directory of names; and the path in the snapshot.

    Raises:
        UsageError: The first part cannot be meant.
    """
    end = _NAME_END.search(path)
    if end is None:
        return path, None, ""
    name, rest = path[: end.start()], path[end.end() :]
    label, _, inside = rest.partition("/")
    if end.group() == "@":
        return f"{name}@{label}", parse_snapshot_ref(f"{name}@{label}"), inside
    return f"{name}:{label}", SnapshotRef(RefName(name, label or TAG_DEFAULT)), inside


class SnapstoreFileSystem(AbstractFileSystem):  # type: ignore[misc, no-any-unimported]
    """The snapshots of one store, for reading only. Thread-safe.

    Args:
        store: The store's URL, such as `file:///mnt/nfs/snapshots`; default `$SNAPSTORE_URL`.
        integrity: `strong` checks every chunk that is read against its id, `fast` checksums only.
        cache: Decoded frames kept in memory, in bytes or as text such as `256MiB`.
        storage_options: What fsspec itself knows.
    """

    protocol = "snapstore"
    root_marker = ""

    def __init__(
        self,
        store: str | None = None,
        *,
        integrity: str = Integrity.STRONG.value,
        cache: int | str = 64 * MIB,
        **storage_options: Any,  # noqa: ANN401 - fsspec's own
    ) -> None:
        super().__init__(**storage_options)
        if integrity not in {one.value for one in Integrity}:
            raise UsageError(f"no such integrity: {integrity!r}", next_step="give strong or fast")
        self.url = store
        self._options = StoreOptions(
            integrity=Integrity(integrity),
            cache_bytes=parse_bytes(cache) if isinstance(cache, str) else cache,
        )
        self._lock = threading.Lock()
        self._opened: Store | None = None
        self._pinned: dict[SnapshotRef, SnapshotId] = {}
        self._trees: collections.OrderedDict[SnapshotId, _Tree] = collections.OrderedDict()

    # -- what there is

    @override
    def ls(self, path: str, detail: bool = True, **_: object) -> list[Any]:
        """List a directory: names, or what is in the tree of a snapshot."""
        path = self._strip_protocol(path)
        before, ref, inside = _split(path)
        if ref is None:
            found = self._names_below(before)
            if not found and path:
                raise _not_found(path, _NO_NAME)
        else:
            tree = self._tree(ref, path)
            info = tree.info(before, inside)
            found = tree.list(before, inside) if info["type"] == "directory" else [info]
        return found if detail else [info["name"] for info in found]

    @override
    def info(self, path: str, **_: object) -> Info:
        """Tell what a path is: name, type, size, and of a file in a snapshot its metadata."""
        path = self._strip_protocol(path)
        before, ref, inside = _split(path)
        if ref is not None:
            return self._tree(ref, path).info(before, inside)
        if path and not self._names_below(before):
            raise _not_found(path, _NO_NAME)
        return _directory(path)

    @override
    def ukey(self, path: str) -> str:
        """Give what changes whenever the content may have: the snapshot and the path."""
        path = self._strip_protocol(path)
        _, ref, inside = _split(path)
        if ref is None:
            raise _not_found(path)
        return f"{self._tree(ref, path).snapshot.id.hex}/{inside}"

    @override
    def modified(self, path: str) -> dt.datetime:
        """When the file was last changed before it was pushed."""
        return dt.datetime.fromtimestamp(self.info(path)["mtime"], tz=dt.UTC)

    @override
    def invalidate_cache(self, path: str | None = None) -> None:
        """Look names up again; `path` is ignored."""
        with self._lock:
            self._pinned.clear()
            self._trees.clear()
        super().invalidate_cache(path)

    # -- reading

    @override
    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: object
    ) -> bytes:
        """Read a file or a range of it; negative numbers count from its end."""
        with self._raw(self._strip_protocol(path)) as file:
            begin, stop = slice(start, end).indices(file.size_bytes)[:2]
            return file.read_at(begin, max(0, stop - begin))

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | str | None = None,
        **_: object,
    ) -> Any:  # noqa: ANN401 - what fsspec takes
        if mode != "rb":
            self._refuse(path)
        size = block_size if isinstance(block_size, int) else _BUFFER_BYTES
        return _OpenFile(self._raw(path), max(size, 1))

    def _raw(self, path: str) -> SnapshotFile:
        _, ref, inside = _split(path)
        info = self.info(path)
        if ref is None or info["type"] == "directory":
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if info["type"] != "file":
            raise _not_found(path)
        return self._tree(ref, path).snapshot.open(inside)

    # -- the store

    def _store(self) -> Store:
        with self._lock:
            if self._opened is None:
                url = self.url or store_url_default()
                if not url:
                    raise UsageError(
                        "no store given",
                        next_step=f"give the storage option store=URL or set {STORE_URL_VARIABLE}",
                    )
                self._opened = open_store(url, self._options, readonly=True)
                weakref.finalize(self, self._opened.close)
            return self._opened

    def _names_below(self, prefix: str) -> list[Info]:
        """List the next components of the names below one, and the tags of what ends there."""
        start = f"{prefix}/" if prefix else ""
        found: dict[str, Info] = {}
        for ref in self._store().list(start, damaged=lambda *_: None):
            name = str(ref.name)
            rest, slash, _ = name.removeprefix(start).partition("/")
            below = f"{start}{rest}"
            found[below] = _directory(below) if slash else _snapshot_directory(name, ref.snapshot)
        return [found[name] for name in sorted(found)]

    def _tree(self, ref: SnapshotRef, path: str) -> _Tree:
        """Find the snapshot, once, and load its tree."""
        store = self._store()
        try:
            with self._lock:
                exact = ref.snapshot or self._pinned.get(ref)
                if exact is None:
                    exact = self._pinned[ref] = store.snapshot(ref).id
                tree = self._trees.get(exact)
                if tree is None:
                    tree = _Tree(store.snapshot(SnapshotRef(ref.ref, exact)))
                    self._trees[exact] = tree
                self._trees.move_to_end(exact)
                if len(self._trees) > _TREES_MAX:
                    self._trees.popitem(last=False)
                return tree
        except LookupFailed as error:
            raise _not_found(path) from error

    # -- refusing to write

    def _refuse(self, path: object, *_: object, **__: object) -> NoReturn:
        raise OSError(
            errno.EROFS,
            "snapstore:// is read-only: push a directory with `snapstore push`, or Store.push",
            str(path),
        )

    mkdir = makedirs = rmdir = rm = rm_file = _rm = touch = cp_file = _refuse
    put = put_file = pipe = pipe_file = mv = copy = write_text = write_bytes = _refuse


class _OpenFile(io.BufferedReader):
    """An open file with the attribute that fsspec adds to Python's.

    Frames are cached already: the buffer only spares a call for each line.
    """

    def __init__(self, raw: SnapshotFile, buffer_bytes: int) -> None:
        super().__init__(raw, buffer_bytes)
        self.size = raw.size_bytes


class _Tree:
    """The tree of one snapshot in fsspec's words."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self._below: dict[bytes, list[SnapshotEntry]] = {}
        for entry in snapshot.walk():
            if entry.path:
                self._below.setdefault(entry.path.rpartition(b"/")[0], []).append(entry)

    def info(self, before: str, inside: str) -> Info:
        """Describe a path; `before` is how the snapshot was spelled."""
        path = f"{before}/{inside}" if inside else before
        try:
            entry = self.snapshot.resolve(inside.rpartition("/")[0])
            name = inside.rpartition("/")[2]
            if name:
                above = entry.path + b"/" if entry.path else b""
                entry = self.snapshot.entry(above + os.fsencode(name))
        except LookupFailed as error:
            raise _not_found(path) from error
        return self._describe(path, entry)

    def list(self, before: str, inside: str) -> list[Info]:
        """Describe what is in a directory."""
        directory = self.snapshot.resolve(inside)
        start = f"{before}/{inside}" if inside else before
        return [
            self._describe(f"{start}/{os.fsdecode(entry.path.rpartition(b'/')[2])}", entry)
            for entry in self._below.get(directory.path, [])
        ]

    def _describe(self, name: str, entry: SnapshotEntry) -> Info:
        info = {
            "name": name,
            "size": entry.size_bytes,
            "type": "file" if entry.is_file else entry.type.value,
            "mode": entry.mode | (stat.S_IFREG if entry.is_file else stat.S_IFDIR),
            "uid": entry.uid,
            "gid": entry.gid,
            "mtime": entry.mtime_ns / 1e9,
            "mtime_ns": entry.mtime_ns,
            "rank": entry.rank,
            "snapshot": self.snapshot.id.hex,
        }
        if entry.type is EntryType.SYMLINK:
            # What a link leads to has its size; directories are not entered through links, which
            # may lead in circles.
            info |= {"islink": True, "destination": os.fsdecode(entry.target), "type": "other"}
            info["mode"] = entry.mode | stat.S_IFLNK
            with contextlib.suppress(LookupFailed):
                found = self.snapshot.resolve(entry.path)
                if found.is_file:
                    info |= {"type": "file", "size": found.size_bytes}
        return info


def _split(path: str) -> tuple[str, SnapshotRef | None, str]:
    try:
        return split_path(path)
    except UsageError as error:
        raise _not_found(path) from error


def _directory(path: str) -> Info:
    return {"name": path, "size": 0, "type": "directory"}


def _snapshot_directory(path: str, snapshot: SnapshotId) -> Info:
    return {**_directory(path), "snapshot": snapshot.hex}


def _not_found(path: str, reason: str = "") -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, reason or os.strerror(errno.ENOENT), path)
