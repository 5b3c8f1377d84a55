#!/usr/bin/env python3
"""Follow one slowly changing dump over its generations: growth, and restore speed at the end.

    generations.py [--generations 10] [--size-mib 512] [--rounds 5] [--out RESULT.json]

A dump of a page image and a rank of tensors, half each, is pushed again and again. Each generation
rewrites about 5 % of both in scattered runs of pages, and gets one insertion: an odd number of
values into the rank in even generations, an odd number of pages into the image in odd ones. A store
that deduplicates each push against all before it scatters the later generations over many packs;
restoring the last one shows what that costs. It should be at least 0.8 times as fast as the first.

The first and the last generation are restored in turns, in the state that `local.py` describes, and
compared with their sources outside the timed part.
"""

import argparse
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from tools.bench import measure
from tools.bench.gen import (
    MIB,
    PAGE,
    Bytes,
    Rng,
    bf16,
    bf16_pages,
    pages,
    rewrite_runs,
    tensors,
    write,
)
from tools.bench.measure import GB, MB, BenchError, Report, Target, median_of
from tools.bench.peers import Peer, all_peers, client_state

SPEED_RATIO = 0.8
REWRITTEN_SHARE = 0.05
RUN_PAGES_MAX = 64
INSERTED_PAGES_MAX = 64
INSERTED_BYTES_MAX = 1 << 18

Sample = dict[str, object]


@dataclass
class Dump:
    """The state of the dump in memory; `step` moves it to the next generation."""

    image: Bytes
    rank: Bytes
    rng: Rng
    generation: int = 1

    @classmethod
    def first(cls, size_bytes: int, seed: int) -> "Dump":
        """Make the first generation, with the mix of pages and tensors of gen.py."""
        half = size_bytes // 2
        image = pages(np.random.default_rng([seed, 1]), half // PAGE)
        rank = np.concatenate(tensors(np.random.default_rng([seed, 3]), half))
        return cls(image, rank, np.random.default_rng([seed, 200]))

    def step(self) -> int:
        """Move to the next generation; return the number of new bytes."""
        self.generation += 1
        target = int(len(self.image) * REWRITTEN_SHARE)
        done = rewrite_runs(self.rng, self.image, target, RUN_PAGES_MAX)
        # The whole pages of the rank, seen as rows, so that its runs are rewritten the same way.
        rows = self.rank[: len(self.rank) // PAGE * PAGE].reshape(-1, PAGE)
        done += rewrite_runs(self.rng, rows, int(len(rows) * REWRITTEN_SHARE), RUN_PAGES_MAX)
        return done * PAGE + (self._insert_pages() if self.generation % 2 else self._insert_bytes())

    def _insert_pages(self) -> int:
        """Insert an odd number of pages into the image."""
        count = int(self.rng.integers(0, INSERTED_PAGES_MAX // 2)) * 2 + 1
        at = int(self.rng.integers(0, len(self.image)))
        inserted = bf16_pages(self.rng, count)
        self.image = np.concatenate((self.image[:at], inserted, self.image[at:]))
        return inserted.nbytes

    def _insert_bytes(self) -> int:
        """Insert values into the rank, so that what follows leaves the grid of pages."""
        count = int(self.rng.integers(1, INSERTED_BYTES_MAX // 4)) * 2 + 1
        at = int(self.rng.integers(0, len(self.rank))) // 2 * 2
        inserted = bf16(self.rng, count)
        self.rank = np.concatenate((self.rank[:at], inserted, self.rank[at:]))
        return inserted.nbytes

    def write(self, directory: Path) -> None:
        """Write the dump as a directory of a snapshot."""
        directory.mkdir(parents=True)
        write(directory / "pages-1.img", self.image)
        write(directory / "rank0.bin", self.rank)


@dataclass
class Run:
    """One benchmark: the peer, its store, and what was found so far."""

    peer: Peer[Path]
    work: Path
    prefault_bytes: int
    samples: list[Sample] = field(default_factory=list)

    @property
    def store(self) -> Path:
        """The one store of all generations."""
        return self.work / "store"

    @property
    def log(self) -> Path:
        """The output of the last command."""
        return self.work / "command.log"

    def source(self, generation: int) -> Path:
        """Where a generation lies as files."""
        return self.work / f"generation-{generation}"

    def settle(self, source: Path) -> None:
        """Bring the caches into the stated condition."""
        measure.flush()
        measure.warm(source)
        measure.prefault(self.prefault_bytes)


def ref(generation: int) -> str:
    """Return the name under which a generation is pushed."""
    return f"gen/{generation}"


def push_all(run: Run, dump: Dump, generations: int) -> None:
    """Push every generation; keep the files of the first and the last only."""
    run.store.mkdir(parents=True)
    made = run.peer.init(run.store)
    if made is not None:
        measure.run_measured(made, run.log)
    before = 0
    for generation in range(1, generations + 1):
        new = dump.step() if generation > 1 else dump.image.nbytes + dump.rank.nbytes
        source = run.source(generation)
        dump.write(source)
        run.settle(source)
        usage = measure.run_measured(run.peer.push(source, run.store, ref(generation)), run.log)
        stored = measure.stored_size(run.store)
        sample: Sample = {"step": "push", "generation": generation, "new_bytes": new}
        sample |= {"raw_bytes": measure.tree_bytes(source), **asdict(usage)}
        sample["growth_bytes"] = stored.apparent_bytes - before
        run.samples.append(sample | {"stored": asdict(stored)})
        before = stored.apparent_bytes
        if generation not in (1, generations):
            shutil.rmtree(source)


def restore_rounds(run: Run, generations: int, rounds: int) -> None:
    """Restore the first and the last generation in turns, the first of a round alternating."""
    target = run.work / "restored"
    for number in range(rounds):
        order = (1, generations) if number % 2 == 0 else (generations, 1)
        for generation in order:
            source = run.source(generation)
            run.settle(source)
            command = run.peer.restore(ref(generation), run.store, target)
            usage = measure.run_measured(command, run.log)
            measure.require_same(source, target)
            shutil.rmtree(target)
            sample: Sample = {"step": "restore", "generation": generation, "round": number}
            size = measure.tree_bytes(source)
            sample |= {"raw_bytes": size, "bytes_per_s": size / usage.wall_s, **asdict(usage)}
            run.samples.append(sample)


def speed(report: Report, generation: int) -> float:
    """Return the median speed of restoring a generation, in bytes a second."""
    own = [item for item in report.samples if item["step"] == "restore"]
    found = median_of([item for item in own if item["generation"] == generation], "bytes_per_s")
    if found is None:
        raise BenchError(f"generation {generation} was never restored")
    return found


def judge(report: Report, generations: int) -> None:
    """Fill in the medians and the target."""
    first, last = speed(report, 1), speed(report, generations)
    ratio = last / first
    report.summary = {"first_bytes_per_s": first, "last_bytes_per_s": last, "ratio": ratio}
    what = f"pull of generation {generations} against the first"
    measured = f"{ratio:.2f} x ({last / GB:.2f} and {first / GB:.2f} GB/s)"
    report.targets = [Target(what, f">= {SPEED_RATIO} x", measured, ratio >= SPEED_RATIO)]


def rows(report: Report) -> Iterator[list[str]]:
    """Format every push."""
    for item in report.samples:
        if item["step"] == "push":
            new, growth, wall = (item[key] for key in ("new_bytes", "growth_bytes", "wall_s"))
            assert isinstance(new, int)
            assert isinstance(growth, int)
            assert isinstance(wall, float)
            yield [str(item["generation"]), f"{new / MB:.1f}", f"{growth / MB:.1f}", f"{wall:.2f}"]


def markdown(report: Report, peer: Peer[Path]) -> str:
    """Return the whole result as Markdown."""
    header = ("generation", "new MB", "stored growth MB", "push s")
    title = f"Generations, {report.date}, {report.versions[peer.name]}"
    where = f"{report.machine['cpu_model']}, {report.machine['cores']} cores"
    parts = [
        f"{title}; {where}, {report.machine['filesystem']}.",
        measure.markdown_table(header, rows(report)),
        measure.targets_table(report.targets),
    ]
    return "\n\n".join(parts) + "\n"


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--generations", type=int, default=10)
    add("--size-mib", type=int, default=512, help="size of the first generation")
    add("--rounds", type=int, default=5, help="restores of the first and of the last generation")
    add("--seed", type=int, default=1)
    add("--peer", default="snapstore", help="the row of the comparison to follow")
    add("--out", type=Path, default=measure.CACHE / "generations.json", help="where the JSON goes")
    add("--markdown", type=Path, help="where to write the table too")
    add("--work", type=Path, default=measure.CACHE / "work", help="scratch, on the measured disk")
    add("--prefix", type=Path, default=measure.CACHE, help="where install_peers.sh put the peers")
    add("--snapstore", type=Path, default=measure.ROOT / ".venv/bin/snapstore")
    add("--prefault-mib", type=int, default=2048, help="memory to touch before each step")
    return parser.parse_args()


def bench(options: argparse.Namespace) -> None:
    """Measure, judge and report.

    Raises:
        BenchError: The peer cannot be had, or one of its commands failed.
    """
    peers = all_peers(options.prefix.resolve(), options.snapstore.absolute())
    peer = next((peer for peer in peers if peer.name == options.peer), None)
    reason = f"no peer {options.peer!r} is known" if peer is None else peer.missing()
    if peer is None or reason is not None:
        raise BenchError(str(reason))
    work = options.work.resolve() / "generations"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    keys = ("generations", "size_mib", "rounds", "seed", "prefault_mib")
    conditions = {key: getattr(options, key) for key in keys}
    run = Run(peer, work, options.prefault_mib << 20)
    report = Report("generations", measure.machine(work), conditions, samples=run.samples)
    report.versions[peer.name] = peer.version()
    try:
        push_all(run, Dump.first(options.size_mib * MIB, options.seed), options.generations)
        restore_rounds(run, options.generations, options.rounds)
    finally:
        shutil.rmtree(client_state(run.store), ignore_errors=True)
        shutil.rmtree(work, ignore_errors=True)
    judge(report, options.generations)
    report.write(options.out)
    text = markdown(report, peer)
    print(text)
    if options.markdown:
        options.markdown.parent.mkdir(parents=True, exist_ok=True)
        options.markdown.write_text(text)


def main() -> None:
    """Run the benchmark; exit 1 when it could not be done."""
    try:
        bench(parse())
    except BenchError as error:
        sys.exit(f"generations.py: {error}")


if __name__ == "__main__":
    main()
