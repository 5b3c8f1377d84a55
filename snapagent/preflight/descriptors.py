"""Which open descriptors and mappings of a process tree CRIU can capture."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections import defaultdict
from typing import TYPE_CHECKING, Final

from snapagent.preflight.procfs import descriptors, namespace_of, read_text
from snapagent.preflight.sockets import FoundSocket, look_at_socket
from snapstore.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from snapagent.preflight.obstacles import Obstacles
    from snapagent.preflight.options import CaptureConditions
    from snapagent.preflight.procfs import Task

__all__ = ["OpenThings"]

# What follows `anon_inode:` of descriptors that CRIU captures.
_ANON_KNOWN: Final = frozenset({"eventfd", "eventpoll", "signalfd", "timerfd", "pidfd"})
_ANON_NOTIFY: Final = frozenset({"inotify", "fanotify"})
# Memory devices, from `/dev/null` to `/dev/kmsg`; terminals of all kinds; then tun and autofs.
_PLAIN_MAJORS: Final = frozenset({1, 4, 5, 188, 204})
_PLAIN_DEVICES: Final = frozenset({(10, 200), (10, 235)})
_SLAVE_MAJORS: Final = range(136, 144)
_PTMX: Final = (5, 2)
_PLAIN_MAPPINGS: Final = ("/dev/zero", "/dev/shm/", "/dev/hugepages/")  # noqa: S108
_SOCKET: Final = re.compile(r"socket:\[(\d+)\]")
_PIPE: Final = re.compile(r"pipe:\[(\d+)\]")
_SILLY_NAME: Final = re.compile(r"/\.nfs[0-9a-fA-F]{24}( \(deleted\))?$")
_DELETED: Final = " (deleted)"
_ACCESS_MODE: Final = 3
_BLOCK_BYTES: Final = 512  # the unit of `st_blocks`, whatever the file system


class OpenThings:
    """Goes through what the processes of a tree have open and mapped."""

    def __init__(self, found: Obstacles, conditions: CaptureConditions) -> None:
        self._found = found
        self._conditions = conditions
        self._sockets: dict[int, FoundSocket] = {}
        self._pipe_modes: dict[str, set[int]] = defaultdict(set)
        self._pipe_places: dict[str, str] = {}
        self._terminals: dict[str, str] = {}
        self._has_master = False
        self._files: set[tuple[int, int, int, str]] = set()
        self._mounts: dict[int, set[str]] = {}

    @property
    def sockets(self) -> list[FoundSocket]:
        """The sockets that were found, each once."""
        return list(self._sockets.values())

    def look_at(self, task: Task) -> None:
        """Look at one process. One that ends meanwhile has nothing more to say."""
        for fd, link in descriptors(task.pid):
            with contextlib.suppress(OSError):
                self._descriptor(task, fd, link)
        with contextlib.suppress(OSError):
            self._mappings(task)

    def finish(self) -> None:
        """Say what can be told only after the last process: what has its other end elsewhere."""
        for pipe, modes in self._pipe_modes.items():
            if os.O_RDWR not in modes and len(modes) == 1:
                end = "reading" if os.O_RDONLY in modes else "writing"
                self._found.warn(
                    "pipe-outside",
                    f"{self._pipe_places[pipe]} is the {end} end of {pipe}, whose other end "
                    "is outside of the tree or closed",
                    "the restored process finds that end closed; let it write to a file instead",
                )
        for path, where in self._terminals.items():
            if not self._has_master:
                self._found.add(
                    "terminal",
                    f"{where} is the terminal {path}, which belongs to somebody outside the tree",
                    "start it with its streams elsewhere (`setsid PROGRAM </dev/null >LOG 2>&1`): "
                    "a restore has no terminal to give it",
                    blocking=not self._conditions.terminal,
                )

    # -- descriptors --------------------------------------------------------------------------

    def _descriptor(self, task: Task, fd: int, link: str) -> None:
        where = f"descriptor {fd} of {task.title}"
        if match := _SOCKET.fullmatch(link):
            inode = int(match[1])
            if inode not in self._sockets:
                socket = look_at_socket(task.pid, fd, inode, where)
                if socket is not None:
                    self._sockets[inode] = socket
        elif link.startswith("anon_inode:"):
            self._anonymous(link.removeprefix("anon_inode:").strip("[]"), where)
        elif _PIPE.fullmatch(link):
            self._pipe_modes[link].add(self._flags(task.pid, fd) & _ACCESS_MODE)
            self._pipe_places.setdefault(link, where)
        else:
            self._opened(task, fd, link, where)

    def _flags(self, pid: int, fd: int) -> int:
        for line in read_text(f"/proc/{pid}/fdinfo/{fd}").splitlines():
            if line.startswith("flags:"):
                return int(line.split()[1], 8)
        return 0

    def _anonymous(self, kind: str, where: str) -> None:
        if kind == "io_uring":
            self._found.block(
                "io-uring",
                f"{where} is an io_uring",
                "turn it off in the program (for libuv UV_USE_IO_URING=0), or set the sysctl "
                "kernel.io_uring_disabled to 2 before it starts: CRIU cannot capture one",
            )
        elif kind == "bpf-map":
            self._found.warn(
                "bpf-map",
                f"{where} is a BPF map",
                "CRIU captures it only if it was built with libbpf",
            )
        elif kind in _ANON_NOTIFY:
            self._found.warn(
                f"{kind}-watch",
                f"{where} watches files with {kind}",
                "what it watches must be there where it is restored; unread events are lost",
            )
        elif kind not in _ANON_KNOWN:
            self._found.block(
                "descriptor-kind",
                f"{where} is of the kind {kind}",
                "close it before the capture: CRIU knows no such descriptors",
            )

    def _opened(self, task: Task, fd: int, link: str, where: str) -> None:
        path = f"/proc/{task.pid}/fd/{fd}"
        found = os.stat(path)  # noqa: PTH116 - the descriptor, not a path
        if stat.S_ISCHR(found.st_mode):
            self._device(found.st_rdev, link, where)
        elif stat.S_ISBLK(found.st_mode):
            self._found.block(
                "device", f"{where} is the device {link}", "close it before the capture"
            )
        elif stat.S_ISREG(found.st_mode):
            key = (task.pid, found.st_dev, found.st_ino, link)
            is_known = key in self._files and self._conditions.file_locks
            if is_known or link.startswith(("/memfd:", "/proc/")):
                return
            self._files.add(key)
            fdinfo = read_text(f"/proc/{task.pid}/fdinfo/{fd}").splitlines()
            if self._is_mounted(task.pid, fdinfo):
                self._file(found, link, where)
                self._locks(fdinfo, link, where)
            else:
                self._found.block(
                    "mount-unknown",
                    f"{where} is {link}, on a file system that is not mounted for the process",
                    "close it before the capture: it may be a message queue, secret memory, a file "
                    "from another mount namespace, or on what was unmounted",
                )

    def _device(self, rdev: int, link: str, where: str) -> None:
        number = (os.major(rdev), os.minor(rdev))
        if number == _PTMX:
            self._has_master = True
        elif number[0] in _SLAVE_MAJORS:
            self._terminals.setdefault(link, where)
        if (
            number[0] in {*_PLAIN_MAJORS, *_SLAVE_MAJORS}
            or number in _PLAIN_DEVICES
            or link.startswith(self._conditions.devices)
        ):
            return
        self._found.block("device", f"{where} is the device {link}", _device_remedy(link))

    def _file(self, found: os.stat_result, link: str, where: str) -> None:
        if found.st_nlink == 0:
            self._removed(found, link.removesuffix(_DELETED), where)
        elif link.endswith(_DELETED) or _SILLY_NAME.search(link):
            self._found.add(
                "file-renamed-away",
                f"{where} is {link.removesuffix(_DELETED)}, which has no such name any more",
                "let CRIU make a new name beside it (its option --link-remap)",
                blocking=not self._conditions.link_remap,
            )

    def _removed(self, found: os.stat_result, path: str, where: str) -> None:
        size = found.st_blocks * _BLOCK_BYTES
        limit = self._conditions.ghost_bytes_max
        if size > limit:
            self._found.block(
                "removed-file",
                f"{where} is {path}, which was removed and has {format_bytes(size)}",
                f"close or shrink it: at most {format_bytes(limit)} go into the images",
            )

    def _is_mounted(self, pid: int, fdinfo: Sequence[str]) -> bool:
        if pid not in self._mounts:
            lines = read_text(f"/proc/{pid}/mountinfo").splitlines()
            self._mounts[pid] = {line.split(maxsplit=1)[0] for line in lines}
        mounts = (line.split()[1] for line in fdinfo if line.startswith("mnt_id:"))
        return all(mount in self._mounts[pid] for mount in mounts)

    def _locks(self, fdinfo: Sequence[str], link: str, where: str) -> None:
        if self._conditions.file_locks:
            return
        if any(line.startswith("lock:") for line in fdinfo):
            self._found.block(
                "file-lock",
                f"{where} holds a lock on {link}",
                "let CRIU capture locks (its option --file-locks)",
            )

    # -- mappings -----------------------------------------------------------------------------

    def _mappings(self, task: Task) -> None:
        for line in read_text(f"/proc/{task.pid}/maps").splitlines():
            # Most mappings are of libraries or of nothing: tell the others at a glance.
            parts = line.split(maxsplit=5)
            if len(parts) < 6:
                continue
            path = parts[5]
            if path.startswith(("/dev/", "anon_inode:", "/SYSV", "[uprobes]")):
                self._odd_mapping(task, path)
            elif path.endswith(_DELETED):
                self._deleted_mapping(task, parts[0], path)

    def _odd_mapping(self, task: Task, path: str) -> None:
        where = f"a mapping of {task.title}"
        if path.startswith("anon_inode:"):
            self._anonymous(path.removeprefix("anon_inode:").strip("[]"), where)
        elif path.startswith("/SYSV"):
            if _shares_ipc(task.pid):
                self._found.block(
                    "sysv-memory",
                    f"{where} is System V shared memory, in an IPC namespace that CRIU shares",
                    "start it with `unshare --ipc`, and otherwise in the namespaces of the agent",
                )
        elif path == "[uprobes]":
            self._found.block(
                "uprobes", f"{task.title} is traced with uprobes", "end the tracing program"
            )
        elif not path.startswith((*_PLAIN_MAPPINGS, *self._conditions.devices)):
            self._found.block("device", f"{where} is of the device {path}", _device_remedy(path))

    def _deleted_mapping(self, task: Task, bounds: str, path: str) -> None:
        if path.startswith(("/memfd:", "/dev/zero", "/SYSV", "/anon_hugepage")):
            return
        # The names of that folder have no leading zeros.
        name = "-".join(f"{int(bound, 16):x}" for bound in bounds.split("-"))
        found = os.stat(f"/proc/{task.pid}/map_files/{name}")  # noqa: PTH116 - not a path
        where = f"a mapping of {task.title}"
        if found.st_nlink == 0:
            self._removed(found, path.removesuffix(_DELETED), where)
            self._found.warn(
                "removed-mapping",
                f"{where} is of {path.removesuffix(_DELETED)}, which was removed or replaced",
                "its old content goes into the images; restart the process after an upgrade",
            )


def _shares_ipc(pid: int) -> bool:
    """Whether a process is in the IPC namespace that CRIU will be in, and so not captured with its.

    CRIU enters other namespaces of the process, not this one.
    """
    return namespace_of(pid, "ipc") == namespace_of("self", "ipc")


def _device_remedy(path: str) -> str:
    if path.startswith("/dev/nvidia"):
        return "capture with CRIU's CUDA plugin, which takes the GPU's state out first"
    if path == "/dev/kvm":
        return "a virtual machine cannot be captured with CRIU: use the monitor's own snapshots"
    if path == "/dev/fuse":
        return "a process that serves a FUSE file system cannot be captured: unmount it first"
    return "close it before the capture: the state of a device is not in memory"
