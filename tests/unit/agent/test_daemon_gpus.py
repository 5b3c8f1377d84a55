"""What the daemon has of GPUs, on the emulated driver and on none."""

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapagent.config import Settings
from snapagent.gpu.engine import GpuSettings
from snapagent.gpu.owned import GpuMemory
from snapagent.server.gpus import DaemonGpus
from snapagent.server.stores import Stores
from snapagent.workload.libcuda import LIBRARY_VARIABLE
from snapstore.units import MIB
from tests.support.blake3_host import emulated_kernels
from tests.support.gpu import emulated_environment
from tests.support.waiting import wait_until

_seeds = itertools.count((os.getpid() << 8) + 0xC0)


@contextlib.contextmanager
def serving(settings: GpuSettings, said: list[str], *, prepare: bool) -> Iterator[DaemonGpus]:
    memory = GpuMemory(settings)
    with (
        contextlib.closing(memory.engines),
        contextlib.closing(Stores(Settings())) as stores,
        contextlib.closing(DaemonGpus(memory, stores, prepare=prepare, say=said.append)) as gpus,
    ):
        gpus.start()
        yield gpus


@pytest.mark.slow
def test_everything_is_made_at_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seed = next(_seeds)
    environment = emulated_environment(f"daemon-{seed}", devices=2, memory=64 * MIB, seed=seed)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    settings = GpuSettings(
        workers=2, registered_bytes=5 * MIB, kernels=tmp_path, code=emulated_kernels()
    )
    said: list[str] = []
    with serving(settings, said, prepare=True) as gpus:

        def is_ready() -> bool:
            told = gpus.describe()
            return told is not None and all(one.ready for one in told.gpus)

        wait_until(is_ready, "all GPUs are ready")
        told = gpus.describe()
        assert told is not None
        assert [one.model for one in told.gpus] == ["Emulated GPU 0"] * 2
        for one in told.gpus:
            assert (one.workers, one.pinned_bytes, one.hashes) == (2, 48 * MIB, True)
            assert (one.without_kernels, one.last_fill_bottleneck) == (None, None)
        assert (told.registered_bytes, told.registered_bytes_max, told.warming) == (0, 5 * MIB, 0)
    assert not said


def test_without_a_driver_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIBRARY_VARIABLE, "/nowhere/libcuda.so.1")
    said: list[str] = []
    with serving(GpuSettings(), said, prepare=True) as gpus:
        assert gpus.describe() is None
    assert not said


def test_when_it_is_not_wanted_no_driver_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in emulated_environment(f"daemon-{next(_seeds)}").items():
        monkeypatch.setenv(name, value)
    with serving(GpuSettings(), [], prepare=False) as gpus:
        pass
    assert gpus.describe() is None
