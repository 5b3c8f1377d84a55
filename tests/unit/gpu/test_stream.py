"""Files of a snapshot into the memory of an emulated GPU: the same bytes, or an error."""

import contextlib
import itertools
import os
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from typing_extensions import override

from snapagent.gpu import stream as stream_module
from snapagent.gpu.driver import Gpu, Lane, memory_at
from snapagent.gpu.hashing import device_buffer
from snapagent.gpu.stream import GpuStream, StreamReport, StreamTarget
from snapagent.precedence import Precedence
from snapstore import Compression, Integrity, SnapshotFile, Store, StoreOptions
from snapstore.backend.base import Backend, ObjectKind
from snapstore.backend.memory import MemoryBackend
from snapstore.backend.posix import PosixBackend
from snapstore.errors import DigestMismatch, MissingPack
from snapstore.format.config import StoreConfig
from snapstore.testing.clock import ManualClock
from snapstore.units import KIB, MIB, align_up
from tests.support.gpu import counter
from tests.support.processes import open_fds
from tests.support.samples import bf16, random_bytes, text
from tests.unit.gpu.bench import Bench, GpuBehind, LaneBehind, open_bench

pytestmark = pytest.mark.slow

CONFIG = StoreConfig(created="2026-11-30T05:00:00Z", store_id="0" * 32)
_seeds = itertools.count(os.getpid() << 8 | 0x80)


def contents() -> dict[str, bytes]:
    zeros = np.zeros(2 * MIB, np.uint8)
    weights = [random_bytes(5 * MIB + 5, 1), zeros, bf16(MIB, 3), text(300 * KIB, 2)]
    return {
        "memory/0-1.mem": np.concatenate(weights).tobytes(),
        "memory/0-2.mem": np.concatenate([zeros, weights[0][MIB:], zeros[:70_000]]).tobytes(),
        "memory/0-3.mem": bytes(MIB + 5),
        "memory/0-4.mem": b"few",
        "memory/0-5.mem": b"",
    }


@dataclass
class Shelf:
    """A snapshot in a store whose objects can be damaged."""

    backend: Backend

    def files(self, integrity: Integrity) -> list[SnapshotFile]:
        options = StoreOptions(integrity=integrity, threads=2)
        snapshot = Store(self.backend, CONFIG, options, ManualClock()).snapshot("a")
        return [snapshot.open(name) for name in contents()]

    def remove_packs(self) -> None:
        for info in [*self.backend.list(ObjectKind.PACK)]:
            self.backend.delete(ObjectKind.PACK, info.name)


def shelf_of(compression: Compression, backend: Backend | None = None) -> Shelf:
    backend = backend or MemoryBackend()
    options = StoreOptions(compression=compression, threads=2)
    with Store(backend, CONFIG, options, ManualClock()).begin("a") as writer:
        for name, data in contents().items():
            writer.add_file(3, name, data, data_class="tensors")
        writer.commit()
    return Shelf(backend)


@pytest.fixture(scope="module", params=["memory none", "memory auto", "posix none"])
def shelf(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    place, compression = request.param.split()
    folder = tmp_path_factory.mktemp("store")
    backend = MemoryBackend() if place == "memory" else PosixBackend(folder)
    return shelf_of(Compression(compression), backend)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """A GPU and what belongs to it."""
    with open_bench(monkeypatch, "stream", seed=next(_seeds), delay_us=500) as opened:
        yield opened


@contextlib.contextmanager
def memories(gpu: Gpu, files: list[SnapshotFile]) -> Iterator[list[int]]:
    """Device memory for each file, full of other bytes."""
    with contextlib.ExitStack() as stack:
        found = []
        for file in files:
            found.append(stack.enter_context(device_buffer(gpu, max(file.size_bytes, 1))))
            gpu.fill(found[-1], 0xEE, align_up(max(file.size_bytes, 1), 4096), 0)
        gpu.synchronize()
        yield found


def fill(
    stream: GpuStream, files: list[SnapshotFile], addresses: list[int], sources: Any = None
) -> tuple[StreamReport, list[int]]:
    done: list[int] = []
    targets = [
        StreamTarget(3, file, address, sources[number] if sources else None)
        for number, (file, address) in enumerate(zip(files, addresses, strict=True))
    ]
    arrived: list[int] = []
    report = stream.fill(
        targets, stop=threading.Event(), target_done=done.append, progress=arrived.append
    )
    assert sum(arrived) == report.bytes
    return report, done


def read_back(gpu: Gpu, address: int, length: int) -> bytes:
    data = np.empty(max(length, 1), np.uint8)
    gpu.copy_out(data.ctypes.data, address, length, 0) if length else None
    gpu.synchronize()
    return data[:length].tobytes()


@pytest.mark.parametrize("integrity", list(Integrity))
@pytest.mark.parametrize("on_gpu", [True, False])
@pytest.mark.parametrize("part_bytes", [4 * MIB, 768 * KIB])
def test_it_is_all_there(
    shelf: Shelf, bench: Bench, integrity: Integrity, part_bytes: int, *, on_gpu: bool
) -> None:
    """Goal: every byte of every file, zeros too, whoever checks it; nothing is staged pageably."""
    files = shelf.files(integrity)
    hasher = bench.hasher if on_gpu else None
    stream = bench.keep(GpuStream(bench.gpu, bench.arena, hasher, workers=3, part_bytes=part_bytes))
    with memories(bench.gpu, files) as addresses:
        report, done = fill(stream, files, addresses)
        for file, address, data in zip(files, addresses, contents().values(), strict=True):
            assert read_back(bench.gpu, address, len(data)) == data, file.name
    assert sorted(done) == list(range(len(files)))
    total = sum(map(len, contents().values()))
    assert report.bytes + report.zero_bytes == total
    assert report.zero_bytes >= 5 * MIB
    checked_there = on_gpu and integrity is Integrity.STRONG
    assert report.hashed_bytes == (total if checked_there else 0)
    assert report.threads == 3
    assert report.bottleneck in {"read", "copy", "hash"}
    assert counter(bench.driver, "pageable_bytes_in") == 0


@pytest.mark.parametrize("failing", ["all", "odd", "some"])
@pytest.mark.parametrize("part_bytes", [4 * MIB, 768 * KIB])
@pytest.mark.parametrize("integrity", list(Integrity))
def test_what_cannot_be_read_past_the_store_is_read_by_it(
    bench: Bench,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    integrity: Integrity,
    part_bytes: int,
    failing: str,
) -> None:
    """Goal: every byte is there and counted once, and no more is asked of the store than must be.

    Method: reads of packs fail: all, as over a network; those of odd lengths, as past the page
    cache of a disk; and some at random, after they wrote something else.
    """
    backend = PosixBackend(tmp_path)
    sizes = [9 * MIB + 4096 * number for number in range(3)] + [MIB + 5]
    datas = [random_bytes(size, 50 + size).tobytes() for size in sizes]
    options = StoreOptions(compression=Compression.NONE, threads=2, integrity=integrity)
    store = Store(backend, CONFIG, options, ManualClock())
    with store.begin("a") as writer:
        for number, data in enumerate(datas):
            writer.add_file(3, f"{number}.mem", data + bytes(MIB), data_class="device")
        writer.commit()
    files = [store.snapshot("a").open(f"{number}.mem") for number in range(len(datas))]
    chance = random.Random(part_bytes)
    read_raw, read = stream_module._read_raw, stream_module._read
    by_store: list[int] = []

    def read_some(item: Any, fd: int, slot: memoryview) -> bool:
        fails = {"all": True, "odd": item.length % 4096 != 0, "some": chance.random() < 0.2}
        if fails[failing]:
            slot[: item.length] = bytes(item.length)
            return False
        return read_raw(item, fd, slot)

    def read_counted(target: Any, piece: Any, into: memoryview) -> None:
        by_store.append(piece.length)
        read(target, piece, into)

    monkeypatch.setattr(stream_module, "_read_raw", read_some)
    monkeypatch.setattr(stream_module, "_read", read_counted)
    stream = bench.keep(
        GpuStream(bench.gpu, bench.arena, bench.hasher, workers=2, part_bytes=part_bytes)
    )
    with memories(bench.gpu, files) as addresses:
        fill(stream, files, addresses)
        # The store has its packs open by now.
        before = open_fds()
        by_store.clear()
        report, done = fill(stream, files, addresses)
        assert open_fds() == before
        for file, address, data in zip(files, addresses, datas, strict=True):
            assert read_back(bench.gpu, address, file.size_bytes) == data + bytes(MIB)
    assert sorted(done) == list(range(len(files)))
    assert report.bytes + report.zero_bytes == sum(sizes) + len(files) * MIB
    if failing == "all":
        assert sum(by_store) == report.bytes
    if failing == "odd":
        assert sum(by_store) <= 2 * MIB


@pytest.mark.parametrize("integrity", list(Integrity))
@pytest.mark.parametrize("on_gpu", [True, False])
def test_a_pack_that_is_gone_is_named(
    bench: Bench, tmp_path: Path, integrity: Integrity, *, on_gpu: bool
) -> None:
    shelf_of(Compression.NONE, PosixBackend(tmp_path))
    # Another one, which has none of them open.
    shelf = Shelf(PosixBackend(tmp_path))
    files = shelf.files(integrity)[:1]
    shelf.remove_packs()
    hasher = bench.hasher if on_gpu else None
    stream = bench.keep(GpuStream(bench.gpu, bench.arena, hasher, workers=2))
    with memories(bench.gpu, files) as addresses, pytest.raises(MissingPack) as caught:
        fill(stream, files, addresses)
    caught.match(r"chunk \w+ of \d+ bytes at offset \d+ of memory/0-1.mem, rank 3: pack")


class Source(NamedTuple):
    address: int


def test_what_lies_ready_is_fetched_from_there(bench: Bench) -> None:
    """Goal: with a registered copy, no byte is read from the store, and all of it is checked.

    Method: the packs are gone. A copy that differs in a bit is found out by its hash, and then
    nobody is told that it is done.
    """
    shelf = shelf_of(Compression.AUTO)
    files = shelf.files(Integrity.STRONG)[:1]
    data = contents()[files[0].name]
    files[0].chunks()
    shelf.remove_packs()
    stream = bench.keep(GpuStream(bench.gpu, bench.arena, bench.hasher, workers=3))
    address = bench.gpu.host_alloc(len(data))
    try:
        ready = memory_at(address, len(data))
        ready[:] = data
        with memories(bench.gpu, files) as places:
            report, _ = fill(stream, files, places, [Source(address)])
            assert report.direct_bytes == report.bytes == len(data)
            assert read_back(bench.gpu, places[0], len(data)) == data
            ready[3 * MIB] ^= 1
            report, done = fill(stream, files, places, [Source(address)])
            assert (report.suspects, done) == ([0], [])
    finally:
        bench.gpu.host_free(address)


class Decoded(NamedTuple):
    """All of a file, decoded in another one."""

    fd: int

    def filled(self, offset: int, length: int) -> bool:
        return offset >= 0 and length > 0


def test_for_what_lies_decoded_no_pack_is_opened(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: with all of a file in a cache, the store may be away. Method: the packs are gone."""
    shelf_of(Compression.NONE, PosixBackend(tmp_path))
    # Another one, which has none of them open.
    shelf = Shelf(PosixBackend(tmp_path))
    file, data = shelf.files(Integrity.STRONG)[0], next(iter(contents().values()))
    assert any(piece.stored for piece in file.pieces())
    shelf.remove_packs()
    part_bytes = 768 * KIB
    longest: list[int] = []
    read_ready = stream_module._read_ready

    def watch(what: StreamTarget, item: Any, slot: memoryview) -> None:
        longest.append(item.length)
        read_ready(what, item, slot)

    monkeypatch.setattr(stream_module, "_read_ready", watch)
    stream = bench.keep(
        GpuStream(bench.gpu, bench.arena, bench.hasher, workers=2, part_bytes=part_bytes)
    )
    with (tmp_path / "decoded").open("w+b") as decoded, memories(bench.gpu, [file]) as (address,):
        decoded.write(data)
        decoded.flush()
        report = stream.fill(
            [StreamTarget(3, file, address, ready=Decoded(decoded.fileno()))],
            stop=threading.Event(),
            target_done=lambda _: None,
            progress=lambda _: None,
        )
        assert read_back(bench.gpu, address, len(data)) == data
    assert report.ready_bytes == report.bytes
    assert max(longest) == part_bytes


@pytest.mark.parametrize("integrity", list(Integrity))
@pytest.mark.parametrize("where", ["memory none", "memory auto", "posix none"])
def test_a_flipped_bit_in_a_pack_is_named(
    bench: Bench, integrity: Integrity, where: str, tmp_path: Path
) -> None:
    """Proves: I6."""
    place, compression = where.split()
    backend = MemoryBackend() if place == "memory" else PosixBackend(tmp_path)
    shelf = shelf_of(Compression(compression), backend)
    (info,) = shelf.backend.list(ObjectKind.PACK)
    data = bytearray(info.size_bytes)
    shelf.backend.get_range(ObjectKind.PACK, info.name, 0, memoryview(data))
    data[4 * MIB] ^= 1
    shelf.backend.delete(ObjectKind.PACK, info.name)
    shelf.backend.put_new(ObjectKind.PACK, info.name, [data])
    files = shelf.files(integrity)
    stream = bench.keep(GpuStream(bench.gpu, bench.arena, bench.hasher, workers=3))
    with memories(bench.gpu, files) as addresses, pytest.raises(DigestMismatch) as caught:
        fill(stream, files, addresses)
    caught.match(
        r"chunk [0-9a-f]{12} of \d+ bytes at offset \d+ of memory/0-\d.mem, rank 3: frame at"
    )
    assert "push the same tree again" in caught.value.next_step


class FlippingLane(LaneBehind):
    """A bus that flips a bit of the second piece, after the processor has checked it."""

    def __init__(self, lane: Lane) -> None:
        super().__init__(lane)
        self._left = 2

    def copy_in(self, place: int, to: int, host: int, length: int) -> None:
        self._left -= 1
        if not self._left:
            memory_at(host, length)[length // 2] ^= 0x10
        self.lane.copy_in(place, to, host, length)


def test_a_bit_flipped_on_the_way_is_named(shelf: Shelf, bench: Bench) -> None:
    """Goal: what no check of the store can see is found on the GPU. Proves: I6."""
    files = shelf.files(Integrity.STRONG)
    gpu: Any = GpuBehind(bench.gpu, FlippingLane)
    stream = bench.keep(GpuStream(gpu, bench.arena, bench.hasher, workers=1))
    with memories(bench.gpu, files) as addresses, pytest.raises(DigestMismatch) as caught:
        fill(stream, files, addresses)
    caught.match(r"chunk [0-9a-f]{12} .* at offset \d+ of memory/0-\d.mem, rank 3: it arrived")
    assert "test the GPU" in caught.value.next_step


def test_after_an_error_nothing_is_lent(shelf: Shelf, bench: Bench) -> None:
    """Goal: a pack that is gone ends all threads, and another fill finds all slots."""
    files = shelf.files(Integrity.FAST)
    stream = bench.keep(GpuStream(bench.gpu, bench.arena, bench.hasher, workers=3))
    broken = shelf_of(Compression.NONE)
    broken.remove_packs()
    with memories(bench.gpu, files) as addresses:
        with pytest.raises(MissingPack, match="is gone"):
            fill(stream, broken.files(Integrity.FAST), addresses)
        _, done = fill(stream, files, addresses)
        assert len(done) == len(files)
    with bench.arena.borrow(bench.arena.slots):
        pass


def test_it_ends_early_when_told(shelf: Shelf, bench: Bench) -> None:
    files = shelf.files(Integrity.STRONG)
    stop = threading.Event()
    done: list[int] = []
    stream = bench.keep(GpuStream(bench.gpu, bench.arena, bench.hasher, workers=1))
    with memories(bench.gpu, files) as addresses:
        report = stream.fill(
            [StreamTarget(3, *both) for both in zip(files, addresses, strict=True)],
            stop=stop,
            target_done=done.append,
            progress=lambda _: stop.set(),
        )
    assert report.bytes < sum(map(len, contents().values()))
    assert 0 not in done


class Watched(Precedence):
    """Tells when somebody gives way."""

    def __init__(self) -> None:
        super().__init__(clock=ManualClock())
        self.asked = threading.Semaphore(0)

    @override
    def give_way(self, is_over: Callable[[], bool]) -> None:
        self.asked.release()
        super().give_way(is_over)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_it_pauses_for_what_is_urgent(shelf: Shelf, bench: Bench, *, is_stopped: bool) -> None:
    """Goal: nothing is begun while something has precedence; then all is filled, unless stopped."""
    files = shelf.files(Integrity.FAST)
    stream = bench.keep(GpuStream(bench.gpu, bench.arena, bench.hasher, workers=2))
    stop, precedence = threading.Event(), Watched()
    arrived: list[int] = []
    with memories(bench.gpu, files) as addresses:
        targets = [StreamTarget(3, *both) for both in zip(files, addresses, strict=True)]
        filling = threading.Thread(
            target=lambda: stream.fill(
                targets,
                stop=stop,
                target_done=lambda _: None,
                progress=arrived.append,
                precedence=precedence,
            )
        )
        with precedence.taken():
            filling.start()
            for _ in range(2):
                assert precedence.asked.acquire(timeout=30)
            assert not arrived
            if is_stopped:
                stop.set()
                filling.join()
        filling.join()
    assert bool(arrived) != is_stopped


class Resident(NamedTuple):
    """A file in memory that the GPU can fetch from."""

    address: int


def test_what_is_registered_does_not_pause(shelf: Shelf, bench: Bench) -> None:
    """Goal: copies that the GPU makes by itself go on while something has precedence."""
    (file,) = [one for one in shelf.files(Integrity.FAST) if one.size_bytes == MIB + 5]
    stream = bench.keep(GpuStream(bench.gpu, bench.arena, bench.hasher, workers=2))
    precedence = Precedence()
    with (
        memories(bench.gpu, [file]) as (address,),
        bench.arena.borrow(1) as (slot,),
        precedence.taken(),
    ):
        slot.view[: file.size_bytes] = bytes(file.size_bytes)
        report = stream.fill(
            [StreamTarget(3, file, address, source=Resident(slot.address))],
            stop=threading.Event(),
            target_done=lambda _: None,
            progress=lambda _: None,
            precedence=precedence,
        )
    assert report.direct_bytes == file.size_bytes
