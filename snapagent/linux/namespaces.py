"""Namespaces of the kernel: making them, opening those of a process, and going into them.

Python has `os.unshare` and `os.setns` only from 3.12 on. Errors are `OSError`, since the small
supervisor, which loads nothing of the library, is who uses this.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
from typing import Final, NamedTuple

from snapagent.linux.cgroups import files_to_join

__all__ = [
    "CGROUP",
    "IPC",
    "MOUNTS",
    "NETWORK",
    "PIDS",
    "UTS",
    "Target",
    "detach_mount",
    "enter",
    "namespace_id",
    "open_target",
    "own_mounts",
    "own_proc",
    "set_namespace",
    "unshare",
]

MOUNTS: Final = 0x00020000
CGROUP: Final = 0x02000000
UTS: Final = 0x04000000
IPC: Final = 0x08000000
PIDS: Final = 0x20000000
NETWORK: Final = 0x40000000

ENTERED: Final = MOUNTS | NETWORK | IPC | UTS | CGROUP
"""What `enter` changes for the caller itself; the process ids are only changed for children."""

MS_NOSUID: Final = 2
MS_NODEV: Final = 4
MS_NOEXEC: Final = 8
MS_REC: Final = 0x4000
MS_PRIVATE: Final = 0x40000
MNT_DETACH: Final = 2

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(kinds: int) -> None:
    """Give the calling thread fresh namespaces of these kinds.

    With `PIDS` it is the next child that is the first process of the new one.
    """
    _check(_libc.unshare(kinds), "cannot make namespaces")


def set_namespace(fd: int, kinds: int) -> None:
    """Move the calling thread into a namespace, or with a pidfd into several of that process.

    With `PIDS` it is the next child that is in it.
    """
    _check(_libc.setns(fd, kinds), "cannot enter namespaces")


def namespace_id(pid: int, kind: str) -> str | None:
    """Return what identifies a process's namespace, such as `pid:[4026531836]`, while it lives."""
    try:
        return os.readlink(f"/proc/{pid}/ns/{kind}")
    except OSError:
        return None


def _mount(source: str, target: str, kind: str | None, flags: int) -> None:
    encoded = None if kind is None else kind.encode()
    result = _libc.mount(
        source.encode(), os.fsencode(target), encoded, ctypes.c_ulong(flags), ctypes.c_char_p(None)
    )
    _check(result, f"cannot mount at {target}")


def own_mounts() -> None:
    """Give this process its own mount namespace: what it mounts is seen nowhere else."""
    unshare(MOUNTS)
    _mount("none", "/", None, MS_REC | MS_PRIVATE)


def own_proc() -> None:
    """Mount a `/proc` of this process's own process ids, over the one that is there.

    Only after `own_mounts`, in a process that is in the fresh namespace of process ids.
    """
    _mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)


def detach_mount(path: str) -> None:
    """Take a mount away, also while something uses it."""
    _check(_libc.umount2(os.fsencode(path), MNT_DETACH), f"cannot unmount {path}")


class Target(NamedTuple):
    """A process whose namespaces are to be entered, held open: its id cannot come to mean another.

    Close both fds when done.
    """

    pidfd: int
    root_fd: int
    group_files: list[str]
    """See `cgroups.files_to_join`."""

    def close(self) -> None:
        """Let go of the process."""
        os.close(self.pidfd)
        os.close(self.root_fd)


def _check_lives(pidfd: int) -> None:
    """Raise `ProcessLookupError` if the process behind a pidfd was reaped."""
    signal.pidfd_send_signal(pidfd, 0)


def _check_user(pid: int) -> None:
    if namespace_id(pid, "user") != namespace_id(os.getpid(), "user"):
        message = f"process {pid} is in another user namespace, which is not supported"
        raise OSError(errno.EOPNOTSUPP, message)


def open_target(pid: int) -> Target:
    """Open the namespaces and the root directory of a process.

    Raises:
        OSError: there is no such process, or it is in another user namespace, which cannot be
            entered.
    """
    pidfd = os.pidfd_open(pid)
    try:
        _check_user(pid)
        group_files = files_to_join(pid)
        root_fd = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except BaseException:
        os.close(pidfd)
        raise
    # Had the process ended before, `/proc/PID` could have been that of another one.
    target = Target(pidfd, root_fd, group_files)
    try:
        _check_lives(pidfd)
    except OSError:
        target.close()
        raise
    return target


def enter(target: Target, *, ipc: bool = True) -> None:
    """Move this process, which has one thread, to where another one is, with its root directory.

    Without `ipc` it keeps its IPC namespace: CRIU captures System V memory only from outside.

    It is left with `/` as its working directory. Its own process id stays what it is:
    `set_namespace(target.pidfd, PIDS)` before a fork is what gives the child another.
    """
    set_namespace(target.pidfd, ENTERED if ipc else ENTERED & ~IPC)
    os.fchdir(target.root_fd)
    os.chroot(".")
    os.chdir("/")
