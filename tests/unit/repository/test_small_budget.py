"""A push sends nothing again, however little memory it has for what the store knows."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import numpy as np
import pytest

import snapstore
from snapstore.backend.base import ObjectKind
from snapstore.options import MEMORY_BYTES_MIN
from snapstore.repository import catalog, push, write_session
from snapstore.repository.catalog import Catalog
from snapstore.repository.memory import MemoryPlan
from snapstore.units import KIB, MIB
from tests.unit.repository.parts import memory_stores

pytestmark = pytest.mark.slow

_memory = memory_stores()

FILES = 40
FILE_BYTES = 256 * KIB


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "store") if request.param == "file" else next(_memory)


@pytest.fixture
def options(tmp_path: Path) -> snapstore.StoreOptions:
    return snapstore.StoreOptions(
        memory_bytes=MEMORY_BYTES_MIN, threads=2, index_cache=tmp_path / "cache"
    )


@dataclasses.dataclass(frozen=True)
class SmallPlan(MemoryPlan):
    """A plan with small packs, so that there are many indexes, and hardly any catalog."""

    @classmethod
    def of(cls, options: snapstore.StoreOptions) -> Self:
        plan = MemoryPlan.of(options)
        values = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
        return cls(**values | {"catalog_bytes": 1, "pack_bytes": 5 * MIB})


@pytest.fixture
def catalogs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Catalog]]:
    """All catalogs that pushes make, each with room for 40 chunks."""
    made: list[Catalog] = []

    class Watched(Catalog):
        def close(self) -> None:
            self.ended = (len(self._spilled), len(self._indexes), sum(map(len, self._runs)))
            made.append(self)
            super().close()

    monkeypatch.setattr(push, "MemoryPlan", SmallPlan)
    monkeypatch.setattr(write_session, "Catalog", Watched)
    monkeypatch.setattr(catalog, "_ROWS_MIN", 40)
    return made


def write_tree(directory: Path, seeds: range) -> Path:
    directory.mkdir()
    for seed in seeds:
        (directory / f"{seed}.bin").write_bytes(np.random.default_rng(seed).bytes(FILE_BYTES))
    return directory


def test_a_push_with_a_tiny_budget_sends_nothing_again(
    tmp_path: Path, url: str, options: snapstore.StoreOptions, catalogs: list[Catalog]
) -> None:
    """Goal: with a catalog of 40 chunks, every chunk of three snapshots is sent once.

    Method: push two trees, then one that has all of both twice over; push each again, in small
    packs, so that there are many indexes; then look that the catalogs had to use all their places.
    """
    first = write_tree(tmp_path / "first", range(FILES))
    second = write_tree(tmp_path / "second", range(FILES, 2 * FILES))
    both = write_tree(tmp_path / "both", range(2 * FILES))
    write_tree(both / "again", range(2 * FILES))
    with snapstore.init_store(url, options) as store:
        assert store.push(first, "a:first").ingest.new_bytes == FILES * FILE_BYTES
        assert store.push(second, "a:second").ingest.new_bytes == FILES * FILE_BYTES
        for tree, name in ((first, "a:3"), (second, "a:4"), (both, "a:5")):
            result = store.push(tree, name)
            assert result.ingest.new_bytes == 0
            assert result.ingest.rewritten_bytes == 0
            assert result.packed.packs == 0
            assert result.warnings == ()
        store.pull("a:5", tmp_path / "restored")
    restored = tmp_path / "restored"
    for path in both.rglob("*.bin"):
        assert (restored / path.relative_to(both)).read_bytes() == path.read_bytes()
    spilled, indexes, rows = zip(*(one.ended for one in catalogs), strict=True)
    assert max(rows) <= 40
    assert max(indexes) >= 2
    assert max(spilled) >= 1


def test_what_is_cached_is_below_the_given_directory(
    tmp_path: Path, url: str, options: snapstore.StoreOptions, catalogs: list[Catalog]
) -> None:
    tree = write_tree(tmp_path / "tree", range(FILES))
    with snapstore.init_store(url, options) as store:
        store.push(tree, "a:1")
        store.push(tree, "a:2")
        indexes = {info.name for info in store._backend.list(ObjectKind.INDEX)}
    assert catalogs
    suffixes = {".sums"} if url.startswith("/") else {".sums", ".index"}
    found = list((tmp_path / "cache").iterdir())
    assert {path.suffix for path in found} == suffixes
    assert {path.stem for path in found} <= indexes


def test_a_damaged_large_index_is_told_and_passed_over(
    tmp_path: Path, options: snapstore.StoreOptions, catalogs: list[Catalog]
) -> None:
    """Goal: an index that is too large for memory and damaged does not stop a push.

    Method: damage every index of a store; what they list is sent again, with warnings.
    """
    tree = write_tree(tmp_path / "tree", range(FILES))
    with snapstore.init_store(str(tmp_path / "store"), options) as store:
        store.push(tree, "a:1")
        paths = [path for path in (tmp_path / "store" / "indexes").rglob("*") if path.is_file()]
        for path in paths:
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
        result = store.push(tree, "a:2")
        assert result.ingest.new_bytes == FILES * FILE_BYTES
        assert len(result.warnings) == len(paths)
        assert all("is damaged" in text for text in result.warnings)
        assert store.push(tree, "a:3").ingest.new_bytes == 0
    assert catalogs
