"""The agent's engines behind the seam: regions of emulated GPUs into a store and back."""

import contextlib
import dataclasses
import itertools
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import numpy as np
import pytest

import snapstore
from snapagent.gpu.driver import Driver, Gpu
from snapagent.gpu.engine import GpuEngines, GpuSettings
from snapagent.gpu.stream import StreamReport
from snapagent.memory.device_io import FillWork, SimpleDeviceIO
from snapagent.memory.lent import LentRegion
from snapagent.memory.streaming_io import StreamingDeviceIO, make_device_io
from snapstore import CachedFile, Compression, NodeCache, Store, StoreOptions
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
    fd: int = -1

    def filled(self, offset: int, length: int) -> bool:
        assert 0 <= offset <= offset + length <= self.size_bytes
        return True

    def hold(self) -> int:
        return os.open(self.path, os.O_RDWR)

    def discard(self) -> None:
        self.path.unlink()

    def __enter__(self) -> Self:
        self.fd = os.open(self.path, os.O_RDONLY)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)


@pytest.fixture
def cached_store(tmp_path: Path, memory_directory: Path) -> Iterator[Store]:
    """A store that is read through a cache with decoded files."""
    NodeCache.init(
        tmp_path / "cache", budget_bytes=0, memory=memory_directory, memory_budget_bytes=64 * MIB
    ).close()
    options = StoreOptions(threads=2, compression=Compression.NONE, node_cache=tmp_path / "cache")
    with snapstore.init_store(str(tmp_path / "store"), options) as opened:
        yield opened


@dataclasses.dataclass
class Filling:
    """Fills one region again and again, from a file of a store with a cache."""

    driver: Driver
    store: Store
    engines: GpuEngines
    region: LentRegion

    def __post_init__(self) -> None:
        """Store what is to be filled."""
        self.data = content()
        self.cache = self.store.cache
        assert self.cache is not None
        self.io = StreamingDeviceIO(self.driver.open(0), self.engines, self.cache.file)
        with self.driver.open(0) as gpu:
            put(gpu, self.region, self.data)
        capture(self.store, self.io, self.region)
        self.file = self.store.snapshot("a").open("memory/0-1.mem")

    def fill(self) -> StreamReport:
        """Fill, and compare all of it."""
        done: list[FillWork] = []
        with self.driver.open(0) as gpu:
            put(gpu, self.region, np.full(LENGTH, 0xEE, np.uint8))
            report = self.io.fill(
                [FillWork(self.region, self.file)],
                stop=threading.Event(),
                region_done=done.append,
                progress=lambda _: None,
            )
            assert len(done) == 1
            assert (get(gpu, self.region) == self.data).all()
        return report

    def cached(self) -> CachedFile:
        assert self.cache is not None
        return self.cache.file(self.file)


@pytest.fixture
def filling(driver: Driver, engines: GpuEngines, cached_store: Store) -> Iterator[Filling]:
    with region(driver, 1) as one:
        found = Filling(driver, cached_store, engines, one)
        yield found
        found.io.close()


def remove_packs(store: Store) -> None:
    shutil.rmtree(Path(store.url.removeprefix("file://"), "packs"))


def test_what_the_node_cache_has_is_not_read_from_the_store(filling: Filling) -> None:
    """Goal: each restore takes from the cache what is there by then, and waits for no locking.

    Method: nothing, a part, all, all of it locked; then the packs are gone. What is locked stays
    although the cache is told to remove everything.
    """
    registered = filling.engines.registered
    before = counter(filling.driver, "registered_bytes")
    report = filling.fill()
    assert (report.store_bytes, report.ready_bytes, report.direct_bytes) == (5 * MIB, 0, 0)
    with filling.cached() as cached:
        cached.ensure(5 * MIB - 1, 1)
        report = filling.fill()
        assert 0 < report.ready_bytes < 5 * MIB
        assert report.store_bytes == 5 * MIB - report.ready_bytes
        with filling.driver.open(0) as gpu:
            assert not registered.add(cached, gpu)
        cached.ensure(0, LENGTH)
    remove_packs(filling.store)
    report = filling.fill()
    assert (report.store_bytes, report.ready_bytes, report.direct_bytes) == (0, 5 * MIB, 0)
    assert counter(filling.driver, "registered_bytes") == before
    with filling.cached() as cached:
        engine = filling.engines.of(filling.driver.open(0))
        assert registered.add(cached, engine.gpu)
        assert registered.add(cached, engine.gpu)
    assert counter(filling.driver, "registered_bytes") - before == LENGTH
    assert filling.cache is not None
    assert not filling.cache.evict()
    report = filling.fill()
    assert (report.store_bytes, report.ready_bytes, report.direct_bytes) == (0, 0, LENGTH)
    registered.close()
    assert filling.cache.evict()


@pytest.mark.parametrize("is_locked", [False, True])
def test_damage_in_the_node_cache_is_found_on_the_gpu(
    filling: Filling, caplog: pytest.LogCaptureFixture, *, is_locked: bool
) -> None:
    """Goal: the store is used instead, the damaged file is forgotten, and that is said.

    Proves: N3.
    """
    with filling.cached() as cached:
        cached.ensure(0, LENGTH)
        assert cached.path is not None
        engine = filling.engines.of(filling.driver.open(0))
        if is_locked:
            assert filling.engines.registered.add(cached, engine.gpu)
        with cached.path.open("r+b") as file:
            file.seek(MIB)
            file.write(b"damage")
    report = filling.fill()
    assert report.store_bytes == 5 * MIB
    assert report.direct_bytes == (LENGTH if is_locked else 0)
    assert "'memory/0-1.mem' is damaged in" in caplog.text
    assert filling.engines.registered.locked_bytes == 0
    with filling.cached() as cached:
        assert not cached.filled(0, LENGTH)
        cached.ensure(0, LENGTH)
    remove_packs(filling.store)
    assert filling.fill().ready_bytes == 5 * MIB


def test_damage_in_the_store_is_the_stores_whatever_the_cache_has(filling: Filling) -> None:
    """Goal: what came damaged from both is named, and not said to be whole in the store."""
    with filling.cached() as cached:
        cached.ensure(5 * MIB - 1, 1)
    root = Path(filling.store.url.removeprefix("file://"), "packs")
    (pack,) = [path for path in root.rglob("*") if path.is_file()]
    with pack.open("r+b") as file:
        file.seek(MIB)
        file.write(b"damage")
    with pytest.raises(DigestMismatch, match=r"memory/0-1\.mem, rank 0"):
        filling.fill()


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
        lend, add = engines.registered.lend, engines.registered.add
        assert add(files[0], gpu)
        assert add(files[1], gpu)
        with lend(files[0]) as first, lend(files[1]) as second, lend(files[2]) as third:
            assert first is not None
            assert second is not None
            assert third is None
            assert not add(files[2], gpu)
        assert add(files[2], gpu)
        with lend(files[0]) as none, lend(files[1]) as again, lend(files[2]) as third:
            assert none is None
            assert again is second
            assert third is not None
            engines.registered.drop(files[2])
            assert engines.registered.locked_bytes == 3 * MIB
        with lend(KeptFile(tmp_path, 1)) as none:
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
