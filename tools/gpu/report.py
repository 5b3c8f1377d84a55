"""What every program here says about where it ran, and where its result goes."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from snapstore.clock import SystemClock, format_utc

if TYPE_CHECKING:
    from collections.abc import Mapping

    from snapagent.gpu.driver import Driver

__all__ = ["make_report", "save_report", "write_report"]

_PACKAGES = ("numpy", "cuda-bindings", "nvidia-cuda-nvrtc", "blake3", "xxhash", "zstandard")


def make_report(name: str, driver: Driver, results: Mapping[str, object]) -> dict[str, object]:
    """Return results with what is to be known of where they are from."""
    version = driver.version
    return {
        "what": name,
        "when": format_utc(SystemClock().now_ns()),
        "gpus": [f"{one.name} (node {one.numa_node}, {one.pci})" for one in driver.devices],
        "cuda": f"{version // 1000}.{version % 1000 // 10}",
        "driver": _driver_version(),
        "machine": {"cores": len(os.sched_getaffinity(0)), "kernel": platform.release()},
        "python": platform.python_version(),
        "packages": {package: _version(package) for package in _PACKAGES},
        **results,
    }


def save_report(path: Path, report: Mapping[str, object]) -> None:
    """Write a report to a file: what was there, or all of it."""
    text = json.dumps(report, indent=2, default=str)
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_text(text + "\n", encoding="utf-8")
    unfinished.replace(path)


def write_report(name: str, driver: Driver, results: Mapping[str, object]) -> None:
    """Print results as JSON, and write them to `$OUT/NAME.json`, or into this directory."""
    report = make_report(name, driver, results)
    print(json.dumps(report, indent=2))
    save_report(Path(os.environ.get("OUT", "."), f"{name}.json"), report)
    if results.get("failures"):
        sys.exit(1)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _driver_version() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    return text.splitlines()[0].split("  ")[1] if "  " in text else text[:80]
