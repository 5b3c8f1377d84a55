"""Long ranges read in place: the bytes of the file, by any number of threads, or an error."""

import dataclasses
import mmap
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import snapstore
from snapstore import Compression, Integrity, SnapshotFile, Store, StoreOptions
from snapstore.backend.base import Backend, ObjectKind
from snapstore.backend.memory import MemoryBackend
from snapstore.backend.posix import PosixBackend
from snapstore.backend.trace import TracingBackend
from snapstore.errors import DigestMismatch, MissingPack, UsageError
from snapstore.format.config import StoreConfig
from snapstore.format.layout import SEGMENT_DTYPE, LayoutTables
from snapstore.ids import PackId
from snapstore.repository.snapshot import load_snapshot
from snapstore.testing.clock import ManualClock
from snapstore.units import KIB, MIB
from tests.support.samples import bf16, pages, random_bytes, text

pytestmark = pytest.mark.slow

CONFIG = StoreConfig(created="2026-11-30T05:00:00Z", store_id="0" * 32)
NAMES = ("pages-1.img", "pages-2.img", "odd.bin")


@dataclasses.dataclass(frozen=True)
class Shelf:
    """Two generations of a tree in one store."""

    tree: Path
    connect: Callable[[], Backend]

    @property
    def backend(self) -> Backend:
        """The objects, for one store, which closes it."""
        return self.connect()

    def open(self, **options: object) -> Store:
        chosen = dataclasses.replace(StoreOptions(threads=2), **options)  # type: ignore[arg-type]
        return Store(self.backend, CONFIG, chosen, ManualClock())

    def content(self, generation: str, name: str) -> bytes:
        return (self.tree / generation / name).read_bytes()


def first_generation() -> dict[str, np.ndarray]:
    zeros = np.zeros(2 * MIB, np.uint8)
    parts = [
        bf16(MIB, 1),
        zeros[: 40 * KIB],
        text(600 * KIB, 2),
        random_bytes(3 * MIB, 3),
        zeros,
        pages(700, 4, zero_share=0.3),
        random_bytes(900 * KIB, 5),
        zeros[: 300 * KIB],
        random_bytes(4 * MIB, 6),
    ]
    return {
        "pages-1.img": np.concatenate(parts),
        "pages-2.img": np.concatenate([parts[3], zeros, zeros, parts[0]]),
        "odd.bin": np.concatenate([bf16(MIB, 7), text(12_345, 8), zeros[:99_999]]),
    }


def next_generation(files: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Rewrite runs of pages, and insert some, so that frames are used in part and out of place."""
    image = files["pages-1.img"].copy()
    rng = random.Random(9)
    for number in range(40):
        at = rng.randrange(len(image) // 4096 - 20) * 4096
        length = rng.randrange(1, 20) * 4096
        image[at : at + length] = random_bytes(length, 100 + number)
    middle = len(image) // 8192 * 4096
    image = np.concatenate([image[:middle], random_bytes(5 * 4096, 10), image[middle:]])
    return files | {"pages-1.img": image, "pages-2.img": files["pages-2.img"][MIB:]}


@pytest.fixture(
    scope="module",
    params=["memory none", "memory auto", "posix none", "posix auto"],
)
def shelf(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    place, compression = request.param.split()
    folder = tmp_path_factory.mktemp("ranges")
    (folder / "store").mkdir()
    memory = MemoryBackend()
    made = Shelf(folder, lambda: memory if place == "memory" else PosixBackend(folder / "store"))
    files = first_generation()
    for name in ("one", "two"):
        (folder / name).mkdir()
        for path, content in files.items():
            (folder / name / path).write_bytes(content.tobytes())
        made.open(compression=Compression(compression)).push(folder / name, name)
        files = next_generation(files)
    return made


def read_by_ranges(file: SnapshotFile, about_bytes: int, threads: int) -> bytes:
    """Fill a page-aligned buffer of its own per range and put them together."""
    found = file.ranges(about_bytes=about_bytes, zeros_bytes_min=256 * KIB)

    def read(one: snapstore.FileRange) -> bytes:
        if one.is_zeros:
            return bytes(one.length)
        with mmap.mmap(-1, one.length) as buffer:
            buffer.write(b"\xee" * one.length)
            file.read_into(one.offset, buffer, streaming=True)
            return buffer[:]

    with ThreadPoolExecutor(threads) as executor:
        return b"".join(executor.map(read, found))


@pytest.mark.parametrize("integrity", list(Integrity))
@pytest.mark.parametrize("about_bytes", [64 * KIB, MIB, 8 * MIB])
def test_ranges_give_the_file(shelf: Shelf, integrity: Integrity, about_bytes: int) -> None:
    with shelf.open(integrity=integrity) as store:
        for generation in ("one", "two"):
            snapshot = store.snapshot(generation)
            for name in NAMES:
                content = shelf.content(generation, name)
                assert read_by_ranges(snapshot.open(name), about_bytes, 3) == content


@pytest.mark.parametrize("cache_bytes", [64 * MIB, 0])
def test_any_range_any_way(shelf: Shelf, cache_bytes: int, rng: random.Random) -> None:
    """Goal: any range is what was pushed, whatever others read how at the same time.

    Method: threads read random ranges of all files of both generations, through two snapshots of
    each, half of them streaming, into buffers that are aligned or not, and full of other bytes.
    """
    with shelf.open(cache_bytes=cache_bytes) as store:
        files = [
            (store.snapshot(generation).open(name), shelf.content(generation, name))
            for generation in ("one", "two")
            for name in NAMES
            for _ in range(2)
        ]

        def work(seed: int) -> None:
            own = random.Random(seed)
            for _ in range(40):
                file, content = own.choice(files)
                offset = own.randrange(len(content) + 1)
                if own.random() < 0.5:
                    offset -= offset % 4096
                longest = len(content) - offset
                length = min(longest, own.choice([0, 1, 4096, own.randrange(4 * MIB), longest]))
                skip = own.choice([0, 0, 1])
                buffer = np.full(length + skip, 0xEE, np.uint8)
                file.read_into(offset, buffer[skip:], streaming=own.random() < 0.5)
                assert bytes(buffer[skip:]) == content[offset : offset + length], (offset, length)
                assert skip == 0 or buffer[0] == 0xEE

        with ThreadPoolExecutor(4) as executor:
            for done in [executor.submit(work, rng.random()) for _ in range(4)]:
                done.result()


def test_what_is_read_once_is_not_kept(shelf: Shelf) -> None:
    """Goal: streaming a file of a first generation leaves the cache to page faults."""
    traced = TracingBackend(shelf.backend, clock=ManualClock())
    store = Store(traced, CONFIG, StoreOptions(), ManualClock())
    file = store.snapshot("one").open("odd.bin")
    buffer = bytearray(file.size_bytes)
    file.read_into(0, buffer, streaming=True)
    assert store.snapshot("one").cache is not None
    held = store.snapshot("one").cache
    assert held is not None
    assert held.held_bytes == 0
    file.read_into(0, memoryview(buffer)[:4096])
    assert held.held_bytes > 0


def test_what_cannot_be_read(shelf: Shelf) -> None:
    with shelf.open() as store:
        file = store.snapshot("one").open("odd.bin")
        size = file.size_bytes
        for streaming in (False, True):
            file.read_into(size, bytearray(0), streaming=streaming)
            for offset, length in ((-1, 1), (size, 1), (size - 5, 6), (size + 1, 0)):
                with pytest.raises(UsageError, match="has no") as caught:
                    file.read_into(offset, bytearray(length), streaming=streaming)
                assert caught.value.next_step
            with pytest.raises(TypeError, match="read-only"):
                file.read_into(0, b"1234", streaming=streaming)
        for sizes in ({"about_bytes": 1000}, {"zeros_bytes_min": 0}):
            with pytest.raises(UsageError, match="cannot divide"):
                file.ranges(**sizes)
        assert store.snapshot("one").open("pages-1.img").ranges()[0].offset == 0
        file.close()
        with pytest.raises(ValueError, match="closed"):
            file.read_into(0, bytearray(1))
        with pytest.raises(ValueError, match="closed"):
            file.ranges()


def damaged(shelf: Shelf, position: float) -> MemoryBackend:
    """Copy all objects, with one bit flipped in every frame of every pack at that part of it."""
    copy, backend = MemoryBackend(), shelf.backend
    for kind in ObjectKind:
        for info in backend.list(kind):
            data = bytearray(info.size_bytes)
            if data:
                backend.get_range(kind, info.name, 0, memoryview(data))
            copy.put_new(kind, info.name, [data])
    store = Store(copy, CONFIG, StoreOptions(), ManualClock())
    flipped: dict[str, bytearray] = {}
    for layout in [rank.layout for rank in store.snapshot("one").ranks()]:
        for frame in layout.frames:
            pack = PackId(bytes(layout.packs["id"][frame["pack"]])).hex
            data = flipped.setdefault(pack, whole(copy, pack))
            data[int(frame["offset"]) + int(position * (int(frame["stored_length"]) - 1))] ^= 4
    for pack, data in flipped.items():
        copy.delete(ObjectKind.PACK, pack)
        copy.put_new(ObjectKind.PACK, pack, [data])
    return copy


def whole(backend: MemoryBackend, pack: str) -> bytearray:
    data = bytearray(backend.stat(ObjectKind.PACK, pack).size_bytes)
    backend.get_range(ObjectKind.PACK, pack, 0, memoryview(data))
    return data


@pytest.mark.parametrize("integrity", list(Integrity))
@pytest.mark.parametrize("position", [0.0, 0.5, 1.0])
def test_a_flipped_bit_is_named(shelf: Shelf, integrity: Integrity, position: float) -> None:
    """Goal: whoever meets damage learns the pack and the offset, and gets no bytes as good.

    Method: flip a bit of every frame, so that each range of data must be refused. Proves: I6.
    """
    store = Store(
        damaged(shelf, position), CONFIG, StoreOptions(integrity=integrity), ManualClock()
    )
    for name in NAMES:
        file = store.snapshot("one").open(name)
        for one in file.ranges(about_bytes=MIB):
            if one.is_zeros:
                continue
            buffer = bytearray(one.length)
            with pytest.raises(DigestMismatch, match=r"frame at offset \d+ of pack [0-9a-f]+"):
                file.read_into(one.offset, buffer, streaming=True)


def test_a_pack_that_is_gone(shelf: Shelf) -> None:
    backend = damaged(shelf, 0.0)
    for info in [*backend.list(ObjectKind.PACK)]:
        backend.delete(ObjectKind.PACK, info.name)
    store = Store(backend, CONFIG, StoreOptions(), ManualClock())
    file = store.snapshot("one").open("odd.bin")
    with pytest.raises(MissingPack):
        file.read_into(0, bytearray(file.size_bytes), streaming=True)


def split_segments(layout: LayoutTables, at: int) -> LayoutTables:
    """Say the same in more words: long segments in two parts, the first of `at` bytes."""
    rows = []
    counts = layout.streams.copy()
    for stream, (first, count, _) in enumerate(layout.streams.tolist()):
        counts["first"][stream] = len(rows)
        for length, frame, offset in layout.segments[first : first + count].tolist():
            long_enough = length >= 2 * at and offset + length < 1 << 32
            head = at if long_enough else length
            rows.append((head, frame, offset))
            if long_enough:
                rows.append((length - head, frame, offset + head if frame < 1 << 31 else 0))
        counts["count"][stream] = len(rows) - int(counts["first"][stream])
    return dataclasses.replace(layout, streams=counts, segments=np.array(rows, SEGMENT_DTYPE))


@pytest.mark.parametrize("lie", [False, True])
def test_pieces_that_divide_a_chunk(shelf: Shelf, *, lie: bool) -> None:
    """Goal: a layout may cut in the middle of a chunk; its bytes are right, or an error.

    Method: cut all long segments at an odd place; as a lie let two parts of one frame change
    places, which only the chunks can tell. Proves: I6.
    """
    options = StoreOptions()
    with shelf.open() as store:
        snapshot = load_snapshot(store._backend, store.snapshot("one").id, options=options)
        files = snapshot._files
        (rank,) = files._ranks
        layout = split_segments(rank.layout, 300 * KIB + 1)
        if lie:
            offsets, lengths = layout.segments["offset"], layout.segments["length"]
            data = np.flatnonzero(layout.segments["frame"] < 1 << 31)
            (row,) = [one for one in data if lengths[one] == 300 * KIB + 1][:1]
            offsets[row + 1] -= 1
        vars(rank)["layout"] = layout
        steps = []
        for name in NAMES:
            file = snapshot.open(name)
            buffer = bytearray(file.size_bytes)
            try:
                file.read_into(0, buffer, streaming=True)
            except DigestMismatch as error:
                steps.append(error.next_step)
            else:
                assert buffer == shelf.content("one", name)
        assert len(steps) == lie
        assert all("layout is wrong" in step for step in steps)
