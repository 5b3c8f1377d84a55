"""Read a page image out of a store as a lazy restore does: long ranges by threads, and faults.

    python -m tools.bench.ranges DIR [--file FILE] [--size-mib 512] [--rounds 5] [--out RESULT.json]

A page image with the mix of gen.py, or FILE, is pushed into stores below DIR, which should be on a
tmpfs so that no disk is measured. For each compression and integrity, 1 and 2 threads take the
ranges of the file in turns; each reads into its own page-aligned buffer and uses it again, so what
is timed is what comes before a UFFDIO_COPY. The first round compares every byte with the file and
is not timed; each opens the store anew, so that no frame is in the cache. GB/s count the bytes of
the ranges of data, not the zeros between them.

Faults are single threads that read 4 KiB and 64 KiB at random places through the cache, the first
time and again. Needs the packages of snapstore.
"""

import argparse
import collections
import json
import mmap
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

import snapstore
from snapstore.cli.program import SWITCH_INTERVAL_S
from snapstore.options import Compression, Integrity, StoreOptions
from tools.bench import measure
from tools.bench.gen import MIB, PAGE, pages, write
from tools.bench.measure import GB, BenchError, Report, Target

NAME = "pages-1.img"
FAULT_SIZES = (PAGE, 16 * PAGE)
FAULTS = 400
PACKAGES = ("blake3", "numpy", "xxhash", "zstandard")
TARGETS_GB_S = {"none": 1.8, "auto": 1.2}
"""With strong integrity and two threads: what a restore needs to be bound by the kernel's copy."""

Sample = dict[str, object]


@dataclass(frozen=True)
class Bench:
    """One source and the directory for its stores."""

    source: Path
    work: Path
    rounds: int

    def samples(self) -> Iterator[Sample]:
        """Measure everything, one sample after the other."""
        for compression in (Compression.NONE, Compression.AUTO):
            url = str(self.work / f"store-{compression.value}")
            with snapstore.init_store(url, StoreOptions(compression=compression)) as store:
                store.push(self.source.parent, "bench:v1")
            for integrity in Integrity:
                about = {"compression": compression.value, "integrity": integrity.value}
                options = StoreOptions(integrity=integrity)
                for threads in (1, 2):
                    yield {**about, **self._stream(url, options, threads)}
                for size in FAULT_SIZES:
                    with snapstore.open_store(url, options) as store:
                        yield {**about, **self._fault(store, size)}

    def _stream(self, url: str, options: StoreOptions, threads: int) -> Sample:
        walls, cpus, divided = [], [], []
        buffers: list[mmap.mmap] = []
        data: list[snapstore.FileRange] = []
        for number in range(self.rounds + 1):
            # Opened anew, so that no frame is in the cache yet.
            with snapstore.open_store(url, options) as store:
                file = store.snapshot("bench:v1").open(NAME)
                file.ranges()  # loads the tables of the rank
                started = time.perf_counter()
                data = [one for one in file.ranges() if not one.is_zeros]
                divided.append(time.perf_counter() - started)
                longest = max(one.length for one in data)
                buffers = buffers or [mmap.mmap(-1, longest) for _ in range(threads)]
                if number:
                    wall_s, cpu_s = Reading(file, data, buffers).time()
                    walls.append(wall_s)
                    cpus.append(cpu_s)
                else:
                    Reading(file, data, buffers[:1]).compare(self.source)
        data_bytes = sum(one.length for one in data)
        return {
            "what": "ranges",
            "threads": threads,
            "ranges": len(data),
            "divide_s": min(divided),
            "data_bytes": data_bytes,
            "wall_s": walls,
            "cpu_s": cpus,
            "cpu_s_per_gb": min(cpus) / data_bytes * GB,
            "best_gb_s": data_bytes / min(walls) / GB,
            "median_gb_s": data_bytes / statistics.median(walls) / GB,
        }

    def _fault(self, store: snapstore.Store, size: int) -> Sample:
        file = store.snapshot("bench:v1").open(NAME)
        rng = random.Random(size)  # noqa: S311 - only has to be the same each time
        ranges = [one for one in file.ranges() if not one.is_zeros]
        buffer = memoryview(mmap.mmap(-1, size))
        first: list[float] = []
        again: list[float] = []
        for _ in range(FAULTS):
            one = rng.choice(ranges)
            offset = one.offset + rng.randrange(one.length // PAGE) * PAGE
            offset = min(offset, file.size_bytes - size)
            for times in (first, again):
                started = time.perf_counter()
                file.read_into(offset, buffer)
                times.append((time.perf_counter() - started) * 1e6)
        return {
            "what": "faults",
            "size_bytes": size,
            "first_median_us": statistics.median(first),
            "first_p99_us": sorted(first)[FAULTS * 99 // 100],
            "again_median_us": statistics.median(again),
        }


class Reading:
    """One pass over all ranges by as many threads as there are buffers."""

    def __init__(
        self,
        file: snapstore.SnapshotFile,
        ranges: list[snapstore.FileRange],
        buffers: list[mmap.mmap],
    ) -> None:
        self._file = file
        self._left = collections.deque(ranges)
        self._buffers = buffers

    def time(self) -> tuple[float, float]:
        """Read all ranges and tell how long it took, and how much processor time."""
        with ThreadPoolExecutor(len(self._buffers)) as threads:
            started, cpu_started = time.perf_counter(), time.process_time()
            list(threads.map(self._read_all, self._buffers))
            return time.perf_counter() - started, time.process_time() - cpu_started

    def compare(self, source: Path) -> None:
        """Read all ranges and compare them with the file.

        Raises:
            BenchError: They differ.
        """
        truth = np.memmap(source, np.uint8, "r")
        for one, view in self._read(self._buffers[0]):
            expected = truth[one.offset : one.offset + one.length]
            if not np.array_equal(np.frombuffer(view, np.uint8), expected):
                raise BenchError(f"{source}: other bytes came back at {one.offset}")

    def _read_all(self, buffer: mmap.mmap) -> None:
        collections.deque(self._read(buffer), maxlen=0)

    def _read(self, buffer: mmap.mmap) -> Iterator[tuple[snapstore.FileRange, memoryview]]:
        while True:
            try:
                one = self._left.popleft()
            except IndexError:
                return
            view = memoryview(buffer)[: one.length]
            self._file.read_into(one.offset, view, streaming=True)
            yield one, view


def targets_of(samples: list[Sample]) -> list[Target]:
    """Judge the speeds of two threads with strong integrity, by the median."""
    found = []
    for sample in samples:
        wanted = TARGETS_GB_S[str(sample["compression"])]
        if (sample["what"], sample["integrity"], sample.get("threads")) == ("ranges", "strong", 2):
            speed = float(str(sample["median_gb_s"]))
            what = f"two threads, strong, {sample['compression']}"
            found.append(Target(what, f">= {wanted} GB/s", f"{speed:.2f} GB/s", speed >= wanted))
    return found


def tables(samples: list[Sample]) -> str:
    """Return what was measured for people."""
    streams = [
        [str(one[key]) for key in ("compression", "integrity", "threads")]
        + [f"{one[key]:.2f}" for key in ("best_gb_s", "median_gb_s", "cpu_s_per_gb")]
        for one in samples
        if one["what"] == "ranges"
    ]
    faults = [
        [str(one[key]) for key in ("compression", "integrity", "size_bytes")]
        + [f"{one[key]:.0f}" for key in ("first_median_us", "first_p99_us", "again_median_us")]
        for one in samples
        if one["what"] == "faults"
    ]
    head = ("compression", "integrity")
    return "\n\n".join(
        (
            measure.markdown_table(
                (*head, "threads", "best GB/s", "median GB/s", "CPU s/GB"), streams
            ),
            measure.markdown_table(
                (*head, "bytes", "median us", "p99 us", "median us again"), faults
            ),
        )
    )


def main() -> int:
    """Measure, print JSON to stdout and tables to stderr; fail if a target is missed."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--file", type=Path)
    parser.add_argument("--size-mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report = Report("ranges", measure.machine(options.directory), {"rounds": options.rounds})
    report.versions = {name: version(name) for name in ("snapstore", *PACKAGES)}
    with tempfile.TemporaryDirectory(prefix="ranges-", dir=options.directory) as folder:
        source = Path(folder) / "source" / NAME
        source.parent.mkdir()
        if options.file is None:
            write(source, pages(np.random.default_rng([1, 1]), options.size_mib * MIB // PAGE))
        else:
            write(source, np.fromfile(options.file, np.uint8))
        report.conditions |= {
            "source": "gen.pages" if options.file is None else options.file.name,
            "source_bytes": source.stat().st_size,
        }
        report.samples = list(Bench(source, Path(folder), options.rounds).samples())
    report.targets = targets_of(report.samples)
    report.conditions["load_average_after"] = measure.machine(options.directory)["load_average"]
    if options.out is not None:
        report.write(options.out)
    print(json.dumps({"samples": report.samples, "machine": report.machine}, indent=1))
    print(f"{tables(report.samples)}\n\n{measure.targets_table(report.targets)}", file=sys.stderr)
    return 0 if all(target.passed for target in report.targets) else 1


if __name__ == "__main__":
    sys.exit(main())
