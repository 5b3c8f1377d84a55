"""Network namespaces: working in one, and fresh ones for restored processes with their addresses.

Sockets that listen on a certain address, and connections, can only be restored where the machine
has that address: so `lo` of the fresh namespace is given all of them. It is the one interface that
every kernel has; a dummy one takes a module. What a machine sends to itself goes through `lo`
whichever interface has the address, so to sockets it is the same.
"""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import os
import socket
import struct
import threading
from typing import TYPE_CHECKING, Final, TypeVar

from snapagent.errors import AgentError
from snapagent.linux import namespaces

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["fresh_network", "in_network"]

ADDRESSES_MAX: Final = 1024

SIOCSIFFLAGS: Final = 0x8914
IFF_UP: Final = 1
IFF_RUNNING: Final = 0x40

T = TypeVar("T")

NETLINK_HEADER: Final = struct.Struct("=IHHII")
"""Length with the header, type, flags, sequence number, port of the sender."""
ATTRIBUTE_HEADER_BYTES: Final = 4
ANSWER_BYTES_MAX: Final = 8192
NLM_F_REQUEST: Final = 1
NLM_F_ACK: Final = 4
NLM_F_EXCL: Final = 0x200
NLM_F_CREATE: Final = 0x400
NLMSG_ERROR: Final = 2
RTM_NEWADDR: Final = 20
IFA_ADDRESS: Final = 1
IFA_LOCAL: Final = 2
IFA_F_NODAD: Final = 2
RT_SCOPE_UNIVERSE: Final = 0

Address = ipaddress.IPv4Interface | ipaddress.IPv6Interface


def fresh_network(addresses: Sequence[str] = ()) -> int:
    """Make a network namespace, with `lo` up and these addresses, and return an fd of it.

    The namespace is there while the fd is open or a process is in it. The calling thread stays
    where it is. Addresses are IPv4 or IPv6, with a prefix length or without; loopback addresses are
    there anyway.

    Raises:
        AgentError: an address is none, or the kernel does not allow it.
    """
    wanted = _parse(addresses)

    def make() -> int:
        namespaces.unshare(namespaces.NETWORK)
        _bring_loopback_up()
        if wanted:
            _add_to_loopback(wanted)
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    try:
        return _on_own_thread(make)
    except OSError as error:
        raise AgentError(f"cannot make a network namespace: {error}") from error


def in_network(fd: int, work: Callable[[], T]) -> T:
    """Do something in the network namespace of an fd, on a thread of its own.

    Raises:
        OSError: The namespace cannot be entered.
        Exception: What the work raises.
    """

    def enter_and_work() -> T:
        namespaces.set_namespace(fd, namespaces.NETWORK)
        return work()

    return _on_own_thread(enter_and_work)


def _on_own_thread(work: Callable[[], T]) -> T:
    """Call it on a thread of its own, since it is the thread that changes its namespace."""
    results: list[T] = []
    problems: list[Exception] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:  # noqa: BLE001 - raised again below, in the caller's thread.
            problems.append(error)

    thread = threading.Thread(target=run, name="network")
    thread.start()
    thread.join()
    if problems:
        raise problems[0]
    return results[0]


def _parse(addresses: Sequence[str]) -> list[Address]:
    """Return the addresses that have to be made, each once."""
    if len(addresses) > ADDRESSES_MAX:
        raise AgentError(f"{len(addresses)} network addresses, {ADDRESSES_MAX} at most")
    wanted: dict[Address, None] = {}
    for text in addresses:
        try:
            address = ipaddress.ip_interface(text)
        except ValueError as error:
            raise AgentError(f"{text!r} is no IPv4 or IPv6 address") from error
        # Not by `address.is_loopback`: an interface is one only if its whole network is.
        if not (address.ip.is_loopback or address.ip.is_unspecified):
            wanted[address] = None
    return list(wanted)


def _bring_loopback_up() -> None:
    request = struct.pack("16sH22x", b"lo", IFF_UP | IFF_RUNNING)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, request)


def _add_to_loopback(addresses: Sequence[Address]) -> None:
    """Give `lo` of the calling thread's network namespace these addresses, by rtnetlink(7)."""
    index = socket.if_nametoindex("lo")
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
        kernel.bind((0, 0))
        for number, address in enumerate(addresses):
            kernel.send(_request(address, index, number))
            error = _answered_error(kernel.recv(ANSWER_BYTES_MAX), number)
            if error and error != errno.EEXIST:
                raise AgentError(f"cannot have the address {address}: {os.strerror(error)}")


def _request(address: Address, index: int, number: int) -> bytes:
    """Return the message that adds an address to an interface."""
    packed = address.ip.packed
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    # Looking for duplicates would take a second in which nothing could listen on the address.
    flags = IFA_F_NODAD if address.version == 6 else 0
    length = address.network.prefixlen
    body = struct.pack("=BBBBI", family, length, flags, RT_SCOPE_UNIVERSE, index)
    for kind in (IFA_LOCAL, IFA_ADDRESS):
        body += struct.pack("=HH", ATTRIBUTE_HEADER_BYTES + len(packed), kind) + packed
    wanted = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL
    length = NETLINK_HEADER.size + len(body)
    return NETLINK_HEADER.pack(length, RTM_NEWADDR, wanted, number, 0) + body


def _answered_error(answer: bytes, number: int) -> int:
    """Return the errno in the kernel's answer to a request, 0 for success."""
    _, kind, _, answered, _ = NETLINK_HEADER.unpack_from(answer)
    if kind != NLMSG_ERROR or answered != number:
        raise AgentError(f"the kernel answered request {number} with message {kind} to {answered}")
    (error,) = struct.unpack_from("=i", answer, NETLINK_HEADER.size)
    return -int(error)
