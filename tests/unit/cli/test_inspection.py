"""`diff`, `stats`, `tag` and `rm`: what programs and people get, and the exit codes."""

import shutil
from pathlib import Path

import pytest

import snapstore
from tests.support.samples import random_bytes
from tests.unit.cli.conftest import Shop
from tests.unit.cli.program import objects, one_object, run

pytestmark = pytest.mark.slow

DIFF_BYTES = {
    "gone_bytes",
    "logical_a_bytes",
    "logical_b_bytes",
    "new_bytes",
    "shared_bytes",
    "zero_a_bytes",
    "zero_b_bytes",
}
FREED = {"damaged", "metadata_bytes", "pack_bytes", "packs", "pushes", "stored_bytes"}
MOVED = {"created", "generation", "name", "snapshot"}


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store with two generations of one name, and another name; nobody changes it."""
    folder = tmp_path_factory.mktemp("pair")
    tree = folder / "tree"
    (tree / "rank-0").mkdir(parents=True)
    (tree / "rank-0" / "w.bin").write_bytes(random_bytes(400_000, 1).tobytes())
    (tree / "note").write_bytes(b"one")
    with snapstore.init_store(f"file://{folder / 'store'}") as store:
        store.push(tree, "team/model:v1")
        (tree / "note").write_bytes(random_bytes(5000, 2).tobytes())
        store.push(tree, "team/model:v1")
        # Snapshots of one tree and one second would be the same but for the label.
        store.push(tree, "other/model:v1", labels={"of": "other"})
    return folder / "store"


@pytest.fixture
def store(pristine: Path, tmp_path: Path) -> Path:
    """Return a copy of the store, to be changed."""
    return Path(shutil.copytree(pristine, tmp_path / "store"))


def snapshots(store: Path, name: str = "team/model:v1") -> list[str]:
    """What a name has pointed to, the newest first."""
    shown = one_object(run("tag", "history", name, "--json", store=store))
    return [one["snapshot"] for one in shown["generations"]]


def files_of(store: Path) -> list[Path]:
    return sorted(path for path in store.rglob("*") if path.is_file())


# -- diff -----------------------------------------------------------------------------------------


def test_diff_tells_all_at_once(pristine: Path) -> None:
    """Goal: ranks, classes and streams whatever the table shows, and what B costs and frees."""
    new, old = snapshots(pristine)
    found = one_object(run("diff", f"x@b3:{old}", "team/model:v1", "--json", store=pristine))
    assert set(found) == {
        "a",
        "added_bytes",
        "added_metadata_bytes",
        "b",
        "classes",
        "freed_without_b",
        "names_of_b",
        "new_unique_bytes",
        "ranks",
        "shared_unique_bytes",
        "stored_a_bytes",
        "stored_b_bytes",
        "streams",
        "total",
    }
    assert (found["a"], found["b"]) == (old, new)
    assert set(found["total"]) == DIFF_BYTES
    assert [rank["rank"] for rank in found["ranks"]] == ["host", 0]
    assert set(found["ranks"][0]) == DIFF_BYTES | {"rank"}
    assert [one["data_class"] for one in found["classes"]] == ["small", "tensors"]
    assert set(found["streams"][0]) == DIFF_BYTES | {"rank", "data_class", "origin"}
    assert (found["ranks"][0]["new_bytes"], found["ranks"][0]["gone_bytes"]) == (5000, 3)
    assert found["ranks"][1]["shared_bytes"] == 400_000
    assert found["added_bytes"] == 5000
    assert set(found["freed_without_b"]) == FREED
    # Another name has the same two rank manifests.
    assert found["freed_without_b"]["stored_bytes"] == 0
    assert found["names_of_b"] == ["team/model:v1"]


@pytest.mark.parametrize("by", ["rank", "class", "stream"])
def test_diff_for_people(pristine: Path, by: str) -> None:
    old = snapshots(pristine)[1]
    ended = run("diff", f"x@b3:{old}", "team/model:v1", "--by", by, store=pristine)
    assert (ended.code, ended.err) == (0, "")
    header, _, *rows = [line.split() for line in ended.out.splitlines() if line.strip()]
    assert header[0] == ("rank" if by == "stream" else by)
    columns = ["A", "A", "zeros", "B", "B", "zeros", "shared", "new", "gone"]
    assert [word for word in header if word in columns] == columns
    names = {"rank": ["host", "0"], "class": ["small", "tensors"], "stream": ["0", "host"]}
    assert [row[0] for row in rows[:3]] == [*names[by], "all"]
    assert "B adds to A   5 kB of data" in ended.out
    assert "names of B    team/model:v1" in ended.out


# -- stats ----------------------------------------------------------------------------------------


def test_stats_is_one_object(pristine: Path) -> None:
    found = one_object(run("stats", "--json", store=pristine))
    assert set(found) == {
        "damaged",
        "indexes",
        "layouts",
        "loose_bytes",
        "manifests",
        "namespaces",
        "packs",
        "pushes",
        "total",
        "unnamed_snapshots",
        "unused_packs",
    }
    assert [one["namespace"] for one in found["namespaces"]] == ["other", "team"]
    assert set(found["total"]) == {
        "data_bytes",
        "exclusive_bytes",
        "exclusive_stored_bytes",
        "logical_bytes",
        "names",
        "namespace",
        "shared_bytes",
        "snapshots",
        "stored_bytes",
        "unique_bytes",
    }
    assert found["total"]["unique_bytes"] == found["total"]["shared_bytes"] == 405_000
    assert found["unnamed_snapshots"] == 1
    assert set(found["packs"]) == {"bytes", "objects"}
    deeper = one_object(run("stats", "team/", "--depth", "2", "--json", store=pristine))
    assert [one["namespace"] for one in deeper["namespaces"]] == ["team/model"]


def test_stats_for_people(pristine: Path) -> None:
    ended = run("stats", store=pristine)
    assert (ended.code, ended.err) == (0, "")
    rows = [line.split() for line in ended.out.splitlines() if line.strip()]
    headings = "namespace names snapshots logical data unique shared own stored own stored"
    assert " ".join(rows[0]) == headings
    assert [row[0] for row in rows[2:5]] == ["other", "team", "all"]
    assert "that no name needs" in ended.out


def test_stats_goes_on_past_damage(store: Path) -> None:
    """Goal: a damaged manifest is a warning and a line of the result, and the rest is counted."""
    new, _ = snapshots(store)
    path = store / "snapshots" / new[:2] / new
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    ended = run("stats", "--json", "--quiet", store=store)
    found = one_object(ended)
    (told,) = found["damaged"]
    assert new[:12] in told
    assert f"warning: not counted: {told}" in ended.err
    by_name = {one["namespace"]: one["unique_bytes"] for one in found["namespaces"]}
    assert by_name == {"other": 405_000, "team": 0}


# -- tag ------------------------------------------------------------------------------------------


def test_tag_in_both_spellings(store: Path) -> None:
    """Goal: `tag NAME NEW` is `tag set NAME NEW`, wherever the options are."""
    new, old = snapshots(store)
    first = one_object(run("tag", "team/model:v1", "prod", "--json", store=store))
    assert set(first) == MOVED
    assert (first["name"], first["snapshot"], first["generation"]) == ("prod:latest", new, 1)
    arguments = ("--json", f"any@b3:{old}", "prod")
    assert one_object(run("tag", "set", *arguments, store=store))["generation"] == 2
    assert one_object(run("tag", *arguments, store=store))["generation"] == 2
    ended = run("tag", "team/model:v1", "prod", store=store)
    assert ended.out == f"prod:latest is snapshot {new[:12]} (generation 3)\n"
    listed = [line["name"] for line in objects(run("ls", "--json", store=store))]
    assert listed == ["other/model:v1", "prod:latest", "team/model:v1"]


def test_history_and_rollback(store: Path) -> None:
    new, old = snapshots(store)
    back = one_object(run("tag", "rollback", "team/model:v1", "--json", store=store))
    assert set(back) == MOVED
    assert (back["snapshot"], back["generation"]) == (old, 3)
    forth = run("tag", "rollback", "team/model:v1", "--to", "2", store=store)
    assert f"is snapshot {new[:12]} (generation 4)" in forth.out
    shown = one_object(run("tag", "history", "team/model:v1", "--json", store=store))
    assert shown["name"] == "team/model:v1"
    newest = shown["generations"][0]
    assert set(newest) == {"created", "generation", "holder", "present", "snapshot", "state"}
    assert [one["generation"] for one in shown["generations"]] == [4, 3, 2, 1]
    assert (newest["state"], newest["present"]) == ("snapshot", True)
    ended = run("tag", "history", "team/model:v1", store=store)
    header, _, row, *_ = [line.split() for line in ended.out.splitlines() if line.strip()]
    assert " ".join(header) == "generation created points to written by"
    assert row[0] == "4"
    assert row[2] == new[:12]


def test_tag_alone_is_help() -> None:
    ended = run("tag")
    assert "rollback" in ended.out + ended.err
    assert run("tag", "-h").code == 0


# -- rm -------------------------------------------------------------------------------------------


def test_rm_and_the_way_back(store: Path, tmp_path: Path) -> None:
    """Goal: a removed name is not found, with the way back in the message, which works."""
    new, _ = snapshots(store)
    before = files_of(store)
    arguments = ("rm", "team/model:v1", "other/model:v1", "--json")
    dry = one_object(run(*arguments, "--dry-run", store=store))
    assert files_of(store) == before
    done = one_object(run(*arguments, store=store))
    assert (dry.pop("dry_run"), done.pop("dry_run")) == (True, False)
    assert dry == done
    assert set(done) == {"freed", "removed"}
    assert set(done["freed"]) == FREED
    assert done["freed"]["stored_bytes"] == 405_000
    first = done["removed"][0]
    assert set(first) == {"generation", "name", "others", "snapshot"}
    assert (first["name"], first["snapshot"], first["generation"]) == ("team/model:v1", new, 3)
    assert run("ls", "--json", store=store).out == ""
    for command in (["show", "team/model:v1"], ["pull", "team/model:v1", tmp_path / "out"]):
        ended = run(*command, store=store)
        assert ended.code == 3
        assert "next: `snapstore tag rollback team/model:v1`" in ended.err
    assert run("tag", "rollback", "team/model:v1", store=store).code == 0
    assert run("pull", "team/model:v1", tmp_path / "out", "--quiet", store=store).code == 0


def test_rm_for_people(store: Path) -> None:
    run("tag", "team/model:v1", "prod", store=store)
    dry = run("rm", "team/model:v1", "--dry-run", store=store)
    assert "team/model:v1 would be removed: it was snapshot" in dry.out
    assert "kept by prod:latest\n" in dry.out
    assert "nothing, all of it is needed by others" in dry.out
    assert run("rm", "prod", "team/model:v1", store=store).code == 0


# -- exit codes -----------------------------------------------------------------------------------

WRONG = [
    pytest.param(2, ["diff", "team/model:v1"], "Missing argument", id="one side"),
    pytest.param(2, ["diff", "a", "b", "--by", "file"], "file", id="by what"),
    pytest.param(3, ["diff", "team/model:v1", "nope"], "nope", id="diff of nothing"),
    pytest.param(2, ["stats", "--depth", "0"], "0 components", id="no depth"),
    pytest.param(2, ["stats", "--memory", "1"], "too small", id="little memory"),
    pytest.param(2, ["tag", "team/model:v1"], "Missing argument", id="tag to what"),
    pytest.param(2, ["tag", "team/model:v1", "a//b"], "not a snapshot name", id="bad name"),
    pytest.param(2, ["tag", "a", "b@b3:" + "0" * 64], "exact snapshot", id="tag an id"),
    pytest.param(3, ["tag", "nope", "b"], "nope", id="tag nothing"),
    pytest.param(3, ["tag", "history", "nope"], "nothing was ever named", id="no history"),
    pytest.param(3, ["tag", "rollback", "nope"], "nothing was ever named", id="no way back"),
    pytest.param(3, ["tag", "rollback", "team/model:v1", "--to", "9"], "no generation", id="9"),
    pytest.param(3, ["tag", "rollback", "other/model:v1"], "another snapshot", id="only one"),
    pytest.param(2, ["rm"], "Missing argument", id="rm nothing"),
    pytest.param(3, ["rm", "other/model:v1", "nope"], "nope", id="rm of nothing"),
    pytest.param(3, ["rm", "nope", "--dry-run"], "nope", id="dry rm of nothing"),
    pytest.param(2, ["rm", "a@b3:" + "0" * 64], "one exact snapshot", id="rm an id"),
]


@pytest.mark.parametrize(("code", "arguments", "message"), WRONG)
def test_what_cannot_be_done(pristine: Path, code: int, arguments: list[str], message: str) -> None:
    before = files_of(pristine)
    ended = run(*arguments, store=pristine)
    assert (ended.code, ended.out) == (code, "")
    assert message in ended.err
    assert files_of(pristine) == before


def test_what_was_pruned_is_4(store: Path) -> None:
    _, old = snapshots(store)
    (store / "snapshots" / old[:2] / old).unlink()
    ended = run("tag", "rollback", "team/model:v1", "--json", store=store)
    assert ended.code == 4
    assert objects(ended)[0]["error"]["code"] == "DanglingRef"
    assert "generation 1 of team/model:v1 points to" in ended.err
    shown = run("tag", "history", "team/model:v1", store=store)
    assert f"{old[:12]} (gone)" in shown.out


def test_a_store_that_is_not_there_is_3(shop: Shop, tmp_path: Path) -> None:
    assert shop.store.exists()
    for arguments in (["diff", "a", "b"], ["stats"], ["tag", "a", "b"], ["rm", "a"]):
        assert run(*arguments, store=tmp_path / "nowhere").code == 3
