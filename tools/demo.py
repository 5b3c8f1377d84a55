"""Show what snapstore is for: a living process into a store, its dumps deleted, and back to life.

Run it with `make demo`, or `make demo-s3` for a store in a bucket. Everything it makes lies in one
temporary folder, which is removed at the end together with the process, also after a failure or
Ctrl-C.
"""

# ruff: noqa: S603 - it runs snapstore, and itself under sudo, with no shell in between.

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import NoReturn

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from snapstore.units import MIB, format_bytes
from tools import seaweed
from tools.live_process import DEFAULT_CRIU, Criu, CriuFailedError, LiveProcess, ProcessDiedError

PROGRAMS = Path(sys.executable).parent
FIRST = "demo/process:first"
SECOND = "demo/process:second"
LIVE = "demo/process:live"
# How much of its memory the process rewrites between the two dumps.
TOUCHED_PART = 20
# Two dumps and a store that shared nothing are the most there is at any time, and some margin.
SPACE_FACTOR = 4
HASH_SHOWN = 16
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

console = Console(highlight=False)


class DemoFailedError(Exception):
    """A step did not do what the demo promises; the message says which and how."""


class Steps:
    """Prints numbered steps with what came out of each and how long it took."""

    def __init__(self) -> None:
        self._count = 0

    @contextlib.contextmanager
    def step(self, title: str) -> Iterator[None]:
        """Run the body as one step."""
        self._count += 1
        console.print(f"\n[bold]{self._count:2}  {title}[/bold]", soft_wrap=True)
        start = perf_counter()
        yield
        tell(f"[dim]{perf_counter() - start:.2f} s[/dim]")


def tell(line: str) -> None:
    """Print one line below the title of the step."""
    console.print(f"    {line}", soft_wrap=True)


def folder_size(folder: Path) -> int:
    """Add up the sizes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def check(name: str, *, expected: object, found: object) -> None:
    """Show a value that had to survive, and fail when it did not."""
    if found != expected:
        raise DemoFailedError(f"{name} was {expected} at the first dump and is {found} now")
    shown = str(found)[:HASH_SHOWN]
    tell(f"{name:<22} {shown:<18} [green]as at the first dump[/green]")


# -- the store, through its command line ----------------------------------------------------------


@dataclass(frozen=True)
class Pushed:
    """What `snapstore push --json` reports, as far as it is shown here."""

    snapshot: str
    logical_bytes: int
    new_bytes: int
    stored_bytes: int
    seconds: float


@dataclass(frozen=True)
class Pulled:
    """What `snapstore pull --json` reports, as far as it is shown here."""

    bytes: int
    seconds: float


@dataclass(frozen=True)
class Captured:
    """What `snapagent capture --json` reports, as far as it is shown here."""

    page_bytes: int
    stored_bytes: int
    frozen_s: float


@dataclass(frozen=True)
class Restored:
    """What `snapagent restore --json` reports, as far as it is shown here."""

    root_pid: int
    running_s: float
    total_s: float


@dataclass(frozen=True)
class StoreCommands:
    """The commands of snapstore and snapagent, typed as a user would type them."""

    url: str

    def init(self) -> None:
        """Make the store."""
        self._run("init", "--json", captured=True)

    def push(self, folder: Path, name: str) -> Pushed:
        """Store a folder under a name."""
        output = self._run("push", str(folder), name, "--json", captured=True)
        return msgspec.json.decode(output, type=Pushed)

    def pull(self, name: str, folder: Path) -> Pulled:
        """Write a snapshot into a new folder."""
        output = self._run("pull", name, str(folder), "--json", captured=True)
        return msgspec.json.decode(output, type=Pulled)

    def capture(self, pid: int, name: str) -> Captured:
        """Store a living process, which ends with that."""
        arguments = ["capture", "--pid", str(pid), "--stop", name, "--json"]
        output = self._run(*arguments, captured=True, program="snapagent")
        return msgspec.json.decode(output, type=Captured)

    def restore(self, name: str) -> Restored:
        """Bring a stored process back to life."""
        output = self._run("restore", name, "--json", captured=True, program="snapagent")
        return msgspec.json.decode(output, type=Restored)

    def show(self, *arguments: str) -> None:
        """Run a command with its output on the terminal."""
        self._run(*arguments, captured=False)

    def _run(self, *arguments: str, captured: bool, program: str = "snapstore") -> bytes:
        """Run one command; return its standard output when that is captured."""
        tell(f"[cyan]$ {program} {escape(' '.join(arguments))}[/cyan]")
        command = [str(PROGRAMS / program), *arguments, "--store", self.url]
        # Progress bars of the commands would fight with the lines printed here.
        stderr = subprocess.PIPE if captured else None
        stdout = subprocess.PIPE if captured else None
        result = subprocess.run(command, check=False, stdout=stdout, stderr=stderr)
        if result.returncode != 0:
            reason = (result.stderr or b"").decode(errors="replace")
            raise DemoFailedError(
                f"{program} {arguments[0]} ended with status {result.returncode}\n{reason}"
            )
        return result.stdout or b""


def show_costs(first: Pushed, second: Pushed) -> None:
    """Set the costs of the two pushes side by side."""
    table = Table(box=None, padding=(0, 2), show_edge=False)
    table.add_column("")
    for heading in ("dump", "new in it", "added to the store", "time"):
        table.add_column(heading, justify="right")
    for name, pushed in (("first", first), ("second", second)):
        sizes = (pushed.logical_bytes, pushed.new_bytes, pushed.stored_bytes)
        table.add_row(name, *(format_bytes(size) for size in sizes), f"{pushed.seconds:.2f} s")
    console.print()
    console.print(table)
    saved = 1 - second.stored_bytes / max(second.logical_bytes, 1)
    console.print(f"\n    The second dump cost {saved:.1%} less than its size.", soft_wrap=True)


# -- the demo itself ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Vitals:
    """What must be the same in a restored process as it was at the dump."""

    memory: str
    threads: object
    file_offset: object

    @classmethod
    def of(cls, process: LiveProcess) -> "Vitals":
        """Ask a process."""
        pulse = process.ask("ping")
        return cls(process.memory_hash(), pulse["threads"], pulse["file_offset"])


def dump_twice(
    steps: Steps, criu: Criu, process: LiveProcess, dumps: tuple[Path, Path], size_mib: int
) -> Vitals:
    """Dump the process while it goes on, then once more to its end; return its first vitals."""
    first, second = dumps
    vitals = Vitals.of(process)
    with steps.step("dump it with CRIU; it goes on running"):
        dump_into(criu, process, first, leave_running=True)
        tell(f"SHA-256 of its memory is {vitals.memory[:HASH_SHOWN]}…")

    with steps.step("let it work: it rewrites a part of its memory and writes to its file"):
        rewritten = process.ask(f"touch {max(size_mib // TOUCHED_PART, 1)} work")["written"]
        process.ask("note a line that the first dump knows nothing of")
        tell(f"{format_bytes(int(str(rewritten)))} rewritten, in short runs of pages all over")

    with steps.step("dump it again; this ends it"):
        dump_into(criu, process, second, leave_running=False)
        process.reap()
    return vitals


def dump_into(criu: Criu, process: LiveProcess, folder: Path, *, leave_running: bool) -> None:
    """Make one dump and tell its size."""
    folder.mkdir()
    criu.dump(process.pid, folder, leave_running=leave_running)
    tell(f"{format_bytes(folder_size(folder))} in {len(list(folder.iterdir()))} files")


def store_both(steps: Steps, store: StoreCommands, dumps: tuple[Path, Path]) -> None:
    """Push both dumps, show what they cost, and delete them."""
    first, second = dumps
    with steps.step("make a store and push the first dump"):
        store.init()
        pushed_first = store.push(first, FIRST)
    with steps.step("push the second dump: only what differs is stored"):
        pushed_second = store.push(second, SECOND)
    show_costs(pushed_first, pushed_second)

    with steps.step("delete both dumps: only the store has them now"):
        shutil.rmtree(first)
        shutil.rmtree(second)
    with steps.step("look into the store"):
        store.show("ls")
        store.show("show", FIRST)


def bring_back(
    steps: Steps,
    store: StoreCommands,
    criu: Criu,
    process: LiveProcess,
    vitals: Vitals,
    images: Path,
) -> None:
    """Pull the first snapshot, restore the process from it, and compare it with what it was."""
    with steps.step("pull the first snapshot into a new folder"):
        pulled = store.pull(FIRST, images)
        rate = pulled.bytes / max(pulled.seconds, 1e-9)
        tell(f"{format_bytes(pulled.bytes)}, {format_bytes(round(rate))} a second")
    with steps.step("restore the process from it"):
        criu.restore(images)
        tell(f"process {process.pid} is alive again")
    with steps.step("ask it who it is"):
        compare(vitals, process)


def compare(vitals: Vitals, process: LiveProcess) -> None:
    """Ask a process who it is, and fail unless it is what it was."""
    now = Vitals.of(process)
    check("SHA-256 of its memory", expected=vitals.memory, found=now.memory)
    check("threads", expected=vitals.threads, found=now.threads)
    check("offset in its file", expected=vitals.file_offset, found=now.file_offset)


def without_dumps(
    steps: Steps, store: StoreCommands, process: LiveProcess, vitals: Vitals, home: Path
) -> None:
    """Capture the process straight into the store and restore it straight out of it."""
    with steps.step("now without any dump: capture it straight into the store; this ends it"):
        captured = store.capture(process.pid, LIVE)
        process.reap()
        tell(
            f"{format_bytes(captured.page_bytes)} of memory, {format_bytes(captured.stored_bytes)}"
            f" of it new to the store; it stood still for {captured.frozen_s:.2f} s"
        )
    restored = None
    try:
        with steps.step("restore it straight out of the store"):
            restored = store.restore(LIVE)
            tell(
                f"it ran again after {restored.running_s:.2f} s, and had all of its memory after"
                f" {restored.total_s:.2f} s"
            )
        with steps.step("ask it who it is"):
            compare(vitals, process)
        with steps.step("let it end"):
            process.ask("quit")
    finally:
        if restored is not None:
            end_stranger(restored.root_pid, home)


def end_stranger(pid: int, home: Path) -> None:
    """Kill a process that is no child of ours, if it is the one that works in a folder."""
    with contextlib.suppress(OSError):
        if Path(f"/proc/{pid}/cwd").readlink() == home:
            os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def storage(steps: Steps, work: Path, *, on_s3: bool) -> Iterator[StoreCommands]:
    """Give a place for the store: a folder, or a bucket of a server that lives as long."""
    if not on_s3:
        yield StoreCommands(f"file://{work}/store")
        return
    weed = seaweed.find_weed()
    if weed is None:
        raise DemoFailedError("there is no S3 server: run `make setup`, which installs SeaweedFS")
    with contextlib.ExitStack() as running:
        with steps.step("start an S3 server"):
            server = running.enter_context(seaweed.running_server(work / "s3", weed))
            os.environ.update(seaweed.environment())
            bucket = running.enter_context(server.bucket())
            tell(f"{seaweed.version(weed)} with an empty bucket at {server.endpoint}")
        yield StoreCommands(server.url(bucket, "snapshots"))


def run_demo(work: Path, criu: Criu, size_mib: int, *, on_s3: bool) -> None:
    """Run all steps in an existing folder; leave no process behind."""
    steps = Steps()
    home = work / "home"
    home.mkdir()
    dumps = (work / "dump-1", work / "dump-2")
    with contextlib.ExitStack() as living:
        store = living.enter_context(storage(steps, work, on_s3=on_s3))
        with steps.step("start a process with threads, a listening socket and an open file"):
            process = living.enter_context(LiveProcess(home, size_mib=size_mib))
            tell(
                f"process {process.pid}, {format_bytes(size_mib * MIB)} of random memory and"
                f" some zeros, answers on port {process.port}"
            )
        vitals = dump_twice(steps, criu, process, dumps, size_mib)
        store_both(steps, store, dumps)
        bring_back(steps, store, criu, process, vitals, work / "pulled")
        without_dumps(steps, store, process, vitals, home)
    console.print("\n[bold green]Done: the process came back from the store alone.[/bold green]")


# -- start and end --------------------------------------------------------------------------------


def restart_as_root() -> NoReturn:
    """Replace this program by itself, run as root: CRIU needs that."""
    sudo = shutil.which("sudo")
    if sudo is None:
        raise DemoFailedError("CRIU needs root, and there is no sudo: run this as root")
    console.print("CRIU needs root: starting again with sudo")
    # -B: root must not leave compiled files in the user's checkout.
    command = [sudo, sys.executable, "-B", "-m", "tools.demo", *sys.argv[1:]]
    os.execv(sudo, command)  # noqa: S606


def interrupt(_signal: int, _frame: FrameType | None) -> None:
    """Treat the polite signals as Ctrl-C, so that everything is cleaned up."""
    raise KeyboardInterrupt


def start(options: argparse.Namespace) -> None:
    """Check what the demo needs, and run it in a temporary folder."""
    if os.geteuid() != 0:
        restart_as_root()
    if not options.criu.exists():
        raise DemoFailedError(f"there is no CRIU at {options.criu}: run tools/install_criu.sh")
    free = shutil.disk_usage(tempfile.gettempdir()).free
    needed = SPACE_FACTOR * options.mib * MIB
    if free < needed:
        raise DemoFailedError(
            f"{tempfile.gettempdir()} has {format_bytes(free)} free, {format_bytes(needed)} are"
            " needed: set TMPDIR to another folder, or use a smaller --mib"
        )
    criu = Criu(options.criu)
    os.environ["SNAPAGENT_CRIU"] = str(options.criu)
    with tempfile.TemporaryDirectory(prefix="snapstore-demo-") as folder:
        # The agent's record of what it did goes away with the rest.
        os.environ["SNAPAGENT_STATE_DIR"] = folder + "/state"
        console.print(f"CRIU {criu.version()}, working in {folder}")
        run_demo(Path(folder), criu, options.mib, on_s3=options.s3)


def main() -> int:
    """Run the demo; return the exit status."""
    parser = argparse.ArgumentParser(description="A living process into a store, and back.")
    parser.add_argument("--mib", type=int, default=300, help="mebibytes of memory (default 300)")
    parser.add_argument("--s3", action="store_true", help="keep the store in a bucket")
    parser.add_argument("--criu", type=Path, default=DEFAULT_CRIU, help="the CRIU program")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGHUP, interrupt)
    try:
        start(options)
    except (DemoFailedError, CriuFailedError, ProcessDiedError) as error:
        console.print(
            f"\n[bold red]The demo failed:[/bold red] {escape(str(error))}", soft_wrap=True
        )
        return EXIT_FAILED
    except KeyboardInterrupt:
        console.print("\ninterrupted; process and files are gone")
        return EXIT_INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
