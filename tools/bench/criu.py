"""Compare the agent with CRIU alone: how soon a process answers, its memory is there, it is stored.

    python -m tools.bench.criu [--sizes 300,4096] [--rounds 5] [--out RESULT.json]

A process of so many MiB of private memory, a quarter of it zeros, a tenth text and the rest bf16
weights, is captured and restored again and again, every way once a round:

- `criu`: `criu restore` from a directory, which loads everything before the process runs;
- `criu lazy-pages`: the same beside CRIU's own daemon, which fills memory behind the process;
- capturing: `criu dump` to a directory, then `snapstore push` of that directory.

Directories and stores lie on `--work`, by default on a tmpfs: what is measured is the programs and
not the disk. Before each step memory is touched and freed (`measure.prefault`). Times are wall
seconds from the start of the command: `answer_s` until the process answers a request, `filled_s`
until all its memory is there, `capture_s` until the snapshot is durable. After each restore the
process hashes its memory, outside the timed part, and has to find what it had.
"""

import argparse
import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from tools.bench import gen, measure
from tools.bench.criu_report import Sample, judge, markdown
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


@dataclass(frozen=True)
class Setup:
    """Where things are, and the process of one size."""

    work: Path
    size_mib: int
    process: LiveProcess
    criu: Criu
    snapstore: Path
    prefault_bytes: int

    @property
    def images(self) -> Path:
        """The dump that is restored."""
        return self.work / "images"

    def settle(self) -> None:
        """Bring memory into the stated condition before a timed step."""
        measure.flush()
        measure.prefault(self.prefault_bytes)

    def run_store(self, *arguments: str) -> None:
        """Run a command of snapstore."""
        store = ("--store", str(self.work / "store"), "--quiet")
        command = Command((str(self.snapstore), *arguments, *store))
        measure.run_measured(command, self.work / "command.log")


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
    return {"answer_s": answer.seconds(), "resumed_s": resumed, "filled_s": filled}


def dump_and_push(setup: Setup) -> Sample:
    """Let CRIU dump to a directory while the process goes on after it, and push that."""
    images = setup.work / "dump"
    images.mkdir()
    started = time.perf_counter()
    setup.criu.dump(setup.process.pid, images, leave_running=True)
    dumped = time.perf_counter() - started
    setup.run_store("push", str(images), NAME)
    return {"dump_s": dumped, "capture_s": time.perf_counter() - started}


def restored(setup: Setup, restore: Callable[[Setup], Sample], memory: str) -> Sample:
    """Time a restore, verify the process, and end it."""
    setup.settle()
    sample = restore(setup)
    found = setup.process.memory_hash()
    setup.process.end()
    if found != memory:
        raise BenchError(f"{restore.__name__}: the restored process has other memory")
    return sample


def captured(setup: Setup, capture: Callable[[Setup], Sample]) -> Sample:
    """Time a capture into an empty store, which is removed afterwards."""
    places = [setup.work / name for name in ("store", "dump")]
    try:
        setup.run_store("init")
        setup.settle()
        return capture(setup)
    finally:
        for place in places:
            shutil.rmtree(place, ignore_errors=True)


CAPTURES: dict[str, Callable[[Setup], Sample]] = {"criu dump, snapstore push": dump_and_push}
RESTORES: dict[str, Callable[[Setup], Sample]] = {
    "criu": restore_at_once,
    "criu lazy-pages": restore_lazily,
}


# -- rounds ----------------------------------------------------------------------------------------


def measure_size(setup: Setup, rounds: int) -> Iterator[Sample]:
    """Capture the process in every way, end it, and restore it in every way."""
    memory = setup.process.memory_hash()
    captures = {name: partial(captured, setup, capture) for name, capture in CAPTURES.items()}
    yield from run_rounds(setup, rounds, captures)
    setup.images.mkdir()
    setup.criu.dump(setup.process.pid, setup.images)
    setup.process.reap()
    restores = {
        name: partial(restored, setup, restore, memory) for name, restore in RESTORES.items()
    }
    yield from run_rounds(setup, rounds, restores)


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
                options.snapstore.absolute(),
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
    add("--snapstore", type=Path, default=measure.ROOT / ".venv/bin/snapstore")
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
    version = measure.capture(str(options.snapstore), "--version")
    report.versions["snapstore"] = measure.first_line(version)
    try:
        for size in options.sizes.split(","):
            with prepared(options, work, int(size)) as setup:
                for sample in measure_size(setup, options.rounds):
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
    try:
        bench(parse())
    except (BenchError, CriuFailedError, ProcessDiedError) as error:
        sys.exit(f"criu.py: {error}")


if __name__ == "__main__":
    main()
