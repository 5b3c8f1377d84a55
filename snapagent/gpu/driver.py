"""The CUDA driver, typed: devices, memory that processes can share, streams, kernels.

The library is loaded when it is first asked for. Every error is a `GpuFailed` with the function,
CUDA's name of the error and the device in it. All methods may be called from any thread, and let
other threads run while they wait; a `Gpu` makes its context the current one of whichever thread
calls it. Addresses of device memory, handles of physical memory, streams, events, modules and
functions are plain integers, as they are in CUDA; 0 is the default stream.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from snapagent.errors import GpuFailed, GpuOutOfMemory, GpuUnavailable
from snapagent.workload import libcuda
from snapagent.workload.libcuda import CudaCallError, CudaMissingError, Libcuda

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = [
    "U32",
    "U64",
    "Device",
    "Driver",
    "Gpu",
    "Lane",
    "address_of",
    "load_driver",
    "memory_at",
]

U32 = ctypes.c_uint32
"""Makes an argument of a kernel."""
U64 = ctypes.c_uint64
"""Makes an argument of a kernel; addresses are such."""

_NAME_BYTES: Final = 256
_PCI_BYTES: Final = 32
_CAPABILITY_MAJOR: Final = 75
_CAPABILITY_MINOR: Final = 76
_STREAM_NON_BLOCKING: Final = 1
_EVENT_BLOCKING_SYNC: Final = 1
_EVENT_DISABLE_TIMING: Final = 2
_HOST_PORTABLE: Final = 1
_GRANULARITY_MINIMUM: Final = 0
_SYSFS_PCI: Final = Path("/sys/bus/pci/devices")


class Device(NamedTuple):
    """A GPU as the driver describes it.

    Attributes:
        ordinal: Its number, in this process alone.
        uuid: `GPU-` and 32 hex digits in five groups, the same for everybody.
        name: The model.
        total_bytes: Of its memory.
        capability: Of its processors, major and minor.
        pci: Its address on the bus, as `/sys` spells it.
        numa_node: The node of host memory it is nearest to; none if the machine does not say.
    """

    ordinal: int
    uuid: str
    name: str
    total_bytes: int
    capability: tuple[int, int]
    pci: str
    numa_node: int | None


class Driver:
    """The driver of this machine, initialised. Make it with `load_driver`."""

    def __init__(self, library: Libcuda) -> None:
        self._library = library

    @property
    def library(self) -> Libcuda:
        """For calls that are not here."""
        return self._library

    def call(self, function: str, *arguments: Any, of: str = "") -> None:  # noqa: ANN401 - as C has them
        """Call a function of the driver.

        Args:
            function: Its name.
            arguments: As C has them.
            of: The device or process, for messages.

        Raises:
            GpuFailed: It returned an error.
        """
        try:
            self._library.call(function, *arguments)
        except CudaCallError as error:
            raise gpu_failed(error, of) from error
        except CudaMissingError as error:
            raise _unavailable(error) from error

    @functools.cached_property
    def version(self) -> int:
        """Of CUDA that the driver supports: 13000 is 13.0."""
        found = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(found))
        return found.value

    @functools.cached_property
    def devices(self) -> tuple[Device, ...]:
        """All GPUs that this process may use."""
        count = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        return tuple(self._describe(ordinal) for ordinal in range(count.value))

    def device(self, uuid: str) -> Device:
        """Return the GPU with this UUID.

        Raises:
            GpuUnavailable: There is none.
        """
        for one in self.devices:
            if one.uuid == uuid:
                return one
        raise GpuUnavailable(
            f"there is no GPU {uuid} here",
            next_step=f"there are {', '.join(one.uuid for one in self.devices) or 'none'}",
        )

    def open(self, ordinal: int) -> Gpu:
        """Use a GPU: retains its primary context, which takes some of its memory.

        Raises:
            GpuUnavailable: There is no such GPU.
            GpuFailed: It cannot be used.
        """
        if not 0 <= ordinal < len(self.devices):
            raise GpuUnavailable(f"there is no GPU {ordinal} here: it has {len(self.devices)}")
        return Gpu(self, self.devices[ordinal])

    # -- physical memory: no context is needed for it ---------------------------------------------

    def granularity(self, ordinal: int) -> int:
        """Of what size lengths of memory and addresses are multiples."""
        found = ctypes.c_size_t()
        properties = libcuda.device_memory(ordinal)
        self.call(
            "cuMemGetAllocationGranularity",
            ctypes.byref(found),
            ctypes.byref(properties),
            _GRANULARITY_MINIMUM,
            of=f"GPU {ordinal}",
        )
        return found.value

    def create_memory(self, ordinal: int, length: int) -> int:
        """Make physical memory on a GPU; returns its handle. Its content is undefined.

        Raises:
            GpuOutOfMemory: It has not so much left.
        """
        handle = ctypes.c_uint64()
        properties = libcuda.device_memory(ordinal)
        self.call(
            "cuMemCreate",
            ctypes.byref(handle),
            length,
            ctypes.byref(properties),
            0,
            of=f"{length} bytes on GPU {ordinal}",
        )
        return handle.value

    def release_memory(self, handle: int) -> None:
        """Give a handle back; the memory lives while it is mapped, or others have it."""
        self.call("cuMemRelease", handle)

    def export_memory(self, handle: int) -> int:
        """Return a new descriptor of physical memory, which keeps it as a handle does."""
        fd = ctypes.c_int(-1)
        self.call(
            "cuMemExportToShareableHandle", ctypes.byref(fd), handle, libcuda.HANDLE_POSIX_FD, 0
        )
        return fd.value

    def import_memory(self, fd: int) -> int:
        """Return a handle of the physical memory that a descriptor is of; the latter stays open.

        Raises:
            GpuFailed: It is none.
        """
        handle = ctypes.c_uint64()
        self.call(
            "cuMemImportFromShareableHandle",
            ctypes.byref(handle),
            ctypes.c_void_p(fd),
            libcuda.HANDLE_POSIX_FD,
            of=f"descriptor {fd}",
        )
        return handle.value

    def ordinal_of_memory(self, handle: int) -> int:
        """Return on which GPU physical memory is."""
        found = libcuda.AllocationProperties()
        self.call("cuMemGetAllocationPropertiesFromHandle", ctypes.byref(found), handle)
        ordinal: int = found.location.id
        return ordinal

    def make_memory_file(self, ordinal: int, length: int) -> int:
        """Make physical memory that only a descriptor keeps, which is returned.

        Raises:
            GpuOutOfMemory: The GPU has not so much left.
        """
        handle = self.create_memory(ordinal, length)
        try:
            return self.export_memory(handle)
        finally:
            self.release_memory(handle)

    # -- addresses and mappings -------------------------------------------------------------------

    def reserve(self, length: int, *, address: int = 0) -> int:
        """Reserve addresses for device memory; at `address` if they are free, else elsewhere."""
        found = ctypes.c_uint64()
        self.call("cuMemAddressReserve", ctypes.byref(found), length, 0, address, 0)
        return found.value

    def free_addresses(self, address: int, length: int) -> None:
        """Give up what `reserve` reserved."""
        self.call("cuMemAddressFree", address, length)

    def map(self, address: int, length: int, handle: int, ordinals: Sequence[int]) -> None:
        """Map physical memory at reserved addresses, for these GPUs to read and write."""
        self.call("cuMemMap", address, length, 0, handle, 0)
        if not ordinals:
            return
        try:
            access = (libcuda.AccessDescription * len(ordinals))(
                *(libcuda.device_access(ordinal) for ordinal in ordinals)
            )
            self.call("cuMemSetAccess", address, length, access, len(ordinals))
        except BaseException:
            with contextlib.suppress(GpuFailed):
                self.unmap(address, length)
            raise

    def unmap(self, address: int, length: int) -> None:
        """Unmap; the addresses stay reserved. Nothing may use them: wait for streams first."""
        self.call("cuMemUnmap", address, length)

    def _describe(self, ordinal: int) -> Device:
        of = f"GPU {ordinal}"
        uuid = (ctypes.c_ubyte * 16)()
        name = ctypes.create_string_buffer(_NAME_BYTES)
        pci = ctypes.create_string_buffer(_PCI_BYTES)
        total = ctypes.c_size_t()
        self.call("cuDeviceGetUuid_v2", uuid, ordinal, of=of)
        self.call("cuDeviceGetName", name, _NAME_BYTES, ordinal, of=of)
        self.call("cuDeviceGetPCIBusId", pci, _PCI_BYTES, ordinal, of=of)
        self.call("cuDeviceTotalMem_v2", ctypes.byref(total), ordinal, of=of)
        bus = pci.value.decode("ascii", "replace").lower()
        return Device(
            ordinal=ordinal,
            uuid=format_uuid(bytes(uuid)),
            name=name.value.decode("utf-8", "replace"),
            total_bytes=total.value,
            capability=(
                self.attribute(ordinal, _CAPABILITY_MAJOR),
                self.attribute(ordinal, _CAPABILITY_MINOR),
            ),
            pci=bus,
            numa_node=_numa_node(bus),
        )

    def attribute(self, ordinal: int, number: int) -> int:
        """Return an attribute of a GPU (`CUdevice_attribute`)."""
        found = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(found), number, ordinal, of=f"GPU {ordinal}")
        return found.value


class Gpu:
    """One GPU in use, with its primary context. A context manager; `close` gives it back."""

    def __init__(self, driver: Driver, device: Device) -> None:
        """Only `Driver.open` makes one."""
        self.driver = driver
        self.device = device
        self._of = f"GPU {device.ordinal}"
        self._lock = threading.Lock()
        context = ctypes.c_void_p()
        driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device.ordinal, of=self._of)
        self._context: int | None = context.value

    def close(self) -> None:
        """Let go of the context; it ends, and all that is in it, with its last user. Idempotent."""
        with self._lock:
            context, self._context = self._context, None
        if context is not None:
            # After an error that it cannot recover from, it goes with the process.
            with contextlib.suppress(GpuFailed):
                self._release()

    def _release(self) -> None:
        self.driver.call("cuDevicePrimaryCtxRelease_v2", self.device.ordinal, of=self._of)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, function: str, *arguments: Any) -> None:  # noqa: ANN401 - as C has them
        """Call a function of the driver in this GPU's context.

        Raises:
            GpuFailed: It returned an error.
        """
        self._call_quickly("cuCtxSetCurrent", self._context)
        self.driver.call(function, *arguments, of=self._of)

    def _call_quickly(self, function: str, *arguments: Any) -> None:  # noqa: ANN401 - as C has them
        """Call a function that never waits, without letting other threads run meanwhile."""
        library = self.driver.library
        code = library.quick(function)(*arguments)
        if code:
            raise gpu_failed(CudaCallError(function, code, library.error_name(code)), self._of)

    def memory_info(self) -> tuple[int, int]:
        """Return how many bytes are free, and how many there are."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def synchronize(self) -> None:
        """Wait until all streams of this context have done their work."""
        self.call("cuCtxSynchronize")

    @contextlib.contextmanager
    def mapped(self, fd: int, length: int) -> Iterator[int]:
        """Lend an address at which this GPU has the memory that a descriptor is of.

        Wait for all that uses it before this is left.
        """
        driver = self.driver
        handle = driver.import_memory(fd)
        with contextlib.ExitStack() as stack:
            stack.callback(driver.release_memory, handle)
            address = driver.reserve(length)
            stack.callback(driver.free_addresses, address, length)
            driver.map(address, length, handle, [self.device.ordinal])
            stack.callback(driver.unmap, address, length)
            yield address

    # -- host memory ------------------------------------------------------------------------------

    def host_alloc(self, length: int) -> int:
        """Allocate page-locked host memory, for all GPUs; returns its address. It takes long."""
        address = ctypes.c_void_p()
        self.call("cuMemHostAlloc", ctypes.byref(address), length, _HOST_PORTABLE)
        return address.value or 0

    def host_free(self, address: int) -> None:
        """Free what `host_alloc` gave."""
        self.call("cuMemFreeHost", address)

    def host_register(self, address: int, length: int) -> None:
        """Lock the pages of memory that is mapped already, for all GPUs."""
        self.call("cuMemHostRegister_v2", address, length, _HOST_PORTABLE)

    def host_unregister(self, address: int) -> None:
        """Unlock what `host_register` locked."""
        self.call("cuMemHostUnregister", address)

    # -- streams and events -----------------------------------------------------------------------

    def stream_create(self) -> int:
        """Make a stream that does not wait for the default one."""
        stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(stream), _STREAM_NON_BLOCKING)
        return stream.value or 0

    def stream_destroy(self, stream: int) -> None:
        """Give a stream back; what it still has to do is done."""
        self.call("cuStreamDestroy_v2", stream)

    def stream_synchronize(self, stream: int) -> None:
        """Wait until a stream has done all it was given."""
        self.call("cuStreamSynchronize", stream)

    def stream_is_done(self, stream: int) -> bool:
        """Tell whether a stream has done all it was given."""
        return self._is_done("cuStreamQuery", stream)

    def stream_wait_event(self, stream: int, event: int) -> None:
        """Let a stream wait for an event before it goes on."""
        self.call("cuStreamWaitEvent", stream, event, 0)

    def event_create(self, *, blocking: bool = False) -> int:
        """Make an event that takes no times.

        Args:
            blocking: Who waits for it sleeps meanwhile, where it would spin otherwise.
        """
        event = ctypes.c_void_p()
        flags = _EVENT_DISABLE_TIMING | (_EVENT_BLOCKING_SYNC if blocking else 0)
        self.call("cuEventCreate", ctypes.byref(event), flags)
        return event.value or 0

    def event_destroy(self, event: int) -> None:
        """Give an event back."""
        self.call("cuEventDestroy_v2", event)

    def event_record(self, event: int, stream: int) -> None:
        """Let an event happen when a stream has done what it was given until now."""
        self.call("cuEventRecord", event, stream)

    def event_is_done(self, event: int) -> bool:
        """Tell whether an event has happened; one that was never recorded has."""
        return self._is_done("cuEventQuery", event)

    def event_synchronize(self, event: int) -> None:
        """Wait for an event."""
        self.call("cuEventSynchronize", event)

    # -- copies and kernels: begun when these return, done when the stream is ---------------------

    def copy_in(
        self, to: int, host: int, length: int, stream: int, *, is_locked: bool = False
    ) -> None:
        """Copy from host memory, which stays as it is until the stream is done with it.

        With `is_locked` it is page-locked, and this does not wait.
        """
        self._copy("cuMemcpyHtoDAsync_v2", (to, host, length, stream), is_locked=is_locked)

    def copy_out(
        self, host: int, device: int, length: int, stream: int, *, is_locked: bool = False
    ) -> None:
        """Copy to host memory; see `copy_in`."""
        self._copy("cuMemcpyDtoHAsync_v2", (host, device, length, stream), is_locked=is_locked)

    def _copy(self, function: str, arguments: tuple[int, ...], *, is_locked: bool) -> None:
        if is_locked:
            self._call_quickly("cuCtxSetCurrent", self._context)
            self._call_quickly(function, *arguments)
        else:
            self.call(function, *arguments)

    def copy_within(self, to: int, device: int, length: int, stream: int) -> None:
        """Copy from device memory to device memory."""
        self._call_quickly("cuCtxSetCurrent", self._context)
        self._call_quickly("cuMemcpyDtoDAsync_v2", to, device, length, stream)

    def fill(self, to: int, value: int, length: int, stream: int) -> None:
        """Set bytes of device memory to a value."""
        self.call("cuMemsetD8Async", to, value, length, stream)

    def module_load(self, image: bytes) -> int:
        """Load kernels: cubin, fatbin or PTX."""
        module = ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), image + b"\0")
        return module.value or 0

    def module_unload(self, module: int) -> None:
        """Unload kernels; none of them may be under way."""
        self.call("cuModuleUnload", module)

    def module_function(self, module: int, name: str) -> int:
        """Return a kernel of a module."""
        function = ctypes.c_void_p()
        self.call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        return function.value or 0

    def launch(
        self,
        function: int,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        arguments: Sequence[ctypes.c_uint32 | ctypes.c_uint64],
        stream: int,
        *,
        shared_bytes: int = 0,
    ) -> None:
        """Start a kernel. Arguments are made with `U32` and `U64`, and are copied now."""
        pointers = (ctypes.c_void_p * max(1, len(arguments)))(
            *(ctypes.addressof(one) for one in arguments)
        )
        self._call_quickly("cuCtxSetCurrent", self._context)
        self._call_quickly(
            "cuLaunchKernel", function, *grid, *block, shared_bytes, stream, pointers, None
        )

    def lane(self, places: int, *, blocking: bool = False) -> Lane:
        """Make a stream for one thread at a time; that takes milliseconds, so keep it.

        Args:
            places: How many copies can be told apart.
            blocking: Whether the thread sleeps while it waits, or spins.
        """
        return Lane(self, places, blocking=blocking)

    def _is_done(self, function: str, what: int) -> bool:
        self._call_quickly("cuCtxSetCurrent", self._context)
        code = self.driver.library.code(function, what)
        if code not in {libcuda.SUCCESS, libcuda.NOT_READY}:
            name = self.driver.library.error_name(code)
            raise gpu_failed(CudaCallError(function, code, name), self._of)
        return code == libcuda.SUCCESS


class Lane:
    """A stream of one thread, whose calls cost as little as they can; `Gpu.lane` makes it.

    A thread that copies ten thousand pieces a second has no time to set the context for each, nor
    to hand the interpreter over in calls that do not wait. Used by one thread at a time, which
    calls `bind` first, and uses no other GPU meanwhile. A context manager; `close` waits for all.
    """

    def __init__(self, gpu: Gpu, places: int, *, blocking: bool) -> None:
        self._gpu = gpu
        library = gpu.driver.library
        self._copy_in = library.quick("cuMemcpyHtoDAsync_v2")
        self._copy_out = library.quick("cuMemcpyDtoHAsync_v2")
        self._fill = library.quick("cuMemsetD8Async")
        self._record = library.quick("cuEventRecord")
        self._query = library.quick("cuEventQuery")
        with contextlib.ExitStack() as stack:
            self._stream = gpu.stream_create()
            stack.callback(gpu.stream_destroy, self._stream)
            self._events = []
            for _ in range(places):
                self._events.append(gpu.event_create(blocking=blocking))
                stack.callback(gpu.event_destroy, self._events[-1])
            stack.callback(gpu.stream_synchronize, self._stream)
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the stream back. Idempotent."""
        self._stack.close()

    def bind(self) -> None:
        """Make the calling thread the one that uses it."""
        self._gpu.stream_is_done(self._stream)

    def finish(self) -> None:
        """Wait for all copies."""
        self._gpu.stream_synchronize(self._stream)

    def copy_in(self, place: int, to: int, host: int, length: int) -> None:
        """Begin to copy from page-locked memory, which stays as it is until `wait` returns."""
        self._check("cuMemcpyHtoDAsync_v2", self._copy_in(to, host, length, self._stream))
        self._check("cuEventRecord", self._record(self._events[place], self._stream))

    def copy_out(self, place: int, host: int, device: int, length: int) -> None:
        """Begin to copy to page-locked memory, which is there when `wait` has returned."""
        self._check("cuMemcpyDtoHAsync_v2", self._copy_out(host, device, length, self._stream))
        self._check("cuEventRecord", self._record(self._events[place], self._stream))

    def fill(self, place: int, to: int, value: int, length: int) -> None:
        """Begin to set bytes of device memory to a value."""
        self._check("cuMemsetD8Async", self._fill(to, value, length, self._stream))
        self._check("cuEventRecord", self._record(self._events[place], self._stream))

    def wait(self, place: int) -> None:
        """Wait for what was begun last at a place."""
        code = self._query(self._events[place])
        if code == libcuda.NOT_READY:
            self._gpu.event_synchronize(self._events[place])
        else:
            self._check("cuEventQuery", code)

    def _check(self, function: str, code: int) -> None:
        if code:
            name = self._gpu.driver.library.error_name(code)
            of = f"GPU {self._gpu.device.ordinal}"
            raise gpu_failed(CudaCallError(function, code, name), of)


def load_driver(path: str | None = None) -> Driver:
    """Load and initialise the driver; the same each time.

    Args:
        path: Of its library; by default `$SNAPAGENT_LIBCUDA`, or the system's.

    Raises:
        GpuUnavailable: There is none, or no GPU.
    """
    try:
        library = libcuda.load_libcuda(path)
    except CudaMissingError as error:
        raise _unavailable(error) from error
    except CudaCallError as error:
        raise GpuUnavailable(
            f"the CUDA driver cannot be initialised: {error}",
            next_step="see whether nvidia-smi finds a GPU on this machine, in this container",
        ) from error
    return _driver(library)


@functools.cache
def _driver(library: Libcuda) -> Driver:
    return Driver(library)


def gpu_failed(error: CudaCallError, of: str) -> GpuFailed:
    """Say an error of the driver as one of the agent."""
    make = GpuOutOfMemory if error.code == libcuda.OUT_OF_MEMORY else GpuFailed
    where = f" ({of})" if of else ""
    return make(
        f"{error}{where}",
        function=error.function,
        cuda_code=error.code,
        error_name=error.error_name,
    )


def _unavailable(error: CudaMissingError) -> GpuUnavailable:
    return GpuUnavailable(
        str(error),
        next_step="install the NVIDIA driver, or give the agent's container the GPUs",
    )


def format_uuid(raw: bytes) -> str:
    """Spell the 16 bytes of a GPU's UUID as NVIDIA's tools do."""
    digits = raw.hex()
    groups = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
    return "GPU-" + "-".join(groups)


def parse_uuid(text: str) -> bytes:
    """Return the 16 bytes of a UUID that `format_uuid` spelled.

    Raises:
        ValueError: It is none.
    """
    raw = bytes.fromhex(text.removeprefix("GPU-").replace("-", ""))
    if format_uuid(raw) != text:
        raise ValueError(f"{text!r} is no UUID of a GPU")
    return raw


def address_of(buffer: memoryview) -> int:
    """Return where the bytes of a writable buffer are in this process."""
    return ctypes.addressof((ctypes.c_char * buffer.nbytes).from_buffer(buffer))


def memory_at(address: int, length: int) -> memoryview:
    """Return host memory as a buffer; it must outlive it."""
    return memoryview((ctypes.c_ubyte * length).from_address(address)).cast("B")


def _numa_node(pci: str) -> int | None:
    # CUDA writes eight digits of the domain where there are more than four, /sys at least four.
    domain, _, rest = pci.partition(":")
    path = _SYSFS_PCI / f"{domain[-4:]}:{rest}" / "numa_node"
    try:
        found = int(path.read_text())
    except (OSError, ValueError):
        return None
    return found if found >= 0 else None
