"""Network locks: the tables of nftables with which a dumping CRIU holds packets back.

CRIU makes one for each dump and names it after its run. It drops what is sent between the addresses
of the connections that were dumped, so that nobody answers in place of processes that are gone. A
restore in the same network removes it, a dump whose processes go on as well; a dump that ends them
leaves it even if there was no connection, and so does a CRIU that was killed.

The requests are those of nfnetlink: a deletion has to stand in a batch, a look-up stands alone.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import struct
from typing import Final

from snapagent.errors import AgentError
from snapagent.linux.network import (
    ANSWER_BYTES_MAX,
    ATTRIBUTE_HEADER_BYTES,
    NETLINK_HEADER,
    NLM_F_ACK,
    NLM_F_REQUEST,
    NLMSG_ERROR,
    in_network,
)

__all__ = ["find_network_lock", "network_lock_names", "remove_network_lock"]

_RUN_ID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_NAME_BYTES_MAX: Final = len("CRIU-") + 21
"""CRIU 4.2 and 4.3 write `inet CRIU-<run id>` into 32 bytes, which cuts the end of it off."""

_NETLINK_NETFILTER: Final = 12
_FAMILY_INET: Final = 1
"""NFPROTO_INET: tables for both versions of IP."""
_SUBSYSTEM_NFTABLES: Final = 10
_BATCH_BEGIN: Final = 16
_BATCH_END: Final = 17
_GET_TABLE: Final = _SUBSYSTEM_NFTABLES << 8 | 1
_DELETE_TABLE: Final = _SUBSYSTEM_NFTABLES << 8 | 2
_TABLE_NAME: Final = 1
_SEQUENCE: Final = 1
_ANSWER_S_MAX: Final = 10
_ABSENT: Final = {errno.ENOENT, errno.EOPNOTSUPP, errno.EPROTONOSUPPORT}
"""The last two: of a kernel that has no tables at all."""


def find_network_lock(network_fd: int, run_id: str) -> str | None:
    """Return the name of the table that this run of CRIU has left in a network namespace, if any.

    Raises:
        AgentError: The kernel does not allow to look.
    """
    for name in network_lock_names(run_id):
        if _ask(network_fd, _request(_GET_TABLE, NLM_F_REQUEST, name), f"find {name}"):
            return name
    return None


def remove_network_lock(network_fd: int, run_id: str) -> None:
    """Remove what this run of CRIU has left in a network namespace. Others' tables are not touched.

    Only for a CRIU that has ended.

    Raises:
        AgentError: The kernel does not allow it.
    """
    for name in network_lock_names(run_id):
        batch = _message(_BATCH_BEGIN, NLM_F_REQUEST, _batch_head(), 0)
        batch += _request(_DELETE_TABLE, NLM_F_REQUEST | NLM_F_ACK, name)
        batch += _message(_BATCH_END, NLM_F_REQUEST, _batch_head(), 2)
        _ask(network_fd, batch, f"remove {name}")


def network_lock_names(run_id: str) -> list[str]:
    """Return the names that the table of a run may have, the usual one first.

    None if that is no id of a run.
    """
    if not _RUN_ID.fullmatch(run_id):
        return []
    whole = f"CRIU-{run_id}"
    return [whole[:_NAME_BYTES_MAX], whole]


def _ask(network_fd: int, request: bytes, what: str) -> bool:
    """Send a request in the namespace; false if there is no such table."""
    try:
        error = in_network(network_fd, lambda: _exchange(request))
    except OSError as failure:
        error = failure.errno or errno.EIO
    if error and error not in _ABSENT:
        raise AgentError(
            f"cannot {what} among the tables of nftables: {os.strerror(error)}",
            next_step="`nft list tables` shows what is there, `nft delete table` removes it",
        )
    return not error


def _exchange(request: bytes) -> int:
    """Return the errno of the answer to a request, 0 for success."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER) as kernel:
        kernel.settimeout(_ANSWER_S_MAX)
        kernel.bind((0, 0))
        kernel.send(request)
        answer = kernel.recv(ANSWER_BYTES_MAX)
    _, kind, *_ = NETLINK_HEADER.unpack_from(answer)
    if kind != NLMSG_ERROR:
        return 0
    (error,) = struct.unpack_from("=i", answer, NETLINK_HEADER.size)
    return -int(error)


def _request(kind: int, flags: int, table: str) -> bytes:
    name = table.encode("ascii") + b"\0"
    attribute = struct.pack("=HH", ATTRIBUTE_HEADER_BYTES + len(name), _TABLE_NAME) + name
    attribute += bytes(-len(attribute) % 4)
    return _message(kind, flags, struct.pack("=BBH", _FAMILY_INET, 0, 0) + attribute, _SEQUENCE)


def _message(kind: int, flags: int, body: bytes, sequence: int) -> bytes:
    return NETLINK_HEADER.pack(NETLINK_HEADER.size + len(body), kind, flags, sequence, 0) + body


def _batch_head() -> bytes:
    """Return what says which part of netfilter a batch is for, in network byte order."""
    return struct.pack("=BB", socket.AF_UNSPEC, 0) + struct.pack(">H", _SUBSYSTEM_NFTABLES)
