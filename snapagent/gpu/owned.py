"""Memory of GPUs that the agent owns: only descriptors keep it, and no context is needed for that.

Physical memory lives for as long as anybody has a handle, a mapping or a descriptor of it. So what
the agent keeps of a region of a GPU is one descriptor, as of a file in memory, which can be sent to
the workload and to the holder, neither of which needs a GPU for keeping it.
"""

from __future__ import annotations

import os
import threading

from snapagent.errors import GpuFailed
from snapagent.gpu.driver import Driver, load_driver
from snapagent.gpu.engine import GpuEngines, GpuSettings

__all__ = ["GpuMemory"]


class GpuMemory:
    """Makes and recognises memory of GPUs. Thread-safe; the driver is loaded when first needed."""

    def __init__(self, settings: GpuSettings | None = None) -> None:
        """Prepare; `settings` say how it is filled and stored."""
        self.engines = GpuEngines(settings)
        self._lock = threading.Lock()
        self._driver: Driver | None = None

    @property
    def driver(self) -> Driver:
        """Of this machine.

        Raises:
            GpuUnavailable: There is none.
        """
        with self._lock:
            if self._driver is None:
                self._driver = load_driver()
            return self._driver

    @property
    def loaded(self) -> Driver | None:
        """The driver, if somebody has needed it already; does not wait for its being loaded."""
        return self._driver

    def granularity(self, uuid: str) -> int:
        """Of what lengths on a GPU are multiples.

        Raises:
            GpuUnavailable: There is no such GPU.
        """
        return self.driver.granularity(self.driver.device(uuid).ordinal)

    def make(self, uuid: str, length: int) -> int:
        """Make memory on a GPU and return its descriptor; its content is undefined.

        Raises:
            GpuUnavailable: There is no such GPU.
            GpuOutOfMemory: It has not so much left.
            GpuFailed: It cannot be made.
        """
        return self.driver.make_memory_file(self.driver.device(uuid).ordinal, length)

    def has_room(self, uuid: str, length: int) -> bool:
        """Tell whether a GPU has so much memory left, by taking and giving it back.

        Raises:
            GpuUnavailable: There is no such GPU.
        """
        unit = self.granularity(uuid)
        try:
            os.close(self.make(uuid, -(-length // unit) * unit))
        except GpuFailed:
            return False
        return True

    def is_memory(self, fd: int, uuid: str, length: int) -> bool:
        """Tell whether a descriptor that somebody sent is of so much memory of this GPU."""
        driver = self.driver
        try:
            handle = driver.import_memory(fd)
        except GpuFailed:
            return False
        try:
            if driver.ordinal_of_memory(handle) != driver.device(uuid).ordinal:
                return False
            # Nothing else tells how long it is.
            address = driver.reserve(length)
            try:
                driver.map(address, length, handle, ())
                driver.unmap(address, length)
            finally:
                driver.free_addresses(address, length)
        except GpuFailed:
            return False
        finally:
            driver.release_memory(handle)
        return True
