"""Whether the addresses and ports of a snapshot's sockets are free where it is restored."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import socket
from typing import TYPE_CHECKING, Final

from snapagent.linux.probe import in_network_of
from snapagent.preflight.procfs import read_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from snapagent.preflight.images import Images
    from snapagent.preflight.obstacles import Obstacles
    from snapagent.preflight.options import RestoreConditions, RestorePlace
    from snapstore.criu import InetSocket

__all__ = ["check_network"]

_LISTEN: Final = 10
_CLOSE: Final = 7
_ANY: Final = ("0.0.0.0", "::")  # noqa: S104 - nothing is bound here

Endpoint = tuple[str, int]


@dataclasses.dataclass(frozen=True, slots=True)
class _Used:
    """What one network namespace has in use."""

    tcp: list[tuple[int, Endpoint, Endpoint]]
    udp: list[tuple[int, Endpoint, Endpoint]]
    abstract: frozenset[bytes]
    missing: frozenset[str]
    """Those of the asked addresses that it has not."""


def check_network(
    found: Obstacles, images: Images, place: RestorePlace, conditions: RestoreConditions
) -> None:
    """Say which ports are taken, which addresses are missing, which peers are outside."""
    if "net" in images.own_namespaces:
        return
    sockets = images.files.inet
    connected = [one for one in sockets if one.is_connected] if conditions.tcp == "keep" else []
    inside = {(one.source_address, one.source_port) for one in sockets}
    for one in connected:
        if (one.peer_address, one.peer_port) not in inside:
            found.warn(
                "tcp-outside",
                f"the captured connection {_text(one)} is with somebody outside of the snapshot",
                "it lives on only if the peer still waits and this address is reachable for it; "
                "otherwise the process finds it broken, as after a failure of the network",
            )
    wanted = sorted(
        {
            one.source_address
            for one in sockets
            if one.source_address not in ("", *_ANY) and (one.is_listening or one in connected)
        }
    )
    if place.network == "fresh":
        _check_fresh(found, wanted, place.addresses)
        return
    names = [one.name for one in images.files.unix if one.name.startswith(b"\0")]
    if not sockets and not names:
        return
    used = in_network_of(place.join_pid or os.getpid(), lambda: _look(wanted))
    for address in sorted(used.missing):
        found.block("address-missing", f"this network has no address {address}", _FRESH)
    _check_ports(found, sockets, used)
    _check_taken(found, connected, names, used)


_FRESH: Final = "restore into a fresh network (`--network fresh`), which gets what it needs"


def _check_fresh(found: Obstacles, wanted: Sequence[str], addresses: Sequence[str]) -> None:
    given = {address.partition("/")[0] for address in addresses}
    for address in wanted:
        if address not in given and not ipaddress.ip_address(address).is_loopback:
            found.block(
                "address-missing",
                f"the fresh network is not given the address {address}, which sockets are bound to",
                "give it to that network",
            )


def _check_taken(
    found: Obstacles, connected: Sequence[InetSocket], names: Sequence[bytes], used: _Used
) -> None:
    existing = {(source, peer) for state, source, peer in used.tcp if state != _LISTEN}
    for one in connected:
        if _ends(one) in existing:
            found.block(
                "connection-taken",
                f"the connection {_text(one)} exists here already",
                f"end the source of the snapshot first, or {_FRESH}",
            )
    for name in sorted(set(names) & used.abstract):
        found.block(
            "name-taken",
            f"the abstract unix name @{name[1:].decode('utf-8', 'backslashreplace')} is in use",
            _FRESH,
        )


def _check_ports(found: Obstacles, sockets: Sequence[InetSocket], used: _Used) -> None:
    for one in sockets:
        is_udp = one.type == socket.SOCK_DGRAM and one.source_port
        if not (one.is_listening or is_udp):
            continue
        taken = (_CLOSE, used.udp) if is_udp else (_LISTEN, used.tcp)
        for state, (address, port), _ in taken[1]:
            is_same_family = (":" in address) == (":" in one.source_address)
            overlaps = address == one.source_address or {address, one.source_address} & {*_ANY}
            if state == taken[0] and port == one.source_port and is_same_family and overlaps:
                protocol = "UDP" if is_udp else "TCP"
                found.block(
                    "port-taken",
                    f"{protocol} port {port} of {one.source_address} is in use here",
                    f"end what uses it, or {_FRESH}",
                )
                break


def _ends(one: InetSocket) -> tuple[Endpoint, Endpoint]:
    return (one.source_address, one.source_port), (one.peer_address, one.peer_port)


def _text(one: InetSocket) -> str:
    return f"{one.source_address}:{one.source_port} - {one.peer_address or '?'}:{one.peer_port}"


# -- in the place's network -------------------------------------------------------------------


def _look(addresses: Sequence[str]) -> _Used:
    abstract = set()
    for line in read_text("/proc/thread-self/net/unix").splitlines():
        path = line.split(maxsplit=7)[7:]
        if path and path[0].startswith("@"):
            abstract.add(b"\0" + path[0][1:].encode())
    return _Used(
        tcp=[*_table("tcp"), *_table("tcp6")],
        udp=[*_table("udp"), *_table("udp6")],
        abstract=frozenset(abstract),
        missing=frozenset(address for address in addresses if not _has_address(address)),
    )


def _table(name: str) -> list[tuple[int, Endpoint, Endpoint]]:
    try:
        lines = read_text(f"/proc/thread-self/net/{name}").splitlines()[1:]
    except OSError:
        return []
    rows = (line.split(maxsplit=4) for line in lines)
    return [(int(row[3], 16), _endpoint(row[1]), _endpoint(row[2])) for row in rows]


def _endpoint(text: str) -> Endpoint:
    """Read an address as the kernel prints it: in words of the machine's own order."""
    address, _, port = text.partition(":")
    words = (address[at : at + 8] for at in range(0, len(address), 8))
    raw = b"".join(int(word, 16).to_bytes(4, "little") for word in words)
    family = socket.AF_INET if len(raw) == 4 else socket.AF_INET6
    return socket.inet_ntop(family, raw), int(port, 16)


def _has_address(address: str) -> bool:
    """Try to bind it, on no particular port and for a moment."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as trial:
            trial.bind((address, 0))
    except OSError:
        return False
    return True
