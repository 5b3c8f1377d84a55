"""How much of a machine an experiment with several GPUs may take: what is free, and what fits.

What is free is read by `Machine.here`; all else is arithmetic on that.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapagent.gpu.driver import Driver

__all__ = ["Machine", "fitting_gib", "memory_folder"]

MIB, GIB = 1 << 20, 1 << 30
SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - the point of it
_GPU_RESERVE_BYTES: Final = 3 * GIB
"""Of each GPU: contexts of agent and ranks, a communicator, and room for checksums."""
_HOST_SHARE: Final = 8
"""One part in so many of the host's memory is left to others, 8 GiB at most."""
_HOST_RESERVE_BYTES: Final = 8 * GIB
_SMALLEST_GIB: Final = 1 / 64
_CGROUP: Final = Path("/sys/fs/cgroup")
_UNLIMITED: Final = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What is free.

    Attributes:
        gpu_bytes: Of each GPU.
        host_bytes: Of memory, for this control group.
        shared_bytes: In `/dev/shm`.
        cores: That may be used.
    """

    gpu_bytes: tuple[int, ...]
    host_bytes: int
    shared_bytes: int
    cores: int

    @classmethod
    def here(cls, driver: Driver) -> Machine:
        """Look at this machine; opens each GPU for a moment."""
        free = []
        for device in driver.devices:
            with driver.open(device.ordinal) as gpu:
                free.append(gpu.memory_info()[0])
        return cls(
            gpu_bytes=tuple(free),
            host_bytes=min(_available_bytes(), _cgroup_bytes()),
            shared_bytes=shutil.disk_usage(SHARED_MEMORY).free,
            cores=len(os.sched_getaffinity(0)),
        )


def fitting_gib(
    wanted_gib: float,
    machine: Machine,
    *,
    ranks: int,
    gpus: int,
    copies: int,
    rank_bytes: int,
    budget_bytes: int,
    folder_bytes: int,
) -> float:
    """Return how many GiB each rank can have, at most what is wanted.

    Args:
        wanted_gib: For each rank.
        machine: What is free.
        ranks: How many.
        gpus: Which they share.
        copies: How often the memory lies on the host: once in a store, once more in a cache.
        rank_bytes: Of the host for each rank besides, of which a half may be in the folder.
        budget_bytes: Of the store's buffers, besides.
        folder_bytes: What fits into the folder for stores.

    Raises:
        ValueError: Not even a little fits.
    """
    reserve = min(machine.host_bytes // _HOST_SHARE, _HOST_RESERVE_BYTES)
    host = machine.host_bytes - reserve - ranks * rank_bytes - budget_bytes
    host = min(host, folder_bytes - ranks * rank_bytes // 2)
    each_gpu = min(machine.gpu_bytes[:gpus]) - _GPU_RESERVE_BYTES
    on_host = host / copies / ranks
    on_gpu = each_gpu / -(-ranks // gpus)
    fits = min(on_host, on_gpu) / GIB
    if fits < _SMALLEST_GIB:
        short = "the host" if on_host < on_gpu else "a GPU"
        raise ValueError(f"{ranks} ranks do not fit: {short} has too little memory free")
    # In whole GiB where that is possible, so that runs can be compared.
    return min(wanted_gib, float(int(fits)) if fits >= 1 else fits)


@contextlib.contextmanager
def memory_folder(
    size_bytes: int, where: Path | None = None, huge: str = ""
) -> Iterator[tuple[Path, int]]:
    """Lend a folder in memory, with how much fits into it; it goes with all that is in it.

    `/dev/shm` often has half of the machine's memory, so a tmpfs of its own is mounted if that may
    be done; else `/dev/shm` has to do.

    Args:
        size_bytes: How large the tmpfs may become.
        where: An existing folder to use instead.
        huge: Whether the tmpfs gets large pages, in the words of mount(8): `always`, `within_size`
            or `advise`; what `/dev/shm` has unless given.
    """
    has_room = not huge and size_bytes <= shutil.disk_usage(SHARED_MEMORY).free
    if where is not None or has_room:
        with tempfile.TemporaryDirectory(prefix="eight-", dir=where or SHARED_MEMORY) as name:
            yield Path(name), shutil.disk_usage(name).free
        return
    with tempfile.TemporaryDirectory(prefix="eight-") as name:
        made = _mount(name, size_bytes, huge)
        if not made:
            with tempfile.TemporaryDirectory(prefix="eight-", dir=SHARED_MEMORY) as other:
                yield Path(other), shutil.disk_usage(other).free
            return
        try:
            yield Path(name), shutil.disk_usage(name).free
        finally:
            _unmount(name)


def _mount(path: str, size_bytes: int, huge: str) -> bool:
    options = f"size={size_bytes >> 20}m,mode=0700" + (f",huge={huge}" if huge else "")
    done = subprocess.run(  # noqa: S603 - the system's
        ["mount", "-t", "tmpfs", "-o", options, "eight", path],  # noqa: S607
        check=False,
        capture_output=True,
    )
    return done.returncode == 0


def _unmount(path: str) -> None:
    """Take it away; if something still holds it, it goes with that."""
    for command in (["umount", path], ["umount", "-l", path]):
        if not subprocess.run(command, check=False, capture_output=True).returncode:  # noqa: S603
            return


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return _UNLIMITED


def _cgroup_bytes() -> int:
    """Return what the control group leaves, of version 2 or 1; plenty where there is no limit."""
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            most = int((_CGROUP / limit).read_text(encoding="ascii"))
            return max(most - int((_CGROUP / used).read_text(encoding="ascii")), 0)
        except (OSError, ValueError):
            continue
    return _UNLIMITED
