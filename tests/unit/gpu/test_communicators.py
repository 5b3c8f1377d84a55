"""Ranks of communicators are told by their threads and their environment."""

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapagent.preflight import Obstacle, Obstacles, check_communicators
from snapagent.workload import shared_gpu

RANK = """
import sys, threading
from pathlib import Path
def watch():
    number = threading.get_native_id()
    Path(f"/proc/self/task/{number}/comm").write_text(sys.argv[1])
    print("ready", flush=True)
    sys.stdin.read()
thread = threading.Thread(target=watch)
thread.start()
thread.join()
"""


@contextlib.contextmanager
def rank(thread: str = "pt_nccl_watchdg", **variables: str) -> Iterator[int]:
    """Run a process with a thread of this name."""
    with subprocess.Popen(  # noqa: S603 - this interpreter
        [sys.executable, "-c", RANK, thread],
        env={"PATH": "/usr/bin:/bin", **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process.pid
        finally:
            process.kill()


def obstacles(*pids: int, gpus: int = 8) -> list[Obstacle]:
    found = Obstacles()
    check_communicators(found, pids, gpus=gpus)
    return found.result()


def test_ranks_of_a_communicator_are_refused() -> None:
    with rank() as one, rank() as other, rank("python3") as third:
        (found,) = obstacles(one, third, other)
        assert found.code == "gpu-shared"
        assert found.blocking
        assert re.search(rf"processes {one} \(.*\), {other} \(.*\) are ranks", found.subject)
        assert "destroy_process_group" in found.remedy
        assert not obstacles(one, other, gpus=1), "a communicator has a GPU for each rank"
        assert not obstacles(one, third), "one rank has nobody to share with"
        assert not obstacles(one, 1 << 22), "a process that has ended"


@pytest.mark.parametrize(
    ("variables", "refusals"),
    [
        ({"NCCL_P2P_DISABLE": "1"}, 0),
        ({"NCCL_P2P_LEVEL": "LOC"}, 0),
        ({"NCCL_P2P_DISABLE": "0"}, 1),
        ({"NCCL_P2P_LEVEL": "NVL"}, 1),
    ],
    ids=str,
)
def test_peer_access_that_was_turned_off_is_none(variables: dict[str, str], refusals: int) -> None:
    with rank(**variables) as one, rank(**variables) as other:
        assert len(obstacles(one, other)) == refusals


def test_of_an_environment_without_an_end_only_the_beginning_is_read() -> None:
    """Method: it is as long as a program can be given; a process can say that it is endless."""
    long = {f"V{number}": "x" * (120 << 10) for number in range(10)}
    turned_off = {"NCCL_P2P_DISABLE": "1"}
    with rank(**turned_off, **long) as one, rank(**turned_off, **long) as other:
        assert not obstacles(one, other)
    with rank(**long, **turned_off) as one, rank(**long, **turned_off) as other:
        assert len(obstacles(one, other)) == 1


@pytest.mark.parametrize(
    ("version", "refusals"), [("580.159.04", 1), ("609.1", 1), ("610.43.02", 0), ("", 1)]
)
def test_later_drivers_restore_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, refusals: int
) -> None:
    (tmp_path / "version").write_text(f"{version}\n", encoding="ascii")
    monkeypatch.setattr(shared_gpu, "_VERSION", tmp_path / "version")
    assert shared_gpu.restores_opened() == (not refusals)
    with rank() as one, rank() as other:
        assert len(obstacles(one, other)) == refusals
