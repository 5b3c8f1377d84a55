"""Tests of work directories: each is its maker's own, and goes with it."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from snapagent.config import AgentConfig
from snapagent.errors import AgentError
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


@pytest.mark.skipif(os.geteuid() != 0, reason="other users need root")
def test_others_may_not_write_where_scripts_for_criu_lie(short_path: Path) -> None:
    config = AgentConfig(criu=short_path / "criu", run_directory=short_path)
    for mode, owner, allowed in [
        (0o711, 0, True),
        (0o1777, 0, True),
        (0o777, 0, False),
        (0o730, 0, False),
        (0o700, 65534, False),
    ]:
        short_path.chmod(mode)
        os.chown(short_path, owner, -1)
        refusal = pytest.raises(AgentError, match="other users may change")
        with contextlib.nullcontext() if allowed else refusal, work_directory(config, "restore"):
            pass


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
