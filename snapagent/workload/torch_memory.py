"""What PyTorch allocates, in memory that outlives the process: a `MemPool` over `DeviceMemory`.

torch's caching allocator asks its pool for segments through two C functions, which are callbacks
into Python here; they are called rarely, since it keeps and divides what it has. Nothing of torch
is changed: tensors, `torch.compile` and CUDA graphs work as with any other pool.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from typing import TYPE_CHECKING, Any

from snapagent.workload.device_memory import DeviceMemory
from snapagent.workload.errors import ExternalMemoryError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["TorchPool", "torch_pool"]

_ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
_FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)

_kept: list[TorchPool] = []
"""torch has the addresses of their callbacks for as long as the process lives."""


class SegmentSource:
    """Gives segments of GPU memory through functions of C. Thread-safe.

    A function of C cannot raise: what went wrong is in `error`, and torch says out of memory.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        self.error: BaseException | None = None
        """The last one of an allocation or a free."""
        self._allocate = _ALLOCATE(self._on_allocate)
        self._free = _FREE(self._on_free)

    @property
    def addresses(self) -> tuple[int, int]:
        """Of the functions that allocate and free; they are valid for as long as this is."""
        pair = (self._allocate, self._free)
        first, second = (ctypes.cast(one, ctypes.c_void_p).value or 0 for one in pair)
        return first, second

    def _on_allocate(self, size_bytes: int, device: int, _stream: int | None) -> int | None:
        try:
            return self._memory.allocate_bytes(size_bytes, device)
        except BaseException as error:  # noqa: BLE001 - cannot go through a function of C
            self._note(error)
            return None

    def _on_free(self, address: int, _size_bytes: int, _device: int, _stream: int | None) -> None:
        try:
            self._memory.take_back(address)
        except BaseException as error:  # noqa: BLE001 - cannot go through a function of C
            self._note(error)

    def _note(self, error: BaseException) -> None:
        with self._lock:
            self.error = error


class TorchPool:
    """Memory pools of torch whose memory can be released and resumed around a capture.

    ::

        pool = TorchPool()
        with pool.use():
            model = Model().cuda()     # everything that is allocated in here is in the pool
        pool.release()                 # a capture can be taken now
        pool.resume()                  # the same addresses, the same bytes

    Allocate in a pool from one thread at a time: torch may hold its own lock while it asks for
    memory, which needs Python's, and another thread may hold the latter and want the former.
    """

    def __init__(
        self,
        memory: DeviceMemory | None = None,
        *,
        devices: Sequence[int] | None = None,
        **wishes: Any,  # noqa: ANN401 - of DeviceMemory
    ) -> None:
        """Make pools; torch has to be there, with CUDA.

        Args:
            memory: Where their segments come from; by default one of their own.
            devices: The numbers of the GPUs; by default the current one. torch has a pool for each.
            wishes: Arguments of `DeviceMemory`, if there is none.

        Raises:
            BrokerUnreachable: There is no broker.
            MemoryRefused: It does not want this workload, or there is no CUDA driver.
        """
        import torch  # type: ignore[import-not-found,unused-ignore] # noqa: PLC0415 - optional

        torch.cuda.init()
        self.memory = memory if memory is not None else DeviceMemory(**wishes)
        self._source = SegmentSource(self.memory)
        make = torch._C._cuda_customAllocator  # noqa: SLF001 - has no other name
        self._allocator = make(*self._source.addresses)
        self._torch = torch
        self._pools: dict[int, Any] = {}
        for device in devices if devices is not None else [torch.cuda.current_device()]:
            # A pool is of the device that is current when it is made.
            with torch.cuda.device(device):
                self._pools[device] = torch.cuda.MemPool(self._allocator)
        _kept.append(self)

    @contextlib.contextmanager
    def use(self) -> Iterator[TorchPool]:
        """Let this thread allocate in the pools.

        Raises:
            ExternalMemoryError: Memory could not be had; torch's own error is its cause.
        """
        self._source.error = None
        try:
            with contextlib.ExitStack() as stack:
                for device, pool in self._pools.items():
                    stack.enter_context(self._torch.cuda.use_mem_pool(pool, device))
                yield self
        except self._torch.OutOfMemoryError as error:
            if isinstance(self._source.error, ExternalMemoryError):
                raise self._source.error from error
            raise

    def release(self) -> None:
        """Wait for the GPUs, and unmap all memory of the pools; see `DeviceMemory.release`."""
        self.memory.release()

    def resume(self, timeout_s: float | None = None) -> None:
        """Map all memory of the pools again where it was; see `DeviceMemory.resume`."""
        self.memory.resume(timeout_s)


@contextlib.contextmanager
def torch_pool(
    memory: DeviceMemory | None = None,
    *,
    devices: Sequence[int] | None = None,
    **wishes: Any,  # noqa: ANN401 - of DeviceMemory
) -> Iterator[TorchPool]:
    """Let torch allocate in external memory within this context; see `TorchPool`.

    ::

        with torch_pool() as pool:
            model = Model().cuda()
    """
    pool = TorchPool(memory, devices=devices, **wishes)
    with pool.use():
        yield pool
