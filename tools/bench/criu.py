"""Compare the agent with CRIU alone: how soon a process answers, its memory is there, it is stored.

    python -m tools.bench.criu [--sizes 300,4096] [--rounds 5] [--out RESULT.json]

A process of so many MiB of private memory, a quarter of it zeros, a tenth text and the rest bf16
weights, is captured and restored again and again, every way once a round:

- `criu`: `criu restore` from a directory, which loads everything before the process runs;
- `criu lazy-pages`: the same beside CRIU's own daemon, which fills memory behind the process;
- `agent`: `snapagent.restore` in a process that is there already, with its store open, from a store
  of raw frames or of compressed ones, into the present namespaces or into fresh ones;
- `snapagent restore`: the command line, all of its start included;
- capturing: `criu dump` to a directory, then `snapstore push` of that directory; beside it
  `snapagent capture`, with and without `--freeze-fast`.

Directories and stores lie on `--work`, by default on a tmpfs: what is measured is the programs and
not the disk. Before each step memory is touched and freed (`measure.prefault`). Times are wall
seconds from the start of the command: `answer_s` until the process answers a request, `filled_s`
until all its memory is there, `fill_s` from the end of CRIU, when the process runs, until then;
`capture_s` until the snapshot is durable; `cpu_s` is the processor time of all programs, without
that of the process itself. After each restore the process hashes its memory, outside the timed
part, and has to find what it had.
"""

import argparse
import contextlib
import json
import resource
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from snapagent.linux.processes import adopt_orphans
from snapstore.criu import parse_dump_stats
from tools.bench import gen, measure
from tools.bench.criu_agent import (
    ResidentAgent,
    Where,
    end_restored,
    in_network_of,
    resident_agents,
)
from tools.bench.criu_report import (
    BASELINE_CAPTURE,
    BASELINE_RESTORE,
    CAPTURE,
    PACKED,
    RAW,
    Sample,
    agent_way,
    judge,
    markdown,
)
from tools.bench.local import interleaved
from tools.bench.measure import BenchError, Command, Report
from tools.live_process import (
    DEFAULT_CRIU,
    Criu,
    CriuFailedError,
    LiveProcess,
    ProcessDiedError,
)

MIB = 1 << 20
PIECE_MIB = 128
ANSWER_S_MAX = 120
POLL_S = 0.001
NAME = "bench/process:a"
PROGRAMS = measure.ROOT / ".venv/bin"


@dataclass(frozen=True)
class Setup:
    """Where things are, and the process of one size."""

    work: Path
    size_mib: int
    process: LiveProcess
    criu: Criu
    prefault_bytes: int

    @property
    def images(self) -> Path:
        """The dump that is restored."""
        return self.work / "images"

    def settle(self) -> None:
        """Bring memory into the stated condition before a timed step."""
        measure.flush()
        measure.prefault(self.prefault_bytes)

    def run(self, program: str, *arguments: str, store: str = "store") -> measure.Usage:
        """Run a command of snapstore or snapagent; its output is in `command.log`."""
        where = ("--store", str(self.work / store), "--quiet")
        command = Command((str(PROGRAMS / program), *arguments, *where))
        return measure.run_measured(command, self.work / "command.log")

    def result(self) -> dict[str, float]:
        """What the last command said in JSON."""
        result: dict[str, float] = json.loads((self.work / "command.log").read_text())
        return result


class FirstAnswer:
    """Asks a process from another thread until it answers once, and takes the time of that."""

    def __init__(self, process: LiveProcess) -> None:
        self._process = process
        self._started = time.perf_counter()
        self._answered = 0.0
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        pause = threading.Event()
        while time.perf_counter() - self._started < ANSWER_S_MAX:
            # Refused while nobody listens; reset when half a process is taken back.
            with contextlib.suppress(OSError, ValueError):
                self._process.ask("ping")
                self._answered = time.perf_counter()
                return
            pause.wait(POLL_S)

    def seconds(self) -> float:
        """Wait for the answer and return how long it took from the start.

        Raises:
            BenchError: It never came.
        """
        self._thread.join()
        if not self._answered:
            raise BenchError(f"the process did not answer within {ANSWER_S_MAX} s")
        return self._answered - self._started


# -- what is measured ------------------------------------------------------------------------------


def restore_at_once(setup: Setup) -> Sample:
    """Let CRIU load everything, then run the process."""
    answer = FirstAnswer(setup.process)
    setup.criu.restore(setup.images)
    seconds = answer.seconds()
    return {"answer_s": seconds, "filled_s": seconds}


def restore_lazily(setup: Setup) -> Sample:
    """Let CRIU's daemon fill memory behind the process."""
    answer = FirstAnswer(setup.process)
    started = time.perf_counter()
    with setup.criu.lazy_pages(setup.images) as options:
        setup.criu.restore(setup.images, *options)
        resumed = time.perf_counter() - started
    filled = time.perf_counter() - started
    return {
        "answer_s": answer.seconds(),
        "resumed_s": resumed,
        "filled_s": filled,
        "fill_s": filled - resumed,
    }


def restore_by_agent(agent: ResidentAgent, where: Where, setup: Setup) -> Sample:
    """Let a resident agent restore; what it reports is taken from the outside."""
    answers: list[float] = []
    started = time.perf_counter()
    answer = FirstAnswer(setup.process) if where == "here" else None

    def running(pid: int) -> None:
        if where == "fresh":
            in_network_of(pid, lambda: setup.process.ask("ping"))
            answers.append(time.perf_counter() - started)

    told = agent.restore(NAME, where, running)
    return {
        "answer_s": answer.seconds() if answer else answers[0],
        "resumed_s": told.running_s,
        "filled_s": told.filled_s,
        "fill_s": told.filled_s - told.running_s,
        "agent_cpu_s": told.cpu_s,
        "root_pid": told.root_pid,
    }


def restore_by_command(store: str, where: Where, setup: Setup) -> Sample:
    """Let the command line restore, into present or fresh process ids."""
    answer = FirstAnswer(setup.process)
    arguments = ("restore", NAME, "--pids", where, "--json")
    usage = setup.run("snapagent", *arguments, store=store)
    result = setup.result()
    return {
        "answer_s": answer.seconds(),
        "filled_s": usage.wall_s,
        "fill_s": result["fill_s"],
        "root_pid": result["root_pid"],
    }


def dump_and_push(setup: Setup) -> Sample:
    """Let CRIU dump to a directory while the process goes on after it, and push that."""
    images = setup.work / "dump"
    images.mkdir()
    started = time.perf_counter()
    setup.criu.dump(setup.process.pid, images, leave_running=True)
    dumped = time.perf_counter() - started
    setup.run("snapstore", "push", str(images), NAME)
    seconds = time.perf_counter() - started
    stats = parse_dump_stats((images / "stats-dump").read_bytes())
    return {"dump_s": dumped, "capture_s": seconds, "frozen_s": stats.frozen_us / 1e6}


def capture_by_command(options: tuple[str, ...], setup: Setup) -> Sample:
    """Let the command line capture straight into the store."""
    pid = str(setup.process.pid)
    usage = setup.run("snapagent", "capture", NAME, "--pid", pid, "--json", *options)
    result = setup.result()
    return {
        "dump_s": result["criu_dump_s"],
        "capture_s": usage.wall_s,
        "frozen_s": result["frozen_s"],
    }


def restored(setup: Setup, restore: Callable[[Setup], Sample], memory: str) -> Sample:
    """Time a restore, verify the process, and end it."""
    setup.settle()
    before_s = cpu_s()
    sample = restore(setup)
    sample["cpu_s"] = cpu_s() - before_s + float(str(sample.pop("agent_cpu_s", 0)))
    root_pid = int(str(sample.pop("root_pid", setup.process.pid)))
    found = in_network_of(root_pid, setup.process.memory_hash)
    end_restored(root_pid)
    if found != memory:
        raise BenchError("the restored process has other memory")
    return sample


def captured(setup: Setup, capture: Callable[[Setup], Sample]) -> Sample:
    """Time a capture into an empty store, which is removed afterwards."""
    places = [setup.work / name for name in ("store", "dump")]
    try:
        setup.run("snapstore", "init")
        setup.settle()
        before_s = cpu_s()
        sample = capture(setup)
        return sample | {"cpu_s": cpu_s() - before_s}
    finally:
        for place in places:
            shutil.rmtree(place, ignore_errors=True)


def cpu_s() -> float:
    """Return the processor time of all children that were waited for, and of theirs."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


CAPTURES: dict[str, Callable[[Setup], Sample]] = {
    BASELINE_CAPTURE: dump_and_push,
    CAPTURE: partial(capture_by_command, ()),
    f"{CAPTURE} --freeze-fast": partial(capture_by_command, ("--freeze-fast",)),
}


def restores(agents: Mapping[str, ResidentAgent]) -> dict[str, Callable[[Setup], Sample]]:
    """Return all ways to restore."""
    ways: dict[str, Callable[[Setup], Sample]] = {
        "criu": restore_at_once,
        BASELINE_RESTORE: restore_lazily,
    }
    wheres: tuple[Where, Where] = ("here", "fresh")
    for frames, agent in agents.items():
        for where in wheres:
            ways[agent_way(frames, where)] = partial(restore_by_agent, agent, where)
    for where in wheres:
        ways[f"snapagent restore, {where}"] = partial(restore_by_command, PACKED, where)
    return ways


# -- rounds ----------------------------------------------------------------------------------------


def measure_size(setup: Setup, rounds: int, parts: str) -> Iterator[Sample]:
    """Capture the process in every way, end it, and restore it in every way."""
    memory = setup.process.memory_hash()
    if "capture" in parts:
        captures = {name: partial(captured, setup, capture) for name, capture in CAPTURES.items()}
        yield from run_rounds(setup, rounds, captures)
    if "restore" not in parts:
        return
    setup.images.mkdir()
    setup.criu.dump(setup.process.pid, setup.images)
    setup.process.reap()
    for frames, compression in ((RAW, "none"), (PACKED, "auto")):
        setup.run("snapstore", "init", store=frames)
        push = ("push", str(setup.images), NAME, "--compression", compression)
        setup.run("snapstore", *push, store=frames)
    stores = {frames: setup.work / frames for frames in (RAW, PACKED)}
    with resident_agents(setup.criu.program, stores) as agents:
        steps = {
            name: partial(restored, setup, restore, memory)
            for name, restore in restores(agents).items()
        }
        for frames in agents:
            # Loads what is loaded once.
            steps[agent_way(frames, "here")]()
        yield from run_rounds(setup, rounds, steps)


def run_rounds(
    setup: Setup, rounds: int, steps: Mapping[str, Callable[[], Sample]]
) -> Iterator[Sample]:
    """Take every step once a round, each round starting with another one."""
    for number, name in interleaved(rounds, [*steps]):
        print(f"{setup.size_mib} MiB, round {number + 1} of {rounds}: {name}", file=sys.stderr)
        yield {"peer": name, "size_mib": setup.size_mib, "round": number} | steps[name]()


def write_content(path: Path, size_mib: int) -> None:
    """Write what the memory of the process shall hold; see `gen.pages`."""
    with path.open("wb") as file:
        for number, start in enumerate(range(0, size_mib, PIECE_MIB)):
            length = min(PIECE_MIB, size_mib - start) * MIB
            pages = gen.pages(np.random.default_rng([1, number]), length // gen.PAGE)
            file.write(pages.data)


@contextlib.contextmanager
def prepared(options: argparse.Namespace, work: Path, size_mib: int) -> Iterator[Setup]:
    """Start the process of one size; afterwards it is dead and its files are gone."""
    place = work / f"{size_mib}"
    home = place / "home"
    home.mkdir(parents=True)
    content = place / "content"
    try:
        write_content(content, size_mib)
        with LiveProcess(home, content=content) as process:
            content.unlink()
            yield Setup(
                place,
                size_mib,
                process,
                Criu(options.criu),
                min(options.prefault_mib, size_mib) * MIB,
            )
    finally:
        shutil.rmtree(place, ignore_errors=True)


# -- the command line ------------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--sizes", default="300,4096", help="comma-separated sizes of the process, in MiB")
    add("--rounds", type=int, default=5)
    add("--out", type=Path, default=measure.CACHE / "criu.json", help="where the JSON goes")
    add("--markdown", type=Path, help="where to write the table too")
    add("--work", type=Path, default=Path("/dev/shm/snapstore-bench"), help="scratch")  # noqa: S108
    add("--criu", type=Path, default=DEFAULT_CRIU)
    add("--parts", default="capture,restore", help="what to measure of these")
    add("--prefault-mib", type=int, default=4096, help="memory to touch before each step")
    return parser.parse_args()


def bench(options: argparse.Namespace) -> None:
    """Measure, judge and report.

    Raises:
        BenchError: A step failed, or a process came back as another.
        CriuFailedError: CRIU could not do its part.
    """
    work = options.work.resolve()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    conditions: dict[str, object] = {
        "rounds": options.rounds,
        "sizes_mib": options.sizes,
        "prefault_mib": options.prefault_mib,
        "caches": "images and stores on the file system named below, as just written",
    }
    report = Report("criu", measure.machine(work), conditions)
    report.versions["criu"] = Criu(options.criu).version()
    version = measure.capture(str(PROGRAMS / "snapstore"), "--version")
    report.versions["snapstore"] = measure.first_line(version)
    try:
        for size in options.sizes.split(","):
            with prepared(options, work, int(size)) as setup:
                for sample in measure_size(setup, options.rounds, options.parts):
                    report.samples.append(sample)
                    judge(report)
                    report.write(options.out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    text = markdown(report)
    print(text)
    if options.markdown:
        options.markdown.parent.mkdir(parents=True, exist_ok=True)
        options.markdown.write_text(text)


def main() -> None:
    """Run the benchmark; exit 1 when it could not be done."""
    adopt_orphans()
    try:
        bench(parse())
    except (BenchError, CriuFailedError, ProcessDiedError) as error:
        sys.exit(f"criu.py: {error}")


if __name__ == "__main__":
    main()
