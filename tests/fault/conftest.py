"""Small packs, a tree that fills some of them, and the check that nothing is left running."""

import dataclasses
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapstore.options import StoreOptions
from snapstore.repository.memory import MemoryPlan
from snapstore.repository.store import init_store
from snapstore.units import KIB
from tests.support.damage import Lab, make_tree, nothing_left

PACK_BYTES = 120 * KIB


@pytest.fixture(autouse=True)
def _small_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Close packs early, so that a small tree fills several."""
    plan_of = MemoryPlan.of

    def of(options: StoreOptions, *, held_bytes: int = 0) -> MemoryPlan:
        return dataclasses.replace(plan_of(options, held_bytes=held_bytes), pack_bytes=PACK_BYTES)

    monkeypatch.setattr(MemoryPlan, "of", of)


@pytest.fixture(scope="session")
def trees(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Make an old tree, and a new one that has some of it; nobody changes them."""
    folder = tmp_path_factory.mktemp("trees")
    old = make_tree(folder / "old", random.Random(1))
    new = make_tree(folder / "new", random.Random(2))
    shutil.copy2(old / "weights/layer.bin", new / "weights/old-layer.bin")
    return old, new


@pytest.fixture
def empty(trees: tuple[Path, Path], tmp_path: Path) -> Lab:
    """Return a store without anything, and the new tree."""
    lab = Lab(tmp_path / "store", trees[1])
    init_store(str(lab.root), lab.options).close()
    return lab


@pytest.fixture
def lab(trees: tuple[Path, Path], tmp_path: Path) -> Lab:
    """Return a store that holds the old tree under the lab's name, and the new tree."""
    lab = Lab(tmp_path / "store", trees[1])
    with init_store(str(lab.root), lab.options) as store:
        store.push(trees[0], lab.name)
    return lab


@pytest.fixture(autouse=True)
def _no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for the disk: what dies here are processes, and the page cache outlives them."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture(autouse=True)
def _nothing_left(trees: tuple[Path, Path], tmp_path: Path) -> Iterator[None]:
    """Check that nothing is left, and do not leave many stores behind either."""
    assert all(tree.is_dir() for tree in trees)
    with nothing_left():
        yield
    for path in tmp_path.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
