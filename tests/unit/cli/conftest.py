"""A small store that all tests of the command line read; those that write make their own."""

import dataclasses
import os
from pathlib import Path

import pytest

import snapstore
from snapstore.units import MIB
from tests.support.samples import bf16, random_bytes, text


@dataclasses.dataclass(frozen=True)
class Shop:
    """A store with the snapshot `team/model:v1`, and the tree that was pushed."""

    store: Path
    tree: Path
    pushed: snapstore.PushResult

    @property
    def snapshot(self) -> str:
        return self.pushed.snapshot.hex


def make_tree(root: Path) -> Path:
    """Write a tree with two ranks, numbers, text, noise and zeros."""
    (root / "rank-0").mkdir(parents=True)
    (root / "rank-0" / "weights.bin").write_bytes(bf16(MIB, 1).tobytes())
    (root / "log").write_bytes(text(200_000, 1).tobytes())
    (root / "noise").write_bytes(random_bytes(300_000, 1).tobytes())
    (root / "small").write_bytes(b"small")
    os.truncate(root / "noise", 3 * MIB)
    return root


@pytest.fixture(scope="session")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    """Return the store that is only read."""
    folder = tmp_path_factory.mktemp("shop")
    tree = make_tree(folder / "tree")
    with snapstore.init_store(f"file://{folder / 'store'}") as store:
        pushed = store.push(tree, "team/model:v1", labels={"model": "test", "note": "a=b"})
    return Shop(folder / "store", tree, pushed)
