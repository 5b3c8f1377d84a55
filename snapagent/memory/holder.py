"""A small process that holds released memory too, so that it survives a broker that dies.

    python -m snapagent.memory.holder FD LISTENER PATH

Between `release` and `resume` the workload has neither mapping nor descriptor: if the broker had
the only one, the death of an agent would take the memory of a workload that was doing nothing but
let itself be captured. FD is its end of a channel with the broker. When that ends, the next broker
asks for everything at the socket LISTENER; if none comes, it ends with the last workload.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from snapagent.linux import peers, processes
from snapagent.linux.packets import BadPacketError, Channel, Packet

__all__ = ["HELD_KIND", "Holder", "main"]

HELD_KIND: Final = "keep"
_ANSWER_S_MAX: Final = 10.0


@dataclass(slots=True)
class _Held:
    """A session: the packets that told of it, and pidfds of its owners."""

    is_whole: bool = False
    """Whether all packets are here. Before that, that its owners have ended means nothing."""
    packets: list[Packet] = field(default_factory=list)
    pidfds: list[int] = field(default_factory=list)

    def close(self) -> None:
        for packet in self.packets:
            packet.close_fds()
        for pidfd in self.pidfds:
            os.close(pidfd)


class Holder:
    """What the process does."""

    def __init__(self, channel: Channel, listener: socket.socket) -> None:
        self._broker: Channel | None = channel
        self._listener = listener
        self._sessions: dict[int, _Held] = {}

    def run(self) -> None:
        """Hold memory until a new broker has it, or nobody needs it."""
        while self._broker is not None or self._sessions:
            for fd in self._wait():
                if self._broker is not None and fd == self._broker.fileno():
                    self._hear()
                elif fd != self._listener.fileno():
                    self._forget_dead(fd)
                elif self._give():
                    return

    def _wait(self) -> list[int]:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        if self._broker is not None:
            poll.register(self._broker, select.POLLIN)
        for held in self._sessions.values():
            for pidfd in held.pidfds:
                poll.register(pidfd, select.POLLIN)
        return [fd for fd, _ in poll.poll()]

    def _hear(self) -> None:
        assert self._broker is not None, "it lives"
        packet = self._broker.receive()
        if packet is None:
            self._broker.close()
            self._broker = None
        elif packet.kind == HELD_KIND:
            held = self._sessions.setdefault(packet.number("key"), _Held())
            held.packets.append(packet)
            for pid in packet.numbers("pids"):
                # One that it cannot watch, it only holds for longer.
                with contextlib.suppress(OSError):
                    opened = peers.open_process(pid)
                    if opened is not None:
                        held.pidfds.append(opened[1])
        elif packet.kind == "sure":
            # Messages come in order, so that everything before this one is here.
            self._sessions[packet.number("key")].is_whole = True
            self._broker.send("held", {"key": packet.number("key")})
        elif packet.kind == "forget":
            held_now = self._sessions.pop(packet.number("key"), None)
            if held_now is not None:
                held_now.close()

    def _forget_dead(self, pidfd: int) -> None:
        for key, held in list(self._sessions.items()):
            if pidfd in held.pidfds and not processes.wait_for_ends([pidfd], 0):
                held.pidfds.remove(pidfd)
                os.close(pidfd)
                if held.is_whole and not held.pidfds:
                    del self._sessions[key]
                    held.close()

    def _give(self) -> bool:
        """Give everything to a new broker; tells whether it has it."""
        connected, _ = self._listener.accept()
        peer = peers.peer_of(connected)
        if peer is not None:
            os.close(peer.pidfd)
        if peer is None or peer.uid not in {0, os.geteuid()} or self._broker is not None:
            connected.close()
            return False
        channel = Channel(connected)
        channel.set_timeout(_ANSWER_S_MAX)
        try:
            for held in self._sessions.values():
                for packet in held.packets:
                    channel.send(packet.kind, packet.values, packet.fds)
            channel.send("all", {})
            taken = channel.receive()
        except (OSError, BadPacketError):
            return False
        finally:
            channel.close()
        return taken is not None and taken.kind == "taken"


def main(fd: int, listener_fd: int, path: str) -> None:
    """Do it, and remove the socket in the end."""
    processes.allow_many_files()
    processes.forbid_inspection()
    processes.name_process("snapagent-held", "snapagent: holds released memory")
    channel = Channel(socket.socket(fileno=fd))
    with socket.socket(fileno=listener_fd) as listener:
        processes.close_all_but([fd, listener_fd])
        inode = Path(path).stat().st_ino
        try:
            Holder(channel, listener).run()
        finally:
            # The next holder may have come in its place.
            with contextlib.suppress(OSError):
                if Path(path).stat().st_ino == inode:
                    Path(path).unlink()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
