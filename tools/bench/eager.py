"""Measure restores that fill all memory before the processes run, as trees with GPUs are restored.

    python -m tools.bench.eager [--processes 1,4] [--mib 1536] [--rounds 3] [--readers 2]

A tree of so many processes, each with memory of its own as `gen.pages` makes it, is restored again
and again, every way once a round:

- `criu`: CRIU alone, from a directory: each task loads its memory itself, all of them at once;
- `agent`: `snapagent.restore` with `eager`, in this process, from a store of raw frames;
- `readers`: the same where so many processes, which were started before, read the memory.

Directory and store lie on `--work`, by default on a tmpfs. `running_s` is the time from the
call until the processes run, with all of their memory; `criu_s` and `fill_s` are what the agent
says of it: CRIU up to all tasks being there, and filling from there on. After each restore all
processes hash their memory, outside the timed part, and have to find what they had.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

import snapstore
from snapagent.config import AgentConfig
from snapagent.lazy.readers import ReaderPool
from snapagent.linux.processes import adopt_orphans, children
from snapagent.restore import Restoration, RestoreRequest
from snapagent.supervision import Place
from snapstore.cli.program import SWITCH_INTERVAL_S
from tools.bench import gen, measure
from tools.bench.criu_agent import end_restored
from tools.bench.local import interleaved
from tools.bench.measure import BenchError, Report, median_of
from tools.live_process import DEFAULT_CRIU, Criu

MIB = 1 << 20
NAME = "bench/tree:a"
WAIT_S_MAX = 120
TIMES = ("running_s", "criu_s", "fill_s")
Sample = dict[str, object]


@dataclass(frozen=True)
class Setup:
    """A tree that was dumped, and where that is."""

    work: Path
    criu: Criu
    root_pid: int
    hashes: list[str]

    @property
    def images(self) -> Path:
        """What CRIU restores."""
        return self.work / "images"

    def verify(self) -> None:
        """Let all processes look at their memory.

        Raises:
            BenchError: It is other memory.
        """
        if ask(self.work / "control") != self.hashes:
            raise BenchError("the restored processes have other memory")


def ask(control: Path) -> list[str]:
    """Return the hashes of the memory of all processes."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(WAIT_S_MAX)
        connection.connect(str(control))
        connection.sendall(b"?")
        answer = b""
        while piece := connection.recv(1 << 16):
            answer += piece
    found: list[str] = json.loads(answer)
    return found


# -- the ways --------------------------------------------------------------------------------------


def by_criu(setup: Setup) -> Sample:
    """Let CRIU load everything."""
    started = time.perf_counter()
    setup.criu.restore(setup.images)
    running_s = time.perf_counter() - started
    setup.verify()
    tree = [*children(setup.root_pid), setup.root_pid]
    for pid in tree:
        os.kill(pid, signal.SIGKILL)
    for pid in reversed(tree):
        # The others become children of this process when their parent ends.
        os.waitpid(pid, 0)
    return {"running_s": running_s}


def reap() -> None:
    """Wait for all children of this process, also for those that it was left: they are dead."""
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def by_agent(
    store: snapstore.Store, config: AgentConfig, readers: ReaderPool, setup: Setup
) -> Sample:
    """Restore by the agent, out of its store."""
    place = Place(network="fresh", pids="fresh")
    request = RestoreRequest(name=NAME, place=place, eager=True, readers=readers)
    started = time.perf_counter()
    with Restoration(store, request, config) as restoration:
        restoration.start()
        running_s = time.perf_counter() - started
        restoration.wait_filled()
        done = restoration.release()
    setup.verify()
    end_restored(done.root_pid)
    fill_s = done.lazy.filling_s
    return {"running_s": running_s, "criu_s": done.criu_restore_s - fill_s, "fill_s": fill_s}


# -- rounds ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def dumped(options: argparse.Namespace, work: Path, processes: int) -> Iterator[Setup]:
    """Start a tree, dump it and push that; afterwards its files are gone."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    content = work / "content"
    pages = gen.pages(np.random.default_rng([1, 0]), options.mib * MIB // gen.PAGE)
    content.write_bytes(pages.data)
    program = Path(__file__).with_name("eager_tree.py")
    command = [sys.executable, str(program), str(work / "control"), str(processes), str(content)]
    criu = Criu(options.criu)
    try:
        with (work / "output.txt").open("ab") as output:
            process = subprocess.Popen(  # noqa: S603 - a program of ours
                command,
                cwd=work,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            hashes = first_answer(process, work)
            (work / "images").mkdir()
            criu.dump(process.pid, work / "images")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            reap()
        wanted = snapstore.StoreOptions(compression=snapstore.Compression.NONE)
        with snapstore.init_store(f"file://{work}/store", wanted) as store:
            store.push(work / "images", NAME)
        yield Setup(work, criu, process.pid, hashes)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def first_answer(process: subprocess.Popen[bytes], work: Path) -> list[str]:
    """Wait for a new tree; return the hashes of its memory."""
    deadline = time.monotonic() + WAIT_S_MAX
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            return ask(work / "control")
        time.sleep(0.02)
    raise BenchError(f"the tree did not start: {(work / 'output.txt').read_text()[-2000:]}")


def measure_tree(options: argparse.Namespace, setup: Setup, processes: int) -> Iterator[Sample]:
    """Restore one tree every way, round by round."""
    (setup.work / "run").mkdir()
    config = AgentConfig(
        criu=options.criu, run_directory=setup.work / "run", state_directory=setup.work / "state"
    )
    with (
        snapstore.open_store(f"file://{setup.work}/store") as store,
        ReaderPool(0) as none,
        ReaderPool(options.readers) as readers,
    ):
        ways: dict[str, Callable[[Setup], Sample]] = {
            "criu": by_criu,
            "agent": partial(by_agent, store, config, none),
        }
        if options.readers:
            ways["readers"] = partial(by_agent, store, config, readers)
        for number, way in interleaved(options.rounds, [*ways]):
            measure.prefault(options.mib * MIB)
            sample = ways[way](setup)
            print(f"{processes} processes, round {number}: {way}: {sample}", file=sys.stderr)
            yield {"processes": processes, "mib": options.mib, "way": way} | sample


def table(report: Report) -> str:
    """Return the medians as Markdown."""
    rows = []
    for processes, way in dict.fromkeys((one["processes"], one["way"]) for one in report.samples):
        own = [one for one in report.samples if (one["processes"], one["way"]) == (processes, way)]
        middles = [median_of(own, time) for time in TIMES]
        shown = ["-" if middle is None else f"{middle:.2f}" for middle in middles]
        rows.append([str(processes), str(way), *shown])
    return measure.markdown_table(("processes", "way", "runs s", "CRIU s", "fill s"), rows)


def main() -> None:
    """Run the benchmark; exit 1 when it could not be done."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--processes", default="1,4", help="comma-separated sizes of the tree")
    add("--mib", type=int, default=1536, help="memory of each process")
    add("--rounds", type=int, default=3)
    add("--readers", type=int, default=0, help="processes that read memory; 0 to leave that out")
    add("--out", type=Path, default=measure.CACHE / "eager.json", help="where the JSON goes")
    add("--work", type=Path, default=Path("/dev/shm/snapstore-eager"), help="scratch")  # noqa: S108
    add("--criu", type=Path, default=DEFAULT_CRIU)
    options = parser.parse_args()
    adopt_orphans()
    work = options.work.resolve()
    conditions = {"rounds": options.rounds, "mib": options.mib, "readers": options.readers}
    report = Report("eager", measure.machine(work.parent), conditions)
    report.versions["criu"] = Criu(options.criu).version()
    try:
        for processes in map(int, options.processes.split(",")):
            with dumped(options, work, processes) as setup:
                for sample in measure_tree(options, setup, processes):
                    report.samples.append(sample)
                    report.write(options.out)
    except BenchError as error:
        sys.exit(f"eager.py: {error}")
    print(table(report))


if __name__ == "__main__":
    main()
