"""Measure commands, describe the machine, and write what was measured.

Shared by every benchmark here. It must not know any program that is measured: a benchmark hands in
commands and gets numbers back. It also stays small (no numpy, no large buffers), because a child
process inherits the peak memory of the process that started it.
"""

import contextlib
import json
import mmap
import os
import platform
import resource
import select
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

REPORT_VERSION = 1
MB = 1_000_000
GB = 1_000_000_000
ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "bench"

# Twenty milliseconds see every phase of a run that lasts seconds and cost below 1 % of one core.
SAMPLE_INTERVAL_MS = 20
COMMAND_TIMEOUT_S = 3600.0
READ_SIZE_BYTES = 8 << 20
COMPARE_SIZE_BYTES = 1 << 20
OUTPUT_TAIL_BYTES = 2000


class BenchError(Exception):
    """A benchmark that cannot go on; the message says why and what to do."""


def utc_now() -> str:
    """Return the time of day, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


@dataclass(frozen=True)
class Command:
    """A program to run, with its arguments and the directory to run it in."""

    argv: tuple[str, ...]
    cwd: Path | None = None

    def line(self) -> str:
        """Return it as one could type it."""
        line = shlex.join(self.argv)
        return line if self.cwd is None else f"cd {shlex.quote(str(self.cwd))} && {line}"


@dataclass(frozen=True)
class Usage:
    """What one run of a command cost."""

    wall_s: float
    cpu_s: float
    # The peak of the sum over the process tree; pages shared by two processes count twice.
    peak_bytes: int
    # Time of the sync that followed: what a program left to the kernel instead of flushing itself.
    flush_s: float = 0.0


@dataclass(frozen=True)
class StoredSize:
    """The space that a directory takes."""

    # Sum over regular files, as `du --apparent-size` of coreutils >= 9.2. Older ones also count
    # 4 KiB for each directory, which would charge casync for its fan-out.
    apparent_bytes: int
    allocated_bytes: int
    files: int


@dataclass(frozen=True)
class Target:
    """One number to reach, and whether it was."""

    what: str
    bound: str
    measured: str
    passed: bool | None


def command_line() -> str:
    """How this program was called, wherever it lies."""
    spec = sys.modules["__main__"].__spec__
    program = ["-m", spec.name] if spec is not None else sys.argv[:1]
    return shlex.join(["python", *program, *sys.argv[1:]])


@dataclass
class Report:
    """Everything that a benchmark found; `write` turns it into JSON."""

    bench: str
    machine: dict[str, object]
    conditions: dict[str, object]
    versions: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    samples: list[dict[str, object]] = field(default_factory=list)
    summary: dict[str, object] = field(default_factory=dict)
    targets: list[Target] = field(default_factory=list)
    date: str = field(default_factory=utc_now)
    command_line: str = field(default_factory=command_line)

    def write(self, path: Path) -> None:
        """Write the report; a later call replaces the file, so it can be kept up to date."""
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"report_version": REPORT_VERSION, "revision": revision(), **asdict(self)}
        path.write_text(json.dumps(content, indent=1) + "\n")


# --- Running and sampling


class TreeSampler:
    """Follow the memory of a process and its descendants while they run."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.peak_bytes = 0

    def sample(self) -> None:
        """Look once. Processes may vanish while it looks; what they used before still counts."""
        resident_bytes = 0
        for pid in _tree(self._pid):
            now, high_water = _memory(pid)
            resident_bytes += now
            # The kernel's own high-water mark of one process misses no peak between two samples.
            self.peak_bytes = max(self.peak_bytes, high_water)
        self.peak_bytes = max(self.peak_bytes, resident_bytes)


def _tree(root: int) -> list[int]:
    """Return a process and all its descendants."""
    found = [root]
    for pid in found:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                with contextlib.suppress(OSError):
                    found.extend(int(child) for child in (task / "children").read_text().split())
    return found


def _memory(pid: int) -> tuple[int, int]:
    """Return the resident bytes of a process, now and at most; zeros when it is gone."""
    now = high_water = 0
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                now = int(line.split()[1]) * 1024
            elif line.startswith("VmHWM:"):
                high_water = int(line.split()[1]) * 1024
    return now, high_water


def run_measured(command: Command, log: Path, timeout_s: float = COMMAND_TIMEOUT_S) -> Usage:
    """Run a command and return what it cost.

    Its output goes to `log`. CPU time is that of the process and of all descendants that were
    waited for. Whatever happens here, no process of the command's group is left behind.

    Raises:
        BenchError: It failed or ran past `timeout_s`; the message ends with its last output.
    """
    own_peak_bytes = _own_peak_bytes()
    with log.open("wb") as output:
        started = time.perf_counter()
        process = subprocess.Popen(  # noqa: S603 - the commands are written in this directory
            command.argv,
            cwd=command.cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        sampler = TreeSampler(process.pid)
        try:
            ended = _wait(process.pid, sampler, started + timeout_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
    if ended is None:
        raise BenchError(f"{command.line()}: still running after {timeout_s:.0f} s\n{_tail(log)}")
    if process.returncode != 0:
        raise BenchError(f"{command.line()}: exit status {process.returncode}\n{_tail(log)}")
    peak_bytes = sampler.peak_bytes
    # ru_maxrss starts at the peak of the process that forked, so it tells something only above it.
    if usage.ru_maxrss * 1024 > own_peak_bytes:
        peak_bytes = max(peak_bytes, usage.ru_maxrss * 1024)
    return Usage(ended - started, usage.ru_utime + usage.ru_stime, peak_bytes)


def _wait(pid: int, sampler: TreeSampler, deadline: float) -> float | None:
    """Sample until the process ends; return when that was, or None past the deadline."""
    descriptor = os.pidfd_open(pid)
    try:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        while time.perf_counter() < deadline:
            if poller.poll(SAMPLE_INTERVAL_MS):
                return time.perf_counter()
            sampler.sample()
        return None
    finally:
        os.close(descriptor)


def _own_peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _tail(log: Path) -> str:
    return log.read_bytes()[-OUTPUT_TAIL_BYTES:].decode(errors="replace").strip()


def capture(*argv: str, cwd: Path | None = None) -> str:
    """Run a short command and return its output, the errors included; '' when it cannot run."""
    try:
        done = subprocess.run(  # noqa: S603 - the commands are written in this directory
            argv,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=60,
            check=False,
        )
    except OSError:
        return ""
    return done.stdout.decode(errors="replace").strip()


def first_line(text: str) -> str:
    """Return the first line that is not empty, or '?'."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "?")


# --- Caches and trees of files


def warm(directory: Path) -> None:
    """Read every file once, so that the page cache holds it."""
    buffer = bytearray(READ_SIZE_BYTES)
    for path in files_of(directory):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def flush() -> float:
    """Write all dirty pages to disk; return the seconds it took."""
    started = time.perf_counter()
    os.sync()
    return time.perf_counter() - started


def drop_caches() -> None:
    """Empty the kernel's caches of files.

    Raises:
        BenchError: This needs root.
    """
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
    except PermissionError as error:
        raise BenchError("dropping the page cache needs root") from error


def prefault(size_bytes: int) -> None:
    """Touch and free memory, so that the next step finds pages that are really there.

    A virtual machine gives free memory back to its host, and the first touch of a page then costs
    several times the write that is measured. At most half of the available memory is touched, by
    another process, since this one must stay small.
    """
    available = int(_field(Path("/proc/meminfo"), "MemAvailable").split()[0]) * 1024
    length = min(size_bytes, available // 2)
    if length > 0:
        code = "import mmap, sys; mmap.mmap(-1, int(sys.argv[1]), flags=int(sys.argv[2]))"
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        capture(sys.executable, "-c", code, str(length), str(int(flags)))


def files_of(directory: Path) -> list[Path]:
    """Return all regular files below a directory, in a fixed order."""
    return sorted(path for path in directory.rglob("*") if path.is_file() and not path.is_symlink())


def tree_bytes(directory: Path) -> int:
    """Return the logical size of all files below a directory."""
    return sum(path.stat().st_size for path in files_of(directory))


def stored_size(directory: Path) -> StoredSize:
    """Return the space that all files below a directory take."""
    stats = [path.stat() for path in files_of(directory)]
    return StoredSize(
        apparent_bytes=sum(stat.st_size for stat in stats),
        allocated_bytes=sum(stat.st_blocks * 512 for stat in stats),
        files=len(stats),
    )


def require_same(expected: Path, actual: Path) -> None:
    """Compare two trees of files byte for byte.

    Raises:
        BenchError: They differ; the message names the first file that does.
    """
    names = [path.relative_to(expected) for path in files_of(expected)]
    restored = [path.relative_to(actual) for path in files_of(actual)]
    if names != restored:
        odd = sorted(set(names) ^ set(restored))
        raise BenchError(f"{actual}: not the files of {expected}; first difference: {odd[0]}")
    for name in names:
        _require_same_file(expected / name, actual / name)


def _require_same_file(expected: Path, actual: Path) -> None:
    offset = 0
    with expected.open("rb", buffering=0) as left, actual.open("rb", buffering=0) as right:
        while True:
            wanted, got = left.read(COMPARE_SIZE_BYTES), right.read(COMPARE_SIZE_BYTES)
            if wanted != got:
                raise BenchError(f"{actual}: differs from {expected} in the MiB at {offset}")
            if not wanted:
                return
            offset += len(wanted)


# --- The machine


def machine(directory: Path) -> dict[str, object]:
    """Describe this machine, and the filesystem that holds `directory`."""
    return {
        "cpu_model": _field(Path("/proc/cpuinfo"), "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "filesystem": filesystem(directory),
        "python": platform.python_version(),
        "load_average": list(os.getloadavg()),
    }


def _field(path: Path, name: str) -> str:
    """Return the value of the first `name: value` line of a file in /proc."""
    for line in path.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "unknown"


def filesystem(directory: Path) -> str:
    """Return the type and the options of the mount that holds a directory."""
    target = str(directory.resolve())
    best, answer = -1, "unknown"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, kind, options = line.split()[:4]
        inside = target == mount or target.startswith(mount.rstrip("/") + "/")
        # The last of several mounts on one place hides the others, hence >=.
        if inside and len(mount) >= best:
            best, answer = len(mount), f"{kind} ({options})"
    return answer


def revision() -> str:
    """Return the commit of this repository, marked when the work tree differs from it."""
    return capture("git", "describe", "--always", "--dirty", "--abbrev=40", cwd=ROOT) or "unknown"


# --- Numbers and tables


def median_of(samples: Iterable[dict[str, object]], key: str) -> float | None:
    """Return the median of one number over samples, or None when none has it."""
    values = [value for item in samples if isinstance(value := item.get(key), int | float)]
    return statistics.median(values) if values else None


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table whose columns line up as plain text too."""
    cells = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in cells
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def targets_table(targets: Iterable[Target]) -> str:
    """Return the targets as a Markdown table; what could not be judged is said so."""
    words = {True: "pass", False: "MISS", None: "not measured"}
    rows = [(words[item.passed], item.what, item.bound, item.measured) for item in targets]
    return markdown_table(("result", "what", "target", "measured"), rows)


def attempt(step: Callable[[], object]) -> str | None:
    """Run a step that may fail; return the reason on one line, or None when it worked."""
    try:
        step()
    except (BenchError, OSError) as error:
        return one_line(error)
    return None


def one_line(error: Exception) -> str:
    """Return what failed and the last that was said about it, which is where the cause is."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join(dict.fromkeys([*lines[:1], *lines[-1:]]))
