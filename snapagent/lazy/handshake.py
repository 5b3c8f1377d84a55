"""What CRIU says to a lazy-pages daemon while it restores: each task's userfaultfd, then a word."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from typing import TYPE_CHECKING

from snapagent.errors import ProtocolError
from snapagent.linux import userfaultfd

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["SOCKET_NAME", "listen", "receive_tasks"]

SOCKET_NAME = "lazy-pages.socket"

_RESTORED = 0x52535446
_NUMBER = struct.Struct("=i")


def listen(directory: Path) -> socket.socket:
    """Listen where CRIU will connect, a socket in its work directory.

    Raises:
        OSError: It cannot be made there.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Through its descriptor, since the path of a socket has at most 107 bytes.
        folder = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            path = f"/proc/self/fd/{folder}/{SOCKET_NAME}"
            with contextlib.suppress(FileNotFoundError):
                (directory / SOCKET_NAME).unlink()
            listener.bind(path)
            listener.listen(1)
        finally:
            os.close(folder)
    except BaseException:
        listener.close()
        raise
    return listener


def receive_tasks(connection: socket.socket, on_task: Callable[[int, int], None]) -> None:
    """Take what CRIU sends until it says that all tasks are restored.

    Args:
        connection: The connection of CRIU.
        on_task: Gets the process id in the images and the userfaultfd of a task, and owns that
            from then on. A dead task that nobody has waited for has no memory and is left out.

    Raises:
        ProtocolError: CRIU ended before that, or it was not CRIU.
    """
    while True:
        pid = _receive_number(connection)
        if pid == _RESTORED:
            return
        if pid == 0:
            raise ProtocolError(f"{SOCKET_NAME}: process id 0 was announced")
        if pid > 0:
            try:
                fd = userfaultfd.receive(connection)
            except (OSError, ValueError) as error:
                raise ProtocolError(f"{SOCKET_NAME}: for process {pid} came {error}") from error
            on_task(pid, fd)


def _receive_number(connection: socket.socket) -> int:
    # Not one byte more: the next one has a descriptor with it.
    data = b""
    while len(data) < _NUMBER.size:
        try:
            more = connection.recv(_NUMBER.size - len(data))
        except OSError as error:
            raise ProtocolError(f"{SOCKET_NAME}: {error.strerror}") from error
        if not more:
            raise ProtocolError(
                f"{SOCKET_NAME}: CRIU closed the connection before all tasks were restored",
                next_step="look into the log of CRIU",
            )
        data += more
    number: int = _NUMBER.unpack(data)[0]
    return number
