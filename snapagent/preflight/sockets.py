"""Which sockets of a process tree CRIU can capture.

Each socket is duplicated for a moment and asked itself: that works in any network namespace, needs
no list of all sockets of the machine, and changes nothing about it.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import select
import socket
import struct
from typing import TYPE_CHECKING, Final

from snapagent.linux.probe import in_network_of, take_descriptor

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from snapagent.preflight.criu_program import CriuFacts
    from snapagent.preflight.obstacles import Obstacles
    from snapagent.preflight.options import CaptureConditions

__all__ = ["FoundSocket", "check_sockets", "look_at_socket"]

# Numbers that Python does not always have.
_SO_PROTOCOL: Final = 38
_SO_DOMAIN: Final = 39
_MPTCP: Final = 262

_TCP_ESTABLISHED: Final = 1
_TCP_CLOSE: Final = 7
_TCP_LISTEN: Final = 10
_TCP_UNKNOWN: Final = frozenset({3, 6, 12})  # SYN_RECV, TIME_WAIT, NEW_SYN_RECV

# Where `struct tcp_info` has what is not yet acknowledged, or accepted where it listens.
_TCP_INFO_UNACKED: Final = 24
_TCP_INFO_BYTES: Final = 28

_FAMILIES: Final = {
    1: "unix",
    2: "inet",
    10: "inet6",
    16: "netlink",
    17: "packet",
    21: "rds",
    29: "can",
    30: "tipc",
    31: "bluetooth",
    38: "alg",
    40: "vsock",
    43: "smc",
    44: "xdp",
}
_CRIU_FAMILIES: Final = frozenset({"unix", "inet", "inet6", "netlink", "packet"})
_INET_PROTOCOLS: Final = frozenset({0, 6, 17, 136, 1, 58})  # IP, TCP, UDP, UDPLITE, ICMP, ICMPv6
_PROTOCOL_NAMES: Final = {132: "SCTP", 33: "DCCP", _MPTCP: "MPTCP"}

# Of linux/sock_diag.h and linux/unix_diag.h.
_NETLINK_SOCK_DIAG: Final = 4
_SOCK_DIAG_BY_FAMILY: Final = 20
_NLM_F_REQUEST: Final = 1
_UDIAG_SHOW_PEER: Final = 4
_UNIX_DIAG_PEER: Final = 2
_NLMSG_ERROR: Final = 2
_UNIX_DIAG_MSG_BYTES: Final = 16
_DIAG_S_MAX: Final = 2.0


@dataclasses.dataclass(frozen=True, slots=True)
class FoundSocket:
    """One socket of the tree.

    Attributes:
        where: Who has it open, for messages.
        family: Its word; a number where it has none here.
        state: Of a TCP socket.
        source: What it is bound to, as `host:port`.
        peer: What it is connected to.
        has_data: Whether there is something to read.
        waiting: How many connections a listening socket has that nobody has accepted.
    """

    inode: int
    pid: int
    where: str
    family: str
    type: int
    protocol: int
    state: int = _TCP_CLOSE
    source: tuple[str, int] | None = None
    peer: tuple[str, int] | None = None
    has_data: bool = False
    waiting: int = 0

    @property
    def is_tcp(self) -> bool:
        """Whether it is of TCP."""
        return self.family in ("inet", "inet6") and self.type == socket.SOCK_STREAM


def look_at_socket(pid: int, fd: int, inode: int, where: str) -> FoundSocket | None:
    """Ask a socket of a process what it is; none if it is gone by now, or may not be asked."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return None
    try:
        copy = take_descriptor(pidfd, fd)
    except OSError:
        return None
    finally:
        os.close(pidfd)
    try:
        if os.fstat(copy).st_ino != inode:
            return None
        return _ask(copy, pid, inode, where)
    except OSError:
        return None
    finally:
        os.close(copy)


def _ask(copy: int, pid: int, inode: int, where: str) -> FoundSocket:
    # The descriptor stays with the caller: the object is for asking only.
    asked = socket.socket(fileno=copy)
    try:
        number = asked.getsockopt(socket.SOL_SOCKET, _SO_DOMAIN)
        family = _FAMILIES.get(number, f"family {number}")
        found = FoundSocket(
            inode=inode,
            pid=pid,
            where=where,
            family=family,
            type=asked.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE),
            protocol=asked.getsockopt(socket.SOL_SOCKET, _SO_PROTOCOL),
        )
        if family == "netlink":
            return dataclasses.replace(found, has_data=bool(select.select([copy], [], [], 0)[0]))
        if found.is_tcp and found.protocol == socket.IPPROTO_TCP:
            info = asked.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            (waiting,) = struct.unpack_from("=I", info, _TCP_INFO_UNACKED)
            return dataclasses.replace(
                found,
                state=info[0],
                source=_address(asked.getsockname()),
                peer=_address(asked.getpeername()) if info[0] == _TCP_ESTABLISHED else None,
                waiting=waiting if info[0] == _TCP_LISTEN else 0,
            )
        return found
    finally:
        asked.detach()


def _address(name: object) -> tuple[str, int] | None:
    if isinstance(name, tuple) and len(name) >= 2:
        host = str(name[0])
        return host.removeprefix("::ffff:"), int(name[1])
    return None


def check_sockets(
    found: Obstacles,
    sockets: Sequence[FoundSocket],
    conditions: CaptureConditions,
    facts: CriuFacts | None,
) -> None:
    """Say which of the sockets of a tree CRIU cannot capture, and what becomes of connections."""
    for one in sockets:
        if one.family not in _CRIU_FAMILIES:
            found.block(
                "socket-family",
                f"{one.where} is a socket of the family {one.family}",
                "end what uses it before the capture: CRIU knows no such sockets",
            )
        elif one.family in ("inet", "inet6"):
            _check_inet(found, one)
        elif one.family == "netlink" and one.has_data:
            found.block(
                "netlink-data",
                f"{one.where} is a netlink socket with messages that nobody has read",
                "try again: they are read soon, or the process has no more use for them",
            )
        elif one.family == "packet":
            found.warn(
                "packet-socket",
                f"{one.where} is a packet socket",
                "what it is bound to must be there with the same number where it is restored",
            )
    _check_connections(found, sockets, conditions, facts)
    _check_peers(found, [one for one in sockets if one.family == "unix"], conditions)


def _check_inet(found: Obstacles, one: FoundSocket) -> None:
    if one.type == socket.SOCK_RAW:
        return
    if one.protocol not in _INET_PROTOCOLS:
        name = _PROTOCOL_NAMES.get(one.protocol, f"protocol {one.protocol}")
        hint = "; for Go programs, set GODEBUG=multipathtcp=0" if one.protocol == _MPTCP else ""
        found.block(
            "socket-protocol",
            f"{one.where} is a socket of {name}",
            f"end what uses it before the capture: CRIU knows no such sockets{hint}",
        )
    elif one.waiting:
        found.block(
            "tcp-waiting",
            f"{one.where} has {one.waiting} connections that the program has not accepted",
            "try again: CRIU captures no such connections",
        )
    elif one.is_tcp and one.state in _TCP_UNKNOWN:
        found.block("tcp-state", f"{one.where} is a connection that is just beginning", "try again")


def _check_connections(
    found: Obstacles,
    sockets: Sequence[FoundSocket],
    conditions: CaptureConditions,
    facts: CriuFacts | None,
) -> None:
    connected = [
        one for one in sockets if one.is_tcp and one.state not in (_TCP_CLOSE, _TCP_LISTEN)
    ]
    if not connected:
        return
    if conditions.tcp == "refuse":
        for one in connected:
            found.block(
                "tcp-connection",
                f"{one.where} is a TCP connection{_between(one)}",
                "close it, or let connections be kept or dropped",
            )
        return
    if conditions.tcp == "keep" and facts is not None and not facts.can_lock_by_nftables:
        found.block(
            "network-lock",
            f"this CRIU was built without nftables, and there are {len(connected)} TCP connections",
            "use a CRIU that has it, or end the connections first",
        )
    inside = {one.source for one in connected}
    for one in connected:
        if one.peer is not None and one.peer not in inside:
            what = "is dropped in the copy" if conditions.tcp == "close" else "is held meanwhile"
            found.warn(
                "tcp-outside",
                f"{one.where} is a TCP connection{_between(one)} to outside of the tree",
                f"it {what}; it comes back only where its address is, while the peer waits, and "
                "not beside a source that goes on",
            )


def _between(one: FoundSocket) -> str:
    if one.source is None or one.peer is None:
        return ""
    (host, port), (peer_host, peer_port) = one.source, one.peer
    return f" {host}:{port} - {peer_host}:{peer_port}"


# -- unix sockets -----------------------------------------------------------------------------


def _check_peers(
    found: Obstacles, sockets: Sequence[FoundSocket], conditions: CaptureConditions
) -> None:
    inside = {one.inode for one in sockets}
    for one, peer in zip(sockets, _peers(sockets), strict=True):
        if peer is None or peer in inside:
            continue
        is_datagram = one.type == socket.SOCK_DGRAM
        found.add(
            "unix-outside",
            f"{one.where} is a unix socket connected to outside of the tree (inode {peer})",
            "capture the process at the other end too (a parent of both), or close the connection"
            + (", or let CRIU take it as external (--ext-unix-sk)" if is_datagram else ""),
            blocking=not (is_datagram and conditions.external_unix),
        )


def _peers(sockets: Sequence[FoundSocket]) -> list[int | None]:
    """Find the inode of the peer of each unix socket; none where there is no peer."""
    answers: dict[int, int] = {}
    for pid in _one_of_each_network(sockets):
        wanted = [one.inode for one in sockets if one.inode not in answers]
        try:
            answers |= in_network_of(pid, lambda wanted=wanted: _ask_peers(wanted))  # type: ignore[misc]
        except OSError:
            continue
    return [answers.get(one.inode) for one in sockets]


def _one_of_each_network(sockets: Sequence[FoundSocket]) -> Collection[int]:
    networks: dict[tuple[int, int], int] = {}
    for pid in {one.pid for one in sockets}:
        try:
            stat = os.stat(f"/proc/{pid}/ns/net")  # noqa: PTH116 - no path in the usual sense
        except OSError:
            continue
        networks.setdefault((stat.st_dev, stat.st_ino), pid)
    return networks.values()


def _ask_peers(inodes: Sequence[int]) -> dict[int, int]:
    found: dict[int, int] = {}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as diag:
        diag.settimeout(_DIAG_S_MAX)
        for inode in inodes:
            # sdiag_family, protocol, pad, states, inode, what to show, cookie: any.
            request = struct.pack("=BBHIIIII", 1, 0, 0, 0xFFFFFFFF, inode, _UDIAG_SHOW_PEER, *_ANY)
            header = struct.pack(
                "=IHHII", 16 + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, inode, 0
            )
            diag.send(header + request)
            peer = _peer_in(diag.recv(4096))
            if peer:
                found[inode] = peer
    return found


_ANY: Final = (0xFFFFFFFF, 0xFFFFFFFF)


def _peer_in(answer: bytes) -> int:
    """Return the peer's inode in the kernel's answer; 0 if there is no peer, or no such socket."""
    length, kind = struct.unpack_from("=IH", answer)
    if kind == _NLMSG_ERROR:
        code = -int(struct.unpack_from("=i", answer, 16)[0])
        if code not in (0, errno.ENOENT):
            raise OSError(code, os.strerror(code))
        return 0
    at = 16 + _UNIX_DIAG_MSG_BYTES
    while at + 4 <= min(length, len(answer)):
        size, attribute = struct.unpack_from("=HH", answer, at)
        if attribute == _UNIX_DIAG_PEER and size >= 8:
            return int(struct.unpack_from("=I", answer, at + 4)[0])
        at += max(size + 3 & ~3, 4)
    return 0
