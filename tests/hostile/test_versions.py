"""Stores of a later program, names that cannot be meant, and what the program exits with."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from snapstore.backend.base import ObjectKind
from snapstore.backend.posix import PosixBackend
from snapstore.errors import (
    Malformed,
    SnapError,
    StoreNotFound,
    UnsupportedFeature,
    UnsupportedVersion,
    UsageError,
)
from snapstore.format.envelope import RANK_MAGIC
from snapstore.ids import Digest
from snapstore.repository.store import init_store, open_store
from tests.support.damage import Lab, canonical, cut, flip, leftovers, run_program, tree_state

Change = Callable[[dict[str, Any]], object]

NEWER: dict[str, tuple[Change, type[SnapError], str]] = {
    "version 2": (lambda config: config.update(version=2), UnsupportedVersion, "store format 2"),
    "version 2 with other keys": (
        lambda config: (config.update(version=2, more={}), config.pop("parameters")),
        UnsupportedVersion,
        "store format 2",
    ),
    "version 10^30": (
        lambda config: config.update(version=10**30),
        Malformed,
        "store configuration",
    ),
    "version 0": (lambda config: config.update(version=0), Malformed, "version 0"),
    "a feature": (
        lambda config: config.update(required_features=["tiering"], more=1),
        UnsupportedFeature,
        "'tiering'",
    ),
    "another digest": (
        lambda config: config.update(parameters={"digest": "blake4"}),
        UnsupportedFeature,
        "'blake4'",
    ),
    "another format": (lambda config: config.update(format="restic"), Malformed, "restic"),
}


@pytest.mark.parametrize("name", NEWER)
def test_a_store_of_a_later_format(lab: Lab, name: str) -> None:
    """It is refused as a whole, with what it takes to read it, and not touched. Proves: H1."""
    change, error, text = NEWER[name]
    path = lab.root / "snapstore.json"
    config = json.loads(path.read_bytes())
    change(config)
    path.write_bytes(canonical(config))
    before = sorted(lab.root.rglob("*"))
    for make in (open_store, init_store):
        with pytest.raises(error, match=text) as caught:
            make(str(lab.root))
        assert caught.value.exit_code == (4 if error is Malformed else 1)
        if error is not Malformed:
            assert caught.value.next_step == "upgrade snapstore"
    assert sorted(lab.root.rglob("*")) == before


@pytest.mark.parametrize("damage", [cut, flip, lambda path: path.write_bytes(b"")])
def test_a_damaged_configuration(lab: Lab, damage: Callable[[Path], object]) -> None:
    """Nobody guesses what a store is. Proves: H1."""
    damage(lab.root / "snapstore.json")
    with pytest.raises(SnapError) as caught:
        lab.open()
    assert caught.value.exit_code == 4
    assert "store configuration" in str(caught.value)


def test_single_objects_of_a_later_version(lab: Lab, tmp_path: Path) -> None:
    """Objects that are needed are refused by version; layouts and indexes are done without.

    Proves: H1.
    """
    ref = lab.path(ObjectKind.REF, "team/model/@v1/00000001")
    good = ref.read_bytes()
    ref.write_bytes(good.replace(b'"version":1', b'"version":2'))
    with pytest.raises(UnsupportedVersion, match="store format 2") as caught:
        lab.pull(tmp_path / "out")
    assert lab.name in str(caught.value)
    ref.write_bytes(good)
    rank = lab.rank_ids()[0]
    (layout,) = lab.layout_paths(rank)
    later = bytearray(layout.read_bytes())
    later[8:10] = b"\2\0"
    layout.with_name("00000002").write_bytes(later)
    index = lab.path(ObjectKind.INDEX, lab.names(ObjectKind.INDEX)[0])
    later = bytearray(index.read_bytes())
    later[8:10] = b"\2\0"
    index.write_bytes(later)
    lab.pull(tmp_path / "out")
    assert any("store format 2" in warning for warning in lab.push().warnings)


@pytest.mark.parametrize("is_feature", [True, False])
def test_a_rank_manifest_of_a_later_version(
    lab: Lab,
    tmp_path: Path,
    is_feature: bool,  # noqa: FBT001
) -> None:
    """Its name is its digest, so a later version is no damage: exit 1 and not 4. Proves: H1."""
    old = lab.rank_ids()[0]
    data = bytearray(lab.path(ObjectKind.RANK, old.hex).read_bytes())
    assert data.startswith(RANK_MAGIC)
    if is_feature:
        data[12] = 1 << 5
    else:
        data[8] = 2
    sections = int.from_bytes(data[10:12], "little")
    root = Digest.of(bytes(data[:32]) + bytes(data[64 : 64 + 64 * sections]))
    data[32:64] = root.raw
    lab.put(ObjectKind.RANK, root.hex, bytes(data))
    lab.lie_in_root(lambda manifest: manifest["ranks"][0].update(manifest=root.hex))
    error = UnsupportedFeature if is_feature else UnsupportedVersion
    with pytest.raises(error, match="feature 5" if is_feature else "store format 2") as caught:
        lab.pull(tmp_path / "out")
    assert caught.value.exit_code == 1
    assert root.short in str(caught.value)
    assert caught.value.next_step == "upgrade snapstore"


BAD_NAMES = [
    "",
    "/",
    "a/",
    "/a",
    "a//b",
    "a/../b",
    "..",
    ".hidden",
    "a/.b",
    "a b",
    "a\n",
    "a\0b",
    "ü",
    "a:",
    "a:b/c",
    "a:b:c",
    "a:.b",
    "a@b",
    "a@b3:",
    "a@b3:" + "0" * 63,
    "a@b3:" + "G" * 64,
    "a@b3:" + "A" * 64,
    "x" * 256,
    "a:" + "x" * 129,
    "-",
    "a/-b",
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_that_cannot_be_meant(lab: Lab, tmp_path: Path, name: str) -> None:
    """They are refused with exit 2 before anything is read or written. Proves: H2."""
    before = sorted(lab.root.rglob("*"))
    with lab.open() as store:
        for attempt in (
            lambda: store.push(lab.tree, name),
            lambda: store.pull(name, tmp_path / "out"),
            lambda: store.show(name),
        ):
            with pytest.raises(UsageError) as caught:
                attempt()
            assert caught.value.exit_code == 2
            assert caught.value.next_step
    assert sorted(lab.root.rglob("*")) == before
    assert not (tmp_path / "out").exists()


def test_a_directory_that_is_no_store(tmp_path: Path) -> None:
    """An empty directory, or one with other things in it, is no store."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path, tmp_path / "empty", tmp_path / "file", tmp_path / "absent"):
        with pytest.raises(StoreNotFound) as caught:
            open_store(str(path))
        assert caught.value.exit_code == 3
        assert caught.value.next_step


def run_on(lab: Lab, *arguments: str | Path) -> tuple[int, dict[str, Any], str]:
    """Run the real program on the store; its exit code, its JSON, and what it tells people."""
    result = run_program(*arguments, "--store", lab.root, "--json")
    lines = result.stdout.splitlines()
    assert "Traceback" not in result.stderr
    return result.returncode, json.loads(lines[-1]) if lines else {}, result.stderr


def test_what_the_program_says_of_damage(lab: Lab, tmp_path: Path) -> None:
    """From a damaged pack to a whole tree, by the program's own advice. Proves: I8.

    Method: each step needs the start of a program, so one store goes through all of them.
    """
    out = tmp_path / "out"
    exact = f"team/model@b3:{lab.snapshot_id().hex}"
    (pack,) = lab.packs_of()
    flip(pack)
    code, document, stderr = run_on(lab, "pull", exact, out)
    assert (code, document["error"]["code"]) == (4, "DigestMismatch")
    assert f"next: {document['error']['next_step']}" in stderr
    assert "--resume" in stderr
    assert not out.exists()
    assert len(leftovers(out)) == 2
    pack.rename(tmp_path / "moved away")
    code, document, stderr = run_on(lab, "push", lab.tree, lab.name)
    assert code == 0
    assert f"warning: {document['warnings'][0]}" in stderr
    code, _, _ = run_on(lab, "pull", exact, out, "--resume")
    assert code == 0
    assert tree_state(out) == tree_state(lab.tree)
    assert leftovers(out) == []


def test_what_the_program_exits_with(lab: Lab, tmp_path: Path) -> None:
    """Not found, wrong usage, a damaged name beside a good one, a store of a later format."""
    code, document, _ = run_on(lab, "pull", "team/model:nosuch", tmp_path / "out")
    assert (code, document["error"]["code"]) == (3, "RefNotFound")
    code, document, _ = run_on(lab, "pull", "team//model", tmp_path / "out")
    assert (code, document["error"]["code"]) == (2, "UsageError")
    cut(lab.path(ObjectKind.REF, "team/model/@v1/00000001"))
    code, document, stderr = run_on(lab, "ls")
    assert (code, document["name"]) == (0, "other:latest")
    assert f"warning: the name {lab.name} is damaged" in stderr
    config = lab.root / "snapstore.json"
    config.write_bytes(config.read_bytes().replace(b'"version":1', b'"version":3'))
    code, document, _ = run_on(lab, "ls")
    assert (code, document["error"]["code"]) == (1, "UnsupportedVersion")
    assert "store format 3" in document["error"]["message"]


def test_a_store_is_what_its_user_named(lab: Lab, tmp_path: Path) -> None:
    """A store may be behind a symlink; its objects may not."""
    (tmp_path / "way").symlink_to(lab.root)
    with open_store(str(tmp_path / "way")) as store:
        store.pull(lab.name, tmp_path / "out")
    assert tree_state(tmp_path / "out") == tree_state(lab.tree)
    backend = PosixBackend(lab.root)
    (lab.root / "hints").mkdir()
    (lab.root / "hints/pages").symlink_to("/etc")
    assert [*backend.list(ObjectKind.HINT)] == []
    backend.close()
