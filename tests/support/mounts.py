"""Real mounts for tests: the program mounts, and whatever happens nothing stays mounted.

A test that uses the fixture `fuse` or `mounts` is marked `fuse` by `conftest.py`, and is skipped
where nothing can be mounted. All that looks into a mount of which something is broken does so with
a limit of time in another process: who waits for a mount cannot be interrupted.
"""

import contextlib
import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import wait_until

__all__ = [
    "Mount",
    "Mounts",
    "fuse",
    "look",
    "mounts",
    "names_in",
    "own_environment",
    "run_snapstore",
]

PATIENCE_S = 60.0
ROOT = Path(__file__).parents[2]
SNAPSTORE = [sys.executable, "-m", "snapstore"]
"""The program of this checkout, in `own_environment`."""


@dataclasses.dataclass(frozen=True)
class Mount:
    """A mounted snapshot."""

    directory: Path
    about: dict[str, Any]
    log_file: Path

    @property
    def pid(self) -> int:
        """The process that serves it."""
        return int(self.about["pid"])

    @property
    def peak_bytes(self) -> int:
        """The most memory that process has had."""
        status = Path(f"/proc/{self.pid}/status").read_text(encoding="utf-8")
        (peak,) = [line for line in status.splitlines() if line.startswith("VmHWM:")]
        return int(peak.split()[1]) * 1024

    @property
    def log(self) -> str:
        """What it has logged."""
        return self.log_file.read_text(encoding="utf-8")

    def kill(self) -> None:
        """Kill the process that serves it; returns when it is gone."""
        daemon = os.pidfd_open(self.pid)
        try:
            signal.pidfd_send_signal(daemon, signal.SIGKILL)
            wait_until(lambda: is_dead(self.pid), "the daemon is gone")
        finally:
            os.close(daemon)

    def unmount(self, *options: str) -> subprocess.CompletedProcess[str]:
        """Run `snapstore umount`."""
        return run_snapstore("umount", *options, self.directory)


class Mounts:
    """Makes mounts below one folder, and takes them all away."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: list[int] = []

    def mount(
        self, name: str | None, store: Path | str, *options: str, directory: Path | None = None
    ) -> Mount:
        """Mount a snapshot, or all names, on a new directory if no other is given."""
        number = len(self._made)
        if directory is None:
            directory = self._folder / f"mount-{number}"
            directory.mkdir()
        log_file = self._folder / f"mount-{number}.log"
        what = ["--all"] if name is None else [name]
        fixed = ["--store", str(store), "--log-file", str(log_file), "--json"]
        done = run_snapstore("mount", *what, directory, *fixed, *options)
        assert done.returncode == 0, done.stderr
        about = json.loads(done.stdout)
        self._made.append(int(about["pid"]))
        return Mount(directory, about, log_file)

    def clean(self) -> None:
        """Take away all that is mounted below the folder, and end who serves it."""
        for pid in self._made:
            with contextlib.suppress(OSError):
                if b"snapstore" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
        while left := mounted_below(self._folder):
            for directory in left:
                subprocess.run(["umount", "--lazy", directory], check=False, timeout=PATIENCE_S)  # noqa: S603, S607


@pytest.fixture(scope="session")
def fuse() -> None:
    """Skip where nothing can be mounted."""
    if not Path("/dev/fuse").exists():
        pytest.skip("there is no /dev/fuse")
    if os.geteuid() != 0:
        pytest.skip("these tests mount as root")
    if importlib.util.find_spec("pyfuse3") is None:
        pytest.skip("no pyfuse3: pip install 'snapstore[fuse]'")


@pytest.fixture
def mounts(fuse: None, tmp_path: Path) -> Iterator[Mounts]:
    """Give a maker of mounts; afterwards nothing is mounted."""
    folder = tmp_path / "mounts"
    folder.mkdir()
    made = Mounts(folder)
    try:
        yield made
    finally:
        made.clean()
    assert mounted_below(folder) == []


def mounted_below(folder: Path) -> list[str]:
    """What is mounted on directories of a folder, the newest first."""
    table = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    places = [line.split(" ")[4] for line in table]
    return [place for place in reversed(places) if Path(place).is_relative_to(folder)]


def names_in(directory: Path) -> list[str]:
    """What is listed in a directory."""
    return sorted(path.name for path in directory.iterdir())


def is_dead(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return True
    return status.rpartition(")")[2].split()[0] in "ZX"


def own_environment() -> dict[str, str]:
    """This environment, in which Python finds the packages of this checkout first."""
    return {**os.environ, "PYTHONPATH": str(ROOT)}  # noqa: TID251 - handed on


def run_snapstore(
    *arguments: str | Path, program: Sequence[str] = SNAPSTORE
) -> subprocess.CompletedProcess[str]:
    """Run the program to its end; a traceback is never right."""
    done = subprocess.run(  # noqa: S603 - our own program
        [*program, *map(str, arguments)],
        env=own_environment(),
        capture_output=True,
        encoding="utf-8",
        timeout=PATIENCE_S,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


def look(code: str, *arguments: str | Path, seconds: float = PATIENCE_S) -> str:
    """Run a little Python with `arguments` in `sys.argv[1:]`, and return what it prints."""
    done = subprocess.run(  # noqa: S603 - this interpreter
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        encoding="utf-8",
        timeout=seconds,
        check=False,
    )
    return done.stdout if done.returncode == 0 else done.stderr.strip().splitlines()[-1]
