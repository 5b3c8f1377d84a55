"""With --json stdout is exactly one object, or one a line, and always of the same shape."""

from pathlib import Path

import pytest

import snapstore
from tests.support.trees import same_trees
from tests.unit.cli.conftest import Shop, make_tree
from tests.unit.cli.program import Ended, objects, one_object, run

pytestmark = pytest.mark.slow


def test_init_tells_the_store(tmp_path: Path) -> None:
    """Goal: a store is made once; whoever comes later gets the same."""
    store = tmp_path / "deep" / "store"
    first = one_object(run("init", "--json", store=f"file://{store}"))
    assert set(first) == {"created", "store_id", "url"}
    assert first["url"] == f"file://{store}"
    assert len(first["store_id"]) == 32
    assert one_object(run("init", "--json", store=store)) == first


def test_push_tells_what_it_did(tmp_path: Path) -> None:
    """Goal: the shape of the result, and that a second push says that nothing was new.

    Method: push the same tree twice under one name.
    """
    tree = make_tree(tmp_path / "tree")
    run("init", "--quiet", store=tmp_path / "store")
    arguments = ("push", tree, "a/b", "--json", "--label", "k=v=w", "--label", "x=")
    first = one_object(run(*arguments, store=tmp_path / "store"))
    kinds = {key: type(value).__name__ for key, value in first.items()}
    assert kinds == {
        "frames": "int",
        "generation": "int",
        "kind": "str",
        "known_bytes": "int",
        "known_chunks": "int",
        "logical_bytes": "int",
        "name": "str",
        "new_bytes": "int",
        "new_chunks": "int",
        "packs": "int",
        "ranks": "dict",
        "seconds": "float",
        "skipped": "list",
        "snapshot": "str",
        "stored_again_bytes": "int",
        "stored_bytes": "int",
        "warnings": "list",
        "zero_bytes": "int",
    }
    assert (first["name"], first["generation"], first["kind"]) == ("a/b:latest", 1, "directory")
    assert set(first["ranks"]) == {"host", "0"}
    assert first["logical_bytes"] == (2 << 20) + 200_000 + (3 << 20) + 5
    parts = first["new_bytes"] + first["known_bytes"] + first["zero_bytes"]
    assert parts == first["logical_bytes"]
    again = one_object(run(*arguments, store=tmp_path / "store"))
    assert (again["new_bytes"], again["new_chunks"], again["packs"]) == (0, 0, 0)
    assert (again["generation"], again["ranks"]) == (2, first["ranks"])
    shown = one_object(run("show", "a/b", "--json", store=tmp_path / "store"))
    assert shown["labels"] == {"k": "v=w", "x": ""}


def test_pull_tells_what_it_did(shop: Shop, tmp_path: Path) -> None:
    ended = run("pull", "team/model:v1", tmp_path / "out", "--json", store=shop.store)
    result = one_object(ended)
    assert set(result) == {
        "bytes",
        "data_bytes",
        "directory",
        "files",
        "integrity",
        "read_bytes",
        "resumed_bytes",
        "seconds",
        "snapshot",
        "warnings",
    }
    assert result["snapshot"] == shop.snapshot
    assert result["directory"] == str(tmp_path / "out")
    assert (result["files"], result["integrity"], result["resumed_bytes"]) == (4, "strong", 0)
    same_trees(shop.tree, tmp_path / "out")


def test_an_exact_snapshot_one_rank_and_fast_integrity(shop: Shop, tmp_path: Path) -> None:
    name = f"whatever@b3:{shop.snapshot}"
    arguments = ("pull", name, tmp_path / "out", "--rank", "0", "--integrity", "fast", "--sync")
    result = one_object(run(*arguments, "--json", store=shop.store))
    assert (result["files"], result["integrity"]) == (1, "fast")
    assert sorted(path.name for path in (tmp_path / "out").rglob("*")) == ["rank-0", "weights.bin"]
    assert result["bytes"] == 2 << 20


def test_ls_prints_one_object_a_line(tmp_path: Path) -> None:
    """Goal: names sorted, by prefix, each with what it points to; an empty store prints nothing."""
    store = tmp_path / "store"
    with snapstore.init_store(f"file://{store}") as opened:
        assert run("ls", "--json", store=store) == Ended(0, "", "")
        (tmp_path / "tree").mkdir()
        for name in ("b:v1", "a/x:v2", "a/x:v1"):
            opened.push(tmp_path / "tree", name, labels={"of": name})
    lines = objects(run("ls", "--json", store=store))
    assert [line["name"] for line in lines] == ["a/x:v1", "a/x:v2", "b:v1"]
    assert set(lines[0]) == {
        "created",
        "generation",
        "kind",
        "labels",
        "logical_bytes",
        "name",
        "ranks",
        "snapshot",
    }
    assert lines[2]["labels"] == {"of": "b:v1"}
    assert (lines[0]["ranks"], lines[0]["generation"], lines[0]["logical_bytes"]) == (1, 1, 0)
    only = objects(run("ls", "a/x:v2", "--json", store=store))
    assert [line["name"] for line in only] == ["a/x:v2"]


def test_show_tells_everything_with_ids_as_text(shop: Shop) -> None:
    """Goal: the whole summary, with ids in hexadecimal as everywhere else."""
    shown = one_object(run("show", "team/model:v1", "--json", store=shop.store))
    assert set(shown) == {
        "codecs",
        "created",
        "data_bytes",
        "id",
        "kind",
        "labels",
        "logical_bytes",
        "ranks",
        "requirements",
        "stored_bytes",
        "unique_bytes",
        "writer",
    }
    assert shown["id"] == shop.snapshot
    assert shown["labels"] == {"model": "test", "note": "a=b"}
    assert {rank["rank"]: rank["id"] for rank in shown["ranks"]} == {
        rank: rank_id.hex for rank, rank_id in shop.pushed.ranks.items()
    }
    host = shown["ranks"][0]
    assert set(host) == {
        "chunks",
        "data_bytes",
        "files",
        "frames",
        "id",
        "logical_bytes",
        "packs",
        "rank",
        "stored_bytes",
        "streams",
        "unique_bytes",
        "unique_chunks",
    }
    assert set(host["streams"][0]) == {
        "data_bytes",
        "data_class",
        "logical_bytes",
        "number",
        "origin",
        "segments",
    }
    assert set(shown["codecs"]) == {"planes", "raw", "zstd"}
    for codec in shown["codecs"].values():
        assert set(codec) == {"frames", "plain_bytes", "stored_bytes"}
    assert shown["writer"]["program"] == "snapstore"


@pytest.mark.parametrize(
    ("arguments", "code", "exit_code", "retryable"),
    [
        (("show", "team/model:v9"), "RefNotFound", 3, False),
        (("pull", "team/model:v1", "{tree}"), "TargetError", 1, False),
        (("push", "{tree}", "no good name"), "UsageError", 2, False),
    ],
)
def test_errors_are_one_object_too(
    shop: Shop,
    arguments: tuple[str, ...],
    code: str,
    exit_code: int,
    retryable: bool,  # noqa: FBT001
) -> None:
    given = [argument.format(tree=shop.tree) for argument in arguments]
    ended = run(*given, "--json", "--quiet", store=shop.store)
    assert ended.code == exit_code
    (found,) = objects(ended)
    assert set(found) == {"error"}
    error = found["error"]
    assert set(error) == {"code", "exit_code", "message", "next_step", "retryable"}
    assert (error["code"], error["exit_code"], error["retryable"]) == (code, exit_code, retryable)
    # People see the same on stderr.
    assert f"error: {error['message']}" in ended.err
    assert error["next_step"] in ended.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("push", "--json"), "Missing argument"),
        (("pull", "a", "--json"), "DIR"),
        (("ls", "--json", "--nonsense"), "--nonsense"),
        (("push", ".", "a", "--compression", "much", "--json"), "much"),
        (("push", "", "a", "--json"), "the path is empty"),
        (("no-such-command", "--json"), "no-such-command"),
        (("cache", "warm", "--json"), "NAME"),
        (("--json",), "--json"),
    ],
)
def test_wrong_usage_is_an_error_like_others(arguments: tuple[str, ...], said: str) -> None:
    """Goal: what the command line cannot mean has the same object and exit code as other errors."""
    ended = run(*arguments)
    assert ended.code == 2, ended.err
    (document,) = objects(ended)
    error = document["error"]
    assert set(error) == {"code", "exit_code", "message", "next_step", "retryable"}
    assert (error["code"], error["exit_code"], error["retryable"]) == ("UsageError", 2, False)
    assert said in error["message"]
    assert error["next_step"].startswith("see `snapstore")
    assert error["message"] in ended.err


def test_json_after_a_double_dash_is_no_option() -> None:
    ended = run("show", "--nonsense", "--", "--json")
    assert (ended.code, ended.out) == (2, "")
    assert "Usage:" in ended.err


def test_help_is_no_error() -> None:
    ended = run("push", "--json", "--help")
    assert ended.code == 0
    assert ended.out.startswith("Usage:")
