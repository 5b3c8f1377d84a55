"""Directories that only this user can have prepared, and the files in them (N7)."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from snapstore.cache.handle import Handle
from snapstore.errors import AccessDenied, PolicyRefused, UsageError
from snapstore.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["CacheDirectory", "CacheUnusable", "Occupant", "file_system_of", "unusable"]

_MOUNTS = Path("/proc/self/mountinfo")
_LARGE_PAGE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_LARGE_PAGE_BYTES = 2 * MIB
_LARGE = frozenset({"huge=always", "huge=within_size"})
"""Not `huge=advise`: nobody advises the kernel where files are written."""
_NOT_ALLOWED = frozenset({errno.EACCES, errno.EPERM})
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class CacheUnusable(AccessDenied):
    """The cache cannot be used now, such as on a full disk; whoever reads can do without it."""


class Occupant(NamedTuple):
    """A file that takes room; in the order in which files should go."""

    used_ns: int
    name: str
    size_bytes: int


class CacheDirectory:
    """A directory that is held open: whoever renames paths above it changes nothing here.

    Thread-safe. Methods raise `OSError`, once it is closed as well; names are single components.
    """

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._handle = Handle(fd)

    @classmethod
    def open(cls, path: Path, *, create: bool = False) -> Self:
        """Open a directory, or make it.

        Raises:
            PolicyRefused: Somebody else owns it or may write to it, or it is a symbolic link.
            UsageError: There is none, or something else has the name.
            AccessDenied: It cannot be opened or made: `CacheUnusable` if that is no matter of
                permissions.
        """
        path = path.absolute()
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            if create:
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(path, flags)
        except (FileNotFoundError, FileExistsError, NotADirectoryError) as error:
            _require_no_link(path)
            raise UsageError(
                f"there is no directory at {path}", next_step="make it, or name another one"
            ) from error
        except OSError as error:
            _require_no_link(path)
            raise unusable(path, error) from error
        try:
            _require_own(path, os.fstat(fd))
        except BaseException:
            os.close(fd)
            raise
        return cls(path, fd)

    def below(self, name: str) -> CacheDirectory:
        """Open a directory in this one, or make it; raises as `open` does."""
        return CacheDirectory.open(self.path / name, create=True)

    def open_file(self, name: str, *, create: bool = False, write: bool = True) -> int:
        """Open a file, which must be one; symbolic links are not followed."""
        flags = os.O_RDWR if write else os.O_RDONLY
        flags |= os.O_CREAT if create else 0
        # What is no file is refused below; a fifo must not make us wait for somebody else first.
        flags |= os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        with self._handle.used() as directory:
            fd = os.open(name, flags, 0o600, dir_fd=directory)
        try:
            _require_own_file(self.path / name, os.fstat(fd))
        except BaseException:
            os.close(fd)
            raise
        return fd

    def is_named(self, fd: int, name: str) -> bool:
        """Whether a file that is open still has its name."""
        try:
            with self._handle.used() as directory:
                found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(os.fstat(fd), found)

    def names(self) -> list[str]:
        """The names of everything in it."""
        with self._handle.used() as directory:
            return os.listdir(directory)  # noqa: PTH208 - by its descriptor

    def versions(self) -> frozenset[tuple[str, int, int]]:
        """Something that changes whenever a file in it comes, goes or is replaced."""
        return frozenset((name, about.st_ino, about.st_mtime_ns) for name, about in self._looks())

    def occupants(self, prefix: str = "") -> list[Occupant]:
        """Give the files whose names begin with `prefix`, the one that was unused longest first."""
        return sorted(
            Occupant(about.st_mtime_ns, name, about.st_blocks * 512)
            for name, about in self._looks(prefix)
            if stat.S_ISREG(about.st_mode)
        )

    def _looks(self, prefix: str = "") -> Iterator[tuple[str, os.stat_result]]:
        """Everything in it whose name begins so, but for what vanishes meanwhile."""
        with self._handle.used() as directory:
            for name in os.listdir(directory):  # noqa: PTH208 - by its descriptor
                if name.startswith(prefix):
                    with contextlib.suppress(FileNotFoundError):
                        yield name, os.stat(name, dir_fd=directory, follow_symlinks=False)

    def unlink(self, name: str) -> None:
        """Remove a file; one that is gone is success."""
        with self._handle.used() as directory, contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=directory)

    def read(self, name: str, limit_bytes: int) -> bytes:
        """Read a small file; of a longer one, one byte more than the limit."""
        with os.fdopen(self.open_file(name, write=False), "rb") as file:
            return file.read(limit_bytes + 1)

    def write(self, name: str, data: bytes, *, replace: bool) -> None:
        """Put a small file there whole.

        Raises:
            FileExistsError: There is one, and it is not to be replaced.
        """
        with self._handle.used() as directory, self._part(data) as part:
            if replace:
                os.replace(part, name, src_dir_fd=directory, dst_dir_fd=directory)
            else:
                os.link(part, name, src_dir_fd=directory, dst_dir_fd=directory)

    def free_bytes(self) -> int:
        """Room on its file system."""
        with self._handle.used() as directory:
            found = os.fstatvfs(directory)
        return found.f_bavail * found.f_frsize

    @property
    def block_bytes(self) -> int:
        """In what the file system hands out room: a page, or a huge page."""
        with self._handle.used() as directory:
            return os.fstatvfs(directory).f_bsize

    @property
    def file_system(self) -> str:
        """The type of its file system."""
        with self._handle.used() as directory:
            return file_system_of(directory)

    @property
    def large_page_bytes(self) -> int:
        """How large the pages are that its files get on tmpfs, by how it was mounted; 0 if small.

        On hugetlbfs, where no file has others, they are its blocks.
        """
        with self._handle.used() as directory:
            kind, options = _mount_of(directory)
        if kind != "tmpfs" or not _LARGE.intersection(options):
            return 0
        try:
            return int(_LARGE_PAGE.read_text("ascii"))
        except (OSError, ValueError):
            return _LARGE_PAGE_BYTES

    def close(self) -> None:
        """Let go of it, once nobody uses it. Idempotent."""
        self._handle.close()

    @contextlib.contextmanager
    def _part(self, data: bytes) -> Iterator[str]:
        name = f".part-{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with self._handle.used() as directory:
            fd = os.open(name, flags, 0o600, dir_fd=directory)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(fd)
            yield name
        finally:
            self.unlink(name)


def unusable(path: Path, error: OSError) -> AccessDenied:
    """Make the error that says why a cache cannot be opened."""
    kind = AccessDenied if error.errno in _NOT_ALLOWED else CacheUnusable
    return kind(
        f"cannot use {path} as a cache: {error.strerror or error}",
        next_step="mend that, or go on without it: all that it has is in the stores as well",
    )


def file_system_of(fd: int) -> str:
    """Look up the type of the file system that something lies on; empty if nobody says."""
    kind, _ = _mount_of(fd)
    return kind


def _mount_of(fd: int) -> tuple[str, list[str]]:
    """The type of a file system and the options that it has wherever it is mounted."""
    device = os.fstat(fd).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "", []
    for line in lines:
        before, _, after = line.partition(" - ")
        if before.split()[2] == wanted:
            kind, *rest = after.split()
            return kind, rest[-1].split(",") if rest else []
    return "", []


def _require_own_file(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        raise OSError(f"{path} is no file of this user")


def _require_no_link(path: Path) -> None:
    if path.is_symlink():
        raise _refused(path, "is a symbolic link")


def _require_own(path: Path, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise _refused(path, f"belongs to user {found.st_uid}")
    if found.st_mode & _WRITABLE_BY_OTHERS:
        raise _refused(path, f"can be written by others (mode {found.st_mode & 0o7777:04o})")


def _refused(path: Path, why: str) -> PolicyRefused:
    return PolicyRefused(
        f"{path} {why}, so anybody may have prepared what is cached there",
        next_step="give the cache a directory of its own with mode 0700",
    )
