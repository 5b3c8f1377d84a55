"""Trees that try to leave the directory they are pulled into, with right digests around them."""

import base64
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from snapstore.backend.base import ObjectKind
from snapstore.errors import Malformed, SnapError, TargetError
from snapstore.format.envelope import RANK_MAGIC
from tests.support.damage import Lab, Sections, canonical, leftovers, tree_state, unseal

Entry = dict[str, Any]
Tree = list[Entry]

PLAIN: Entry = {"gid": 0, "mode": 0o644, "mtime_ns": 0, "uid": 0}


def file(path: str, **more: object) -> Entry:
    return {**PLAIN, "path": path, "type": "file", **more}


def directory(path: str, **more: object) -> Entry:
    return {**PLAIN, "mode": 0o755, "path": path, "type": "directory", **more}


def symlink(path: str, target: str, **more: object) -> Entry:
    return {**PLAIN, "path": path, "target": target, "type": "symlink", **more}


def hardlink(path: str, target: str, **more: object) -> Entry:
    return {**PLAIN, "path": path, "target": target, "type": "hardlink", **more}


def with_base64(entry: Entry, key: str, raw: bytes) -> Entry:
    rest = {name: value for name, value in entry.items() if name != key}
    return {**rest, f"{key}_b64": base64.b64encode(raw).decode()}


ROOT = directory("")
HOSTILE_TREES: dict[str, Tree] = {
    "parent directory": [ROOT, file("../escaped")],
    "parent directory below": [ROOT, directory("a"), file("a/../../escaped")],
    "parent directory as the name": [ROOT, directory("..")],
    "current directory": [ROOT, file("./a")],
    "absolute": [ROOT, file("/escaped")],
    "absolute directory": [ROOT, directory("/"), file("/escaped")],
    "double slash": [ROOT, directory("a"), file("a//b")],
    "slash at the end": [ROOT, directory("a/")],
    "NUL": [ROOT, file("a\0b")],
    "NUL at the end": [ROOT, file("a\0")],
    "twice": [ROOT, file("a"), file("a")],
    "file and directory": [ROOT, file("a"), directory("a")],
    "out of order": [ROOT, file("b"), file("a")],
    "no root": [file("a")],
    "root is a file": [file("")],
    "root is a symlink": [symlink("", "/tmp")],  # noqa: S108
    "root twice": [ROOT, ROOT],
    "no parent": [ROOT, file("a/b")],
    "parent comes later": [ROOT, file("a/b"), directory("a")],
    "below a file": [ROOT, file("a"), file("a/b")],
    "below a symlink": [ROOT, symlink("a", ".."), file("a/escaped")],
    "below a symlink to a directory": [ROOT, symlink("a", "/"), directory("a/tmp")],
    "below a hard link": [ROOT, file("a"), hardlink("b", "a"), file("b/c")],
    "hard link out": [ROOT, hardlink("a", "../escaped")],
    "hard link to an absolute path": [ROOT, hardlink("a", "/etc/passwd")],
    "hard link to a later file": [ROOT, hardlink("a", "b"), file("b")],
    "hard link to a directory": [ROOT, directory("a"), hardlink("b", "a")],
    "hard link to a symlink": [ROOT, symlink("a", "/etc/passwd"), hardlink("b", "a")],
    "hard link to a hard link": [ROOT, file("a"), hardlink("b", "a"), hardlink("c", "b")],
    "hard link without target": [ROOT, {**hardlink("a", ""), "target": ""}],
    "symlink without target": [ROOT, {**symlink("a", ""), "target": ""}],
    "symlink with NUL": [ROOT, symlink("a", "b\0c")],
    "symlink with a long target": [ROOT, symlink("a", "x" * 4096)],
    "long name": [ROOT, file("x" * 256)],
    "device": [ROOT, {**file("a"), "type": "device"}],
    "no path": [ROOT, {key: value for key, value in file("a").items() if key != "path"}],
    "two paths": [ROOT, {**file("a"), "path_b64": base64.b64encode(b"\xff").decode()}],
    "path in base64 without need": [ROOT, with_base64(file("a"), "path", b"../escaped")],
    "parent directory in base64": [ROOT, with_base64(file("a"), "path", b"../\xff")],
    "NUL in base64": [ROOT, with_base64(file("a"), "path", b"\xff\0")],
    "base64 that is none": [ROOT, {**file(""), "path_b64": "?"}],
    "mode with a file type": [ROOT, file("a", mode=0o100644)],
    "negative owner": [ROOT, file("a", uid=-1)],
    "owner of 33 bits": [ROOT, file("a", uid=1 << 32)],
    "time of 65 bits": [ROOT, file("a", mtime_ns=1 << 64)],
    "a size without stream": [ROOT, file("a", size=5)],
    "a directory with data": [ROOT, directory("a", size=5, stream=0, offset=0)],
    "a symlink with data": [ROOT, symlink("a", "b", size=5, stream=0, offset=0)],
    "attribute twice": [ROOT, file("a", xattrs=[["user.a", ""], ["user.a", ""]])],
    "attribute with NUL": [ROOT, file("a", xattrs=[["user.\0", ""]])],
    "attribute without name": [ROOT, file("a", xattrs=[["", ""]])],
    "attribute with a long name": [ROOT, file("a", xattrs=[["user." + "x" * 300, ""]])],
    "no attributes": [ROOT, file("a", xattrs=[])],
    "no list": {},  # type: ignore[dict-item]
    "nothing": [],
    "numbers": [1, 2],  # type: ignore[list-item]
}
LONG = "/".join(["d" * 200] * 21)
HOSTILE_TREES["long path"] = [
    ROOT,
    *(directory("/".join(["d" * 200] * depth)) for depth in range(1, 22)),
    file(LONG + "/x"),
]


def root_of(lab: Lab) -> Entry:
    """The root of the tree as all ranks of the snapshot have it."""
    rank = lab.path(ObjectKind.RANK, lab.rank_ids()[0].hex).read_bytes()
    root: Entry = json.loads(unseal(rank, RANK_MAGIC)[b"TREE"])[0]
    return root


def tree_of(value: object) -> Callable[[Sections], None]:
    def change(sections: Sections) -> None:
        sections[b"TREE"] = canonical(value)

    return change


def listing(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


@pytest.mark.parametrize("name", HOSTILE_TREES)
def test_a_hostile_tree(lab: Lab, tmp_path: Path, name: str) -> None:
    """It is refused with exit 4 before anything of it exists anywhere.

    Method: a directory two levels down is the target; whatever a tree could reach above it is
    listed before and after. Proves: H2, I8.
    """
    lab.lie_in_rank(tree_of(HOSTILE_TREES[name]))
    target = tmp_path / "world/inner/out"
    target.parent.mkdir(parents=True)
    before = listing(tmp_path)
    with pytest.raises(SnapError) as caught:
        lab.pull(target)
    assert caught.value.exit_code == 4
    assert "rank host" in str(caught.value)
    assert caught.value.next_step
    after = listing(tmp_path)
    assert after == before


def test_bytes_that_are_no_canonical_tree(lab: Lab, tmp_path: Path) -> None:
    """A tree that differs from its own encoding is refused, whatever it says. Proves: H1."""
    good = canonical([ROOT, file("a")])
    for bad in (
        good.replace(b",", b", "),
        good.replace(b'"a"', b'"\\u0061"'),
        good[:-1],
        good + b"\n",
        b"[" * 100_000,
        good.replace(b'"a"', b'"\xff"'),
        good.replace(b'"a"', b'"\\ud800"'),
        good.replace(b'"mtime_ns":0', b'"mtime_ns":0.0'),
        good.replace(b'"gid":0', b'"gid":0,"gid":0'),
        b"\xef\xbb\xbf" + good,
        b"",
    ):
        lab.lie_in_rank(lambda sections, data=bad: sections.update({b"TREE": data}))  # type: ignore[misc]
        with pytest.raises(SnapError) as caught:
            lab.pull(tmp_path / "out")
        assert caught.value.exit_code == 4, bad
        assert not (tmp_path / "out").exists()
        assert leftovers(tmp_path / "out") == []


def test_symlinks_lead_anywhere_but_nothing_is_written_through_them(
    lab: Lab, tmp_path: Path
) -> None:
    """A symlink may say what it likes: it is made last and nothing goes through it. Proves: H2."""
    outside = tmp_path / "outside"
    outside.mkdir()
    lab.lie_in_rank(
        tree_of(
            [
                root_of(lab),
                symlink("absolute", str(outside)),
                directory("d"),
                symlink("d/self", "self"),
                symlink("up", "../../../.."),
            ]
        )
    )
    lab.pull(tmp_path / "out")
    assert (tmp_path / "out/absolute").readlink() == outside
    assert listing(outside) == []


def test_two_ranks_that_collide(lab: Lab, tmp_path: Path) -> None:
    """A symlink of one rank is no way for a file of another. Proves: H2."""
    (tmp_path / "outside").mkdir()
    way = [root_of(lab), symlink("door", str(tmp_path / "outside"))]
    lab.lie_in_rank(tree_of(way), position=1)
    through = [root_of(lab), directory("door"), file("door/escaped")]
    lab.lie_in_rank(tree_of(through), position=2)
    with pytest.raises(Malformed, match="'door' is there twice") as caught:
        lab.pull(tmp_path / "out")
    assert caught.value.next_step
    assert listing(tmp_path / "outside") == []
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("position", [0, 1])
def test_a_symlink_that_was_there_before(lab: Lab, tmp_path: Path, position: int) -> None:
    """Pulling in place or resuming follows no symlink that somebody planted. Proves: H2.

    Method: the symlink stands where a directory of the tree, or one of its files, should be.
    """
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "layer.bin").write_bytes(b"precious")
    target = tmp_path / "out"
    target.mkdir()
    if position == 0:
        (target / "weights").symlink_to(outside)
    else:
        (target / "weights").mkdir()
        (target / "weights/layer.bin").symlink_to(outside / "layer.bin")
    with lab.open() as store, pytest.raises(TargetError, match="weights") as caught:
        store.pull(lab.name, target, in_place=True)
    assert caught.value.exit_code == 1
    assert listing(outside) == ["layer.bin"]
    assert (outside / "layer.bin").read_bytes() == b"precious"


def test_a_planted_symlink_in_what_is_resumed(lab: Lab, tmp_path: Path) -> None:
    """Between a pull that failed and its resumption somebody replaces a file by a symlink.

    Proves: H2, I8.
    """
    (tmp_path / "precious").write_bytes(b"precious")
    (pack,) = lab.packs_of()
    data = pack.read_bytes()
    os.truncate(pack, len(data) // 2)
    with pytest.raises(SnapError):
        lab.pull(tmp_path / "out")
    pack.write_bytes(data)
    work = next(path for path in tmp_path.iterdir() if path.name.endswith("-" + path.name[-12:]))
    assert "snapstore-partial" in work.name
    victim = work / "weights/layer.bin"
    victim.unlink(missing_ok=True)
    victim.symlink_to(tmp_path / "precious")
    with pytest.raises(TargetError, match=r"layer\.bin"):
        lab.pull(tmp_path / "out", resume=True)
    assert (tmp_path / "precious").read_bytes() == b"precious"
    victim.unlink()
    lab.pull(tmp_path / "out", resume=True)
    assert tree_state(tmp_path / "out") == tree_state(lab.tree)


def test_files_that_share_bytes(lab: Lab, tmp_path: Path) -> None:
    """Files that overlap in their stream would fill a disk out of a few stored bytes: refused."""

    def change(sections: Sections) -> None:
        tree = json.loads(sections[b"TREE"])
        files = [entry for entry in tree if entry.get("size", 0) > 100]
        small = [entry for entry in files if entry["stream"] == files[0]["stream"]]
        small[1].update(offset=small[0]["offset"], size=small[0]["size"])
        sections[b"TREE"] = canonical(tree)

    lab.lie_in_rank(change)
    with pytest.raises(Malformed, match="two files share bytes of stream"):
        lab.pull(tmp_path / "out")
    assert not (tmp_path / "out").exists()
