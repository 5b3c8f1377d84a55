"""The directory of a store: looking at it freshly, and making its names durable.

Everything here takes keys (`snapstore.backend.layout`) and raises `OSError`; the backend
translates. A network file system may believe an old name for a minute. Opening a file asks the
server about the file, and opening a directory asks it whether the directory has changed, after
which old names in it are forgotten. Looking freshly means to do both.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING

from snapstore.backend import layout
from snapstore.errors import CapabilityMissing

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from snapstore.backend.files import FileCalls, FileStat

__all__ = ["GONE", "TRIES_MAX", "Tree", "make_folder", "make_root", "sync_folder", "tries"]

TRIES_MAX = 4
"""How often one operation looks again after ESTALE or a name that changed while it looked."""

GONE = frozenset({errno.ENOENT, errno.ESTALE})
"""What is said of a name that is not there, or of a file that somebody else has removed."""

# O_NONBLOCK: a fifo under the name of an object must not hang its reader. O_NOFOLLOW: nor may a
# symbolic link lead out of the store.
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY

_NO_FOLDER = frozenset({errno.ENOENT, errno.ENOTDIR})
_NO_FOLDER_SYNC = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS})
_SETTLED_MAX = 65_536


class Tree:
    """A store's directory and what lies below it. Thread-safe."""

    def __init__(self, root: str, files: FileCalls) -> None:
        self.root = root
        self.files = files
        # Folders whose own name is known to be durable, with those of all folders above. Outdated
        # only when somebody removes folders by hand, after which `link` says ENOENT.
        self._settled: set[str] = set()

    def path(self, key: str) -> str:
        """Where the file of a key is."""
        return f"{self.root}/{key}" if key else self.root

    # --- looking ---

    def touch_folder(self, key: str) -> None:
        """Ask the server whether the folder has changed."""
        self.close_quietly(self.files.open(self.path(key), _FOLDER_FLAGS))

    def touch_folders(self, key: str) -> bool:
        """Ask about all folders above a key, outermost first; tell whether all of them exist."""
        for folder in reversed(layout.parent_keys(key)):
            try:
                self.touch_folder(folder)
            except OSError as error:
                if error.errno in _NO_FOLDER:
                    return False
                raise
        return True

    def open(self, key: str) -> int:
        """Open an object for reading, as the server has it now; ENOENT for what is no file."""
        try:
            self.touch_folder(layout.parent_keys(key)[0])
        except OSError as error:
            # That there is no such folder may be just as old.
            if error.errno != errno.ENOENT or not self.touch_folders(key):
                raise
        fd = self.files.open(self.path(key), _READ_FLAGS)
        try:
            _require_file(self.files.fstat(fd))
        except BaseException:
            self.close_quietly(fd)
            raise
        return fd

    @contextlib.contextmanager
    def opened(self, key: str) -> Iterator[int]:
        """Open an object as `open` does, for the length of a `with` block."""
        fd = self.open(key)
        try:
            yield fd
        finally:
            self.close_quietly(fd)

    def close_quietly(self, fd: int) -> None:
        """Close what was only read, or belongs to a file that is given up anyway."""
        with contextlib.suppress(OSError):
            self.files.close(fd)

    def list_folder(self, key: str) -> Sequence[str]:
        """Names in a folder, perhaps outdated; none if there is no such folder."""
        for last in tries():
            try:
                return self.files.listdir(self.path(key))
            except OSError as error:
                if error.errno in _NO_FOLDER:
                    return ()
                if error.errno != errno.ESTALE or last:
                    raise
        raise AssertionError(key)

    def stat_listed(self, key: str) -> FileStat | None:
        """Attributes of a name from a listing, perhaps outdated; `None` if it is gone."""
        try:
            return self.files.lstat(self.path(key))
        except OSError as error:
            if error.errno in GONE:
                return None
            raise

    # --- changing ---

    def make_folders(self, key: str) -> None:
        """Make the folders above a key; the store's own directory must exist."""
        for folder in reversed(layout.parent_keys(key)[:-1]):
            if make_folder(self.files, self.path(folder)):
                self._settled.discard(folder)

    def settle(self, key: str) -> None:
        """Make the name of an object durable, and the names of all folders above it.

        Raises:
            CapabilityMissing: The file system cannot do that.
        """
        inner, *outer = layout.parent_keys(key)
        sync_folder(self.files, self.path(inner))
        settled = set()
        for folder in outer:
            if inner in self._settled:
                break
            sync_folder(self.files, self.path(folder))
            settled.add(inner)
            inner = folder
        # Last, and at once: a folder counts only with all that is above it.
        if len(self._settled) >= _SETTLED_MAX:
            self._settled.clear()
        self._settled |= settled

    def unlink(self, key: str) -> bool:
        """Remove a file; tell whether it was there, as far as the client knows."""
        try:
            self.files.unlink(self.path(key))
        except OSError as error:
            # ESTALE: somebody else removed the file, which is all that was wanted.
            if error.errno in GONE or error.errno == errno.ENOTDIR:
                return False
            raise
        return True


def tries() -> Iterator[bool]:
    """Count the tries of an operation; each item says whether it is the last."""
    return (attempt == TRIES_MAX for attempt in range(1, TRIES_MAX + 1))


def make_root(files: FileCalls, path: str) -> None:
    """Make a store's directory and what is missing above it; sync the parent of each.

    Raises:
        OSError: EEXIST or ENOTDIR if something that is no directory is in the way.
    """
    _make_chain(files, path)
    files.close(files.open(path, _FOLDER_FLAGS))
    make_folder(files, f"{path}/{layout.TEMPORARIES}")
    sync_folder(files, path)


def make_folder(files: FileCalls, path: str) -> bool:
    """Make a directory; tell whether it was missing."""
    try:
        files.mkdir(path)
    except OSError as error:
        if error.errno != errno.EEXIST:
            raise
        return False
    return True


def sync_folder(files: FileCalls, path: str) -> None:
    """Make the names in a directory durable.

    Raises:
        CapabilityMissing: The file system cannot do that.
    """
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


def _make_chain(files: FileCalls, path: str) -> None:
    parent = path.rpartition("/")[0] or "/"
    try:
        made = make_folder(files, path)
    except OSError as error:
        if error.errno != errno.ENOENT or parent == path:
            raise
        _make_chain(files, parent)
        made = make_folder(files, path)
    try:
        sync_folder(files, parent)
    except (OSError, CapabilityMissing):
        # One that was there before may well lie below a directory that we cannot read or sync.
        if made:
            raise


def _require_file(found: FileStat) -> None:
    if not found.is_file:
        raise OSError(errno.ENOENT, "something else than a file has this name")
