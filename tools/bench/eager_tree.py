"""A tree of processes, each with memory of its own, for `eager.py`.

    python eager_tree.py CONTROL PROCESSES CONTENT

Each loads the file CONTENT and writes its number into every page, so that no two are the same. Who
connects to the socket CONTROL and says something gets a JSON list of the hashes of all memory.
"""

import hashlib
import json
import mmap
import os
import socket
import sys
from pathlib import Path

READ_BYTES = 8 << 20


def load(path: Path, number: int) -> mmap.mmap:
    """Return private memory with the content of a file, marked with a number."""
    size = path.stat().st_size
    region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with path.open("rb", buffering=0) as file, memoryview(region) as view:
        filled = 0
        while filled < size:
            filled += file.readinto(view[filled : filled + READ_BYTES])
    mark = number.to_bytes(8, "little")
    for start in range(0, size, mmap.PAGESIZE):
        region[start : start + len(mark)] = mark
    return region


def start_child(number: int, content: Path, others: list[socket.socket]) -> socket.socket:
    """Fork a process that answers each byte with the hash of its memory, until nobody can ask."""
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        for each in (ours, *others):
            each.close()
        region = load(content, number)
        while theirs.recv(1):
            theirs.sendall(hashlib.sha256(region).hexdigest().encode())
        os._exit(0)
    theirs.close()
    return ours


def main() -> None:
    """Make the tree, and answer for it."""
    control, count, content = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    children: list[socket.socket] = []
    for number in range(1, count):
        children.append(start_child(number, content, children))
    region = load(content, 0)
    with socket.socket(socket.AF_UNIX) as listener:
        for child in children:
            child.sendall(b"?")
            child.recv(64, socket.MSG_WAITALL)
        listener.bind(control)
        listener.listen()
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1)
                for child in children:
                    child.sendall(b"?")
                hashes = [hashlib.sha256(region).hexdigest()]
                hashes += [child.recv(64, socket.MSG_WAITALL).decode() for child in children]
                connection.sendall(json.dumps(hashes).encode())


if __name__ == "__main__":
    main()
