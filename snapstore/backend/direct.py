"""Reading and writing past the page cache: large objects are moved once and read rarely.

Packs are written and read in long aligned runs. Through the page cache that costs a copy and fresh
pages, about a second of processor time per GB (`format_spec/decisions/0005-posix.md`), and pushes
out what the machine's own work has there. The system wants address, offset and length of such a
transfer aligned; where it refuses all the same, the page cache is used.
"""

from __future__ import annotations

import contextlib
import errno
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from snapstore.backend.files import IOV_MAX, FileCalls, drop_written, write_all
from snapstore.units import MIB, PAGE_BYTES, align_up

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "PlacedWriter",
    "copy_bytes",
    "page_aligned",
    "read_aligned",
    "takes_unaligned",
    "write_direct",
]

_WRITE_BYTES_MIN = 1 * MIB
"""Less is not worth two system calls, and is likely to be read again soon."""

_BOUNCE_BYTES = 1 * MIB

_NOT_DIRECT = frozenset({errno.EINVAL, errno.EFAULT})
"""What is not aligned, or not as the device wants it; and memory of a kind that none can read."""


def page_aligned(size_bytes: int) -> npt.NDArray[np.uint8]:
    """Make a buffer that the system can move past the page cache; its content is undefined."""
    room = np.empty(size_bytes + PAGE_BYTES, np.uint8)
    skip = -room.ctypes.data % PAGE_BYTES
    return room[skip : skip + size_bytes]


def copy_bytes(into: memoryview, data: memoryview) -> None:
    """Copy equally long bytes; `into[:] = data` would hold the GIL for the whole copy."""
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(data, np.uint8))


def takes_unaligned(files: FileCalls, fd: int) -> bool:
    """Tell whether what bypasses the page cache may lie anywhere, as in memory and over NFS.

    A file without a second byte does not show it, and counts as one that has to be aligned.
    """
    try:
        return files.pread(fd, page_aligned(2).data[1:], 1) == 1
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False


def write_direct(files: FileCalls, fd: int, views: Sequence[memoryview]) -> None:
    """Write all bytes of all views; a long aligned beginning goes past the page cache.

    The descriptor must be at offset 0 of a new file; afterwards it uses the page cache.
    """
    aligned = _aligned_bytes(views[0]) if views else 0
    if aligned < _WRITE_BYTES_MIN or not files.set_direct(fd, direct=True):
        write_all(files, fd, views)
        return
    body = views[0][:aligned]
    done = 0
    # EINVAL: some file system or device wants more than pages; the rest goes the common way.
    with contextlib.suppress(_Refused):
        while done < aligned:
            done += _or_refused(files, fd, body[done:])
    files.set_direct(fd, direct=False)
    rest = [views[0][done:], *views[1:]]
    write_all(files, fd, [view for view in rest if view.nbytes])


class PlacedWriter:
    """Writes to one file at any places; what is long and aligned goes past the page cache.

    The descriptor is used by nobody else meanwhile. One thread at a time.
    """

    def __init__(self, files: FileCalls, fd: int) -> None:
        self.fd = fd
        self._files = files
        self._is_direct = False
        self._may_be_direct = True

    def write(self, offset: int, pieces: Sequence[memoryview]) -> None:
        """Write all bytes of all pieces, one after the other.

        Raises:
            OSError: They could not be written; a beginning of them may have been.
        """
        is_aligned = offset % PAGE_BYTES == 0 and all(map(_is_aligned, pieces))
        # For less it may stay as it was: many file systems take that as well.
        if sum(piece.nbytes for piece in pieces) >= _WRITE_BYTES_MIN:
            self._set_direct(direct=is_aligned)
        left = [piece for piece in pieces if piece.nbytes]
        while left:
            try:
                written = self._files.pwritev(self.fd, left[:IOV_MAX], offset)
            except OSError as error:
                if error.errno not in _NOT_DIRECT or not self._is_direct:
                    raise
                self._may_be_direct = not is_aligned
                self._set_direct(direct=False)
                continue
            drop_written(left, written)
            offset += written

    def _set_direct(self, *, direct: bool) -> None:
        if direct != self._is_direct and (self._may_be_direct or not direct):
            self._is_direct = self._files.set_direct(self.fd, direct=direct)
            self._may_be_direct = self._may_be_direct and self._is_direct == direct


def read_aligned(files: FileCalls, fd: int, offset: int, into: memoryview) -> int:
    """Fill `into` from `offset` on and return how many bytes there were.

    Works on any descriptor; one that bypasses the page cache gets aligned requests only. A range
    that is aligned itself goes straight into the buffer, another through one of our own.
    """
    done = 0
    if offset % PAGE_BYTES == 0:
        aligned = _aligned_bytes(into)
        done = _fill(files, fd, offset, into[:aligned])
        if done < aligned:
            return done
    if done == into.nbytes:
        return done
    bounce = page_aligned(align_up(min(into.nbytes - done, _BOUNCE_BYTES), PAGE_BYTES) + PAGE_BYTES)
    while done < into.nbytes:
        wanted = min(into.nbytes - done, _BOUNCE_BYTES)
        part = into[done : done + wanted]
        count = _read_through(bounce.data, files, fd, offset + done, part)
        done += count
        if count < wanted:
            break
    return done


class _Refused(Exception):
    """The system does not take this transfer past the page cache."""


def _or_refused(files: FileCalls, fd: int, data: memoryview) -> int:
    try:
        written = files.writev(fd, [data])
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise _Refused from error
        raise
    if written == 0:
        raise OSError(errno.EIO, "the file system took no bytes and gave no reason")
    return written


def _pread(files: FileCalls, fd: int, into: memoryview, offset: int) -> int:
    try:
        return files.pread(fd, into, offset)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    # Others may be using the descriptor: they go through the page cache as well from now on.
    files.set_direct(fd, direct=False)
    return files.pread(fd, into, offset)


def _read_through(
    bounce: memoryview, files: FileCalls, fd: int, offset: int, into: memoryview
) -> int:
    """Read an unaligned range; fewer bytes only where the file ends."""
    begin = offset - offset % PAGE_BYTES
    length = align_up(offset + into.nbytes, PAGE_BYTES) - begin
    count = _fill(files, fd, begin, bounce[:length]) - (offset - begin)
    got = max(0, min(count, into.nbytes))
    copy_bytes(into[:got], bounce[offset - begin : offset - begin + got])
    return got


def _fill(files: FileCalls, fd: int, offset: int, into: memoryview) -> int:
    done = 0
    while done < into.nbytes:
        count = _pread(files, fd, into[done:], offset + done)
        if count == 0:
            break
        done += count
    return done


def _is_aligned(view: memoryview) -> bool:
    return view.nbytes % PAGE_BYTES == 0 and _aligned_bytes(view) == view.nbytes


def _aligned_bytes(view: memoryview) -> int:
    """How many bytes at the beginning of a view can be moved past the page cache."""
    address = np.frombuffer(view, np.uint8).ctypes.data
    return view.nbytes - view.nbytes % PAGE_BYTES if address % PAGE_BYTES == 0 else 0
