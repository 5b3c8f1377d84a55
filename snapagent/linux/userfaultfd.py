"""Userfaultfds: their messages, and the calls that fill the memory of another process.

Results of calls are values, not exceptions: whoever fills memory of a living process meets most of
these errors every day, and each means something else. All calls release the interpreter lock:
`fcntl.ioctl` does so for arguments of at most 1024 bytes.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import fcntl
import functools
import mmap
import os
import platform
import socket
import struct
from pathlib import Path
from typing import NamedTuple

__all__ = [
    "GONE",
    "CopyResult",
    "Event",
    "Feature",
    "Message",
    "address_of",
    "copy_pages",
    "enable",
    "has_ended",
    "open_userfaultfd",
    "read_messages",
    "receive",
    "register_missing",
    "unregister",
    "wake",
    "zero_pages",
]


GONE = frozenset({errno.ESRCH, errno.ENOSPC})
"""Errors that say that the process has ended."""

_PROT_NONE = 0

_SYSCALL_NUMBERS = {"x86_64": 323, "aarch64": 282}

_UFFD_API = 0xAA
_REGISTER_MODE_MISSING = 1

_IOCTL_API = 0xC018AA3F
_IOCTL_REGISTER = 0xC020AA00
_IOCTL_UNREGISTER = 0x8010AA01
_IOCTL_WAKE = 0x8010AA02
_IOCTL_COPY = 0xC028AA03
_IOCTL_ZEROPAGE = 0xC020AA04

_API = struct.Struct("=QQQ")  # api, features, ioctls
_REGISTER = struct.Struct("=QQQQ")  # start, length, mode, ioctls
_RANGE = struct.Struct("=QQ")  # start, length
_COPY = struct.Struct("=QQQQq")  # destination, source, length, mode, copied
_ZEROPAGE = struct.Struct("=QQQq")  # start, length, mode, zeroed
_DONE = struct.Struct("=q")

_MESSAGE = struct.Struct("=B7xQQQ")
_MESSAGES_MAX = 32

_DESCRIPTOR = struct.Struct("=i")
_DESCRIPTORS_MAX = 8


class Event(enum.IntEnum):
    """What a message tells of."""

    PAGEFAULT = 0x12
    FORK = 0x13
    REMAP = 0x14
    REMOVE = 0x15
    UNMAP = 0x16


class Feature(enum.IntFlag):
    """What a userfaultfd is to tell of beside faults."""

    FORK = 1 << 1
    REMAP = 1 << 2
    REMOVE = 1 << 3
    UNMAP = 1 << 6


class Message(NamedTuple):
    """One message of the kernel.

    Attributes:
        event: What happened; its number is kept if it is unknown here.
        first: FORK: the descriptor of the child's userfaultfd, which is open in this process
            from now on. REMAP: the old address. REMOVE and UNMAP: the start. PAGEFAULT: flags.
        second: REMAP: the new address. REMOVE and UNMAP: the end. PAGEFAULT: the address.
        third: REMAP: the length.
    """

    event: int
    first: int
    second: int
    third: int


class CopyResult(NamedTuple):
    """How a call to fill memory went.

    Attributes:
        done_bytes: How many bytes from the start on are now there.
        error: An `errno`, 0 if all is done. With EEXIST the page behind the done bytes is there
            already; with ENOENT no one mapping that the descriptor watches holds all of the
            range; with EAGAIN an event waits to be read, or only a part was done; with one
            of `GONE` the process is.
    """

    done_bytes: int
    error: int


def receive(connection: socket.socket) -> int:
    """Receive one byte and one userfaultfd with it; returns that, not blocking, closed on exec.

    Raises:
        ValueError: Something else came; nothing of it is left open.
        OSError: The connection broke.
    """
    room = socket.CMSG_SPACE(_DESCRIPTORS_MAX * _DESCRIPTOR.size)
    data, ancillary, flags, _ = connection.recvmsg(1, room, socket.MSG_CMSG_CLOEXEC)
    received = [
        fd
        for level, kind, content in ancillary
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        for (fd,) in _DESCRIPTOR.iter_unpack(content[: len(content) & -_DESCRIPTOR.size])
    ]
    if len(data) == 1 and len(received) == 1 and not flags & socket.MSG_CTRUNC:
        fd: int = received[0]
        if str(Path(f"/proc/self/fd/{fd}").readlink()) == "anon_inode:[userfaultfd]":
            os.set_blocking(fd, False)
            return fd
    for fd in received:
        os.close(fd)
    raise ValueError(f"{len(data)} bytes with {len(received)} descriptors, not one userfaultfd")


def read_messages(fd: int) -> list[Message]:
    """Read what there is to tell, faults first; nothing if there is nothing.

    Whoever waits for an event, such as the thread that forks, goes on at once. Those who wait for
    a page go on when they get one.

    Raises:
        OSError: The descriptor cannot be read, or there is no room for that of a child.
    """
    try:
        data = os.read(fd, _MESSAGE.size * _MESSAGES_MAX)
    except BlockingIOError:
        return []
    return [_message(*fields) for fields in _MESSAGE.iter_unpack(data)]


def _message(event: int, first: int, second: int, third: int) -> Message:
    # The kernel leaves what is behind the 32 bits of a descriptor as it was.
    return Message(event, first & 0xFFFFFFFF if event == Event.FORK else first, second, third)


def copy_pages(fd: int, address: int, source: int, length: int) -> CopyResult:
    """Put a copy of this process' memory at `source` where pages are missing, and wake who waits.

    Pages that are there stay as they are. All of the range must be in one mapping.
    """
    argument = bytearray(_COPY.pack(address, source, length, 0, 0))
    return _fill(fd, _IOCTL_COPY, argument, _COPY.size - _DONE.size, length)


def zero_pages(fd: int, address: int, length: int) -> CopyResult:
    """Put zeros where pages are missing, and wake who waits; like `copy_pages` otherwise."""
    argument = bytearray(_ZEROPAGE.pack(address, length, 0, 0))
    return _fill(fd, _IOCTL_ZEROPAGE, argument, _ZEROPAGE.size - _DONE.size, length)


def _fill(fd: int, code: int, argument: bytearray, done_at: int, length: int) -> CopyResult:
    error = _call(fd, code, argument)
    if not error:
        return CopyResult(length, 0)
    # How much was done; the negated error if nothing was; 0 if the call was refused before.
    (done,) = _DONE.unpack_from(argument, done_at)
    return CopyResult(max(done, 0), error)


def wake(fd: int, address: int, length: int) -> int:
    """Let those who wait for pages of a range try again; returns an `errno` or 0."""
    return _call(fd, _IOCTL_WAKE, bytearray(_RANGE.pack(address, length)))


def has_ended(fd: int) -> bool:
    """Tell whether the process whose memory a descriptor watches is gone.

    Nothing else tells: such a descriptor stays as it is when its process ends.
    """
    # Were there something at that address, there still is nothing to copy from.
    return copy_pages(fd, 1 << 20, _nothing(), mmap.PAGESIZE).error in GONE


@functools.cache
def _nothing() -> int:
    """Return the address of a page that cannot be read; it is never given back."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address: int = libc.mmap(None, mmap.PAGESIZE, _PROT_NONE, flags, -1, 0)
    if address == ctypes.c_size_t(-1).value:
        raise OSError(ctypes.get_errno(), "cannot map a page")
    return address


def _call(fd: int, code: int, argument: bytearray) -> int:
    try:
        fcntl.ioctl(fd, code, argument, True)  # noqa: FBT003 - the one way to get results back
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def address_of(buffer: memoryview) -> int:
    """Return where in memory a writable buffer begins; it must stay alive meanwhile."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def open_userfaultfd() -> int:
    """Make a descriptor for this process' own memory, closed on exec, that never blocks.

    Raises:
        OSError: The kernel has no such thing, or this process may not use it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    number = _SYSCALL_NUMBERS.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"userfaultfd is not known on {platform.machine()}")
    fd = int(libc.syscall(number, os.O_CLOEXEC | os.O_NONBLOCK))
    if fd < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"userfaultfd: {os.strerror(code)}")
    return fd


def enable(fd: int, features: Feature) -> int:
    """Tell the kernel what a new descriptor is to tell of; returns an `errno` or 0."""
    return _call(fd, _IOCTL_API, bytearray(_API.pack(_UFFD_API, features, 0)))


def register_missing(fd: int, address: int, length: int) -> int:
    """Watch a range of mappings for missing pages; returns an `errno` or 0."""
    argument = bytearray(_REGISTER.pack(address, length, _REGISTER_MODE_MISSING, 0))
    return _call(fd, _IOCTL_REGISTER, argument)


def unregister(fd: int, address: int, length: int) -> int:
    """Watch a range no more; returns an `errno` or 0.

    Pages that are missing there are zeros from then on, which nobody is asked for, and whoever
    waits for one goes on. Of mappings that cannot be watched the kernel says EINVAL.
    """
    return _call(fd, _IOCTL_UNREGISTER, bytearray(_RANGE.pack(address, length)))
