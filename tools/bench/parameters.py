"""What the sizes of chunks, frames and packs cost: the table behind decisions 0002 and 0003.

    .venv/bin/python -m tools.bench.parameters --data DIR --work DIR

Runs push v1, push v2 and pull v2 with one parameter changed at a time, each in a process of its
own, and prints Markdown. Sizes are exact; seconds are medians of `--rounds`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import snapstore
from snapstore.chunking.content import ContentCutter
from snapstore.chunking.pages import PageCutter
from snapstore.repository import file_streams, frame_plan, memory
from snapstore.source.classes import DataClass
from snapstore.units import KIB, MIB

DEFAULTS = {"pages": 8, "tensors": 256, "coded": 1024, "raw": 4096, "pack": 64}
"""Mean pages of a page chunk; mean KiB of a tensor chunk; KiB of coded and raw frames; MiB."""

VARIANTS: list[dict[str, int]] = [
    {},
    {"pages": 4},
    {"pages": 16},
    {"tensors": 64},
    {"tensors": 128},
    {"coded": 256},
    {"coded": 4096},
    {"raw": 1024},
    {"pack": 16},
]


def apply(parameters: dict[str, int]) -> None:
    """Put parameters in the place of the defaults, in this process only."""
    cutters = file_streams.CUTTERS
    cutters[DataClass.PAGES] = PageCutter(parameters["pages"], 4 * parameters["pages"])
    cutters[DataClass.TENSORS] = ContentCutter(mean_bytes=parameters["tensors"] * KIB)
    frame_plan.CODED_FRAME_BYTES = parameters["coded"] * KIB
    frame_plan.RAW_FRAME_BYTES = parameters["raw"] * KIB
    memory.PACK_BYTES = parameters["pack"] * MIB


def one_run(data: Path, work: Path, parameters: dict[str, int]) -> dict[str, float]:
    """Measure one set of parameters once."""
    apply(parameters)
    url = f"file://{work / 'store'}"
    snapstore.init_store(url).close()
    result: dict[str, float] = {}
    for variant in ("v1", "v2"):
        with snapstore.open_store(url) as store:
            started = time.perf_counter()
            pushed = store.push(data / variant, f"bench/{variant}")
            result[f"push_{variant}_s"] = time.perf_counter() - started
        result[f"stored_{variant}"] = pushed.stored_bytes
        result[f"index_{variant}"] = pushed.packed.index_bytes + pushed.metadata_bytes
    with snapstore.open_store(url) as store:
        started = time.perf_counter()
        store.pull("bench/v2", work / "out")
        result["pull_v2_s"] = time.perf_counter() - started
    return result


def measure(data: Path, work: Path, parameters: dict[str, int], rounds: int) -> dict[str, float]:
    """Take medians over fresh processes."""
    samples = []
    for _ in range(rounds):
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        argv = [
            sys.executable,
            "-m",
            "tools.bench.parameters",
            "--data",
            str(data),
            "--work",
            str(work),
            "--one",
            json.dumps(parameters),
        ]
        done = subprocess.run(argv, check=True, capture_output=True, text=True)  # noqa: S603
        samples.append(json.loads(done.stdout))
    shutil.rmtree(work, ignore_errors=True)
    return {key: statistics.median(sample[key] for sample in samples) for key in samples[0]}


def main() -> None:
    """Print the table, or with `--one` the JSON of one run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one_run(options.data, options.work, json.loads(options.one))))
        return
    print(
        "| changed | push v1 s | push v2 s | pull v2 s | stored v1 MB | growth v2 MB | "
        "indexes and manifests MB |\n|---|---|---|---|---|---|---|"
    )
    for variant in VARIANTS:
        row = measure(options.data, options.work, {**DEFAULTS, **variant}, options.rounds)
        label = ", ".join(f"{key} {value}" for key, value in variant.items()) or "nothing"
        metadata = (row["index_v1"] + row["index_v2"]) / 1e6
        print(
            f"| {label} | {row['push_v1_s']:.2f} | {row['push_v2_s']:.2f} | "
            f"{row['pull_v2_s']:.2f} | {row['stored_v1'] / 1e6:.0f} | "
            f"{row['stored_v2'] / 1e6:.0f} | {metadata:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
