"""`snapagent run` as a process of its own, and talking to it."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

import snapstore
from snapagent.config import CONFIG_VARIABLE, RUN_VARIABLE, STATE_VARIABLE, STORE_VARIABLE
from tests.support.agent import AGENT_S_MAX, ROOT, Agent, agent_folder
from tests.support.waiting import wait_until

START_S_MAX = 90
ENDED = ("done", "failed", "cancelled", "interrupted")
CRIU_HOLDER = """\
#!/bin/sh
# Waits before it becomes CRIU, as long as somebody wants that.
case $1 in dump|restore) if [ -p {gate} ]; then : > {held}; read -r _ < {gate}; fi;; esac
exec {criu} "$@"
"""


class UnixConnection(http.client.HTTPConnection):
    """HTTP to a socket with a path."""

    def __init__(self, path: Path) -> None:
        super().__init__("agent", timeout=AGENT_S_MAX)
        self._path = path

    @override
    def connect(self) -> None:
        """Connect to it."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(AGENT_S_MAX)
        self.sock.connect(str(self._path))


@dataclass(frozen=True)
class Answer:
    """What was answered."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def document(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error, which it has to be."""
        assert self.status >= 400, self
        found: dict[str, Any] = self.document["error"]
        assert "Traceback" not in self.body.decode()
        return found


class Daemon:
    """A running daemon."""

    def __init__(self, agent: Agent, process: subprocess.Popen[str], log: Path) -> None:
        self.agent = agent
        self.process = process
        self.log = log
        self.socket = agent.run_directory / "agent.sock"

    def ask(
        self, method: str, target: str, body: object = None, *, raw: bytes | None = None
    ) -> Answer:
        """Ask once."""
        data = raw if raw is not None else None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} if data is not None else {}
        with contextlib.closing(UnixConnection(self.socket)) as connection:
            connection.request(method, target, data, headers)
            answer = connection.getresponse()
            found = {key.lower(): value for key, value in answer.getheaders()}
            return Answer(answer.status, found, answer.read())

    def get(self, target: str) -> Any:
        """Ask for a document, which has to be there."""
        answer = self.ask("GET", target)
        assert answer.status == 200, answer
        return answer.document

    def begin(self, target: str, **body: object) -> str:
        """Begin a job, and return where it is."""
        answer = self.ask("POST", target, body)
        assert answer.status == 201, answer
        return f"{target}/{answer.document['id']}"

    def state(self, job: str) -> str:
        """Return the state of a job."""
        found: str = self.get(job)["state"]
        return found

    def await_state(self, job: str, state: str) -> None:
        """Wait until a job is in this state; fails if it ends in another one."""

        def reached() -> bool:
            now = self.get(job)
            assert now["state"] == state or now["state"] not in ENDED, now
            return bool(now["state"] == state)

        wait_until(reached, f"{job} is {state}")

    def await_end(self, job: str) -> Any:
        """Wait until a job has ended, and return it."""
        now = self.get(job)
        while now["state"] not in ENDED:
            now = self.get(f"{job}?wait_s=60&seen={now['version']}")
        return now

    def kill(self) -> None:
        """Kill it, and nothing that it started."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> str:
        """End it as its users do, and return what it said."""
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(AGENT_S_MAX)
        said = self.log.read_text(encoding="utf-8")
        assert status == 0, said
        assert "Traceback" not in said, said
        return said


def program(
    agent: Agent, *arguments: str, criu: Path | None = None, **options: Any
) -> subprocess.Popen[str]:
    """Start the program with this agent's folders and store as its defaults."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # noqa: TID251 - handed on
    environment[RUN_VARIABLE] = str(agent.run_directory)
    environment[STATE_VARIABLE] = str(agent.folder / "state")
    environment[STORE_VARIABLE] = agent.url
    environment[CONFIG_VARIABLE] = str(agent.folder / "agent.toml")
    (agent.folder / "agent.toml").touch()
    if criu is not None:
        environment["SNAPAGENT_CRIU"] = str(criu)
    return subprocess.Popen(  # noqa: S603 - this interpreter
        [sys.executable, "-m", "snapagent", *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        text=True,
        **options,
    )


@contextlib.contextmanager
def running_daemon(agent: Agent, config: str = "", *, criu: Path | None = None) -> Iterator[Daemon]:
    """Run a daemon with these settings; it is stopped at the end, if it was not before."""
    (agent.folder / "agent.toml").write_text(config, encoding="utf-8")
    path = agent.folder / "log"
    with path.open("w", encoding="utf-8") as log:
        process = program(agent, "run", criu=criu, stdout=log, stderr=log)
    daemon = Daemon(agent, process, path)

    def serves() -> bool:
        assert process.poll() is None, path.read_text(encoding="utf-8")
        return "listening at" in path.read_text(encoding="utf-8")

    try:
        # It waits for supervisors first, if another daemon was killed.
        wait_until(serves, "it listens", seconds=START_S_MAX)
        yield daemon
        if process.poll() is None:
            daemon.stop()
    finally:
        process.kill()
        process.wait()


@dataclass(frozen=True)
class HeldCriu:
    """A program that waits before it becomes CRIU."""

    program: Path
    gate: Path
    held: Path

    def close(self) -> None:
        """Hold the next CRIU that dumps or restores."""
        os.mkfifo(self.gate)

    def await_held(self) -> None:
        """Wait until one waits."""
        wait_until(self.held.exists, "CRIU is held")

    def open(self) -> None:
        """Let it go, and those that come later."""
        with contextlib.suppress(OSError):  # Nobody reads: it was killed.
            fd = os.open(self.gate, os.O_WRONLY | os.O_NONBLOCK)
            os.write(fd, b"go\n")
            os.close(fd)
        self.gate.unlink(missing_ok=True)
        self.held.unlink(missing_ok=True)


@contextlib.contextmanager
def held_criu(criu: Path) -> Iterator[HeldCriu]:
    """Make a program that can hold CRIU."""
    with agent_folder() as folder:
        found = HeldCriu(folder / "criu", folder / "gate", folder / "held")
        text = CRIU_HOLDER.format(gate=found.gate, held=found.held, criu=criu.resolve())
        found.program.write_text(text, encoding="utf-8")
        found.program.chmod(0o755)
        yield found


@pytest.fixture
def plain_agent(tmp_path: Path) -> Iterator[Agent]:
    """Return a program with an empty store, for tests that need no CRIU."""
    url = f"file://{tmp_path}/store"
    snapstore.init_store(url).close()
    with agent_folder() as folder:
        yield Agent(url, folder)
