"""BLAKE3 on a GPU: right for all the official lengths and random ones, and how fast.

    python -m tools.gpu.blake3 [--gib 8]

Fails if a digest is wrong. Rates are of `PieceHasher.digests` as a whole: plans, launches and the
way of the digests back are in them.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from blake3 import blake3

from snapagent.gpu.driver import Gpu, load_driver
from snapagent.gpu.hash_plan import plan_hashes
from snapagent.gpu.hashing import PieceHasher, device_buffer
from snapagent.gpu.kernels import load_kernels
from snapstore.clock import SystemClock
from tools.gpu.report import write_report

if TYPE_CHECKING:
    import numpy.typing as npt

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
VECTOR_LENGTHS = [
    *(1, 2, 3, 4, 5, 6, 7, 8, 63, 64, 65, 127, 128, 129, 1023, 1024, 1025, 2048, 2049, 3072, 3073),
    *(4096, 4097, 5120, 5121, 6144, 6145, 7168, 7169, 8192, 8193, 16384, 31744, 102400),
]
RUNS = 5


def main() -> None:
    """Prove and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=8, help="device memory to hash")
    parser.add_argument("--ordinal", type=int, default=0)
    parser.add_argument("--code", type=Path, help="kernels that are compiled already")
    arguments = parser.parse_args()
    size = int(arguments.gib * GIB)
    driver = load_driver()
    clock = SystemClock()
    rng = np.random.default_rng(1)
    with driver.open(arguments.ordinal) as gpu, tempfile.TemporaryDirectory() as kept:
        begin = clock.monotonic_s()
        code = arguments.code.read_bytes() if arguments.code else b""
        code = code or load_kernels(gpu.device.capability, Path(kept))
        compiled = clock.monotonic_s()
        if not arguments.code:
            load_kernels(gpu.device.capability, Path(kept))
        loaded = clock.monotonic_s()
        with PieceHasher(gpu, code) as hasher, device_buffer(gpu, size) as address:
            source = fill(gpu, address, size, rng)
            failures = prove(hasher, address, source, rng)
            rates = {
                name: rate(hasher, address, offsets, lengths)
                for name, (offsets, lengths) in layouts(size, rng).items()
            }
    write_report(
        "blake3",
        driver,
        {
            "compile_s": compiled - begin,
            "load_cached_s": loaded - compiled,
            "checked_pieces": CHECKED,
            "failures": failures,
            "rates": rates,
        },
    )


CHECKED = len(VECTOR_LENGTHS) + 2000


def fill(gpu: Gpu, address: int, size: int, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Fill device memory with one random gibibyte again and again; returns its beginning."""
    data = rng.integers(0, 256, 64 * MIB, np.uint8)
    data[:102400] = np.arange(102400) % 251
    gpu.copy_in(address, data.ctypes.data, len(data), 0)
    done = len(data)
    while done < size:
        length = min(done, size - done)
        gpu.copy_within(address + done, address, length, 0)
        gpu.synchronize()
        done += length
    gpu.synchronize()
    return data


def prove(
    hasher: PieceHasher,
    address: int,
    source: npt.NDArray[np.uint8],
    rng: np.random.Generator,
) -> list[str]:
    """Compare digests of vectors, and of random pieces at any address, with the package's."""
    count = CHECKED - len(VECTOR_LENGTHS)
    lengths = np.concatenate((VECTOR_LENGTHS, (2 ** rng.uniform(0, 22, count)).astype(np.int64)))
    offsets = (rng.random(len(lengths)) * (len(source) - lengths)).astype(np.int64)
    offsets[: len(VECTOR_LENGTHS)] = 0
    offsets[len(VECTOR_LENGTHS) :: 3] &= ~np.int64(15)
    found = hasher.digests(address + offsets, lengths)
    return [
        f"{length} bytes at {offset}"
        for row, offset, length in zip(found, offsets.tolist(), lengths.tolist(), strict=True)
        if row.tobytes() != blake3(source[offset : offset + length].data).digest()
    ]


def layouts(
    size: int, rng: np.random.Generator
) -> dict[str, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Lengths as the classes of data have them, abutting, over all of the memory."""

    def abutting(
        lengths: npt.NDArray[np.int64],
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        ends = np.cumsum(lengths)
        count = int(np.searchsorted(ends, size, side="right"))
        return (ends - lengths)[:count], lengths[:count]

    mean = 256 * KIB
    tensors = rng.integers(mean // 4, mean * 7 // 4, size // mean * 2)
    pages = rng.geometric(1 / 8, size // (16 * KIB)).clip(1, 32) * 4096
    return {
        "grid_256KiB": abutting(np.full(size // mean, mean, np.int64)),
        "tensors_64KiB_to_448KiB_unaligned": abutting(tensors.astype(np.int64)),
        "pages_4KiB_to_128KiB": abutting(pages.astype(np.int64)),
        "grid_1MiB": abutting(np.full(size // MIB, MIB, np.int64)),
        "grid_4MiB": abutting(np.full(size // (4 * MIB), 4 * MIB, np.int64)),
    }


def rate(
    hasher: PieceHasher,
    address: int,
    offsets: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
) -> dict[str, object]:
    """Measure the median of some runs, and what planning alone takes."""
    clock = SystemClock()
    total = int(lengths.sum())
    taken = []
    for _ in range(RUNS + 1):
        begin = clock.monotonic_s()
        hasher.digests(address + offsets, lengths)
        taken.append(clock.monotonic_s() - begin)
    begin = clock.monotonic_s()
    plan_hashes(address + offsets, lengths)
    planning_s = clock.monotonic_s() - begin
    return {
        "bytes": total,
        "pieces": len(lengths),
        "gb_per_s": round(total / statistics.median(taken[1:]) / 1e9, 1),
        "runs_s": [round(one, 5) for one in taken],
        "plan_s": round(planning_s, 5),
    }


if __name__ == "__main__":
    main()
