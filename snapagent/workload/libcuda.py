"""The CUDA driver as it is: its library, the shapes of its functions and its error codes.

Needs nothing but Python and, once it is loaded, `libcuda.so.1` of the driver; CUDA itself is not
needed. Only what this project calls is here. `ctypes` lets other threads run during every call.
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any, Final

__all__ = [
    "ACCESS_READ_WRITE",
    "ALREADY_MAPPED",
    "HANDLE_POSIX_FD",
    "ILLEGAL_STATE",
    "INVALID_CONTEXT",
    "INVALID_DEVICE",
    "INVALID_VALUE",
    "LIBRARY_DEFAULT",
    "LIBRARY_VARIABLE",
    "NOT_INITIALIZED",
    "NOT_READY",
    "OUT_OF_MEMORY",
    "SUCCESS",
    "AccessDescription",
    "AllocationProperties",
    "CheckpointGpuPair",
    "CheckpointLockArguments",
    "CheckpointRestoreArguments",
    "CudaCallError",
    "CudaMissingError",
    "IpcHandle",
    "Libcuda",
    "device_access",
    "device_memory",
    "load_libcuda",
]

LIBRARY_VARIABLE: Final = "SNAPAGENT_LIBCUDA"
LIBRARY_DEFAULT: Final = "libcuda.so.1"

SUCCESS: Final = 0
INVALID_VALUE: Final = 1
OUT_OF_MEMORY: Final = 2
NOT_INITIALIZED: Final = 3
INVALID_DEVICE: Final = 101
INVALID_CONTEXT: Final = 201
ALREADY_MAPPED: Final = 208
ILLEGAL_STATE: Final = 401
NOT_READY: Final = 600

HANDLE_POSIX_FD: Final = 1
ACCESS_READ_WRITE: Final = 3
_TYPE_PINNED = 1
_LOCATION_DEVICE = 1


class CudaMissingError(Exception):
    """There is no CUDA driver on this machine, or it lacks a function that is needed."""


class CudaCallError(Exception):
    """A function of the driver returned an error.

    Attributes:
        function: Its name.
        code: What it returned.
        error_name: The same in CUDA's words.
    """

    def __init__(self, function: str, code: int, error_name: str) -> None:
        super().__init__(f"{function} failed with {error_name} ({code})")
        self.function = function
        self.code = code
        self.error_name = error_name


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]  # type: ignore[mutable-override]


class _AllocationFlags(ctypes.Structure):
    _fields_ = [  # type: ignore[mutable-override]
        ("compression", ctypes.c_ubyte),
        ("gpu_direct_rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]


class AllocationProperties(ctypes.Structure):
    """`CUmemAllocationProp`."""

    _fields_ = [  # type: ignore[mutable-override]
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", _AllocationFlags),
    ]


class AccessDescription(ctypes.Structure):
    """`CUmemAccessDesc`."""

    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]  # type: ignore[mutable-override]


class IpcHandle(ctypes.Structure):
    """`CUipcMemHandle`: names memory to another process of the machine."""

    _fields_ = [("bytes", ctypes.c_ubyte * 64)]  # type: ignore[mutable-override]


class CheckpointLockArguments(ctypes.Structure):
    """`CUcheckpointLockArgs`."""

    _fields_ = [  # type: ignore[mutable-override]
        ("timeout_ms", ctypes.c_uint),
        ("reserved0", ctypes.c_uint),
        ("reserved1", ctypes.c_uint64 * 7),
    ]


class CheckpointGpuPair(ctypes.Structure):
    """`CUcheckpointGpuPair`."""

    _fields_ = [("old_uuid", ctypes.c_ubyte * 16), ("new_uuid", ctypes.c_ubyte * 16)]  # type: ignore[mutable-override]


class CheckpointRestoreArguments(ctypes.Structure):
    """`CUcheckpointRestoreArgs`; longer than any driver reads, and zeros behind what is known."""

    _fields_ = [  # type: ignore[mutable-override]
        ("pairs", ctypes.POINTER(CheckpointGpuPair)),
        ("pairs_count", ctypes.c_uint),
        ("reserved0", ctypes.c_ubyte * 52),
        ("reserved1", ctypes.c_uint64 * 8),
    ]


def device_memory(ordinal: int) -> AllocationProperties:
    """Describe memory of a device that other processes can be given."""
    return AllocationProperties(
        type=_TYPE_PINNED,
        handle_types=HANDLE_POSIX_FD,
        location=_Location(_LOCATION_DEVICE, ordinal),
    )


def device_access(ordinal: int) -> AccessDescription:
    """Let a device read and write."""
    return AccessDescription(_Location(_LOCATION_DEVICE, ordinal), ACCESS_READ_WRITE)


_INT = ctypes.c_int
_UINT = ctypes.c_uint
_SIZE = ctypes.c_size_t
_U64 = ctypes.c_uint64
_PTR = ctypes.c_void_p
_STR = ctypes.c_char_p

_FUNCTIONS: Final[dict[str, tuple[Any, ...]]] = {
    "cuInit": (_UINT,),
    "cuDriverGetVersion": (_PTR,),
    "cuGetErrorName": (_INT, _PTR),
    "cuDeviceGetCount": (_PTR,),
    "cuDeviceGet": (_PTR, _INT),
    "cuDeviceGetUuid_v2": (_PTR, _INT),
    "cuDeviceGetName": (_PTR, _INT, _INT),
    "cuDeviceGetAttribute": (_PTR, _INT, _INT),
    "cuDeviceTotalMem_v2": (_PTR, _INT),
    "cuDeviceGetPCIBusId": (_PTR, _INT, _INT),
    "cuDevicePrimaryCtxRetain": (_PTR, _INT),
    "cuDevicePrimaryCtxRelease_v2": (_INT,),
    "cuCtxSetCurrent": (_PTR,),
    "cuCtxGetCurrent": (_PTR,),
    "cuCtxPushCurrent_v2": (_PTR,),
    "cuCtxPopCurrent_v2": (_PTR,),
    "cuCtxSynchronize": (),
    "cuMemGetInfo_v2": (_PTR, _PTR),
    "cuMemGetAllocationGranularity": (_PTR, _PTR, _INT),
    "cuMemCreate": (_PTR, _SIZE, _PTR, _U64),
    "cuMemRelease": (_U64,),
    "cuMemAddressReserve": (_PTR, _SIZE, _SIZE, _U64, _U64),
    "cuMemAddressFree": (_U64, _SIZE),
    "cuMemMap": (_U64, _SIZE, _SIZE, _U64, _U64),
    "cuMemUnmap": (_U64, _SIZE),
    "cuMemSetAccess": (_U64, _SIZE, _PTR, _SIZE),
    "cuMemExportToShareableHandle": (_PTR, _U64, _INT, _U64),
    "cuMemImportFromShareableHandle": (_PTR, _PTR, _INT),
    "cuMemGetAllocationPropertiesFromHandle": (_PTR, _U64),
    "cuMemAlloc_v2": (_PTR, _SIZE),
    "cuMemFree_v2": (_U64,),
    "cuIpcGetMemHandle": (_PTR, _U64),
    "cuIpcOpenMemHandle_v2": (_PTR, IpcHandle, _UINT),
    "cuIpcCloseMemHandle": (_U64,),
    "cuPointerGetAttribute": (_PTR, _INT, _U64),
    "cuMemHostAlloc": (_PTR, _SIZE, _UINT),
    "cuMemFreeHost": (_PTR,),
    "cuMemHostRegister_v2": (_PTR, _SIZE, _UINT),
    "cuMemHostUnregister": (_PTR,),
    "cuStreamCreate": (_PTR, _UINT),
    "cuStreamDestroy_v2": (_PTR,),
    "cuStreamSynchronize": (_PTR,),
    "cuStreamQuery": (_PTR,),
    "cuStreamWaitEvent": (_PTR, _PTR, _UINT),
    "cuEventCreate": (_PTR, _UINT),
    "cuEventDestroy_v2": (_PTR,),
    "cuEventRecord": (_PTR, _PTR),
    "cuEventQuery": (_PTR,),
    "cuEventSynchronize": (_PTR,),
    "cuMemcpyHtoDAsync_v2": (_U64, _PTR, _SIZE, _PTR),
    "cuMemcpyDtoHAsync_v2": (_PTR, _U64, _SIZE, _PTR),
    "cuMemcpyDtoDAsync_v2": (_U64, _U64, _SIZE, _PTR),
    "cuMemsetD8Async": (_U64, ctypes.c_ubyte, _SIZE, _PTR),
    "cuModuleLoadData": (_PTR, _STR),
    "cuModuleUnload": (_PTR,),
    "cuModuleGetFunction": (_PTR, _PTR, _STR),
    "cuLaunchKernel": (_PTR, *[_UINT] * 7, _PTR, _PTR, _PTR),
    "cuCheckpointProcessGetState": (_INT, _PTR),
    "cuCheckpointProcessGetRestoreThreadId": (_INT, _PTR),
    "cuCheckpointProcessLock": (_INT, _PTR),
    "cuCheckpointProcessCheckpoint": (_INT, _PTR),
    "cuCheckpointProcessRestore": (_INT, _PTR),
    "cuCheckpointProcessUnlock": (_INT, _PTR),
}


class Libcuda:
    """The loaded library. All methods are thread-safe."""

    def __init__(self, path: str) -> None:
        """Load it; the driver is not initialised yet.

        Raises:
            CudaMissingError: There is none.
        """
        self.path = path
        try:
            self._library = ctypes.CDLL(path)
        except OSError as error:
            raise CudaMissingError(f"the CUDA driver {path} cannot be loaded: {error}") from error
        self._bound: dict[str, Any] = {}
        self._quick: dict[str, Any] = {}

    def has(self, function: str) -> bool:
        """Tell whether this driver has a function, which older ones may lack."""
        return hasattr(self._library, function)

    def code(self, function: str, *arguments: Any) -> int:  # noqa: ANN401 - as C has them
        """Call a function and return what it returned.

        Raises:
            CudaMissingError: This driver does not have it.
        """
        bound = self._bound.get(function)
        if bound is None:
            bound = self._bind(function)
        returned: int = bound(*arguments)
        return returned

    def call(self, function: str, *arguments: Any) -> None:  # noqa: ANN401 - as C has them
        """Call a function that has to succeed.

        Raises:
            CudaCallError: It did not.
            CudaMissingError: This driver does not have it.
        """
        code = self.code(function, *arguments)
        if code != SUCCESS:
            raise CudaCallError(function, code, self.error_name(code))

    def quick(self, function: str) -> Any:  # noqa: ANN401 - a function of C
        """Return a function to be called without letting other threads run meanwhile.

        Only for what never waits: there, handing the interpreter over and taking it back costs more
        than the call.

        Raises:
            CudaMissingError: This driver does not have it.
        """
        found = self._quick.get(function)
        if found is None:
            self._bind(function)
            found = getattr(ctypes.PyDLL(self.path), function)
            found.argtypes = _FUNCTIONS[function]
            found.restype = ctypes.c_int
            self._quick[function] = found
        return found

    def error_name(self, code: int) -> str:
        """Say an error code in CUDA's words."""
        name = ctypes.c_char_p()
        if self.code("cuGetErrorName", code, ctypes.byref(name)) or name.value is None:
            return "an unknown error"
        return name.value.decode("ascii", "replace")

    def _bind(self, function: str) -> Any:  # noqa: ANN401 - a function of C
        try:
            bound = getattr(self._library, function)
        except AttributeError as error:
            raise CudaMissingError(
                f"the CUDA driver {self.path} has no {function}; a newer one is needed"
            ) from error
        bound.argtypes = _FUNCTIONS[function]
        bound.restype = ctypes.c_int
        self._bound[function] = bound
        return bound


def load_libcuda(path: str | None = None) -> Libcuda:
    """Load the driver's library, once for each path, and initialise the driver.

    Args:
        path: Of the library; by default `$SNAPAGENT_LIBCUDA`, or the system's.

    Raises:
        CudaMissingError: There is none.
        CudaCallError: It cannot be initialised, mostly since there is no device.
    """
    return _load(path or os.environ.get(LIBRARY_VARIABLE) or LIBRARY_DEFAULT)


@functools.cache
def _load(path: str) -> Libcuda:
    library = Libcuda(path)
    library.call("cuInit", 0)
    return library
