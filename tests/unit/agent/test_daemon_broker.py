"""The daemon's broker as its settings want it."""

from pathlib import Path

from snapagent.config import Settings
from snapagent.gpu.engine import GpuSettings
from snapagent.memory.broker import BrokerLimits, MemoryBroker
from snapagent.server.memory import describe_broker, gpu_settings, make_broker
from snapagent.server.policy import Policy

POLICY = Policy((), "file:///store")


def limits_of(settings: Settings) -> BrokerLimits:
    broker = make_broker(settings, POLICY)
    assert broker is not None
    return broker.limits


def test_without() -> None:
    assert make_broker(Settings(broker=False), POLICY) is None


def test_limits() -> None:
    """Those that are not set are the broker's own; those of one user grow with those of all."""
    assert limits_of(Settings()) == BrokerLimits()
    settings = Settings(
        broker_bytes="3GiB",
        broker_process_bytes="1GiB",
        broker_processes=1024,
        broker_regions=99,
        broker_gpu_bytes="2GiB",
    )
    found = limits_of(settings)
    assert (found.total_bytes, found.session_bytes, found.regions) == (3 << 30, 1 << 30, 99)
    assert found.gpu_bytes == 2 << 30
    assert (found.sessions, found.sessions_per_user) == (1024, 256)
    assert found.connections >= 2 * found.sessions
    assert found.connections_per_user >= found.sessions_per_user


def test_gpus() -> None:
    settings = Settings(
        state_directory="/var/lib/a",
        gpu_workers=3,
        gpu_pinned_bytes="64MiB",
        gpu_registered_bytes="8GiB",
        gpu_check_all=True,
    )
    assert gpu_settings(settings) == GpuSettings(
        workers=3,
        pinned_bytes=64 << 20,
        registered_bytes=8 << 30,
        kernels=Path("/var/lib/a/kernels"),
        check_all=True,
    )
    assert gpu_settings(Settings()) == GpuSettings()


def test_what_is_told(tmp_path: Path) -> None:
    with MemoryBroker(tmp_path / "sock") as broker:
        told = describe_broker(broker)
    assert told.holder_pid == broker.holder_pid
    assert (told.processes, told.regions, told.size_bytes) == ({}, 0, 0)
