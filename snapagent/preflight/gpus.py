"""Whether the GPUs here can take the place of those of a snapshot, and which takes which."""

from __future__ import annotations

import collections
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from snapagent.errors import AgentError, GpuUnavailable
from snapagent.gpu.checkpoint import require_checkpoints
from snapagent.gpu.facts import driver_build
from snapagent.gpu.owned import GpuMemory
from snapagent.preflight.communicators import check_communicators
from snapstore.clock import SystemClock
from snapstore.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from snapagent.gpu.driver import Device, Driver
    from snapagent.gpu.facts import CudaFacts, GpuFacts
    from snapagent.preflight.obstacles import Obstacles

__all__ = ["GpuPlan", "check_cuda", "plan_gpus"]

_FREED_S_MAX = 2.0
_FREED_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """Which GPU here takes the place of which of the snapshot, by UUID."""

    devices: Mapping[str, str] = field(default_factory=dict)

    @property
    def changed(self) -> Mapping[str, str]:
        """All of them, if any is another one; else none."""
        return self.devices if any(old != new for old, new in self.devices.items()) else {}


def plan_gpus(
    found: Obstacles,
    facts: CudaFacts | None,
    needed: Mapping[str, int],
    memory: GpuMemory,
    *,
    allow_driver_change: bool,
) -> GpuPlan:
    """Choose GPUs, and tell what stands in the way.

    Args:
        found: Gets the obstacles.
        facts: What the snapshot says of its GPUs; none if it has none.
        needed: How many bytes of external memory there are on each GPU of the snapshot.
        memory: Of the GPUs here.
        allow_driver_change: Whether another version of the driver is only worth a word.
    """
    if facts is None and not needed:
        return GpuPlan()
    driver = _find_driver(found, memory, "the snapshot has")
    if driver is None:
        return GpuPlan()
    if facts is None:
        unknown = ", ".join(sorted(needed))
        found.block(
            "gpu-unknown",
            f"the snapshot has memory of {unknown} and does not say what those were",
            "capture it anew",
        )
        return GpuPlan()
    _check_driver(found, facts, driver, allow_change=allow_driver_change)
    plan = GpuPlan(_choose(found, facts, needed, memory))
    _check_room(found, plan, needed, memory)
    return plan


def check_cuda(found: Obstacles, pids: Sequence[int]) -> None:
    """Tell whether processes with GPU state can be captured here."""
    driver = _find_driver(found, GpuMemory(), "a process has")
    if driver is not None:
        check_communicators(found, pids, gpus=len(driver.devices))


def _find_driver(found: Obstacles, memory: GpuMemory, who: str) -> Driver | None:
    try:
        driver = memory.driver
        require_checkpoints(driver)
    except GpuUnavailable as error:
        found.block("cuda-missing", f"{who} GPU state, and {error}", error.next_step)
        return None
    return driver


def _check_driver(
    found: Obstacles, facts: CudaFacts, driver: Driver, *, allow_change: bool
) -> None:
    there = (facts.driver or f"for CUDA {facts.cuda}", facts.cuda)
    here = (driver_build() or f"for CUDA {driver.version}", driver.version)
    if there != here:
        found.add(
            "cuda-driver",
            f"it was captured with the NVIDIA driver {there[0]}, this one is {here[0]}",
            "install the same driver; or restore with --allow-driver-change, which NVIDIA does not "
            "promise to work: if it does not, the restore fails and nothing is left",
            blocking=not allow_change,
        )


def _choose(
    found: Obstacles, facts: CudaFacts, needed: Mapping[str, int], memory: GpuMemory
) -> dict[str, str]:
    """Give each GPU of the snapshot one here of the same model: itself if that has room."""
    free = {device.uuid: device for device in memory.driver.devices}
    chosen: dict[str, str] = {}
    missing: list[GpuFacts] = []
    # Those with memory come first; of the others the processes may have known nothing.
    for one in sorted(facts.gpus, key=lambda one: -needed.get(one.uuid, 0)):
        fitting = _fitting(one, free.values())
        if not fitting:
            missing.append(one)
            continue
        uuid = _with_room(fitting, needed.get(one.uuid, 0), memory)
        chosen[one.uuid] = uuid
        del free[uuid]
    required = [one for one in missing if not needed or one.uuid in needed]
    _tell_missing(found, required, memory.driver)
    unknown = needed.keys() - {one.uuid for one in facts.gpus}
    for uuid in sorted(unknown):
        found.block(
            "gpu-unknown",
            f"the snapshot has memory of {uuid} and does not say what that was",
            "capture it anew",
        )
    return chosen


def _fitting(one: GpuFacts, free: Iterable[Device]) -> list[str]:
    """Return GPUs that can take the place of one, itself first."""
    fitting = [
        device.uuid
        for device in free
        if device.name == one.name and device.total_bytes >= one.total_bytes
    ]
    return sorted(fitting, key=lambda uuid: uuid != one.uuid)


def _with_room(fitting: Sequence[str], size_bytes: int, memory: GpuMemory) -> str:
    """Return the first that has room; if none has, the first."""
    if not size_bytes:
        return fitting[0]
    for number, uuid in enumerate(fitting):
        has_room = _has_room_soon if number == 0 else _has_room
        if has_room(memory, uuid, size_bytes):
            return uuid
    return fitting[0]


def _tell_missing(found: Obstacles, missing: Sequence[GpuFacts], driver: Driver) -> None:
    if not missing:
        return
    models = collections.Counter(one.name for one in missing)
    wanted = ", ".join(f"{count} of {name}" for name, count in sorted(models.items()))
    here = collections.Counter(device.name for device in driver.devices)
    there = ", ".join(f"{count} of {name}" for name, count in sorted(here.items())) or "none"
    found.block(
        "gpu-model",
        f"it needs {wanted} more than there are here; this machine has {there}",
        "restore it on a machine with the same GPUs, or give the agent's container more of them",
    )


def _has_room(memory: GpuMemory, uuid: str, size_bytes: int) -> bool:
    try:
        return memory.has_room(uuid, size_bytes)
    except AgentError:
        return False


def _has_room_soon(memory: GpuMemory, uuid: str, size_bytes: int) -> bool:
    """Tell whether there is room; memory of what has just ended may take a moment to go."""
    clock = SystemClock()
    deadline_s = clock.monotonic_s() + _FREED_S_MAX
    while not _has_room(memory, uuid, size_bytes):
        if clock.monotonic_s() > deadline_s:
            return False
        clock.sleep_s(_FREED_POLL_S)
    return True


def _check_room(
    found: Obstacles, plan: GpuPlan, needed: Mapping[str, int], memory: GpuMemory
) -> None:
    for old, size_bytes in sorted(needed.items()):
        uuid = plan.devices.get(old)
        if uuid is None:
            continue
        if not _has_room(memory, uuid, size_bytes):
            found.block(
                "gpu-memory",
                f"the snapshot has {format_bytes(size_bytes)} on {uuid}, which has less left",
                "end what uses this GPU, or restore on another machine",
            )
