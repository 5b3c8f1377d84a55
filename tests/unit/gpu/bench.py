"""An emulated GPU with all that a stream or a capture takes, for tests."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Self

import pytest

from snapagent.gpu.arena import PinnedArena
from snapagent.gpu.driver import Driver, Gpu, Lane
from snapagent.gpu.hashing import PieceHasher
from snapagent.gpu.stream import GpuStream
from snapstore.units import MIB
from tests.support.blake3_host import emulated_kernels
from tests.support.gpu import emulated_driver

__all__ = ["Bench", "GpuBehind", "LaneBehind", "open_bench"]


class Bench(NamedTuple):
    driver: Driver
    gpu: Gpu
    arena: PinnedArena
    hasher: PieceHasher
    stack: contextlib.ExitStack

    def keep(self, stream: GpuStream) -> GpuStream:
        """Close it with the rest."""
        return self.stack.enter_context(stream)


@contextlib.contextmanager
def open_bench(
    monkeypatch: pytest.MonkeyPatch, name: str, *, seed: int, delay_us: int
) -> Iterator[Bench]:
    """Open a GPU and what belongs to it.

    Args:
        monkeypatch: Of the test that it is for.
        name: Of its copy of the driver, together with the seed.
        seed: Of the emulation.
        delay_us: What each copy waits.
    """
    driver = emulated_driver(
        monkeypatch, f"{name}-{seed}", devices=1, memory=256 * MIB, seed=seed, delay_us=delay_us
    )
    with (
        driver.open(0) as gpu,
        PinnedArena(gpu, slots=6) as arena,
        PieceHasher(gpu, emulated_kernels()) as hasher,
        contextlib.ExitStack() as stack,
    ):
        yield Bench(driver, gpu, arena, hasher, stack)


class LaneBehind:
    """A lane behind it, for tests of a bus that does something to what goes over it."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.lane.__exit__()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lane, name)


class GpuBehind:
    """A GPU behind it, with other lanes."""

    def __init__(self, gpu: Gpu, change: Callable[[Lane], LaneBehind]) -> None:
        self._gpu = gpu
        self._change = change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gpu, name)

    def lane(self, places: int, *, blocking: bool = False) -> LaneBehind:
        return self._change(self._gpu.lane(places, blocking=blocking))
