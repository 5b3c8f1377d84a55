"""Carrying out a read plan: checked before placed, each read once, the first error stops all."""

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import snapstore
from snapstore.backend.base import ObjectKind
from snapstore.backend.memory import MemoryBackend
from snapstore.backend.trace import Operation, TracingBackend
from snapstore.errors import DigestMismatch, MissingPack
from snapstore.format.config import StoreConfig
from snapstore.repository.fetch import fetch_plan
from snapstore.repository.read_plan import Destination, ReadPlan, ReadUnit, plan_reads
from snapstore.repository.snapshot import LoadedRank
from snapstore.repository.store import Store
from snapstore.repository.verifier import ChunkVerifier
from snapstore.testing.clock import ManualClock
from snapstore.units import KIB, MIB
from tests.support.samples import bf16, random_bytes, text

CONFIG = StoreConfig(created="2026-11-30T05:00:00Z", store_id="0" * 32)
READ_BYTES_MAX = 256 * KIB


@dataclasses.dataclass(frozen=True)
class Stored:
    """A snapshot of a few frames of every codec, and a plan of many reads of it."""

    backend: MemoryBackend
    content: bytes
    rank: LoadedRank
    plan: ReadPlan

    def verifier(self) -> ChunkVerifier:
        return ChunkVerifier(self.rank.id, self.rank.streams, self.rank.read_extents())


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    backend = MemoryBackend()
    store = Store(backend, CONFIG, snapstore.StoreOptions(threads=2), ManualClock())
    parts = [random_bytes(MIB, 1), bf16(MIB, 2), text(2 * MIB, 3), random_bytes(MIB, 4)]
    content = b"".join(part.tobytes() for part in parts)
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "data.bin").write_bytes(content)
    store.push(tmp_path / "tree", "a")
    (rank,) = store.snapshot("a").ranks()
    plan = plan_reads([rank.layout], read_bytes_max=READ_BYTES_MAX)
    assert len(plan.units) >= 4
    assert {int(codec) for codec in plan.frames["codec"]} == {0, 1, 2}
    return Stored(backend, content, rank, plan)


class Placed:
    """Takes bytes to where they belong, from any thread."""

    def __init__(self, size: int) -> None:
        self.data = bytearray(size)
        self.bytes = 0
        self._lock = threading.Lock()

    def __call__(self, place: Destination, data: memoryview) -> None:
        assert len(data) == place.length
        with self._lock:
            self.data[place.start : place.start + place.length] = data
            self.bytes += place.length


def fetch(
    stored: Stored,
    place: Callable[[Destination, memoryview], None],
    *,
    threads: int = 4,
    backend: TracingBackend | None = None,
    strong: bool = True,
    skip: Callable[[ReadUnit], bool] = lambda _: False,
    done: Callable[[ReadUnit], None] = lambda _: None,
) -> None:
    fetch_plan(
        backend or stored.backend,
        stored.plan,
        place,
        threads=threads,
        read_bytes_max=READ_BYTES_MAX,
        verifiers=[stored.verifier()] if strong else [],
        skip=skip,
        done=done,
    )


def pack_of(stored: Stored) -> tuple[str, bytes]:
    (name,) = (info.name for info in stored.backend.list(ObjectKind.PACK))
    data = bytearray(stored.backend.stat(ObjectKind.PACK, name).size_bytes)
    stored.backend.get_range(ObjectKind.PACK, name, 0, memoryview(data))
    return name, bytes(data)


def replace_pack(stored: Stored, data: bytes) -> None:
    name, _ = pack_of(stored)
    stored.backend.delete(ObjectKind.PACK, name)
    stored.backend.put_new(ObjectKind.PACK, name, [data])


@pytest.mark.parametrize("threads", [1, 4, 16])
@pytest.mark.parametrize("strong", [False, True])
def test_everything_is_placed_once(stored: Stored, threads: int, strong: bool) -> None:  # noqa: FBT001
    """Goal: every byte arrives once, from reads that are each made once and told of when done."""
    traced = TracingBackend(stored.backend, clock=ManualClock())
    placed = Placed(len(stored.content))
    finished: list[ReadUnit] = []
    fetch(stored, placed, threads=threads, backend=traced, strong=strong, done=finished.append)
    assert placed.data == stored.content
    assert placed.bytes == len(stored.content) == stored.plan.data_bytes
    assert sorted(unit.offset for unit in finished) == [unit.offset for unit in stored.plan.units]
    assert traced.counts["get_range"].operations == len(stored.plan.units)
    assert traced.counts["get_range"].bytes == stored.plan.stored_bytes


def test_reads_that_are_skipped_are_not_made(stored: Stored) -> None:
    traced = TracingBackend(stored.backend, clock=ManualClock())
    placed = Placed(len(stored.content))
    wanted = stored.plan.units[1::2]
    finished: list[ReadUnit] = []
    fetch(
        stored,
        placed,
        backend=traced,
        skip=lambda unit: unit not in wanted,
        done=finished.append,
    )
    assert sorted(unit.offset for unit in finished) == [unit.offset for unit in wanted]
    assert traced.counts["get_range"].operations == len(wanted)
    assert 0 < placed.bytes < len(stored.content)


def test_an_empty_plan_reads_nothing(stored: Stored) -> None:
    fetch(dataclasses.replace(stored, plan=plan_reads([], read_bytes_max=1)), Placed(0))


@pytest.mark.parametrize("strong", [False, True])
def test_no_damaged_byte_is_placed(stored: Stored, strong: bool) -> None:  # noqa: FBT001
    """Goal: with either integrity a frame is checked before any byte of it is used. Proves: I6.

    Method: change one bit in each frame in turn. The error must name pack and offset, and what was
    placed by then must be right.
    """
    name, good = pack_of(stored)
    for row in range(len(stored.plan.frames)):
        offset = int(stored.plan.frames[row]["offset"])
        bad = bytearray(good)
        bad[offset + int(stored.plan.frames[row]["stored_length"]) // 2] ^= 0x10
        replace_pack(stored, bytes(bad))

        def place(where: Destination, data: memoryview) -> None:
            assert data == stored.content[where.start : where.start + where.length]

        with pytest.raises(DigestMismatch, match=f"offset {offset} of pack {name[:12]}") as caught:
            fetch(stored, place, strong=strong)
        assert caught.value.next_step


def test_strong_integrity_does_not_believe_the_checksum(stored: Stored) -> None:
    """Goal: a frame that was changed together with its checksum is refused. Proves: I6.

    Method: swap the ids of two chunks in what the manifest says, so that all frames are intact and
    two chunks are not what they should be; fast integrity takes them.
    """
    extents = stored.rank.read_extents().copy()
    extents["id"][[1, 2]] = extents["id"][[2, 1]]
    verifier = ChunkVerifier(stored.rank.id, stored.rank.streams, extents)
    wrong = range(int(extents["length"][0]), int(extents["length"][:3].sum()))
    placed = Placed(len(stored.content))
    with pytest.raises(DigestMismatch, match="is not what it should be"):
        fetch_plan(
            stored.backend,
            stored.plan,
            placed,
            threads=1,
            read_bytes_max=READ_BYTES_MAX,
            verifiers=[verifier],
        )
    assert not any(placed.data[wrong.start : wrong.stop])
    fetch(stored, Placed(len(stored.content)), strong=False)


@pytest.mark.parametrize("missing", ["gone", "cut short"])
def test_a_pack_that_is_gone_says_so(stored: Stored, missing: str) -> None:
    name, good = pack_of(stored)
    if missing == "gone":
        stored.backend.delete(ObjectKind.PACK, name)
    else:
        replace_pack(stored, good[: len(good) // 3])
    with pytest.raises(MissingPack, match=name[:12]) as caught:
        fetch(stored, Placed(len(stored.content)))
    assert caught.value.next_step


class NoRoomError(Exception):
    """Raised by who places bytes."""


def test_the_first_error_stops_all(stored: Stored) -> None:
    """Goal: after an error no new read begins, and the error is what the caller gets.

    Method: placing fails at once. Each thread may have begun one read, and not one more.
    """
    begun: list[Operation] = []

    class Watch:
        def before(self, operation: Operation) -> None:
            begun.append(operation)

        def after(self, operation: Operation, error: BaseException | None) -> None:
            pass

    def place(where: Destination, data: memoryview) -> None:
        raise NoRoomError

    traced = TracingBackend(stored.backend, clock=ManualClock(), hook=Watch())
    finished: list[ReadUnit] = []
    with pytest.raises(NoRoomError):
        fetch(stored, place, threads=2, backend=traced, done=finished.append)
    assert len(begun) <= 2
    assert finished == []


def test_an_error_in_telling_stops_too(stored: Stored) -> None:
    def done(unit: ReadUnit) -> None:
        raise NoRoomError

    with pytest.raises(NoRoomError):
        fetch(stored, Placed(len(stored.content)), done=done)
