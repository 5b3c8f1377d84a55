"""Giving bytes a name that did not exist: a finished temporary file, then a hard link.

Errors of `fsync` and `close` are believed: the bytes then count as lost, the file is dropped, and
nothing is synced a second time through the same descriptor, since Linux reports a failed
write-back once and then calls the file clean. A `link` that reports an error may still have
happened, because its reply was lost: what now has the name decides.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import re
import secrets
from typing import TYPE_CHECKING

from snapstore.backend import layout
from snapstore.backend.base import CONTENT_NAMED, ObjectKind
from snapstore.backend.direct import write_direct
from snapstore.backend.files import FileStat, read_full, translate_os_error
from snapstore.backend.posix_tree import GONE, Tree, tries
from snapstore.errors import BackendError, CapabilityMissing, ObjectExists, TransientBackendError
from snapstore.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = [
    "Temporary",
    "create_temporary",
    "finish_temporary",
    "new_temporary_key",
    "open_temporary",
    "publish",
    "sweep",
    "temporary",
    "translate_write_error",
]

_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
_REOPEN_FLAGS = os.O_WRONLY | os.O_NOFOLLOW
_TEMPORARY = re.compile(r"put-[0-9a-f]{32}")
_NO_LINKS = frozenset(
    {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EXDEV, errno.EMLINK}
)
_SURELY_REFUSED = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES})
_NO_FILE = frozenset({errno.ELOOP, errno.ENXIO})


@dataclasses.dataclass(frozen=True, slots=True)
class Temporary:
    """A finished, durable file in `tmp/` and what it holds.

    Attributes:
        key: Where it is.
        stat: Of the complete file.
        views: Its bytes; not needed for an object that is named by its content.
    """

    key: str
    stat: FileStat
    views: Sequence[memoryview]


@contextlib.contextmanager
def temporary(tree: Tree, views: Sequence[memoryview]) -> Iterator[Temporary]:
    """Write a temporary file and remove its name at the end, whatever happened.

    A name that cannot be removed is garbage for `sweep`; it changes nothing about the result.
    """
    key = new_temporary_key()
    fd = create_temporary(tree, key)
    try:
        yield Temporary(key, _write(tree, fd, views), views)
    finally:
        with contextlib.suppress(OSError):
            tree.files.unlink(tree.path(key))


def publish(tree: Tree, kind: ObjectKind, key: str, written: Temporary) -> None:
    """Give the finished file its final name, or find that it is there already.

    Raises:
        ObjectExists: Something else has the name.
        CapabilityMissing: The file system has no hard links.
        OSError: Others.
    """
    for last in tries():
        try:
            tree.files.link(tree.path(written.key), tree.path(key))
        except OSError as error:
            if not _is_published(tree, error, kind, key, written):
                if last:
                    raise TransientBackendError(f"link {key}: {error.strerror}") from error
                continue
        return


def sweep(tree: Tree, older_than_s: float) -> int:
    """Remove files of ours whose last write is that long ago by the file server's clock."""
    with temporary(tree, []) as probe:
        limit_ns = probe.stat.modified_ns - int(older_than_s * 1e9)
        names = tree.files.listdir(tree.path(layout.TEMPORARIES))
        keys = [f"{layout.TEMPORARIES}/{name}" for name in names if _TEMPORARY.fullmatch(name)]
        return sum(_remove_if_older(tree, key, limit_ns) for key in keys if key != probe.key)


def translate_write_error(error: OSError, doing: str) -> BackendError:
    """Say what went wrong while an object was written; a file that is missing was our own."""
    if error.errno == errno.ENOENT:
        return TransientBackendError(f"{doing}: the store's directory went away")
    return translate_os_error(error, doing)


def new_temporary_key() -> str:
    """Choose a key for a temporary file that no other writer has."""
    return f"{layout.TEMPORARIES}/put-{secrets.token_hex(16)}"


def create_temporary(tree: Tree, key: str) -> int:
    """Make a temporary file and open it for writing; it must not exist."""
    try:
        return tree.files.open(tree.path(key), _CREATE_FLAGS)
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise
    tree.make_folders(key)
    return tree.files.open(tree.path(key), _CREATE_FLAGS)


def open_temporary(tree: Tree, key: str) -> int:
    """Open a temporary file once more for writing."""
    return tree.files.open(tree.path(key), _REOPEN_FLAGS)


def _write(tree: Tree, fd: int, views: Sequence[memoryview]) -> FileStat:
    """Write, sync and close a new file; its attributes are those of a complete one."""
    try:
        write_direct(tree.files, fd, views)
    except BaseException:
        tree.close_quietly(fd)
        raise
    return finish_temporary(tree, fd, sum(view.nbytes for view in views))


def finish_temporary(tree: Tree, fd: int, size_bytes: int) -> FileStat:
    """Sync and close a file that was written; its attributes are those of a complete one.

    Raises:
        OSError: Its bytes are lost, or it has not as many.
    """
    try:
        tree.files.fsync(fd)
        found = tree.files.fstat(fd)
    except BaseException:
        tree.close_quietly(fd)
        raise
    tree.files.close(fd)
    if found.size_bytes != size_bytes:
        raise OSError(errno.EIO, f"{found.size_bytes} bytes stored of {size_bytes}")
    return found


def _is_published(
    tree: Tree, error: OSError, kind: ObjectKind, key: str, written: Temporary
) -> bool:
    """Decide what a `link` that failed has done; `False`: nothing, and it may work now."""
    _raise_if_refused(error, kind, key)
    if error.errno == errno.ENOENT:
        tree.make_folders(key)
        return False
    same = _compare(tree, kind, key, written)
    if same is False:
        raise ObjectExists(f"{key} exists with other content") from error
    if same is None and error.errno not in {errno.EEXIST, errno.ESTALE}:
        # It did not happen so far, or the server is still at it: only a new try can tell.
        raise error
    return same is True


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


def _compare(tree: Tree, kind: ObjectKind, key: str, written: Temporary) -> bool | None:
    """Whether the object is what we wrote; `None` if there is no such file.

    Our own file under its new name means that `link` happened and its reply was lost.
    """
    try:
        with tree.opened(key) as fd:
            found = tree.files.fstat(fd)
            if found.size_bytes != written.stat.size_bytes:
                return False
            if found.identity == written.stat.identity or kind in CONTENT_NAMED:
                return True
            return _has_bytes(tree, fd, written.views)
    except OSError as error:
        if error.errno not in GONE | _NO_FILE:
            raise
    # Either the name is free, or something else than a file has it.
    listed = tree.stat_listed(key)
    return None if listed is None or listed.is_file else False


def _has_bytes(tree: Tree, fd: int, views: Sequence[memoryview]) -> bool:
    buffer = memoryview(bytearray(MIB))
    offset = 0
    for view in views:
        for start in range(0, view.nbytes, MIB):
            ours = view[start : start + MIB]
            theirs = buffer[: ours.nbytes]
            if read_full(tree.files, fd, offset, theirs) != ours.nbytes:
                return False
            # As bytes, since comparing two memoryviews goes byte by byte.
            if bytes(ours) != bytes(theirs):
                return False
            offset += ours.nbytes
    return True


def _remove_if_older(tree: Tree, key: str, limit_ns: int) -> bool:
    found = tree.stat_listed(key)
    if found is None or not found.is_file or found.modified_ns > limit_ns:
        return False
    return tree.unlink(key)
