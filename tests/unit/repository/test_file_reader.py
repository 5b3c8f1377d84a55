"""Files of a snapshot read in place: any range, checked as a pull does, within a bounded cache."""

import contextlib
import dataclasses
import io
import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import snapstore
from snapstore.backend.base import ObjectKind
from snapstore.backend.memory import MemoryBackend
from snapstore.backend.trace import TracingBackend
from snapstore.errors import DigestMismatch, IntegrityError, MissingPack, PathNotFound, UsageError
from snapstore.format.config import StoreConfig
from snapstore.options import Integrity, StoreOptions
from snapstore.repository.store import Store
from snapstore.testing.clock import ManualClock
from snapstore.units import KIB, MIB
from tests.support.samples import bf16, random_bytes, text

CONFIG = StoreConfig(created="2026-11-30T05:00:00Z", store_id="0" * 32)


@dataclasses.dataclass(frozen=True)
class Shelf:
    """A tree that was pushed, and the objects that hold it."""

    tree: Path
    backend: MemoryBackend

    def open(self, **options: object) -> Store:
        chosen = dataclasses.replace(StoreOptions(threads=2), **options)  # type: ignore[arg-type]
        return Store(self.backend, CONFIG, chosen, ManualClock())

    def content(self, name: str) -> bytes:
        return (self.tree / name).read_bytes()


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    """Push two ranks with noise, numbers, text and long zeros; nobody changes them."""
    tree = tmp_path_factory.mktemp("reader") / "tree"
    (tree / "rank-0").mkdir(parents=True)
    (tree / "rank-1").mkdir()
    noise = random_bytes(MIB, 1).tobytes()
    mixed = [noise, bytes(3 * MIB), bf16(MIB, 2).tobytes(), text(MIB, 3).tobytes(), noise]
    (tree / "rank-0" / "mixed.bin").write_bytes(b"".join(mixed))
    (tree / "rank-1" / "weights.bin").write_bytes(bf16(2 * MIB, 4).tobytes())
    (tree / "empty").write_bytes(b"")
    (tree / "line").write_bytes(b"one\ntwo\n")
    with (tree / "zeros").open("wb") as file:
        file.truncate(2 * MIB)
    (tree / "again").hardlink_to(tree / "line")
    (tree / "to-file").symlink_to("rank-0/../line")
    (tree / "to-folder").symlink_to("rank-1")
    (tree / "round").symlink_to("round")
    (tree / "out").symlink_to("../line")
    (tree / "absolute").symlink_to("/line")
    backend = MemoryBackend()
    shelf = Shelf(tree, backend)
    shelf.open().push(tree, "a")
    return shelf


@pytest.fixture
def shelf(pristine: Shelf) -> Shelf:
    """Return a copy of the objects, to be spoilt."""
    copy = MemoryBackend()
    for kind in ObjectKind:
        for info in pristine.backend.list(kind):
            copy.put_new(kind, info.name, [read(pristine.backend, kind, info.name)])
    return Shelf(pristine.tree, copy)


def read(backend: MemoryBackend, kind: ObjectKind, name: str) -> bytearray:
    data = bytearray(backend.stat(kind, name).size_bytes)
    backend.get_range(kind, name, 0, memoryview(data))
    return data


@pytest.fixture(params=[64 * MIB, 0], ids=["cached", "uncached"])
def snapshot(request: pytest.FixtureRequest, pristine: Shelf) -> Iterator[snapstore.Snapshot]:
    with pristine.open(cache_bytes=request.param) as store:
        yield store.snapshot("a")


def test_all_paths_are_there(pristine: Shelf, snapshot: snapstore.Snapshot) -> None:
    found = {entry.name: entry for entry in snapshot.walk()}
    on_disk = {path.relative_to(pristine.tree).as_posix() for path in pristine.tree.rglob("*")}
    assert set(found) == on_disk | {""}
    assert [*found] == sorted(found, key=os.fsencode)
    for name, entry in found.items():
        status = (pristine.tree / name).lstat()
        assert (entry.mode, entry.uid, entry.gid) == (
            status.st_mode & 0o7777,
            status.st_uid,
            status.st_gid,
        )
        assert entry.mtime_ns == status.st_mtime_ns
        if entry.is_file:
            assert entry.size_bytes == status.st_size
        assert snapshot.entry(name) == entry
    assert found["rank-1/weights.bin"].rank == 1
    assert found["line"].rank == "host"
    # Of two names of a file the first in order has it.
    assert found["line"].type is snapstore.EntryType.HARDLINK
    assert found["line"].target == b"again"
    assert found["to-folder"].target == b"rank-1"


def test_any_range_is_what_was_pushed(
    pristine: Shelf, snapshot: snapstore.Snapshot, rng: random.Random
) -> None:
    """Goal: every read gives the bytes of the file, and stops where it stops.

    Method: random ranges, among them some across the borders of data and zeros and beyond the end.
    """
    for name in ("rank-0/mixed.bin", "rank-1/weights.bin", "zeros", "line", "again", "empty"):
        content = pristine.content(name)
        file = snapshot.open(name)
        assert file.size_bytes == len(content)
        borders = [0, MIB, 4 * MIB, len(content) - 1, len(content), len(content) + 10]
        for _ in range(30):
            offset = max(0, rng.choice([*borders, rng.randrange(len(content) + 1)]) - 100)
            size = rng.choice([0, 1, 4096, rng.randrange(300 * KIB), 4 * MIB])
            assert file.read_at(offset, size) == content[offset : offset + size], (offset, size)
        assert file.read() == content
        assert file.read() == b""


def test_it_is_a_file(pristine: Shelf, snapshot: snapstore.Snapshot) -> None:
    content = pristine.content("rank-0/mixed.bin")
    with snapshot.open("rank-0/mixed.bin") as file:
        assert file.readable()
        assert file.seekable()
        assert not file.writable()
        assert (file.name, file.mode) == ("rank-0/mixed.bin", "rb")
        assert file.seek(-10, os.SEEK_END) == len(content) - 10
        assert file.read() == content[-10:]
        assert file.seek(MIB - 5) == MIB - 5
        assert file.seek(3, os.SEEK_CUR) == file.tell() == MIB - 2
        buffer = bytearray(4)
        assert file.readinto(buffer) == 4
        assert buffer == content[MIB - 2 : MIB + 2]
        assert file.seek(len(content) + 7) == len(content) + 7
        assert file.readinto(buffer) == 0
        assert file.read() == b""
        with pytest.raises(ValueError, match="cannot seek"):
            file.seek(-1)
        with pytest.raises(ValueError, match="seek from"):
            file.seek(0, 9)
        with pytest.raises(ValueError, match="not a range"):
            file.read_at(-1, 3)
    with pytest.raises(ValueError, match="closed"):
        file.read_at(0, 1)
    with pytest.raises(ValueError, match="closed"):
        file.seek(0)
    lines = io.TextIOWrapper(io.BufferedReader(snapshot.open("line"))).readlines()
    assert lines == ["one\n", "two\n"]


def test_links_are_followed_within_the_snapshot(snapshot: snapstore.Snapshot) -> None:
    assert snapshot.open("to-file").read() == b"one\ntwo\n"
    assert snapshot.open("to-file").name == "line"
    assert snapshot.open("to-folder/weights.bin").entry.path == b"rank-1/weights.bin"
    assert snapshot.resolve("").path == b""
    for path in ("round", "out", "absolute", "nothing", "line/x", "../line", "empty/..", "/line/x"):
        with pytest.raises(PathNotFound, match="has no") as caught:
            snapshot.open(path)
        assert caught.value.exit_code == 3
        assert caught.value.next_step
    with pytest.raises(PathNotFound):
        snapshot.entry("nothing")
    for path in ("", "rank-0", "to-folder"):
        with pytest.raises(UsageError, match="directory"):
            snapshot.open(path)


def test_threads_share_what_they_read(pristine: Shelf, rng: random.Random) -> None:
    """Goal: many threads on one file get its bytes, and what one has fetched serves all.

    Method: all of them read the same ranges in their own order, with room for all frames; all
    together fetch hardly more than the packs have.
    """
    traced = TracingBackend(pristine.backend, clock=ManualClock())
    store = Store(traced, CONFIG, StoreOptions(), ManualClock())
    content = pristine.content("rank-0/mixed.bin")
    file = store.snapshot("a").open("rank-0/mixed.bin")
    ranges = [(offset, 100 * KIB) for offset in range(0, len(content), 100 * KIB)]

    def work(seed: int) -> None:
        for offset, size in random.Random(seed).sample(ranges, len(ranges)):
            assert file.read_at(offset, size) == content[offset : offset + size]

    with ThreadPoolExecutor(8) as executor:
        for done in [executor.submit(work, rng.random()) for _ in range(8)]:
            done.result()
    fetched = traced.counts["get_range"].bytes
    stored = sum(info.size_bytes for info in pristine.backend.list(ObjectKind.PACK))
    others = sum(
        info.size_bytes
        for kind in (ObjectKind.SNAPSHOT, ObjectKind.RANK, ObjectKind.LAYOUT, ObjectKind.REF)
        for info in pristine.backend.list(kind)
    )
    # Small gaps between frames that are missing are read along, even if they are known.
    assert fetched < 1.2 * stored + others


def test_the_cache_keeps_to_its_budget(pristine: Shelf) -> None:
    with pristine.open(cache_bytes=5 * MIB) as store:
        snapshot = store.snapshot("a")
        other = store.snapshot("a")
        assert snapshot.cache is other.cache is not None
        for name in ("rank-0/mixed.bin", "rank-1/weights.bin"):
            assert snapshot.open(name).read() == pristine.content(name)
            assert other.open(name).read() == pristine.content(name)
            assert 0 < snapshot.cache.held_bytes <= 5 * MIB
    with pristine.open(cache_bytes=0) as store:
        snapshot = store.snapshot("a")
        assert snapshot.open("line").read() == b"one\ntwo\n"
        assert snapshot.cache is not None
        assert snapshot.cache.held_bytes == 0
    with pytest.raises(UsageError, match="cannot keep"):
        StoreOptions(cache_bytes=-1)


@pytest.mark.parametrize("integrity", list(Integrity))
def test_damage_is_refused(shelf: Shelf, integrity: Integrity) -> None:
    """Goal: a damaged frame is never handed out, whatever was read before. Proves: I6."""
    for info in [*shelf.backend.list(ObjectKind.PACK)]:
        data = read(shelf.backend, ObjectKind.PACK, info.name)
        data[0] ^= 1
        shelf.backend.delete(ObjectKind.PACK, info.name)
        shelf.backend.put_new(ObjectKind.PACK, info.name, [data])
    refused = 0
    with shelf.open(integrity=integrity) as store:
        snapshot = store.snapshot("a")
        for name in ("rank-0/mixed.bin", "rank-1/weights.bin", "line"):
            got = b""
            with contextlib.suppress(DigestMismatch):
                got = snapshot.open(name).read()
            assert got in {b"", shelf.content(name)}
            refused += not got
        assert snapshot.open("zeros").read() == bytes(2 * MIB)
    assert refused


def test_a_pack_that_is_gone_says_so(shelf: Shelf) -> None:
    for info in [*shelf.backend.list(ObjectKind.PACK)]:
        shelf.backend.delete(ObjectKind.PACK, info.name)
    with shelf.open() as store, pytest.raises(MissingPack):
        store.snapshot("a").open("line").read()


def test_an_error_is_not_remembered(shelf: Shelf) -> None:
    """What could not be read is tried again by whoever asks next."""
    (info,) = shelf.backend.list(ObjectKind.PACK)
    good = read(shelf.backend, ObjectKind.PACK, info.name)
    with shelf.open() as store:
        file = store.snapshot("a").open("line")
        shelf.backend.delete(ObjectKind.PACK, info.name)
        for _ in range(2):
            with pytest.raises(IntegrityError):
                file.read_at(0, 3)
        shelf.backend.put_new(ObjectKind.PACK, info.name, [good])
        assert file.read_at(0, 3) == b"one"
