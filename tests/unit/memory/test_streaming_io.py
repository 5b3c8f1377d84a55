"""The agent's engines behind the seam: regions of emulated GPUs into a store and back."""

import contextlib
import dataclasses
import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import numpy as np
import pytest

import snapstore
from snapagent.gpu.driver import Driver, Gpu
from snapagent.gpu.engine import GpuEngines, GpuSettings
from snapagent.memory.device_io import FillWork, SimpleDeviceIO
from snapagent.memory.lent import LentRegion
from snapagent.memory.streaming_io import StreamingDeviceIO, make_device_io
from snapstore import Compression, Store, StoreOptions
from snapstore.errors import DigestMismatch
from snapstore.units import MIB
from tests.support.blake3_host import emulated_kernels
from tests.support.gpu import counter, emulated_driver
from tests.support.samples import random_bytes
from tests.unit.repository.parts import memory_stores

pytestmark = pytest.mark.slow

LENGTH = 8 * MIB
_seeds = itertools.count(os.getpid() << 8 | 0x40)
_memory = memory_stores()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    seed = next(_seeds)
    return emulated_driver(
        monkeypatch, f"engine-{seed}", devices=2, memory=256 * MIB, seed=seed, delay_us=200
    )


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[GpuEngines]:
    settings = GpuSettings(
        workers=2, kernels=tmp_path, code=emulated_kernels(), registered_bytes=16 * MIB
    )
    with GpuEngines(settings) as made:
        yield made


@pytest.fixture
def store() -> Iterator[Store]:
    options = StoreOptions(threads=2, compression=Compression.NONE)
    with snapstore.init_store(next(_memory), options) as opened:
        yield opened


@contextlib.contextmanager
def region(driver: Driver, number: int, ordinal: int = 0) -> Iterator[LentRegion]:
    fd = driver.make_memory_file(ordinal, LENGTH)
    uuid = driver.devices[ordinal].uuid
    try:
        yield LentRegion(
            number=number, address=1 << 40, length=LENGTH, huge=False, fd=fd, device=uuid
        )
    finally:
        os.close(fd)


def put(gpu: Gpu, of: LentRegion, data: np.ndarray) -> None:
    with gpu.mapped(of.fd, of.length) as address:
        gpu.copy_in(address, data.ctypes.data, len(data), 0)
        gpu.synchronize()


def get(gpu: Gpu, of: LentRegion) -> np.ndarray:
    data = np.empty(of.length, np.uint8)
    with gpu.mapped(of.fd, of.length) as address:
        gpu.copy_out(data.ctypes.data, address, len(data), 0)
        gpu.synchronize()
    return data


def capture(store: Store, io: StreamingDeviceIO, of: LentRegion, name: str = "a") -> None:
    with store.begin(name) as writer:
        with writer.open_file(0, "memory/0-1.mem", data_class="device") as file:
            io.store(of, file, stop=threading.Event())
        writer.commit()


def content() -> np.ndarray:
    return np.concatenate([random_bytes(5 * MIB, 1), np.zeros(3 * MIB, np.uint8)])


def test_there_and_back_on_another_gpu(driver: Driver, engines: GpuEngines, store: Store) -> None:
    """Goal: what one GPU had another gets, and whoever waits is told once, when it is there."""
    data = content()
    done: list[FillWork] = []
    with region(driver, 1) as source, region(driver, 1, 1) as target:
        io = StreamingDeviceIO(driver.open(0), engines)
        with driver.open(0) as gpu:
            put(gpu, source, data)
        capture(store, io, source)
        io.close()
        other = StreamingDeviceIO(driver.open(1), engines)
        work = [FillWork(target, store.snapshot("a").open("memory/0-1.mem"))]
        arrived: list[int] = []
        other.fill(work, stop=threading.Event(), region_done=done.append, progress=arrived.append)
        other.close()
        with driver.open(1) as gpu:
            assert (get(gpu, target) == data).all()
        report = engines.of(gpu).last_fill
    assert report is not None
    assert (report.bytes, report.zero_bytes) == (5 * MIB, 3 * MIB)
    assert done == work
    assert sum(arrived) == 5 * MIB


@dataclasses.dataclass
class KeptFile:
    """A file as a node cache keeps it: longer than its content, and known to be filled."""

    path: Path
    size_bytes: int
    is_filled: bool = True
    fd: int = -1

    def filled(self, offset: int, length: int) -> bool:
        assert (offset, length) == (0, self.size_bytes)
        return self.is_filled

    def __enter__(self) -> Self:
        self.fd = os.open(self.path, os.O_RDONLY)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)


def test_a_file_of_the_node_cache_is_fetched_by_the_gpu(
    driver: Driver, engines: GpuEngines, store: Store, tmp_path: Path
) -> None:
    """Goal: the second restore locks nothing anew; damage in the cache is found on the GPU."""
    data = content()
    path = tmp_path / "kept"
    path.write_bytes(data.tobytes() + bytes(5000))
    kept = KeptFile(path, len(data))
    with region(driver, 1) as one:
        io = StreamingDeviceIO(driver.open(0), engines, cached=lambda _: kept)
        with driver.open(0) as gpu:
            put(gpu, one, data)
        capture(store, io, one)
        work = [FillWork(one, store.snapshot("a").open("memory/0-1.mem"))]

        def fill() -> np.ndarray:
            with driver.open(0) as gpu:
                put(gpu, one, np.full(len(data), 0xEE, np.uint8))
                io.fill(
                    work,
                    stop=threading.Event(),
                    region_done=lambda _: None,
                    progress=lambda _: None,
                )
                return get(gpu, one)

        before = counter(driver, "registered_bytes")
        assert (fill() == data).all()
        assert counter(driver, "registered_bytes") - before == LENGTH
        assert (fill() == data).all()
        assert counter(driver, "registered_bytes") - before == LENGTH
        with path.open("r+b") as file:
            file.seek(MIB)
            file.write(b"damage")
        with pytest.raises(DigestMismatch, match="arrived damaged"):
            fill()
        kept.is_filled = False
        assert (fill() == data).all()
        io.close()


def test_the_budget_for_locked_files(driver: Driver, tmp_path: Path) -> None:
    """Goal: what is in use stays, what is not makes room, and what does not fit is not locked."""
    files = [KeptFile(tmp_path / str(number), 3 * MIB) for number in range(3)]
    for one in files:
        one.path.write_bytes(bytes(4 * MIB))
    engines = GpuEngines(GpuSettings(registered_bytes=6 * MIB))
    with driver.open(0) as gpu, contextlib.ExitStack() as stack:
        stack.enter_context(engines)
        for one in files:
            stack.enter_context(one)
        lend = engines.registered.lend
        with lend(files[0], gpu) as first, lend(files[1], gpu) as second:
            assert first is not None
            assert second is not None
            with lend(files[2], gpu) as third:
                assert third is None
        with lend(files[2], gpu) as third, lend(files[1], gpu) as again:
            assert third is not None
            assert again is second
        with lend(KeptFile(tmp_path, 1), gpu) as none:
            assert none is None


def test_without_page_locked_memory_it_still_works(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: where nothing can be locked, the simple way is taken."""
    engines = GpuEngines(GpuSettings(workers=1, pinned_bytes=1 << 60))
    io = make_device_io(driver.open(0), engines)
    assert isinstance(io, SimpleDeviceIO)
    io.close()


def test_without_kernels_the_processor_hashes(driver: Driver, tmp_path: Path) -> None:
    """Goal: it is said why, and everything else is there."""
    with GpuEngines(GpuSettings(workers=1, kernels=tmp_path)) as engines, driver.open(0) as gpu:
        engine = engines.of(gpu)
        assert (engine.hasher is None) == bool(engine.without_kernels)
        engines.prepare(driver)
        assert engines.of(gpu) is engine
