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
class Piece:
    """One write: bytes of a mapped source, and the number of the file that gets them."""

    file: int
    offset: int
    data: memoryview


def mapped(path: Path) -> memoryview:
    """Map a file with all its pages present; an empty file gives an empty view."""
    if path.stat().st_size == 0:
        return memoryview(b"")
    with path.open("rb") as file:
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        return memoryview(mmap.mmap(file.fileno(), 0, flags, mmap.PROT_READ))


def pieces_of(file: int, view: memoryview) -> list[Piece]:
    """Cut what is not zero into writes: zero pages end a write, and so does its largest size."""
    zero = bytes(PAGE)
    pieces = []
    start = 0
    for at in range(0, len(view), PAGE):
        end = min(at + PAGE, len(view))
        is_zero = view[at:end].tobytes() == zero[: end - at]
        if start < at and (is_zero or end - start > WRITE_SIZE_BYTES):
            pieces.append(Piece(file, start, view[start:at]))
            start = at
        if is_zero:
            start = end
    if start < len(view):
        pieces.append(Piece(file, start, view[start:]))
    return pieces


def write_piece(descriptor: int, piece: Piece) -> None:
    """Write all of a piece; os.pwrite may stop short, and lets other threads run."""
    done = 0
    while done < len(piece.data):
        done += os.pwrite(descriptor, piece.data[done:], piece.offset + done)


def write_all(target: Path, sources: list[tuple[Path, memoryview]], threads: int) -> int:
    """Make the files and write them; return the bytes written."""
    pieces = [
        piece for number, (_, view) in enumerate(sources) for piece in pieces_of(number, view)
    ]
    started, cpu_started = time.perf_counter(), cpu_seconds()
    descriptors = []
    for relative, view in sources:
        path = target / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptors.append(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        os.ftruncate(descriptors[-1], len(view))
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda piece: write_piece(descriptors[piece.file], piece), pieces))
    for descriptor in descriptors:
        os.close(descriptor)
    wall_s, cpu_s = time.perf_counter() - started, cpu_seconds() - cpu_started
    written = sum(len(piece.data) for piece in pieces)
    print(json.dumps({"wall_s": wall_s, "cpu_s": cpu_s, "written_bytes": written}))
    return written


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
    sources = [(path.relative_to(options.source), mapped(path)) for path in paths]
    write_all(options.target, sources, options.threads)


if __name__ == "__main__":
    main()
