"""The example server `examples/http_server.py` in its lives."""

import contextlib
import http.client
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from snapagent.handshake import ControlDirectory
from snapagent.linux.probe import in_network_of
from tests.support.processes import end_processes_in
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "http_server.py"
PAUSE_S_MAX = 60
WARM_UP = 3


class Server:
    """The example in its home, with a control directory beside it."""

    def __init__(
        self,
        home: Path,
        control: Path,
        program: Sequence[str] = (str(EXAMPLE),),
        *,
        mebibytes: int = 16,
        external: tuple[int, Path] | None = None,
    ) -> None:
        """Start it, and wait until it listens.

        Args:
            home: Its working directory, where its output goes as well.
            control: Where it and the agent tell each other.
            program: What Python is to run.
            mebibytes: How much it keeps in its own memory.
            external: How many MiB it keeps with a broker, and where that listens.
        """
        self.home = home
        self.output = home / "output.txt"
        arguments = ["--port", "0", "--mebibytes", str(mebibytes), "--warm-up", str(WARM_UP)]
        environment = {"PYTHONPATH": str(ROOT), "SNAPSHOT_CONTROL_DIR": str(control)}
        if external is not None:
            arguments += ["--external-mebibytes", str(external[0])]
            environment["SNAPAGENT_MEMORY_SOCKET"] = str(external[1])
        with self.output.open("wb") as output:
            self._process = subprocess.Popen(  # noqa: S603 - no shell
                [sys.executable, *program, *arguments],
                cwd=home,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.pid = self._process.pid
        wait_until(lambda: "port" in self._said(), "the server listens", seconds=PAUSE_S_MAX)
        self._port = int(self._said().split()[-1])

    def _said(self) -> str:
        said = self.output.read_text()
        if self._process.poll() is not None:
            raise RuntimeError(f"the server has ended:\n{said}")
        return said

    def ask(self, path: str, pid: int | None = None) -> dict[str, Any]:
        """Ask it, in the network of the process that it has become."""

        def get() -> dict[str, Any]:
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PAUSE_S_MAX)
            with contextlib.closing(connection):
                connection.request("GET", path)
                answer: dict[str, Any] = json.loads(connection.getresponse().read())
                return answer

        return in_network_of(pid or self.pid, get)

    def sleeps(self) -> bool:
        """Whether all of it waits for something, the thread that waits for the agent included."""
        states = [
            (task / "stat").read_text().rpartition(")")[2].split()[0]
            for task in Path(f"/proc/{self.pid}/task").iterdir()
        ]
        return len(states) > 1 and set(states) == {"S"}

    def await_ready(self) -> None:
        """Wait until it may be captured, and has done all that it does before that."""
        with ControlDirectory.of_process(self.pid) as agent:
            agent.wait_ready(PAUSE_S_MAX)
            wait_until(self.sleeps, "the server waits for the agent", seconds=PAUSE_S_MAX)

    def end(self) -> None:
        """Kill it, in whatever life."""
        end_processes_in(self.home)
        self._process.wait()
