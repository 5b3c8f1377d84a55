"""Objects as files below a directory: local disk, NFS, or whatever else has hard links.

Implements the durability and atomicity rules of `format_spec/SEMANTICS.md` with file calls only:

*Put if absent.* The bytes go to a file in `tmp/`, which is synced and closed; `link` gives it its
final name, which fails if the name is taken; the directories are synced. So a name either leads
to all bytes of an object or does not exist, wherever a writer dies.

*Errors of `fsync` and `close` are believed.* After one the bytes count as lost, the file is
dropped, and nothing is synced a second time through the same descriptor: Linux reports a failed
write-back once and then calls the file clean.

*Network file systems cache names.* What `stat(2)` says may be a minute old, both *there* and *not
there*. Objects are therefore looked at by `open`, which asks the server about the file, after
opening their folder, which asks the server about the names: an absent name is forgotten when its
folder has changed, and so is a name that was removed while its file lives on under another one.

*Replies get lost.* A `link` that reports any error may have happened; the target decides.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from snapstore.backend import layout
from snapstore.backend.base import CONTENT_NAMED, Capabilities, ObjectInfo, ObjectKind
from snapstore.backend.descriptors import DescriptorCache
from snapstore.backend.files import (
    FileCalls,
    FileStat,
    OsFileCalls,
    as_views,
    read_full,
    translate_os_error,
    write_all,
)
from snapstore.clock import Clock, SystemClock
from snapstore.errors import (
    AccessDenied,
    CapabilityMissing,
    ObjectExists,
    RangeNotSatisfiable,
    StoreNotFound,
    TransientBackendError,
    UsageError,
)
from snapstore.units import MIB, BytesLike

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["PosixBackend"]

TRIES_MAX = 4
"""How often one operation looks again after ESTALE or a name that changed while it looked."""

READERS_IN_PARALLEL = 16
READ_BYTES_BEST = 4 * MIB
OFFSET_MAX = (1 << 63) - 1

# O_NONBLOCK: a fifo under the name of an object must not hang its reader. O_NOFOLLOW: nor may a
# symbolic link lead out of the store.
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY

# Only under a content name can nothing else ever appear, so only these may stay open. A chain that
# was removed as a whole may begin anew with the same numbers.
_HELD_OPEN = CONTENT_NAMED

_TEMPORARY = re.compile(r"put-[0-9a-f]{32}")
_NO_LINKS = frozenset(
    {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EXDEV, errno.EMLINK}
)
_NO_FOLDER_SYNC = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS})
_SURELY_REFUSED = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES})
_GONE = frozenset({errno.ENOENT, errno.ESTALE})
_NO_FILE = frozenset({errno.ELOOP, errno.ENXIO})
_SETTLED_MAX = 65_536


@dataclasses.dataclass(frozen=True, slots=True)
class _Written:
    """A finished temporary file and what it holds."""

    path: str
    stat: FileStat
    views: Sequence[memoryview]


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
        self._root = os.fspath(root.absolute())
        try:
            self._touch_folder(self._root)
            mounted_readonly = self._files.is_readonly(self._root)
        except OSError as error:
            if error.errno in {errno.ENOENT, errno.ENOTDIR}:
                raise StoreNotFound(
                    f"no directory {self._root}", next_step="check the URL and the mount"
                ) from error
            raise translate_os_error(error, f"open store {self._root}") from error
        self._capabilities = Capabilities(
            url=Path(self._root).as_uri(),
            writable=not readonly and not mounted_readonly,
            readers_in_parallel=READERS_IN_PARALLEL,
            read_bytes_best=READ_BYTES_BEST,
        )
        self._descriptors = DescriptorCache(
            self._open_path, self._files.close, clock or SystemClock()
        )
        # Directories whose own name this process knows to be durable. Only ever grows stale by
        # somebody removing directories by hand, after which `link` says ENOENT.
        self._settled: set[str] = set()

    @classmethod
    def create(
        cls, root: Path, *, clock: Clock | None = None, files: FileCalls | None = None
    ) -> PosixBackend:
        """Make the directory and all that is missing above it, durably, and open it. Idempotent.

        Raises:
            UsageError: Something that is no directory has the name.
            AccessDenied: This user may not write there.
        """
        calls = files or OsFileCalls()
        path = os.fspath(root.absolute())
        try:
            _make_root(calls, path)
            calls.close(calls.open(path, _FOLDER_FLAGS))
            _make_folder(calls, f"{path}/{layout.TEMPORARIES}")
            _sync_folder(calls, path)
        except OSError as error:
            if error.errno in {errno.EEXIST, errno.ENOTDIR}:
                raise UsageError(f"not a directory: {path}") from error
            raise translate_os_error(error, f"create store {path}") from error
        return cls(root, clock=clock, files=files)

    @property
    def capabilities(self) -> Capabilities:
        """See `Backend.capabilities`."""
        return self._capabilities

    # --- reading ---

    def get_range(self, kind: ObjectKind, name: str, offset: int, into: memoryview) -> None:
        """See `Backend.get_range`. An empty `into` still needs the object and a valid offset."""
        path = self._path(layout.key_of(kind, name))
        view = into if into.format == "B" else into.cast("B")
        if offset < 0 or offset + view.nbytes > OFFSET_MAX:
            raise RangeNotSatisfiable(f"{_what(kind, name)} has no offset {offset}")
        lend = self._descriptors.lend if kind in _HELD_OPEN else self._opened
        fresh = kind not in _HELD_OPEN
        for last in _tries():
            try:
                with lend(path) as fd:
                    size = self._read(fd, offset, view)
            except OSError as error:
                self._descriptors.forget(path)
                fresh = True
                if error.errno == errno.ESTALE and not last:
                    continue
                raise translate_os_error(error, f"read {_what(kind, name)}") from error
            if size is None:
                return
            if fresh:
                raise RangeNotSatisfiable(
                    f"{_what(kind, name)} has {size} bytes, not {offset} + {view.nbytes}"
                )
            # A descriptor from before a repair sees the old length: ask once more.
            self._descriptors.forget(path)
            fresh = True

    def stat(self, kind: ObjectKind, name: str) -> ObjectInfo:
        """See `Backend.stat`."""
        path = self._path(layout.key_of(kind, name))
        for last in _tries():
            try:
                with self._opened(path) as fd:
                    found = self._files.fstat(fd)
            except OSError as error:
                if error.errno == errno.ESTALE and not last:
                    continue
                raise translate_os_error(error, f"stat {_what(kind, name)}") from error
            return ObjectInfo(name, found.size_bytes, found.modified_ns)
        raise AssertionError(path)

    def list(self, kind: ObjectKind, prefix: str = "") -> Iterator[ObjectInfo]:
        """See `Backend.list`. Files that are nobody's object are passed over in silence."""
        start = layout.listing_prefix(kind, prefix)
        return iter(()) if start is None else self._walk(kind, start)

    # --- writing ---

    def put_new(self, kind: ObjectKind, name: str, pieces: Sequence[BytesLike]) -> None:
        """See `Backend.put_new`."""
        key = layout.key_of(kind, name)
        doing = f"write {_what(kind, name)}"
        self._require_writable(doing)
        views = as_views(pieces)
        try:
            if kind not in CONTENT_NAMED or not self._has_length(key, _length(views)):
                written = self._write_temporary(views)
                try:
                    self._publish(kind, key, written)
                    # What we hold open under this name is an older file, since deleted.
                    self._descriptors.forget(self._path(key))
                    self._sync_folders(key)
                finally:
                    self._discard(written.path)
            else:
                # Whoever wrote it may have died before the name was durable.
                self._sync_folders(key)
        except OSError as error:
            if error.errno == errno.ENOENT:
                raise TransientBackendError(f"{doing}: the store's directory went away") from error
            raise translate_os_error(error, doing) from error

    def delete(self, kind: ObjectKind, name: str) -> None:
        """See `Backend.delete`. A power loss may bring the object back, whole."""
        key = layout.key_of(kind, name)
        doing = f"delete {_what(kind, name)}"
        self._require_writable(doing)
        path = self._path(key)
        # First, since a file that we hold open lives on: under `.nfs…` on a network file system.
        self._descriptors.forget(path)
        try:
            if not self._unlink(path) and self._refresh_folders(path):
                self._unlink(path)
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
            probe = self._write_temporary([])
            try:
                limit_ns = probe.stat.modified_ns - int(older_than_s * 1e9)
                return sum(
                    self._remove_if_older(name, limit_ns)
                    for name in self._files.listdir(self._path(layout.TEMPORARIES))
                    if _TEMPORARY.fullmatch(name) and not probe.path.endswith(name)
                )
            finally:
                self._discard(probe.path)
        except OSError as error:
            raise translate_os_error(error, doing) from error

    def close(self) -> None:
        """See `Backend.close`."""
        self._descriptors.close()

    # --- looking ---

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root

    def _open_path(self, path: str) -> int:
        """Open an object for reading, as the server has it now."""
        try:
            self._touch_folder(path.rpartition("/")[0])
        except OSError as error:
            # That may be just as old: is there really no such folder?
            if error.errno != errno.ENOENT or not self._refresh_folders(path):
                raise
        return self._open_regular(path)

    def _open_regular(self, path: str) -> int:
        fd = self._files.open(path, _READ_FLAGS)
        try:
            _require_file(self._files.fstat(fd))
        except BaseException:
            self._close_quietly(fd)
            raise
        return fd

    @contextlib.contextmanager
    def _opened(self, path: str) -> Iterator[int]:
        fd = self._open_path(path)
        try:
            yield fd
        finally:
            self._close_quietly(fd)

    def _refresh_folders(self, path: str) -> bool:
        """Make the client drop what it wrongly believes of the names in the folders of `path`.

        Opening a directory is what makes a network file system ask the server whether it has
        changed. Returns whether all folders exist, so that another look is worth it.
        """
        key = path.removeprefix(self._root).lstrip("/")
        for folder in reversed(layout.parent_keys(key)):
            try:
                self._touch_folder(self._path(folder))
            except OSError as error:
                if error.errno in {errno.ENOENT, errno.ENOTDIR}:
                    return False
                raise
        return True

    def _touch_folder(self, path: str) -> None:
        self._close_quietly(self._files.open(path, _FOLDER_FLAGS))

    def _read(self, fd: int, offset: int, view: memoryview) -> int | None:
        """Fill the view; the object's size instead of `None` if it is too short."""
        if view.nbytes and read_full(self._files, fd, offset, view) == view.nbytes:
            return None
        size = self._files.fstat(fd).size_bytes
        return None if not view.nbytes and offset <= size else size

    def _walk(self, kind: ObjectKind, start: str) -> Iterator[ObjectInfo]:
        pending = [start]
        while pending:
            folder, _, beginning = pending.pop().rpartition("/")
            for entry in self._entries(folder):
                key = f"{folder}/{entry}" if folder else entry
                name = layout.name_of(kind, key)
                wanted = name is not None or layout.is_folder(kind, key)
                if not wanted or not entry.startswith(beginning):
                    continue
                found = self._stat_listed(key)
                if found is None:
                    continue
                if name is not None and found.is_file:
                    yield ObjectInfo(name, found.size_bytes, found.modified_ns)
                elif name is None and found.is_directory:
                    pending.append(f"{key}/")

    def _entries(self, folder: str) -> Sequence[str]:
        path = self._path(folder)
        for last in _tries():
            try:
                return self._files.listdir(path)
            except OSError as error:
                if error.errno in {errno.ENOENT, errno.ENOTDIR}:
                    return ()
                if error.errno != errno.ESTALE or last:
                    raise translate_os_error(error, f"list {path}") from error
        raise AssertionError(path)

    def _stat_listed(self, key: str) -> FileStat | None:
        try:
            return self._files.lstat(self._path(key))
        except OSError as error:
            if error.errno in _GONE:
                return None
            raise translate_os_error(error, f"list {key}") from error

    # --- publishing ---

    def _require_writable(self, doing: str) -> None:
        if not self._capabilities.writable:
            raise AccessDenied(f"{doing}: {self._capabilities.url} is open for reading only")

    def _has_length(self, key: str, size_bytes: int) -> bool:
        """Whether the object is surely there; saves writing a pack that another push brought."""
        try:
            fd = self._open_path(self._path(key))
        except OSError:
            return False
        try:
            return self._files.fstat(fd).size_bytes == size_bytes
        except OSError:
            return False
        finally:
            self._close_quietly(fd)

    def _write_temporary(self, views: Sequence[memoryview]) -> _Written:
        path = self._path(f"{layout.TEMPORARIES}/put-{secrets.token_hex(16)}")
        fd = self._create(path)
        try:
            try:
                write_all(self._files, fd, views)
                self._files.fsync(fd)
                found = self._files.fstat(fd)
            except BaseException:
                self._close_quietly(fd)
                raise
            self._files.close(fd)
            _require_length(found, _length(views))
        except BaseException:
            self._discard(path)
            raise
        return _Written(path, found, views)

    def _create(self, path: str) -> int:
        try:
            return self._files.open(path, _CREATE_FLAGS)
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise
        self._make_folders(layout.parent_keys(f"{layout.TEMPORARIES}/x"))
        return self._files.open(path, _CREATE_FLAGS)

    def _publish(self, kind: ObjectKind, key: str, written: _Written) -> None:
        """Give the finished file its final name, or find that it is there already."""
        target = self._path(key)
        for last in _tries():
            try:
                self._files.link(written.path, target)
            except OSError as error:
                if not self._is_published(error, kind, key, written):
                    if last:
                        raise TransientBackendError(f"link {key}: {error.strerror}") from error
                    continue
            return

    def _is_published(self, error: OSError, kind: ObjectKind, key: str, written: _Written) -> bool:
        """Decide what a `link` that failed has done; `False`: nothing, and it may work now."""
        self._raise_if_refused(error, kind, key)
        if error.errno == errno.ENOENT:
            self._make_folders(layout.parent_keys(key))
            return False
        same = self._compare(kind, self._path(key), written)
        if same is False:
            raise ObjectExists(f"{key} exists with other content") from error
        if same is None and error.errno not in {errno.EEXIST, errno.ESTALE}:
            # It did not happen so far, or the server is still at it: only a new try can tell.
            raise error
        return same is True

    @staticmethod
    def _raise_if_refused(error: OSError, kind: ObjectKind, key: str) -> None:
        """Raise for refusals that leave no doubt; return if `link` may have happened."""
        if error.errno in _NO_LINKS:
            raise CapabilityMissing(
                f"{key}: the file system refuses hard links ({error.strerror}), without which "
                f"{kind.name} cannot be written exactly once",
                next_step="keep the whole store on one file system that has hard links, or in S3",
            ) from error
        if error.errno in _SURELY_REFUSED:
            raise error

    def _compare(self, kind: ObjectKind, target: str, written: _Written) -> bool | None:
        """Whether `target` is what we wrote; `None` if there is no such file.

        Our own file under its new name means that `link` happened and its reply was lost.
        """
        try:
            with self._opened(target) as fd:
                found = self._files.fstat(fd)
                if found.size_bytes != written.stat.size_bytes:
                    return False
                if found.identity == written.stat.identity or kind in CONTENT_NAMED:
                    return True
                return self._has_bytes(fd, written.views)
        except OSError as error:
            if error.errno not in _GONE | _NO_FILE:
                raise
        return self._compare_odd(target)

    def _compare_odd(self, target: str) -> bool | None:
        """Tell a name that is free from one that something else than a file has taken."""
        try:
            return None if self._files.lstat(target).is_file else False
        except OSError as error:
            if error.errno not in _GONE:
                raise
            return None

    def _has_bytes(self, fd: int, views: Sequence[memoryview]) -> bool:
        buffer = memoryview(bytearray(MIB))
        offset = 0
        for view in views:
            for start in range(0, view.nbytes, MIB):
                ours = view[start : start + MIB]
                theirs = buffer[: ours.nbytes]
                if read_full(self._files, fd, offset, theirs) != ours.nbytes:
                    return False
                # As bytes, since comparing two memoryviews goes byte by byte.
                if bytes(ours) != bytes(theirs):
                    return False
                offset += ours.nbytes
        return True

    def _make_folders(self, keys: Sequence[str]) -> None:
        """Make the folders, given innermost first; the store's own directory must exist."""
        for key in reversed(keys):
            if key and _make_folder(self._files, self._path(key)):
                self._settled.discard(key)

    def _sync_folders(self, key: str) -> None:
        """Make the object's name durable, and the names of all folders above it."""
        inner, *outer = layout.parent_keys(key)
        _sync_folder(self._files, self._path(inner))
        settled = set()
        for folder in outer:
            if inner in self._settled:
                break
            _sync_folder(self._files, self._path(folder))
            settled.add(inner)
            inner = folder
        # Last, and at once: a folder counts only with all that is above it.
        if len(self._settled) >= _SETTLED_MAX:
            self._settled.clear()
        self._settled |= settled

    def _unlink(self, path: str) -> bool:
        try:
            self._files.unlink(path)
        except OSError as error:
            # ESTALE: somebody else removed the file, which is all that was wanted.
            if error.errno in _GONE or error.errno == errno.ENOTDIR:
                return False
            raise
        return True

    def _discard(self, path: str) -> None:
        # What cannot be removed is garbage for `sweep_temporaries`; the result stands.
        with contextlib.suppress(OSError):
            self._files.unlink(path)

    def _remove_if_older(self, name: str, limit_ns: int) -> bool:
        key = f"{layout.TEMPORARIES}/{name}"
        found = self._stat_listed(key)
        if found is None or not found.is_file or found.modified_ns > limit_ns:
            return False
        return self._unlink(self._path(key))

    def _close_quietly(self, fd: int) -> None:
        # For descriptors that were only read, or whose file is given up anyway.
        with contextlib.suppress(OSError):
            self._files.close(fd)


def _make_root(files: FileCalls, path: str) -> None:
    """Make a directory and what is missing above it, and sync the parent of each."""
    parent = os.fspath(Path(path).parent)
    try:
        made = _make_folder(files, path)
    except OSError as error:
        if error.errno != errno.ENOENT or parent == path:
            raise
        _make_root(files, parent)
        made = _make_folder(files, path)
    try:
        _sync_folder(files, parent)
    except OSError:
        # One that was there before may well lie below a directory that we cannot read.
        if made:
            raise


def _make_folder(files: FileCalls, path: str) -> bool:
    try:
        files.mkdir(path)
    except OSError as error:
        if error.errno != errno.EEXIST:
            raise
        return False
    return True


def _sync_folder(files: FileCalls, path: str) -> None:
    fd = files.open(path, _FOLDER_FLAGS)
    try:
        files.fsync(fd)
    except OSError as error:
        if error.errno in _NO_FOLDER_SYNC:
            raise CapabilityMissing(
                f"{path}: the file system cannot make directories durable ({error.strerror})",
                next_step="keep the store on a file system whose directories can be synced",
            ) from error
        raise
    finally:
        with contextlib.suppress(OSError):
            files.close(fd)


def _tries() -> Iterator[bool]:
    """Count the tries of an operation; each item says whether it is the last."""
    return (attempt == TRIES_MAX for attempt in range(1, TRIES_MAX + 1))


def _require_file(found: FileStat) -> None:
    if not found.is_file:
        raise OSError(errno.ENOENT, "something else than a file has this name")


def _require_length(found: FileStat, size_bytes: int) -> None:
    if found.size_bytes != size_bytes:
        raise OSError(errno.EIO, f"{found.size_bytes} bytes stored of {size_bytes}")


def _length(views: Sequence[memoryview]) -> int:
    return sum(view.nbytes for view in views)


def _what(kind: ObjectKind, name: str) -> str:
    return f"{kind.name} {name}" if name else kind.name
