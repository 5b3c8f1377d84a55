"""Tests of work directories: each is its maker's own, and goes with it."""

import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from snapagent.config import AgentConfig
from snapagent.workdir import remove_abandoned, work_directory

WORKERS = 8
ROUNDS = 20


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory whose path leaves room for that of a socket, also in a worker of xdist."""
    with tempfile.TemporaryDirectory(prefix="work-") as folder:
        yield Path(folder)


def test_makers_at_once_do_not_take_each_others_for_abandoned(short_path: Path) -> None:
    config = AgentConfig(criu=short_path / "criu", run_directory=short_path / "run")

    def work(_: int) -> None:
        for _ in range(ROUNDS):
            with work_directory(config, "restore") as work:
                (work.path / "file").touch()

    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(work, range(WORKERS)))
    assert list((short_path / "run").iterdir()) == []


def test_abandoned_ones_are_removed(short_path: Path) -> None:
    config = AgentConfig(criu=short_path / "criu", run_directory=short_path / "run")
    (short_path / "run" / "restore-0a0b0c0d").mkdir(parents=True)
    with (
        work_directory(config, "restore") as one,
        work_directory(config, "capture", only_of=7) as other,
    ):
        assert set((short_path / "run").iterdir()) == {one.path, other.path}


def test_what_others_keep_in_the_run_directory_is_left_alone(short_path: Path) -> None:
    """A run directory that was chosen badly, such as /tmp, loses nothing by that."""
    config = AgentConfig(criu=short_path / "criu", run_directory=short_path)
    kept = [short_path / name for name in ("home", "restore-mine", "capture-", "restore-0a0b0c0d1")]
    for folder in kept:
        folder.mkdir()
        (folder / "file").touch()
    (short_path / "capture-4711").mkdir()
    with work_directory(config, "restore"):
        pass
    assert remove_abandoned(config) == ([], [])
    assert sorted(short_path.iterdir()) == sorted(kept)
    assert all((folder / "file").exists() for folder in kept)
