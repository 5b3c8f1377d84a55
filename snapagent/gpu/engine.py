"""What the agent keeps of each GPU that it fills or stores memory of: made once, used by all.

Page-locked memory and the context cost time to make, and the context half a gibibyte of the GPU's
memory, so both are made when they are first needed, or when the agent starts, and stay.
"""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from snapagent.gpu.arena import SLOT_BYTES, PinnedArena
from snapagent.gpu.capturing import CaptureReport, GpuCapture
from snapagent.gpu.hashing import PieceHasher
from snapagent.gpu.kernels import KernelsUnavailable, load_kernels
from snapagent.gpu.registered import RegisteredFiles
from snapagent.gpu.stream import GpuStream, StreamReport

if TYPE_CHECKING:
    from snapagent.gpu.driver import Driver, Gpu

__all__ = ["GpuEngine", "GpuEngines", "GpuSettings"]

_WORKERS_MAX: Final = 12
"""More get less: what they have in hand does not fit the processor's cache."""
_SLOTS_PER_WORKER: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSettings:
    """How memory of GPUs is filled and stored.

    Attributes:
        workers: Threads for each GPU; 0 means its share of the usable cores, at most 12 for one GPU
            and 6 for each of several.
        pinned_bytes: Page-locked memory for each GPU; 0 means six slots of 4 MiB for each thread.
        part_bytes: How much is read at a time that GPUs check; 0 for 4 MiB, the most.
        registered_bytes: How much of a node cache may be page-locked, for all GPUs together.
        kernels: Where compiled kernels are kept.
        code: Kernels that are compiled already; by default NVRTC compiles them.
        check_all: Whether all that is captured is hashed again by the processor.
        blocking: Threads that wait for a GPU sleep, where they would spin otherwise.
    """

    workers: int = 0
    pinned_bytes: int = 0
    part_bytes: int = 0
    registered_bytes: int = 0
    kernels: Path = Path("/var/lib/snapagent/kernels")
    code: bytes | None = None
    check_all: bool = False
    blocking: bool = False

    def workers_for(self, gpus: int) -> int:
        """How many threads each of so many GPUs has."""
        cores = len(os.sched_getaffinity(0))
        most = _WORKERS_MAX if gpus <= 1 else _WORKERS_MAX // 2
        return self.workers or max(2, min(most, cores // max(gpus, 1)))

    def slots_for(self, gpus: int) -> int:
        """How many slots each of so many GPUs has."""
        wanted = self.pinned_bytes // SLOT_BYTES
        return max(_SLOTS_PER_WORKER, wanted or _SLOTS_PER_WORKER * self.workers_for(gpus))


class GpuEngine:
    """One GPU, ready. A context manager.

    Attributes:
        gpu: It; stays open.
        hasher: Hashes on it, if there are kernels for it.
        without_kernels: Why there are none.
        stream: Fills its memory.
        capture: Stores its memory.
        last_fill: What the last fill did, and which step was its bottleneck.
        last_capture: What storing the last region did.
    """

    def __init__(self, driver: Driver, ordinal: int, settings: GpuSettings) -> None:
        """Open it, and make everything.

        Raises:
            GpuFailed: The driver failed.
        """
        count = len(driver.devices)
        self.without_kernels = ""
        self.last_fill: StreamReport | None = None
        self.last_capture: CaptureReport | None = None
        with contextlib.ExitStack() as stack:
            self.gpu = stack.enter_context(driver.open(ordinal))
            arena = stack.enter_context(PinnedArena(self.gpu, slots=settings.slots_for(count)))
            self.hasher = self._load_hasher(settings)
            if self.hasher is not None:
                stack.enter_context(self.hasher)
            self.stream = stack.enter_context(
                GpuStream(
                    self.gpu,
                    arena,
                    self.hasher,
                    workers=settings.workers_for(count),
                    part_bytes=settings.part_bytes or SLOT_BYTES,
                    blocking=settings.blocking,
                )
            )
            self.capture = stack.enter_context(
                GpuCapture(self.gpu, arena, self.hasher, check_all=settings.check_all)
            )
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give everything back; nobody fills or stores any more. Idempotent."""
        self._stack.close()

    def _load_hasher(self, settings: GpuSettings) -> PieceHasher | None:
        try:
            code = settings.code
            if code is None:
                code = load_kernels(self.gpu.device.capability, settings.kernels)
        except KernelsUnavailable as error:
            # The processor can do it as well, only not as fast.
            self.without_kernels = str(error)
            return None
        return PieceHasher(self.gpu, code)


class GpuEngines:
    """Those of all GPUs, each made when it is first asked for. Thread-safe; a context manager."""

    def __init__(self, settings: GpuSettings | None = None) -> None:
        """Prepare; no driver is asked for yet."""
        self.settings = settings or GpuSettings()
        self.registered = RegisteredFiles(self.settings.registered_bytes)
        self._lock = threading.Lock()
        self._made: dict[str, GpuEngine] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def of(self, gpu: Gpu) -> GpuEngine:
        """Return that of a GPU.

        Raises:
            GpuFailed: The driver failed.
        """
        uuid = gpu.device.uuid
        with self._lock:
            found = self._made.get(uuid)
            if found is None:
                found = GpuEngine(gpu.driver, gpu.device.ordinal, self.settings)
                self._made[uuid] = found
            return found

    @property
    def made(self) -> list[GpuEngine]:
        """Those that were made; does not wait for one that is being made."""
        return [*self._made.values()]

    def prepare(self, driver: Driver) -> None:
        """Make those of all GPUs now, so that the first restore does not wait for it.

        Raises:
            GpuFailed: The driver failed.
        """
        for device in driver.devices:
            with driver.open(device.ordinal) as gpu:
                self.of(gpu)

    def close(self) -> None:
        """Give everything back. Idempotent."""
        with self._lock:
            made, self._made = self._made, {}
        self.registered.close()
        for one in made.values():
            one.close()
