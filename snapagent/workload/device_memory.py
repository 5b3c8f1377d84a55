"""GPU memory of a workload that belongs to the agent's broker, and so outlives the process.

The broker makes physical memory and keeps a descriptor of it; here it is imported and mapped at an
address that was reserved. `release` unmaps it and keeps the reservation, which belongs to the
driver's state of this process and comes back with it after a restore. So pointers, wherever they
are, also in captured CUDA graphs, mean the same bytes again after `resume`.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import uuid
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from snapagent.workload import libcuda
from snapagent.workload.dlpack import CUDA_DEVICE, capsule
from snapagent.workload.errors import MemoryRefused
from snapagent.workload.external_memory import (
    GRAIN_BYTES,
    ExternalMemory,
    MemoryRegion,
    override,
)
from snapagent.workload.free_list import FreeList
from snapagent.workload.libcuda import CudaCallError, CudaMissingError
from snapagent.workload.shared_gpu import opened_bytes, restores_opened

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["DeviceBlock", "DeviceMemory"]

_REGION_BYTES: Final = 256 << 20
"""Larger than on the host: a GPU is filled with few hundreds of them, each with a descriptor."""
_MARKER_NAME: Final = "snapagent-memory"
"""As files of host memory are called, which the agent looks for as well."""
_ALIGNMENT: Final = 512
"""What CUDA's own allocators promise."""


class DeviceMemory(ExternalMemory):
    """External memory of one process on any of its GPUs. All methods are thread-safe.

    A child of `fork` has nothing of it, as of everything in CUDA. Using released memory is an
    error that breaks the CUDA context (`CUDA_ERROR_ILLEGAL_ADDRESS`), never wrong data.

    ::

        memory = DeviceMemory()
        weights = memory.allocate(count * 2, device=0).torch(torch.float16, count)
        memory.release()   # waits for the GPUs; a capture can be taken now
        memory.resume()    # here, or in what was restored from it
    """

    _version = 2

    def __init__(
        self,
        socket_path: str | None = None,
        *,
        region_bytes: int = _REGION_BYTES,
        rank: int | str = "host",
        driver_path: str | None = None,
        refuse_opened: bool = True,
    ) -> None:
        """Make the acquaintance of the broker, and initialise CUDA in this process.

        Args:
            socket_path: Of the broker; by default `$SNAPAGENT_MEMORY_SOCKET`.
            region_bytes: What is asked of the broker at a time, if a block does not need more.
            rank: Which rank of a snapshot it goes to, a number or `host`.
            driver_path: Of the driver's library; by default `$SNAPAGENT_LIBCUDA`, or the system's.
            refuse_opened: Whether `release` looks for memory of other processes that is open.

        Raises:
            BrokerUnreachable: There is none.
            MemoryRefused: It does not want this workload, or there is no CUDA driver.
        """
        super().__init__(socket_path, region_bytes=region_bytes, rank=rank)
        with _as_refusal("CUDA cannot be used"):
            self._cuda = libcuda.load_libcuda(driver_path)
        self._may_refuse = refuse_opened and not restores_opened()
        self._contexts: dict[int, int] = {}
        """Primary contexts, which are kept from now on, by the number of the GPU."""
        self._marker = -1
        self._connected()
        self._mark(is_mapped=True)

    def allocate(
        self, size_bytes: int, *, device: int = 0, alignment: int = _ALIGNMENT
    ) -> DeviceBlock:
        """Allocate a block. Its content is undefined, like that of `cudaMalloc`.

        Args:
            size_bytes: How much; at least 1.
            device: The number of the GPU, as this process counts them.
            alignment: Its address is a multiple of it; a power of two of at most 2 MiB.

        Raises:
            MemoryReleased: After `release`, before `resume`.
            MemoryRefused: The broker gives no more, or the GPU has no more.
            BrokerUnreachable: It is gone, and more is needed of it.
            NotTheOwner: This process is a child of the one that made this.
            ValueError: The size or alignment cannot be.
        """
        address = self._allocate(size_bytes, max(alignment, _ALIGNMENT), device)
        return DeviceBlock(self, address, size_bytes, device)

    def allocate_bytes(self, size_bytes: int, device: int) -> int:
        """Allocate without a block, for other allocators; goes back with `take_back`.

        Raises as `allocate` does.
        """
        return self._allocate(size_bytes, _ALIGNMENT, device)

    @override
    def _new_region_at(self, length: int, ordinal: int) -> MemoryRegion:
        device = self._uuid(ordinal)
        address = ctypes.c_uint64()
        with _as_refusal(f"{length} bytes of addresses cannot be reserved"):
            self._use(ordinal)
            self._cuda.call("cuMemAddressReserve", ctypes.byref(address), length, GRAIN_BYTES, 0, 0)
        free = FreeList(address.value, length)
        return MemoryRegion(self._next_number(), address.value, length, free, ordinal, device)

    @override
    def _give_addresses(self, region: MemoryRegion) -> None:
        with _as_refusal("addresses cannot be given back"):
            self._cuda.call("cuMemAddressFree", region.address, region.length)

    @override
    def _map_file(self, region: MemoryRegion) -> None:
        handle = ctypes.c_uint64()
        where = (region.address, region.length)
        with _as_refusal(f"{region.length} bytes cannot be mapped at {region.address:#x}"):
            self._cuda.call(
                "cuMemImportFromShareableHandle",
                ctypes.byref(handle),
                ctypes.c_void_p(region.fd),
                libcuda.HANDLE_POSIX_FD,
            )
            try:
                self._cuda.call("cuMemMap", *where, 0, handle.value, 0)
            finally:
                # The mapping has it as well.
                self._cuda.call("cuMemRelease", handle.value)
            try:
                access = libcuda.device_access(region.ordinal)
                self._cuda.call("cuMemSetAccess", *where, ctypes.byref(access), 1)
            except CudaCallError:
                self._cuda.code("cuMemUnmap", *where)
                raise

    @override
    def _unmap_file(self, region: MemoryRegion) -> None:
        with _as_refusal(f"the memory at {region.address:#x} cannot be unmapped"):
            self._cuda.call("cuMemUnmap", region.address, region.length)

    @override
    def _wait_for_devices(self) -> None:
        for ordinal in {region.ordinal for region in self._regions.values()}:
            if ordinal in self._contexts:
                with _as_refusal(f"GPU {ordinal} does not finish its work"), self._current(ordinal):
                    self._cuda.call("cuCtxSynchronize")

    @override
    def _note_device(self, region: MemoryRegion, device: str) -> None:
        region.device = device

    @override
    def release(self) -> None:
        """Wait for the GPUs, unmap all memory and let go of the broker; see `ExternalMemory`.

        Raises:
            MemoryRefused: It has memory of another process open (CUDA IPC, NCCL with peer access),
                with which it could not be restored. All stays as it was.
        """
        with self._lock:
            if not self._is_guest:
                self._refuse_opened()
                super().release()
                self._mark(is_mapped=False)

    @override
    def resume(self, timeout_s: float | None = None) -> None:
        """Map all memory again where it was; see `ExternalMemory`."""
        with self._lock:
            if not self._is_guest:
                super().resume(timeout_s)
                self._mark(is_mapped=not self._is_closed)

    def _refuse_opened(self) -> None:
        if self._is_released or not self._contexts or not self._may_refuse:
            return
        with self._current(next(iter(self._contexts))):
            opened = opened_bytes(self._cuda)
        if opened:
            raise MemoryRefused(
                f"this process has {opened} bytes of GPU memory of another process open, with "
                "which the CUDA driver could checkpoint it and could not restore it",
                next_step="destroy the communicators of NCCL (torch.distributed: "
                "destroy_process_group) and close what was opened by CUDA IPC before release; if "
                "it is a variable of a kernel's module, which looks the same, say "
                "refuse_opened=False when you make the memory",
            )

    def _mark(self, *, is_mapped: bool) -> None:
        """Let the agent see whether memory is mapped: the driver would checkpoint it all the same.

        It could not restore it: so the agent refuses a capture of whoever has such a file open.
        """
        if is_mapped and self._marker < 0:
            self._marker = os.memfd_create(_MARKER_NAME)
        elif not is_mapped and self._marker >= 0:
            os.close(self._marker)
            self._marker = -1

    @override
    def _become_guest(self) -> None:
        super()._become_guest()
        self._mark(is_mapped=False)

    @override
    def _close_regions(self, regions: Sequence[MemoryRegion]) -> None:
        if self._is_guest:
            return  # CUDA is not there in a child of fork.
        self._mark(is_mapped=False)
        for ordinal in {region.ordinal for region in regions}:
            # If it is broken, nothing that was begun goes on.
            with contextlib.suppress(CudaCallError), self._current(ordinal):
                self._cuda.call("cuCtxSynchronize")
        for region in regions:
            self._unmap(region)
            self._give_addresses(region)

    def _uuid(self, ordinal: int) -> str:
        """Return the broker's name of a GPU, which is another one after a restore elsewhere."""
        for region in self._regions.values():
            if region.ordinal == ordinal:
                return region.device
        raw = (ctypes.c_ubyte * 16)()
        with _as_refusal(f"there is no GPU {ordinal}"):
            self._cuda.call("cuDeviceGetUuid_v2", raw, ordinal)
        return f"GPU-{uuid.UUID(bytes=bytes(raw))}"

    def _use(self, ordinal: int) -> None:
        if ordinal not in self._contexts:
            context = ctypes.c_void_p()
            self._cuda.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal)
            self._contexts[ordinal] = context.value or 0

    @contextlib.contextmanager
    def _current(self, ordinal: int) -> Iterator[None]:
        """Make the context of a GPU current, and the caller's again afterwards."""
        self._use(ordinal)
        self._cuda.call("cuCtxPushCurrent_v2", self._contexts[ordinal])
        try:
            yield
        finally:
            self._cuda.code("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


class _Part(NamedTuple):
    """What `__cuda_array_interface__` is read of; keeps the block."""

    block: DeviceBlock
    pointer: int
    size_bytes: int

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {
            "shape": (self.size_bytes,),
            "typestr": "|u1",
            "data": (self.pointer, False),
            "version": 3,
        }


class DeviceBlock:
    """Some bytes of external GPU memory. Methods may be called from any thread.

    Arrays and tensors made of it keep it allocated. It goes back when it and all of them are gone,
    or with `free`, after which none of them may be used: other blocks get its bytes. The caller
    sees to it that the GPU does nothing with it any more then.
    """

    def __init__(self, home: DeviceMemory, address: int, size_bytes: int, device: int) -> None:
        """Only `DeviceMemory.allocate` makes one."""
        self._home = home
        self._is_free = False
        self.address = address
        self.size_bytes = size_bytes
        self.device = device

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """All of its bytes, for cupy, numba and others; see `torch`."""
        return self._part(0, self.size_bytes).__cuda_array_interface__

    def __dlpack__(self, **_: object) -> object:
        """Return all of its bytes as a DLPack capsule. The consumer must know no stream of ours."""
        self._check()
        return capsule(self, self.address, self.size_bytes, self.device)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Say where DLPack's consumers find it."""
        return (CUDA_DEVICE, self.device)

    def torch(self, dtype: Any, shape: int | Sequence[int], *, offset: int = 0) -> Any:  # noqa: ANN401 - torch is not needed
        """Return a torch tensor on the GPU that is some of its bytes.

        Args:
            dtype: Of the elements.
            shape: Of the tensor.
            offset: Where in the block it begins, in bytes; a multiple of the size of an element.

        Raises:
            MemoryReleased: It is not mapped now.
            ValueError: The block is too small for that.
        """
        import torch  # type: ignore[import-not-found,unused-ignore] # noqa: PLC0415 - optional

        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        length = math.prod(sizes) * dtype.itemsize
        part = self._part(offset, length)
        where = f"cuda:{self.device}"
        if not length:
            return torch.empty(sizes, dtype=dtype, device=where)
        return torch.as_tensor(part, device=where).view(dtype).view(sizes)

    def free(self) -> None:
        """Give the block back at once. Idempotent.

        Raises:
            MemoryReleased: It is not mapped now.
            NotTheOwner: This process is a child of the one that allocated it.
        """
        if not self._is_free:
            self._home.take_back(self.address)
            self._is_free = True

    def __del__(self) -> None:
        if not getattr(self, "_is_free", True):
            self._home.drop(self.address)

    def _part(self, offset: int, length: int) -> _Part:
        if offset < 0 or offset + length > self.size_bytes:
            raise ValueError(f"a block of {self.size_bytes} bytes has no {length} at {offset}")
        self._check()
        return _Part(self, self.address + offset, length)

    def _check(self) -> None:
        if self._is_free:
            raise ValueError(f"the block at {self.address:#x} was freed")
        self._home.check_mapped()


@contextlib.contextmanager
def _as_refusal(what: str) -> Iterator[None]:
    """Say errors of the driver as one of external memory."""
    try:
        yield
    except CudaCallError as error:
        raise MemoryRefused(f"{what}: {error}") from error
    except CudaMissingError as error:
        raise MemoryRefused(
            f"{what}: {error}", next_step="start the workload where there is a GPU and its driver"
        ) from error
