"""A small process whose memory is missing, as a restored one's is: it does what it is told.

Run as a program, it makes a mapping, watches it with a userfaultfd that it sends over a socket as
CRIU does, and answers one line of JSON for each line that it reads. Its children do so too, each on
a socket of its own.
"""

import ctypes  # noqa: TID251 - to do what programs in C do
import hashlib
import json
import mmap
import os
import socket
import struct
import sys
import threading

from snapagent.linux import userfaultfd
from snapagent.linux.userfaultfd import Feature

PAGE = 4096
RESTORED = 0x52535446
FEATURES = Feature.FORK | Feature.REMAP | Feature.REMOVE | Feature.UNMAP
MREMAP_MAYMOVE = 1
MREMAP_FIXED = 2
PROT_RW = 3
MAP_PRIVATE_ANONYMOUS = 0x22
MAP_FIXED_NOREPLACE = 0x100000

libc = ctypes.CDLL(None, use_errno=True)
for name, types in {
    "mmap": [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long],
    "mremap": [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p],
    "munmap": [ctypes.c_void_p, ctypes.c_size_t],
    "madvise": [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int],
    "mprotect": [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int],
}.items():
    function = getattr(libc, name)
    function.argtypes = types
    function.restype = ctypes.c_void_p if name in {"mmap", "mremap"} else ctypes.c_int


def checked(result: int | None) -> int:
    if result is None or result in (-1, ctypes.c_size_t(-1).value):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def reserve(pages: int) -> int:
    return checked(libc.mmap(None, pages * PAGE, PROT_RW, MAP_PRIVATE_ANONYMOUS, -1, 0))


class Task:
    """The memory of this process, and what can be asked of it."""

    def __init__(self, address: int) -> None:
        self.address = address

    def read(self, page: int, count: int) -> str:
        return hashlib.sha256(
            ctypes.string_at(self.address + page * PAGE, count * PAGE)
        ).hexdigest()

    def read_by_threads(self, page: int, count: int) -> str:
        """Touch the pages from many threads at once, then read them all."""

        def touch(number: int) -> None:
            for each in range(number, count, 8):
                ctypes.string_at(self.address + (page + each) * PAGE, 1)

        threads = [threading.Thread(target=touch, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self.read(page, count)

    def write(self, page: int, text: str) -> None:
        ctypes.memmove(self.address + page * PAGE, text.encode(), len(text))

    def discard(self, page: int, count: int) -> None:
        checked(libc.madvise(self.address + page * PAGE, count * PAGE, mmap.MADV_DONTNEED))

    def keep_from_children(self, page: int, count: int) -> None:
        """Let children have nothing mapped there."""
        checked(libc.madvise(self.address + page * PAGE, count * PAGE, mmap.MADV_DONTFORK))

    def protect(self, page: int, count: int) -> None:
        """Divide the mapping: other rights for some pages of it."""
        checked(libc.mprotect(self.address + page * PAGE, count * PAGE, 1))

    def unmap(self, page: int, count: int) -> None:
        checked(libc.munmap(self.address + page * PAGE, count * PAGE))

    def move(self, page: int, count: int, to_page: int) -> None:
        """Move pages onto others of the mapping."""
        checked(
            libc.mremap(
                self.address + page * PAGE,
                count * PAGE,
                count * PAGE,
                MREMAP_MAYMOVE | MREMAP_FIXED,
                self.address + to_page * PAGE,
            )
        )

    def map(self, page: int, count: int) -> None:
        """Map fresh memory where there is none."""
        flags = MAP_PRIVATE_ANONYMOUS | MAP_FIXED_NOREPLACE
        address = self.address + page * PAGE
        checked(libc.mmap(address, count * PAGE, PROT_RW, flags, -1, 0))

    def fork(self, path: str) -> int:
        pid = os.fork()
        if not pid:
            try:
                serve(self, path)
            finally:
                os._exit(0)
        return pid

    def fork_briefly(self, count: int) -> None:
        """Have children that end at once."""
        for _ in range(count):
            pid = os.fork()
            if not pid:
                os._exit(0)
            os.waitpid(pid, 0)

    def reap(self, pid: int) -> int:
        return os.waitpid(pid, 0)[1]


def serve(task: Task, path: str) -> None:
    """Do what is asked on a socket until it is closed."""
    with socket.socket(socket.AF_UNIX) as owner:
        owner.connect(path)
        with owner.makefile("rw") as stream:
            for line in stream:
                name, *arguments = json.loads(line)
                stream.write(json.dumps(getattr(task, name)(*arguments)) + "\n")
                stream.flush()


def main() -> None:
    control, lazy, pages, address = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    flags = MAP_PRIVATE_ANONYMOUS | MAP_FIXED_NOREPLACE
    checked(libc.mmap(address, pages * PAGE, PROT_RW, flags, -1, 0))
    fd = userfaultfd.open_userfaultfd()
    assert userfaultfd.enable(fd, FEATURES) == 0
    assert userfaultfd.register_missing(fd, address, pages * PAGE) == 0
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.connect(lazy)
        daemon.sendall(struct.pack("=i", -77))  # a zombie
        daemon.sendall(struct.pack("=i", os.getpid()))
        socket.send_fds(daemon, [b"\0"], [fd])
        os.close(fd)
        daemon.sendall(struct.pack("=I", RESTORED))
    serve(Task(address), control)


if __name__ == "__main__":
    main()
