"""Objects as files below a directory: local disk, NFS, or whatever else has hard links.

Implements the durability and atomicity rules of `format_spec/SEMANTICS.md` with file calls only:

*Put if absent.* The bytes go to a file in `tmp/`, which is synced and closed; `link` gives it its
final name, which fails if the name is taken; the directories are synced. So a name either leads
to all bytes of an object or does not exist, wherever a writer dies (`posix_publish`).

*Names are looked up freshly*, since network file systems cache them, both *there* and *not there*
(`posix_tree`). Only a listing may be outdated.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

from snapstore.backend import layout
from snapstore.backend.base import CONTENT_NAMED, Capabilities, ObjectInfo, ObjectKind
from snapstore.backend.descriptors import DescriptorCache
from snapstore.backend.direct import read_aligned, takes_unaligned
from snapstore.backend.files import (
    FileCalls,
    OsFileCalls,
    as_views,
    read_full,
    translate_os_error,
)
from snapstore.backend.layout import object_text
from snapstore.backend.posix_draft import PosixDraft
from snapstore.backend.posix_publish import publish, sweep, temporary, translate_write_error
from snapstore.backend.posix_tree import Tree, make_root, tries
from snapstore.clock import Clock, SystemClock
from snapstore.errors import (
    AccessDenied,
    RangeNotSatisfiable,
    StoreNotFound,
    UsageError,
)
from snapstore.units import MIB, BytesLike

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["PosixBackend"]

READERS_IN_PARALLEL = 4
READ_BYTES_BEST = 4 * MIB
OFFSET_MAX = (1 << 63) - 1

# Only under a content name can nothing else ever appear, so only these may stay open. A chain that
# was removed as a whole may begin anew with the same numbers.
_HELD_OPEN = CONTENT_NAMED


class PosixBackend:
    """A store in a directory (`Backend`). Readers never write, not even a temporary file."""

    def __init__(
        self,
        root: Path,
        *,
        readonly: bool = False,
        clock: Clock | None = None,
        files: FileCalls | None = None,
    ) -> None:
        """Open the store below `root`, which must be a directory.

        Raises:
            StoreNotFound: There is no such directory.
        """
        self._files: FileCalls = files or OsFileCalls()
        self._tree = Tree(os.fspath(root.absolute()), self._files)
        try:
            self._tree.touch_folder("")
            mounted_readonly = self._files.is_readonly(self._tree.root)
        except OSError as error:
            if error.errno in {errno.ENOENT, errno.ENOTDIR}:
                raise StoreNotFound(
                    f"no directory {self._tree.root}", next_step="check the URL and the mount"
                ) from error
            raise translate_os_error(error, f"open store {self._tree.root}") from error
        self._capabilities = Capabilities(
            url=Path(self._tree.root).as_uri(),
            writable=not readonly and not mounted_readonly,
            readers_in_parallel=READERS_IN_PARALLEL,
            read_bytes_best=READ_BYTES_BEST,
        )
        self._takes_unaligned: bool | None = None
        self._descriptors = DescriptorCache(
            self._open_held, self._files.close, clock or SystemClock()
        )

    @classmethod
    def create(
        cls, root: Path, *, clock: Clock | None = None, files: FileCalls | None = None
    ) -> PosixBackend:
        """Make the directory and all that is missing above it, durably, and open it. Idempotent.

        Raises:
            UsageError: Something that is no directory has the name, or it holds other things.
            AccessDenied: This user may not write there.
        """
        path = os.fspath(root.absolute())
        files = files or OsFileCalls()
        try:
            make_root(files, path)
            names = files.listdir(path)
        except OSError as error:
            if error.errno in {errno.EEXIST, errno.ENOTDIR}:
                raise UsageError(f"not a directory: {path}") from error
            raise translate_os_error(error, f"create store {path}") from error
        foreign = sorted(name for name in names if not _may_be_in_store(name))
        if foreign and ObjectKind.CONFIG.value not in names:
            raise UsageError(
                f"{path} holds other things, such as {foreign[0]!r}",
                next_step="give the store a directory of its own",
            )
        return cls(root, clock=clock, files=files)

    @property
    def root(self) -> str:
        """The directory."""
        return self._tree.root

    @property
    def capabilities(self) -> Capabilities:
        """See `Backend.capabilities`."""
        return self._capabilities

    # --- reading ---

    def get_range(self, kind: ObjectKind, name: str, offset: int, into: memoryview) -> None:
        """See `Backend.get_range`. An empty `into` still needs the object and a valid offset."""
        key = layout.key_of(kind, name)
        view = into if into.format == "B" else into.cast("B")
        if offset < 0 or offset + view.nbytes > OFFSET_MAX:
            raise RangeNotSatisfiable(f"{object_text(kind, name)} has no offset {offset}")
        lend = self._descriptors.lend if kind in _HELD_OPEN else self._tree.opened
        fresh = kind not in _HELD_OPEN
        for last in tries():
            try:
                with lend(key) as fd:
                    # Known once a pack is open.
                    aligned = kind is ObjectKind.PACK and not self._takes_unaligned
                    read = read_aligned if aligned else read_full
                    size = self._missed(fd, offset, view, read(self._files, fd, offset, view))
            except OSError as error:
                self._descriptors.forget(key)
                fresh = True
                if error.errno == errno.ESTALE and not last:
                    continue
                raise translate_os_error(error, f"read {object_text(kind, name)}") from error
            if size is None:
                return
            if fresh:
                raise RangeNotSatisfiable(
                    f"{object_text(kind, name)} has {size} bytes, not {offset} + {view.nbytes}"
                )
            # A descriptor from before a repair sees the old length: ask once more.
            self._descriptors.forget(key)
            fresh = True

    def descriptor(self, kind: ObjectKind, name: str) -> int:
        """Return a descriptor of an object for reading, which is the caller's to close.

        It may bypass the page cache: then only aligned requests succeed.

        Raises:
            ObjectNotFound: There is none.
            BackendError: It cannot be opened.
        """
        key = layout.key_of(kind, name)
        lend = self._descriptors.lend if kind in _HELD_OPEN else self._tree.opened
        try:
            with lend(key) as fd:
                return os.dup(fd)
        except OSError as error:
            raise translate_os_error(error, f"open {object_text(kind, name)}") from error

    def stat(self, kind: ObjectKind, name: str) -> ObjectInfo:
        """See `Backend.stat`."""
        key = layout.key_of(kind, name)
        for last in tries():
            try:
                with self._tree.opened(key) as fd:
                    found = self._files.fstat(fd)
            except OSError as error:
                if error.errno == errno.ESTALE and not last:
                    continue
                raise translate_os_error(error, f"stat {object_text(kind, name)}") from error
            return ObjectInfo(name, found.size_bytes, found.modified_ns)
        raise AssertionError(key)

    def list(self, kind: ObjectKind, prefix: str = "") -> Iterator[ObjectInfo]:
        """See `Backend.list`. Files that are nobody's object are passed over in silence."""
        start = layout.listing_prefix(kind, prefix)
        return iter(()) if start is None else self._walk(kind, start)

    # --- writing ---

    def put_new(self, kind: ObjectKind, name: str, pieces: Sequence[BytesLike]) -> None:
        """See `Backend.put_new`."""
        key = layout.key_of(kind, name)
        doing = f"write {object_text(kind, name)}"
        self._require_writable(doing)
        views = as_views(pieces)
        size_bytes = sum(view.nbytes for view in views)
        try:
            if kind in CONTENT_NAMED and self._has_length(key, size_bytes):
                # Whoever wrote it may have died before the name was durable.
                self._tree.settle(key)
                return
            with temporary(self._tree, views) as written:
                publish(self._tree, kind, key, written)
                # What we hold open under this name is an older file, since deleted.
                self._descriptors.forget(key)
                self._tree.settle(key)
        except OSError as error:
            raise translate_write_error(error, doing) from error

    def begin_draft(self) -> PosixDraft:
        """See `snapstore.backend.drafts`.

        Raises:
            AccessDenied: The store is open for reading only.
        """
        self._require_writable("write an object that has no name yet")
        # What we hold open under a name that is given is an older file, since deleted.
        return PosixDraft(self._tree, self._descriptors.forget)

    def delete(self, kind: ObjectKind, name: str) -> None:
        """See `Backend.delete`. A power loss may bring the object back, whole."""
        key = layout.key_of(kind, name)
        doing = f"delete {object_text(kind, name)}"
        self._require_writable(doing)
        # First, since a file that we hold open lives on: under `.nfs…` on a network file system.
        self._descriptors.forget(key)
        try:
            if not self._tree.unlink(key) and self._tree.touch_folders(key):
                self._tree.unlink(key)
        except OSError as error:
            raise translate_os_error(error, doing) from error

    def sweep_temporaries(self, older_than_s: float) -> int:
        """Remove files that dead writers left in `tmp/`; return how many.

        A writer that is merely slow fails with `TransientBackendError` when its file is taken
        away, so choose an age beyond the longest write. Ages are those of the file server's
        clock. Files with names of other programs stay.
        """
        doing = "sweep temporary files"
        self._require_writable(doing)
        try:
            return sweep(self._tree, older_than_s)
        except OSError as error:
            raise translate_os_error(error, doing) from error

    def close(self) -> None:
        """See `Backend.close`."""
        self._descriptors.close()

    def _open_held(self, key: str) -> int:
        fd = self._tree.open(key)
        if layout.name_of(ObjectKind.PACK, key):
            try:
                self._read_past_the_cache(fd)
            except BaseException:
                self._files.close(fd)
                raise
        return fd

    def _read_past_the_cache(self, fd: int) -> None:
        is_direct = self._files.set_direct(fd, direct=True)
        if self._takes_unaligned is None:
            self._takes_unaligned = not is_direct or takes_unaligned(self._files, fd)

    def _missed(self, fd: int, offset: int, view: memoryview, count: int) -> int | None:
        """The object's size if it ends before the view does, of which `count` bytes were there."""
        if view.nbytes and count == view.nbytes:
            return None
        size = self._files.fstat(fd).size_bytes
        return None if not view.nbytes and offset <= size else size

    def _walk(self, kind: ObjectKind, start: str) -> Iterator[ObjectInfo]:
        pending = [start]
        try:
            while pending:
                folder, _, beginning = pending.pop().rpartition("/")
                for entry in self._tree.list_folder(folder):
                    key = f"{folder}/{entry}" if folder else entry
                    name = layout.name_of(kind, key)
                    wanted = name is not None or layout.is_folder(kind, key)
                    if not wanted or not entry.startswith(beginning):
                        continue
                    found = self._tree.stat_listed(key)
                    if found is None:
                        continue
                    if name is not None and found.is_file:
                        yield ObjectInfo(name, found.size_bytes, found.modified_ns)
                    elif name is None and found.is_directory:
                        pending.append(f"{key}/")
        except OSError as error:
            raise translate_os_error(error, f"list {start}") from error

    def _has_length(self, key: str, size_bytes: int) -> bool:
        """Whether the object is surely there; saves writing a pack that another push brought."""
        try:
            with self._tree.opened(key) as fd:
                return self._files.fstat(fd).size_bytes == size_bytes
        except OSError:
            return False

    def _require_writable(self, doing: str) -> None:
        if not self._capabilities.writable:
            raise AccessDenied(
                f"{doing}: {self._capabilities.url} is open for reading only",
                next_step="check how the store is mounted, or use another one",
            )


def _may_be_in_store(name: str) -> bool:
    """Whether a store's directory may hold a file of that name before it is a store."""
    own = {layout.TEMPORARIES, "lost+found", *(kind.value for kind in ObjectKind)}
    return name in own or name.startswith(".")
