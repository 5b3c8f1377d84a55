"""What the node's cache saves and costs: rates, processor time, bytes fetched; as JSON.

    python -m tools.bench.cache [--mib 512] [--rounds 5] [--processes 10] [--memory /dev/shm]

Store, targets and cache are below `--memory`, so that no disk is measured. Variants take turns in
every round. Rates are of logical bytes; processor seconds are those of all threads of the process,
for each 10^9 logical bytes. Contents are random bytes, and numbers as models have them (bf16).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import snapstore
from snapstore import CacheTier, NodeCache, StoreOptions
from snapstore.cli.program import SWITCH_INTERVAL_S
from snapstore.units import GIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["main"]

NAME = "bench/cache:v1"
FILE = "weights.bin"
HIT_READS = 50_000
PAGE = 4096
READER = Path(__file__).parents[2] / "tests" / "support" / "programs" / "cache_reader.py"


@dataclasses.dataclass(frozen=True)
class Bench:
    """One store with one snapshot of one file."""

    folder: Path
    size_bytes: int

    @property
    def url(self) -> str:
        return str(self.folder / "store")

    def push(self, content: str) -> None:
        """Make the store anew."""
        shutil.rmtree(self.folder, ignore_errors=True)
        tree = self.folder / "tree"
        tree.mkdir(parents=True)
        rng = np.random.default_rng(7)
        if content == "random":
            rng.integers(0, 256, self.size_bytes, np.uint8).tofile(tree / FILE)
        else:
            numbers = rng.standard_normal(self.size_bytes // 2, np.float32) * np.float32(0.02)
            (numbers.view(np.uint32) >> 16).astype(np.uint16).tofile(tree / FILE)
        with snapstore.init_store(self.url) as store:
            store.push(tree, NAME)
        shutil.rmtree(tree)

    def cache(self, *, packs: bool, decoded: bool) -> Path:
        """Make an empty cache."""
        for name in ("cache", "memory"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        NodeCache.init(
            self.folder / "cache",
            budget_bytes=8 * GIB if packs else 0,
            memory=self.folder / "memory" if decoded else None,
            memory_budget_bytes=8 * GIB if decoded else 0,
        ).close()
        return self.folder / "cache"

    def pull(self, cache: Path | None) -> None:
        with snapstore.open_store(self.url, StoreOptions(node_cache=cache)) as store:
            store.pull(NAME, self.folder / "out")

    def warm(self, cache: Path, tier: CacheTier) -> None:
        with snapstore.open_store(self.url, StoreOptions(node_cache=cache)) as store:
            assert store.warm(NAME, tier=tier).missed_bytes == 0


def main(arguments: list[str] | None = None) -> int:
    """Measure all and print it."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=10)
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"))  # noqa: S108
    chosen = parser.parse_args(arguments)
    report: dict[str, object] = {
        "snapstore": snapstore.VERSION,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "bytes": chosen.mib * MIB,
        "rounds": chosen.rounds,
    }
    with tempfile.TemporaryDirectory(prefix="snapstore-bench-", dir=chosen.memory) as folder:
        bench = Bench(Path(folder) / "work", chosen.mib * MIB)
        for content in ("random", "bf16"):
            bench.push(content)
            report[content] = _throughput(bench, chosen.rounds)
        report["hits"] = _hits(bench)
        report["together"] = _together(bench, chosen.processes)
    print(json.dumps(report, indent=1))
    return 0


def _throughput(bench: Bench, rounds: int) -> dict[str, dict[str, float]]:
    found: dict[str, list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for name, work in _variants(bench):
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            work()
            spent = (time.perf_counter() - wall_s, time.process_time() - cpu_s)
            found.setdefault(name, []).append(spent)
            shutil.rmtree(bench.folder / "out", ignore_errors=True)
    giga = bench.size_bytes / 1e9
    return {
        name: {
            "gb_per_s": round(giga / statistics.median(wall for wall, _ in spent), 3),
            "cpu_s_per_gb": round(statistics.median(cpu for _, cpu in spent) / giga, 3),
        }
        for name, spent in found.items()
    }


def _variants(bench: Bench) -> Iterator[tuple[str, Callable[[], None]]]:
    """What is measured in a round; the state that each needs is made before it is given."""
    yield "pull, no cache", lambda: bench.pull(None)
    packs = bench.cache(packs=True, decoded=False)
    yield "pull, packs cold", lambda: bench.pull(packs)
    yield "pull, packs warm", lambda: bench.pull(packs)
    packs_only = bench.cache(packs=True, decoded=False)
    yield "warm packs", lambda: bench.warm(packs_only, CacheTier.PACKS)
    decoded = bench.cache(packs=False, decoded=True)
    yield "warm decoded", lambda: bench.warm(decoded, CacheTier.DECODED)
    yield "warm decoded, again", lambda: bench.warm(decoded, CacheTier.DECODED)
    both = bench.cache(packs=True, decoded=True)
    yield "warm decoded, packs cold", lambda: bench.warm(both, CacheTier.DECODED)


def _hits(bench: Bench) -> dict[str, float]:
    """Microseconds for 4 KiB that are there, and the rate of 1 MiB reads one after the other."""
    cache = bench.cache(packs=False, decoded=True)
    rng = np.random.default_rng(1)
    offsets = (rng.integers(0, bench.size_bytes // PAGE, HIT_READS) * PAGE).tolist()
    with (
        snapstore.open_store(bench.url, StoreOptions(node_cache=cache)) as store,
        store.snapshot(NAME).open(FILE) as file,
    ):
        assert store.cache is not None
        with store.cache.file(file) as cached:
            assert cached.ensure(0, cached.size_bytes)
            page = bytearray(PAGE)
            piece = bytearray(MIB)
            whole = range(0, bench.size_bytes, MIB)
            return {
                "filled_us": _each(offsets, lambda at: cached.filled(at, PAGE)),
                "read_into_us": _each(offsets, lambda at: cached.read_into(at, page)),
                "bare_preadv_us": _each(offsets, lambda at: os.preadv(cached.fd, [page], at)),
                "read_into_gb_per_s": MIB
                / 1e3
                / _each(whole, lambda at: cached.read_into(at, piece)),
                "bare_preadv_gb_per_s": MIB
                / 1e3
                / _each(whole, lambda at: os.preadv(cached.fd, [piece], at)),
            }


def _each(offsets: list[int] | range, use: Callable[[int], object]) -> float:
    best = []
    for _ in range(3):
        begin_s = time.perf_counter()
        for offset in offsets:
            use(offset)
        best.append((time.perf_counter() - begin_s) / len(offsets) * 1e6)
    return round(min(best), 3)


def _together(bench: Bench, processes: int) -> dict[str, object]:
    """Bytes that many processes fetch which begin at once, of those that one fetches."""
    (one,) = _readers(bench, bench.cache(packs=False, decoded=False), "pull", 1)
    found: dict[str, object] = {"processes": processes, "one_bytes": one}
    for how, decoded in (("pull", False), ("files", True)):
        cache = bench.cache(packs=True, decoded=decoded)
        begin_s = time.perf_counter()
        fetched = _readers(bench, cache, how, processes)
        found[how] = {
            "ratio": round(sum(fetched) / one, 4),
            "seconds": round(time.perf_counter() - begin_s, 2),
        }
    return found


def _readers(bench: Bench, cache: Path, how: str, count: int) -> list[int]:
    command = [sys.executable, str(READER), how, bench.url, str(cache), NAME]
    environment = {**os.environ, "PYTHONPATH": str(READER.parents[3])}
    running = [
        subprocess.Popen(  # noqa: S603
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        for _ in range(count)
    ]
    try:
        for process in running:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in running:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        return [json.loads(process.communicate()[0])["fetched"] for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
