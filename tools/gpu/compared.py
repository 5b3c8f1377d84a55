"""What measured rates of GPUs mean: targets, the bottleneck, and restores of published sizes.

All of it is arithmetic on what a run has found, also on what several runs have found together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "PUBLISHED",
    "Fixed",
    "Published",
    "Targets",
    "bottleneck",
    "computed",
    "concluded",
    "counts_of",
    "judged",
]


class Published(NamedTuple):
    """A restore by NVIDIA Snapshot on B200, as announced on 10 November 2026; seconds.

    Attributes:
        model: And its engine.
        gpus: How many.
        artifact_gb: Size of the artifact.
        restore_s: All of it.
        setup_s: The agent's part.
        criu_s: CRIU's part.
        cuda_s: The driver's part, in which the memory of GPUs comes back.
        wake_s: The engine's part.
    """

    model: str
    gpus: int
    artifact_gb: float
    restore_s: float
    setup_s: float
    criu_s: float
    cuda_s: float
    wake_s: float


PUBLISHED: Final = (
    Published("gpt-oss-120b, SGLang", 4, 693.89, 29.64, 2.69, 4.34, 21.69, 0.93),
    Published("GLM-5.3-NVFP4, vLLM", 8, 604.00, 28.64, 3.79, 4.18, 20.61, 0.06),
    Published("GLM-5.3-NVFP4, SGLang", 8, 669.49, 35.34, 3.27, 10.80, 19.96, 1.31),
    Published("DeepSeek-V4.1-Flash, vLLM", 8, 647.18, 30.96, 4.84, 5.71, 19.37, 1.04),
    Published("DeepSeek-V4-Pro-NVFP4, vLLM", 8, 996.53, 39.56, 5.44, 4.73, 28.98, 0.42),
    Published("DeepSeek-V4-Pro-NVFP4, SGLang", 8, 1039.09, 42.69, 3.13, 10.13, 28.60, 0.83),
)
"""Configurations of several GPUs out of its tables 1 and 3."""

_BUS_SHARE: Final = 0.9
"""As fast as the bus, as far as that can be measured."""
_SAME_SHARE: Final = 0.85
"""As fast as something else, likewise."""
_PROCESSES_GAIN: Final = 1.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What is wanted.

    Attributes:
        cache: Of the pinned rate of all GPUs at once, out of registered files of a node cache.
        store: Of the same, out of a store in memory.
        restore_s: Of a whole restore, until all ranks have computed together.
    """

    cache: float = 0.8
    store: float = 0.5
    restore_s: float = 10.0


def judged(found: Mapping[str, float], targets: Targets) -> dict[str, object]:
    """Compare what was found with what is wanted; says nothing of what was not found.

    Args:
        found: `pinned`, `store` and `cache` in GB/s of all GPUs together, and `restore_s` and
            `cached_restore_s`.
        targets: What is wanted.
    """
    verdicts: dict[str, object] = {}
    pinned = found.get("pinned", 0.0)
    for name, wanted in (("cache", targets.cache), ("store", targets.store)):
        if name in found and pinned > 0:
            share = found[name] / pinned
            verdicts[name] = {
                "of_pinned": round(share, 3),
                "wanted": wanted,
                "met": share >= wanted,
            }
    for name in ("restore_s", "cached_restore_s"):
        if name in found:
            verdicts[name] = {
                "seconds": round(found[name], 2),
                "wanted": targets.restore_s,
                "met": found[name] <= targets.restore_s,
            }
    return verdicts


def bottleneck(
    rate: float,
    *,
    pinned: float,
    processes: float | None = None,
    read_alone: float | None = None,
    read_and_copy: float | None = None,
) -> str:
    """Name what holds a rate back; all rates are of all GPUs together, in GB/s.

    Args:
        rate: That of filling GPUs by the threads of one process.
        pinned: Of copying page-locked memory alone.
        processes: Of filling the same with one process for each GPU.
        read_alone: Of reading files in memory, with as many threads.
        read_and_copy: Of doing that and letting GPUs fetch it, with nothing else to do.
    """
    if rate >= _BUS_SHARE * pinned:
        return "the bus: it is as fast as page-locked memory alone"
    if processes is not None and processes > _PROCESSES_GAIN * rate:
        return "the interpreter: a process for each GPU is faster than threads of one"
    if read_and_copy is not None and rate >= _SAME_SHARE * read_and_copy:
        return "host memory: reading and copying alone is as slow"
    if read_alone is not None and rate >= _SAME_SHARE * read_alone:
        return "host memory: reading alone is as slow"
    if processes is None and read_alone is None and read_and_copy is None:
        return "unknown: nothing was measured beside it"
    return "the filling itself: reading and copying alone is faster"


class Fixed(NamedTuple):
    """What of a measured restore does not grow with the memory of GPUs; seconds.

    Attributes:
        ranks: How many there were.
        setup_s: The agent's setup.
        criu_s: CRIU, with the host memory of all ranks, beside which GPUs are filled.
        cuda_s: The driver's restore.
        wake_s: Until all ranks have computed together.
    """

    ranks: int
    setup_s: float
    criu_s: float
    cuda_s: float
    wake_s: float


def computed(rates: Mapping[str, tuple[float, int]], fixed: Fixed) -> list[dict[str, object]]:
    """Compute restores of published configurations from measured ones, at best. None was run.

    GPUs are filled beside CRIU, and the longer of the two counts. All of an artifact is taken for
    memory of GPUs, and rates for proportional to their number, which is too good where host memory
    is the bound.

    Args:
        rates: GB/s of all GPUs together in a whole restore, and of how many, by where the bytes
            come from.
        fixed: Of a measured restore; those of more ranks take longer.
    """
    rows: list[dict[str, object]] = []
    for one in PUBLISHED:
        row: dict[str, object] = {
            "model": one.model,
            "gpus": one.gpus,
            "artifact_gb": one.artifact_gb,
            "nvidia_restore_s": one.restore_s,
            "nvidia_gb_per_s": round(one.artifact_gb / one.restore_s, 1),
        }
        for source, (rate, gpus) in rates.items():
            fill_s = one.artifact_gb / (rate * one.gpus / gpus)
            seconds = fixed.setup_s + max(fixed.criu_s, fill_s) + fixed.cuda_s + fixed.wake_s
            row[f"{source}_restore_s"] = round(seconds, 1)
            row[f"{source}_is_of_as_many_gpus"] = gpus == one.gpus
            row[f"{source}_times_as_fast"] = round(one.restore_s / seconds, 1)
        rows.append(row)
    return rows


def counts_of(gpus: int) -> Sequence[int]:
    """Return for how many GPUs to measure: 1, 2, 4 and so on, and all of them."""
    found = [1]
    while found[-1] * 2 <= gpus:
        found.append(found[-1] * 2)
    return found if found[-1] == gpus else [*found, gpus]


def concluded(parts: Mapping[str, Any], targets: Targets) -> dict[str, object]:
    """Say what the parts of a run of `tools.gpu.eight` mean; what was not run is left out.

    Args:
        parts: By name, also such as were cut short.
        targets: What is wanted.
    """
    said: dict[str, object] = {}
    rates: dict[str, float] = {}
    rows = [row for row in parts.get("stream", {}).get("rows", []) if "registered" in row]
    if rows:
        last = rows[-1]
        rates = {"store": last["store"]["gb_per_s"], "cache": last["registered"]["gb_per_s"]}
        said["streams"] = judged({"pinned": last["pinned"], **rates}, targets)
        said["scaling"] = _scaling(rows)
    whole: dict[str, tuple[float, int]] = {}
    fixed: list[Fixed] = []
    restored = parts.get("restore", {}).get("store_restores")
    if restored:
        # The first one: what a restore is that follows a capture, with pages never read before.
        found = _found(parts["restore"], restored[0], "store", "restore_s")
        said["restore"] = judged(found, targets)
        whole["store"] = (found["store"], parts["restore"]["options"]["gpus"])
        fixed.append(_fixed(parts["restore"], restored[0]))
        if rates:
            said["store_beside_criu_of_alone"] = [
                round(one["all_gb_per_s"] / rates["store"], 2) for one in restored
            ]
    cached = parts.get("cached", {}).get("cached_restores")
    if cached:
        best = min(cached, key=lambda run: run["answered_s"])
        found = _found(parts["cached"], best, "cache", "cached_restore_s")
        said["cached"] = judged(found, targets)
        whole["cache"] = (found["cache"], parts["cached"]["options"]["gpus"])
        fixed.append(_fixed(parts["cached"], best))
    for one in parts.get("restores", {}).get("rows", []):
        fixed += [_fixed(one, restore) for restore in one.get("store_restores", [])[:1]]
    if whole and fixed:
        most = max(fixed, key=lambda one: one.ranks)
        said["published_sizes_computed_at_best"] = {
            "gb_per_s_of_gpus": {name: list(rate) for name, rate in whole.items()},
            "fixed": most._asdict(),
            "rows": computed(whole, most),
        }
    return said


def _found(
    part: Mapping[str, Any], restore: Mapping[str, Any], source: str, seconds: str
) -> dict[str, float]:
    return {
        "pinned": part["pinned_gb_per_s"]["all"],
        source: restore["all_gb_per_s"],
        seconds: restore["answered_s"],
    }


def _fixed(part: Mapping[str, Any], restore: Mapping[str, Any]) -> Fixed:
    """Take from a restore what does not grow; what waited for filling is not of it."""
    return Fixed(
        ranks=part["options"]["ranks"],
        setup_s=restore["agent_setup_s"],
        criu_s=restore["criu_restore_s"],
        cuda_s=restore["cuda_restore_s"] or 0.0,
        wake_s=restore["answered_s"] - restore["resumed_s"],
    )


def _scaling(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, object]]:
    """Say how many times as fast as one GPU more of them are, each way."""
    first = rows[0]
    return [
        {
            "gpus": row["gpus"],
            "pinned": round(row["pinned"] / first["pinned"], 2),
            **{
                name: round(row[name]["gb_per_s"] / first[name]["gb_per_s"], 2)
                for name in ("store", "store_xxh3", "registered")
            },
        }
        for row in rows
    ]
