"""What all sessions with CRIU share: exact reads, waking a blocked thread, the first error."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from typing import TYPE_CHECKING

from snapagent.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

    from snapstore.units import BytesLike

__all__ = ["FirstError", "WakeUp", "is_readable", "receive", "send", "shut_down"]


class FirstError:
    """Keeps the first error of several threads, and tells the owner of it at once. Thread-safe."""

    def __init__(self, on_error: Callable[[BaseException], None] | None = None) -> None:
        self._on_error = on_error
        self._lock = threading.Lock()
        self.error: BaseException | None = None

    def report(self, error: BaseException) -> None:
        """Keep an error if it is the first, and call back with it from this thread."""
        with self._lock:
            if self.error is not None:
                return
            self.error = error
        if self._on_error is not None:
            self._on_error(error)

    def raise_any(self) -> None:
        """Raise what was kept, if anything was."""
        if self.error is not None:
            raise self.error


class WakeUp:
    """Lets threads wait for a descriptor until somebody says that the wait is over. Thread-safe.

    It works where a socket's shutdown does not: for pipes, and for sockets between two messages.
    """

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._called = threading.Event()

    @property
    def called(self) -> bool:
        """Whether `call` was called."""
        return self._called.is_set()

    def call(self) -> None:
        """End all waits, now and later. May be called again."""
        if not self._called.is_set():
            self._called.set()
            os.eventfd_write(self._fd, 1)

    def wait_for(self, fd: int, events: int) -> bool:
        """Block until something happened to `fd`; false if the wait was ended instead.

        A descriptor that hung up, or is no more, counts as ready: the next call on it will tell.
        """
        poller = select.poll()
        poller.register(fd, events)
        poller.register(self._fd, select.POLLIN)
        poller.poll()
        return not self._called.is_set()

    def close(self) -> None:
        """Give the descriptor back. No thread may be waiting any more."""
        if self._fd >= 0:
            self._called.set()
            os.close(self._fd)
            self._fd = -1


def is_readable(fd: int) -> bool:
    """Tell whether a read would return at once, with data or the end."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))


def receive(connection: socket.socket, into: memoryview, what: str) -> bool:
    """Fill `into` from a connection; false if the peer ended it before the first byte.

    Blocks until then; `shut_down` from another thread ends that like a peer's end.

    Raises:
        ProtocolError: The peer ended the connection in the middle.
    """
    got = 0
    while got < len(into):
        try:
            count = connection.recv_into(into[got:], 0, socket.MSG_WAITALL)
        except OSError as error:
            raise ProtocolError(f"the connection broke before {what}: {error}") from error
        if count == 0:
            if got == 0:
                return False
            raise ProtocolError(f"the connection ended after {got} of {len(into)} bytes of {what}")
        got += count
    return True


def send(connection: socket.socket, data: BytesLike, what: str) -> None:
    """Send all of `data`.

    Raises:
        ProtocolError: The peer no longer listens.
    """
    try:
        connection.sendall(data)
    except OSError as error:
        raise ProtocolError(f"the connection ended before {what} was sent: {error}") from error


def shut_down(connection: socket.socket) -> None:
    """End a connection or a listener for both sides, and whatever blocks on it. May be repeated."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
