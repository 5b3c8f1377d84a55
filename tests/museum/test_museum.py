"""Stores of the past and stores that are broken: what each command says to them.

`tools/make_museum.py` makes exhibits, and never makes one anew that is there: a store that could be
read once must be readable for ever.
"""

import json
import tarfile
from pathlib import Path

import pytest

from tests.support.trees import read_tree
from tests.unit.cli.program import run
from tools.make_museum import MUSEUM, OTHER, make_tree
from tools.museum_damage import EXHIBITS

pytestmark = pytest.mark.slow

STORES = sorted(path.name.removesuffix(".tar.gz") for path in MUSEUM.glob("*.tar.gz"))
BYTES_MAX = 32 * 1024


def contents(folder: Path) -> dict[bytes, str]:
    return {path: seen.digest for path, seen in read_tree(folder).items()}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return make_tree(tmp_path / "tree")


def test_the_catalogue_is_complete() -> None:
    described = sorted(path.stem for path in MUSEUM.glob("*.json"))
    assert described == STORES == sorted(one.name for one in EXHIBITS)


@pytest.mark.parametrize("name", STORES)
def test_an_exhibit(name: str, tree: Path, tmp_path: Path) -> None:
    """Goal: every command ends with the exit code and the words that its description has.

    Method: run them one after the other on one copy. A pull that succeeds must give the tree; one
    that fails must leave nothing under the name of its target.
    """
    packed = MUSEUM / f"{name}.tar.gz"
    assert packed.stat().st_size <= BYTES_MAX
    store = tmp_path / "store"
    with tarfile.open(packed) as archive:
        archive.extractall(store, filter="data")
    described = json.loads((MUSEUM / f"{name}.json").read_text("utf-8"))
    assert described["broken"]
    for number, command in enumerate(described["commands"]):
        target = tmp_path / f"target-{number}"
        arguments = [one.format(tree=tree, target=target) for one in command["run"]]
        ended = run(*arguments, store=store)
        assert ended.code == command["exit"], (arguments, ended)
        assert command["says"] in ended.out + ended.err, (arguments, ended)
        if arguments[0] != "pull":
            continue
        if ended.code:
            assert not target.exists()
        elif arguments[1] == OTHER:
            expected = make_tree(tmp_path / f"other-{number}", seed="other")
            assert contents(target) == contents(expected)
        else:
            assert contents(target) == contents(tree)
