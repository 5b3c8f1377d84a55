"""More and more GPUs of a machine filled at once, and what holds them back.

`tools.gpu.stream` has the pieces; here they are put together for 1, 2, 4 and so on GPUs, as threads
of one process and as a process for each, beside the rates of pinned memory and of reading alone.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from snapagent.gpu.engine import GpuSettings
from snapstore import Integrity
from tools.gpu import limits, stream
from tools.gpu.compared import bottleneck, counts_of
from tools.gpu.pinned import pinned_rate

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["StreamsOptions", "measure"]

GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamsOptions:
    """What is filled, and how.

    Attributes:
        gpus: How many at most.
        gib: Of each.
        workers: Threads for each; 0 for as many as the agent takes.
        code: File of kernels that are compiled already.
        folder: For store and files, in memory.
        processes: Whether to measure one process for each GPU, and reading alone, as well.
    """

    gpus: int
    gib: float
    workers: int
    code: Path | None
    folder: Path
    processes: bool


def measure(options: StreamsOptions, found: dict[str, Any], say: Callable[[str], None]) -> None:
    """Measure all of it. What is known is in `found` at any time.

    Raises:
        GpuFailed: A GPU failed.
        SnapError: A store did.
    """
    counts = counts_of(options.gpus)
    workers = {count: GpuSettings(workers=options.workers).workers_for(count) for count in counts}
    arguments = ["--gib", str(options.gib), "--gpus", str(options.gpus)]
    arguments += ["--workers", str(max(workers.values())), "--directory", str(options.folder)]
    arguments += ["--code", str(options.code)] if options.code else []
    wishes = stream.parse(arguments)
    folder = Path(tempfile.mkdtemp(prefix="streams-", dir=options.folder))
    try:
        size = int(options.gib * GIB)
        found["built_gb_per_s"] = stream.build(folder, options.gpus, size, wishes)
        say(f"the store is built, at {found['built_gb_per_s']} GB/s")
        _fill(folder, wishes, workers, found, say)
        if options.processes:
            found["limits"] = _limits(folder, options.gpus, workers[options.gpus])
            say("reading alone is measured")
            few = [*arguments, "--workers", str(workers[options.gpus])]
            found["processes"] = _sums(stream.in_processes(folder, options.gpus, few))
            say(f"with a process for each GPU: {found['processes']}")
    finally:
        shutil.rmtree(folder)
    found["bottleneck"] = named(found)


def _fill(
    folder: Path,
    wishes: argparse.Namespace,
    workers: Mapping[int, int],
    found: dict[str, Any],
    say: Callable[[str], None],
) -> None:
    """Fill from the store and from registered files, by threads of this process."""
    rows = found["rows"] = []
    with contextlib.ExitStack() as stack:
        setups = [
            stack.enter_context(stream.opened(number, folder, wishes))
            for number in range(max(workers))
        ]
        sources = [stack.enter_context(stream.registered(one, folder)) for one in setups]
        found["registered_s_per_gib"] = [
            round(source.seconds / (one.size / GIB), 3)
            for source, one in zip(sources, setups, strict=True)
        ]
        found["gpu_nodes"] = [one.gpu.device.numa_node for one in setups]
        directs = [stream.Direct(source.address) for source in sources]
        for count, threads in workers.items():
            some = setups[:count]
            pinned = pinned_rate([one.gpu for one in some])
            row: dict[str, Any] = {"gpus": count, "threads_each": threads, "pinned": pinned.all}
            rows.append(row)
            for name, lying, integrity in (
                ("store", [None] * count, Integrity.STRONG),
                ("store_xxh3", [None] * count, Integrity.FAST),
                ("registered", directs[:count], Integrity.STRONG),
            ):
                row[name] = _best(some, lying, integrity, wishes, threads, pinned.all)
                say(f"{count} GPUs, {name}: {row[name]['gb_per_s']} of {pinned.all} GB/s")


def _best(
    setups: Sequence[stream.Setup],
    sources: Sequence[stream.Direct | None],
    integrity: Integrity,
    wishes: argparse.Namespace,
    threads: int,
    pinned: float,
) -> dict[str, Any]:
    on_gpu = integrity is Integrity.STRONG
    with contextlib.ExitStack() as stack:
        streams = [
            stack.enter_context(stream.stream_of(one, wishes, on_gpu=on_gpu, workers=threads))
            for one in setups
        ]
        runs = [stream.fill_all(setups, streams, sources, integrity) for _ in range(stream.RUNS)]
    best, reports = max(runs, key=lambda run: run[0])
    return {
        "gb_per_s": round(best, 2),
        "of_pinned": round(best / pinned, 3),
        "runs": [round(rate, 2) for rate, _ in runs],
        "each": reports,
    }


def _limits(folder: Path, gpus: int, threads: int) -> list[dict[str, object]]:
    """Read the same files and do nothing else, or let the GPUs fetch them too."""
    links = folder / "limits"
    links.mkdir()
    for number in range(gpus):
        (links / str(number)).symlink_to(folder / f"{number}.plain")
    return limits.measure(links, gpus, 1, [threads], [1024, 4096])


def _sums(found: Mapping[str, Any]) -> dict[str, Any]:
    """Sum up what children have found, which did the same at about the same time."""
    sums: dict[str, Any] = {}
    for name, children in found.items():
        sums[name] = {
            kind: max(
                round(sum(child[kind][run]["gb_per_s"] for child in children), 2)
                for run in range(stream.RUNS)
            )
            for kind in children[0]
        }
    return sums


def named(found: Mapping[str, Any]) -> dict[str, str]:
    """Name the bottleneck of each way to fill all GPUs at once."""
    row = found["rows"][-1]
    together = found.get("processes", {}).get("all", {})
    alone: dict[int, float] = {}
    for one in found.get("limits", []):
        if one["gpus"] == row["gpus"]:
            alone[one["copies"]] = max(alone.get(one["copies"], 0.0), one["gb_per_s"])
    return {
        "store": bottleneck(
            row["store"]["gb_per_s"],
            pinned=row["pinned"],
            processes=together.get("blake3_on_gpu"),
            read_alone=alone.get(0),
            read_and_copy=alone.get(1),
        ),
        "registered": bottleneck(
            row["registered"]["gb_per_s"],
            pinned=row["pinned"],
            processes=together.get("registered"),
        ),
    }
