"""Runs the real program: another process, its two outputs, its exit code."""

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from snapstore.clock import SystemClock
from tests.support.forked_program import ENVIRONMENT, Ended, command_line, run_forked

__all__ = [
    "ENVIRONMENT",
    "Ended",
    "command_line",
    "objects",
    "one_object",
    "run",
    "run_from_nothing",
    "start",
    "wait_until",
]

PATIENCE_S = 60.0
_POLL_S = 0.002


def run(
    *arguments: str | Path,
    store: Path | str | None = None,
    environment: Mapping[str, str] | None = None,
) -> Ended:
    """Run the program to its end; a Python traceback is never right."""
    options = [] if store is None else ["--store", str(store)]
    ended = run_forked([*arguments, *options], {**ENVIRONMENT, **(environment or {})})
    assert "Traceback" not in ended.err, ended.err
    return ended


def run_from_nothing(*arguments: str | Path, flags: Sequence[str] = ()) -> Ended:
    """Run the program as users do, under an interpreter with these flags."""
    done = subprocess.run(  # noqa: S603 - our own program
        command_line(arguments, flags),
        env=ENVIRONMENT,
        capture_output=True,
        encoding="utf-8",
        timeout=PATIENCE_S,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return Ended(done.returncode, done.stdout, done.stderr)


def start(*arguments: str | Path, store: Path) -> subprocess.Popen[str]:
    """Start the program; its output goes to pipes, so let it print little."""
    return subprocess.Popen(  # noqa: S603 - our own program
        command_line([*arguments, "--store", str(store)]),
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Return as soon as something is so; it must become so before the process ends."""
    clock = SystemClock()
    end_s = clock.monotonic_s() + PATIENCE_S
    while not condition():
        assert process.poll() is None, f"ended with {process.returncode} too early"
        assert clock.monotonic_s() < end_s, "nothing happened"
        clock.sleep_s(_POLL_S)


def one_object(ended: Ended) -> dict[str, Any]:
    """Read the single JSON object of a run that succeeded."""
    assert ended.code == 0, ended.err
    (found,) = objects(ended)
    return found


def objects(ended: Ended) -> list[dict[str, Any]]:
    """Read one JSON object a line, with sorted keys and nothing else around them."""
    found = []
    # Not `splitlines`, which takes characters for line ends that JSON does not.
    for line in ended.out.split("\n")[:-1]:
        value = json.loads(line)
        assert isinstance(value, dict)
        assert list(value) == sorted(value)
        found.append(value)
    assert ended.out == "" or ended.out.endswith("\n")
    return found
