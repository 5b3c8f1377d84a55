"""Snapshots read, pulled, warmed and pinned through a node's cache."""

import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest

import snapstore
from snapstore import CacheTier, Integrity
from snapstore.backend.base import ObjectKind
from snapstore.backend.memory import MemoryBackend
from snapstore.cache.node_cache import NodeCache
from snapstore.clock import SystemClock
from snapstore.errors import DigestMismatch, SnapError, UsageError
from snapstore.format.config import StoreConfig
from snapstore.options import StoreOptions
from snapstore.progress import Progress
from snapstore.repository.store import Store
from snapstore.units import GIB, KIB, MIB
from tests.support.samples import bf16, random_bytes, text

CONFIG = StoreConfig(created="2026-11-30T05:00:00Z", store_id="0" * 32)
DATA = {ObjectKind.PACK, ObjectKind.RANK, ObjectKind.LAYOUT}


class SpoilingBackend(MemoryBackend):
    """Counts what is read, and gives some reads spoiled."""

    def __init__(self) -> None:
        super().__init__()
        self.read_bytes = 0
        self.spoils: dict[ObjectKind, int] = {}
        self._counting = threading.Lock()

    def get_range(self, kind: ObjectKind, name: str, offset: int, into: memoryview) -> None:
        """See `Backend.get_range`."""
        super().get_range(kind, name, offset, into)
        with self._counting:
            self.read_bytes += into.nbytes if kind in DATA else 0
            if self.spoils.get(kind, 0) and into.nbytes:
                self.spoils[kind] -= 1
                into[into.nbytes // 2] ^= 1


@dataclasses.dataclass
class Node:
    """A store with two snapshots, and a cache."""

    tree: Path
    backend: SpoilingBackend
    directory: Path
    memory: Path

    def open(self, *, cached: bool = True, **options: object) -> Store:
        chosen = dataclasses.replace(StoreOptions(threads=2), **options)  # type: ignore[arg-type]
        clock = SystemClock()
        cache = NodeCache(self.directory, clock=clock) if cached else None
        return Store(self.backend, CONFIG, chosen, clock, cache)

    def set_budgets(self, count_bytes: int) -> None:
        NodeCache.init(
            self.directory,
            budget_bytes=count_bytes,
            memory=self.memory,
            memory_budget_bytes=count_bytes,
        ).close()

    def content(self, name: str) -> bytes:
        return (self.tree / name).read_bytes()

    def names(self) -> list[str]:
        return sorted(path.name for path in self.memory.iterdir())


@pytest.fixture
def node(tmp_path: Path, memory_directory: Path) -> Node:
    tree = tmp_path / "tree"
    (tree / "rank-0").mkdir(parents=True)
    noise = random_bytes(3 * MIB, 1).tobytes()
    mixed = noise + bytes(3 * MIB) + bf16(MIB, 2).tobytes() + text(MIB, 3).tobytes()
    (tree / "rank-0" / "mixed.bin").write_bytes(mixed)
    (tree / "noise").write_bytes(noise)
    (tree / "same").write_bytes(noise)
    (tree / "small").write_bytes(b"small")
    (tree / "link").hardlink_to(tree / "noise")
    node = Node(tree, SpoilingBackend(), tmp_path / "cache", memory_directory)
    NodeCache.init(
        node.directory, budget_bytes=GIB, memory=memory_directory, memory_budget_bytes=GIB
    ).close()
    with node.open(cached=False) as store:
        store.push(tree, "a")
        (tree / "small").write_bytes(b"other")
        store.push(tree, "b")
        (tree / "small").write_bytes(b"small")
    node.backend.read_bytes = 0
    return node


@pytest.fixture(params=list(Integrity), ids=lambda one: str(one.value))
def integrity(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_files_are_read_through_it(node: Node, integrity: Integrity) -> None:
    """Every way to read gives the file, and a second process reads none of it from the store."""
    for turn in range(2):
        node.backend.read_bytes = 0
        with node.open(integrity=integrity) as store:
            for name in ("rank-0/mixed.bin", "noise", "same", "link", "small"):
                content = node.content(name)
                with store.snapshot("a").open(name) as file:
                    assert file.read() == content
                    assert file.read_at(3, 100) == content[3:103]
                    assert file.read_at(len(content) - 2, 100) == content[-2:]
                    file.seek(1)
                    assert file.read(10) == content[1:11]
                    whole = bytearray(len(content))
                    file.read_into(0, whole, streaming=True)
                    assert whole == content
        if turn:
            # Small files are read again, out of stored bytes; the tables as well.
            assert node.backend.read_bytes == 0
    # `noise` and its other name are one, and so is the other file with these bytes, if their
    # chunks are looked at.
    assert len(node.names()) == (2 if integrity is Integrity.STRONG else 3)


def test_integrity_levels_share_nothing(node: Node) -> None:
    """What was only checked fast is never given to who wants it strong. Proves: N1."""
    with node.open(integrity=Integrity.FAST) as store, store.snapshot("a").open("noise") as file:
        file.read()
    first = node.names()
    with node.open() as store, store.snapshot("a").open("noise") as file:
        assert store.cache is not None
        with store.cache.file(file) as cached:
            assert not cached.filled(0, 1)
        file.read()
    assert len(node.names()) == len(first) + 1


def test_two_snapshots_share_what_they_have_in_common(node: Node) -> None:
    with node.open() as store:
        with store.snapshot("a").open("rank-0/mixed.bin") as file:
            file.read()
        before = node.backend.read_bytes
        with store.snapshot("b").open("rank-0/mixed.bin") as file:
            content = node.content("rank-0/mixed.bin")
            assert file.read() == content
            assert store.cache is not None
            with store.cache.file(file) as cached:
                assert cached.filled(0, len(content))
        # Its tables only.
        assert node.backend.read_bytes - before < 200 * KIB


@pytest.mark.parametrize("kind", sorted(DATA, key=lambda kind: kind.value))
def test_what_came_spoiled_is_fetched_again(node: Node, tmp_path: Path, kind: ObjectKind) -> None:
    """A store that gave wrong bytes once does not spoil the cache for good. Proves: N3."""
    for turn in range(3):
        node.backend.spoils = {kind: 1} if not turn else {}
        with node.open(index_cache_bytes=0) as store:
            store.pull("a", tmp_path / f"out-{turn}")
            with store.snapshot("b").open("same") as file:
                assert file.read() == node.content("same")
        assert (tmp_path / f"out-{turn}" / "noise").read_bytes() == node.content("noise")


def test_a_store_that_is_damaged_is_an_error(node: Node, tmp_path: Path) -> None:
    """Proves: N1, N3."""
    node.backend.spoils = {ObjectKind.PACK: 1000}
    with node.open() as store:
        with pytest.raises(DigestMismatch):
            store.pull("a", tmp_path / "out")
        node.backend.spoils = {}
        store.pull("a", tmp_path / "out", resume=True)
    assert (tmp_path / "out" / "noise").read_bytes() == node.content("noise")


def test_warming(node: Node, tmp_path: Path) -> None:
    """What is warm is not fetched again, and progress reaches its end."""
    seen: list[Progress] = []
    with node.open() as store:
        packs = store.warm("a", tier=CacheTier.PACKS, progress=seen.append)
        assert packs.missed_bytes == 0
        assert seen[-1].done_bytes == seen[-1].total_bytes == packs.wanted_bytes
        node.backend.read_bytes = 0
        decoded = store.warm("a")
        assert decoded.tier is CacheTier.DECODED
        assert decoded.files == 3
        store.pull("a", tmp_path / "out")
        assert node.backend.read_bytes == 0
    with node.open() as store:
        node.backend.read_bytes = 0
        with store.snapshot("a").open("rank-0/mixed.bin") as file:
            assert store.cache is not None
            with store.cache.file(file) as cached:
                assert cached.filled(0, file.size_bytes)
        assert node.backend.read_bytes == 0


def test_pulls_take_what_is_decoded(node: Node, tmp_path: Path, integrity: Integrity) -> None:
    """Without packs: what memory has does not come from the store, the rest does."""
    NodeCache.init(
        node.directory, budget_bytes=0, memory=node.memory, memory_budget_bytes=GIB
    ).close()
    with node.open(integrity=integrity) as store:
        assert store.pull("a", tmp_path / "plain", ranks=[0]).read_bytes > 3 * MIB
        assert store.warm("a").missed_bytes == 0
        node.backend.read_bytes = 0
        assert store.pull("a", tmp_path / "out-0", ranks=[0]).read_bytes == 0
        assert node.backend.read_bytes < 200 * KIB  # tables
        # The small file is only in the store, and so is what is read together with it.
        assert store.pull("a", tmp_path / "out").read_bytes > 0
    for name in ("rank-0/mixed.bin", "noise", "same", "small", "link"):
        assert (tmp_path / "out" / name).read_bytes() == node.content(name)
    assert (tmp_path / "out-0" / "rank-0" / "mixed.bin").read_bytes() == node.content(
        "rank-0/mixed.bin"
    )


def test_warming_one_rank(node: Node) -> None:
    with node.open() as store:
        result = store.warm("a", ranks=[0], bytes_per_s=1e9)
        assert result.files == 1
        # Without its zeros, of which nothing is stored.
        assert result.wanted_bytes == len(node.content("rank-0/mixed.bin")) - 3 * MIB
        packs = store.warm("a", ranks=[0], tier=CacheTier.PACKS)
        assert 0 < packs.wanted_bytes < result.wanted_bytes


def test_warming_is_interrupted(node: Node) -> None:
    """An exception of the progress callback ends it, also where reads wait for their turn."""

    def interrupt(now: Progress) -> None:
        if now.done_bytes:
            raise KeyboardInterrupt

    with node.open() as store:
        for rate in (None, 3e6):
            with pytest.raises((KeyboardInterrupt, SnapError)):
                store.warm("a", progress=interrupt, bytes_per_s=rate)
        assert store.warm("a").missed_bytes == 0


def test_pinned_snapshots_stay(node: Node) -> None:
    """Proves: N5."""
    with node.open() as store:
        cache = store.cache
        assert cache is not None
        snapshot = store.pin("a")
        store.warm("a", tier=CacheTier.PACKS)
        store.warm("a")
        before = cache.entries()
        assert all(entry.is_pinned for entry in before)
        assert {entry.held_bytes for entry in before} == {entry.size_bytes for entry in before}
        assert cache.evict() == 0
        assert store.evict("a") == 0
        assert [(pin.label, pin.snapshot) for pin in cache.pins()] == [("a", snapshot.hex)]
        assert cache.unpin(snapshot.hex)
        assert not cache.unpin(snapshot.hex)
        assert store.evict("a") > 8 * MIB
        assert cache.entries() == []
        stats = cache.stats()
        assert (stats.packs.files, stats.decoded.files, stats.pins) == (0, 0, 0)


def test_what_is_read_fast_is_pinned_and_evicted_with_its_snapshot(node: Node) -> None:
    """As mounts read it, while the commands open the store with the default, strong."""
    with node.open() as store, node.open(integrity=Integrity.FAST) as fast:
        fast.warm("a")
        cache = store.cache
        assert cache is not None
        snapshot = store.pin("a")
        assert all(entry.is_pinned for entry in cache.entries())
        assert store.evict("a") == 0
        assert cache.unpin(snapshot.hex)
        assert store.evict("a") > 4 * MIB
        assert [entry for entry in cache.entries() if entry.tier is CacheTier.DECODED] == []


def test_what_there_is_no_cache_for(node: Node, tmp_path: Path) -> None:
    with node.open(cached=False) as store:
        for use in (store.warm, store.pin, store.evict):
            with pytest.raises(UsageError, match="no cache") as caught:
                use("a")
            assert "SNAPSTORE_CACHE" in caught.value.next_step
    NodeCache.init(node.directory, budget_bytes=MIB).close()
    with node.open() as store:
        with pytest.raises(UsageError, match="keeps no decoded"):
            store.warm("a", tier=CacheTier.DECODED)
        # There is not even room for a part of the packs.
        assert store.warm("a").missed_bytes > 3 * MIB
        store.pull("a", tmp_path / "out")


def test_options_open_the_cache(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "file").write_bytes(random_bytes(MIB, 1).tobytes())
    options = StoreOptions(node_cache=tmp_path / "cache")
    with snapstore.init_store(str(tmp_path / "store"), options) as store:
        store.push(tree, "a")
        store.pull("a", tmp_path / "out")
        assert store.cache is not None
        assert store.cache.stats().packs.used_bytes > MIB
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(SnapError, match="can be written by others"):
        snapstore.open_store(str(tmp_path / "store"), options)


def big_tree(tree: Path, files: int) -> None:
    """Files of 4 MiB, each pushed for itself, so that there is a pack for each."""
    tree.mkdir()
    for number in range(files):
        (tree / str(number)).write_bytes(random_bytes(4 * MIB, number).tobytes())


@pytest.mark.parametrize("tier", list(CacheTier), ids=lambda one: str(one.value))
def test_what_does_not_fit_is_said_and_not_fetched(
    node: Node, tmp_path: Path, tier: CacheTier
) -> None:
    """Goal: a warm of more than the budget takes no room from itself, and is told beforehand."""
    node.set_budgets(10 * MIB)
    seen: list[str] = []
    big_tree(tmp_path / "big", 8)
    with node.open(threads=1) as store:
        store.push(tmp_path / "big", "big")
        before = node.backend.read_bytes
        result = store.warm(
            "big", tier=tier, progress=lambda now: seen.append(now.phase), warn=seen.append
        )
        read = node.backend.read_bytes - before
        assert store.cache is not None
        stats = store.cache.stats()
    assert result.wanted_bytes >= 32 * MIB
    (said,) = [text for text in seen if "fit into the cache" in text]
    assert seen.index(said) < seen.index("warm")
    assert 4 * MIB <= result.wanted_bytes - result.missed_bytes <= 10 * MIB
    assert read < 12 * MIB
    used = stats.packs if tier is CacheTier.PACKS else stats.decoded
    assert used.used_bytes <= used.budget_bytes


def test_what_many_threads_wrote_too_much_is_trimmed(node: Node, tmp_path: Path) -> None:
    """Proves: N5, also when a warm of what does not fit has ended."""
    big_tree(tmp_path / "big", 16)
    node.set_budgets(GIB)
    with node.open() as store:
        store.push(tmp_path / "big", "big")
    for _ in range(5):
        node.set_budgets(30 * MIB)
        with node.open(threads=8) as store:
            assert store.cache is not None
            assert store.warm("big", tier=CacheTier.DECODED).missed_bytes > 30 * MIB
            stats = store.cache.stats().decoded
            assert stats.used_bytes <= stats.budget_bytes
            store.cache.evict()


def test_holes_are_not_missed(node: Node, tmp_path: Path) -> None:
    """Goal: of a sparse file only its data is counted as wanted and as missed."""
    (tmp_path / "sparse").mkdir()
    with (tmp_path / "sparse" / "file").open("wb") as file:
        file.write(random_bytes(2 * MIB, 1).tobytes())
        file.truncate(200 * MIB)
    node.set_budgets(GIB)
    with node.open() as store:
        store.push(tmp_path / "sparse", "sparse")
        result = store.warm("sparse", tier=CacheTier.DECODED)
        assert (result.wanted_bytes, result.missed_bytes) == (2 * MIB, 0)
    node.set_budgets(MIB)
    with node.open() as store:
        assert store.cache is not None
        store.cache.evict()
        result = store.warm("sparse", tier=CacheTier.DECODED)
        assert (result.wanted_bytes, result.missed_bytes) == (2 * MIB, 2 * MIB)
