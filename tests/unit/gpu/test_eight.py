"""The experiment with all GPUs of a machine: its arithmetic, and its parts on emulated GPUs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.blake3_host import host_kernels
from tests.support.gpu import emulated_environment
from tools.gpu import eight, room
from tools.gpu.compared import (
    PUBLISHED,
    Fixed,
    Targets,
    bottleneck,
    computed,
    concluded,
    counts_of,
    judged,
)
from tools.gpu.room import Machine, fitting_gib, memory_folder

ROOT = Path(__file__).parents[3]
GIB = 1 << 30
EIGHT = Machine(gpu_bytes=(139 * GIB,) * 8, host_bytes=550 * GIB, shared_bytes=280 * GIB, cores=128)


def fitting(wanted: float, machine: Machine = EIGHT, **changes: int) -> float:
    arguments = {"ranks": 8, "gpus": 8, "copies": 1, "rank_bytes": 7 * GIB}
    arguments |= {"budget_bytes": 4 * GIB, "folder_bytes": 500 * GIB}
    return fitting_gib(wanted, machine, **(arguments | changes))


def test_what_is_wanted_of_eight_gpus_fits() -> None:
    assert fitting(45) == 45
    assert fitting(22, copies=2) == 22
    assert fitting(45, copies=2) == 29, "bound by the host, in whole GiB"
    assert fitting(45, folder_bytes=280 * GIB) == 31, "bound by the folder"
    assert fitting(200, ranks=1) == 136, "bound by the GPU"


def test_ranks_share_gpus() -> None:
    assert fitting(45, gpus=1, ranks=4) == 34
    assert fitting(45, gpus=3, ranks=4) == 45


def test_little_fits_on_a_small_machine_and_nothing_on_none() -> None:
    small = Machine(gpu_bytes=(4 * GIB,), host_bytes=4 * GIB, shared_bytes=2 * GIB, cores=2)
    few = {"ranks": 1, "gpus": 1, "rank_bytes": GIB // 2, "budget_bytes": GIB // 4}
    assert fitting(45, small, **few, folder_bytes=GIB) == pytest.approx(0.75)
    with pytest.raises(ValueError, match="8 ranks do not fit: the host"):
        fitting(45, small, gpus=1)
    with pytest.raises(ValueError, match="1 ranks do not fit: a GPU"):
        fitting(
            45,
            EIGHT.__class__(gpu_bytes=(GIB,), host_bytes=99 * GIB, shared_bytes=GIB, cores=1),
            ranks=1,
            gpus=1,
        )


@pytest.mark.parametrize(
    ("gpus", "counts"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8])]
)
def test_counts(gpus: int, counts: list[int]) -> None:
    assert list(counts_of(gpus)) == counts


@pytest.mark.parametrize(
    ("rate", "beside", "word"),
    [
        (390.0, {}, "the bus"),
        (150.0, {}, "unknown"),
        (150.0, {"processes": 220.0}, "the interpreter"),
        (150.0, {"processes": 160.0, "read_and_copy": 160.0}, "host memory"),
        (150.0, {"read_alone": 160.0, "read_and_copy": 190.0}, "host memory"),
        (150.0, {"processes": 160.0, "read_alone": 300.0}, "the filling itself"),
    ],
)
def test_bottlenecks(rate: float, beside: dict[str, float], word: str) -> None:
    assert bottleneck(rate, pinned=420.0, **beside).startswith(word)


def test_targets_are_of_the_pinned_rate_of_the_same_run() -> None:
    found = judged(
        {"pinned": 420.0, "cache": 350.0, "store": 200.0, "restore_s": 9.0}, Targets(restore_s=8.0)
    )
    assert found["cache"] == {"of_pinned": 0.833, "wanted": 0.8, "met": True}
    assert found["store"] == {"of_pinned": 0.476, "wanted": 0.5, "met": False}
    assert found["restore_s"] == {"seconds": 9.0, "wanted": 8.0, "met": False}
    assert "cached_restore_s" not in found


def test_published_sizes_are_computed_and_called_so() -> None:
    fixed = Fixed(ranks=4, setup_s=0.5, criu_s=2.0, cuda_s=1.0, wake_s=0.5)
    rows = computed({"cache": (50.0, 1)}, fixed)
    assert len(rows) == len(PUBLISHED)
    largest = next(row for row in rows if row["artifact_gb"] == 1039.09)
    assert largest["cache_restore_s"] == pytest.approx(2.0 + 1039.09 / 400, abs=0.1)
    assert not largest["cache_is_of_as_many_gpus"]
    rows = computed({"cache": (4000.0, 8)}, fixed)
    assert rows[-1]["cache_restore_s"] == 4.0, "CRIU takes longer then"
    assert rows[-1]["cache_is_of_as_many_gpus"]


def test_parts_that_were_cut_short_say_nothing() -> None:
    assert concluded({}, Targets()) == {}
    cut = {"stream": {"rows": [{"gpus": 1, "pinned": 50.0}]}, "restore": {"capture": {}}}
    assert concluded(cut, Targets()) == {}


def test_results_of_runs_are_put_together(tmp_path: Path) -> None:
    for number, name in enumerate(("pinned", "stream")):
        report = {"when": str(number), "command": [], "gpus": ["x"], "parts": {name: {"rows": []}}}
        (tmp_path / f"{number}.json").write_text(json.dumps(report), encoding="utf-8")
    out = tmp_path / "all.json"
    paths = [str(tmp_path / f"{number}.json") for number in range(2)]
    assert eight.main(["--merge", *paths, "--out", str(out)]) == 0
    merged = json.loads(out.read_text(encoding="utf-8"))
    assert merged["parts"]["pinned"]["when"] == "0"
    assert list(merged["parts"]) == ["pinned", "stream"]


@pytest.mark.slow
def test_a_folder_in_memory_goes_with_all_that_is_in_it() -> None:
    """Also one that is larger than what `/dev/shm` has, where mounting is allowed."""
    size = room.SHARED_MEMORY.stat().st_blksize + (1 << 50)
    with memory_folder(size) as (folder, _):
        (folder / "inside").mkdir()
        (folder / "inside" / "file").write_bytes(b"x")
    assert not folder.exists()


def run_eight(folder: Path, *arguments: str, gpus: int, seconds: int = 200) -> dict[str, Any]:
    """Run it with emulated GPUs; its process has a driver and settings of its own."""
    code = folder / "code"
    code.write_bytes(b"EMULATED-CUDA:" + os.fsencode(host_kernels()))
    out = folder / "eight.json"
    seed = 0x51520000 + gpus
    small = ["--store-gib", "0.03125", "--cache-gib", "0.03125", "--small-gib", "0.03125"]
    small += ["--stream-gib", "0.03125", "--memory", "0.25", "--engine", "driver"]
    done = subprocess.run(  # noqa: S603 - this interpreter
        [
            *(sys.executable, "-m", "tools.gpu.eight", "--code", str(code), "--out", str(out)),
            *(*small, *arguments),
        ],
        cwd=ROOT,
        env={**os.environ, **emulated_environment(devices=gpus, memory=6 * GIB, seed=seed)},  # noqa: TID251 - handed on
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    report: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    report["exit_code"] = done.returncode
    report["errors"] = done.stderr
    return report


@pytest.mark.slow
def test_three_emulated_gpus_are_filled_at_once(tmp_path: Path) -> None:
    found = run_eight(tmp_path, "--parts", "pinned,stream", "--threads-only", gpus=3)
    assert found["exit_code"] == 0, found["errors"]
    rows = found["parts"]["stream"]["rows"]
    assert [row["gpus"] for row in rows] == [1, 2, 3]
    assert all(len(row["registered"]["each"]) == row["gpus"] for row in rows)
    assert set(found["parts"]["stream"]["bottleneck"]) == {"store", "registered"}
    assert [row["gpus"] for row in found["conclusions"]["scaling"]] == [1, 2, 3]


@pytest.mark.slow
def test_what_is_known_when_the_time_is_up_is_written_down(tmp_path: Path) -> None:
    """The first part is done within two seconds, the second is cut short or not begun."""
    found = run_eight(tmp_path, "--parts", "pinned,stream", "--limit", "2.5", gpus=1)
    assert found["exit_code"] == 1
    assert found["parts"]["pinned"]["rows"][0]["gb_per_s"] > 0
    assert "the time was up" in found["parts"]["stream"]["error"]


@pytest.mark.slow
@pytest.mark.criu
def test_two_emulated_ranks_come_back_from_store_and_cache(tmp_path: Path, criu: object) -> None:
    """Goal: a process for each rank is the same after it was captured, ended and restored.

    Method: the program compares checksums itself; here it is looked at what it found.
    """
    found = run_eight(tmp_path, "--parts", "cached", gpus=2)
    assert found["exit_code"] == 0, found["errors"]
    part = found["parts"]["cached"]
    assert part["ok"]
    assert part["capture"]["external_bytes"] >= 2 * GIB // 32
    assert part["store_restores"][0]["external_sources"]["store"] >= 2 * GIB // 32
    last = part["cached_restores"][-1]
    assert last["external_sources"]["store"] == last["external_sources"]["cache"] == 0
    assert last["external_sources"]["registered"] == part["cache"]["registered_bytes"]
    assert [one["gpu"] for one in last["gpus"]] == [0, 1]
    assert found["conclusions"]["cached"]["cached_restore_s"]["seconds"] > 0


@pytest.mark.slow
@pytest.mark.criu
def test_a_daemon_puts_into_its_cache_what_it_restored(tmp_path: Path, criu: object) -> None:
    found = run_eight(tmp_path, "--parts", "resident", gpus=2)
    assert found["exit_code"] == 0, found["errors"]
    first, *later = found["parts"]["resident"]["restores"]
    assert first["external_sources"]["store"] >= 2 * GIB // 32
    assert first["locked_bytes"] >= 2 * GIB // 32
    for one in later:
        assert one["external_sources"]["store"] == one["external_sources"]["cache"] == 0
