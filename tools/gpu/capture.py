"""How fast memory of a GPU is captured: beside writing the same bytes raw, and when it is known.

    python -m tools.gpu.capture [--gib 16] [--workers 16] [--memory 8]

The raw rate is that of as many threads as the capture has, each copying its share of the same
memory to a new file of its own on the same file system. The first capture finds an empty store, the
second the same memory, the third the same with a few chunks changed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from snapagent.gpu.arena import SLOT_BYTES, PinnedArena
from snapagent.gpu.capturing import GpuCapture
from snapagent.gpu.driver import Gpu, load_driver
from snapagent.gpu.hashing import PieceHasher, device_buffer
from snapagent.gpu.kernels import load_kernels
from snapstore import DEVICE_CHUNK_BYTES, Compression, Store, StoreOptions, init_store
from snapstore.cli.program import SWITCH_INTERVAL_S
from snapstore.clock import SystemClock
from snapstore.units import GIB, MIB
from tools.gpu.report import write_report

if TYPE_CHECKING:
    from collections.abc import Mapping

CHANGED = 7


def main() -> None:
    """Measure."""
    options = parse()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    size = int(options.gib * GIB)
    driver = load_driver()
    folder = Path(tempfile.mkdtemp(prefix="gpu-capture-", dir=options.directory))
    found: dict[str, object] = {"bytes": size, "workers": options.workers}
    try:
        with contextlib.ExitStack() as stack:
            gpu = stack.enter_context(driver.open(options.ordinal))
            arena = stack.enter_context(PinnedArena(gpu, slots=6 * options.workers))
            code = options.code.read_bytes() if options.code else None
            code = code or load_kernels(gpu.device.capability, folder)
            hasher = stack.enter_context(PieceHasher(gpu, code))
            address = stack.enter_context(device_buffer(gpu, size))
            write_noise(gpu, address, size)
            # The first finds memory that the machine has not touched yet, and is slower.
            found["raw"] = [
                raw(gpu, arena, address, size, folder, options.workers) for _ in range(options.runs)
            ]
            capture = stack.enter_context(
                GpuCapture(gpu, arena, hasher, check_all=options.check_all)
            )
            store_options = StoreOptions(
                compression=Compression(options.compression),
                memory_bytes=int(options.memory * GIB),
                threads=options.workers,
            )
            found["firsts"] = [
                captured_alone(folder / "alone", store_options, capture, address, size)
                for _ in range(options.runs - 1)
            ]
            store = stack.enter_context(init_store(str(folder / "store"), store_options))
            for name in ("first", "second"):
                found[name] = captured(store, capture, address, size, name)
            for number in range(CHANGED):
                at = number * (size // CHANGED) // DEVICE_CHUNK_BYTES * DEVICE_CHUNK_BYTES
                gpu.fill(address + at, number + 1, 64, 0)
            gpu.synchronize()
            found["third"] = captured(store, capture, address, size, "third")
            found["failures"] = proved(found, store, gpu, address, size)
    finally:
        shutil.rmtree(folder)
    write_report("capture", driver, found)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=16)
    parser.add_argument("--ordinal", type=int, default=0)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--runs", type=int, default=3, help="of the raw way and the first capture")
    parser.add_argument("--memory", type=float, default=8, help="budget of the store, GiB")
    parser.add_argument("--compression", default="none", choices=["none", "auto", "fast"])
    parser.add_argument("--directory", default="/dev/shm")  # noqa: S108 - the point of it
    parser.add_argument("--check-all", action="store_true", help="hash again what is copied")
    parser.add_argument("--code", type=Path, help="kernels that are compiled already")
    return parser.parse_args()


def write_noise(gpu: Gpu, address: int, size: int) -> None:
    """Fill memory so that every chunk differs from all others."""
    noise = np.random.default_rng(5).integers(0, 1 << 62, 4 * MIB, np.int64)
    block = noise.view(np.uint8)
    for at in range(0, size, len(block)):
        noise[:: 1 << 13] += at + 1
        gpu.copy_in(address + at, block.ctypes.data, min(len(block), size - at), 0)
        gpu.synchronize()


def raw(
    gpu: Gpu, arena: PinnedArena, address: int, size: int, folder: Path, workers: int
) -> dict[str, object]:
    """Copy everything to new files, one for each thread, and sync nothing."""
    share = -(-size // workers // SLOT_BYTES) * SLOT_BYTES

    def write(number: int) -> None:
        begin, end = number * share, min((number + 1) * share, size)
        path = folder / f"raw-{number}"
        with arena.borrow(1) as (slot,), path.open("wb", buffering=0) as file:
            stream = gpu.stream_create()
            for at in range(begin, end, SLOT_BYTES):
                length = min(SLOT_BYTES, end - at)
                gpu.copy_out(slot.address, address + at, length, stream)
                gpu.stream_synchronize(stream)
                file.write(slot.view[:length])
            gpu.stream_destroy(stream)
        path.unlink()

    clock = SystemClock()
    begin_s = clock.monotonic_s()
    with ThreadPoolExecutor(workers) as executor:
        list(executor.map(write, range(workers)))
    seconds = clock.monotonic_s() - begin_s
    return {"seconds": round(seconds, 3), "gb_per_s": round(size / seconds / 1e9, 2)}


def captured_alone(
    folder: Path, options: StoreOptions, capture: GpuCapture, address: int, size: int
) -> dict[str, object]:
    """Capture all of the memory into a store that is removed then."""
    with init_store(str(folder), options) as store:
        result = captured(store, capture, address, size, "first")
    shutil.rmtree(folder)
    return result


def captured(
    store: Store, capture: GpuCapture, address: int, size: int, name: str
) -> dict[str, object]:
    """Capture all of the memory under a name."""
    clock = SystemClock()
    begin_s = clock.monotonic_s()
    with store.begin(name) as writer:
        begun_s = clock.monotonic_s()
        with writer.open_file(0, "memory/0.mem", data_class="device") as file:
            report = capture.store(address, size, file, stop=threading.Event())
        stored_s = clock.monotonic_s()
        writer.commit()
    seconds = clock.monotonic_s() - begin_s
    return {
        "seconds": round(seconds, 3),
        "gb_per_s": round(size / seconds / 1e9, 2),
        "begin_s": round(begun_s - begin_s, 3),
        "store_s": round(stored_s - begun_s, 3),
        "hash_s": round(report.hash_s, 4),
        "copied_bytes": report.copied_bytes,
        "copied_share": report.copied_bytes / size,
    }


def proved(
    found: Mapping[str, object], store: Store, gpu: Gpu, address: int, size: int
) -> list[str]:
    """See that what had to come over came, and that some of it is what is in the memory."""
    failures = []
    wanted = {"first": size, "second": 0, "third": CHANGED * DEVICE_CHUNK_BYTES}
    for name, count in wanted.items():
        result = found[name]
        assert isinstance(result, dict)
        if result["copied_bytes"] != count:
            failures.append(f"{name}: {result['copied_bytes']} bytes came over, not {count}")
    with store.snapshot("third").open("memory/0.mem") as file:
        for at in range(0, size, max(size // 97, 1)):
            length = min(MIB, size - at)
            data = np.empty(length, np.uint8)
            gpu.copy_out(data.ctypes.data, address + at, length, 0)
            gpu.synchronize()
            if file.read_at(at, length) != data.tobytes():
                failures.append(f"{length} bytes at {at} are not what is in the memory")
    return failures


if __name__ == "__main__":
    main()
