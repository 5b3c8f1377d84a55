"""A store to spoil for each test, and the check that no operation leaves anything running."""

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.damage import Lab, nothing_left


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """Make a store once; nobody changes it."""
    return Lab.make(tmp_path_factory.mktemp("lab"), random.Random(20261130))


@pytest.fixture
def lab(pristine: Lab, tmp_path: Path) -> Lab:
    """Return a copy of the store, to be spoilt; the tree is shared and must stay as it is."""
    root = tmp_path / "store"
    shutil.copytree(pristine.root, root)
    return Lab(root, pristine.tree)


@pytest.fixture(autouse=True)
def _no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for the disk: what dies here are processes, and the page cache outlives them."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture(autouse=True)
def _nothing_left(pristine: Lab, tmp_path: Path) -> Iterator[None]:
    """Check that nothing is left, and do not leave some hundred stores behind either."""
    assert pristine.tree.is_dir()
    with nothing_left():
        yield
    for path in tmp_path.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
