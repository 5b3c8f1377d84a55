"""The workload's end of the broker's socket: one request, one answer. Needs nothing but Python.

A message is one JSON object in one packet, with descriptors beside it; `docs/external-memory.md`
lists the messages.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
from typing import TYPE_CHECKING, NamedTuple

from snapagent.workload.errors import BrokerUnreachable, MemoryLost, MemoryRefused

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["PROTOCOL_VERSION", "Answer", "Connection"]

PROTOCOL_VERSION = 2
"""Of this; who needs nothing newer says 1, so that older brokers serve it too."""
_PACKET_BYTES_MAX = 128 << 10
_FDS_MAX = 64
_FD_BYTES = array.array("i").itemsize
_ERRORS = {"lost": MemoryLost}
"""By the word in a refusal; all others are `MemoryRefused`."""


class Answer(NamedTuple):
    """What the broker said; whoever receives it owns its descriptors."""

    values: dict[str, object]
    fds: tuple[int, ...]

    def numbers(self, key: str) -> list[int]:
        """Return a value that has to be a list of integers."""
        value = self.values.get(key)
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            raise BrokerUnreachable(f"the broker's answer has no numbers {key!r}")
        return value


class Connection:
    """One connection with the broker. Used by one thread at a time."""

    def __init__(self, path: str, *, timeout_s: float) -> None:
        """Connect.

        Raises:
            BrokerUnreachable: Nobody listens there.
        """
        self._path = path
        self._timeout_s = timeout_s
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._socket.settimeout(timeout_s)
        try:
            self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            raise BrokerUnreachable(
                f"no memory broker answers at {path}: {error.strerror or error}",
                next_step="start the agent, or set SNAPAGENT_MEMORY_SOCKET to its socket",
            ) from error

    def call(
        self,
        kind: str,
        values: Mapping[str, object] | None = None,
        fds: Sequence[int] = (),
        *,
        timeout_s: float | None = None,
        waits: bool = False,
    ) -> Answer:
        """Send a request and wait for its answer; without one, the connection is closed.

        Args:
            kind: Of the request.
            values: What it says.
            fds: Go along; they stay the caller's.
            timeout_s: How long an answer may take, if the request waits; none for ever.
            waits: The broker answers when something has happened.

        Raises:
            BrokerUnreachable: It hung up or did not answer in time; whether it did what was asked
                is not known.
            MemoryRefused: It said no.
            MemoryLost: It does not have this memory.
        """
        data = json.dumps({"kind": kind, **(values or {})}).encode()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self._socket.settimeout(timeout_s if waits else self._timeout_s)
            # It may have hung up, and said why before that.
            with contextlib.suppress(BrokenPipeError):
                self._socket.sendmsg([data], rights)
            answer = self._receive_last()
        except OSError as error:
            self.close()
            raise BrokerUnreachable(
                f"the memory broker at {self._path} does not answer: {error.strerror or error}",
                next_step="see whether the agent runs",
            ) from error
        except BaseException:
            # Its answer would be taken for that of the next request.
            self.close()
            raise
        if answer.values.get("kind") == "refused":
            _close(answer.fds)
            make = _ERRORS.get(str(answer.values.get("code")), MemoryRefused)
            raise make(str(answer.values.get("message")))
        return answer

    def close(self) -> None:
        """Hang up. Idempotent."""
        self._socket.close()

    def _receive_last(self) -> Answer:
        try:
            return self._receive()
        except ConnectionResetError:
            # It hung up before it read everything. What it had said is still there.
            return self._receive()

    def _receive(self) -> Answer:
        data, ancillary, flags, _ = self._socket.recvmsg(
            _PACKET_BYTES_MAX, socket.CMSG_SPACE(_FDS_MAX * _FD_BYTES), socket.MSG_CMSG_CLOEXEC
        )
        found = array.array("i")
        for level, kind, raw in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                found.frombytes(raw[: len(raw) - len(raw) % _FD_BYTES])
        fds = tuple(found)
        if not data:
            raise ConnectionResetError("it hung up")
        if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
            _close(fds)
            raise BrokerUnreachable(
                "the memory broker's answer did not fit: too many files are open here",
                next_step="raise the limit on open files",
            )
        try:
            values = json.loads(data)
        except ValueError:
            values = None
        if not isinstance(values, dict):
            _close(fds)
            raise BrokerUnreachable(f"what answers at {self._path} is no memory broker")
        return Answer(values, fds)


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
