"""The control socket: one daemon for a set of directories, and who may connect.

Which daemon it is, is decided by a lock on a file, which ends with its process however that ends.
Whoever has the lock may replace a socket that nobody listens at.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import grp
import os
import socket
import stat
from typing import TYPE_CHECKING, Final

from snapagent.errors import AgentError, AlreadyRunning, ConfigInvalid
from snapagent.server.policy import peer_of
from snapagent.workdir import make_run_directory

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from aiohttp import web

__all__ = [
    "CONNECTIONS_MAX",
    "Acceptor",
    "daemon_lock",
    "group_id",
    "listening",
    "open_run_directory",
]

CONNECTIONS_MAX: Final = 512
CONNECTIONS_OF_ONE_MAX: Final = 64
"""Of one user other than root."""
_BACKLOG = 128
_SOCKET_MODE = 0o660
_RUN_MODE = 0o711
"""Others may pass through to the socket, and see nothing."""
_ALONE_MODE = 0o700
_ACCEPT_PAUSE_S = 0.1
_GROUP_MAX = (1 << 32) - 2
"""The one above it means none to the kernel."""


@contextlib.contextmanager
def daemon_lock(state_directory: Path) -> Iterator[None]:
    """Be the only daemon with this directory while the block runs.

    Raises:
        AlreadyRunning: Another one is.
        AgentError: The directory cannot be used.
    """
    path = state_directory / "daemon.lock"
    try:
        state_directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise AgentError(
            f"cannot use {state_directory}: {error.strerror}",
            next_step="run as root, or set state_directory",
        ) from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise AlreadyRunning(
                f"another agent works with {state_directory}",
                next_step="end it, or give this one a state_directory of its own",
            ) from error
        yield
    finally:
        os.close(fd)


def open_run_directory(path: Path) -> None:
    """Make the run directory, and let others pass through it to the sockets that are in it.

    Raises:
        AgentError: It cannot be used, or others may change what is in it.
    """
    try:
        make_run_directory(path, _RUN_MODE)
        # Commands without a daemon make it for root alone. Another one, which has other uses as
        # well, is left as it is, and so is the directory of a socket that is elsewhere.
        if stat.S_IMODE(path.stat().st_mode) == _ALONE_MODE:
            path.chmod(_RUN_MODE)
    except OSError as error:
        raise AgentError(
            f"cannot use {path}: {error.strerror}", next_step="run as root, or set run_directory"
        ) from error


@contextlib.contextmanager
def listening(path: Path, group: str) -> Iterator[tuple[socket.socket, bool]]:
    """Listen at a path while the block runs; tells whether a dead daemon's socket was there.

    Raises:
        AlreadyRunning: Somebody listens there.
        AgentError: It cannot be made there.
        ConfigInvalid: There is no such group.
    """
    gid = group_id(group)
    try:
        path.parent.mkdir(mode=_RUN_MODE, parents=True, exist_ok=True)
        was_stale = _remove_stale(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    except OSError as error:
        raise AgentError(f"cannot listen at {path}: {error.strerror}") from error
    with listener:
        try:
            # Nobody can connect before it listens, and until then it is for nobody else.
            listener.bind(str(path))
            os.chown(path, -1, gid)
            path.chmod(_SOCKET_MODE)
            listener.listen(_BACKLOG)
        except OSError as error:
            raise AgentError(f"cannot listen at {path}: {error.strerror}") from error
        try:
            yield listener, was_stale
        finally:
            path.unlink(missing_ok=True)


def group_id(group: str) -> int:
    """Return the group of the socket; this process's own if none is named.

    Raises:
        ConfigInvalid: There is no such group.
    """
    if not group:
        return os.getegid()
    number: int | None = None
    with contextlib.suppress(KeyError, ValueError):
        # It need not have a name.
        number = int(group) if group.isdecimal() else grp.getgrnam(group).gr_gid
    if number is None or number > _GROUP_MAX:
        raise ConfigInvalid(
            f"there is no group {group!r}", next_step="make it, or change socket_group"
        )
    return number


def _remove_stale(path: Path) -> bool:
    """Remove the socket of a dead daemon; tell whether there was one."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISSOCK(mode):
        raise AgentError(f"{path} is there and no socket", next_step="remove it, or set `socket`")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return True
        except BlockingIOError:
            pass  # So many wait there that it lives.
    raise AlreadyRunning(
        f"somebody listens at {path}", next_step="end that agent, or set another `socket`"
    )


class Acceptor:
    """Takes connections, a bounded number of all and of each user."""

    def __init__(self, listener: socket.socket, server: web.Server) -> None:
        self._listener = listener
        self._server = server

    async def run(self) -> None:
        """Take connections until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError:
                # No descriptor is free: those who wait are taken when one is.
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            try:
                if self._has_room(peer_of(connection).uid):
                    connection.settimeout(0)
                    await loop.connect_accepted_socket(self._server, connection)
                else:
                    connection.close()
            except OSError:
                connection.close()

    def _has_room(self, uid: int) -> bool:
        taken = self._server.connections
        if len(taken) >= CONNECTIONS_MAX:
            return False
        if uid == 0:
            return True
        uids = []
        for one in taken:
            if one.transport is not None:
                with contextlib.suppress(OSError):
                    uids.append(peer_of(one.transport.get_extra_info("socket")).uid)
        return uids.count(uid) < CONNECTIONS_OF_ONE_MAX
