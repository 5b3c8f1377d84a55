"""What a workload uses to keep memory with the agent. Needs nothing but Python's own library.

It imports nothing else of `snapagent`, so that it costs a workload nothing; numpy and torch are
used only if a block is asked for as an array or tensor. See `docs/external-memory.md`.
"""

from __future__ import annotations

from snapagent.workload.block import Block
from snapagent.workload.errors import (
    BrokerUnreachable,
    ExternalMemoryError,
    MemoryLost,
    MemoryRefused,
    MemoryReleased,
    NotTheOwner,
)
from snapagent.workload.host_memory import SOCKET_DEFAULT, SOCKET_VARIABLE, HostMemory

__all__ = [
    "SOCKET_DEFAULT",
    "SOCKET_VARIABLE",
    "Block",
    "BrokerUnreachable",
    "ExternalMemoryError",
    "HostMemory",
    "MemoryLost",
    "MemoryRefused",
    "MemoryReleased",
    "NotTheOwner",
]
