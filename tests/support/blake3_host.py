"""The kernels of the GPU, compiled for the processor."""

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from snapagent.gpu.hash_plan import HashPlan

__all__ = ["emulated_kernels", "host_digests", "host_kernels"]

_SOURCE = Path(__file__).with_name("blake3_host.cpp")
_THREADS = 128


@functools.cache
def host_kernels() -> Path:
    """Compile them, once in each process, and return the library."""
    compiler = shutil.which("g++")
    command = [compiler] if compiler else [shutil.which("gcc") or "gcc", "-x", "c++"]
    with tempfile.TemporaryDirectory() as directory:
        made = Path(directory, "blake3.so")
        options = ["-std=c++17", "-O3", "-Wall", "-Werror", "-Wno-unknown-pragmas"]
        subprocess.run(
            [*command, *options, "-shared", "-fPIC", "-o", str(made), str(_SOURCE)], check=True
        )
        # Loaded from memory, so that nothing has to be removed when the process ends.
        fd = os.memfd_create("blake3.so")
        os.write(fd, made.read_bytes())
    return Path(f"/proc/{os.getpid()}/fd/{fd}")


def emulated_kernels() -> bytes:
    """Return them as code for the emulated driver."""
    return b"EMULATED-CUDA:" + str(host_kernels()).encode()


class _Dim(ctypes.Structure):
    _fields_ = [("x", ctypes.c_uint32), ("y", ctypes.c_uint32), ("z", ctypes.c_uint32)]


class _Launch(ctypes.Structure):
    """`EmulatedLaunch`."""

    _fields_ = [
        ("grid_dim", _Dim),
        ("block_dim", _Dim),
        ("block", _Dim),
        ("shared_bytes", ctypes.c_uint32),
    ]


def host_digests(plan: HashPlan) -> bytes:
    """Do on the processor what a GPU does with a plan whose addresses are of this process."""
    library = ctypes.CDLL(str(host_kernels()))
    tables = plan.tables.ctypes.data
    work = [np.empty(max(size, 1), np.uint8) for size in plan.work_bytes]
    pieces = ctypes.c_uint32(plan.pieces)
    for number, level in enumerate(plan.levels):
        into = ctypes.c_uint64(work[number % 2].ctypes.data)
        first = ctypes.c_uint64(tables + level.first)
        if number:
            below = ctypes.c_uint64(work[(number - 1) % 2].ctypes.data)
            first_below = ctypes.c_uint64(tables + plan.levels[number - 1].first)
            values = (below, first_below, first, pieces, into)
            run_block = library.join_values__block
        else:
            addresses = ctypes.c_uint64(tables + plan.addresses)
            lengths = ctypes.c_uint64(tables + plan.lengths)
            values = (addresses, lengths, first, pieces, into)
            run_block = library.leaf_values__block
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(one) for one in values))
        blocks = -(-level.values // _THREADS)
        for block in range(blocks):
            launch = _Launch(_Dim(blocks, 1, 1), _Dim(_THREADS, 1, 1), _Dim(block, 0, 0), 0)
            run_block(ctypes.byref(launch), pointers)
    return work[(len(plan.levels) - 1) % 2].tobytes()[: 32 * plan.pieces]
