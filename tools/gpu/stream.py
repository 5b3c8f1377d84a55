"""How fast a store, or a registered copy, fills the memory of GPUs, and that damage is found.

    python -m tools.gpu.stream [--gib 8] [--gpus 2] [--workers 16] [--processes]

Makes a store in memory with a file for each GPU and measures, in one run: the rate of page-locked
memory alone; the store with XXH3 on the processor; with BLAKE3 on the GPU; with BLAKE3 on the
processor; a registered copy with BLAKE3 on the GPU; and all GPUs at once, as threads of one process
or, with `--processes`, as one process each. Then a bit is flipped in a pack, and one on the way.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from snapagent.errors import GpuFailed
from snapagent.gpu.arena import SLOT_BYTES, PinnedArena
from snapagent.gpu.driver import Gpu, Lane, address_of, load_driver
from snapagent.gpu.hashing import PieceHasher, device_buffer
from snapagent.gpu.kernels import load_kernels
from snapagent.gpu.stream import GpuStream, StreamTarget
from snapstore import Compression, Integrity, SnapError, StoreOptions, init_store, open_store
from snapstore.cli.program import SWITCH_INTERVAL_S
from snapstore.clock import SystemClock
from tools.gpu.report import write_report

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from snapstore import FileWriter, SnapshotFile

MIB, GIB = 1 << 20, 1 << 30
RUNS = 3
NAME = "bench/gpu:1"


class Direct(NamedTuple):
    """A file in page-locked memory."""

    address: int


class Setup(NamedTuple):
    """One GPU with all that fills it, and device memory to fill."""

    gpu: Gpu
    arena: PinnedArena
    hasher: PieceHasher
    address: int
    size: int
    fast: SnapshotFile
    strong: SnapshotFile


def main() -> None:
    """Measure, and prove."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    options = parse()
    if options.child is not None:
        child(options)
        return
    driver = load_driver()
    count = min(options.gpus or len(driver.devices), len(driver.devices))
    folder = Path(tempfile.mkdtemp(prefix="gpu-stream-", dir=options.directory))
    try:
        built = build(folder, count, int(options.gib * GIB), options)
        results: dict[str, object] = {"built_gb_per_s": built, "options": vars(options) | {}}
        if options.processes:
            results["processes"] = in_processes(folder, count, sys.argv[1:])
        with contextlib.ExitStack() as stack:
            setups = [stack.enter_context(opened(n, folder, options)) for n in range(count)]
            results |= measured(setups, folder, options)
            results["failures"] = damage(setups[0], folder, options)
    finally:
        shutil.rmtree(folder)
    write_report("stream", driver, json.loads(json.dumps(results, default=str)))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=8, help="for each GPU")
    parser.add_argument("--gpus", type=int, default=0, help="how many; all of them unless given")
    parser.add_argument("--workers", type=int, default=0, help="threads for each GPU")
    parser.add_argument("--sweep", default="", help="numbers of threads to try, with commas")
    parser.add_argument("--parts", default="4", help="MiB read at a time, with commas")
    parser.add_argument("--all", action="store_true", help="BLAKE3 on the processor as well")
    parser.add_argument("--processes", action="store_true", help="also one process for each GPU")
    parser.add_argument("--blocking", action="store_true", help="threads that wait sleep")
    parser.add_argument("--compression", default="none", choices=["none", "auto", "fast"])
    parser.add_argument("--directory", default="/dev/shm")  # noqa: S108 - the point of it
    parser.add_argument("--code", type=Path, help="kernels that are compiled already")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    cores = len(os.sched_getaffinity(0))
    gpus = options.gpus or len(load_driver().devices)
    options.workers = options.workers or max(2, min(16, cores // gpus))
    options.parts = [int(word) for word in options.parts.split(",")]
    options.sweep = [int(word) for word in options.sweep.split(",") if word] or [options.workers]
    return options


# -- what is measured on ------------------------------------------------------------------------


def build(folder: Path, count: int, size: int, options: argparse.Namespace) -> float:
    """Make the store, and a plain copy of each file; returns the rate of storing."""
    compression = Compression(options.compression)
    store_options = StoreOptions(compression=compression, memory_bytes=4 * GIB)
    clock = SystemClock()
    begin = clock.monotonic_s()
    with (
        init_store(str(folder / "store"), options=store_options) as store,
        store.begin(NAME) as writer,
    ):
        files = [
            writer.open_file(number, f"memory/{number}.mem", data_class="device")
            for number in range(count)
        ]
        with ThreadPoolExecutor(count) as executor:
            paths = [folder / f"{number}.plain" for number in range(count)]
            list(executor.map(write_noise, range(count), files, paths, [size] * count))
        writer.commit()
    return round(count * size / (clock.monotonic_s() - begin) / 1e9, 2)


def write_noise(number: int, file: FileWriter, path: Path, size: int) -> None:
    """Write bytes of which every chunk differs from all others."""
    noise = np.random.default_rng(number).integers(0, 1 << 62, 4 * MIB, np.int64)
    block = noise.view(np.uint8)
    with file, path.open("wb") as plain:
        for at in range(0, size, len(block)):
            noise[:: 1 << 13] += at + 1
            file.write(block[: size - at].data)
            plain.write(block[: size - at].data)


@contextlib.contextmanager
def opened(number: int, folder: Path, options: argparse.Namespace) -> Iterator[Setup]:
    """Open a GPU, and its file in both ways."""
    url = str(folder / "store")
    with contextlib.ExitStack() as stack:
        gpu = stack.enter_context(load_driver().open(number))
        files = []
        for integrity in (Integrity.FAST, Integrity.STRONG):
            store_options = StoreOptions(integrity=integrity)
            store = stack.enter_context(open_store(url, options=store_options))
            files.append(store.snapshot(NAME).open(f"memory/{number}.mem"))
        size = files[0].size_bytes
        code = options.code.read_bytes() if options.code else None
        code = code or load_kernels(gpu.device.capability, folder)
        yield Setup(
            gpu=gpu,
            arena=stack.enter_context(
                PinnedArena(gpu, slots=2 * max(options.workers, *options.sweep))
            ),
            hasher=stack.enter_context(PieceHasher(gpu, code)),
            address=stack.enter_context(device_buffer(gpu, size)),
            size=size,
            fast=files[0],
            strong=files[1],
        )


# -- measuring ------------------------------------------------------------------------------------


def measured(
    setups: Sequence[Setup], folder: Path, options: argparse.Namespace
) -> dict[str, object]:
    """Measure everything, one GPU alone first, then all at once."""
    one = setups[0]
    found: dict[str, object] = {}
    pinned = [pinned_rate(setups[:1])] + ([pinned_rate(setups)] if len(setups) > 1 else [])
    found["pinned_gb_per_s"] = pinned
    for workers, mib in itertools.product(options.sweep, options.parts):
        found[f"blake3_on_gpu_{workers}_workers_{mib}_mib"] = stream_rates(
            setups,
            Integrity.STRONG,
            options,
            pinned,
            on_gpu=True,
            workers=workers,
            part_bytes=mib * MIB,
        )
    for workers in options.sweep:
        found[f"xxh3_on_cpu_{workers}_workers"] = stream_rates(
            setups, Integrity.FAST, options, pinned, on_gpu=False, workers=workers
        )
    if options.all:
        found["blake3_on_cpu"] = stream_rates(
            setups, Integrity.STRONG, options, pinned, on_gpu=False
        )
    with contextlib.ExitStack() as stack:
        sources = [stack.enter_context(registered(setup, folder)) for setup in setups]
        found["registered_s_per_gib"] = [round(s.seconds / (one.size / GIB), 3) for s in sources]
        directs = [Direct(source.address) for source in sources]
        found["registered_blake3_on_gpu"] = stream_rates(
            setups, Integrity.STRONG, options, pinned, on_gpu=True, sources=directs
        )
    return found


def stream_rates(
    setups: Sequence[Setup],
    integrity: Integrity,
    options: argparse.Namespace,
    pinned: Sequence[float],
    *,
    on_gpu: bool,
    workers: int = 0,
    part_bytes: int = SLOT_BYTES,
    sources: Sequence[Direct | None] = (),
) -> dict[str, object]:
    """Fill one GPU, and then all at once; the best of some runs of each."""
    found: dict[str, object] = {}
    together = {"one": setups[:1]} | ({"all": setups} if len(setups) > 1 else {})
    rates = {}
    for number, (name, some) in enumerate(together.items()):
        with contextlib.ExitStack() as stack:
            streams = [
                stack.enter_context(
                    stream_of(setup, options, on_gpu=on_gpu, workers=workers, part_bytes=part_bytes)
                )
                for setup in some
            ]
            lying = [*sources, *[None] * len(some)]
            runs = [fill_all(some, streams, lying, integrity) for _ in range(RUNS)]
        best, reports = max(runs, key=lambda run: run[0])
        rates[name] = best
        found[name] = {
            "gb_per_s": round(best, 2),
            "runs": [round(run[0], 2) for run in runs],
            "of_pinned": round(best / pinned[number], 3),
            "each": reports,
        }
    if len(rates) > 1:
        found["all_over_one"] = round(rates["all"] / rates["one"], 3)
    return found


def fill_all(
    setups: Sequence[Setup],
    streams: Sequence[GpuStream],
    sources: Sequence[Direct | None],
    integrity: Integrity,
) -> tuple[float, list[dict[str, object]]]:
    """Fill some GPUs at once; returns the rate of all, and what each did."""
    clock = SystemClock()
    begin = clock.monotonic_s()
    with ThreadPoolExecutor(len(setups)) as executor:
        reports = list(
            executor.map(fill, setups, streams, [integrity] * len(setups), sources[: len(setups)])
        )
    seconds = clock.monotonic_s() - begin
    return sum(setup.size for setup in setups) / seconds / 1e9, reports


def stream_of(
    setup: Setup,
    options: argparse.Namespace,
    *,
    on_gpu: bool,
    workers: int = 0,
    part_bytes: int = SLOT_BYTES,
) -> GpuStream:
    """Make what fills a GPU, as an agent does once."""
    return GpuStream(
        setup.gpu,
        setup.arena,
        setup.hasher if on_gpu else None,
        workers=workers or options.workers,
        part_bytes=part_bytes,
        blocking=options.blocking,
    )


def fill(
    setup: Setup, stream: GpuStream, integrity: Integrity, source: Direct | None = None
) -> dict[str, object]:
    """Fill one GPU once."""
    file = setup.fast if integrity is Integrity.FAST else setup.strong
    report = stream.fill(
        [StreamTarget(setup.gpu.device.ordinal, file, setup.address, source)],
        stop=threading.Event(),
        target_done=lambda _: None,
        progress=lambda _: None,
    )
    return {
        "gb_per_s": round(report.bytes / report.seconds / 1e9, 2),
        "bottleneck": report.bottleneck,
        "plan_s": round(report.plan_s, 4),
        "read_s": round(report.read_s, 3),
        "wait_s": round(report.wait_s, 3),
        "hash_s": round(report.hash_s, 4),
        "threads": report.threads,
    }


def pinned_rate(setups: Sequence[Setup]) -> float:
    """Copy page-locked memory, in pieces as streams do, with nothing else to do."""

    def copy(setup: Setup) -> None:
        gpu = setup.gpu
        with setup.arena.borrow(setup.arena.slots) as slots:
            stream = gpu.stream_create()
            for at in range(0, setup.size - SLOT_BYTES + 1, SLOT_BYTES):
                slot = slots[at // SLOT_BYTES % len(slots)]
                gpu.copy_in(setup.address + at, slot.address, SLOT_BYTES, stream)
            gpu.stream_synchronize(stream)
            gpu.stream_destroy(stream)

    clock = SystemClock()
    runs = []
    for _ in range(RUNS):
        begin = clock.monotonic_s()
        with ThreadPoolExecutor(len(setups)) as executor:
            list(executor.map(copy, setups))
        runs.append(sum(one.size for one in setups) / (clock.monotonic_s() - begin) / 1e9)
    return round(max(runs), 2)


class Registered(NamedTuple):
    """A mapped file whose pages are locked."""

    address: int
    seconds: float


@contextlib.contextmanager
def registered(setup: Setup, folder: Path) -> Iterator[Registered]:
    """Lock the pages of the plain copy of a file."""
    clock = SystemClock()
    path = folder / f"{setup.gpu.device.ordinal}.plain"
    with path.open("r+b") as file, mmap.mmap(file.fileno(), setup.size) as mapped:
        with memoryview(mapped) as view:
            address = address_of(view)
        begin = clock.monotonic_s()
        setup.gpu.host_register(address, setup.size)
        try:
            yield Registered(address, clock.monotonic_s() - begin)
        finally:
            setup.gpu.host_unregister(address)


# -- one process for each GPU ---------------------------------------------------------------------


def in_processes(folder: Path, count: int, arguments: Sequence[str]) -> dict[str, object]:
    """Fill all GPUs at once, each from a process of its own, which begin together.

    Args:
        folder: Where the store and the plain files are.
        count: How many GPUs.
        arguments: Of this program, as they are to be for each process.
    """
    found: dict[str, object] = {}
    for name, some in (("one", range(1)), ("all", range(count))):
        with contextlib.ExitStack() as stack:
            children = [
                stack.enter_context(_started_child(number, folder, arguments)) for number in some
            ]
            for one in children:
                assert one.stdout is not None
                one.stdout.readline()
            for one in children:
                assert one.stdin is not None
                one.stdin.write("\n")
                one.stdin.flush()
            found[name] = [json.loads(one.communicate()[0]) for one in children]
    return found


@contextlib.contextmanager
def _started_child(
    number: int, folder: Path, arguments: Sequence[str]
) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tools.gpu.stream", *arguments]
    with subprocess.Popen(  # noqa: S603 - this program
        [*command, "--child", str(number), "--folder", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def child(options: argparse.Namespace) -> None:
    """Be one of them."""
    with (
        opened(options.child, options.folder, options) as setup,
        stream_of(setup, options, on_gpu=True) as stream,
        registered(setup, options.folder) as source,
    ):
        found = {}
        fill(setup, stream, Integrity.STRONG)
        print("ready", flush=True)
        sys.stdin.readline()
        for name, integrity, lying in (
            ("blake3_on_gpu", Integrity.STRONG, None),
            ("xxh3", Integrity.FAST, None),
            ("registered", Integrity.STRONG, Direct(source.address)),
        ):
            found[name] = [fill(setup, stream, integrity, lying) for _ in range(RUNS)]
        print(json.dumps(found))


# -- damage ---------------------------------------------------------------------------------------


class FlippingLane:
    """A bus that overwrites a little of the fifth piece, after the processor's check."""

    def __init__(self, gpu: Gpu, lane: Lane) -> None:
        self._gpu = gpu
        self._lane = lane
        self._left = 5

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lane.__exit__()

    def __getattr__(self, name: str) -> object:
        return getattr(self._lane, name)

    def copy_in(self, place: int, to: int, host: int, length: int) -> None:
        """Copy, but for some bits of one piece."""
        self._left -= 1
        self._lane.copy_in(place, to, host, length)
        if not self._left:
            self._lane.wait(place)
            self._gpu.fill(to + length // 2, 0x5A, 64, 0)
            self._gpu.synchronize()


class FlippingGpu:
    """A GPU behind it."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def __getattr__(self, name: str) -> object:
        return getattr(self._gpu, name)

    def lane(self, places: int, *, blocking: bool = False) -> FlippingLane:
        """See `Gpu.lane`."""
        return FlippingLane(self._gpu, self._gpu.lane(places, blocking=blocking))


def damage(setup: Setup, folder: Path, options: argparse.Namespace) -> list[str]:
    """See that each damage is found, and named; returns what was not."""
    failures = []
    flipping = setup._replace(gpu=FlippingGpu(setup.gpu))  # type: ignore[arg-type]
    failures += expect("on the way", flipping, Integrity.STRONG, options)
    pieces = [piece for piece in setup.strong.pieces() if not piece.is_zeros]
    stored = pieces[len(pieces) // 2].stored
    if stored is None:
        return [*failures, "there is no raw frame to damage: use --compression none"]
    (pack,) = (folder / "store" / "packs").rglob(stored.pack.hex)
    with pack.open("r+b") as file:
        file.seek(stored.frame.offset + 77_777)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    for integrity in Integrity:
        failures += expect(f"pack, {integrity.value}", setup, integrity, options)
    return failures


def expect(what: str, setup: Setup, integrity: Integrity, options: argparse.Namespace) -> list[str]:
    """Fill and see that it fails in words that name rank, stream, offset and chunk."""
    try:
        with stream_of(setup, options, on_gpu=True) as stream:
            fill(setup, stream, integrity)
    except GpuFailed as error:
        return [f"{what}: {error}"]
    except SnapError as error:
        print(f"{what}: {error}", file=sys.stderr)
        words = ("chunk ", " at offset ", "memory/0.mem", "rank 0")
        return [f"{what}: {word!r} is not in {error}" for word in words if word not in str(error)]
    return [f"{what}: not found out"]


if __name__ == "__main__":
    main()
