"""The agent's side of the handshake, in directories that belong to somebody else."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapagent.errors import AgentError
from snapagent.handshake import DEFAULT_DIRECTORY, ControlDirectory, RestoreFailed
from snapagent.workload import handshake
from snapagent.workload.handshake import Handshake, Outcome
from tests.support.processes import open_fds
from tests.support.supervised import needs_root

WAIT_S_MAX = 10


@pytest.fixture
def control(tmp_path: Path) -> Iterator[ControlDirectory]:
    with ControlDirectory.open(str(tmp_path)) as directory:
        yield directory


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_both_sides(
    tmp_path: Path, control: ControlDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole round of a workload on one thread and its agent on another."""
    # Nobody freezes it here, so it has to look.
    monkeypatch.setattr(handshake, "LOOK_S", 0.01)
    workload = Handshake(str(tmp_path), "vllm")
    workload.begin()
    assert not control.is_ready()
    outcomes = []

    def work() -> None:
        workload.announce_ready()
        outcomes.append(workload.wait(WAIT_S_MAX))
        workload.announce_restored("Berlin")

    thread = threading.Thread(target=work)
    thread.start()
    control.wait_ready(WAIT_S_MAX)
    assert control.is_ready()
    control.clear_for_restore()
    assert names(tmp_path) == set()
    control.announce_restored()
    assert (tmp_path / "restore-complete").read_text() == "done\n"
    assert control.wait_serving("vllm", WAIT_S_MAX) == "Berlin\n"
    thread.join()
    assert outcomes == [Outcome.RESTORED]


def test_only_its_own_files_are_cleared(tmp_path: Path, control: ControlDirectory) -> None:
    kept = {"cuda-checkpoint-job", "Vllm-restore-ready", "restore-ready"}
    old = {"ready-for-snapshot", "restore-complete", "snapshot-complete", "a-restore-ready"}
    for name in kept | old | {"b-restore-error"}:
        (tmp_path / name).touch()
    control.clear_for_restore()
    assert names(tmp_path) == kept
    control.clear_for_restore()


def test_what_cannot_be_cleared_is_told(tmp_path: Path, control: ControlDirectory) -> None:
    (tmp_path / "restore-complete").mkdir()
    with pytest.raises(AgentError, match="cannot remove restore-complete in"):
        control.clear_for_restore()


def test_a_capture_is_told_to_those_who_go_on(tmp_path: Path, control: ControlDirectory) -> None:
    control.announce_captured()
    assert (tmp_path / "snapshot-complete").read_text() == "done\n"
    assert (tmp_path / "snapshot-complete").stat().st_mode & 0o777 == 0o644
    control.announce_captured()
    assert names(tmp_path) == {"snapshot-complete"}


def test_a_workload_that_cannot_serve_says_why(tmp_path: Path, control: ControlDirectory) -> None:
    (tmp_path / "vllm-restore-error").write_text("CUDA error: out of memory\n" + "x" * 100_000)
    with pytest.raises(RestoreFailed, match="was restored but cannot serve:\nCUDA error") as caught:
        control.wait_serving("vllm")
    assert len(str(caught.value)) < 70_000


def test_waits_end(control: ControlDirectory) -> None:
    with pytest.raises(AgentError, match=r"no ready-for-snapshot in .* within 0.01 s"):
        control.wait_ready(0.01)
    bell = os.eventfd(1)
    try:
        with pytest.raises(AgentError, match="was cancelled"):
            control.wait_serving("vllm", bell=bell)
    finally:
        os.close(bell)


def test_what_is_no_file_says_nothing(tmp_path: Path, control: ControlDirectory) -> None:
    os.mkfifo(tmp_path / "vllm-restore-ready")
    (tmp_path / "vllm-restore-error").symlink_to("/etc/passwd")
    with pytest.raises(AgentError, match="no vllm-restore-ready or vllm-restore-error"):
        control.wait_serving("vllm", 0.01)


def test_links_of_the_workload_lead_nowhere(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "restore-complete").symlink_to(victim)
    with ControlDirectory.open(str(shared)) as control:
        control.announce_restored()
    assert victim.read_text() == "untouched"
    assert (shared / "restore-complete").read_text() == "done\n"
    assert not (shared / "restore-complete").is_symlink()


def test_no_directory_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    before = open_fds()
    for path in (tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(AgentError, match="needs a volume there"):
            ControlDirectory.open(str(path))
    with pytest.raises(AgentError, match="of process 4194305"):
        ControlDirectory.of_process(4194305)
    assert open_fds() == before


# -- the directory of a process -------------------------------------------------------------------

SLEEPER = "import sys; print(flush=True); sys.stdin.read()"
IN_A_ROOT = f"import os; os.chroot({{root!r}}); os.chdir('/'); {SLEEPER}"


def process(code: str, environment: dict[str, str]) -> "subprocess.Popen[bytes]":
    started = subprocess.Popen(  # noqa: S603 - this interpreter
        [sys.executable, "-c", code],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert started.stdout is not None
    started.stdout.readline()
    return started


@pytest.mark.parametrize("variable", ["SNAPSHOT_CONTROL_DIR", "DYN_SNAPSHOT_CONTROL_DIR"])
def test_the_environment_of_a_process_says_where(tmp_path: Path, variable: str) -> None:
    environment = {variable: str(tmp_path), f"NO_{variable}": "/nowhere"}
    with process(SLEEPER, environment) as workload:
        with ControlDirectory.of_process(workload.pid) as control:
            control.announce_restored()
        workload.communicate()
    assert names(tmp_path) == {"restore-complete"}


@needs_root
def test_links_of_a_container_stay_in_the_container(tmp_path: Path) -> None:
    """Goal: what a container says is looked up in the container.

    Method: a process with another root, where the usual place is an absolute link; where it leads
    exists here as well.
    """
    outside = tmp_path / "trap"
    inside = tmp_path / "root"
    for directory in (outside, inside, inside / str(outside).lstrip("/")):
        directory.mkdir(parents=True)
    (inside / DEFAULT_DIRECTORY.lstrip("/")).symlink_to(outside)
    with process(IN_A_ROOT.format(root=str(inside)), {}) as workload:
        with ControlDirectory.of_process(workload.pid) as control:
            control.announce_restored()
        with pytest.raises(AgentError, match=f"/missing of process {workload.pid}: "):
            ControlDirectory.of_process(workload.pid, "/missing")
        workload.communicate()
    assert names(outside) == set()
    assert names(inside / str(outside).lstrip("/")) == {"restore-complete"}
