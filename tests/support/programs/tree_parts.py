"""What each process of the tree holds, and how it checks that this is all as it was.

Every part has `problems()`, which returns what is wrong as sentences, or nothing. Standard library
only: what these processes map decides what a restore needs.
"""

import contextlib
import hashlib
import mmap
import os
import queue
import random
import socket
import struct
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

BLOCK = 256 * 1024
PAGE = mmap.PAGESIZE
PATIENCE_S = 20
POLL_S = 0.005
COUNT_EVERY_S = 0.003
NONCE_BYTES = 16
WRONG = Path("wrong-memory.txt")
LOOPBACK = "127.0.0.1"

# Of every eight blocks of memory one was written with zeros and one was never touched.
ZEROED_OF_EIGHT = 3
UNTOUCHED_OF_EIGHT = 6


def digest(data: bytes | memoryview) -> bytes:
    """Return a hash of some bytes, made without holding the interpreter's lock."""
    return hashlib.blake2b(data, digest_size=16).digest()


def becomes_true(condition: Callable[[], bool]) -> bool:
    """Wait until a condition holds; False when it does not in time."""
    pause = threading.Event()
    for _ in range(round(PATIENCE_S / POLL_S)):
        if condition():
            return True
        pause.wait(POLL_S)
    return condition()


class Memory:
    """Private anonymous memory, with a digest of every block as it should be."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._regions: list[tuple[mmap.mmap, list[bytes]]] = []

    def size_bytes(self) -> int:
        """Return how much there is."""
        return sum(len(region) for region, _ in self._regions)

    def grow(self, size: int) -> None:
        """Map and fill another region, of whole blocks."""
        size = max(BLOCK, size - size % BLOCK)
        region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        zeros = digest(bytes(BLOCK))
        digests = [zeros] * (size // BLOCK)
        for index in range(size // BLOCK):
            if index % 8 == ZEROED_OF_EIGHT:
                region[index * BLOCK : (index + 1) * BLOCK] = bytes(BLOCK)
            elif index % 8 != UNTOUCHED_OF_EIGHT:
                content = self._random.randbytes(BLOCK)
                region[index * BLOCK : (index + 1) * BLOCK] = content
                digests[index] = digest(content)
        self._regions.append((region, digests))

    def touch(self, size: int) -> None:
        """Rewrite short runs of pages here and there, `size` bytes in all."""
        while size > 0:
            region, digests = self._random.choice(self._regions)
            index = self._random.randrange(len(digests))
            run = min(size, PAGE * self._random.randint(1, 8))
            start = index * BLOCK + PAGE * self._random.randrange((BLOCK - run) // PAGE + 1)
            region[start : start + run] = self._random.randbytes(run)
            digests[index] = self._digest_of(region, index)
            size -= run

    def discard(self) -> None:
        """Give every fifth block back to the kernel: it reads as zeros from now on."""
        for region, digests in self._regions:
            for index in range(0, len(digests), 5):
                region.madvise(mmap.MADV_DONTNEED, index * BLOCK, BLOCK)
                digests[index] = digest(bytes(BLOCK))

    def move(self) -> None:
        """Make the first region larger than the room behind it, so that the kernel moves it."""
        region, digests = self._regions[0]
        blocks = len(digests)
        region.resize(2 * blocks * BLOCK)
        digests.extend([digest(bytes(BLOCK))] * blocks)

    def release(self) -> None:
        """Unmap the last region."""
        region, _ = self._regions.pop()
        region.close()

    def problems(self, *, blocks: int | None = None) -> list[str]:
        """Hash all blocks, or a number of them chosen at random, and name the wrong ones."""
        places = [
            (number, index)
            for number, (_, digests) in enumerate(self._regions)
            for index in range(len(digests))
        ]
        if blocks is not None:
            places = self._random.sample(places, min(blocks, len(places)))
        found: list[str] = []
        for number, index in places:
            region, digests = self._regions[number]
            if self._digest_of(region, index) != digests[index]:
                found.append(f"block {index} of memory region {number} has changed")
                # At once: this process may be killed before it can answer.
                with WRONG.open("a", encoding="utf-8") as file:
                    file.write(f"process {os.getpid()}: {found[-1]}\n")
        return found

    @staticmethod
    def _digest_of(region: mmap.mmap, index: int) -> bytes:
        with memoryview(region) as view, view[index * BLOCK : (index + 1) * BLOCK] as block:
            return digest(block)


class SharedMemory:
    """One mapping that all processes of the tree share, inherited by fork.

    Its first page has a counter for each of them, which shows that it is shared still and not a
    copy; the rest is content that stays.
    """

    def __init__(self, name: str, fd: int, size: int, seed: int) -> None:
        """Map `fd`, or anonymous memory if it is -1."""
        self.name = name
        self._fd = fd
        if fd >= 0:
            os.ftruncate(fd, PAGE + size)
        self._map = mmap.mmap(fd, PAGE + size, flags=mmap.MAP_SHARED)
        self._map[PAGE:] = random.Random(seed).randbytes(size)
        self._digest = digest(self._map[PAGE:])

    def count(self, member: int) -> int:
        """Return the counter of a process."""
        (value,) = struct.unpack_from("<Q", self._map, member * 8)
        return int(value)

    def set_count(self, member: int, value: int) -> None:
        """Set the counter of a process, visible to all others."""
        struct.pack_into("<Q", self._map, member * 8, value)

    def problems(self, others: list[int]) -> list[str]:
        """Check the content, and that the counters of the other processes move."""
        found: list[str] = []
        if digest(self._map[PAGE:]) != self._digest:
            found.append(f"the content of {self.name} has changed")
        if self._fd >= 0 and digest(os.pread(self._fd, len(self._map), PAGE)) != self._digest:
            found.append(f"{self.name} read through its descriptor differs")
        before = {other: self.count(other) for other in others}
        found += [
            f"process {other} does not move its counter in {self.name}"
            for other in others
            if not becomes_true(lambda other=other: self.count(other) > before[other])
        ]
        return found


def shared_memories(size: int, seed: int) -> list[SharedMemory]:
    """Make one of each kind: anonymous, a memfd, and a file of /dev/shm that has lost its name."""
    segment, path = tempfile.mkstemp(dir="/dev/shm")
    os.unlink(path)  # noqa: PTH108 - a descriptor goes with it
    return [
        SharedMemory("anonymous shared memory", -1, size, seed),
        SharedMemory("a memfd", os.memfd_create("tree"), size, seed + 1),
        SharedMemory("a deleted file of /dev/shm", segment, size, seed + 2),
    ]


class Counters:
    """Threads that count, the first of them also in shared memory."""

    def __init__(self, member: int, threads: int, shared: list[SharedMemory]) -> None:
        self._member = member
        self._shared = shared
        self.counts = [0] * threads
        self._ids: list[int | None] = []
        self._threads = [
            threading.Thread(target=self._run, args=(index,), daemon=True)
            for index in range(threads)
        ]

    def start(self) -> None:
        """Start counting."""
        for thread in self._threads:
            thread.start()
        self._ids = [thread.native_id for thread in self._threads]

    def _run(self, index: int) -> None:
        pause = threading.Event()
        while True:
            self.counts[index] += 1
            if index == 0:
                for shared in self._shared:
                    shared.set_count(self._member, self.counts[0])
            pause.wait(COUNT_EVERY_S)

    def problems(self) -> list[str]:
        """Check that every thread goes on and that all have the ids they had."""
        before = list(self.counts)
        found = [
            f"thread {index} does not count any more"
            for index, count in enumerate(before)
            if not becomes_true(lambda index=index, count=count: self.counts[index] > count)
        ]
        living = {int(name) for name in os.listdir("/proc/self/task")}  # noqa: PTH208
        found += [f"thread {number} is gone" for number in self._ids if number not in living]
        return found


class Peer:
    """An established TCP connection to another process, on which both sides ask and answer."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._sending = threading.Lock()
        threading.Thread(target=self._serve, daemon=True).start()

    def _send(self, message: bytes) -> None:
        with self._sending:
            self._connection.sendall(message)

    def _serve(self) -> None:
        with contextlib.suppress(OSError), self._connection.makefile("rb") as stream:
            while message := stream.read(1 + NONCE_BYTES):
                if message[:1] == b"?":
                    self._send(b"!" + message[1:])
                else:
                    self._answers.put(message[1:])

    def problems(self) -> list[str]:
        """Ask for an echo of something new."""
        nonce = os.urandom(NONCE_BYTES)
        address = self._connection.getsockname()
        try:
            self._send(b"?" + nonce)
            answer = self._answers.get(timeout=PATIENCE_S)
        except (OSError, queue.Empty) as error:
            return [f"the connection at {address} is dead: {error!r}"]
        return [] if answer == nonce else [f"the connection at {address} answered something else"]


class Mesh:
    """A listener, and one connection to each other process."""

    def __init__(self) -> None:
        self._listener = socket.create_server((LOOPBACK, 0))
        self.port = self._listener.getsockname()[1]
        self._peers: list[Peer] = []

    def connect(self, lower_ports: list[int], higher: int) -> None:
        """Connect to the processes with lower numbers, and accept the `higher` other ones."""
        for port in lower_ports:
            self._peers.append(Peer(socket.create_connection((LOOPBACK, port))))
        for _ in range(higher):
            connection, _ = self._listener.accept()
            self._peers.append(Peer(connection))

    def problems(self) -> list[str]:
        """Check every connection, and that the listener still takes new ones."""
        found = [problem for peer in self._peers for problem in peer.problems()]
        try:
            with socket.create_connection((LOOPBACK, self.port), timeout=PATIENCE_S) as client:
                accepted, _ = self._listener.accept()
                with accepted:
                    client.sendall(b"new")
                    accepted.recv(3, socket.MSG_WAITALL)
        except OSError as error:
            found.append(f"the listener at port {self.port} is dead: {error!r}")
        return found


class Files:
    """An open file with an offset, and one without a name any more."""

    def __init__(self, member: int, seed: int) -> None:
        generator = random.Random(seed)
        self._kept = Path(f"kept-{member}.txt")
        self._deleted = Path(f"deleted-{member}.txt")
        self._files = []
        for path in (self._kept, self._deleted):
            content = generator.randbytes(100_000)
            file = path.open("w+b", buffering=0)
            file.write(content)
            offset = file.seek(generator.randrange(len(content)))
            self._files.append((file, content, offset))
        self._deleted.unlink()

    def problems(self) -> list[str]:
        """Check offset and content of both, and that each has its name or has none."""
        found: list[str] = []
        for path, (file, content, offset) in zip(
            (self._kept, self._deleted), self._files, strict=True
        ):
            if os.lseek(file.fileno(), 0, os.SEEK_CUR) != offset:
                found.append(f"the offset in {path} has changed")
            if os.pread(file.fileno(), len(content) + 1, 0) != content:
                found.append(f"the content of {path} has changed")
        kept, deleted = (file for file, _, _ in self._files)
        if not self._kept.exists() or not os.path.samestat(
            self._kept.stat(), os.fstat(kept.fileno())
        ):
            found.append(f"{self._kept} is another file now")
        if self._deleted.exists() or os.fstat(deleted.fileno()).st_nlink != 0:
            found.append(f"{self._deleted} has a name again")
        return found


class Queued:
    """Bytes that wait in a pipe and messages that wait in a Unix socket, read by nobody yet."""

    def __init__(self, seed: int) -> None:
        generator = random.Random(seed)
        self._bytes = generator.randbytes(20_000)
        self._messages = [generator.randbytes(100 + number) for number in range(3)]
        self._pipe = os.pipe()
        self._sockets = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._put()

    def _put(self) -> None:
        os.write(self._pipe[1], self._bytes)
        for message in self._messages:
            self._sockets[0].send(message)

    def problems(self) -> list[str]:
        """Take everything out, compare it, and put it back."""
        os.set_blocking(self._pipe[0], False)
        os.set_blocking(self._sockets[1].fileno(), False)
        found: list[str] = []
        try:
            if os.read(self._pipe[0], 2 * len(self._bytes)) != self._bytes:
                found.append("the bytes in the pipe have changed")
            messages = [self._sockets[1].recv(4096) for _ in self._messages]
            if messages != self._messages:
                found.append("the messages in the Unix socket have changed")
        except BlockingIOError:
            return [*found, "something is gone from the pipe or the Unix socket"]
        self._put()
        return found
