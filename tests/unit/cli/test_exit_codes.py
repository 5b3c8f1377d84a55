"""Exit codes tell who must act; messages name the object and the next step."""

import os
from pathlib import Path

import pytest

import snapstore
from tests.support.trees import same_trees
from tests.unit.cli.conftest import Shop
from tests.unit.cli.program import one_object, run, run_from_nothing

pytestmark = pytest.mark.slow

WRONG_USAGE = [
    pytest.param(["--no-such-option"], "No such option", id="unknown option"),
    pytest.param(["frobnicate"], "No such command", id="unknown command"),
    pytest.param(["push", "{tree}"], "Missing argument", id="no name"),
    pytest.param(["push", "{tree}", "a", "--compression", "best"], "best", id="no such codec"),
    pytest.param(["push", "{tree}", "a//b"], "not a snapshot name", id="bad name"),
    pytest.param(["push", "{tree}", "a:"], "not a tag", id="bad tag"),
    pytest.param(["push", "{tree}", "a@b3:{id}"], "one exact snapshot", id="push to an id"),
    pytest.param(["push", "{tree}", "a", "--memory", "1"], "too small", id="too little memory"),
    pytest.param(["push", "{tree}", "a", "--memory", "much"], "not a size", id="not a size"),
    pytest.param(["push", "{tree}", "a", "--threads", "-1"], "threads", id="negative threads"),
    pytest.param(["push", "{tree}", "a", "--label", "x"], "not a label", id="bad label"),
    pytest.param(["push", "{tree}", "a", "--class", "*=x"], "not a class", id="bad class"),
    pytest.param(["push", "{tree}", "a", "--rank-glob", "x"], "no {N}", id="bad rank glob"),
    pytest.param(["pull", "team/model:v1", "{new}", "--memory", "1MiB"], "too small", id="pull"),
    pytest.param(["pull", "team/model:v1", "{new}", "--rank", "x"], "not a rank", id="bad rank"),
    pytest.param(["pull", "team/model:v1", "{new}", "--rank", "7"], "no rank 7", id="no rank"),
    pytest.param(["show", "a@b3:12"], "not an exact snapshot", id="short id"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG_USAGE)
def test_wrong_usage_is_2(shop: Shop, tmp_path: Path, arguments: list[str], message: str) -> None:
    new = tmp_path / "new"
    given = [
        argument.replace("{tree}", str(shop.tree))
        .replace("{new}", str(new))
        .replace("{id}", shop.snapshot)
        for argument in arguments
    ]
    ended = run(*given, environment={"SNAPSTORE_URL": str(shop.store)})
    assert ended.code == 2
    assert message in ended.err
    assert ended.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [["ls"], ["init"], ["show", "a"]])
def test_no_store_given_is_2(command: list[str]) -> None:
    ended = run(*command)
    assert (ended.code, ended.out) == (2, "")
    assert "no store given" in ended.err
    assert "SNAPSTORE_URL" in ended.err


@pytest.mark.parametrize("url", ["s3x://bucket/prefix", "file:relative", "file:///a?b=c"])
def test_a_url_that_cannot_be_meant_is_2(url: str) -> None:
    assert run("ls", store=url).code == 2


def test_what_is_not_there_is_3(shop: Shop, tmp_path: Path) -> None:
    """Goal: missing stores, names and snapshots are told apart in words, and are all exit 3."""
    (tmp_path / "empty").mkdir()
    for store in (tmp_path / "nowhere", tmp_path / "empty"):
        ended = run("ls", store=store)
        assert ended.code == 3
        assert str(store) in ended.err
    assert not (tmp_path / "nowhere").exists()
    for name in ("team/model:v2", "team:v1", f"x@b3:{'0' * 64}"):
        for arguments in (["show", name], ["pull", name, tmp_path / "out"]):
            ended = run(*arguments, store=shop.store)
            assert ended.code == 3
            assert name.removeprefix("x@b3:") in ended.err
    assert not (tmp_path / "out").exists()


def test_a_source_that_cannot_be_stored_is_1(tmp_path: Path) -> None:
    """Goal: special files are refused by name, and left out on demand.

    Method: a tree with a fifo; then with --skip-special, whose result must name what it skipped.
    """
    store, tree = tmp_path / "store", tmp_path / "tree"
    snapstore.init_store(f"file://{store}").close()
    missing = run("push", tmp_path / "nowhere", "a", store=store)
    assert missing.code == 1
    assert "nowhere" in missing.err
    tree.mkdir()
    (tree / "file").write_bytes(b"x")
    os.mkfifo(tree / "pipe")
    refused = run("push", tree, "a", store=store)
    assert refused.code == 1
    assert "'pipe' (fifo)" in refused.err
    assert "--skip-special" in refused.err
    assert run("show", "a", store=store).code == 3
    result = one_object(run("push", tree, "a", "--skip-special", "--json", store=store))
    assert result["skipped"] == ["pipe"]
    one_object(run("pull", "a", tmp_path / "out", "--json", store=store))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["file"]


def test_a_target_that_cannot_be_used_is_1(shop: Shop, tmp_path: Path) -> None:
    """Goal: what is in the way is never touched, and --in-place writes beside it."""
    target = tmp_path / "target"
    target.mkdir()
    (target / "mine").write_bytes(b"mine")
    refused = run("pull", "team/model:v1", target, store=shop.store)
    assert refused.code == 1
    assert "is not empty" in refused.err
    assert [path.name for path in target.iterdir()] == ["mine"]
    file = run("pull", "team/model:v1", target / "mine", store=shop.store)
    assert file.code == 1
    assert (target / "mine").read_bytes() == b"mine"
    assert run("pull", "team/model:v1", tmp_path / "a" / "b", store=shop.store).code == 1
    assert run("pull", "team/model:v1", target, "--in-place", store=shop.store).code == 0
    (target / "mine").unlink()
    assert sorted(path.name for path in target.iterdir()) == sorted(
        path.name for path in shop.tree.iterdir()
    )


def test_an_empty_target_is_filled(shop: Shop, tmp_path: Path) -> None:
    (tmp_path / "target").mkdir(mode=0o700)
    assert run("pull", "team/model:v1", tmp_path / "target", store=shop.store).code == 0
    same_trees(shop.tree, tmp_path / "target")


def test_damaged_data_are_4(tmp_path: Path) -> None:
    """Goal: a changed byte of a pack is exit 4, names the pack, and leaves nothing behind."""
    store, tree = tmp_path / "store", tmp_path / "tree"
    tree.mkdir()
    (tree / "data.bin").write_bytes(os.urandom(100_000))
    with snapstore.init_store(f"file://{store}") as opened:
        opened.push(tree, "a")
    (pack,) = (path for path in (store / "packs").rglob("*") if path.is_file())
    pack.chmod(0o600)
    damaged = bytearray(pack.read_bytes())
    damaged[500] ^= 1
    pack.write_bytes(damaged)
    ended = run("pull", "a", tmp_path / "out", "--quiet", store=store)
    assert ended.code == 4
    assert pack.name[:12] in ended.err
    assert not (tmp_path / "out").exists()


def test_python_without_assertions_is_refused(tmp_path: Path) -> None:
    """Our assertions guard the data of our users: without them nothing may run."""
    for arguments in (["init", "--store", str(tmp_path / "store")], ["--version"]):
        ended = run_from_nothing(*arguments, flags=["-O"])
        assert ended.code == 1
        assert "refusing to run under python -O" in ended.err
        assert ended.out == ""
    assert list(tmp_path.iterdir()) == []


def test_labels_are_checked_before_anything_is_stored(shop: Shop) -> None:
    packs = set((shop.store / "packs").rglob("*"))
    for labels in (["k=" + "x" * 5000], ["a=1", "a=2"], ["=v"]):
        options = [word for label in labels for word in ("--label", label)]
        assert run("push", shop.tree, "a", *options, store=shop.store).code == 2
    assert run("push", shop.tree, "a", "--class", "x=foo", store=shop.store).code == 2
    assert run("push", shop.tree, "a", "--rank-glob", "foo", store=shop.store).code == 2
    assert set((shop.store / "packs").rglob("*")) == packs


def test_a_store_is_apart_from_the_trees(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/file").write_bytes(b"data")
    refused = run("init", store=tmp_path / "tree")
    assert refused.code == 2
    assert "holds other things" in refused.err
    inside = tmp_path / "tree/store"
    assert run("init", store=inside).code == 0
    assert run("push", tmp_path / "tree", "a", store=inside).code == 2
    assert run("pull", "a", inside / "out", store=inside).code == 2
