"""All GPUs of a machine at once: filled from a store and from a cache, and restored whole.

    python -m tools.gpu.eight [--parts pinned,stream] [--gpus 8] [--out eight.json]
    python -m tools.gpu.eight --merge one.json two.json

For any number of GPUs, of which it takes all unless told otherwise; sizes are what fits, up to
those that are wanted. Needs root and CRIU (`$SNAPAGENT_CRIU`), and torch for restores with NCCL.

    pinned    all GPUs copying page-locked memory at once, and 1, 2, 4 and so on of them
    stream    the same filled from a store in memory and from registered files; what holds it back
    restore   a process for each rank: captured, ended, restored from a store, all-reduce compared
    cached    the same from registered files of a node cache beside the store
    restores  the same, smaller, with 1, 2, 4 and so on ranks
    resident  the same through the daemon, which fills the cache and locks its pages by itself

The result is written again and again, so that a run that is cut short loses nothing but what it
was at; it ends itself after `--limit` seconds. `--merge` puts together what several runs found.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from snapagent.gpu.driver import load_driver
from snapagent.gpu.facts import driver_build
from snapagent.linux import processes
from snapstore.cli.program import SWITCH_INTERVAL_S
from tools.gpu import streams
from tools.gpu.compared import Targets, concluded, counts_of
from tools.gpu.pinned import pinned_rate
from tools.gpu.report import make_report, save_report
from tools.gpu.resident import run_resident
from tools.gpu.room import Machine, fitting_gib, memory_folder
from tools.gpu.whole import WholeOptions, run_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from snapagent.gpu.driver import Driver

GIB: Final = 1 << 30
_GRACE_S: Final = 25
"""From the end of the time until everything is killed: removing much memory takes a while."""
_HOST_SHARE: Final = 0.9
_FILES_MAX: Final = 1 << 16
_RANK_BYTES: Final = {"torch": 7 * GIB, "driver": GIB // 2}
"""Of the host for each rank: 2 GiB that torch lives in, as much in store and cache, and some."""
_STREAM_BYTES: Final = GIB // 2
"""Of the host for each GPU that is only filled: page-locked memory and children."""


class TimeUp(BaseException):
    """The time is over: ends whatever is under way, and is caught by nobody else."""


class Run:
    """What is measured, and what was found until now."""

    def __init__(self, options: argparse.Namespace, driver: Driver) -> None:
        """Look at the machine."""
        self.options = options
        self.driver = driver
        self.machine = Machine.here(driver)
        self.gpus: int = min(options.gpus or len(driver.devices), len(driver.devices))
        self.ranks: int = options.ranks or self.gpus
        self.folder = Path()
        self.folder_bytes = 0
        self.parts: dict[str, Any] = {}
        self._began = time.monotonic()
        self._report = make_report(
            "eight",
            driver,
            {
                "free": dataclasses.asdict(self.machine),
                "driver_build": driver_build(),
                "gpus_used": self.gpus,
                "command": sys.argv[1:],
                "parts": self.parts,
            },
        )

    def say(self, what: str) -> None:
        """Tell how far it is, and write down what is known."""
        print(f"{time.monotonic() - self._began:.1f} s: {what}", file=sys.stderr, flush=True)
        self.save()

    def save(self) -> None:
        """Write down what is known."""
        # Other threads may put something into it meanwhile: then the next time has it.
        with contextlib.suppress(RuntimeError):
            save_report(self.options.out, self._report)

    def conclude(self) -> None:
        """Say what it means."""
        self._report["conclusions"] = concluded(self.parts, targets(self.options))

    def gib_for(
        self, wanted: float, *, ranks: int, gpus: int, copies: int, rank_bytes: int
    ) -> float:
        """Return what fits of what is wanted for each rank."""
        return fitting_gib(
            wanted,
            self.machine,
            ranks=ranks,
            gpus=gpus,
            copies=copies,
            rank_bytes=rank_bytes,
            budget_bytes=self.budget_bytes,
            folder_bytes=self.folder_bytes,
        )

    @property
    def budget_bytes(self) -> int:
        """Of the store's buffers."""
        return int(self.options.memory * GIB)

    @property
    def code(self) -> bytes | None:
        """Kernels that are compiled already."""
        path: Path | None = self.options.code
        return path.read_bytes() if path else None


# -- parts -----------------------------------------------------------------------------------------


def part_pinned(run: Run, found: dict[str, Any]) -> None:
    """Copy page-locked memory, by more and more GPUs."""
    rows = found["rows"] = []
    with contextlib.ExitStack() as stack:
        gpus = [stack.enter_context(run.driver.open(number)) for number in range(run.gpus)]
        for count in counts_of(run.gpus):
            rate = pinned_rate(gpus[:count])
            rows.append({"gpus": count, "gb_per_s": rate.all, "each": rate.each})
            run.say(f"pinned, {count} GPUs: {rate.all} GB/s")


def part_stream(run: Run, found: dict[str, Any]) -> None:
    """Fill from a store and from registered files."""
    options = run.options
    gib = run.gib_for(
        options.stream_gib, ranks=run.gpus, gpus=run.gpus, copies=2, rank_bytes=_STREAM_BYTES
    )
    found["gib_each"] = gib
    streams.measure(
        streams.StreamsOptions(
            gpus=run.gpus,
            gib=gib,
            workers=options.workers,
            code=options.code,
            folder=run.folder,
            processes=not options.threads_only,
        ),
        found,
        run.say,
    )


def part_restore(run: Run, found: dict[str, Any]) -> None:
    """Restore all ranks from a store, twice: once more with pages that were read before."""
    wanted = run.options.store_gib
    _whole(run, found, wanted=wanted, ranks=run.ranks, restores=2, cached=0)


def part_cached(run: Run, found: dict[str, Any]) -> None:
    """Restore all ranks from registered files of a cache, twice: once more with all of it warm."""
    _whole(run, found, wanted=run.options.cache_gib, ranks=run.ranks, cached=2)


def part_restores(run: Run, found: dict[str, Any]) -> None:
    """Restore more and more ranks."""
    rows: list[dict[str, Any]] = []
    found["rows"] = rows
    for count in counts_of(run.ranks):
        rows.append(row := {"ranks": count})
        _whole(run, row, wanted=run.options.small_gib, ranks=count, cached=1)
    found["ok"] = all(row["ok"] for row in rows)


def part_resident(run: Run, found: dict[str, Any]) -> None:
    """Restore all ranks through a daemon, twice more with what it has put into its cache."""
    options = _options(run, wanted=run.options.small_gib, ranks=run.ranks, cached=2)
    run.say(f"{options.ranks} ranks on {options.gpus} GPUs, {options.gib} GiB each, by a daemon")
    with tempfile.TemporaryDirectory(prefix="resident-", dir=run.folder) as folder:
        run_resident(options, Path(folder), found, run.say)


def _whole(
    run: Run,
    found: dict[str, Any],
    *,
    wanted: float,
    ranks: int,
    restores: int = 1,
    cached: int,
) -> None:
    options = _options(run, wanted=wanted, ranks=ranks, restores=restores, cached=cached)
    run.say(f"{ranks} ranks on {options.gpus} GPUs, {options.gib} GiB each")
    with tempfile.TemporaryDirectory(prefix="whole-", dir=run.folder) as folder:
        run_whole(options, run.driver, Path(folder), found, run.say)


def _options(
    run: Run, *, wanted: float, ranks: int, restores: int = 1, cached: int
) -> WholeOptions:
    gpus = min(ranks, run.gpus)
    gib = run.gib_for(
        wanted,
        ranks=ranks,
        gpus=gpus,
        copies=2 if cached else 1,
        rank_bytes=_RANK_BYTES[run.options.engine],
    )
    return WholeOptions(
        ranks=ranks,
        gpus=gpus,
        gib=gib,
        engine=run.options.engine,
        p2p=run.options.p2p,
        restores=restores,
        cached=cached,
        budget_bytes=run.budget_bytes,
        workers=run.options.workers,
        code=run.code,
    )


PARTS: Final[dict[str, Callable[[Run, dict[str, Any]], None]]] = {
    "pinned": part_pinned,
    "stream": part_stream,
    "restore": part_restore,
    "cached": part_cached,
    "restores": part_restores,
    "resident": part_resident,
}


def run_parts(run: Run, names: Sequence[str]) -> bool:
    """Do some parts, one after the other, whatever becomes of the others; tells whether all did.

    When the time is up, what is left is named as not run.
    """
    good = True
    is_over = False
    for name in names:
        found = run.parts[name] = {}
        if is_over:
            found["error"] = "not run: the time was up"
            continue
        size = int(run.machine.host_bytes * _HOST_SHARE)
        try:
            with memory_folder(size, run.options.directory, run.options.huge) as (folder, room):
                run.folder, run.folder_bytes = folder, room
                PARTS[name](run, found)
        except TimeUp:
            is_over = True
            found["error"] = "the time was up"
        except Exception as error:  # noqa: BLE001 - is the result
            notes = getattr(error, "__notes__", [])
            found |= {"error": f"{type(error).__name__}: {error}", "notes": notes}
        good = good and "error" not in found and found.get("ok", True)
        run.conclude()
        run.say(f"{name}: {found.get('error', 'done')}")
    return good and not is_over


# -- the end of the time ---------------------------------------------------------------------------


@contextlib.contextmanager
def limited(run: Run, seconds: float) -> Iterator[None]:
    """End what is under way when the time is up, and everything if that does not help."""

    def over(_signal: int, _frame: object) -> None:
        raise TimeUp

    previous = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    last = threading.Timer(seconds + _GRACE_S, give_up, [run])
    last.daemon = True
    last.start()
    try:
        yield
    finally:
        last.cancel()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def give_up(run: Run) -> None:
    """Kill all that was started, and end."""
    print("the end of the time was not noticed: everything is killed", file=sys.stderr, flush=True)
    run.save()
    for pid in processes.descendants(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if run.folder.is_mount():
        subprocess.run(["umount", "-l", str(run.folder)], check=False)  # noqa: S603, S607
    os._exit(124)


# -- the program -----------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    has_torch = importlib.util.find_spec("torch") is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="with commas; all unless given")
    parser.add_argument("--merge", nargs="+", type=Path, help="put results of runs together")
    parser.add_argument("--gpus", type=int, default=0, help="how many; all unless given")
    parser.add_argument("--ranks", type=int, default=0, help="processes; as many unless given")
    parser.add_argument("--store-gib", type=float, default=45, help="of each rank, from a store")
    parser.add_argument("--cache-gib", type=float, default=22, help="of each, from a cache")
    parser.add_argument("--stream-gib", type=float, default=8, help="of each GPU in `stream`")
    parser.add_argument("--small-gib", type=float, default=8, help="of each rank in `restores`")
    parser.add_argument("--memory", type=float, default=4, help="GiB for buffers of the store")
    parser.add_argument("--workers", type=int, default=0, help="threads for each GPU")
    parser.add_argument("--threads-only", action="store_true", help="no process for each GPU")
    parser.add_argument("--engine", choices=["torch", "driver"], help="what ranks are made of")
    parser.add_argument("--p2p", action="store_true", help="let NCCL use peer access")
    parser.add_argument("--directory", type=Path, help="for stores; a tmpfs unless given")
    parser.add_argument("--huge", default="", help="large pages for that tmpfs: always, advise")
    parser.add_argument("--code", type=Path, help="kernels that are compiled already")
    parser.add_argument("--limit", type=float, default=560, help="seconds until it ends itself")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "."), "eight.json"))
    for field in dataclasses.fields(Targets):
        name = f"--target-{field.name.replace('_', '-')}"
        parser.add_argument(name, type=float, default=field.default)
    options = parser.parse_args(arguments)
    options.parts = [word for word in options.parts.split(",") if word]
    options.engine = options.engine or ("torch" if has_torch else "driver")
    unknown = [name for name in options.parts if name not in PARTS]
    if unknown:
        parser.error(f"there is no part {', '.join(unknown)}: there are {', '.join(PARTS)}")
    return options


def targets(options: argparse.Namespace) -> Targets:
    """Return what is wanted."""
    names = [field.name for field in dataclasses.fields(Targets)]
    return Targets(**{name: getattr(options, f"target_{name}") for name in names})


def merge(paths: Sequence[Path], options: argparse.Namespace) -> None:
    """Put the parts of several results together, the last of each name, and conclude anew."""
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    merged = dict(reports[-1])
    merged["parts"] = {}
    merged.pop("command", None)
    for report in reports:
        merged["parts"] |= {
            # A part that was merged before has these already.
            name: {"when": report["when"], "command": report.get("command")} | part
            for name, part in report["parts"].items()
        }
    merged["conclusions"] = concluded(merged["parts"], targets(options))
    save_report(options.out, merged)
    print(json.dumps(merged["conclusions"], indent=1))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; the exit code says whether all parts were done and right."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    options = parse(arguments)
    if options.merge:
        merge(options.merge, options)
        return 0
    # Every region of every rank is some descriptors, in broker, store and cache.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, _FILES_MAX), most))
    run = Run(options, load_driver())
    with limited(run, options.limit):
        good = run_parts(run, options.parts)
    run.conclude()
    run.save()
    print(options.out.read_text(encoding="utf-8"))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
