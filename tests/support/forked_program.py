"""The `snapstore` program of this checkout, run to its end hundreds of times.

Each run is a real process with its own arguments, environment and outputs. But it is not started
from nothing: it is forked from a process that has loaded the program and done nothing else, since
loading takes ten times as long as most commands do. Who tests how the program starts, its flags, or
signals, starts it as users do, with `command_line`.
"""

import atexit
import contextlib
import dataclasses
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

__all__ = ["ENVIRONMENT", "Ended", "command_line", "run_forked"]

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LC_ALL": "C.UTF-8",
    "HOME": "/nonexistent",
    # Else it would be the program of the checkout that is installed.
    "PYTHONPATH": str(ROOT),
}
PATIENCE_S = 60.0
_REQUEST_BYTES_MAX = 1 << 17


@dataclasses.dataclass(frozen=True)
class Ended:
    """What a run of the program left."""

    code: int
    out: str
    err: str


def command_line(arguments: Sequence[str | Path], flags: Sequence[str] = ()) -> list[str]:
    """The program of this checkout, in `ENVIRONMENT`, under this interpreter with these flags."""
    return [sys.executable, *flags, "-m", "snapstore", *map(str, arguments)]


def run_forked(
    arguments: Sequence[str | Path],
    environment: Mapping[str, str],
    *,
    directory: Path | None = None,
) -> Ended:
    """Run the program to its end.

    Args:
        arguments: Of the command line.
        environment: All of it.
        directory: To run in, if not in this one.

    Raises:
        TimeoutError: It took too long; it is killed.
    """
    request = {
        "arguments": [str(argument) for argument in arguments],
        "environment": dict(environment),
        "directory": str(directory or Path.cwd()),
    }
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        code = _server().run(json.dumps(request).encode(), [out.fileno(), err.fileno()])
        out.seek(0)
        err.seek(0)
        return Ended(code, out.read().decode(), err.read().decode())


class _Server:
    """The process that others are forked from; it ends with this one."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(PATIENCE_S)
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - this module
                # As a script, so that the program calls itself as its own script does.
                [sys.executable, "-P", __file__, str(theirs.fileno())],
                env=ENVIRONMENT,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def run(self, request: bytes, outputs: list[int]) -> int:
        assert len(request) <= _REQUEST_BYTES_MAX
        socket.send_fds(self._socket, [request], outputs)
        try:
            return int(self._socket.recv(100))
        except BaseException:
            _server.cache_clear()
            self.end()
            raise

    def end(self) -> None:
        """Kill it, and what it has forked. Idempotent."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._socket.close()


@functools.cache
def _server() -> _Server:
    server = _Server()
    atexit.register(server.end)
    return server


# -- the other side -------------------------------------------------------------------------------


def serve(descriptor: int) -> None:
    """Load the program, and run it in a child for each request, until nobody asks any more."""
    import snapstore.cli.main  # noqa: F401, PLC0415 - what all children have

    with socket.socket(fileno=descriptor) as asked:
        while True:
            request, outputs, _, _ = socket.recv_fds(asked, _REQUEST_BYTES_MAX, 2)
            if not request:
                return
            child = os.fork()
            if child == 0:
                asked.close()
                be_the_program(json.loads(request), outputs)
            for output in outputs:
                os.close(output)
            status = os.waitpid(child, 0)[1]
            with contextlib.suppress(BrokenPipeError):
                asked.send(str(os.waitstatus_to_exitcode(status)).encode())


def be_the_program(request: dict[str, object], outputs: list[int]) -> NoReturn:
    """Become what was asked for."""
    from snapstore.__main__ import main  # noqa: PLC0415 - only in children

    for number, output in enumerate(outputs, start=1):
        os.dup2(output, number)
        os.close(output)
    os.chdir(str(request["directory"]))
    os.environ.clear()  # noqa: TID251 - it is another program's now
    os.environ.update(request["environment"])  # type: ignore[call-overload]  # noqa: TID251
    sys.argv = ["snapstore", *request["arguments"]]  # type: ignore[misc]
    main()
    raise AssertionError("the program ends its process")


if __name__ == "__main__":
    serve(int(sys.argv[1]))
