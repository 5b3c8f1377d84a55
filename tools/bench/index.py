#!/usr/bin/env python3
"""Look chunks up in an index of 100 million, without loading it: seconds and memory.

    python -m tools.bench.index [--chunks 100000000] [--ids 100000] [--url URL] [--out RESULT.json]

An index of random ids is generated into a store, with the frames and packs that chunks of 32 KiB
would have. Half of the ids that are looked up are in it. Each measurement is a process of its own;
its memory is the peak during the batch above what it was right before. *Cold* means that no page of
the index or its copy is in the page cache.

Without `--url` the second store, which is reached through the index cache, is a directory that is
treated as if it were remote.
"""

import argparse
import dataclasses
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
from blake3 import blake3
from typing_extensions import override

from snapstore.backend import open_backend
from snapstore.backend.base import Backend, Capabilities, ObjectInfo, ObjectKind
from snapstore.backend.posix import PosixBackend
from snapstore.clock import SystemClock
from snapstore.format import index as index_format
from snapstore.format.envelope import INDEX_MAGIC, SectionInfo, encode_header
from snapstore.format.tables import Rows, id_words
from snapstore.ids import Digest
from snapstore.repository.chunk_runs import MISSING
from snapstore.repository.frames import FrameTable
from snapstore.repository.index_cache import IndexCache
from snapstore.repository.index_lookup import INDEX_READERS, IndexLookup, open_blocks
from snapstore.units import GIB, KIB, MIB, align_up
from tools.bench import measure
from tools.bench.measure import MB, BenchError, Command, Report, Target

SECONDS_MAX = 5.0
GROWTH_BYTES_MAX = 100 * MB

CHUNK_BYTES = 32 * KIB
CHUNKS_IN_FRAME = 32
FRAMES_IN_PACK = 64
FANOUT_BYTES_MAX = 16 * MIB
"""What a push allows with the default budget."""

ROWS_AT_ONCE = 1 << 18

EXPLANATION = """\
An index of {chunks:,} chunks, {index_bytes:,} bytes; batches of {ids:,} random ids, half of them in
it. *First* is the first use on a machine: opening reads and verifies the whole index, and through
the cache fetches it. *Cold* is without a page of it in the page cache. *MB* is the peak of resident
memory above what it was before. *Cache* is {elsewhere}, reached through the index cache."""

Sample = dict[str, object]


# --- Generating


@dataclasses.dataclass(frozen=True)
class Generated:
    """An index that was written, and how long it is."""

    root: Digest
    length: int


def tables(chunks: int, seed: int) -> tuple[Rows, Rows]:
    """Make the packs and frames that so many chunks would be in."""
    rng = np.random.default_rng([seed, 1])
    frame_count = -(-chunks // CHUNKS_IN_FRAME)
    pack_count = -(-frame_count // FRAMES_IN_PACK)
    packs = np.zeros(pack_count, index_format.PACK_DTYPE)
    packs["id"] = np.sort(np.frombuffer(rng.bytes(32 * pack_count), "S32")).view("V32")
    packs["length"] = FRAMES_IN_PACK * MIB + MIB
    frames = np.zeros(frame_count, index_format.FRAME_DTYPE)
    numbers = np.arange(frame_count)
    frames["pack"], frames["offset"] = numbers // FRAMES_IN_PACK, numbers % FRAMES_IN_PACK * MIB
    frames["stored_length"] = frames["plain_length"] = CHUNK_BYTES * CHUNKS_IN_FRAME
    frames["checksum"] = np.frombuffer(rng.bytes(16 * frame_count), "V16")
    return packs, frames


def chunk_rows(chunks: int, frame_count: int, seed: int) -> Iterator[Rows]:
    """Make random chunks in order of their ids, a part at a time."""
    parts = max(chunks // ROWS_AT_ONCE, 1)
    rng = np.random.default_rng([seed, 2])
    counts = rng.multinomial(chunks, np.full(parts, 1 / parts))
    for part, count in enumerate(counts.tolist()):
        low, high = (part << 64) // parts, ((part + 1) << 64) // parts
        words = np.frombuffer(rng.bytes(32 * count), "<u8").reshape(count, 4).copy()
        words[:, 0] = np.sort(rng.integers(low, high, count, np.uint64))
        rows = np.zeros(count, index_format.CHUNK_DTYPE)
        rows["id"] = words.astype(">u8").view("V32").ravel()
        places = rng.integers(0, frame_count * CHUNKS_IN_FRAME, count)
        rows["frame"] = places // CHUNKS_IN_FRAME
        rows["offset"] = places % CHUNKS_IN_FRAME * CHUNK_BYTES
        rows["length"] = CHUNK_BYTES
        yield rows


def write_index(
    path: Path, packs: Rows, frames: Rows, chunks: int, parts: Iterator[Rows]
) -> Generated:
    """Write an index without holding its chunks: the same bytes that `build_index` would give.

    All rows must be in order already.
    """
    bits = index_format.fanout_bits(chunks)
    sizes = {
        b"PACK": packs.nbytes,
        b"FRAM": frames.nbytes,
        b"FANO": 8 * ((1 << bits) + 1),
        b"CHNK": chunks * index_format.CHUNK_DTYPE.itemsize,
    }
    offsets, end = {}, 64 + 64 * len(sizes)
    for tag, size in sizes.items():
        offsets[tag] = align_up(end, 64)
        end = offsets[tag] + size
    fanout = np.zeros((1 << bits) + 1, np.uint64)
    hasher = blake3()
    with path.open("wb") as file:
        file.truncate(end)
        file.seek(offsets[b"CHNK"])
        for rows in parts:
            data = rows.view(np.uint8).data
            hasher.update(data)
            file.write(data)
            words = id_words(rows["id"])[:, 0]
            buckets = index_format.buckets_of(np.ascontiguousarray(words), bits).astype(np.intp)
            fanout[1:] += np.bincount(buckets, minlength=1 << bits).astype(np.uint64)
        np.cumsum(fanout, out=fanout)
        digests = {b"CHNK": hasher.digest()}
        for tag, table in ((b"PACK", packs), (b"FRAM", frames), (b"FANO", fanout)):
            data = table.view(np.uint8).data
            digests[tag] = blake3(data).digest()
            file.seek(offsets[tag])
            file.write(data)
        head, root = encode_header(
            INDEX_MAGIC,
            [
                SectionInfo(tag, 0, offsets[tag], size, size, digests[tag])
                for tag, size in sizes.items()
            ],
        )
        file.seek(0)
        file.write(head)
        file.flush()
        os.fsync(file.fileno())
    return Generated(root, end)


def generate(directory: Path, chunks: int, ids: int, seed: int) -> tuple[Generated, Path]:
    """Make a store with one index in it, and a file of ids to look up, every other one in it."""
    store = directory / "store"
    part = directory / "index.part"
    packs, frames = tables(chunks, seed)
    made = write_index(part, packs, frames, chunks, chunk_rows(chunks, len(frames), seed))
    name = made.root.hex
    path = store / "indexes" / name[:2] / name
    path.parent.mkdir(parents=True)
    part.rename(path)
    rng = np.random.default_rng([seed, 3])
    wanted = np.frombuffer(rng.bytes(32 * ids), "V32").copy()
    row_bytes = index_format.CHUNK_DTYPE.itemsize
    begin = made.length - chunks * row_bytes
    with path.open("rb", buffering=0) as file:
        for place, row in enumerate(np.sort(rng.integers(0, chunks, ids // 2)).tolist()):
            raw = os.pread(file.fileno(), 32, begin + row * row_bytes)
            wanted[2 * place] = np.frombuffer(raw, "V32")[0]
    rng.shuffle(wanted)
    wanted_path = directory / "ids.bin"
    wanted_path.write_bytes(wanted.tobytes())
    return made, wanted_path


# --- Measuring, in a process of its own


class _Remote(PosixBackend):
    """A directory that says of itself that it is none."""

    @property
    @override
    def capabilities(self) -> Capabilities:
        """See `Backend.capabilities`."""
        return dataclasses.replace(super().capabilities, url="remote:directory")


def open_store(url: str, *, as_remote: bool) -> Backend:
    """Open a store's storage."""
    return _Remote(Path(url)) if as_remote else open_backend(url, readonly=True)


def resident() -> tuple[int, int]:
    """Return the resident bytes of this process, now and at most since `forget_peak`."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) * 1024, int(fields["VmHWM"].split()[0]) * 1024


def forget_peak() -> int:
    """Begin a new measurement of the peak; return what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident()[0]


def all_present(packs: Rows) -> npt.NDArray[np.bool_]:
    """Say of all packs that they are there: the generated store has none."""
    return np.ones(len(packs), np.bool_)


def look_up(options: argparse.Namespace) -> Sample:
    """Open the index and look all ids up, once."""
    words = id_words(np.frombuffer(options.ids_file.read_bytes(), "V32"))
    backend = open_store(options.store, as_remote=options.as_remote)
    cache = IndexCache(options.cache, options.cache_bytes, SystemClock())
    info = ObjectInfo(options.name, options.length, 0)
    before = forget_peak()
    started = time.perf_counter()
    with ThreadPoolExecutor(INDEX_READERS) as executor:
        blocks = open_blocks(backend, info, executor, cache)
        index = IndexLookup(
            options.name,
            blocks,
            FrameTable(),
            all_present,
            fanout_bytes_max=FANOUT_BYTES_MAX,
        )
        opened_s = time.perf_counter() - started
        opening_bytes = resident()[1] - before
        before = forget_peak()
        started = time.perf_counter()
        places = index.lookup(words)
        batch_s = time.perf_counter() - started
        growth = resident()[1] - before
    backend.close()
    return {
        "open_s": opened_s,
        "open_growth_bytes": opening_bytes,
        "batch_s": batch_s,
        "growth_bytes": growth,
        "found": int((places.frames != MISSING).sum()),
        "looked_up": len(words),
    }


# --- The whole benchmark


def evict(*directories: Path) -> None:
    """Take all files below some directories out of the page cache."""
    os.sync()
    for directory in directories:
        for path in measure.files_of(directory):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Bench:
    """The store, the index in it, and what was measured."""

    def __init__(self, options: argparse.Namespace, work: Path, report: Report) -> None:
        self.options = options
        self.work = work
        self.report = report
        started = time.perf_counter()
        self.made, self.ids = generate(work, options.chunks, options.ids, options.seed)
        report.summary["generated_s"] = time.perf_counter() - started
        report.summary["index_bytes"] = self.made.length

    def run(self, where: str, state: str, store: str, *, as_remote: bool = False) -> None:
        """Measure one look-up in a process of its own.

        Raises:
            BenchError: It failed, or did not find what is there.
        """
        cache = self.work / f"cache-{where}"
        cache.mkdir(exist_ok=True)
        if state == "cold":
            evict(self.work / "store", cache)
        argv = [sys.executable, "-m", "tools.bench.index", "--measure", "--store", store]
        argv += ["--name", self.made.root.hex, "--length", str(self.made.length)]
        argv += ["--ids-file", str(self.ids), "--cache", str(cache)]
        argv += ["--cache-bytes", str(self.options.cache_bytes)]
        argv += ["--as-remote"] if as_remote else []
        log = self.work / "command.log"
        measure.run_measured(Command(tuple(argv), measure.ROOT), log)
        sample: Sample = {"where": where, "state": state, **json.loads(log.read_text())}
        if sample["found"] != self.options.ids // 2:
            raise BenchError(f"{where}, {state}: found {sample['found']} ids")
        self.report.samples.append(sample)

    def series(self, where: str, store: str, *, as_remote: bool = False) -> None:
        """Measure the first use on a machine, and then cold and warm, each several times."""
        self.run(where, "first", store, as_remote=as_remote)
        for state in ("cold", "warm"):
            for _ in range(self.options.rounds):
                self.run(where, state, store, as_remote=as_remote)

    def upload(self, url: str) -> None:
        """Move the index to another storage."""
        name = self.made.root.hex
        path = self.work / "store" / "indexes" / name[:2] / name
        data = np.memmap(path, np.uint8, "r")
        pieces = [data[at : at + 64 * MIB].data for at in range(0, len(data), 64 * MIB)]
        backend = open_backend(url, create=True)
        backend.put_new(ObjectKind.INDEX, name, pieces)
        backend.close()
        path.unlink()


def judge(report: Report) -> None:
    """Compare with the targets, the worst of each series."""
    for where in dict.fromkeys(str(item["where"]) for item in report.samples):
        for state in ("cold", "warm"):
            own = [i for i in report.samples if i["where"] == where and i["state"] == state]
            seconds = max(float(str(item["batch_s"])) for item in own)
            growth = max(int(str(item["growth_bytes"])) for item in own)
            report.targets += [
                Target(
                    f"{where}, {state}: a batch",
                    f"<= {SECONDS_MAX:.0f} s",
                    f"{seconds:.2f} s",
                    seconds <= SECONDS_MAX,
                ),
                Target(
                    f"{where}, {state}: memory",
                    f"<= {GROWTH_BYTES_MAX // MB} MB",
                    f"{growth / MB:.0f} MB",
                    growth <= GROWTH_BYTES_MAX,
                ),
            ]


def markdown(report: Report) -> str:
    """Return the whole result as Markdown."""
    names = ("open_s", "open_growth_bytes", "batch_s", "growth_bytes")
    rows = []
    for item in report.samples:
        numbers = [float(str(item[name])) for name in names]
        rows.append(
            [
                str(item["where"]),
                str(item["state"]),
                f"{numbers[0]:.2f}",
                f"{numbers[1] / MB:.0f}",
                f"{numbers[2]:.2f}",
                f"{numbers[3] / MB:.0f}",
            ]
        )
    header = ("where", "state", "open s", "open MB", "batch s", "batch MB")
    where = f"{report.machine['cpu_model']}, {report.machine['cores']} cores"
    parts = [
        "# Looking up in a large index",
        f"Measured {report.date}; {where}, {report.machine['filesystem']}.",
        EXPLANATION.format(**report.conditions, **report.summary),
        measure.markdown_table(header, rows),
        measure.targets_table(report.targets),
    ]
    return "\n\n".join(parts) + "\n"


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--chunks", type=int, default=100_000_000)
    add("--ids", type=int, default=100_000, help="ids of one batch")
    add("--rounds", type=int, default=3)
    add("--seed", type=int, default=1)
    add("--url", help="another storage, to reach through the cache; the index stays there")
    add("--cache-bytes", type=int, default=8 * GIB)
    add("--out", type=Path, default=measure.CACHE / "index.json", help="where the JSON goes")
    add("--markdown", type=Path, help="where to write the table too")
    add("--work", type=Path, default=measure.CACHE / "work", help="scratch; twice the index")
    # The process that is measured.
    add("--measure", action="store_true", help=argparse.SUPPRESS)
    for name in ("--store", "--name"):
        add(name, help=argparse.SUPPRESS)
    add("--length", type=int, help=argparse.SUPPRESS)
    add("--as-remote", action="store_true", help=argparse.SUPPRESS)
    for name in ("--ids-file", "--cache"):
        add(name, type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def bench(options: argparse.Namespace) -> None:
    """Measure, judge and report.

    Raises:
        BenchError: A measurement failed.
    """
    work = options.work.resolve() / "index"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    keys = ("chunks", "ids", "rounds", "seed", "cache_bytes")
    conditions = {key: getattr(options, key) for key in keys}
    scheme = (options.url or "").partition(":")[0]
    conditions["elsewhere"] = (
        f"a store at {scheme}://" if scheme else "a directory taken for remote"
    )
    report = Report("index", measure.machine(work), conditions)
    report.command_line = "python -m tools.bench.index"
    try:
        run = Bench(options, work, report)
        store = str(work / "store")
        run.series("local", f"file://{store}")
        if options.url:
            run.upload(options.url)
            run.series("cache", options.url)
        else:
            run.series("cache", store, as_remote=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    judge(report)
    report.write(options.out)
    text = markdown(report)
    print(text)
    if options.markdown:
        options.markdown.parent.mkdir(parents=True, exist_ok=True)
        options.markdown.write_text(text)


def main() -> None:
    """Run the benchmark; exit 1 when it could not be done."""
    options = parse()
    if options.measure:
        print(json.dumps(look_up(options)))
        return
    try:
        bench(options)
    except BenchError as error:
        sys.exit(f"index.py: {error}")


if __name__ == "__main__":
    main()
