"""Start `demo_process.py`, talk to it, dump it with CRIU and bring it back.

Used by the demo and by the CRIU tests. This program is the parent of the process in both of its
lives, since CRIU can only restore a process whose id is free, which takes a parent that reaps.
"""

# ruff: noqa: S603 - it runs the programs that are named here, with no shell in between.

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

DEMO_PROCESS = Path(__file__).with_name("demo_process.py")
DEFAULT_CRIU = Path(__file__).with_name("criu") / "criu"

POLL_S = 0.02
READY_S_MAX = 120
ANSWER_S_MAX = 60
CRIU_S_MAX = 120
LOG_LINES_SHOWN = 15
LAZY_SOCKET = "lazy-pages.socket"

Answer = dict[str, object]


class CriuFailedError(Exception):
    """CRIU ended with an error; the message has the relevant lines of its log."""


class ProcessDiedError(Exception):
    """The process is gone though it was meant to live."""


@dataclass(frozen=True)
class Criu:
    """The CRIU program. Needs root, as CRIU itself does."""

    program: Path

    def version(self) -> str:
        """Return the version, such as `4.2.1`."""
        result = subprocess.run(
            [self.program, "--version"], check=True, capture_output=True, text=True
        )
        return result.stdout.splitlines()[0].removeprefix("Version: ")

    def dump(self, pid: int, images: Path, *options: str, leave_running: bool = False) -> None:
        """Write the images of a process into an existing folder, and end the process by default.

        The caller reaps it. A process that leads a session and has no terminal and no established
        connection needs no further options.
        """
        life = ["--leave-running"] if leave_running else []
        self._run(["dump", "--tree", str(pid), *life, *options], images)

    def restore(self, images: Path, *options: str) -> None:
        """Bring the process back, as a child of this process, with the id it had."""
        # Not as a child of CRIU: that ends, and then only an init that reaps would free the id.
        self._run(["restore", "--restore-detached", "--restore-sibling", *options], images)

    @contextlib.contextmanager
    def lazy_pages(self, images: Path) -> Iterator[list[str]]:
        """Run CRIU's own daemon that fills memory behind a restored process.

        Gives the options that a restore of these images needs to use it. Returns when all memory
        is there; when the body fails, the daemon is killed.
        """
        log = images.with_name(f"{images.name}-lazy-pages.log")
        address = images / LAZY_SOCKET
        address.unlink(missing_ok=True)
        command = [str(self.program), "lazy-pages", "--images-dir", str(images)]
        command += ["--log-file", str(log), "-v2"]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True) as daemon:
            try:
                while not address.exists() and daemon.poll() is None:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        daemon.wait(timeout=POLL_S)
                yield ["--lazy-pages"]
                status = daemon.wait(timeout=CRIU_S_MAX)
            except BaseException:
                daemon.kill()
                raise
        if status != 0:
            action = f"criu lazy-pages ended with status {status}"
            raise CriuFailedError("\n".join([action, *explanation(log)]))

    def _run(self, arguments: list[str], images: Path) -> None:
        """Run one CRIU action and raise with the reason when it fails.

        The log lies beside the images, never among them. CRIU has a session of its own: it would
        leave a half-dumped process behind if Ctrl-C reached it.
        """
        log = images.with_name(f"{images.name}-{arguments[0]}.log")
        command = [str(self.program), *arguments, "--images-dir", str(images)]
        command += ["--log-file", str(log), "-v2"]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True) as criu:
            try:
                status = criu.wait(timeout=CRIU_S_MAX)
            except KeyboardInterrupt:
                criu.wait(timeout=CRIU_S_MAX)
                raise
            except subprocess.TimeoutExpired:
                criu.kill()
                raise
        if status != 0:
            action = f"criu {arguments[0]} ended with status {status}"
            raise CriuFailedError("\n".join([action, *explanation(log)]))


def explanation(log: Path) -> list[str]:
    """Return the errors that a CRIU log tells of, or its end when it names none."""
    if not log.exists():
        return ["it wrote no log"]
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line for line in lines if "Error" in line]
    return (errors or lines)[-LOG_LINES_SHOWN:]


class LiveProcess:
    """One process made to be dumped. Leaving the context ends it, whatever life it is in."""

    def __init__(
        self, home: Path, *, size_mib: int = 0, seed: int = 1, content: Path | None = None
    ) -> None:
        """Start it with `home` (an existing folder) as working directory; return when it answers.

        Its memory is `size_mib` of noise, or what the file `content` holds. Its standard streams
        are files in `home`, for a terminal or a pipe could not be restored.
        """
        self._home = home
        command = [sys.executable, str(DEMO_PROCESS), str(home)]
        command += ["--mib", str(size_mib), "--seed", str(seed)]
        if content is not None:
            command += ["--content", str(content), "--zero-mib", "0"]
        with (home / "output.txt").open("ab") as output:
            self._first_life = subprocess.Popen(
                command,
                cwd=home,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.pid = self._first_life.pid
        try:
            self.port = self._wait_for_port()
        except BaseException:
            self.end()
            raise

    def _wait_for_port(self) -> int:
        ready = self._home / "ready.json"
        for _ in range(round(READY_S_MAX / POLL_S)):
            if ready.exists():
                return int(json.loads(ready.read_text(encoding="utf-8"))["port"])
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = self._first_life.wait(timeout=POLL_S)
                output = (self._home / "output.txt").read_text(encoding="utf-8", errors="replace")
                raise ProcessDiedError(f"it ended with status {status}:\n{output}")
        raise ProcessDiedError(f"it was not ready after {READY_S_MAX} s")

    def ask(self, request: str) -> Answer:
        """Send one request and return its answer; see `demo_process`."""
        address = ("127.0.0.1", self.port)
        with socket.create_connection(address, timeout=ANSWER_S_MAX) as connection:
            connection.sendall(request.encode() + b"\n")
            line = connection.makefile("rb").readline()
        answer: Answer = json.loads(line)
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer

    def memory_hash(self) -> str:
        """Return the hash of its memory, computed by the process itself from the live pages."""
        return str(self.ask("hash")["hash"])

    def reap(self) -> None:
        """Wait for its end, so that its process id is free for a restore."""
        if self._first_life.returncode is None:
            self._first_life.wait(timeout=ANSWER_S_MAX)
        else:
            # Restored: a child of ours that `subprocess` knows nothing of.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)

    def end(self) -> None:
        """Kill it if it lives, and reap it. May be called again and again."""
        if self._is_ours():
            os.kill(self.pid, signal.SIGKILL)
            self.reap()

    def _is_ours(self) -> bool:
        """Tell whether the id still belongs to a child of ours, dead or alive, and to no other."""
        try:
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        return True

    def __enter__(self) -> Self:
        """Return the process itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the process."""
        self.end()
