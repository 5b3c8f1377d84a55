"""Memory of an emulated GPU into a store and back: only what is new comes over."""

import contextlib
import functools
import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import snapstore
from snapagent.gpu.capturing import CaptureReport, GpuCapture
from snapagent.gpu.driver import Gpu, Lane, memory_at
from snapagent.gpu.hashing import device_buffer
from snapagent.gpu.stream import GpuStream, StreamTarget
from snapstore import DEVICE_CHUNK_BYTES, Compression, Store, StoreOptions
from snapstore.errors import DigestMismatch, Interrupted, RefNotFound
from snapstore.units import MIB
from tests.support.gpu import counter
from tests.support.samples import bf16, random_bytes
from tests.support.schemas import check_store
from tests.unit.gpu.bench import Bench, GpuBehind, LaneBehind, open_bench
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


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Store]:
    """A store whose packs are files that are written part by part, of up to 28 MiB."""
    options = StoreOptions(threads=4, compression=Compression.NONE, memory_bytes=400 * MIB)
    with snapstore.init_store(str(tmp_path / "store"), options) as opened:
        yield opened


def packed() -> np.ndarray:
    """More than two packs, and a little that goes elsewhere."""
    zeros = np.zeros(3 * MIB, np.uint8)
    return np.concatenate([random_bytes(31 * MIB, 4), zeros, random_bytes(30 * MIB + 9, 5)])


def test_packs_are_hashed_where_they_are(bench: Bench, directory: Store, tmp_path: Path) -> None:
    """Goal: the GPU names packs by what they are, and hashes them without a byte coming over.

    Method: the emulated driver counts what is copied within the device, which is what it hashes;
    then the whole store is checked. Proves: I4.
    """
    data = packed()
    before = counter(bench.driver, "bytes_within")
    report = capture(bench, directory, "a", data)
    assert report.copied_bytes == 61 * MIB + 9
    assert counter(bench.driver, "bytes_within") - before > 56 * MIB
    assert directory.snapshot("a").open("0-1.mem").readall() == data.tobytes()
    assert check_store(tmp_path / "store")["packs"] > 3
    assert capture(bench, directory, "b", data).copied_bytes == 0


class FlippingLane(LaneBehind):
    """A bus that flips a bit of each part, at an offset in it."""

    def __init__(self, lane: Lane, offset: int) -> None:
        super().__init__(lane)
        self._offset = offset
        self._begun: dict[int, int] = {}

    def copy_out(self, place: int, host: int, device: int, length: int) -> None:
        self._begun[place] = host
        self.lane.copy_out(place, host, device, length)

    def wait(self, place: int) -> None:
        self.lane.wait(place)
        memory_at(self._begun[place] + self._offset, 1)[0] ^= 0x10


@pytest.mark.parametrize(
    ("offset", "check_all", "message"),
    [
        pytest.param(5, False, "had been hashed as", id="in a chunk that is checked"),
        pytest.param(MIB, True, "had been hashed as", id="in one of all that are checked"),
        pytest.param(MIB, False, "where its bytes came from", id="in the rest of a pack"),
    ],
)
def test_damage_on_the_way_ends_the_capture(
    bench: Bench, directory: Store, offset: int, message: str, *, check_all: bool
) -> None:
    """Goal: a bus that damages what it moves is found out, and nothing gets the name."""
    data = packed()
    gpu: Any = GpuBehind(bench.gpu, functools.partial(FlippingLane, offset=offset))
    with (
        holding(bench.gpu, data) as address,
        GpuCapture(gpu, bench.arena, bench.hasher, check_all=check_all) as capturing,
        directory.begin("a") as writer,
    ):
        file = writer.open_file(0, "0-1.mem", data_class="device")
        with pytest.raises(DigestMismatch, match=message):
            capturing.store(address, len(data), file, stop=threading.Event())
    with pytest.raises(RefNotFound):
        directory.snapshot("a")
    with bench.arena.borrow(bench.arena.slots):
        pass


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
