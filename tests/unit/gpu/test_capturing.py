"""Memory of an emulated GPU into a store and back: only what is new comes over."""

import contextlib
import itertools
import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest

import snapstore
from snapagent.gpu.capturing import CaptureReport, GpuCapture
from snapagent.gpu.driver import Gpu
from snapagent.gpu.hashing import device_buffer
from snapagent.gpu.stream import GpuStream, StreamTarget
from snapstore import DEVICE_CHUNK_BYTES, Compression, Store, StoreOptions
from snapstore.errors import Interrupted, RefNotFound
from snapstore.units import MIB
from tests.support.gpu import counter
from tests.support.samples import bf16, random_bytes
from tests.unit.gpu.bench import Bench, open_bench
from tests.unit.repository.parts import memory_stores

pytestmark = pytest.mark.slow

_seeds = itertools.count(os.getpid() << 8 | 0xC0)
_memory = memory_stores()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    with open_bench(monkeypatch, "capture", seed=next(_seeds), delay_us=300) as opened:
        yield opened


@pytest.fixture(params=[Compression.NONE, Compression.AUTO])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    options = StoreOptions(threads=2, compression=request.param)
    with snapstore.init_store(next(_memory), options) as opened:
        yield opened


def content() -> np.ndarray:
    parts = [random_bytes(5 * MIB, 1), np.zeros(2 * MIB, np.uint8), bf16(MIB, 2)]
    return np.concatenate([*parts, np.zeros(3 * MIB, np.uint8)])


@contextlib.contextmanager
def holding(gpu: Gpu, data: np.ndarray) -> Iterator[int]:
    with device_buffer(gpu, len(data)) as address:
        gpu.copy_in(address, data.ctypes.data, len(data), 0)
        gpu.synchronize()
        yield address


def capture(
    bench: Bench, store: Store, name: str, data: np.ndarray, *, on_gpu: bool = True
) -> CaptureReport:
    with (
        holding(bench.gpu, data) as address,
        GpuCapture(bench.gpu, bench.arena, bench.hasher if on_gpu else None) as capturing,
        store.begin(name) as writer,
    ):
        with writer.open_file(0, "0-1.mem", data_class="device") as file:
            report = capturing.store(address, len(data), file, stop=threading.Event())
        writer.commit()
    return report


def test_a_second_capture_copies_what_changed(bench: Bench, store: Store) -> None:
    """Goal: the same memory again costs hashing alone, a change the chunk that it is in.

    Method: the emulated driver counts what comes over; digests are a few kilobytes of it.
    """
    data = content()
    first = capture(bench, store, "a", data)
    assert first.copied_bytes == 7 * MIB
    before = counter(bench.driver, "bytes_out")
    second = capture(bench, store, "b", data)
    assert second.copied_bytes == 0
    assert counter(bench.driver, "bytes_out") - before <= len(data) // DEVICE_CHUNK_BYTES * 32
    data[3 * MIB] ^= 1
    third = capture(bench, store, "c", data)
    assert third.copied_bytes == DEVICE_CHUNK_BYTES
    assert store.snapshot("c").open("0-1.mem").readall() == data.tobytes()
    assert counter(bench.driver, "pageable_bytes_out") == 0


def test_without_kernels_it_is_the_same(bench: Bench, store: Store) -> None:
    """Goal: what the processor cuts and hashes is what the GPU does, so that they share chunks."""
    data = content()
    report = capture(bench, store, "a", data, on_gpu=False)
    assert report.copied_bytes == len(data)
    assert capture(bench, store, "b", data).copied_bytes == 0
    one, two = (store.snapshot(name).open("0-1.mem").chunks() for name in "ab")
    assert one.ids.tolist() == two.ids.tolist()
    assert one.offsets.tolist() == two.offsets.tolist()


def test_there_and_back(bench: Bench, store: Store) -> None:
    data = content()
    capture(bench, store, "a", data)
    stream = bench.keep(GpuStream(bench.gpu, bench.arena, bench.hasher, workers=3))
    file = store.snapshot("a").open("0-1.mem")
    with device_buffer(bench.gpu, len(data)) as address:
        targets = [StreamTarget(0, file, address)]
        stream.fill(
            targets,
            stop=threading.Event(),
            target_done=lambda _: None,
            progress=lambda _: None,
        )
        back = np.empty(len(data), np.uint8)
        bench.gpu.copy_out(back.ctypes.data, address, len(data), 0)
        bench.gpu.synchronize()
        assert (back == data).all()


def test_it_ends_early_when_told(bench: Bench, store: Store) -> None:
    stop = threading.Event()
    stop.set()
    data = content()
    with (
        holding(bench.gpu, data) as address,
        GpuCapture(bench.gpu, bench.arena, bench.hasher) as capturing,
        store.begin("a") as writer,
    ):
        file = writer.open_file(0, "0-1.mem", data_class="device")
        with pytest.raises(Interrupted):
            capturing.store(address, len(data), file, stop=stop)
    with pytest.raises(RefNotFound):
        store.snapshot("a")
    with bench.arena.borrow(bench.arena.slots):
        pass
