"""Many processes share a node's cache, some are killed while they fill it, and the disk is full."""

import contextlib
import dataclasses
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import snapstore
from snapstore.clock import SystemClock
from snapstore.units import GIB, MIB
from tests.support.damage import REPOSITORY
from tests.support.samples import bf16, random_bytes, text
from tests.support.waiting import wait_until
from tools.seaweed import S3Server, environment

pytestmark = pytest.mark.slow

NAME = "team/model:v1"
PROCESSES = 10
READER = Path(__file__).parents[1] / "support" / "programs" / "cache_reader.py"


@dataclasses.dataclass(frozen=True)
class Place:
    """A store with a snapshot, and where the cache of this node is to be."""

    url: str
    folder: Path
    memory: Path

    def make_cache(self, *, packs: bool = True, decoded: bool = True) -> Path:
        path = self.folder / f"cache-{packs}-{decoded}"
        snapstore.NodeCache.init(
            path,
            budget_bytes=GIB if packs else 0,
            memory=self.memory if decoded else None,
            memory_budget_bytes=GIB if decoded else 0,
        ).close()
        return path


def make_tree(root: Path) -> Path:
    (root / "rank-0").mkdir(parents=True)
    (root / "rank-1").mkdir()
    half = random_bytes(9 * MIB, 1).tobytes()
    (root / "rank-0" / "mixed.bin").write_bytes(half + bytes(5 * MIB) + text(6 * MIB, 2).tobytes())
    (root / "rank-1" / "weights.bin").write_bytes(bf16(8 * MIB, 3).tobytes())
    (root / "rank-1" / "same.bin").write_bytes(half)
    (root / "small").write_bytes(b"small")
    return root


@pytest.fixture
def place(work_dir: Path, memory_directory: Path) -> Place:
    tree = make_tree(work_dir / "tree")
    with snapstore.init_store(str(work_dir / "store")) as store:
        store.push(tree, NAME)
    return Place(str(work_dir / "store"), work_dir, memory_directory)


@contextlib.contextmanager
def reader(
    how: str, place: Place, cache: Path, *hold: Path | str
) -> Iterator[subprocess.Popen[str]]:
    """Start a reader, which waits for its line."""
    command = [sys.executable, str(READER), how, place.url, str(cache), NAME, *map(str, hold)]
    with subprocess.Popen(  # noqa: S603
        command,
        cwd=REPOSITORY,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY), **environment()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def begin(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def result_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    return results_of(process)[-1]


def results_of(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    out = process.communicate(timeout=100)[0]
    assert process.returncode == 0
    return [json.loads(line) for line in out.splitlines() if line != "ready"]


def read_at_once(how: str, place: Place, cache: Path, count: int) -> list[dict[str, Any]]:
    """Let so many processes read everything, all from the same moment on."""
    with reader(how, place, cache, "--processes", str(count)) as process:
        begin(process)
        results = results_of(process)
    assert len(results) == count
    return results


def fetch_together(how: str, place: Place, **tiers: bool) -> None:
    """Ten processes fetch hardly more than one, and get what it gets."""
    (one,) = read_at_once(how, place, place.make_cache(packs=False, decoded=False), 1)
    cache = place.make_cache(**tiers)
    many = read_at_once(how, place, cache, PROCESSES)
    assert {each["digest"] for each in many} == {one["digest"]}
    # Each reads the root manifest, which is small, for itself.
    assert sum(each["fetched"] for each in many) <= 1.05 * one["fetched"]
    (after,) = read_at_once(how, place, cache, 1)
    assert after["digest"] == one["digest"]
    assert after["fetched"] <= 0.01 * one["fetched"]


@pytest.mark.parametrize(
    ("how", "packs", "decoded"),
    [("pull", True, False), ("files", True, False), ("files", True, True), ("pull", True, True)],
)
def test_ten_processes_fetch_once(place: Place, how: str, *, packs: bool, decoded: bool) -> None:
    """Proves: N4."""
    fetch_together(how, place, packs=packs, decoded=decoded)


@pytest.mark.s3
@pytest.mark.parametrize("how", ["pull", "files"])
def test_ten_processes_fetch_once_from_s3(
    s3: S3Server, s3_bucket: str, work_dir: Path, memory_directory: Path, how: str
) -> None:
    """Proves: N4."""
    url = s3.url(s3_bucket)
    with snapstore.init_store(url) as store:
        store.push(make_tree(work_dir / "tree"), NAME)
    fetch_together(how, Place(url, work_dir, memory_directory), packs=True, decoded=True)


@pytest.mark.parametrize("decoded", [False, True])
def test_a_process_is_killed_while_it_fetches(place: Place, *, decoded: bool) -> None:
    """Its claim ends with it: the next one does not wait, and fetches what it lacks. Proves: N4.

    Method: a reader stops for ever in its third read of a pack, which is claimed; another one,
    which waits for that, goes on once the first is killed.
    """
    cache = place.make_cache(decoded=decoded)
    held = place.folder / "held"
    clock = SystemClock()
    with reader("files", place, cache, held) as doomed, reader("files", place, cache) as next_one:
        begin(doomed)
        wait_until(held.exists, "the held read")
        begin(next_one)
        doomed.send_signal(signal.SIGKILL)
        killed_s = clock.monotonic_s()
        assert doomed.wait() == -signal.SIGKILL
        result = result_of(next_one)
        assert clock.monotonic_s() - killed_s < 30
    assert result["digest"] == result_of_files(place)


def result_of_files(place: Place) -> str:
    (one,) = read_at_once("files", place, place.make_cache(packs=False, decoded=False), 1)
    digest: str = one["digest"]
    return digest


def test_kills_at_any_time(place: Place) -> None:
    """Whatever is killed when, the next process finds a cache that it can use. Proves: N2, N4.

    Method: warming both parts is killed when a little more is there than the last time, again and
    again; at the end everything is read and right, and nothing is fetched twice after that.
    """
    cache = place.make_cache()
    expected = result_of_files(place)
    command = [sys.executable, "-m", "snapstore", "cache", "warm", NAME, "--store", place.url]
    command += ["--cache", str(cache), "--max-rate", "40MB", "--quiet"]
    folders = (cache / "packs", place.memory)
    kills = 0
    for share in range(1, 12):
        wanted = share * 4 * MIB
        with subprocess.Popen(command, cwd=REPOSITORY) as process:  # noqa: S603
            while process.poll() is None and taken(folders) < wanted:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.002)
            process.kill()
            kills += process.wait() == -signal.SIGKILL
    assert kills >= 5
    (after,) = read_at_once("files", place, cache, 1)
    assert after["digest"] == expected
    (again,) = read_at_once("files", place, cache, 1)
    assert again["digest"] == expected
    assert again["fetched"] < MIB
    # What was counted for those who were killed is not lost.
    with snapstore.NodeCache(cache) as opened:
        opened.evict()
        stats = opened.stats()
        assert stats.packs.used_bytes == stats.decoded.used_bytes == 0


def taken(folders: tuple[Path, ...]) -> int:
    total = 0
    for folder in folders:
        for path in folder.glob("*"):
            with contextlib.suppress(FileNotFoundError):
                total += path.stat().st_blocks * 512
    return total
