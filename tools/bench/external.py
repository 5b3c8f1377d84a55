"""Fill external memory out of a store, beside a parallel preadv of the same bytes.

    python -m tools.bench.external DIR [--size-mib 4096] [--rounds 5] [--out RESULT.json]

A workload's memory, random and so incompressible, is stored as raw frames into a store below DIR,
which should be on a tmpfs so that no disk is measured. In each round one after the other:

- `preadv`: threads read the packs with preadv straight into a mapping of a fresh file in memory;
- `strong`, `fast`: the broker makes memory, and it is filled as in a restore, tables loaded anew;
- `ten`: ten such restores at once, each of a tenth of the memory and with as many threads as cores;
- `ten-on-one-core`: the same on a single core.

GB/s count the same bytes. The first round compares what was filled and is not timed. CRIU has no
part in it: `docs/benchmarks/criu.md` is about that.
"""

import argparse
import contextlib
import json
import mmap
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

import snapstore
from snapagent.memory.broker import MemoryBroker
from snapagent.memory.filling import RegionFill, read_places
from snapagent.memory.lent import AdmittedSession
from snapagent.memory.storing import RegionStreams
from snapagent.workload import HostMemory
from snapstore.cli.program import SWITCH_INTERVAL_S
from snapstore.options import Compression, Integrity, StoreOptions
from tools.bench import measure
from tools.bench.gen import MIB
from tools.bench.measure import GB, BenchError, Report, Target

PART_BYTES = 8 * MIB
COPIES = 10
PACKAGES = ("blake3", "numpy", "xxhash")
WAYS = ("preadv", "strong", "fast", "ten", "ten-on-one-core")
SHARE_OF_CORES = 0.85

Sample = dict[str, object]


@dataclass(frozen=True)
class Times:
    """What one fill cost."""

    wall_s: float
    cpu_s: float


class Bench:
    """A store with memory in it, and the broker that gets it back."""

    def __init__(self, work: Path, size_bytes: int, threads: int) -> None:
        """Store `size_bytes` of memory as `whole`, and a tenth of it as `tenth`."""
        self._url = str(work / "store")
        self._threads = threads
        self._broker = MemoryBroker(work / "memory.sock")
        self._broker.start()
        self._digests: dict[str, list[int]] = {}
        self._later = contextlib.ExitStack()
        """Gives memory back, which takes the kernel long and is not timed."""
        self.bytes: dict[str, int] = {}
        """How many each way fills."""
        snapstore.init_store(self._url).close()
        try:
            self.size_bytes = self._store("whole", size_bytes)
            tenths = COPIES * self._store("tenth", size_bytes // COPIES)
            self.bytes = dict.fromkeys(WAYS, self.size_bytes)
            self.bytes |= {"ten": tenths, "ten-on-one-core": tenths}
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of all memory."""
        self._broker.close()

    def _store(self, name: str, size_bytes: int) -> int:
        """Keep memory of a workload, which is this process."""
        rng = np.random.default_rng([1, size_bytes])
        options = StoreOptions(compression=Compression.NONE)
        with contextlib.ExitStack() as stack:
            memory = stack.enter_context(HostMemory(str(self._broker.path)))
            while memory.size_bytes < size_bytes:
                block = memory.allocate(64 * MIB).numpy("uint64", 8 * MIB)
                block[:] = rng.integers(0, 1 << 63, len(block), np.uint64)
                stack.callback(id, block)  # it lives until all are stored
            memory.release()
            frozen = self._broker.freeze(os.getpid())
            self._digests[name] = [checksum(one.fd, one.length) for one in frozen[0].regions]
            store = stack.enter_context(snapstore.open_store(self._url, options))
            writer = stack.enter_context(store.begin(name))
            streams = RegionStreams(
                writer, frozen, threads=self._threads, on_error=lambda _: writer.abort()
            )
            with streams:
                streams.wait()
                writer.commit(placements=streams.placements())
            return streams.size_bytes

    # -- the ways ---------------------------------------------------------------------------------

    def preadv(self) -> None:
        """Read packs of as many bytes into a mapping of a fresh file."""
        files = sorted(Path(self._url, "packs").rglob("*"), key=lambda path: path.name)
        fds = [os.open(path, os.O_RDONLY) for path in files if path.is_file()]
        work = [
            (fd, offset, min(PART_BYTES, os.fstat(fd).st_size - offset))
            for fd in fds
            for offset in range(0, os.fstat(fd).st_size, PART_BYTES)
        ]
        memory = os.memfd_create("bench")
        self._later.callback(os.close, memory)
        os.ftruncate(memory, self.size_bytes)
        with mmap.mmap(memory, self.size_bytes) as mapped, memoryview(mapped) as view:
            begins, at = [], 0
            for fd, offset, most in work:
                length = min(most, self.size_bytes - at)
                begins.append((fd, offset, at, length))
                at += length

            def read(one: tuple[int, int, int, int]) -> None:
                fd, offset, begin, length = one
                if length:
                    with view[begin : begin + length] as into:
                        os.preadv(fd, [into], offset)

            with ThreadPoolExecutor(self._threads) as pool:
                list(pool.map(read, begins))
        for fd in fds:
            os.close(fd)

    def fill(
        self, name: str, integrity: Integrity, check: Callable[[AdmittedSession], None]
    ) -> None:
        """Fill memory as a restore does.

        Raises:
            BenchError: It failed.
        """
        errors: list[BaseException] = []
        with snapstore.open_store(self._url, StoreOptions(integrity=integrity)) as store:
            snapshot = store.snapshot(name)
            admissions = self._broker.admit(read_places(snapshot), os.getpid())
            with RegionFill(
                snapshot, admissions, threads=self._threads, on_error=errors.append
            ) as filling:
                while not filling.wait_filled(1) and not errors:
                    pass
                if errors:
                    raise BenchError(f"{name} was not filled") from errors[0]
                for session in admissions.sessions:
                    for region in session.regions:
                        self._later.callback(os.close, os.dup(region.fd))
                    check(session)
            admissions.abort()

    def ten(self, name: str = "tenth") -> None:
        """Fill ten at once."""
        threads = [
            threading.Thread(target=self.fill, args=(name, Integrity.STRONG, lambda _: None))
            for _ in range(COPIES)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def ten_on_one_core(self) -> None:
        """The same while all threads have one core between them."""
        cores = os.sched_getaffinity(0)
        # Threads have the cores of the one that starts them.
        os.sched_setaffinity(0, {min(cores)})
        try:
            self.ten()
        finally:
            os.sched_setaffinity(0, cores)

    def compare(self) -> None:
        """Fill once and compare.

        Raises:
            BenchError: Something else came back.
        """

        def check(session: AdmittedSession) -> None:
            found = [checksum(one.fd, one.length) for one in session.regions]
            if found != self._digests["whole"]:
                raise BenchError("other bytes came back")

        self.fill("whole", Integrity.STRONG, check)

    def rounds(self, count: int) -> Iterator[dict[str, Times]]:
        """Time all ways, one after the other."""
        ways: dict[str, Callable[[], None]] = {
            "preadv": self.preadv,
            "strong": lambda: self.fill("whole", Integrity.STRONG, lambda _: None),
            "fast": lambda: self.fill("whole", Integrity.FAST, lambda _: None),
            "ten": self.ten,
            "ten-on-one-core": self.ten_on_one_core,
        }
        self.compare()
        for _ in range(count):
            yield {name: self.timed(way) for name, way in ways.items()}

    def timed(self, way: Callable[[], None]) -> Times:
        """Do it, and tell what it cost."""
        self._later.close()
        started, cpu_started = time.perf_counter(), time.process_time()
        way()
        times = Times(time.perf_counter() - started, time.process_time() - cpu_started)
        self._later.close()
        return times


def checksum(fd: int, length: int) -> int:
    """Return a number that tells one content from another."""
    with mmap.mmap(fd, length) as mapped:
        values = np.frombuffer(mapped, np.uint64)
        total = int(np.bitwise_xor.reduce(values)) ^ int(values.sum(dtype=np.uint64))
        del values
    return total


def samples_of(rounds: list[dict[str, Times]], sizes: dict[str, int]) -> list[Sample]:
    """Sum the rounds up."""
    found: list[Sample] = []
    for way in WAYS:
        size_bytes, more = sizes[way], sizes[way] / sizes["preadv"]
        walls = [one[way].wall_s for one in rounds]
        ratios = [one["preadv"].wall_s / one[way].wall_s * more for one in rounds]
        cpus = [one[way].cpu_s for one in rounds]
        found.append(
            {
                "way": way,
                "wall_s": walls,
                "cpu_s": cpus,
                "median_gb_s": size_bytes / statistics.median(walls) / GB,
                "cpu_s_per_gb": statistics.median(cpus) / size_bytes * GB,
                "ratio_to_preadv": statistics.median(ratios),
                "cpu_ratio_to_preadv": statistics.median(
                    [one["preadv"].cpu_s / one[way].cpu_s * more for one in rounds]
                ),
            }
        )
    return found


def targets_of(samples: list[Sample]) -> list[Target]:
    """Judge by the medians of the ratios within a round."""
    ratios = {str(one["way"]): float(str(one["ratio_to_preadv"])) for one in samples}
    cores = len(os.sched_getaffinity(0))
    scaling = ratios["ten"] / ratios["ten-on-one-core"]
    bound = SHARE_OF_CORES * cores
    return [
        Target(
            "one fill, strong, beside a parallel preadv",
            ">= 0.8",
            f"{ratios['strong']:.2f}",
            ratios["strong"] >= 0.8,
        ),
        Target(
            f"ten fills at once on {cores} cores, beside on one",
            f">= {bound:.1f}",
            f"{scaling:.2f}",
            scaling >= bound,
        ),
    ]


def table(samples: list[Sample]) -> str:
    """Return what was measured for people."""
    columns = ("median_gb_s", "ratio_to_preadv", "cpu_s_per_gb", "cpu_ratio_to_preadv")
    rows = [[str(one["way"])] + [f"{one[key]:.2f}" for key in columns] for one in samples]
    return measure.markdown_table(("way", "GB/s", "ratio", "CPU s/GB", "CPU ratio"), rows)


def main() -> int:
    """Measure, print JSON to stdout and tables to stderr; fail if a target is missed."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--size-mib", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report = Report("external", measure.machine(options.directory), {"rounds": options.rounds})
    report.versions = {name: version(name) for name in ("snapstore", *PACKAGES)}
    with tempfile.TemporaryDirectory(prefix="external-", dir=options.directory) as folder:
        bench = Bench(Path(folder), options.size_mib * MIB, options.threads)
        with contextlib.closing(bench):
            report.conditions |= {"size_bytes": bench.bytes, "threads": options.threads}
            report.samples = samples_of(list(bench.rounds(options.rounds)), bench.bytes)
    report.targets = targets_of(report.samples)
    report.conditions["load_average_after"] = measure.machine(options.directory)["load_average"]
    if options.out is not None:
        report.write(options.out)
    print(json.dumps({"samples": report.samples, "machine": report.machine}, indent=1))
    print(f"{table(report.samples)}\n\n{measure.targets_table(report.targets)}", file=sys.stderr)
    return 0 if all(target.passed for target in report.targets) else 1


if __name__ == "__main__":
    sys.exit(main())
