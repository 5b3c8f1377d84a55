"""A workload with memory of a broker on GPUs: `gpu_arrays SOCKET MIB`; see `external_arrays`.

Half of it is on each of two GPUs, and it has a little that the driver alone knows. `digest` reads
all of it through the driver; `change` writes to some.
"""

import ctypes
import hashlib
import mmap
import os
import socket
import sys

import numpy as np

from snapagent.workload import DeviceMemory, libcuda
from tests.support.programs.external_arrays import Releasing, serve

MIB = 1 << 20
SMALL = (1, 511, 4097, 100_001, 1 << 20)


class ZeroingChild:
    """A child that has zeros where its parent has data: what it lacks in an image is no data."""

    def __init__(self) -> None:
        self.shared = mmap.mmap(-1, 8 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.data = b"x" * (8 * MIB)
        self.shared[:] = self.data
        ours, theirs = socket.socketpair()
        if os.fork() == 0:
            ours.close()
            self.shared[MIB : 5 * MIB] = bytes(4 * MIB)
            self.data = self.shared[:]
            while theirs.recv(1):
                theirs.sendall(b"y" if self.shared[:] == self.data else b"n")
            os._exit(0)
        theirs.close()
        self.channel = ours

    def is_right(self) -> bool:
        self.channel.sendall(b"?")
        return self.channel.recv(1) == b"y" and self.shared[:] == self.data


class GpuWorkload(Releasing):
    memory: DeviceMemory

    def __init__(self, path: str, mib: int) -> None:
        # Before anything of CUDA is there.
        self.child = ZeroingChild()
        self.memory = DeviceMemory(path, region_bytes=8 * MIB)
        self.cuda = libcuda.load_libcuda()
        context = ctypes.c_void_p()
        self.cuda.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.context = context.value
        rng = np.random.default_rng(6)
        self.blocks = []
        for number in range(4):
            block = self.memory.allocate(mib * MIB // 4, device=number % 2)
            self.write(block.address, rng.bytes(block.size_bytes))
            self.blocks.append(block)
        # A hole, and blocks of odd sizes, every other one of which goes again.
        hole = self.memory.allocate(16 * MIB, device=1)
        self.write(hole.address, bytes(hole.size_bytes))
        small = [self.memory.allocate(size, device=size % 2) for size in SMALL * 4]
        for block in small:
            self.write(block.address, rng.bytes(block.size_bytes))
        for block in small[::2]:
            block.free()
        self.blocks += [hole, *small[1::2]]
        own = ctypes.c_uint64()
        self.use()
        self.cuda.call("cuMemAlloc_v2", ctypes.byref(own), MIB)
        self.own = own.value
        self.write(self.own, rng.bytes(MIB))

    def use(self) -> None:
        self.cuda.call("cuCtxSetCurrent", self.context)

    def write(self, address: int, data: bytes) -> None:
        self.use()
        self.cuda.call("cuMemcpyHtoDAsync_v2", address, data, len(data), None)
        self.cuda.call("cuStreamSynchronize", None)

    def read(self, address: int, length: int) -> bytes:
        self.use()
        into = ctypes.create_string_buffer(length)
        self.cuda.call("cuMemcpyDtoHAsync_v2", into, address, length, None)
        self.cuda.call("cuStreamSynchronize", None)
        return into.raw

    def digest(self) -> str:
        digest = hashlib.sha256()
        for block in self.blocks:
            digest.update(self.read(block.address, block.size_bytes))
        digest.update(self.read(self.own, MIB))
        return digest.hexdigest()

    def change(self) -> str:
        self.write(self.blocks[1].address, b"z" * 1000)
        more = self.memory.allocate(3 * MIB, device=1)
        self.write(more.address, b"M" * (3 * MIB))
        self.blocks.append(more)
        return "changed"

    def zeros(self) -> str:
        return "right" if self.child.is_right() else "wrong"

    def touch(self) -> str:
        return self.read(self.blocks[0].address, 1).hex()


if __name__ == "__main__":
    serve(GpuWorkload(sys.argv[1], int(sys.argv[2])))
