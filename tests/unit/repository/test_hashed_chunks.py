"""Chunks that were hashed elsewhere: the same snapshot as from bytes, and only new bytes loaded."""

import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from typing_extensions import override

import snapstore
from snapstore import (
    ChunkSource,
    Compression,
    HashedChunks,
    HashedTotals,
    Integrity,
    PushResult,
    Store,
    StoreOptions,
)
from snapstore.backend.base import ObjectKind
from snapstore.backend.posix import PosixBackend
from snapstore.errors import DigestMismatch, RefNotFound, UsageError
from snapstore.format import index as index_format
from snapstore.units import KIB, MIB
from tests.support.samples import bf16, random_bytes
from tests.support.schemas import check_store
from tests.unit.repository.parts import memory_stores

CHUNK = 256 * KIB

_memory = memory_stores()


@pytest.fixture(params=["by windows", "straight into packs", "straight into files"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """A store of each way: with codecs; with none and threads enough; and that in a directory."""
    options = StoreOptions(threads=2)
    if request.param != "by windows":
        options = StoreOptions(threads=4, compression=Compression.NONE)
    url = str(tmp_path / "store") if request.param == "straight into files" else next(_memory)
    with snapstore.init_store(url, options) as opened:
        yield opened


def content(seed: int = 1) -> np.ndarray:
    zeros = np.zeros(3 * MIB, np.uint8)
    noise = random_bytes(16 * MIB, seed)
    return np.concatenate([noise, zeros, bf16(2 * MIB, seed), noise[: 4 * MIB], zeros, noise[:777]])


def hashed(data: np.ndarray) -> HashedChunks:
    """What a GPU says of its memory, cut on the grid of the class `device`."""
    places = [(at, min(at + CHUNK, len(data))) for at in range(0, len(data), CHUNK)]
    return HashedChunks(
        lengths=np.array([end - begin for begin, end in places], np.int64),
        ids=np.frombuffer(
            b"".join(blake3(data[begin:end].data).digest() for begin, end in places), np.uint8
        ).reshape(-1, 32),
        zeros=np.array([not data[begin:end].any() for begin, end in places], np.bool_),
    )


class Loader(ChunkSource):
    """Gives bytes, and knows how many it gave."""

    def __init__(self, data: np.ndarray) -> None:
        self.data = data
        self.loaded: list[tuple[int, int]] = []
        self._lock = threading.Lock()

    @override
    def load(self, offset: int, length: int, into: memoryview) -> None:
        assert into.nbytes == length
        into[:] = self.data[offset : offset + length].data
        with self._lock:
            self.loaded.append((offset, length))

    @property
    def bytes(self) -> int:
        return sum(length for _, length in self.loaded)


def capture(store: Store, name: str, data: np.ndarray) -> tuple[PushResult, HashedTotals, Loader]:
    loader = Loader(data)
    with store.begin(name) as writer:
        with writer.open_file(0, "memory/0-1.mem", data_class="device") as file:
            totals = file.write_hashed(hashed(data), loader)
            assert file.size_bytes == len(data)
        result = writer.commit()
    return result, totals, loader


def capture_with(store: Store, chunks: HashedChunks, source: ChunkSource) -> None:
    with store.begin("a") as writer:
        with writer.open_file(0, "x.mem", data_class="device") as file:
            file.write_hashed(chunks, source)
        writer.commit()


def push_bytes(store: Store, name: str, data: np.ndarray) -> PushResult:
    with store.begin(name) as writer:
        writer.add_file(0, "memory/0-1.mem", data.tobytes(), data_class="device")
        return writer.commit()


def read(store: Store, name: str) -> bytes:
    return store.snapshot(name).open("memory/0-1.mem").readall()


@pytest.mark.slow
def test_it_is_what_its_bytes_make(store: Store) -> None:
    """Goal: the same chunks, whoever hashes them, and each loaded once.

    Proves: I5.
    """
    data = content()
    result, totals, loader = capture(store, "a", data)
    assert read(store, "a") == data.tobytes()
    assert totals.bytes == len(data)
    assert totals.loaded_bytes == loader.bytes == 20 * MIB + 777
    assert result.ingest.new_bytes == 20 * MIB + 777
    assert result.ingest.zero_bytes == 6 * MIB
    again = push_bytes(store, "b", data)
    assert again.ingest.new_bytes == 0
    with snapstore.init_store(next(_memory), StoreOptions(threads=2)) as other:
        push_bytes(other, "a", data)
        assert chunk_rows(store, "a").tolist() == chunk_rows(other, "a").tolist()


def chunk_rows(store: Store, name: str) -> np.ndarray:
    chunks = store.snapshot(name).open("memory/0-1.mem").chunks()
    return np.column_stack((chunks.offsets, chunks.lengths, chunks.ids))


@pytest.mark.slow
def test_what_the_store_has_is_not_loaded(store: Store) -> None:
    """Goal: of a second capture only what changed is loaded, whoever stored the rest."""
    data = content()
    push_bytes(store, "a", data)
    changed = data.copy()
    for at in (0, 5 * MIB + 3, 5 * MIB + CHUNK, 17 * MIB):
        changed[at] ^= 1
    _, totals, loader = capture(store, "b", changed)
    assert totals.loaded_bytes == loader.bytes == 4 * CHUNK
    assert read(store, "b") == changed.tobytes()
    _, totals, loader = capture(store, "c", changed)
    assert (totals.loaded_bytes, loader.loaded) == (0, [])
    assert read(store, "c") == changed.tobytes()


@pytest.mark.slow
def test_two_files_side_by_side(store: Store) -> None:
    """Goal: what both have is stored once, or twice where both began at once, and reads right."""
    data = content(3)
    chunks = hashed(data)
    with store.begin("a") as writer:

        def work(name: str) -> None:
            with writer.open_file(0, name, data_class="device") as file:
                file.write_hashed(chunks, Loader(data))

        threads = [threading.Thread(target=work, args=(f"{number}.mem",)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        result = writer.commit()
    assert result.ingest.new_bytes == 20 * MIB + 777
    for number in range(3):
        assert store.snapshot("a").open(f"{number}.mem").readall() == data.tobytes()


@pytest.mark.slow
def test_memory_that_changed_is_not_stored(store: Store) -> None:
    """Goal: bytes that are not what was hashed never get that name. Proves: I7."""
    data = content()
    chunks = hashed(data)
    data[7 * MIB] ^= 1
    with pytest.raises(DigestMismatch, match="hashed as"):
        capture_with(store, chunks, Loader(data))
    with pytest.raises(RefNotFound):
        store.snapshot("a")


@pytest.mark.slow
def test_what_loading_raises_ends_the_capture(store: Store) -> None:
    with pytest.raises(KeyError):
        capture_with(store, hashed(content()), NoSource(KeyError("in the source")))


class NoSource(ChunkSource):
    """Has no bytes."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error or AssertionError("nothing is to be loaded")

    @override
    def load(self, offset: int, length: int, into: memoryview) -> None:
        raise self.error


@pytest.mark.parametrize(
    "spoil",
    [
        lambda chunks: HashedChunks(chunks.lengths * 8, chunks.ids, chunks.zeros),
        lambda chunks: HashedChunks(chunks.lengths * 0, chunks.ids, chunks.zeros),
        lambda chunks: HashedChunks(chunks.lengths, chunks.ids[:-1], chunks.zeros),
        lambda chunks: HashedChunks(chunks.lengths, chunks.ids, chunks.zeros[1:]),
    ],
    ids=["long", "empty", "ids", "zeros"],
)
def test_what_cannot_be_chunks(store: Store, spoil: Callable[[HashedChunks], HashedChunks]) -> None:
    chunks = spoil(hashed(np.ones(MIB, np.uint8)))
    with store.begin("a") as writer, pytest.raises(UsageError):
        writer.open_file(0, "x").write_hashed(chunks, NoSource())


def test_a_file_is_bytes_or_chunks(store: Store) -> None:
    zeros = hashed(np.zeros(MIB, np.uint8))
    with store.begin("a") as writer:
        file = writer.open_file(0, "x")
        file.write(b"1")
        with pytest.raises(UsageError, match="other bytes"):
            file.write_hashed(zeros, NoSource())
        other = writer.open_file(0, "y")
        other.write_hashed(zeros, NoSource())
        with pytest.raises(UsageError, match="as chunks"):
            other.write(b"1")


@pytest.mark.slow
def test_only_zeros(store: Store) -> None:
    data = np.zeros(5 * MIB + 9, np.uint8)
    result, totals, loader = capture(store, "a", data)
    assert (totals.loaded_bytes, loader.loaded) == (0, [])
    assert result.ingest.zero_bytes == len(data)
    assert read(store, "a") == data.tobytes()


# --- packs that are loaded part by part ---


SMALL_PACKS = StoreOptions(threads=4, compression=Compression.NONE, memory_bytes=400 * MIB)
PACK_BYTES = 28 * MIB
"""Of the longest pack that is loaded with that budget: as many frames as fit 30 MiB."""


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Store]:
    with snapstore.init_store(str(tmp_path / "store"), SMALL_PACKS) as opened:
        yield opened


@pytest.mark.slow
def test_packs_that_are_loaded_are_like_all_others(directory: Store, tmp_path: Path) -> None:
    """Goal: a store whose packs came part by part, with gaps in the file, is right in all details.

    Method: look at every object of it; what is left of a pack is stored with other files.
    Proves: I1, I4.
    """
    zeros = np.zeros(MIB, np.uint8)
    parts = [random_bytes(15 * MIB, seed) for seed in range(4)]
    data = np.concatenate([*itertools.chain(*((part, zeros) for part in parts)), parts[0][:99]])
    _, totals, loader = capture(directory, "a", data)
    assert totals.loaded_bytes == loader.bytes == 60 * MIB + 99
    counts = check_store(tmp_path / "store")
    assert counts["packs"] > 3
    assert read(directory, "a") == data.tobytes()
    _, totals, _ = capture(directory, "b", data)
    assert totals.loaded_bytes == 0


@pytest.mark.slow
def test_loaded_packs_share_an_index(directory: Store, tmp_path: Path) -> None:
    """Goal: sixteen packs are listed by one index while more come, and all by one in the end.

    Method: the index that says to contain the first one is looked for. Proves: I3.
    """
    data = random_bytes(14 * PACK_BYTES, 5)
    result, _, _ = capture(directory, "a", data)
    indexes = [
        index_format.parse_index(path.read_bytes())
        for path in (tmp_path / "store" / "indexes").rglob("*")
        if path.is_file()
    ]
    first, last = sorted(indexes, key=lambda index: len(index.packs))
    assert len(first.packs) == 16 < len(last.packs) == result.packed.packs < 32
    assert last.supersedes == (first.root,)
    assert set(first.packs["id"].tolist()) <= set(last.packs["id"].tolist())


class Damaging(Loader):
    """Damages bytes of what it gives."""

    def __init__(self, data: np.ndarray, places: Sequence[int]) -> None:
        super().__init__(data)
        self.places = places

    @override
    def load(self, offset: int, length: int, into: memoryview) -> None:
        super().load(offset, length, into)
        for at in self.places:
            if offset <= at < offset + length:
                into[at - offset] ^= 1


def damaged_capture(
    store: Store, data: np.ndarray, places: Sequence[int], *, check_all: bool
) -> None:
    with store.begin("a") as writer:
        with writer.open_file(0, "x.mem", data_class="device") as file:
            file.write_hashed(hashed(data), Damaging(data, places), check_all=check_all)
        writer.commit()


@pytest.mark.slow
@pytest.mark.parametrize("begin", [0, 5 * MIB, 23 * MIB + CHUNK, 47 * MIB])
def test_one_chunk_in_twelve_mebibytes_is_checked(directory: Store, begin: int) -> None:
    """Goal: wherever so much is damaged that a chunk in it is checked, the capture fails."""
    places = range(begin + 7, begin + 12 * MIB, CHUNK)
    with pytest.raises(DigestMismatch, match="hashed as"):
        damaged_capture(directory, random_bytes(64 * MIB, 6), places, check_all=False)
    with pytest.raises(RefNotFound):
        directory.snapshot("a")


@pytest.mark.slow
def test_what_nobody_checked_a_strong_reader_refuses(directory: Store, tmp_path: Path) -> None:
    """Goal: one chunk that was damaged on its way is stored as it came, and never believed.

    Method: its frame has the checksum of what is stored, so that only strong reading finds it; the
    pack is named by what is stored, too.
    """
    data = random_bytes(64 * MIB, 6)
    at = 6 * MIB
    damaged_capture(directory, data, [at], check_all=False)
    with snapstore.open_store(
        str(tmp_path / "store"), dataclasses.replace(SMALL_PACKS, integrity=Integrity.FAST)
    ) as fast:
        stored = np.frombuffer(fast.snapshot("a").open("x.mem").readall(), np.uint8)
    assert np.flatnonzero(stored != data).tolist() == [at]
    with pytest.raises(DigestMismatch):
        directory.snapshot("a").open("x.mem").readall()
    for path in (tmp_path / "store" / "packs").rglob("*"):
        assert path.is_dir() or blake3(path.read_bytes()).hexdigest() == path.name
    with pytest.raises(DigestMismatch, match="hashed as"):
        damaged_capture(directory, random_bytes(64 * MIB, 7), [at], check_all=True)


@pytest.mark.slow
def test_a_name_that_damage_has_is_not_used(directory: Store, tmp_path: Path) -> None:
    """Goal: a loaded pack whose name other bytes have gets another one, by salt."""
    data = random_bytes(PACK_BYTES, 8)
    capture(directory, "a", data)
    other = tmp_path / "other"
    with snapstore.init_store(str(other), SMALL_PACKS) as store:
        name, *more = [path.name for path in (tmp_path / "store" / "packs").glob("*/*")]
        PosixBackend(other).put_new(ObjectKind.PACK, name, [b"other"])
        result, _, _ = capture(store, "a", data)
        assert read(store, "a") == data.tobytes()
    names = {path.name: path.read_bytes() for path in (other / "packs").glob("*/*")}
    assert names.pop(name) == b"other"
    assert {*more} < {*names}
    assert all(blake3(stored).hexdigest() == one for one, stored in names.items())
    assert sum(map(len, names.values())) == result.packed.pack_bytes
