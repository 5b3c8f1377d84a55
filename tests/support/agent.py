"""The `snapagent` program as its users run it, and a look at what must not be left behind."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import snapstore
from snapagent.config import RUN_VARIABLE, STATE_VARIABLE, AgentConfig
from tests.support.network_locks import network_locks
from tests.support.processes import await_free_ids, processes_in
from tests.support.tree import CONTROL
from tests.support.waiting import wait_until
from tools import seaweed
from tools.live_process import Criu

ROOT = Path(__file__).parents[2]
FRESH = ("--pids", "fresh", "--network", "fresh")
PROGRAM = ("-m", "snapagent")
IMPATIENT = """
import random
from snapagent.cli.main import run
from snapstore.backend.retry import RetryingBackend
from snapstore.repository import store
store._patient = lambda backend, clock, options: RetryingBackend(
    backend, rng=random.Random(), clock=clock
)
run()
"""
AGENT_S_MAX = 120
QUIET_S_MAX = 30

Document = dict[str, Any]


@dataclass(frozen=True)
class Agent:
    """How to run the program: which store, and which folders of its own."""

    url: str
    folder: Path
    """On a short path, for the sockets in it."""
    impatient: bool = False
    """Give a store up after seconds, not minutes."""

    @property
    def run_directory(self) -> Path:
        """Where its sockets and logs are while it works."""
        return self.folder / "run"

    @property
    def config(self) -> AgentConfig:
        """The same for Python."""
        found = AgentConfig.from_environment()
        return replace(
            found, run_directory=self.run_directory, state_directory=self.folder / "state"
        )

    def at(self, url: str) -> "Agent":
        """The same program with another way to its store."""
        return replace(self, url=url)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start it; whoever does waits for it."""
        return self._start([*arguments, "--json", "--store", self.url])

    def history(self, *, count: int) -> list[Document]:
        """Return the newest entries of its record, the newest first."""
        output, errors = _finish(self._start(["history", "--count", str(count), "--json"]))
        assert not errors
        return [json.loads(line) for line in output.splitlines()]

    def _start(self, arguments: list[str]) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # noqa: TID251 - handed on
        environment[RUN_VARIABLE] = str(self.run_directory)
        environment[STATE_VARIABLE] = str(self.folder / "state")
        return subprocess.Popen(  # noqa: S603 - this interpreter
            [sys.executable, *(("-c", IMPATIENT) if self.impatient else PROGRAM), *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def preflight(self, pid: str, *options: str) -> Document:
        """Return what stands in the way of a capture, whatever that is."""
        output, _ = _finish(self._start(["preflight", "--pid", pid, *options, "--json"]))
        document: Document = json.loads(output)
        return document

    def run(self, *arguments: str) -> Document:
        """Run it to its success and return what it says."""
        return succeeded(self.start(*arguments))

    def fails(self, *arguments: str, code: int) -> Document:
        """Run it to its failure and return the error it tells."""
        return failed(self.start(*arguments), code=code)

    def capture_and_stop(self, name: str, pid: int, pids: list[int]) -> Document:
        """Capture a tree to its end; its ids are free afterwards."""
        document = self.run("capture", name, "--pid", str(pid), "--stop")
        assert document["stopped"]
        await_free_ids(pids)
        return document

    def processes(self) -> list[int]:
        """Return the living processes that were started by it, other than what it restored.

        They are told by their environment, which all but restored processes have from it.
        """
        mark = os.fsencode(f"{RUN_VARIABLE}={self.run_directory}")
        found = []
        for path in Path("/proc").iterdir():
            if path.name.isdecimal():
                # A dead process that nobody has reaped has an empty environment.
                with contextlib.suppress(OSError):
                    if mark in (path / "environ").read_bytes().split(b"\0"):
                        found.append(int(path.name))
        return found

    def processes_named(self, name: str) -> list[int]:
        """Return those of its processes that have this name."""
        found = []
        for pid in self.processes():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip() == name:
                    found.append(pid)
        return found

    def process_named(self, name: str) -> int:
        """Return the one process of it with this name, which is there or about to be."""
        wait_until(lambda: len(self.processes_named(name)) == 1, f"one process {name}")
        return self.processes_named(name)[0]

    @contextlib.contextmanager
    def nothing_left(self, home: Path | None = None) -> Iterator[None]:
        """Fail if the body leaves anything: process, mount, namespace, socket, file, network lock.

        A namespace lives by processes and mounts alone, and there are none of ours then.

        Args:
            home: Where restored processes live, all of which are to be gone as well.
        """
        before = _traces(home)
        yield
        wait_until(lambda: not self.processes(), "its processes are gone", seconds=QUIET_S_MAX)
        if home is not None:
            wait_until(
                lambda: not processes_in(home), "what it restored is gone", seconds=QUIET_S_MAX
            )
        left = list(self.run_directory.iterdir()) if self.run_directory.exists() else []
        assert not left, f"left in its directory: {left}"
        assert str(self.folder) not in Path("/proc/net/unix").read_text(encoding="utf-8")
        # Other runs beside this one have files in `/dev/shm` as well, for a moment.
        with contextlib.suppress(TimeoutError):
            wait_until(lambda: _traces(home) <= before, "nothing is left", seconds=QUIET_S_MAX)
        after = _traces(home)
        assert after <= before, f"left: {after - before}"


def _traces(home: Path | None) -> set[str]:
    """Return what outlives processes: mounts, network locks, files."""
    mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    files = {str(path) for path in home.iterdir()} if home is not None else set()
    # Its own, which also a tree that was never captured leaves when it is killed.
    files -= {f"{home}/{CONTROL}"}
    files |= {str(path) for path in Path("/dev/shm").glob("*.ghost")}  # noqa: S108 - to read
    return {mount.split(" ", 3)[3] for mount in mounts} | network_locks() | files


def succeeded(process: subprocess.Popen[str]) -> Document:
    """Wait for the program's success and return what it says."""
    output, errors = _finish(process)
    assert process.returncode == 0, f"status {process.returncode}:\n{errors}"
    document: Document = json.loads(output)
    return document


def failed(process: subprocess.Popen[str], *, code: int) -> Document:
    """Wait for the program's failure and return the error it tells."""
    output, errors = _finish(process)
    assert process.returncode == code, f"status {process.returncode}:\n{output}{errors}"
    error: Document = json.loads(output)["error"]
    assert error["message"] in errors
    assert "Traceback" not in errors
    return error


def killed(process: subprocess.Popen[str]) -> None:
    """Kill the program, and nothing that it started."""
    process.kill()
    _finish(process)


def _finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    with process:
        try:
            return process.communicate(timeout=AGENT_S_MAX)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            raise


class Asking:
    """A question to a tree on a thread of its own, which may never be answered."""

    def __init__(self, question: Callable[[], object]) -> None:
        self._question = question
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        try:
            self._question()
        except Exception as error:  # noqa: BLE001 - for the test to look at
            self.error = error

    @property
    def is_open(self) -> bool:
        """Whether there is no answer yet."""
        return self._thread.is_alive()

    def wait(self) -> Exception | None:
        """Wait for the answer; return the error that there was instead."""
        self._thread.join(AGENT_S_MAX)
        assert not self._thread.is_alive(), "neither answered nor ended"
        return self.error


def waits_for_memory(pids: Sequence[int]) -> bool:
    """Tell whether a thread of these processes waits for a page that a userfaultfd is to fill."""
    for pid in pids:
        with contextlib.suppress(OSError):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                if (thread / "wchan").read_text(encoding="ascii") == "handle_userfault":
                    return True
    return False


# -- fixtures -------------------------------------------------------------------------------------


@contextlib.contextmanager
def agent_folder() -> Iterator[Path]:
    """Make a folder on a short path."""
    folder = Path(tempfile.mkdtemp(prefix="agent-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def agent(criu: Criu, tmp_path: Path) -> Iterator[Agent]:
    """Return the program with a store of its own in a directory."""
    url = f"file://{tmp_path}/store"
    snapstore.init_store(url).close()
    with agent_folder() as folder:
        yield Agent(url, folder)


@pytest.fixture
def s3_agent(criu: Criu, s3: seaweed.S3Server, s3_bucket: str) -> Iterator[Agent]:
    """Return the program with a store of its own in a bucket."""
    url = s3.url(s3_bucket)
    snapstore.init_store(url).close()
    with agent_folder() as folder:
        yield Agent(url, folder)
