"""GPU memory of a broker, on the emulated driver: allocated, released, mapped again."""

import gc
import itertools
import os
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapagent.gpu.driver import Driver
from snapagent.memory.broker import BrokerLimits, MemoryBroker
from snapagent.workload import (
    BrokerUnreachable,
    DeviceBlock,
    DeviceMemory,
    HostMemory,
    MemoryRefused,
    MemoryReleased,
    NotTheOwner,
)
from snapagent.workload.dlpack import CUDA_DEVICE
from snapagent.workload.shared_gpu import opened_bytes
from snapagent.workload.torch_memory import SegmentSource
from tests.support.external import broker_process
from tests.support.gpu import DeviceBytes, emulated_driver, segment_functions

ROOT = Path(__file__).parents[3]
MIB = 1 << 20
REGION = 2 * MIB
DEVICE_BYTES = 128 * MIB
_seeds = itertools.count((os.getpid() << 8) + 1)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    seed = next(_seeds) & 0xFFFFFFFF
    return emulated_driver(monkeypatch, f"memory-{seed}", devices=2, memory=DEVICE_BYTES, seed=seed)


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="memory-") as folder:
        yield Path(folder) / "memory.sock"


@pytest.fixture
def broker(path: Path, driver: Driver) -> Iterator[MemoryBroker]:
    with MemoryBroker(path, limits=BrokerLimits(gpu_bytes=64 * MIB)) as running:
        yield running


@pytest.fixture
def memory(broker: MemoryBroker) -> Iterator[DeviceMemory]:
    with DeviceMemory(str(broker.path), region_bytes=REGION) as made:
        yield made


@pytest.fixture
def device(driver: Driver) -> Iterator[DeviceBytes]:
    opened = DeviceBytes(driver)
    yield opened
    opened.gpu.close()


@pytest.mark.slow
def test_any_sequence_keeps_what_was_written(
    memory: DeviceMemory, device: DeviceBytes, rng: random.Random
) -> None:
    """Goal: every block has its own bytes on either GPU, whatever comes and goes around it.

    Method: random steps against a dict of blocks and what was written to them: blocks of odd
    sizes and alignments, freed or forgotten in any order, with releases in between.
    """
    expected: dict[DeviceBlock, bytes] = {}
    for _ in range(150):
        kind = rng.choice(["allocate"] * 4 + ["free", "forget", "cycle"])
        if kind == "allocate":
            size = rng.choice([1, 511, 512, 513, 100_000, 3 * MIB + 1])
            alignment = rng.choice([1, 512, 4096, 2 * MIB])
            block = memory.allocate(size, device=rng.randrange(2), alignment=alignment)
            assert not block.address % max(alignment, 512)
            data = rng.randbytes(100)[:size]
            device.write(block.address + size - len(data), data)
            expected[block] = data
        elif kind == "cycle":
            memory.release()
            memory.resume(10)
        elif expected:
            block = rng.choice(list(expected))
            if kind == "free":
                block.free()
            del expected[block]
            del block
        for block, data in expected.items():
            end = block.address + block.size_bytes
            assert device.read(end - len(data), len(data)) == data


def test_released_memory_is_the_brokers_alone(
    broker: MemoryBroker, memory: DeviceMemory, device: DeviceBytes, driver: Driver
) -> None:
    block = memory.allocate(5000)
    interface = block.__cuda_array_interface__
    assert interface["data"] == (block.address, False)
    assert interface["shape"] == (5000,)
    device.write(block.address, b"x" * 5000)
    (status,) = broker.status()
    assert status.size_bytes == REGION
    memory.release()
    memory.release()
    with pytest.raises(MemoryReleased):
        block.__cuda_array_interface__  # noqa: B018 - it raises
    with pytest.raises(MemoryReleased):
        memory.allocate(1)
    assert driver.reserve(REGION, address=block.address) != block.address
    assert device.gpu.memory_info()[0] == DEVICE_BYTES - REGION
    memory.resume(10)
    assert device.read(block.address, 5000) == b"x" * 5000


def test_empty_regions_go_back(memory: DeviceMemory, broker: MemoryBroker) -> None:
    blocks = [memory.allocate(2 * REGION, device=number) for number in (0, 0, 1)]
    assert memory.size_bytes == broker.status()[0].size_bytes == 6 * REGION
    for block in blocks:
        block.free()
        block.free()
    with pytest.raises(ValueError, match="was freed"):
        blocks[0].__dlpack__()
    assert memory.size_bytes == broker.status()[0].size_bytes == 0


def test_a_block_lives_as_long_as_what_was_made_of_it(memory: DeviceMemory) -> None:
    block = memory.allocate(100, device=1)
    assert block.__dlpack_device__() == (CUDA_DEVICE, 1)
    taken, unused = block.__dlpack__(stream=1), block.__dlpack__()
    address = block.address
    del block, unused
    gc.collect()
    assert memory.allocate(100, device=1).address != address
    del taken
    gc.collect()
    assert memory.allocate(100, device=1).address == address


def test_a_limit_and_a_gpu_that_is_full_are_refused(
    memory: DeviceMemory, broker: MemoryBroker, driver: Driver
) -> None:
    with pytest.raises(MemoryRefused, match="64") as caught:
        memory.allocate(65 * MIB)
    assert driver.devices[0].uuid in str(caught.value)
    other = driver.create_memory(1, DEVICE_BYTES - REGION)
    with pytest.raises(MemoryRefused, match=r"has no 4194304 bytes left"):
        memory.allocate(2 * REGION, device=1)
    driver.release_memory(other)
    kept = memory.allocate(2 * REGION, device=1)
    with pytest.raises(MemoryRefused, match="no GPU 2"):
        memory.allocate(1, device=2)
    assert broker.status()[0].size_bytes == kept.size_bytes == 2 * REGION


def test_memory_of_the_host_and_of_gpus_count_apart(broker: MemoryBroker) -> None:
    with (
        DeviceMemory(str(broker.path), region_bytes=REGION) as on_gpu,
        HostMemory(str(broker.path), region_bytes=REGION, reserve_bytes=64 * MIB) as on_host,
    ):
        on_gpu.allocate(64 * MIB)
        on_host.allocate(MIB)
        assert sorted(one.size_bytes for one in broker.status()) == [REGION, 64 * MIB]


def test_without_a_driver_it_is_said_what_is_missing(broker: MemoryBroker) -> None:
    with pytest.raises(MemoryRefused, match="cannot be loaded"):
        DeviceMemory(str(broker.path), driver_path="/nowhere/libcuda.so.1")


def test_what_a_stream_still_does_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, path: Path
) -> None:
    """The emulated GPU takes 50 ms to begin: unmapping at once would break the context."""
    seed = next(_seeds) & 0xFFFFFFFF
    driver = emulated_driver(
        monkeypatch, f"slow-{seed}", seed=seed, memory=DEVICE_BYTES, delay_us=50_000
    )
    with MemoryBroker(path), DeviceMemory(str(path), region_bytes=REGION) as memory:
        device = DeviceBytes(driver)
        block = memory.allocate(REGION)
        device.gpu.fill(block.address, 7, REGION, 0)
        memory.release()
        memory.resume(10)
        assert device.read(block.address, 10) == b"\x07" * 10
        device.gpu.close()


def test_threads_may_use_it_at_once(memory: DeviceMemory) -> None:
    errors: list[BaseException] = []

    def work(device: int) -> None:
        try:
            for _ in range(30):
                blocks = [memory.allocate(300_000, device=device) for _ in range(4)]
                assert len({block.address for block in blocks}) == 4
                for block in blocks:
                    block.free()
        except BaseException as error:  # noqa: BLE001 - for the assertion
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number % 2,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_a_child_of_fork_has_nothing_of_it(memory: DeviceMemory) -> None:
    memory.allocate(100)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            memory.release()
            memory.resume()
            try:
                memory.allocate(1)
            except NotTheOwner:
                status = 0
            memory.close()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    memory.allocate(100)


@pytest.mark.slow
def test_a_killed_broker_takes_nothing(path: Path, driver: Driver) -> None:
    """Goal: GPU memory outlives its broker, mapped or released, as that of the host does.

    Method: kill a broker while memory is mapped, and the next one, which adopts it, while it is
    released, so that the holder alone has it, which knows nothing of CUDA.
    """
    device = DeviceBytes(driver)
    with broker_process(path) as first:
        memory = DeviceMemory(str(path), region_bytes=REGION)
        block, other = memory.allocate(5000), memory.allocate(3 * MIB, device=1)
        device.write(block.address, b"a" * 5000)
        device.write(other.address, b"b" * 5000)
        first.kill()
        with pytest.raises(BrokerUnreachable):
            memory.release()
        assert device.read(block.address, 5000) == b"a" * 5000
    with broker_process(path) as second:
        memory.release()
        second.kill()
    used = driver.devices[0].total_bytes - device.gpu.memory_info()[0]
    assert used == REGION
    with MemoryBroker(path):
        memory.resume(10)
        assert device.read(block.address, 5000) == b"a" * 5000
        assert device.read(other.address, 5000) == b"b" * 5000
        memory.close()
    device.gpu.close()


def test_only_memory_of_that_gpu_is_adopted(
    broker: MemoryBroker, driver: Driver, memory: DeviceMemory
) -> None:
    uuid = driver.devices[0].uuid
    good = driver.make_memory_file(0, REGION)
    elsewhere = driver.make_memory_file(1, REGION)
    no_memory = os.memfd_create("other")
    told = {"region": 7, "address": 1 << 40, "length": REGION, "huge": False, "device": uuid}
    connection = memory._connected()
    for fd in (elsewhere, no_memory):
        with pytest.raises(MemoryRefused, match="no memory that a broker made"):
            connection.call("adopt", told, [fd])
    with pytest.raises(MemoryRefused, match="multiples of 2097152"):
        connection.call("adopt", told | {"length": MIB}, [good])
    with pytest.raises(MemoryRefused, match="no memory that a broker made"):
        connection.call("adopt", told | {"length": 2 * REGION}, [good])
    with pytest.raises(MemoryRefused, match="no UUID"):
        connection.call("allocate", told | {"device": "GPU-1"})
    with pytest.raises(MemoryRefused, match="there is no GPU"):
        connection.call("allocate", told | {"device": "GPU-" + _NOBODY})
    connection.call("adopt", told, [good])
    assert broker.status()[0].size_bytes == REGION
    for fd in (good, elsewhere, no_memory):
        os.close(fd)


_NOBODY = "ffffffff-ffff-ffff-ffff-ffffffffffff"


def test_segments_come_through_functions_of_c(memory: DeviceMemory, device: DeviceBytes) -> None:
    """As torch calls them: addresses, sizes and a stream; nothing is raised through C."""
    source = SegmentSource(memory)
    allocate, free = segment_functions(*source.addresses)
    address = allocate(3 * MIB, 1, None)
    device.write(address, b"y" * 100)
    memory.release()
    assert allocate(MIB, 0, None) is None
    assert isinstance(source.error, MemoryReleased)
    memory.resume(10)
    assert device.read(address, 100) == b"y" * 100
    free(address, 3 * MIB, 1, None)
    assert memory.size_bytes == 0
    assert allocate(1 << 40, 0, None) is None
    assert isinstance(source.error, MemoryRefused)


@pytest.mark.slow
def test_memory_of_others_is_closed_before_a_release(
    memory: DeviceMemory, device: DeviceBytes, driver: Driver, path: Path
) -> None:
    """Goal: who could not be restored is not made ready for a capture, and keeps what it has.

    Method: open memory of another process (CUDA IPC), as NCCL does; release, close, and release.
    """
    block = memory.allocate(MIB)
    device.write(block.address, b"x" * MIB)
    command = [sys.executable, "-m", "tests.support.programs.gpu_sharer"]
    with subprocess.Popen(  # noqa: S603 - this interpreter
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        try:
            assert owner.stdout is not None
            handle = owner.stdout.readline()
            assert opened_bytes(driver.library) == 0, "its own does not count"
            opened = device.open_shared(handle)
            assert opened_bytes(driver.library) == 4 * MIB
            with pytest.raises(
                MemoryRefused, match="4194304 bytes of GPU memory of another"
            ) as caught:
                memory.release()
            assert "destroy_process_group" in caught.value.next_step
            assert device.read(block.address, MIB) == b"x" * MIB
            with DeviceMemory(str(path), region_bytes=REGION, refuse_opened=False) as other:
                other.allocate(MIB)
                other.release()
            device.close_shared(opened)
            memory.release()
            memory.resume(10)
            assert device.read(block.address, MIB) == b"x" * MIB
        finally:
            owner.kill()
