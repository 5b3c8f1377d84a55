"""What tests of sockets and threads share: work on a thread, and conditions to wait for."""

import fcntl
import socket
import struct
import termios
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from snapstore.clock import SystemClock

SECONDS_MAX = 20

_Result = TypeVar("_Result")


def on_thread(work: Callable[[], _Result]) -> "Future[_Result]":
    """Run something on a thread of its own; ask for its result with `SECONDS_MAX`."""
    future: Future[_Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - for the test to look at
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition, and fail if it does not come true."""
    clock = SystemClock()
    end = clock.monotonic_s() + SECONDS_MAX
    while not condition():
        assert clock.monotonic_s() < end, "it did not come true"
        clock.sleep_s(0.001)


def all_was_read(peer: socket.socket) -> bool:
    """Tell whether the other end of a Unix socket has taken all that was sent."""
    waiting = fcntl.ioctl(peer, termios.TIOCOUTQ, bytes(4))
    return struct.unpack("i", waiting)[0] == 0


def send_slowly(peer: socket.socket, data: bytes) -> None:
    """Send byte by byte, each once the one before was taken."""
    for position in range(len(data)):
        peer.sendall(data[position : position + 1])
        until(lambda: all_was_read(peer))
