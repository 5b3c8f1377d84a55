"""Messages between the agent, its supervisors and their keepers: one JSON object a packet, and fds.

For a Unix socket of the type SOCK_SEQPACKET, so that a message is whole or is not there. Imports
little, since the supervisor does and has to start fast.
"""

from __future__ import annotations

import array
import json
import os
import socket
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BadPacketError", "Channel", "Packet", "channel_pair"]

PACKET_BYTES_MAX = 128 << 10
FDS_MAX = 64
"""A packet of the kernel may have 253."""
FD_BYTES = array.array("i").itemsize


class BadPacketError(Exception):
    """The other end sent what is no message, or one that lacks something."""


class Packet(NamedTuple):
    """One message; whoever receives it owns its fds."""

    kind: str
    values: dict[str, object]
    fds: tuple[int, ...]

    def text(self, key: str) -> str:
        """Return a value that is a string."""
        value = self.values.get(key)
        if not isinstance(value, str):
            raise BadPacketError(f"{self.kind}: {key!r} is no string")
        return value

    def number(self, key: str) -> int:
        """Return a value that is an integer."""
        value = self.values.get(key)
        if not isinstance(value, int):
            raise BadPacketError(f"{self.kind}: {key!r} is no integer")
        return value

    def texts(self, key: str) -> list[str]:
        """Return a value that is a list of strings."""
        value = self.values.get(key)
        if not isinstance(value, list):
            raise BadPacketError(f"{self.kind}: {key!r} is no list")
        if not all(isinstance(item, str) for item in value):
            raise BadPacketError(f"{self.kind}: {key!r} is no list of strings")
        return value

    def numbers(self, key: str) -> list[int]:
        """Return a value that is a list of integers."""
        value = self.values.get(key)
        if not isinstance(value, list):
            raise BadPacketError(f"{self.kind}: {key!r} is no list")
        if not all(isinstance(item, int) for item in value):
            raise BadPacketError(f"{self.kind}: {key!r} is no list of integers")
        return value

    def close_fds(self) -> None:
        """Close what came along, for a receiver that does not want it."""
        for fd in self.fds:
            os.close(fd)


class Channel:
    """One end. Several threads may send; one receives."""

    def __init__(self, end: socket.socket) -> None:
        """Take over the socket."""
        self._socket = end

    def fileno(self) -> int:
        """Return the socket's fd, to poll."""
        return self._socket.fileno()

    def set_timeout(self, seconds: float | None) -> None:
        """Let sending and receiving raise `TimeoutError` after some time."""
        self._socket.settimeout(seconds)

    def send(self, kind: str, values: dict[str, object], fds: Sequence[int] = ()) -> None:
        """Send one message; the fds stay the caller's.

        Raises:
            OSError: the other end is gone; nothing was sent.
        """
        if len(fds) > FDS_MAX:
            raise BadPacketError(f"{kind}: {len(fds)} fds, {FDS_MAX} at most")
        data = json.dumps({"kind": kind, **values}).encode()
        if len(data) > PACKET_BYTES_MAX:
            raise BadPacketError(f"{kind}: {len(data)} bytes, {PACKET_BYTES_MAX} at most")
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self._socket.sendmsg([data], rights)

    def receive(self) -> Packet | None:
        """Return the next message, or None once the other end is closed.

        Raises:
            BadPacketError: it is no message, or its fds did not fit into this process; those that
                came are closed again.
        """
        try:
            data, ancillary, flags, _ = self._receive()
        except ConnectionResetError:
            # It closed its end with messages of ours unread. What it had sent is still there.
            data, ancillary, flags, _ = self._receive()
        fds = tuple(fd for level, kind, raw in ancillary for fd in _rights(level, kind, raw))
        try:
            _check_whole(flags)
            if not data and not fds:
                return None
            # One without a byte looks like the end, but for what came with it.
            return _parse(data, fds)
        except BadPacketError:
            for fd in fds:
                os.close(fd)
            raise

    def _receive(self) -> tuple[bytes, list[tuple[int, int, bytes]], int, object]:
        return self._socket.recvmsg(
            PACKET_BYTES_MAX, socket.CMSG_SPACE(FDS_MAX * FD_BYTES), socket.MSG_CMSG_CLOEXEC
        )

    def shut_down(self) -> None:
        """Let both ends see the end of it, whoever has inherited copies; wakes a receiver."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # The other end is gone already.

    def close(self) -> None:
        """Close this end. May be called again."""
        self._socket.close()


def channel_pair() -> tuple[Channel, Channel]:
    """Return two ends that are connected with each other."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Channel(one), Channel(other)


def _rights(level: int, kind: int, raw: bytes) -> list[int]:
    if (level, kind) != (socket.SOL_SOCKET, socket.SCM_RIGHTS):
        return []
    fds = array.array("i")
    fds.frombytes(raw[: len(raw) - len(raw) % FD_BYTES])
    return fds.tolist()


def _check_whole(flags: int) -> None:
    if flags & socket.MSG_CTRUNC:
        raise BadPacketError("not all fds of a message could be taken: too many are open")
    if flags & socket.MSG_TRUNC:
        raise BadPacketError(f"a message is longer than {PACKET_BYTES_MAX} bytes")


def _parse(data: bytes, fds: tuple[int, ...]) -> Packet:
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadPacketError(f"a message is no JSON: {error}") from error
    if not isinstance(values, dict):
        raise BadPacketError("a message is no object")
    kind = values.pop("kind", None)
    if not isinstance(kind, str):
        raise BadPacketError("a message does not say what it is")
    return Packet(kind, values, fds)
