"""Who is at the other end of a Unix socket, and whether it still lives."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from typing import Final, NamedTuple

from snapagent.linux import processes

__all__ = [
    "NO_DESCRIPTORS",
    "Credentials",
    "Peer",
    "Process",
    "credentials_of",
    "is_below",
    "open_process",
    "peer_of",
]

NO_DESCRIPTORS: Final = frozenset({errno.EMFILE, errno.ENFILE})
"""What the kernel says when there are too many open files."""

_SO_PEERGROUPS = 59
_SO_PEERPIDFD = 77
_GROUPS_BYTES = 1024
"""The most that Python asks for: 256 groups."""
_CREDENTIALS = struct.Struct("=iII")
_GENERATIONS_MAX = 1 << 12
"""Longer chains of parents are no real ones."""


class Credentials(NamedTuple):
    """Who made a connection, as the kernel noted it then."""

    pid: int
    uid: int
    gids: frozenset[int]
    """Its effective group and all others."""


def credentials_of(connected: socket.socket) -> Credentials:
    """Ask the kernel who made the connection."""
    raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    others: tuple[int, ...] = ()
    # Of who is in more groups than that, only its first one counts.
    with contextlib.suppress(OSError):
        groups = connected.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_BYTES)
        others = struct.unpack(f"{len(groups) // 4}I", groups)
    return Credentials(pid, uid, frozenset((gid, *others)))


class Peer(NamedTuple):
    """Who connected; whoever asked owns the pidfd."""

    pid: int
    uid: int
    gids: frozenset[int]
    pidfd: int


class Process(NamedTuple):
    """A process that another one with the same id is not taken for."""

    pid: int
    started_ticks: int


def peer_of(connected: socket.socket) -> Peer | None:
    """Return who made the connection; none if it has ended, or is not to be seen from here."""
    pid, uid, gids = credentials_of(connected)
    if pid <= 0:
        return None
    try:
        pidfd = connected.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        # Before Linux 6.5. The id could have been given to another process in this very moment.
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            return None
    return Peer(pid, uid, gids, pidfd)


def open_process(pid: int) -> tuple[Process, int] | None:
    """Return what a process is, and a pidfd that the caller owns; none if it has ended.

    Raises:
        OSError: There are too many open files.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except OSError as error:
        if error.errno in NO_DESCRIPTORS:
            raise
        return None
    state = processes.read_state(pid)
    if state is None or state.ended:
        os.close(pidfd)
        return None
    return Process(pid, state.started_ticks), pidfd


def is_below(pid: int, roots: set[Process]) -> bool:
    """Tell whether a process is one of these or hangs from one of them."""
    for _ in range(_GENERATIONS_MAX):
        state = processes.read_state(pid)
        if state is None:
            return False
        if Process(pid, state.started_ticks) in roots:
            return True
        if state.parent <= 0:
            return False
        pid = state.parent
    return False
