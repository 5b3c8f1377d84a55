"""How fast GPUs fetch page-locked memory with nothing else to do, any number of them at once."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, NamedTuple

from snapagent.gpu.arena import near_gpu
from snapagent.gpu.hashing import device_buffer
from snapstore.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from snapagent.gpu.driver import Gpu

__all__ = ["PinnedRate", "pinned_rate"]

MIB: Final = 1 << 20
BLOCK_BYTES: Final = 64 * MIB
"""Long, so that neither calls nor the interpreter count; more than fits a processor's cache, for
several GPUs together."""
_BATCH: Final = 8
_SECONDS: Final = 1.0


class PinnedRate(NamedTuple):
    """GB/s.

    Attributes:
        all: Of all GPUs together, until the last has ended.
        each: Of each.
    """

    all: float
    each: list[float]


def pinned_rate(
    gpus: Sequence[Gpu], *, seconds: float = _SECONDS, block_bytes: int = BLOCK_BYTES
) -> PinnedRate:
    """Let all of them copy at once for a while.

    Raises:
        GpuFailed: Memory cannot be had.
    """
    with contextlib.ExitStack() as stack:
        places = [stack.enter_context(_place(gpu, block_bytes)) for gpu in gpus]
        together = threading.Barrier(len(gpus))
        clock = SystemClock()

        def copy(gpu: Gpu, place: _Place) -> tuple[int, float]:
            together.wait()
            begin_s, done = clock.monotonic_s(), 0
            while clock.monotonic_s() - begin_s < seconds:
                for _ in range(_BATCH):
                    gpu.copy_in(place.device, place.host, block_bytes, place.stream)
                gpu.stream_synchronize(place.stream)
                done += _BATCH * block_bytes
            return done, clock.monotonic_s() - begin_s

        with ThreadPoolExecutor(len(gpus)) as executor:
            found = list(executor.map(copy, gpus, places))
    longest = max(took for _, took in found)
    return PinnedRate(
        all=round(sum(done for done, _ in found) / longest / 1e9, 2),
        each=[round(done / took / 1e9, 2) for done, took in found],
    )


class _Place(NamedTuple):
    host: int
    device: int
    stream: int


@contextlib.contextmanager
def _place(gpu: Gpu, block_bytes: int) -> Iterator[_Place]:
    with contextlib.ExitStack() as stack:
        with near_gpu(gpu):
            host = gpu.host_alloc(block_bytes)
        stack.callback(gpu.host_free, host)
        device = stack.enter_context(device_buffer(gpu, block_bytes))
        stream = gpu.stream_create()
        stack.callback(gpu.stream_destroy, stream)
        yield _Place(host, device, stream)
