"""A process worth a snapshot: memory with known content, threads, an open file, a listening socket.

It is what the demo and the CRIU tests dump and restore. Standard library only, so that it starts
at once and maps few files: CRIU restores a process only where every mapped file is unchanged.

Each connection carries one request line and gets one JSON object back, which always tells the
offset of the open file:

    ping              a counter that a thread advances, the number of threads
    hash              SHA-256 of all the memory it made, computed from the live pages
    touch MIB SALT    rewrite MIB mebibytes in short runs of pages, spread over the first region
    grow MIB SALT     make MIB mebibytes more
    note TEXT         append a line to the open file
    quit              answer, then leave with status 0

The requests close their connection: an established one would make a plain dump refuse.
"""

import argparse
import contextlib
import hashlib
import json
import mmap
import os
import socket
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

MIB = 1 << 20
PAGE = mmap.PAGESIZE
RUN_PAGES_MAX = 32
THREAD_COUNT = 4
TICK_S = 0.05
REQUEST_BYTES_MAX = 256
READ_BYTES_MAX = 8 << 20

Answer = dict[str, object]


def noise(label: str, size: int) -> bytes:
    """Return `size` bytes that depend on `label` alone and never form a page of zeros."""
    return hashlib.shake_128(label.encode()).digest(size)


def private_memory(size: int) -> mmap.mmap:
    """Map anonymous private memory, as malloc would: the kind that restores can fill lazily."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


@dataclass
class Subject:
    """The state that must survive: memory, counter and an open file."""

    seed: int
    log: BinaryIO
    regions: list[mmap.mmap] = field(default_factory=list)
    ticks: int = 0

    def grow(self, size_mib: int, salt: str) -> None:
        """Add a region of `size_mib` mebibytes of noise."""
        region = private_memory(size_mib * MIB)
        for start in range(0, len(region), MIB):
            region[start : start + MIB] = noise(f"{self.seed}/{salt}/{start}", MIB)
        self.regions.append(region)

    def load(self, path: Path) -> None:
        """Add a region with the content of a file, which is not needed afterwards."""
        region = private_memory(path.stat().st_size)
        with path.open("rb", buffering=0) as file, memoryview(region) as view:
            filled = 0
            while filled < len(region):
                filled += file.readinto(view[filled : filled + READ_BYTES_MAX])
        self.regions.append(region)

    def add_zero_pages(self, size_mib: int) -> None:
        """Add a region whose first half is written with zeros and whose second is never touched.

        CRIU dumps the written half in full, since it does not look for zeros; the store must.
        """
        region = private_memory(size_mib * MIB)
        for start in range(0, len(region) // 2, PAGE):
            region[start] = 0
        self.regions.append(region)

    def touch(self, size_mib: int, salt: str) -> int:
        """Rewrite about `size_mib` mebibytes of the first region; return the bytes rewritten.

        Runs of 1 to 32 pages at even distances: processes rewrite memory here and there, not in
        one piece, and a store that only handles one piece would look better than it is.
        """
        region = self.regions[0]
        wanted = min(size_mib * MIB, len(region))
        lengths: list[int] = []
        for draw in noise(f"{self.seed}/{salt}/runs", wanted // PAGE + 1):
            if sum(lengths) >= wanted:
                break
            lengths.append((draw % RUN_PAGES_MAX + 1) * PAGE)
        stride = len(region) // max(len(lengths), 1) // PAGE * PAGE
        written = 0
        for number, length in enumerate(lengths):
            size = min(length, stride)
            start = number * stride
            region[start : start + size] = noise(f"{self.seed}/{salt}/{number}", size)
            written += size
        return written

    def digest(self) -> str:
        """Hash all regions as they are in memory now."""
        whole = hashlib.sha256()
        for region in self.regions:
            whole.update(region)
        return whole.hexdigest()

    def answer(self, request: str) -> Answer:
        """Carry out one request line."""
        facts: Answer
        match request.split():
            case ["ping"]:
                facts = {"ticks": self.ticks, "threads": threading.active_count()}
            case ["hash"]:
                facts = {"hash": self.digest()}
            case ["touch", size_mib, salt]:
                facts = {"written": self.touch(int(size_mib), salt)}
            case ["grow", size_mib, salt]:
                self.grow(int(size_mib), salt)
                facts = {"regions": len(self.regions)}
            case ["note", *words]:
                self.log.write(" ".join(words).encode() + b"\n")
                self.log.flush()
                facts = {}
            case ["quit"]:
                facts = {"bye": os.getpid()}
            case _:
                return {"error": f"unknown request: {request!r}"}
        return {**facts, "file_offset": self.log.tell()}


def tick(subject: Subject, stop: threading.Event) -> None:
    """Count for ever, so that a restored process can show that it runs."""
    while not stop.wait(TICK_S):
        subject.ticks += 1


def idle(stop: threading.Event) -> None:
    """Wait for ever: one more thread whose registers and stack must survive."""
    stop.wait()


def start_threads(subject: Subject) -> None:
    """Start the counting thread and the idle ones."""
    stop = threading.Event()
    threading.Thread(target=tick, args=(subject, stop), daemon=True).start()
    for _ in range(THREAD_COUNT - 1):
        threading.Thread(target=idle, args=(stop,), daemon=True).start()


def serve(subject: Subject, listener: socket.socket) -> None:
    """Answer requests, one connection at a time, until `quit`."""
    while True:
        connection, _ = listener.accept()
        # A client that goes away in the middle is its own loss; the subject lives on.
        with connection, contextlib.suppress(ConnectionError):
            request = connection.makefile("r").readline(REQUEST_BYTES_MAX).strip()
            connection.sendall(json.dumps(subject.answer(request)).encode() + b"\n")
            if request == "quit":
                return


def announce(path: Path, facts: Answer) -> None:
    """Write the ready file in one step: whoever sees it sees all of it."""
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(facts), encoding="utf-8")
    unfinished.replace(path)


def main() -> None:
    """Build the state, announce it in DIR/ready.json, and serve."""
    parser = argparse.ArgumentParser(description="A process made to be dumped and restored.")
    parser.add_argument("directory", type=Path, help="where log.txt and ready.json go")
    parser.add_argument("--mib", type=int, default=300, help="mebibytes of distinct memory")
    parser.add_argument("--content", type=Path, help="a file with that memory's content instead")
    parser.add_argument("--zero-mib", type=int, default=32, help="mebibytes of zero memory")
    parser.add_argument("--seed", type=int, default=1, help="decides the content of the memory")
    options = parser.parse_args()

    with (options.directory / "log.txt").open("ab") as log, socket.socket() as listener:
        subject = Subject(seed=options.seed, log=log)
        if options.content:
            subject.load(options.content)
        else:
            subject.grow(options.mib, "first")
        if options.zero_mib:
            subject.add_zero_pages(options.zero_mib)
        subject.answer("note started")
        start_threads(subject)
        # Without this a restore could not bind while connections of the past are in TIME_WAIT.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        announce(options.directory / "ready.json", {"pid": os.getpid(), "port": port})
        serve(subject, listener)


if __name__ == "__main__":
    main()
