"""Start a small process that does what stands in the way of a capture, and end it afterwards."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

# Ends with the pipe `life`, so that nothing is left if the test process itself is killed.
_PROGRAM = """
import os, select, socket, sys
ready, life = int(sys.argv[1]), int(sys.argv[2])
given = [int(one) for one in sys.argv[3:]]
try:
{body}
except OSError as error:
    os.write(ready, b"skip " + str(error).encode())
else:
    os.write(ready, b"ready")
os.close(ready)
{wait}
"""
_WAIT_ON_PIPE = "select.select([life], [], [])"
# A pipe from outside is something to be warned of, and a capture ends one.
_WAIT_FOREVER = "os.close(life); import signal; signal.pause()"

READY_S_MAX = 30


@contextlib.contextmanager
def process_that(
    body: str,
    home: Path,
    *,
    give: Sequence[int] = (),
    stdin: int = subprocess.DEVNULL,
    quiet: bool = True,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run some Python in a process and yield it when that is done; it is killed afterwards.

    Args:
        body: What it does; if the kernel refuses that, the test is skipped with the reason.
        home: Its working directory, for its output too.
        give: Descriptors that it inherits, and finds in `given`.
        stdin: Its standard input.
        quiet: Whether it keeps no pipe to the test.
    """
    indented = "\n".join(f"    {line}" for line in body.splitlines() or ["pass"])
    program = _PROGRAM.format(body=indented, wait=_WAIT_FOREVER if quiet else _WAIT_ON_PIPE)
    ready_here, ready = os.pipe()
    life, life_here = os.pipe()
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, life_here)
        stack.callback(os.close, ready_here)
        with (home / "output").open("ab") as output:
            process = subprocess.Popen(  # noqa: S603 - the program above
                [sys.executable, "-c", program, str(ready), str(life), *map(str, give)],
                cwd=home,
                stdin=stdin,
                stdout=output,
                stderr=output,
                pass_fds=[ready, life, *give],
                start_new_session=True,
            )
        stack.callback(process.wait)
        stack.callback(_end_group, process.pid)
        os.close(ready)
        os.close(life)
        said = _read_all(ready_here)
        if said.startswith(b"skip "):
            pytest.skip(f"this kernel refuses it: {said[5:].decode()}")
        assert said == b"ready", (home / "output").read_text()
        yield process


def _end_group(leader: int) -> None:
    """End a process and its children, as far as they have not ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _read_all(fd: int) -> bytes:
    found = b""
    while chunk := os.read(fd, 4096):
        found += chunk
    return found
