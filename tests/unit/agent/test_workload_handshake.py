"""The workload's side of the handshake: stages, files, lives, and waits that end."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapagent.linux.standstill import Life, Sleeper, Woken, present_life
from snapagent.workload import handshake as module
from snapagent.workload.handshake import (
    Handshake,
    HandshakeCancelled,
    HandshakeError,
    HandshakeTimeout,
    Outcome,
)
from tests.support.processes import open_files
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[3]
WAIT_S_MAX = 10


@pytest.fixture
def ready(tmp_path: Path) -> Handshake:
    """A handshake of a workload that may be captured."""
    handshake = Handshake(str(tmp_path), "vllm")
    handshake.begin()
    handshake.announce_ready()
    return handshake


@pytest.fixture
def next_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this be another life as soon as somebody looks."""
    first = present_life()
    lives = iter([first])
    monkeypatch.setattr(
        module, "present_life", lambda: next(lives, Life("another machine", "pid:[1]", "1"))
    )


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def done(directory: Path, name: str) -> None:
    temporary = directory / ".agent.tmp"
    temporary.write_text("done\n")
    temporary.rename(directory / name)


# -- stages and files -----------------------------------------------------------------------------


@pytest.mark.usefixtures("next_life")
def test_one_round(tmp_path: Path) -> None:
    handshake = Handshake(str(tmp_path), "vllm")
    handshake.begin()
    assert names(tmp_path) == set()
    handshake.announce_ready()
    assert (tmp_path / "ready-for-snapshot").read_text() == "ready\n"
    done(tmp_path, "restore-complete")
    assert handshake.wait() is Outcome.RESTORED
    handshake.announce_restored("Berlin")
    assert (tmp_path / "vllm-restore-ready").read_text() == "Berlin\n"
    handshake.announce_failure("x" * 100_000 + "the end\n")
    assert (tmp_path / "vllm-restore-error").read_text().endswith("xthe end\n")
    assert (tmp_path / "vllm-restore-error").stat().st_size == module.TEXT_BYTES_MAX
    handshake.begin()
    assert names(tmp_path) == set()


def test_what_is_left_from_earlier_is_taken_away(tmp_path: Path) -> None:
    kept = {"cuda-checkpoint-job", "sglang-restore-ready"}
    old = {"ready-for-snapshot", "snapshot-complete", "restore-complete", "vllm-restore-ready"}
    for name in kept | old:
        (tmp_path / name).touch()
    Handshake(str(tmp_path), "vllm").begin()
    assert names(tmp_path) == kept


def test_a_directory_that_is_not_there_matters_when_it_is_written(tmp_path: Path) -> None:
    handshake = Handshake(str(tmp_path / "missing"), "vllm")
    handshake.begin()
    with pytest.raises(HandshakeError, match=r"missing: No such file.*SNAPSHOT_CONTROL_DIR"):
        handshake.announce_ready()


def test_what_cannot_be_removed_is_told(tmp_path: Path) -> None:
    (tmp_path / "restore-complete").mkdir()
    with pytest.raises(HandshakeError, match=r"cannot remove .*/restore-complete: Is a directory"):
        Handshake(str(tmp_path), "vllm").begin()


def test_a_trap_in_place_of_the_temporary_file_is_not_followed(
    tmp_path: Path, ready: Handshake
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    (tmp_path / f".vllm-restore-ready.{os.getpid()}.tmp").symlink_to(victim)
    done(tmp_path, "restore-complete")
    ready.wait()
    with pytest.raises(HandshakeError, match="symbolic links"):
        ready.announce_restored()
    assert victim.read_text() == "untouched"


def test_stages_come_in_their_order(tmp_path: Path) -> None:
    handshake = Handshake(str(tmp_path), "vllm")
    for early in (handshake.announce_ready, handshake.wait, handshake.announce_restored):
        with pytest.raises(HandshakeError, match="is new, not"):
            early()
    handshake.begin()
    for wrong in (handshake.begin, handshake.wait, handshake.withdraw, handshake.announce_restored):
        with pytest.raises(HandshakeError, match="is begun, not"):
            wrong()
    handshake.announce_ready()
    for late in (handshake.begin, handshake.announce_ready, handshake.announce_restored):
        with pytest.raises(HandshakeError, match="is ready, not"):
            late()
    handshake.withdraw()
    assert names(tmp_path) == set()
    with pytest.raises(HandshakeError, match="nothing was restored"):
        handshake.announce_restored()


@pytest.mark.parametrize("name", ["", "vLLM", "../etc", "a/b", "-x", "x" * 33, "x\n"])
def test_frameworks_have_plain_names(name: str) -> None:
    with pytest.raises(HandshakeError, match="is no name for a framework"):
        Handshake("/control", name)


# -- the environment ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "directory", "standby"),
    [
        ({"SNAPSHOT_CONTROL_DIR": "/a"}, "/a", False),
        ({"DYN_SNAPSHOT_CONTROL_DIR": "/b"}, "/b", False),
        ({"SNAPSHOT_CONTROL_DIR": "/a", "DYN_SNAPSHOT_CONTROL_DIR": "/b"}, "/a", False),
        ({"SNAPSHOT_CONTROL_DIR": "", "DYN_SNAPSHOT_CONTROL_DIR": "/b"}, "/b", False),
        ({"SNAPSHOT_CONTROL_DIR": "/a", "SNAPSHOT_RESTORE_STANDBY": "1"}, "/a", True),
        ({"SNAPSHOT_CONTROL_DIR": "/a", "DYN_SNAPSHOT_RESTORE_STANDBY": "1"}, "/a", True),
        ({"SNAPSHOT_CONTROL_DIR": "/a", "SNAPSHOT_RESTORE_STANDBY": "0"}, "/a", False),
    ],
)
def test_the_environment_says_where(
    environment: dict[str, str], directory: str, *, standby: bool
) -> None:
    handshake = Handshake.from_environment("vllm", environment)
    assert handshake is not None
    assert (handshake.directory, handshake.standby) == (directory, standby)


def test_without_a_directory_there_is_no_handshake(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in module.DIRECTORY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert Handshake.from_environment("vllm") is None
    assert Handshake.from_environment("vllm", {"SNAPSHOT_RESTORE_STANDBY": "1"}) is None
    monkeypatch.setenv("SNAPSHOT_CONTROL_DIR", "/control")
    assert Handshake.from_environment("vllm") is not None


# -- waiting --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("next_life")
def test_a_later_life_waits_for_its_agent(tmp_path: Path) -> None:
    """The directory of this life is another one, and comes late."""
    handshake = Handshake(str(tmp_path / "control"), "vllm")
    handshake.begin()
    (tmp_path / "control").mkdir()
    handshake.announce_ready()
    (tmp_path / "control").rename(tmp_path / "of-the-first-life")
    done(tmp_path / "of-the-first-life", "restore-complete")
    with pytest.raises(HandshakeTimeout, match="was restored, but no agent wrote"):
        handshake.wait(0.01)
    agent = threading.Thread(target=lambda: done(made(tmp_path / "control"), "restore-complete"))
    agent.start()
    assert handshake.wait(WAIT_S_MAX) is Outcome.RESTORED
    agent.join()


def made(directory: Path) -> Path:
    directory.mkdir()
    return directory


@pytest.mark.usefixtures("next_life")
def test_a_later_life_does_not_take_the_word_of_an_older_agent(ready: Handshake) -> None:
    """`snapshot-complete` is for the first life, and may have been left."""
    done(Path(ready.directory), "snapshot-complete")
    with pytest.raises(HandshakeTimeout):
        ready.wait(0.01)


def test_the_first_life_hears_of_its_capture(ready: Handshake) -> None:
    done(Path(ready.directory), "snapshot-complete")
    assert ready.wait() is Outcome.CAPTURED


def test_a_file_is_seen_without_being_frozen(
    ready: Handshake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    agent = threading.Thread(target=done, args=(Path(ready.directory), "snapshot-complete"))
    agent.start()
    assert ready.wait(WAIT_S_MAX) is Outcome.CAPTURED
    agent.join()


def test_a_first_life_that_nobody_captures(ready: Handshake) -> None:
    with pytest.raises(HandshakeTimeout, match="no agent has captured this process within"):
        ready.wait(0.01)
    # It may wait again.
    done(Path(ready.directory), "restore-complete")
    assert ready.wait(0.01) is Outcome.RESTORED


@pytest.mark.usefixtures("next_life")
def test_no_more_watches_are_told(ready: Handshake, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object) -> int:
        raise OSError(28, "No space left on device", "/")

    monkeypatch.setattr("snapagent.linux.inotify.Inotify.add", refuse)
    with pytest.raises(HandshakeError, match=r"raise fs\.inotify\.max_user_watches"):
        ready.wait()


# -- cancelling -----------------------------------------------------------------------------------


@pytest.fixture(params=["first life", "later life"])
def in_each_life(request: pytest.FixtureRequest) -> None:
    if request.param == "later life":
        request.getfixturevalue("next_life")


@pytest.mark.usefixtures("in_each_life")
def test_a_wait_is_cancelled(tmp_path: Path) -> None:
    handshake = Handshake(str(tmp_path), "vllm")
    handshake.begin()
    handshake.announce_ready()
    problems: list[Exception] = []

    def wait() -> None:
        try:
            handshake.wait()
        except HandshakeError as error:
            problems.append(error)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    handshake.cancel()
    for thread in threads:
        thread.join(WAIT_S_MAX)
    assert [type(problem) for problem in problems] == [HandshakeCancelled] * 3
    with pytest.raises(HandshakeCancelled):
        handshake.wait()


@pytest.mark.usefixtures("in_each_life")
def test_a_task_that_waits_is_cancelled_and_may_wait_again(tmp_path: Path) -> None:
    handshake = Handshake(str(tmp_path), "vllm")
    handshake.begin()
    handshake.announce_ready()

    async def cancelled_then_restored() -> Outcome:
        task = asyncio.create_task(handshake.wait_async())
        await asyncio.sleep(0)
        assert handshake._sleepers
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not handshake._sleepers
        done(tmp_path, "restore-complete")
        return await handshake.wait_async()

    threads = threading.active_count()
    assert asyncio.run(cancelled_then_restored()) is Outcome.RESTORED
    assert threading.active_count() == threads


def test_a_handler_of_signals_may_cancel(ready: Handshake) -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: ready.cancel())
    timer = threading.Timer(0, os.kill, (os.getpid(), signal.SIGUSR1))
    try:
        timer.start()
        with pytest.raises(HandshakeCancelled):
            ready.wait(WAIT_S_MAX)
        with ready._lock:
            signal.raise_signal(signal.SIGUSR1)
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)


def test_standing_by_ends_when_cancelled(tmp_path: Path) -> None:
    handshake = Handshake(str(tmp_path), "vllm", standby=True)
    done(tmp_path, "restore-complete")
    canceller = threading.Thread(target=handshake.cancel)
    canceller.start()
    with pytest.raises(HandshakeCancelled):
        handshake.stand_by()
    canceller.join()
    with pytest.raises(HandshakeCancelled):
        asyncio.run(handshake.stand_by_async())
    # It leaves all files to the one that will be restored.
    assert names(tmp_path) == {"restore-complete"}


# -- being frozen ---------------------------------------------------------------------------------


def test_a_signal_ends_a_sleep() -> None:
    sleeper = Sleeper()
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        thread = threading.get_ident()
        timer = threading.Timer(0, signal.pthread_kill, (thread, signal.SIGUSR1))
        timer.start()
        # It may come before the sleep begins; then it is the time that ends it.
        assert sleeper.sleep(0.05) in {Woken.STOPPED, Woken.TIME}
        timer.join()
        assert sleeper.sleep(0) is Woken.TIME
        sleeper.wake()
        assert sleeper.sleep(WAIT_S_MAX) is Woken.CALLED
    finally:
        signal.signal(signal.SIGUSR1, before)
        sleeper.close()


FIRST_LIFE = """
import sys
from snapagent.workload import handshake as module

module.LOOK_S = 3600
handshake = module.Handshake(sys.argv[1], "vllm")
handshake.begin()
handshake.announce_ready()
print(handshake.wait(), flush=True)
"""


@pytest.fixture
def first_life(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """A workload that sleeps, and looks only when it was frozen."""
    with subprocess.Popen(  # noqa: S603 - this interpreter
        [sys.executable, "-c", FIRST_LIFE, str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            wait_until((tmp_path / "ready-for-snapshot").exists, "the workload is ready")
            wait_until(lambda: sleeps(process.pid), "the workload sleeps")
            yield process
        finally:
            process.kill()


def sleeps(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


@pytest.mark.slow
def test_being_frozen_wakes_it(first_life: "subprocess.Popen[str]", tmp_path: Path) -> None:
    """Goal: a frozen process looks at once, and holds nothing of inotify before.

    Method: one that otherwise looks once an hour; write its file, stop it and let it go on.
    """
    links = open_files(first_life.pid)
    assert not [link for link in links if "inotify" in link]
    assert not [link for link in links if str(tmp_path) in link]
    done(tmp_path, "snapshot-complete")
    first_life.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, first_life.pid, os.WSTOPPED | os.WNOWAIT)
    first_life.send_signal(signal.SIGCONT)
    assert first_life.communicate(timeout=WAIT_S_MAX)[0] == "Outcome.CAPTURED\n"


def test_a_life_is_that_of_a_process() -> None:
    assert present_life() == present_life()
    code = "from snapagent.linux.standstill import present_life; print(*present_life())"
    other = subprocess.run(  # noqa: S603 - this interpreter
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    life = present_life()
    assert other[:2] == [life.machine, life.namespace]
    assert int(other[2]) > int(life.start)


def test_it_needs_the_standard_library_only() -> None:
    """Every worker can afford it: nothing of the library, nothing that must be installed."""
    code = """
import sys
import snapagent.workload.handshake, snapagent.workload.procedure, snapagent.workload.engines
print(*sorted(name for name in sys.modules
    if name.partition(".")[0] not in sys.stdlib_module_names | {"__main__"}
    and "distutils" not in name and not name.startswith("__editable__")))
"""
    loaded = subprocess.run(  # noqa: S603 - this interpreter
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    assert loaded == [
        "snapagent",
        "snapagent.linux",
        "snapagent.linux.inotify",
        "snapagent.linux.standstill",
        "snapagent.workload",
        "snapagent.workload.engines",
        "snapagent.workload.handshake",
        "snapagent.workload.procedure",
        "snapagent.workload.threads",
        "snapagent.workload.watch",
    ]
