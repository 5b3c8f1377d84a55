"""A living workload with external memory, captured and restored by the agent in this process."""

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from typing_extensions import override

from snapagent.memory.broker import MemoryBroker
from tests.support.agent import agent_folder
from tests.support.lives import Living
from tests.support.network_locks import without_network_locks

ROOT = Path(__file__).parents[2]
PROGRAM = "tests.support.programs.external_arrays"
ANSWER_S_MAX = 60
SIZE_MIB = 64


class ExternalWorkload(Living):
    """A process with external arrays, in any of its lives. Leaving the context ends it."""

    def __init__(
        self,
        home: Path,
        broker: Path,
        *,
        size_mib: int = SIZE_MIB,
        program: str = PROGRAM,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", **(variables or {})}
        self.begin(home, [sys.executable, "-m", program, str(broker), str(size_mib)], environment)

    @override
    def answers(self) -> bool:
        """Tell whether somebody listens, without waiting."""
        try:
            self._connect().close()
        except OSError:
            return False
        return True

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(ANSWER_S_MAX)
        try:
            connection.connect(str(self.home / "control"))
        except BaseException:
            connection.close()
            raise
        return connection

    def ask(self, name: str) -> str:
        """Ask it, in whatever life; the answer is empty if it dies of the question."""
        with self._connect() as connection:
            connection.sendall(name.encode())
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                while piece := connection.recv(4096):
                    answer += piece
            return answer.decode()

    @property
    def pids(self) -> list[int]:
        """Its living processes."""
        return self.processes()

    @override
    def end(self) -> None:
        """Kill it, and wait until its ids are free."""
        super().end()
        (self.home / "control").unlink(missing_ok=True)


@dataclass(frozen=True)
class BrokerProcess:
    """A broker in a process of its own."""

    process: subprocess.Popen[bytes]
    holder_pid: int

    def kill(self) -> None:
        """Kill it, and not its holder."""
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def broker_process(path: Path) -> Iterator[BrokerProcess]:
    """Run a broker in a process of its own, to be killed by the test or at the end."""
    with subprocess.Popen(  # noqa: S603 - this interpreter
        [sys.executable, "-m", "tests.support.programs.memory_broker", str(path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        try:
            assert process.stdout is not None
            yield BrokerProcess(process, int(process.stdout.readline()))
        finally:
            process.kill()


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """Return a folder for sockets, outside of the agent's."""
    with agent_folder() as folder:
        yield folder


@pytest.fixture
def broker(short_dir: Path) -> Iterator[MemoryBroker]:
    """Run a broker in this process."""
    with MemoryBroker(short_dir / "memory.sock") as running:
        yield running


@pytest.fixture
def workload(short_dir: Path, broker: MemoryBroker) -> Iterator[ExternalWorkload]:
    """Start a workload with external arrays."""
    home = short_dir / "home"
    home.mkdir()
    with without_network_locks(), ExternalWorkload(home, broker.path) as living:
        yield living
