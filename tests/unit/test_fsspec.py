"""`snapstore://` in fsspec: names and trees as directories, files as files, and no writing."""

import copy
import dataclasses
import errno
import importlib.metadata
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest

import snapstore
from snapstore.errors import UsageError
from snapstore.fsspec import SnapstoreFileSystem, split_path
from snapstore.units import MIB
from tests.support.samples import random_bytes

NOISE = random_bytes(2 * MIB, 1).tobytes()


@dataclasses.dataclass(frozen=True)
class Shop:
    """A store with some names, all of the same tree, and its file system."""

    url: str
    snapshot: str
    fs: Any


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("fsspec")
    tree = folder / "tree"
    (tree / "rank-0").mkdir(parents=True)
    (tree / "rank-0" / "noise.bin").write_bytes(NOISE)
    (tree / "config.json").write_text('{"a": 1}\n')
    (tree / "odd:@name").write_text("odd")
    (tree / "link").symlink_to("config.json")
    (tree / "loop").symlink_to(".")
    (tree / "second").hardlink_to(tree / "config.json")
    (tree / b"\xff".decode("utf-8", "surrogateescape")).write_text("raw")
    url = f"file://{folder / 'store'}"
    with snapstore.init_store(url) as store:
        for name in ("team/model:v1", "team/model:latest", "team/model/engine:v1", "other"):
            pushed = store.push(tree, name)
    return url, pushed.snapshot.hex


@pytest.fixture
def shop(made: tuple[str, str]) -> Shop:
    return Shop(*made, fsspec.filesystem("snapstore", store=made[0], skip_instance_cache=True))


HEX = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("path", "before", "ref", "inside"),
    [
        ("", "", None, ""),
        ("team/model", "team/model", None, ""),
        ("team/model:v1", "team/model:v1", "team/model:v1", ""),
        ("team/model:v1/rank-0/a", "team/model:v1", "team/model:v1", "rank-0/a"),
        ("team/model:v1/a:b@c", "team/model:v1", "team/model:v1", "a:b@c"),
        ("team/model:/a", "team/model:", "team/model:latest", "a"),
        (f"m@b3:{HEX}/a/b", f"m@b3:{HEX}", f"m@b3:{HEX}", "a/b"),
        (f"m@b3:{HEX}", f"m@b3:{HEX}", f"m@b3:{HEX}", ""),
    ],
)
def test_a_path_has_one_meaning(path: str, before: str, ref: str | None, inside: str) -> None:
    assert split_path(path) == (before, None if ref is None else snapshot_ref(ref), inside)


def snapshot_ref(text: str) -> snapstore.SnapshotRef:
    return snapstore.parse_snapshot_ref(text)


@pytest.mark.parametrize("path", [":v1/a", "a//b:v1", "a@b3:12/x", "a@v1", "-:v1", "a:v 1"])
def test_what_cannot_be_meant(path: str, shop: Shop) -> None:
    with pytest.raises(UsageError):
        split_path(path)
    with pytest.raises(FileNotFoundError):
        shop.fs.info(path)
    assert not shop.fs.exists(path)


def test_the_protocol_is_registered(made: tuple[str, str]) -> None:
    (entry,) = (
        one
        for one in importlib.metadata.entry_points(group="fsspec.specs")
        if one.name == "snapstore"
    )
    assert entry.value == "snapstore.fsspec:SnapstoreFileSystem"
    assert fsspec.get_filesystem_class("snapstore") is SnapstoreFileSystem
    with fsspec.open("snapstore://team/model:v1/config.json", "rt", store=made[0]) as file:
        assert file.read() == '{"a": 1}\n'


def test_the_library_does_not_need_it() -> None:
    code = (
        "import sys, snapstore; [getattr(snapstore, name) for name in snapstore.__all__];"
        "import snapstore.cli.main; sys.exit('fsspec' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)  # noqa: S603


def test_names_are_directories(shop: Shop) -> None:
    fs = shop.fs
    assert fs.ls("snapstore://", detail=False) == ["other:latest", "team"]
    assert fs.ls("team", detail=False) == [
        "team/model",
        "team/model:latest",
        "team/model:v1",
    ]
    assert fs.ls("snapstore://team/model/", detail=False) == ["team/model/engine:v1"]
    for path in ("", "team", "team/model", "team/model:v1", "team/model:"):
        assert fs.isdir(path)
        assert fs.info(path)["name"] == path
    with pytest.raises(FileNotFoundError, match="NAME:TAG/PATH"):
        fs.ls("team/model/rank-0/file")
    for path in ("tea", "team/model:v2", f"team/model@b3:{HEX}", "team/model:v1/nothing"):
        assert not fs.exists(path)
        with pytest.raises(FileNotFoundError):
            fs.ls(path)


def test_a_tree_is_as_it_was_pushed(shop: Shop) -> None:
    fs = shop.fs
    top = "team/model:v1"
    names = ["config.json", "link", "loop", "odd:@name", "rank-0", "second", "\udcff"]
    assert fs.ls(top, detail=False) == [f"{top}/{name}" for name in names]
    found = {info["name"].rpartition("/")[2]: info for info in fs.ls(top)}
    assert found["rank-0"]["type"] == "directory"
    assert (found["config.json"]["type"], found["config.json"]["size"]) == ("file", 9)
    assert (found["second"]["type"], found["second"]["size"]) == ("file", 9)
    assert found["link"] | {"type": "file", "size": 9, "islink": True} == found["link"]
    assert found["link"]["destination"] == "config.json"
    assert found["loop"]["type"] == "other"
    assert found["config.json"]["snapshot"] == fs.info(top)["snapshot"]
    for name, info in found.items():
        assert fs.info(f"snapstore://{top}/{name}") == info
    assert fs.ls(f"{top}/config.json", detail=False) == [f"{top}/config.json"]
    assert fs.find(f"{top}/rank-0") == [f"{top}/rank-0/noise.bin"]
    assert fs.glob(f"{top}/*.json") == [f"{top}/config.json"]
    assert fs.glob("team/*:v1/rank-*/*.bin") == [f"{top}/rank-0/noise.bin"]
    walked = {folder: sorted(files) for folder, _, files in fs.walk(top)}
    assert set(walked) == {top, f"{top}/rank-0"}
    assert fs.du(f"{top}/rank-0") == len(NOISE)
    exact = f"x@b3:{shop.snapshot}"
    assert fs.find(exact, withdirs=True)[0].startswith(exact)
    assert len(fs.find("snapstore://")) == 4 * len(fs.find(top))


def test_files_are_read(shop: Shop, tmp_path: Path) -> None:
    fs = shop.fs
    path = f"any/name@b3:{shop.snapshot}/rank-0/noise.bin"
    assert fs.cat_file(path) == NOISE
    assert fs.cat(f"snapstore://{path}") == NOISE
    assert fs.cat_file(path, 5, 9) == NOISE[5:9]
    assert fs.cat_file(path, -9, -2) == NOISE[-9:-2]
    assert fs.cat_file(path, 9, 5) == b""
    assert fs.cat_ranges([path, path], [0, MIB], [3, MIB + 2]) == [NOISE[:3], NOISE[MIB : MIB + 2]]
    assert fs.head(path, 7) == NOISE[:7]
    assert fs.tail(path, 7) == NOISE[-7:]
    assert fs.read_block(path, 100, 11) == NOISE[100:111]
    assert fs.size(path) == len(NOISE)
    with fs.open(path) as file:
        file.seek(MIB)
        assert file.read(10) == NOISE[MIB : MIB + 10]
    with fs.open("team/model:/link", "r") as file:
        assert file.readlines() == ['{"a": 1}\n']
    assert fs.cat_file("team/model:v1/odd:@name") == b"odd"
    assert fs.cat_file("team/model:v1/\udcff") == b"raw"
    fs.get("team/model:v1/rank-0", str(tmp_path / "got"), recursive=True)
    assert (tmp_path / "got" / "noise.bin").read_bytes() == NOISE
    assert fs.modified("team/model:v1/config.json").year >= 2026
    assert fs.ukey("team/model:v1/link") != fs.ukey("team/model:v1/config.json")
    for wrong in ("", "team", "team/model:v1", "team/model:v1/rank-0"):
        with pytest.raises(IsADirectoryError):
            fs.open(wrong)
    for wrong in ("team/model:v1/loop", "team/model:v1/no", "no:v1/x"):
        with pytest.raises(FileNotFoundError):
            fs.open(wrong)


def test_nothing_can_be_written(shop: Shop, tmp_path: Path) -> None:
    fs = shop.fs
    path = "team/model:v1/config.json"
    (tmp_path / "file").write_bytes(b"x")
    attempts: list[Any] = [
        lambda: fs.open(path, "wb"),
        lambda: fs.open(path, "a"),
        lambda: fs.open(path, "r+b"),
        lambda: fs.rm(path),
        lambda: fs.rm_file(path),
        lambda: fs.delete(path),
        lambda: fs.mkdir("team/new"),
        lambda: fs.makedirs("team/new"),
        lambda: fs.mkdirs("team/new"),
        lambda: fs.rmdir("team"),
        lambda: fs.touch(path),
        lambda: fs.pipe(path, b"x"),
        lambda: fs.pipe({path: b"x"}),
        lambda: fs.write_text(path, "x"),
        lambda: fs.put(str(tmp_path / "file"), path),
        lambda: fs.put_file(str(tmp_path / "file"), path),
        lambda: fs.copy(path, "team/model:v1/b"),
        lambda: fs.mv(path, "team/model:v1/b"),
        lambda: fs.move(path, "team/model:v1/b"),
    ]
    for attempt in attempts:
        with pytest.raises(OSError, match="read-only") as caught:
            attempt()
        assert caught.value.errno == errno.EROFS
    assert fs.cat_file(path) == b'{"a": 1}\n'


def test_a_name_stands_for_one_snapshot(tmp_path: Path) -> None:
    """Until somebody asks to look again: else a reader might mix two snapshots."""
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "file").write_text("old")
    url = f"file://{tmp_path / 'store'}"
    with snapstore.init_store(url) as store:
        old = store.push(tree, "a").snapshot
        fs = fsspec.filesystem("snapstore", store=url)
        assert fs.cat_file("a:/file") == b"old"
        (tree / "file").write_text("newer")
        store.push(tree, "a")
        assert fs.cat_file("a:/file") == b"old"
        fs.invalidate_cache()
        assert fs.cat_file("a:/file") == b"newer"
        assert fs.cat_file(f"a@b3:{old.hex}/file") == b"old"


def test_where_the_store_is(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SNAPSTORE_URL", raising=False)
    with pytest.raises(UsageError, match="no store given"):
        fsspec.filesystem("snapstore", skip_instance_cache=True).ls("")
    monkeypatch.setenv("SNAPSTORE_URL", shop.url)
    fs = fsspec.filesystem("snapstore", skip_instance_cache=True, integrity="fast", cache="1MiB")
    assert fs.cat_file("team/model:v1/rank-0/noise.bin") == NOISE
    # Copies and pickles are made from the arguments, not from an open store.
    assert copy.deepcopy(shop.fs).cat_file("other:/odd:@name") == b"odd"
    with pytest.raises(UsageError, match="integrity"):
        fsspec.filesystem("snapstore", integrity="some", skip_instance_cache=True)
