"""Write the bytes of a directory to a new one as fast as this machine can: the yardstick of pull.

    raw_write.py SOURCE TARGET [--threads 2]

The sources are mapped and faulted in, and their zero pages found, before the clock starts: what is
timed is only the making of the files and the writes, of at most 8 MiB each, with holes left for the
zeros. Prints one JSON object: wall_s, cpu_s, written_bytes.
"""

import argparse
import json
import mmap
import os
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

PAGE = 4096
WRITE_SIZE_BYTES = 8 << 20


@dataclass(frozen=True)
class File:
    """A file to write: its name, its size, and what is not zero in it by offset."""

    name: Path
    size_bytes: int
    pieces: list[tuple[int, memoryview]]

    @property
    def written_bytes(self) -> int:
        """The bytes to write, without the zeros."""
        return sum(len(data) for _, data in self.pieces)


def mapped(path: Path) -> memoryview:
    """Map a file with all its pages present; an empty file gives an empty view."""
    if path.stat().st_size == 0:
        return memoryview(b"")
    with path.open("rb") as file:
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        return memoryview(mmap.mmap(file.fileno(), 0, flags, mmap.PROT_READ))


def pieces_of(view: memoryview) -> list[tuple[int, memoryview]]:
    """Cut what is not zero into writes: zero pages end a write, and so does its largest size."""
    zero = bytes(PAGE)
    pieces = []
    start = 0
    for at in range(0, len(view), PAGE):
        end = min(at + PAGE, len(view))
        is_zero = view[at:end].tobytes() == zero[: end - at]
        if start < at and (is_zero or end - start > WRITE_SIZE_BYTES):
            pieces.append((start, view[start:at]))
            start = at
        if is_zero:
            start = end
    if start < len(view):
        pieces.append((start, view[start:]))
    return pieces


def write_file(target: Path, file: File) -> None:
    """Make one file and write its pieces."""
    path = target / file.name
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    try:
        os.ftruncate(descriptor, file.size_bytes)
        for offset, data in file.pieces:
            done = 0
            while done < len(data):
                done += os.pwrite(descriptor, data[done:], offset + done)
    finally:
        os.close(descriptor)


def write_all(target: Path, files: list[File], threads: int) -> dict[str, float]:
    """Write the files, one thread to a file, the largest first; return what it cost.

    Two threads in one file would wait for each other: the kernel locks an inode while it writes.
    """
    ordered = sorted(files, key=lambda file: file.written_bytes, reverse=True)
    started, cpu_started = time.perf_counter(), cpu_seconds()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda file: write_file(target, file), ordered))
    return {
        "wall_s": time.perf_counter() - started,
        "cpu_s": cpu_seconds() - cpu_started,
        "written_bytes": sum(file.written_bytes for file in files),
    }


def cpu_seconds() -> float:
    """Return the CPU time of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Map the source, then write the target."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    paths = sorted(path for path in options.source.rglob("*") if path.is_file())
    files = []
    for path in paths:
        view = mapped(path)
        files.append(File(path.relative_to(options.source), len(view), pieces_of(view)))
    print(json.dumps(write_all(options.target, files, options.threads)))


if __name__ == "__main__":
    main()
