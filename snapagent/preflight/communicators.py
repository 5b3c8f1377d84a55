"""Signs of GPU memory that processes share, which the driver checkpoints and cannot restore.

Nothing of the memory itself can be seen from outside. What can be seen is that processes are ranks
of a communicator of NCCL that torch made, by the names of its threads, which are gone when it is
destroyed; and whether they were told not to use peer access.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from snapagent.preflight.procfs import process_name, read_text
from snapagent.workload.shared_gpu import restores_opened

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from snapagent.preflight.obstacles import Obstacles

__all__ = ["check_communicators"]

_THREAD: Final = "pt_nccl_"
"""Begins the names of threads that watch a communicator (torch 2.11: `pt_nccl_watchdg`)."""
_DISABLED: Final = b"NCCL_P2P_DISABLE"
_LEVEL: Final = b"NCCL_P2P_LEVEL"
_NO_LEVELS: Final = (b"LOC", b"0")
_SHOWN_MAX: Final = 8
_ENVIRONMENT_BYTES_MAX: Final = 1 << 20
"""A process says itself where its environment ends, and may name all of its address space. What is
not read counts as not there."""


def check_communicators(found: Obstacles, pids: Iterable[int], *, gpus: int) -> None:
    """Tell of ranks that may have memory of one another open.

    Args:
        found: Gets the obstacle.
        pids: Of the tree.
        gpus: How many this machine has: a communicator has one for each of its ranks.
    """
    if gpus < 2 or restores_opened():
        return
    ranks = [pid for pid in pids if _has_communicator(pid) and not _is_without_peers(pid)]
    if len(ranks) < 2:
        return
    shown = ", ".join(f"{pid} ({process_name(pid)})" for pid in ranks[:_SHOWN_MAX])
    more = f" and {len(ranks) - _SHOWN_MAX} more" if len(ranks) > _SHOWN_MAX else ""
    found.block(
        "gpu-shared",
        f"processes {shown}{more} are ranks of a communicator of NCCL, which have GPU memory of "
        "one another open unless that is turned off: this driver would checkpoint them and could "
        "not restore them",
        "destroy the communicator before (torch.distributed: destroy_process_group); or start them "
        "with NCCL_P2P_DISABLE=1 NCCL_CUMEM_ENABLE=0 NCCL_NVLS_ENABLE=0 in their environment",
    )


def _has_communicator(pid: int) -> bool:
    return any(name.startswith(_THREAD) for name in _thread_names(pid))


def _thread_names(pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - names are enough
            with contextlib.suppress(OSError):
                yield read_text(f"/proc/{pid}/task/{thread}/comm").strip()


def _is_without_peers(pid: int) -> bool:
    """Tell whether a process was started with peer access turned off."""
    try:
        with Path(f"/proc/{pid}/environ").open("rb") as file:
            words = file.read(_ENVIRONMENT_BYTES_MAX).split(b"\0")
    except OSError:
        return False
    variables = dict(word.split(b"=", 1) for word in words if b"=" in word)
    disabled = variables.get(_DISABLED, b"0").strip()
    return disabled not in {b"", b"0"} or variables.get(_LEVEL, b"").strip() in _NO_LEVELS
