"""Read a directory tree: every path with its metadata, and how to open its files safely later.

Knows nothing of what the files mean (`recognise.py`) nor of how they are stored. The tree may be
in use while it is read: what can be noticed is noticed (`check_unchanged`), and no symlink below
the root is ever followed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import stat
from typing import TYPE_CHECKING, Self

from snapstore.errors import LimitExceeded, SourceChanged, SourceError, UnsupportedFileType
from snapstore.format import limits
from snapstore.format.tree import EntryType, TreeEntry
from snapstore.fstree import is_kept_xattr, open_directory_below, parent_below, show_path

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

__all__ = [
    "FileIdentity",
    "ScannedTree",
    "bytes_to_read",
    "check_tree_unchanged",
    "check_unchanged",
    "data_ranges",
    "open_source_file",
    "read_source_file",
    "scan_tree",
]

SHOWN_PATHS_MAX = 5
"""How many offending paths a message names before it only counts them."""

_GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE})
_NO_XATTRS = frozenset({errno.ENOTSUP, errno.ENOSYS})
_SPECIAL_TYPES = {
    stat.S_IFSOCK: "socket",
    stat.S_IFIFO: "fifo",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
}


@dataclasses.dataclass(frozen=True, slots=True)
class FileIdentity:
    """What a file was when the tree was scanned; any difference later means that it changed."""

    path: bytes
    dev: int
    ino: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, path: bytes, status: os.stat_result) -> Self:
        """Take the identity out of what `stat` said."""
        return cls(
            path=path,
            dev=status.st_dev,
            ino=status.st_ino,
            size_bytes=status.st_size,
            mtime_ns=status.st_mtime_ns,
            ctime_ns=status.st_ctime_ns,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class ScannedTree:
    """A tree as it was at one pass.

    Attributes:
        root: The scanned directory.
        root_identity: Device and inode of it.
        entries: Every path, sorted by its bytes; the root, with an empty path, is first.
        identities: For each entry of type FILE, by path.
        skipped: Paths of sockets, fifos and devices that were left out.
    """

    root: Path
    root_identity: tuple[int, int]
    entries: tuple[TreeEntry, ...]
    identities: Mapping[bytes, FileIdentity]
    skipped: tuple[bytes, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Logical bytes of all files, each counted once however many names it has."""
        return sum(entry.size_bytes for entry in self.entries)

    def read(
        self, entry: TreeEntry, *, size_bytes_max: int, is_prefix_enough: bool = False
    ) -> bytes:
        """See `read_source_file`."""
        return read_source_file(
            self, entry, size_bytes_max=size_bytes_max, is_prefix_enough=is_prefix_enough
        )


def scan_tree(root: Path, *, skip_special: bool = False) -> ScannedTree:
    """Read names and metadata of everything below `root`, not the data.

    `root` itself may be a symlink to a directory: its user named it. Blocks for as long as the
    file system takes; needs a handful of file descriptors however deep the tree is.

    Raises:
        UnsupportedFileType: There are sockets, fifos or devices, and `skip_special` is not set.
        SourceChanged: Something vanished or was replaced between two looks at it.
        SourceError: Something cannot be read, or a path is too long to store.
    """
    root_fd = _open_root(root)
    try:
        walk = _Walk(root_fd)
        walk.run()
        status = os.fstat(root_fd)
    finally:
        os.close(root_fd)
    if walk.special and not skip_special:
        raise UnsupportedFileType(
            "the tree holds what cannot be stored: " + _name_some(walk.special),
            next_step="remove it, or add --skip-special to leave it out",
        )
    if walk.unreadable:
        raise SourceError(
            "cannot read " + _name_some([(path, "") for path in walk.unreadable]),
            next_step="run as a user who may read all of the tree",
        )
    found = sorted(walk.found, key=lambda item: item.path)
    return ScannedTree(
        root=root,
        root_identity=(status.st_dev, status.st_ino),
        entries=tuple(_entries(found)),
        identities={
            item.path: FileIdentity.of(item.path, item.status)
            for item in found
            if stat.S_ISREG(item.status.st_mode)
        },
        skipped=tuple(sorted(path for path, _ in walk.special)),
    )


def open_source_file(tree: ScannedTree, entry: TreeEntry) -> int:
    """Open a file of the tree for reading and check that it still is the scanned one.

    The caller closes the descriptor. Safe from several threads.

    Raises:
        SourceChanged: It vanished, or another file is in its place, or it was written to.
        SourceError: It cannot be opened.
    """
    assert entry.type is EntryType.FILE, entry.type
    identity = tree.identities[entry.path]
    root_fd = _open_root(tree.root)
    try:
        status = os.fstat(root_fd)
        if (status.st_dev, status.st_ino) != tree.root_identity:
            raise SourceChanged(f"{os.fspath(tree.root)!r} is another directory than was scanned")
        # O_NONBLOCK: were a fifo in the file's place by now, opening it must not block.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with parent_below(root_fd, entry.path) as (parent_fd, name):
            fd = os.open(name, flags, dir_fd=parent_fd)
    except OSError as error:
        raise _translate(error, entry.path) from error
    finally:
        os.close(root_fd)
    try:
        check_unchanged(fd, identity)
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_unchanged(fd: int, identity: FileIdentity) -> None:
    """Compare an open file with what was scanned; call it again after the last read.

    Raises:
        SourceChanged: Its inode, size, modification or change time differ.
    """
    now = FileIdentity.of(identity.path, os.fstat(fd))
    if now == identity:
        return
    changed = [
        field.name
        for field in dataclasses.fields(FileIdentity)
        if getattr(now, field.name) != getattr(identity, field.name)
    ]
    raise SourceChanged(
        f"{show_path(identity.path)} changed while it was read ({', '.join(changed)})",
        next_step="push again when nothing writes to the tree any more",
    )


def check_tree_unchanged(tree: ScannedTree, *, skip_special: bool) -> None:
    """Scan the tree again and compare: names, metadata, and that empty files have no content.

    Raises:
        SourceChanged: Something was added, removed, replaced or changed since the first scan.
        SourceError: A file says that it is empty and is not, as in `/proc`.
    """
    again = scan_tree(tree.root, skip_special=skip_special)
    before = {entry.path: entry for entry in tree.entries}
    after = {entry.path: entry for entry in again.entries}
    for path in sorted(before.keys() | after.keys()):
        same = before.get(path) == after.get(path)
        if not same or tree.identities.get(path) != again.identities.get(path):
            raise SourceChanged(
                f"{show_path(path)} changed while the tree was read",
                next_step="push again when nothing writes to the tree any more",
            )
    for entry in tree.entries:
        if entry.type is EntryType.FILE and not entry.size_bytes:
            _check_empty(tree, entry)


def _check_empty(tree: ScannedTree, entry: TreeEntry) -> None:
    fd = open_source_file(tree, entry)
    try:
        has_content = bool(os.read(fd, 1))
    except OSError as error:
        raise _translate(error, entry.path) from error
    finally:
        os.close(fd)
    if has_content:
        raise SourceError(
            f"{show_path(entry.path)} has content although its size is 0",
            next_step="push a copy: files of /proc and its like cannot be stored as they are",
        )


def read_source_file(
    tree: ScannedTree, entry: TreeEntry, *, size_bytes_max: int, is_prefix_enough: bool = False
) -> bytes:
    """Read a small file whole, or the beginning of a larger one where that is enough.

    Raises:
        LimitExceeded: It is larger than `size_bytes_max`; nothing was read.
        SourceChanged: It changed since the scan.
        SourceError: It cannot be read.
    """
    wanted = bytes_to_read(entry, size_bytes_max, is_prefix_enough=is_prefix_enough)
    fd = open_source_file(tree, entry)
    try:
        parts = []
        position = 0
        while position < wanted:
            part = os.pread(fd, wanted - position, position)
            if not part:
                break
            parts.append(part)
            position += len(part)
        # A file cut short while it was read has another size by now: this check reports it.
        check_unchanged(fd, tree.identities[entry.path])
    except OSError as error:
        raise _translate(error, entry.path) from error
    finally:
        os.close(fd)
    return b"".join(parts)


def bytes_to_read(entry: TreeEntry, size_bytes_max: int, *, is_prefix_enough: bool) -> int:
    """Say how much of a small file is read.

    Raises:
        LimitExceeded: It is too large, and its beginning is not enough.
    """
    if entry.size_bytes > size_bytes_max and not is_prefix_enough:
        raise LimitExceeded(
            f"{show_path(entry.path)} has {entry.size_bytes} bytes, more than the "
            f"{size_bytes_max} that are read of such a file"
        )
    return min(entry.size_bytes, size_bytes_max)


def data_ranges(fd: int, size_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield offset and length of each run of a file that is not a hole, in order.

    Moves the file offset. One range for the whole where the file system does not tell; never
    anything at or behind `size_bytes`, whatever happens to the file meanwhile.
    """
    position = 0
    while position < size_bytes:
        try:
            start = os.lseek(fd, position, os.SEEK_DATA)
            end = os.lseek(fd, start, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:  # no data behind `position`
                return
            if error.errno not in {errno.EINVAL, errno.ENOTSUP}:
                raise
            start, end = position, size_bytes
        end = min(end, size_bytes)
        if start >= end:
            return
        yield start, end - start
        position = end


@dataclasses.dataclass(frozen=True, slots=True)
class _Found:
    path: bytes
    status: os.stat_result
    xattrs: tuple[tuple[bytes, bytes], ...]
    target: bytes = b""


class _Walk:
    """One pass over a tree.

    Every directory is reached again from the root, so that the depth of a tree costs no open
    descriptors, and a directory that is moved meanwhile leads nowhere else.
    """

    def __init__(self, root_fd: int) -> None:
        self._root_fd = root_fd
        self._pending = [b""]
        self.found: list[_Found] = []
        self.special: list[tuple[bytes, str]] = []
        self.unreadable: list[bytes] = []

    def run(self) -> None:
        while self._pending:
            path = self._pending.pop()
            try:
                self._enter(path)
            except PermissionError:
                self.unreadable.append(path)
            except OSError as error:
                raise _translate(error, path) from error

    def _enter(self, path: bytes) -> None:
        fd = open_directory_below(self._root_fd, path, os.O_RDONLY)
        try:
            self.found.append(_Found(path, os.fstat(fd), _read_xattrs(fd)))
            with os.scandir(fd) as listing:
                for item in listing:
                    self._look(path, os.fsencode(item.name), fd)
        finally:
            os.close(fd)

    def _look(self, parent: bytes, name: bytes, parent_fd: int) -> None:
        path = parent + b"/" + name if parent else name
        if len(name) > limits.COMPONENT_BYTES_MAX or len(path) > limits.PATH_BYTES_MAX:
            raise SourceError(
                f"the path that begins with {show_path(path[:80])} has {len(path)} bytes: at "
                f"most {limits.PATH_BYTES_MAX}, and {limits.COMPONENT_BYTES_MAX} a component, "
                "can be stored"
            )
        try:
            status = os.stat(name, dir_fd=parent_fd, follow_symlinks=False)
            kind = stat.S_IFMT(status.st_mode)
            if kind == stat.S_IFDIR:
                self._pending.append(path)
            elif kind == stat.S_IFLNK:
                target = os.readlink(name, dir_fd=parent_fd)
                xattrs = _xattrs_of_name(parent_fd, name, is_file=False)
                self.found.append(_Found(path, status, xattrs, target))
            elif kind == stat.S_IFREG:
                # Asking now saves the user from learning it after an hour of reading others.
                if os.access(name, os.R_OK, dir_fd=parent_fd, effective_ids=True):
                    xattrs = _xattrs_of_name(parent_fd, name, is_file=True)
                    self.found.append(_Found(path, status, xattrs))
                else:
                    self.unreadable.append(path)
            else:
                self.special.append((path, _SPECIAL_TYPES.get(kind, "special file")))
        except OSError as error:
            raise _translate(error, path) from error


def _entries(found: list[_Found]) -> Iterator[TreeEntry]:
    """Turn sorted findings into entries; later names of a file become hard links."""
    first_names: dict[tuple[int, int], bytes] = {}
    for item in found:
        _check_limits(item)
        status = item.status
        kind, target, size_bytes = EntryType.DIRECTORY, b"", 0
        if stat.S_ISLNK(status.st_mode):
            kind, target = EntryType.SYMLINK, item.target
        elif stat.S_ISREG(status.st_mode):
            kind, size_bytes = EntryType.FILE, status.st_size
            if status.st_nlink > 1:
                first = first_names.setdefault((status.st_dev, status.st_ino), item.path)
                if first != item.path:
                    kind, target, size_bytes = EntryType.HARDLINK, first, 0
        yield TreeEntry(
            path=item.path,
            type=kind,
            mode=stat.S_IMODE(status.st_mode),
            uid=status.st_uid,
            gid=status.st_gid,
            mtime_ns=status.st_mtime_ns,
            xattrs=item.xattrs,
            size_bytes=size_bytes,
            target=target,
        )


def _check_limits(item: _Found) -> None:
    """Refuse now what no reader of the stored format would accept."""
    for name, _ in item.xattrs:
        try:
            name.decode()
        except UnicodeDecodeError as error:
            raise SourceError(
                f"{show_path(item.path)} has an extended attribute {name!r}, whose name is not "
                "valid UTF-8",
                next_step="remove or rename the attribute",
            ) from error
    xattr_bytes = sum(len(name) + len(value) for name, value in item.xattrs)
    if len(item.xattrs) > limits.XATTRS_MAX or xattr_bytes > limits.XATTRS_BYTES_MAX:
        raise SourceError(
            f"{show_path(item.path)} has {len(item.xattrs)} extended attributes of {xattr_bytes} "
            f"bytes: at most {limits.XATTRS_MAX} and {limits.XATTRS_BYTES_MAX} can be stored"
        )
    if stat.S_ISREG(item.status.st_mode) and item.status.st_size > limits.STREAM_BYTES_MAX:
        raise SourceError(
            f"{show_path(item.path)} has {item.status.st_size} bytes: at most "
            f"{limits.STREAM_BYTES_MAX} can be stored"
        )


def _xattrs_of_name(
    parent_fd: int, name: bytes, *, is_file: bool
) -> tuple[tuple[bytes, bytes], ...]:
    """Read attributes of a directory's child without opening it and without following it.

    There is no `listxattrat`; a path through /proc has the same effect. Where /proc is missing or
    closed to this process, files are opened, and symlinks have no attributes that matter.
    """
    path = b"/proc/self/fd/%d/%s" % (parent_fd, name)
    try:
        return _read_xattrs(path)
    except (FileNotFoundError, PermissionError, NotADirectoryError):
        if not is_file:
            return ()
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(name, flags, dir_fd=parent_fd)
    try:
        return _read_xattrs(fd)
    finally:
        os.close(fd)


def _read_xattrs(where: int | bytes) -> tuple[tuple[bytes, bytes], ...]:
    follow = isinstance(where, int)  # the call refuses a descriptor with follow_symlinks=False
    try:
        names = os.listxattr(where, follow_symlinks=follow)
    except OSError as error:
        if error.errno in _NO_XATTRS:
            return ()
        raise
    pairs = []
    for name in sorted(os.fsencode(name) for name in names):
        if is_kept_xattr(name):
            with contextlib.suppress(_AttributeGoneError):
                pairs.append((name, _get_xattr(where, name, follow=follow)))
    return tuple(pairs)


class _AttributeGoneError(Exception):
    """The attribute went away between the list and the look."""


def _get_xattr(where: int | bytes, name: bytes, *, follow: bool) -> bytes:
    try:
        return os.getxattr(where, name, follow_symlinks=follow)
    except OSError as error:
        if error.errno == errno.ENODATA:
            raise _AttributeGoneError from error
        raise


def _open_root(root: Path) -> int:
    try:
        return os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise SourceError(
            f"cannot open the directory {os.fspath(root)!r}: {error.strerror}",
            next_step="name an existing directory",
        ) from error


def _translate(error: OSError, path: bytes) -> SourceError:
    if error.errno in _GONE:
        return SourceChanged(
            f"{show_path(path)} vanished or was replaced while the tree was read",
            next_step="push again when nothing writes to the tree any more",
        )
    return SourceError(f"cannot read {show_path(path)}: {error.strerror}")


def _name_some(paths: list[tuple[bytes, str]]) -> str:
    shown = [
        show_path(path) + (f" ({kind})" if kind else "")
        for path, kind in sorted(paths)[:SHOWN_PATHS_MAX]
    ]
    more = len(paths) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
