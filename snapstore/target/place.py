"""Recreate a tree below a directory, and nowhere else.

The entries come from a store and are hostile; a check of the format has been over them, and this
module does not rely on it. Every path is walked component by component from one open directory,
no symlink is followed, and nothing that exists is written to.

Order: directories (closed to others), files and their data, then symlinks, hard links, and last,
from the leaves to the root, the directories' own owners, modes and times.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from typing import TYPE_CHECKING, NoReturn, Self

from snapstore.errors import OutOfSpace, TargetError
from snapstore.format.tree import EntryType, TreeEntry
from snapstore.fstree import chmod_path_fd, open_directory_below, parent_below, show_path
from snapstore.target.checks import checked_entries
from snapstore.target.metadata import MetadataWriter, PlaceReport

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path
    from types import TracebackType

    from snapstore.target.journal import Journal

__all__ = ["PlaceReport", "TreeTarget"]

_MODE_DIRECTORY = 0o700
_MODE_FILE = 0o600
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})


class TreeTarget:
    """One tree being recreated. `open_file` and `finish_file` are safe from several threads.

    Args:
        root: An existing directory; that it be empty is only asked where names collide.
        entries: The tree, or the trees of several ranks: their directories may repeat.
        fsync: Make everything durable.
        resume: An earlier run left part of the tree: go on from it.
        journal: Given when the directory is not ours, but a place to work in: it may hold other
            things, of which none is touched, and keeps its own metadata. The journal remembers
            what in it is ours.
    """

    def __init__(
        self,
        root: Path,
        entries: Iterable[TreeEntry],
        *,
        fsync: bool = False,
        resume: bool = False,
        journal: Journal | None = None,
    ) -> None:
        self._entries = checked_entries(entries)
        self._fsync = fsync
        self._resume = resume
        self._journal = journal
        self._in_place = journal is not None
        self._created: set[bytes] = set()
        self._finished: set[bytes] = set()
        self._lock = threading.Lock()
        try:
            self._root_fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise TargetError(f"cannot open {os.fspath(root)!r}: {error.strerror}") from error
        self._metadata = MetadataWriter(self._root_fd)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the target; what is there stays."""
        self.close()

    def close(self) -> None:
        """Give the root's descriptor back. May be called twice."""
        if self._root_fd >= 0:
            os.close(self._root_fd)
            self._root_fd = -1

    @property
    def files(self) -> list[TreeEntry]:
        """All files of the tree, each once however many names it has."""
        return [entry for entry in self._entries.values() if entry.type is EntryType.FILE]

    def make_directories(self) -> None:
        """Make all directories, open to nobody else until `finish`.

        Raises:
            TargetError: Something is in the way, or not permitted. In place that is found out
                before anything is made.
            OutOfSpace: There is no room.
        """
        if self._in_place:
            self._refuse_collisions()
        for entry in self._entries.values():
            if entry.type is EntryType.DIRECTORY and entry.path:
                with self._translated(entry.path), self._parent(entry.path) as (parent_fd, name):
                    self._make_directory(parent_fd, name, entry.path)

    def survives(self, entry: TreeEntry) -> bool:
        """Say whether an earlier run left this file with its size, so that its data may count."""
        with contextlib.suppress(OSError), self._parent(entry.path) as (parent_fd, name):
            status = os.stat(name, dir_fd=parent_fd, follow_symlinks=False)
            return stat.S_ISREG(status.st_mode) and status.st_size == entry.size_bytes
        return False

    def open_file(self, entry: TreeEntry) -> int:
        """Create a file of the entry's size, all of it a hole; the caller writes and closes it.

        A file that this object made before, or when resuming an earlier run, is opened again with
        what it holds.

        Raises:
            TargetError: Something is in the way, or not permitted.
            OutOfSpace: There is no room.
        """
        assert self._entries.get(entry.path) == entry, entry.path
        assert entry.type is EntryType.FILE, entry.type
        with self._translated(entry.path), self._parent(entry.path) as (parent_fd, name):
            flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
            is_ours = entry.path in self._created or self._left_by_us(entry.path)
            self._claim(entry.path)
            try:
                fd = os.open(name, flags | os.O_CREAT | os.O_EXCL, _MODE_FILE, dir_fd=parent_fd)
            except FileExistsError:
                if not is_ours:
                    raise
                fd = _open_again(parent_fd, name, flags)
            self._created.add(entry.path)
            try:
                os.ftruncate(fd, entry.size_bytes)
            except BaseException:
                os.close(fd)
                raise
            return fd

    def finish_file(self, entry: TreeEntry, fd: int) -> None:
        """Give a file its metadata, once its data is written; `finish` does the rest.

        Raises:
            TargetError: The system refuses.
            OutOfSpace: There is no room.
        """
        with self._translated(entry.path):
            self._metadata.apply(fd, entry)
            if self._fsync:
                os.fsync(fd)
        with self._lock:
            self._finished.add(entry.path)

    def finish(self) -> PlaceReport:
        """Do all that has to wait for the data; then the tree is as the entries say.

        Creates empty files that nobody opened.

        Raises:
            TargetError: Something is in the way, or the system refuses.
            OutOfSpace: There is no room.
        """
        entries = list(self._entries.values())
        for entry in entries:
            if entry.type is EntryType.FILE and entry.path not in self._finished:
                self._finish_late(entry)
        for entry in entries:
            if entry.type is EntryType.SYMLINK:
                with self._translated(entry.path):
                    self._make_symlink(entry)
        for entry in entries:
            if entry.type is EntryType.HARDLINK:
                with self._translated(entry.path):
                    self._make_hardlink(entry)
        for entry in reversed(entries):
            if entry.type is EntryType.DIRECTORY:
                with self._translated(entry.path):
                    self._finish_directory(entry)
        return self._metadata.report

    def _make_directory(self, parent_fd: int, name: bytes, path: bytes) -> None:
        try:
            os.mkdir(name, _MODE_DIRECTORY, dir_fd=parent_fd)
        except FileExistsError:
            if not (self._resume or self._in_place):
                raise
            self._reuse_directory(parent_fd, name)

    def _reuse_directory(self, parent_fd: int, name: bytes) -> None:
        # Fails if it is a symlink, whatever that leads to.
        flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(name, flags, dir_fd=parent_fd)
        try:
            status = os.fstat(fd)
            mode = stat.S_IMODE(status.st_mode)
            # Its final mode, if the earlier run came that far, may forbid to go on.
            is_closed = mode & _MODE_DIRECTORY != _MODE_DIRECTORY
            if self._resume and is_closed and status.st_uid == os.geteuid():
                chmod_path_fd(fd, _MODE_DIRECTORY)
        finally:
            os.close(fd)

    def _finish_late(self, entry: TreeEntry) -> None:
        with self._translated(entry.path):
            try:
                with self._parent(entry.path) as (parent_fd, name):
                    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                    fd = _open_again(parent_fd, name, flags)
            except FileNotFoundError:
                assert entry.size_bytes == 0, f"nobody wrote {show_path(entry.path)}"
                fd = self.open_file(entry)
            try:
                self.finish_file(entry, fd)
            finally:
                os.close(fd)

    def _make_symlink(self, entry: TreeEntry) -> None:
        with self._parent(entry.path) as (parent_fd, name):
            self._make_way(parent_fd, name, entry.path)
            os.symlink(entry.target, name, dir_fd=parent_fd)
            self._metadata.apply_to_symlink(parent_fd, name, entry)

    def _make_hardlink(self, entry: TreeEntry) -> None:
        with (
            self._parent(entry.target) as (target_fd, target_name),
            self._parent(entry.path) as (parent_fd, name),
        ):
            self._make_way(parent_fd, name, entry.path)
            os.link(
                target_name,
                name,
                src_dir_fd=target_fd,
                dst_dir_fd=parent_fd,
                follow_symlinks=False,
            )

    def _make_way(self, parent_fd: int, name: bytes, path: bytes) -> None:
        """Remove what an earlier run made; links are cheap to make again."""
        if self._left_by_us(path):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=parent_fd)
        self._claim(path)

    def _left_by_us(self, path: bytes) -> bool:
        """Whether what is at a path, if anything, was made by an earlier run."""
        return self._resume and (self._journal is None or self._journal.is_made(path))

    def _claim(self, path: bytes) -> None:
        if self._journal is not None and not self._journal.is_made(path):
            self._journal.mark_made(path)

    def _refuse_collisions(self) -> None:
        for entry in self._entries.values():
            if entry.type is EntryType.DIRECTORY or self._left_by_us(entry.path):
                continue
            with contextlib.suppress(OSError), self._parent(entry.path) as (parent_fd, name):
                os.stat(name, dir_fd=parent_fd, follow_symlinks=False)
                raise TargetError(
                    f"{show_path(entry.path)} exists already; nothing was written",
                    next_step="move it away, or pull into another directory",
                )

    def _finish_directory(self, entry: TreeEntry) -> None:
        fd = open_directory_below(self._root_fd, entry.path, os.O_RDONLY)
        try:
            if entry.path or not self._in_place:
                self._metadata.apply(fd, entry)
            if self._fsync:
                os.fsync(fd)
        finally:
            os.close(fd)

    def _parent(self, path: bytes) -> contextlib.AbstractContextManager[tuple[int, bytes]]:
        return parent_below(self._root_fd, path)

    @contextlib.contextmanager
    def _translated(self, path: bytes) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            _refuse(error, path)


def _open_again(parent_fd: int, name: bytes, flags: int) -> int:
    """Open a regular file that an earlier step or run made, even with its final mode."""
    try:
        fd = os.open(name, flags | os.O_NONBLOCK, dir_fd=parent_fd)
    except PermissionError:
        path_fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent_fd)
        try:
            status = os.fstat(path_fd)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                raise
            chmod_path_fd(path_fd, _MODE_FILE)
        finally:
            os.close(path_fd)
        fd = os.open(name, flags | os.O_NONBLOCK, dir_fd=parent_fd)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise FileExistsError(errno.EEXIST, "it is there and is no regular file")
    return fd


def _refuse(error: OSError, path: bytes) -> NoReturn:
    if error.errno in _NO_SPACE:
        raise OutOfSpace(
            f"no space to create {show_path(path)}: {error.strerror}",
            next_step="make room and run it again with --resume",
        ) from error
    if error.errno == errno.EEXIST:
        raise TargetError(
            f"{show_path(path)} exists already", next_step="pull into an empty directory"
        ) from error
    if error.errno in {errno.ENOTDIR, errno.ELOOP}:
        raise TargetError(
            f"something other than a directory or file is in the way of {show_path(path)}"
        ) from error
    raise TargetError(f"cannot create {show_path(path)}: {error.strerror}") from error
