"""The emulated CUDA driver for tests: compiled once, and loaded instead of the real one."""

import atexit
import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from snapagent.gpu.driver import Driver, Gpu, load_driver
from snapagent.workload.libcuda import LIBRARY_VARIABLE, IpcHandle

EMULATOR = Path(__file__).parents[1] / "emulator"
SETTINGS_VARIABLE = "SNAPAGENT_EMULATED_CUDA"
COUNTERS = (
    "bytes_in",
    "bytes_out",
    "bytes_within",
    "bytes_set",
    "pageable_bytes_in",
    "pageable_bytes_out",
    "registered_bytes",
    "launches",
    "creates",
)
"""In the order of `emulated_cuda.h`."""


def compiler() -> str:
    """Return the compiler of C; the test is skipped without one."""
    found = shutil.which("gcc") or shutil.which("cc")
    if found is None:
        pytest.skip("there is no compiler of C")
    return found


def emulated_libcuda(copy: str = "") -> Path:
    """Return the emulated driver's library, compiled if its source has changed.

    Args:
        copy: A name; libraries with different ones can be loaded into one process, each with
            settings and state of its own.
    """
    built = _built(compiler())
    return _copied(built, copy, os.getpid()) if copy else built


@functools.cache
def _copied(built: Path, copy: str, pid: int) -> Path:
    # Written anew: an earlier run may have had the same process id, and another emulation.
    other = built.with_name(f"{copy}-{pid}.so")
    other.unlink(missing_ok=True)
    shutil.copy2(built, other)
    atexit.register(_remove, other, pid)
    return other


def _remove(path: Path, pid: int) -> None:
    if os.getpid() == pid:  # not a child that was forked
        path.unlink(missing_ok=True)


@functools.cache
def _built(compile_with: str) -> Path:
    # One for all runs, since processes that were restored look for the file at the same path.
    source, header = EMULATOR / "libcuda.c", EMULATOR / "emulated_cuda.h"
    stamp = hashlib.sha256(source.read_bytes() + header.read_bytes()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"snapagent-emulated-cuda-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"libcuda-{stamp}.so.1"
    if not library.exists():
        unfinished = folder / f"{os.getpid()}.so"
        subprocess.run(  # noqa: S603 - the compiler
            [
                compile_with,
                *("-O2", "-g", "-Wall", "-Wextra", "-Werror", "-Wno-format-truncation"),
                *("-shared", "-fPIC", "-fvisibility=hidden", "-pthread"),
                *("-o", str(unfinished), str(source), "-ldl"),
            ],
            check=True,
        )
        unfinished.rename(library)
    return library


def emulated_environment(copy: str = "", **settings: int) -> Mapping[str, str]:
    """Return what a process needs in its environment to use the emulated driver.

    Args:
        copy: See `emulated_libcuda`.
        settings: See `libcuda.c`: `devices`, `memory`, `seed`, `version`, `model`, `delay_us`.
    """
    words = ",".join(f"{name}={value}" for name, value in settings.items())
    return {LIBRARY_VARIABLE: str(emulated_libcuda(copy)), SETTINGS_VARIABLE: words}


def emulated_driver(monkeypatch: pytest.MonkeyPatch, copy: str, **settings: int) -> Driver:
    """Load the emulated driver into this process; processes begun from now on have it too."""
    for name, value in emulated_environment(copy, **settings).items():
        monkeypatch.setenv(name, value)
    return load_driver()


def counter(driver: Driver, name: str) -> int:
    """Return what the emulated driver has counted in this process; see `COUNTERS`."""
    library = ctypes.CDLL(driver.library.path)
    library.emulated_cuda_counter.restype = ctypes.c_uint64
    found: int = library.emulated_cuda_counter(COUNTERS.index(name))
    return found


class DeviceBytes:
    """Reads and writes memory of the first device, whichever device it is on."""

    def __init__(self, driver: Driver) -> None:
        self.gpu: Gpu = driver.open(0)

    def write(self, address: int, data: bytes) -> None:
        buffer = (ctypes.c_ubyte * len(data)).from_buffer_copy(data)
        self.gpu.copy_in(address, ctypes.addressof(buffer), len(data), 0)
        self.gpu.synchronize()

    def open_shared(self, handle: str) -> int:
        """Open memory that another process has named, in hex; returns its address."""
        address = ctypes.c_uint64()
        there = IpcHandle.from_buffer_copy(bytes.fromhex(handle))
        self.gpu.call("cuIpcOpenMemHandle_v2", ctypes.byref(address), there, 1)
        return address.value

    def close_shared(self, address: int) -> None:
        self.gpu.call("cuIpcCloseMemHandle", address)

    def read(self, address: int, length: int) -> bytes:
        buffer = (ctypes.c_ubyte * length)()
        self.gpu.copy_out(ctypes.addressof(buffer), address, length, 0)
        self.gpu.synchronize()
        return bytes(buffer)


def segment_functions(
    allocate_at: int, free_at: int
) -> tuple[Callable[[int, int, int | None], int | None], Callable[..., None]]:
    """Return functions at addresses, of the kind that torch calls for segments."""
    pointer, size, number = ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int
    allocate = ctypes.CFUNCTYPE(pointer, size, number, pointer)
    free = ctypes.CFUNCTYPE(None, pointer, size, number, pointer)
    return allocate(allocate_at), free(free_at)
