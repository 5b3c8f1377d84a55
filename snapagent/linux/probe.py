"""Look at another process's sockets, and try what the kernel allows: the system calls for that."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import threading
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["in_network_of", "open_in_root", "take_descriptor", "userfaultfd_error"]

T = TypeVar("T")

# The same numbers on every architecture that has them, except where noted.
_OPENAT2 = 437
_PIDFD_GETFD = 438
_USERFAULTFD = {"x86_64": 323}
_USERFAULTFD_GENERIC = 282
_CLONE_NEWNET = 0x40000000
_RESOLVE_IN_ROOT = 0x10

_libc = ctypes.CDLL(None, use_errno=True)


def _error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")


def take_descriptor(pidfd: int, fd: int) -> int:
    """Duplicate a descriptor of another process into this one; the caller closes it.

    Raises:
        OSError: The process or the descriptor is gone (ESRCH, EBADF), or it is not allowed.
    """
    result = int(_libc.syscall(_PIDFD_GETFD, pidfd, fd, 0))
    if result < 0:
        raise _error("pidfd_getfd")
    return result


def open_in_root(root: int, path: bytes, flags: int) -> int:
    """Open a path as a process would whose root directory is `root`; the caller closes it.

    Absolute symbolic links lead to where they lead for that process.

    Raises:
        OSError: There is no such path, or it cannot be opened.
    """
    how = struct.pack("=QQQ", flags | os.O_CLOEXEC, 0, _RESOLVE_IN_ROOT)
    result = int(_libc.syscall(_OPENAT2, root, path, how, len(how)))
    if result < 0:
        raise _error("openat2")
    return result


def userfaultfd_error() -> int:
    """Make a userfaultfd that also sees faults inside the kernel, as CRIU does, and close it.

    Returns:
        0, or the error number with which the kernel refuses.
    """
    number = _USERFAULTFD.get(os.uname().machine, _USERFAULTFD_GENERIC)
    result = int(_libc.syscall(number, os.O_CLOEXEC | os.O_NONBLOCK))
    if result < 0:
        return ctypes.get_errno()
    os.close(result)
    return 0


def _enter(network: int) -> None:
    if _libc.setns(network, _CLONE_NEWNET) != 0:
        raise _error("setns")


def in_network_of(pid: int, call: Callable[[], T]) -> T:
    """Call something in the network namespace of a process, on a thread of its own if need be.

    What is called sees its network in `/proc/thread-self/net`, and in the sockets it makes.

    Raises:
        OSError: The process is gone, or entering its namespace is not allowed.
    """
    here = Path("/proc/thread-self/ns/net").stat()
    if Path(f"/proc/{pid}/ns/net").stat().st_ino == here.st_ino:
        # Entering even the namespace that one is in costs ten milliseconds.
        return call()
    results: list[T] = []
    errors: list[BaseException] = []

    def run(namespace: int) -> None:
        try:
            _enter(namespace)
            results.append(call())
        except BaseException as error:  # noqa: BLE001 - raised again on the thread that asked
            errors.append(error)

    namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        # The thread ends with the call, and with it its being elsewhere.
        thread = threading.Thread(target=run, args=(namespace,), name="in-network")
        thread.start()
        thread.join()
    finally:
        os.close(namespace)
    if errors:
        raise errors[0]
    if not results:
        raise OSError(errno.ECANCELED, "the thread ended early")
    return results[0]
