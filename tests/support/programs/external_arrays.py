"""A workload with external memory: `external_arrays SOCKET MIB`.

Requests come as single words, each over a connection of its own to the Unix socket `control` in the
working directory; the answer is a line. `release` and `resume` are for captures, `digest` tells
what is in all arrays, `change` changes and adds some, `fork` lets a child check them, `buffer`
asks for a buffer, and `touch` reads one byte of a view, whatever that does.
"""

import hashlib
import os
import socket
import sys

import numpy as np

from snapagent.workload import DeviceMemory, HostMemory

MIB = 1 << 20
SMALL = (1, 63, 4097, 100_001, 1 << 20)


class Releasing:
    """What has memory of a broker, which captures ask to let go of it."""

    memory: HostMemory | DeviceMemory

    def release(self) -> str:
        self.memory.release()
        return "released"

    def resume(self) -> str:
        self.memory.resume(60)
        return "resumed"


class Workload(Releasing):
    memory: HostMemory

    def __init__(self, socket: str, mib: int) -> None:
        self.memory = HostMemory(socket, region_bytes=8 * MIB, reserve_bytes=4096 * MIB)
        rng = np.random.default_rng(5)
        self.arrays = []
        for _ in range(4):
            count = mib * MIB // 4
            array = self.memory.allocate(count).numpy("uint8", count)
            array[:] = rng.integers(0, 256, count, np.uint8)
            self.arrays.append(array)
        # A hole of 16 MiB, and blocks of odd sizes, every other one of which goes again.
        self.arrays[0][: len(self.arrays[0]) // 2] = 0
        self.hole = self.memory.allocate(16 * MIB).numpy("uint8", 16 * MIB)
        kept = []
        for size in SMALL * 4:
            block = self.memory.allocate(size)
            block.buffer[:] = rng.bytes(size)
            kept.append(block)
        for block in kept[::2]:
            block.free()
        self.block = kept[1]
        self.arrays += [block.numpy("uint8", block.size_bytes) for block in kept[1::2]]

    def digest(self) -> str:
        digest = hashlib.sha256()
        for array in [*self.arrays, self.hole]:
            digest.update(array)
        return digest.hexdigest()

    def change(self) -> str:
        self.arrays[1][:1000] += 1
        more = self.memory.allocate(3 * MIB).numpy("uint8", 3 * MIB)
        more[:] = 77
        self.arrays.append(more)
        return "changed"

    def fork(self) -> str:
        """Let a child read the memory, also after it has released and resumed."""
        expected = self.digest()
        pid = os.fork()
        if pid == 0:
            try:
                before = self.digest() == expected
                self.memory.release()
                self.memory.resume(60)
                os._exit(0 if before and self.digest() == expected else 1)
            finally:
                os._exit(2)
        return f"child {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}"

    def buffer(self) -> str:
        return f"{self.block.buffer.nbytes} bytes"

    def touch(self) -> str:
        return str(self.arrays[0][0])


def serve(workload: Releasing) -> None:
    """Answer for ever, one request at a time."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("control")
        listener.listen()
        while True:
            connection, _ = listener.accept()
            with connection:
                name = connection.recv(100).decode()
                if not name:
                    continue
                try:
                    answer = getattr(workload, name)()
                except Exception as error:  # noqa: BLE001 - told to the test
                    answer = f"{type(error).__name__}: {error}"
                connection.sendall(answer.encode())


if __name__ == "__main__":
    serve(Workload(sys.argv[1], int(sys.argv[2])))
