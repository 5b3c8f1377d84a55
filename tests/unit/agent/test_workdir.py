"""Tests of work directories: each is its maker's own, and goes with it."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from snapagent.config import AgentConfig
from snapagent.workdir import work_directory

WORKERS = 8
ROUNDS = 20


def test_makers_at_once_do_not_take_each_others_for_abandoned(tmp_path: Path) -> None:
    config = AgentConfig(criu=tmp_path / "criu", run_directory=tmp_path / "run")

    def work(_: int) -> None:
        for _ in range(ROUNDS):
            with work_directory(config, "restore") as work:
                (work.path / "file").touch()

    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(work, range(WORKERS)))
    assert list((tmp_path / "run").iterdir()) == []


def test_abandoned_ones_are_removed(tmp_path: Path) -> None:
    config = AgentConfig(criu=tmp_path / "criu", run_directory=tmp_path / "run")
    (tmp_path / "run" / "restore-0a0b0c0d").mkdir(parents=True)
    with (
        work_directory(config, "restore") as one,
        work_directory(config, "capture") as other,
    ):
        assert set((tmp_path / "run").iterdir()) == {one.path, other.path}
