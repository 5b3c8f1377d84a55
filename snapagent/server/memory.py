"""The daemon's memory broker: made of the settings, and what is told of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from snapagent import api
from snapagent.gpu.engine import GpuSettings
from snapagent.memory.broker import BrokerLimits, MemoryBroker
from snapagent.server.policy import Peer, Policy
from snapstore.units import parse_bytes

if TYPE_CHECKING:
    from snapagent.config import Settings

__all__ = ["describe_broker", "gpu_settings", "make_broker"]

_MODE = 0o666
"""Workloads have any user, also those that are restored: the broker decides by what the kernel says
of each."""


def make_broker(settings: Settings, policy: Policy) -> MemoryBroker | None:
    """Return the broker that the settings want, still to be started; none if they want none."""
    if not settings.broker:
        return None
    machine = BrokerLimits()
    count = settings.broker_processes
    limits = BrokerLimits(
        # Each has one for as long as its memory is mapped; others only ask.
        connections=2 * count,
        connections_per_user=max(count // 2, 1),
        sessions=count,
        sessions_per_user=max(count // 4, 1),
        regions=settings.broker_regions,
        session_bytes=_bytes(settings.broker_process_bytes, machine.session_bytes),
        total_bytes=_bytes(settings.broker_bytes, machine.total_bytes),
        gpu_bytes=_bytes(settings.broker_gpu_bytes, machine.gpu_bytes),
    )

    def may_use(uid: int, gids: frozenset[int]) -> bool:
        return settings.broker_users == "all" or policy.may_keep_memory(Peer(0, uid, gids))

    return MemoryBroker(
        settings.broker_path,
        limits=limits,
        mode=_MODE,
        may_use=may_use,
        fill_threads=settings.threads,
        gpu=gpu_settings(settings),
    )


def gpu_settings(settings: Settings) -> GpuSettings:
    """Return how memory of GPUs is filled and stored."""
    return GpuSettings(
        workers=settings.gpu_workers,
        pinned_bytes=_bytes(settings.gpu_pinned_bytes, 0),
        registered_bytes=_bytes(settings.gpu_registered_bytes, 0),
        kernels=Path(settings.state_directory) / "kernels",
        check_all=settings.gpu_check_all,
    )


def _bytes(text: str, default: int) -> int:
    return parse_bytes(text) if text else default


def describe_broker(broker: MemoryBroker) -> api.MemoryStatus:
    """Sum up what workloads have of it."""
    processes: dict[str, int] = {}
    regions = size_bytes = 0
    for one in broker.status():
        processes[one.state] = processes.get(one.state, 0) + 1
        regions += one.regions
        size_bytes += one.size_bytes
    return api.MemoryStatus(
        socket=str(broker.path),
        holder_pid=broker.holder_pid if broker.has_holder else None,
        processes=processes,
        regions=regions,
        size_bytes=size_bytes,
    )
