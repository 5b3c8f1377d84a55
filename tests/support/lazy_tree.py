"""A tree of three processes with threads and private memory, that can be asked to verify it.

Run as a program with a socket path and a size. Requests are words: `hash` lets all three verify
their memory, each by several threads; `fork` lets each fork a child that verifies what it
inherited; `discard` drops a part of the memory of each and looks that it reads as zeros; `touch`
reads one page of each.
"""

import hashlib
import json
import mmap
import os
import socket
import sys
import threading

MIB = 1 << 20
THREADS = 3


class Member:
    def __init__(self, seed: int, size_mib: int) -> None:
        self.memory = mmap.mmap(-1, size_mib * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.size_mib = size_mib
        self.sums = []
        for number in range(size_mib):
            data = hashlib.shake_128(f"{seed}/{number}".encode()).digest(MIB)
            self.memory[number * MIB : (number + 1) * MIB] = data
            self.sums.append(hashlib.sha256(data).hexdigest())
        self.wanted: list[int] = []
        self.work = threading.Semaphore(0)
        self.done = threading.Semaphore(0)
        self.wrong: list[int] = []
        for number in range(THREADS):
            threading.Thread(target=self.check_some, args=(number,), daemon=True).start()

    def is_right(self, number: int) -> bool:
        data = self.memory[number * MIB : (number + 1) * MIB]
        return hashlib.sha256(data).hexdigest() == self.sums[number]

    def check_some(self, thread: int) -> None:
        while True:
            self.work.acquire()
            self.wrong += [n for n in range(thread, self.size_mib, THREADS) if not self.is_right(n)]
            self.done.release()

    def hash(self) -> bool:
        self.work.release(THREADS)
        for _ in range(THREADS):
            self.done.acquire()
        return not self.wrong

    def fork(self) -> bool:
        child = os.fork()
        if not child:
            os._exit(0 if all(self.is_right(n) for n in range(self.size_mib)) else 7)
        return os.waitpid(child, 0)[1] == 0

    def touch(self) -> bool:
        return self.memory[7] is not None

    def discard(self) -> bool:
        number = self.size_mib - 1
        self.memory.madvise(mmap.MADV_DONTNEED, number * MIB, MIB)
        zeros = bytes(MIB)
        self.sums[number] = hashlib.sha256(zeros).hexdigest()
        return self.memory[number * MIB : (number + 1) * MIB] == zeros


def child(number: int, size_mib: int) -> tuple[int, int]:
    to_child, from_parent = os.pipe()
    to_parent, from_child = os.pipe()
    if os.fork():
        os.close(to_child)
        os.close(from_child)
        return from_parent, to_parent
    os.close(from_parent)
    os.close(to_parent)
    member = Member(number, size_mib)
    os.write(from_child, b"1")
    while request := os.read(to_child, 16):
        os.write(from_child, b"1" if getattr(member, request.decode())() else b"0")
    os._exit(0)


def main() -> None:
    path, size_mib = sys.argv[1], int(sys.argv[2])
    children = [child(number, size_mib) for number in (1, 2)]
    member = Member(0, size_mib)
    for _, answers in children:
        os.read(answers, 1)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        while True:
            connection, _ = listener.accept()
            with connection:
                request = connection.recv(16)
                if request == b"quit":
                    return
                for requests, _ in children:
                    os.write(requests, request)
                results = [getattr(member, request.decode())()]
                results += [os.read(answers, 1) == b"1" for _, answers in children]
                connection.sendall(json.dumps(results).encode())


if __name__ == "__main__":
    main()
