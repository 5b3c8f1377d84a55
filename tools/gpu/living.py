"""A workload of these programs in any of its lives: started, asked over a socket, killed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from snapagent.linux import processes
from tools.gpu.serving import FAILED

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

__all__ = ["CRIU_VARIABLES", "Living", "kill_tree"]

_READY_S_MAX = 240
_ANSWER_S_MAX = 240
_ENDED_S_MAX = 30
_POLL_S = 0.02
_OUTPUT_CHARS = 3000
CRIU_VARIABLES = {
    # CRIU cannot capture io_uring.
    "UV_USE_IO_URING": "0",
    "USE_LIBUV": "0",
}


class Living:
    """One workload, in a folder of its own, with its control socket and its output."""

    def __init__(self, folder: Path) -> None:
        """Prepare; nothing is started yet."""
        self.folder = folder
        self.control = folder / "control"
        self._output = folder / "workload.txt"

    @contextlib.contextmanager
    def started(
        self, module: str, arguments: Sequence[str], variables: Mapping[str, str]
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Start it, wait until it answers, and kill all of its first life in the end.

        Raises:
            RuntimeError: It ended, or did not answer in time; with what it wrote.
        """
        with self._output.open("wb") as output:
            process = subprocess.Popen(  # noqa: S603 - a module of ours
                [sys.executable, "-m", module, str(self.control), *arguments],
                env={**os.environ, **CRIU_VARIABLES, **variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            self._await_ready(process)
            yield process
        finally:
            if process.poll() is None:
                kill_tree(process.pid)
            process.wait()

    def ask(self, word: str) -> str:
        """Ask it, in whatever life.

        Raises:
            RuntimeError: It failed, or said nothing.
        """
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_ANSWER_S_MAX)
            connection.connect(str(self.control))
            connection.sendall(word.encode())
            answer = b""
            while piece := connection.recv(1 << 16):
                answer += piece
        text = answer.decode()
        if not text or text.startswith(FAILED):
            raise RuntimeError(f"{word}: {text or 'no answer'}")
        return text

    def output(self) -> str:
        """Return the end of what it wrote."""
        try:
            return self._output.read_text(errors="replace")[-_OUTPUT_CHARS:]
        except FileNotFoundError:
            return ""

    def _await_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + _READY_S_MAX
        while not self._is_ready():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the workload does not answer: {self.output()}")
            time.sleep(_POLL_S)

    def _is_ready(self) -> bool:
        with socket.socket(socket.AF_UNIX) as connection:
            return connection.connect_ex(str(self.control)) == 0


def kill_tree(root: int) -> None:
    """Kill a process and all below it, and wait a while until they are gone."""
    found = [root, *processes.descendants(root)]
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + _ENDED_S_MAX
    while any(_lives(pid) for pid in found) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _lives(pid: int) -> bool:
    state = processes.read_state(pid)
    return state is not None and not state.ended
