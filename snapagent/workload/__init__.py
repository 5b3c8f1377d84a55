"""What runs inside of the processes that are captured; the standard library suffices for it.

The names here are of memory that is kept with the agent (`docs/external-memory.md`). They are
loaded when first asked for, and import nothing else of the agent; numpy and torch are imported only
if a block is asked for as one.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from snapagent.workload.block import Block
    from snapagent.workload.device_memory import DeviceBlock, DeviceMemory
    from snapagent.workload.errors import (
        BrokerUnreachable,
        ExternalMemoryError,
        MemoryLost,
        MemoryRefused,
        MemoryReleased,
        NotTheOwner,
    )
    from snapagent.workload.host_memory import SOCKET_DEFAULT, SOCKET_VARIABLE, HostMemory
    from snapagent.workload.torch_memory import TorchPool, torch_pool

__all__ = [
    "SOCKET_DEFAULT",
    "SOCKET_VARIABLE",
    "Block",
    "BrokerUnreachable",
    "DeviceBlock",
    "DeviceMemory",
    "ExternalMemoryError",
    "HostMemory",
    "MemoryLost",
    "MemoryRefused",
    "MemoryReleased",
    "NotTheOwner",
    "TorchPool",
    "torch_pool",
]

_HOMES = {
    "Block": "snapagent.workload.block",
    "DeviceBlock": "snapagent.workload.device_memory",
    "DeviceMemory": "snapagent.workload.device_memory",
    "HostMemory": "snapagent.workload.host_memory",
    "SOCKET_DEFAULT": "snapagent.workload.host_memory",
    "SOCKET_VARIABLE": "snapagent.workload.host_memory",
    "TorchPool": "snapagent.workload.torch_memory",
    "torch_pool": "snapagent.workload.torch_memory",
}


def __getattr__(name: str) -> object:
    """Load a public name; see PEP 562."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES.get(name, "snapagent.workload.errors")
    value: object = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value
