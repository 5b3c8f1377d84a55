"""GPU memory through captures and restores with CRIU, on the emulated driver: what is where."""

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import snapstore
from snapagent.capture import CaptureRequest, capture, find_obstacles
from snapagent.config import Settings
from snapagent.errors import PreflightFailed
from snapagent.gpu.driver import Driver
from snapagent.gpu.engine import GpuSettings
from snapagent.linux.processes import children
from snapagent.memory.broker import MemoryBroker
from snapagent.memory.warming import warm_external
from snapagent.restore import Restoration, RestoreRequest, RestoreResult
from snapagent.server.gpus import DaemonGpus
from snapagent.server.stores import Stores
from snapstore import NodeCache, StoreOptions
from snapstore.errors import BackendError
from tests.support.agent import Agent
from tests.support.blake3_host import emulated_kernels
from tests.support.external import ExternalWorkload
from tests.support.external_lives import FRESH, NAME, bring_back, restoring, take
from tests.support.gpu import emulated_driver, emulated_environment
from tests.support.network_locks import without_network_locks
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.criu, pytest.mark.slow]

MIB = 1 << 20
SIZE_MIB = 64
DEVICE_BYTES = 256 * MIB
PROGRAM = "tests.support.programs.gpu_arrays"
_seeds = itertools.count((os.getpid() << 8) + 128)


@pytest.fixture
def seed() -> int:
    return next(_seeds) & 0x7FFFFFFF


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, seed: int) -> Driver:
    """The agent's driver, with a state of its own."""
    return here(monkeypatch, seed)


def here(monkeypatch: pytest.MonkeyPatch, seed: int, **settings: int) -> Driver:
    """Let this process be on a machine with these GPUs from now on."""
    settings = {"devices": 2, "memory": DEVICE_BYTES} | settings
    name = f"libcuda-{seed}-{abs(hash(tuple(settings.items())))}"
    return emulated_driver(monkeypatch, name, seed=seed, **settings)


@pytest.fixture
def gpu_broker(short_dir: Path, driver: Driver) -> Iterator[MemoryBroker]:
    with MemoryBroker(short_dir / "memory.sock") as running:
        yield running


@pytest.fixture
def gpu_workload(
    short_dir: Path, gpu_broker: MemoryBroker, seed: int
) -> Iterator[ExternalWorkload]:
    home = short_dir / "home"
    home.mkdir()
    variables = emulated_environment(devices=2, memory=DEVICE_BYTES, seed=seed)
    with (
        without_network_locks(),
        ExternalWorkload(
            home, gpu_broker.path, size_mib=SIZE_MIB, program=PROGRAM, variables=variables
        ) as living,
    ):
        yield living


def used_bytes(driver: Driver) -> list[int]:
    """Return how much of each GPU anybody uses."""
    found = []
    for device in driver.devices:
        with driver.open(device.ordinal) as gpu:
            free, total = gpu.memory_info()
            found.append(total - free)
    return found


def test_the_source_goes_on_and_the_copy_is_the_same(
    agent: Agent,
    gpu_broker: MemoryBroker,
    gpu_workload: ExternalWorkload,
    driver: Driver,
) -> None:
    """Goal: memory of two GPUs is the same before and after, in the source and in what came back.

    Method: capture a living process; its source has its memory at once. Kill it, restore it in
    fresh namespaces, and again from a capture of the first copy, which has changed.
    """
    workload, broker = gpu_workload, gpu_broker
    before = workload.ask("digest")
    assert workload.ask("release") == "released"
    result = take(agent, broker, workload.pid)
    assert workload.ask("resume") == "resumed"
    assert workload.ask("digest") == before
    assert result.external_bytes >= SIZE_MIB * MIB
    assert result.page_bytes < 96 * MIB
    assert result.cuda_checkpoint_s is not None
    assert workload.ask("change") == "changed"
    workload.end()
    wait_until(lambda: not broker.status(), "the memory of the source is freed")
    wait_until(lambda: used_bytes(driver) == [0, 0], "the memory of the GPUs is free")

    restored = bring_back(agent, broker)
    assert restored.external_bytes >= SIZE_MIB * MIB
    assert restored.cuda_restore_s is not None
    assert workload.ask("zeros") == "right"
    assert workload.ask("resume") == "resumed"
    assert workload.ask("digest") == before
    assert workload.ask("change") == "changed"
    changed = workload.ask("digest")
    assert workload.ask("release") == "released"
    take(agent, broker, restored.root_pid, "test/gpu:v2", stop=True)
    workload.end()

    bring_back(agent, broker, "test/gpu:v2")
    assert workload.ask("resume") == "resumed"
    assert workload.ask("digest") == changed
    workload.end()
    wait_until(lambda: not broker.status(), "all memory is freed")


def test_an_agent_without_the_driver_says_so(
    agent: Agent, gpu_workload: ExternalWorkload, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SNAPAGENT_LIBCUDA", "/nowhere/libcuda.so.1")
    obstacles = find_obstacles(gpu_workload.pid, agent.config)
    (missing,) = [one for one in obstacles if one.code == "cuda-missing"]
    assert "NVIDIA driver" in missing.remedy


def test_what_is_not_released_is_not_captured(
    agent: Agent, gpu_broker: MemoryBroker, gpu_workload: ExternalWorkload
) -> None:
    with pytest.raises(PreflightFailed, match="mapped, which CRIU would copy"):
        take(agent, gpu_broker, gpu_workload.pid)
    request = CaptureRequest(pid=gpu_workload.pid, name=NAME)
    with (
        snapstore.open_store(agent.url) as store,
        pytest.raises(PreflightFailed, match="unix-outside"),
    ):
        capture(store, request, agent.config)
    assert len(gpu_workload.ask("digest")) == 64


def test_a_failed_capture_leaves_the_source_its_gpus(
    agent: Agent, gpu_broker: MemoryBroker, gpu_workload: ExternalWorkload
) -> None:
    before = gpu_workload.ask("digest")
    gpu_workload.ask("release")
    Path(agent.url.removeprefix("file://"), "packs").write_bytes(b"no directory")
    with pytest.raises(BackendError):
        take(agent, gpu_broker, gpu_workload.pid)
    assert gpu_workload.ask("resume") == "resumed"
    assert gpu_workload.ask("digest") == before


@pytest.fixture
def captured(agent: Agent, gpu_broker: MemoryBroker, gpu_workload: ExternalWorkload) -> str:
    """Capture the workload and end it; returns what its memory was."""
    before = gpu_workload.ask("digest")
    gpu_workload.ask("release")
    take(agent, gpu_broker, gpu_workload.pid, stop=True)
    return before


def test_it_comes_back_on_other_gpus_of_the_same_model(
    agent: Agent,
    captured: str,
    gpu_broker: MemoryBroker,
    gpu_workload: ExternalWorkload,
    monkeypatch: pytest.MonkeyPatch,
    short_dir: Path,
    seed: int,
) -> None:
    """Goal: UUIDs are mapped, in the driver's state as in the external memory.

    Method: the agent is on a machine with GPUs of other UUIDs; the copy allocates more there.
    """
    monkeypatch.undo()
    other = here(monkeypatch, seed + 1)
    gpu_broker.close()
    with MemoryBroker(short_dir / "memory.sock") as broker:
        bring_back(agent, broker)
        assert gpu_workload.ask("resume") == "resumed"
        assert gpu_workload.ask("digest") == captured
        assert gpu_workload.ask("change") == "changed"
        assert all(used >= SIZE_MIB // 2 * MIB for used in used_bytes(other))
        gpu_workload.end()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model": 1}, "gpu-model: it needs 2 of Emulated GPU 0 more"),
        ({"devices": 1}, "gpu-model: it needs 1 of Emulated GPU 0 more"),
        ({"memory": 32 * MIB}, "gpu-model"),
        ({"version": 12080}, "cuda-driver"),
    ],
    ids=["model", "count", "size", "driver"],
)
def test_a_machine_that_does_not_fit_is_refused(
    agent: Agent,
    captured: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    seed: int,
    settings: dict[str, int],
    words: str,
) -> None:
    monkeypatch.undo()
    here(monkeypatch, seed + 1, **settings)
    with (
        MemoryBroker(tmp_path / "memory.sock") as broker,
        pytest.raises(PreflightFailed, match=words) as caught,
        restoring(agent, broker) as restoration,
    ):
        restoration.start()
    assert caught.value.exit_code == 7


def is_watched(pid: int) -> bool:
    """Tell whether a userfaultfd gets the faults of any mapping of a process."""
    flags = Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8")
    return any(line.startswith("VmFlags:") and " um" in line for line in flags.splitlines())


def test_nobody_watches_its_memory_when_it_runs(
    agent: Agent, captured: str, gpu_broker: MemoryBroker, gpu_workload: ExternalWorkload
) -> None:
    """The driver touches what was never used, which must not cost a fault of the agent each."""
    with restoring(agent, gpu_broker) as restoration:
        restoration.start()
        pids = [restoration.root_pid, *children(restoration.root_pid)]
        assert len(pids) == 2
        assert not [pid for pid in pids if is_watched(pid)]
        restoration.wait_filled()
        restored = restoration.release()
    assert restored.lazy.fill_bytes > restored.eager_bytes
    assert restored.lazy.filling_s > 0
    assert gpu_workload.ask("resume") == "resumed"
    assert gpu_workload.ask("digest") == captured
    gpu_workload.end()


def test_another_driver_can_be_allowed(
    agent: Agent,
    captured: str,
    gpu_broker: MemoryBroker,
    gpu_workload: ExternalWorkload,
    monkeypatch: pytest.MonkeyPatch,
    short_dir: Path,
    seed: int,
) -> None:
    monkeypatch.undo()
    here(monkeypatch, seed, version=13010)
    gpu_broker.close()
    with MemoryBroker(short_dir / "memory.sock") as broker:
        with restoring(agent, broker, allow_driver_change=True) as restoration:
            restoration.run()
        assert gpu_workload.ask("resume") == "resumed"
        assert gpu_workload.ask("digest") == captured
        gpu_workload.end()


def test_where_another_gpu_has_room_it_goes_there(
    agent: Agent,
    gpu_broker: MemoryBroker,
    captured: str,
    gpu_workload: ExternalWorkload,
    monkeypatch: pytest.MonkeyPatch,
    short_dir: Path,
    seed: int,
) -> None:
    """The machine has one GPU more, and one of those that were used is full."""
    monkeypatch.undo()
    gpu_broker.close()
    three = here(monkeypatch, seed, devices=3)
    handle = three.create_memory(1, DEVICE_BYTES - 16 * MIB)
    with MemoryBroker(short_dir / "memory.sock") as broker:
        bring_back(agent, broker)
        assert gpu_workload.ask("resume") == "resumed"
        assert gpu_workload.ask("digest") == captured
        first, second, third = used_bytes(three)
        assert second == DEVICE_BYTES - 16 * MIB
        assert min(first, third) >= SIZE_MIB // 2 * MIB
        gpu_workload.end()
    three.release_memory(handle)


def test_too_little_memory_is_refused_before_anything_is_begun(
    agent: Agent, captured: str, gpu_broker: MemoryBroker, driver: Driver
) -> None:
    handle = driver.create_memory(1, DEVICE_BYTES - 16 * MIB)
    with (
        pytest.raises(PreflightFailed, match=f"gpu-memory.*{driver.devices[1].uuid}"),
        restoring(agent, gpu_broker) as restoration,
    ):
        restoration.start()
    driver.release_memory(handle)


@dataclasses.dataclass
class CachedLives:
    """A workload that was captured and comes back again and again, through a node's cache."""

    agent: Agent
    broker: MemoryBroker
    workload: ExternalWorkload
    options: StoreOptions
    digest: str

    @property
    def packs(self) -> Path:
        return Path(self.agent.url.removeprefix("file://"), "packs")

    def again(self) -> RestoreResult:
        """Restore it, compare all of its memory, and end it."""
        request = RestoreRequest(name=NAME, place=FRESH, broker=self.broker)
        with (
            snapstore.open_store(self.agent.url, self.options) as store,
            Restoration(store, request, self.agent.config) as restoration,
        ):
            restored = restoration.run()
        assert self.workload.ask("resume") == "resumed"
        assert self.workload.ask("digest") == self.digest
        self.workload.end()
        wait_until(lambda: not self.broker.status(), "the memory is freed")
        return restored

    def warm(self, restored: RestoreResult) -> None:
        """Do what the daemon does after a restore, and wait for it."""
        said: list[str] = []
        settings = Settings(node_cache=str(self.options.node_cache))
        with contextlib.closing(Stores(settings)) as stores:
            gpus = DaemonGpus(self.broker.gpus, stores, prepare=False, say=said.append)
            gpus.start()
            gpus.restored(self.agent.url, None, restored)
            wait_until(lambda: _warming(gpus) == 0, "the cache has it")
            gpus.close()
        assert not said


def _warming(gpus: DaemonGpus) -> int:
    told = gpus.describe()
    return told.warming if told is not None else 0


@pytest.fixture
def cached_lives(
    agent: Agent, driver: Driver, short_dir: Path, seed: int, memory_directory: Path
) -> Iterator[CachedLives]:
    """With a broker whose GPUs hash, and that may lock pages of the cache."""
    home, cache = short_dir / "home", short_dir / "cache"
    home.mkdir()
    NodeCache.init(
        cache, budget_bytes=DEVICE_BYTES, memory=memory_directory, memory_budget_bytes=DEVICE_BYTES
    ).close()
    variables = emulated_environment(devices=2, memory=DEVICE_BYTES, seed=seed)
    settings = GpuSettings(workers=2, code=emulated_kernels(), registered_bytes=DEVICE_BYTES)
    with (
        MemoryBroker(short_dir / "memory.sock", gpu=settings) as broker,
        without_network_locks(),
        ExternalWorkload(
            home, broker.path, size_mib=SIZE_MIB, program=PROGRAM, variables=variables
        ) as workload,
    ):
        digest = workload.ask("digest")
        workload.ask("release")
        take(agent, broker, workload.pid, stop=True)
        yield CachedLives(agent, broker, workload, StoreOptions(node_cache=cache), digest)


def test_the_second_restore_reads_nothing_of_it_from_the_store(
    cached_lives: CachedLives, short_dir: Path, memory_directory: Path
) -> None:
    """Goal: what was restored once comes from the node's cache, fetched by the GPU alone.

    Method: restore, warm, and move the store's packs away: what else is needed of them is in the
    cache since the first restore. Then damage the cache in memory, with the packs back.
    """
    lives = cached_lives
    restored = lives.again()
    assert restored.gpu_bottleneck in {"read", "copy", "hash"}
    sources = restored.external_sources
    assert sources["store"] >= SIZE_MIB * MIB
    assert sources["cache"] == sources["registered"] == 0
    lives.warm(restored)
    with snapstore.open_store(lives.agent.url, lives.options) as store:
        warmed = warm_external(store.snapshot(NAME), lives.broker.gpus)
    assert warmed.cached_bytes == warmed.registered_bytes >= SIZE_MIB * MIB

    lives.packs.rename(short_dir / "packs")
    sources = lives.again().external_sources
    assert sources["registered"] >= SIZE_MIB * MIB
    assert sources["store"] == sources["cache"] == 0
    (short_dir / "packs").rename(lives.packs)

    for path in memory_directory.iterdir():
        with path.open("r+b") as file:
            file.seek(MIB)
            file.write(b"damage")
    assert lives.again().external_sources["store"] >= SIZE_MIB * MIB
