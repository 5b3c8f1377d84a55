"""The operating system's file calls, as one small object that a test can replace.

Nothing above this module calls `os` for files of a store, so a double can model a network file
system, trace the order of calls, or stop the process between any two of them. Calls raise
`OSError`, as the system does; `translate_os_error` is the one place that turns it into ours.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import os
import stat
from typing import TYPE_CHECKING, Protocol

from snapstore.errors import (
    AccessDenied,
    BackendError,
    ObjectNotFound,
    OutOfSpace,
    TransientBackendError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from snapstore.units import BytesLike

__all__ = [
    "IOV_MAX",
    "FileCalls",
    "FileStat",
    "OsFileCalls",
    "as_views",
    "drop_written",
    "read_full",
    "translate_os_error",
    "write_all",
]

IOV_MAX = min(1024, os.sysconf("SC_IOV_MAX"))

_NOT_FOUND = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO})
_DENIED = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
# EIO is here because a soft NFS mount reports a server that did not answer as EIO, because every
# operation of the port may be repeated from its start, and because whoever repeats is bounded: a
# disk that is really broken costs a few tries and then shows its own message.
_TRANSIENT = frozenset(
    {
        errno.EAGAIN,
        errno.EBUSY,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.EINTR,
        errno.EIO,
        errno.EMFILE,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.ENFILE,
        errno.ENOLCK,
        errno.ENOMEM,
        errno.ESTALE,
        errno.ETIMEDOUT,
    }
)


@dataclasses.dataclass(frozen=True, slots=True)
class FileStat:
    """The attributes of a file that the store looks at.

    Attributes:
        identity: Device and inode: equal for two names of one file.
        is_file: Whether it is a regular file.
        is_directory: Whether it is a directory.
        size_bytes: Length.
        modified_ns: Time of the last write by the file server's clock.
    """

    identity: tuple[int, int]
    is_file: bool
    is_directory: bool
    size_bytes: int
    modified_ns: int


class FileCalls(Protocol):
    """File system calls with their POSIX meaning; thread-safe. All raise `OSError`."""

    def open(self, path: str, flags: int) -> int:
        """Open or create (mode 0644 under the umask) and return a descriptor."""
        ...

    def close(self, fd: int) -> None:
        """Give the descriptor up; an error means that written bytes may be lost."""
        ...

    def pread(self, fd: int, into: memoryview, offset: int) -> int:
        """Fill a prefix of `into`; 0 at the end of the file."""
        ...

    def writev(self, fd: int, pieces: Sequence[memoryview]) -> int:
        """Write a prefix of the pieces at the descriptor's position."""
        ...

    def pwritev(self, fd: int, pieces: Sequence[memoryview], offset: int) -> int:
        """Write a prefix of the pieces at an offset; the descriptor's position stays."""
        ...

    def set_direct(self, fd: int, *, direct: bool) -> bool:
        """Let reads and writes bypass the page cache, or no longer; say whether they now do.

        What bypasses it must be aligned (`snapstore.backend.direct`), else it fails with EINVAL.
        """
        ...

    def fsync(self, fd: int) -> None:
        """Make a file or directory durable; after an error its bytes are lost."""
        ...

    def fstat(self, fd: int) -> FileStat:
        """Attributes of an open file."""
        ...

    def lstat(self, path: str) -> FileStat:
        """Attributes of a name, without following a symbolic link."""
        ...

    def link(self, source: str, target: str) -> None:
        """Give a file a second name, which must not exist."""
        ...

    def unlink(self, path: str) -> None:
        """Remove a name of a file."""
        ...

    def mkdir(self, path: str) -> None:
        """Make a directory (mode 0777 under the umask)."""
        ...

    def listdir(self, path: str) -> list[str]:
        """Names in a directory, without `.` and `..`."""
        ...

    def is_readonly(self, path: str) -> bool:
        """Whether the file system is mounted read-only."""
        ...


class OsFileCalls:
    """The real calls. Each releases the GIL for as long as the system works."""

    def open(self, path: str, flags: int) -> int:
        """See `FileCalls.open`."""
        # Not 0444: under `all_squash` the kernel demands write access to what we hard-link.
        return os.open(path, flags | os.O_CLOEXEC, 0o644)

    def close(self, fd: int) -> None:
        """See `FileCalls.close`."""
        os.close(fd)

    def pread(self, fd: int, into: memoryview, offset: int) -> int:
        """See `FileCalls.pread`."""
        return os.preadv(fd, [into], offset)

    def writev(self, fd: int, pieces: Sequence[memoryview]) -> int:
        """See `FileCalls.writev`."""
        return os.writev(fd, pieces)

    def pwritev(self, fd: int, pieces: Sequence[memoryview], offset: int) -> int:
        """See `FileCalls.pwritev`."""
        return os.pwritev(fd, pieces, offset)

    def set_direct(self, fd: int, *, direct: bool) -> bool:
        """See `FileCalls.set_direct`."""
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        wanted = flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT
        try:
            fcntl.fcntl(fd, fcntl.F_SETFL, wanted)
        except OSError as error:
            if direct and error.errno == errno.EINVAL:  # not on this file system
                return False
            raise
        return direct

    def fsync(self, fd: int) -> None:
        """See `FileCalls.fsync`."""
        os.fsync(fd)

    def fstat(self, fd: int) -> FileStat:
        """See `FileCalls.fstat`."""
        return _file_stat(os.fstat(fd))

    def lstat(self, path: str) -> FileStat:
        """See `FileCalls.lstat`."""
        return _file_stat(os.lstat(path))

    def link(self, source: str, target: str) -> None:
        """See `FileCalls.link`."""
        os.link(source, target)

    def unlink(self, path: str) -> None:
        """See `FileCalls.unlink`."""
        os.unlink(path)

    def mkdir(self, path: str) -> None:
        """See `FileCalls.mkdir`."""
        os.mkdir(path)

    def listdir(self, path: str) -> list[str]:
        """See `FileCalls.listdir`."""
        return os.listdir(path)

    def is_readonly(self, path: str) -> bool:
        """See `FileCalls.is_readonly`."""
        return bool(os.statvfs(path).f_flag & os.ST_RDONLY)


def _file_stat(result: os.stat_result) -> FileStat:
    return FileStat(
        identity=(result.st_dev, result.st_ino),
        is_file=stat.S_ISREG(result.st_mode),
        is_directory=stat.S_ISDIR(result.st_mode),
        size_bytes=result.st_size,
        modified_ns=result.st_mtime_ns,
    )


def translate_os_error(error: OSError, doing: str) -> BackendError:
    """Choose the error of ours that says who must act; raise it `from` the given one."""
    number = error.errno
    message = f"{doing}: {error.strerror or error}"
    if number in _NOT_FOUND:
        return ObjectNotFound(message)
    if number in _DENIED:
        return AccessDenied(message, next_step="check the owner, mode and mount of the store")
    if number in _FULL:
        return OutOfSpace(message, next_step="make room or raise the quota, then run it again")
    if number in (errno.EMFILE, errno.ENFILE):
        return TransientBackendError(message, next_step="raise the limit of open files")
    if number in _TRANSIENT:
        return TransientBackendError(message)
    return BackendError(message)


def as_views(pieces: Sequence[BytesLike]) -> list[memoryview]:
    """View each piece as plain bytes, without a copy, and leave the empty ones out."""
    views = (memoryview(piece) for piece in pieces)
    return [view if view.format == "B" else view.cast("B") for view in views if view.nbytes]


def write_all(files: FileCalls, fd: int, views: Sequence[memoryview]) -> None:
    """Write all bytes of all views in as few calls as the system allows."""
    start = 0
    while start < len(views):
        batch = list(views[start : start + IOV_MAX])
        start += len(batch)
        while batch:
            drop_written(batch, files.writev(fd, batch))


def drop_written(views: list[memoryview], written: int) -> None:
    """Leave what a call of the system that took so many bytes has not written yet.

    Raises:
        OSError: It took none.
    """
    if written == 0:
        raise OSError(errno.EIO, "the file system took no bytes and gave no reason")
    while views and written >= views[0].nbytes:
        written -= views.pop(0).nbytes
    if views and written:
        views[0] = views[0][written:]


def read_full(files: FileCalls, fd: int, offset: int, into: memoryview) -> int:
    """Fill `into` from `offset` on and return how many bytes there were."""
    done = 0
    while done < into.nbytes:
        count = files.pread(fd, into[done:], offset + done)
        if count == 0:
            break
        done += count
    return done
