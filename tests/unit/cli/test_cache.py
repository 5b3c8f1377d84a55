"""`snapstore cache`: what it prints, how it exits."""

import json
from pathlib import Path

import pytest

import snapstore
from snapstore.cache.node_cache import NodeCache
from snapstore.units import MIB
from tests.support.samples import random_bytes
from tests.unit.cli.conftest import Shop
from tests.unit.cli.program import one_object, run

pytestmark = pytest.mark.slow

NAME = "team/model:v1"


@pytest.fixture
def cache(tmp_path: Path, memory_directory: Path) -> Path:
    path = tmp_path / "cache"
    made = run(
        *("cache", "init", path, "--bytes", "64MiB", "--memory", memory_directory),
        *("--memory-bytes", "32MiB", "--json"),
    )
    assert made.code == 0, made.err
    document = one_object(made)
    with NodeCache(path) as opened:
        assert ("huge=within_size" in made.err) != opened.has_large_pages
    assert document["packs"]["budget_bytes"] == 64 * MIB
    assert document["decoded"]["directory"] == str(memory_directory)
    return path


def test_a_life(shop: Shop, cache: Path, tmp_path: Path) -> None:
    """Warm, pin, look, pull, unpin, evict; with the cache named by the environment as well."""
    here = {"SNAPSTORE_CACHE": str(cache)}
    warm = run("cache", "warm", NAME, "--json", store=shop.store, environment=here)
    assert warm.code == 0, warm.err
    document = one_object(warm)
    assert (document["tier"], document["missed_bytes"], document["files"]) == ("decoded", 0, 3)
    assert "warm" in warm.err
    packs = run(
        *("cache", "warm", NAME, "--tier", "packs", "--max-rate", "500MB/s", "--pin", "--quiet"),
        *("--cache", cache),
        store=shop.store,
    )
    assert packs.code == 0, packs.err
    assert "are in the cache (packs)" in packs.out
    listed = one_object(run("cache", "ls", "--json", environment=here))
    assert {entry["tier"] for entry in listed["entries"]} == {"packs", "decoded"}
    assert all(entry["pinned"] for entry in listed["entries"])
    assert listed["pins"] == [{"snapshot": shop.snapshot, "name": NAME}]
    table = run("cache", "ls", "--cache", cache)
    assert "rank-0/weights.bin" in table.out
    assert NAME in table.err
    stats = one_object(run("cache", "stats", "--json", environment=here))
    assert stats["pins"] == 1
    assert stats["decoded"]["pinned_bytes"] == stats["decoded"]["used_bytes"] > MIB
    pulled = run("pull", NAME, tmp_path / "out", "--cache", cache, store=shop.store)
    assert pulled.code == 0, pulled.err
    assert (tmp_path / "out" / "small").read_bytes() == b"small"
    assert one_object(run("cache", "evict", "--all", "--json", environment=here)) == {
        "freed_bytes": 0
    }
    assert run("cache", "unpin", NAME, environment=here).code == 0
    again = run("cache", "unpin", NAME, environment=here)
    assert again.code == 3
    assert "is not pinned" in again.err
    assert run("cache", "pin", NAME, store=shop.store, environment=here).code == 0
    assert run("cache", "unpin", shop.snapshot, environment=here).code == 0
    freed = run("cache", "evict", NAME, "--json", store=shop.store, environment=here)
    assert one_object(freed)["freed_bytes"] > MIB
    assert one_object(run("cache", "ls", "--json", environment=here))["entries"] == []
    assert run("cache", "evict", "--keep", "1GiB", environment=here).code == 0


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("cache", "ls"), 2, "no cache given"),
        (("cache", "evict", "--cache", "{cache}"), 2, "say what is to go"),
        (("cache", "evict", NAME, "--all", "--cache", "{cache}"), 2, "say what is to go"),
        (("cache", "init", "{cache}", "--memory", "/dev/shm/x"), 2, "go together"),  # noqa: S108
        (("cache", "init", "{cache}", "--bytes", "lots"), 2, "not a size"),
        (
            ("cache", "warm", NAME, "--cache", "{cache}", "--store", "{store}", "--max-rate", "0"),
            2,
            "0 bytes",
        ),
        (
            ("cache", "warm", NAME, "--cache", "{cache}", "--store", "{store}", "--rank", "7"),
            2,
            "no rank 7",
        ),
        (("cache", "warm", "no/such", "--cache", "{cache}", "--store", "{store}"), 3, "no/such"),
        (
            ("cache", "warm", NAME, "--cache", "{open}", "--store", "{store}"),
            7,
            "written by others",
        ),
        (("cache", "stats", "--cache", "{store}"), 2, "holds other things"),
    ],
)
def test_exit_codes(
    shop: Shop, cache: Path, tmp_path: Path, arguments: tuple[str, ...], code: int, words: str
) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    places = {"cache": cache, "store": shop.store, "open": tmp_path / "open"}
    ended = run(*(argument.format(**places) for argument in arguments))
    assert ended.code == code, ended.err
    assert words in ended.err
    assert "next:" in ended.err


@pytest.mark.parametrize(
    "arguments", [("stats",), ("ls",), ("evict", "--all"), ("unpin", NAME), ("pin", NAME)]
)
def test_who_only_looks_makes_no_cache(
    shop: Shop, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    """Goal: a path that was mistyped is an error, and not a directory from then on."""
    here = {
        "SNAPSTORE_CACHE": str(tmp_path / "typo" / "a"),
        "SNAPSTORE_URL": f"file://{shop.store}",
    }
    ended = run("cache", *arguments, environment=here)
    assert ended.code == 2, ended.err
    assert f"there is no directory at {tmp_path}/typo/a" in ended.err
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "typo" / "a").mkdir(0o700, parents=True)
    ended = run("cache", *arguments, environment=here)
    assert ended.code == 2, ended.err
    assert f"there is no cache at {tmp_path}/typo/a" in ended.err
    assert "snapstore cache init" in ended.err
    assert list((tmp_path / "typo" / "a").iterdir()) == []


def test_what_takes_its_own_room_is_8(tmp_path: Path) -> None:
    """Goal: a snapshot is only called warm if all of it is there in the end.

    Method: six packs, half of which fit into the cache, fetched one after the other.
    """
    url = f"file://{tmp_path / 'store'}"
    (tmp_path / "tree").mkdir()
    with snapstore.init_store(url) as store:
        for number in range(6):
            content = random_bytes(2 * MIB, number).tobytes()
            (tmp_path / "tree" / str(number)).write_bytes(content)
            store.push(tmp_path / "tree", NAME)
    cache = tmp_path / "cache"
    assert run("cache", "init", cache, "--bytes", "7MiB").code == 0
    ended = run(
        "cache", "warm", NAME, "--tier", "packs", "--threads", "1", "--cache", cache, store=url
    )
    assert ended.code == 8, ended.err
    assert "did not fit" in ended.err


def test_no_room_is_8(shop: Shop, tmp_path: Path) -> None:
    assert run("cache", "init", tmp_path / "cache", "--bytes", "100KiB").code == 0
    ended = run("cache", "warm", NAME, "--cache", tmp_path / "cache", "--json", store=shop.store)
    assert ended.code == 8
    assert json.loads(ended.out)["error"]["code"] == "OutOfSpace"
    assert "warning: " in ended.err
    assert "fit into the cache (packs): the rest is not fetched" in ended.err
    assert "did not fit" in ended.err
