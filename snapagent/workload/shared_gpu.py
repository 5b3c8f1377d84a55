"""GPU memory of other processes that this one has open (CUDA IPC), as NCCL has with peer access.

Drivers before 610 checkpoint a process that has some without a word and cannot restore it: it is
lost. From outside nothing can be seen of it. In the process itself the driver says of any address
what is there, and memory that was allocated here differs from memory that was opened (seen on 580):
both belong to a context, and only the former can be given to others in turn. Variables of kernels'
modules look as if they had been opened, so that less than 2 MiB of anything is taken for such a
variable; what NCCL has open is larger.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapagent.workload.libcuda import Libcuda

__all__ = ["opened_bytes", "restores_opened"]

_CONTEXT: Final = 1
_MEMORY_TYPE: Final = 2
_IS_MANAGED: Final = 8
_CAN_BE_SHARED: Final = 10
_RANGE_START: Final = 11
_RANGE_SIZE: Final = 12
_POOL: Final = 17
"""Of `CUpointer_attribute`."""
_ON_DEVICE: Final = 2
_STEP_BYTES: Final = 2 << 20
"""Memory is opened in units of this, and variables are mostly smaller."""
_PROBES_MAX: Final = 1 << 18
"""Half a second; more address space is not looked at."""
_BRANCH_RESTORES: Final = 610
_VERSION = Path("/sys/module/nvidia/version")


class _Span(NamedTuple):
    start: int
    end: int


def restores_opened() -> bool:
    """Tell whether the driver of this machine restores processes with such memory."""
    try:
        branch = _VERSION.read_text(encoding="ascii").split(".")[0]
        return int(branch) >= _BRANCH_RESTORES
    except (OSError, ValueError):
        return False


def opened_bytes(cuda: Libcuda) -> int:
    """Return how much memory of other processes is open here, as far as that can be seen.

    Looks at all addresses that are not of files, which takes some ten milliseconds. External memory
    does not count. A context must be current.
    """
    if not cuda.has("cuPointerGetAttribute"):
        return 0
    found = _suspicious_bytes(cuda)
    # Where nothing can be shared, as on some virtual GPUs, all memory would look as if opened.
    return found if found and _can_share(cuda) else 0


def _can_share(cuda: Libcuda) -> bool:
    """Tell whether memory that is certainly this process's own looks so."""
    own = ctypes.c_uint64()
    if cuda.code("cuMemAlloc_v2", ctypes.byref(own), 1):
        return False
    try:
        return bool(_attribute(cuda, _CAN_BE_SHARED, own.value))
    finally:
        cuda.code("cuMemFree_v2", own.value)


def _suspicious_bytes(cuda: Libcuda) -> int:
    found, probes = 0, 0
    for span in _spans():
        at = -(-span.start // _STEP_BYTES) * _STEP_BYTES
        while at < span.end and probes < _PROBES_MAX:
            probes += 1
            there = _range_at(cuda, at)
            if there is None:
                at += _STEP_BYTES
                continue
            if there.end - there.start >= _STEP_BYTES and _is_opened(cuda, at):
                found += there.end - there.start
            at = -(-max(there.end, at + 1) // _STEP_BYTES) * _STEP_BYTES
    return found


def _spans() -> Iterator[_Span]:
    """Find where memory of GPUs can be: what is no file, nor the heap, the stack and the like."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        words = line.split(maxsplit=5)
        name = words[5] if len(words) > 5 else ""
        if not name or name.startswith("/memfd:"):
            start, _, end = words[0].partition("-")
            yield _Span(int(start, 16), int(end, 16))


def _range_at(cuda: Libcuda, address: int) -> _Span | None:
    """Return the allocation of a GPU's memory that an address is in; none if it is in none."""
    if _attribute(cuda, _MEMORY_TYPE, address) != _ON_DEVICE:
        return None
    start = _attribute(cuda, _RANGE_START, address)
    size = _attribute(cuda, _RANGE_SIZE, address)
    return _Span(start, start + size) if start and size else None


def _is_opened(cuda: Libcuda, address: int) -> bool:
    # What cuMemMap mapped has no context, and what comes out of pools or is managed is never shared
    # in this way.
    return (
        bool(_attribute(cuda, _CONTEXT, address))
        and not _attribute(cuda, _CAN_BE_SHARED, address)
        and not _attribute(cuda, _IS_MANAGED, address)
        and not _attribute(cuda, _POOL, address)
    )


def _attribute(cuda: Libcuda, number: int, address: int) -> int:
    """Return an attribute of an address; 0 where there is nothing."""
    value = ctypes.c_uint64()
    if cuda.code("cuPointerGetAttribute", ctypes.byref(value), number, address):
        return 0
    return value.value
