"""Where the limit lies of reading files in memory into GPUs: processes, threads, sizes of pieces.

    python -m tools.gpu.limits

Some processes for each GPU, each with some threads, read pieces of a file on tmpfs into page-locked
slots and let the GPU fetch them, or not; nothing is checked, and nothing else is done. So it tells
what a machine can do at most, and whether the interpreter or the memory is what holds it back.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from snapagent.gpu.arena import PinnedArena
from snapagent.gpu.driver import Gpu, Lane, load_driver
from snapagent.gpu.hashing import device_buffer
from snapstore.clock import SystemClock
from tools.gpu.report import write_report

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MIB, GIB = 1 << 20, 1 << 30
SECONDS: Final = 1.2
SLOTS: Final = 2


def main() -> None:
    """Measure all combinations."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=6, help="of each file")
    parser.add_argument("--processes", default="1,2,4", help="for each GPU")
    parser.add_argument("--threads", default="8,12,16", help="for each GPU, of all its processes")
    parser.add_argument("--kib", default="1024,4096", help="sizes of pieces")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        child(options.child, options.folder)
        return
    driver = load_driver()
    rows = []
    with tempfile.TemporaryDirectory(prefix="gpu-limits-", dir="/dev/shm") as name:
        folder = Path(name)
        for number in range(len(driver.devices)):
            block = np.random.default_rng(number).integers(0, 255, 64 * MIB, np.uint8)
            with (folder / str(number)).open("wb") as file:
                for _ in range(int(options.gib * GIB) // len(block)):
                    file.write(block.data)
        processes, threads, kib = (
            [int(word) for word in text.split(",")]
            for text in (options.processes, options.threads, options.kib)
        )
        for count in processes:
            rows += measure(folder, len(driver.devices), count, threads, kib)
    for row in rows:
        print(json.dumps(row))
    write_report("limits", driver, {"rows": rows})


def measure(
    folder: Path, gpus: int, processes: int, threads: Sequence[int], kib: Sequence[int]
) -> list[dict[str, object]]:
    """Measure with so many processes for each GPU."""
    rows: list[dict[str, object]] = []
    with contextlib.ExitStack() as stack:
        children = [
            (gpu, stack.enter_context(started(gpu, folder)))
            for gpu in range(gpus)
            for _ in range(processes)
        ]
        together = [1] + ([gpus] if gpus > 1 else [])
        for copies, total, size, used in itertools.product((1, 0), threads, kib, together):
            if total % processes:
                continue
            order = {
                "threads": total // processes,
                "bytes": size << 10,
                "copies": copies,
                "parts": processes,
            }
            some = [one for gpu, one in children if gpu < used]
            rate = sum(ask(some, order))
            rows.append(
                {"gpus": used, "processes": processes, "total_threads": total, "kib": size}
                | {"copies": copies, "gb_per_s": round(rate, 1)}
            )
    return rows


@contextlib.contextmanager
def started(gpu: int, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a child and wait until it is ready."""
    command = [sys.executable, "-m", "tools.gpu.limits", "--child", str(gpu)]
    with subprocess.Popen(  # noqa: S603 - this program
        [*command, "--folder", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()


def ask(children: Sequence[subprocess.Popen[str]], order: dict[str, int]) -> list[float]:
    """Let all of them work at once; returns the rate of each."""
    for number, one in enumerate(children):
        assert one.stdin is not None
        one.stdin.write(json.dumps(order | {"part": number % order["parts"]}) + "\n")
        one.stdin.flush()
    found = []
    for one in children:
        assert one.stdout is not None
        found.append(float(one.stdout.readline()))
    return found


def child(number: int, folder: Path) -> None:
    """Serve the parent's orders."""
    with load_driver().open(number) as gpu, contextlib.ExitStack() as stack:
        arena = stack.enter_context(PinnedArena(gpu, slots=SLOTS * 16))
        address = stack.enter_context(device_buffer(gpu, 256 * MIB))
        fd = os.open(folder / str(number), os.O_RDONLY)
        stack.callback(os.close, fd)
        print("ready", flush=True)
        for line in sys.stdin:
            order = json.loads(line)
            print(run(gpu, arena, address, fd, order), flush=True)


def run(gpu: Gpu, arena: PinnedArena, address: int, fd: int, order: dict[str, int]) -> float:
    """Read for a while with some threads; returns GB/s."""
    count = order["threads"]
    with contextlib.ExitStack() as stack:
        lanes = [stack.enter_context(gpu.lane(SLOTS)) for _ in range(count)]
        return run_on(lanes, arena, address, fd, order)


def run_on(
    lanes: list[Lane], arena: PinnedArena, address: int, fd: int, order: dict[str, int]
) -> float:
    """Do it with these streams, one for each thread."""
    size, count = order["bytes"], order["threads"]
    stripe = os.fstat(fd).st_size // (count * order["parts"])
    done = [0] * count
    clock = SystemClock()
    begin = clock.monotonic_s()

    def work(thread: int) -> None:
        base = (order["part"] * count + thread) * stripe
        lane = lanes[thread]
        with arena.borrow(SLOTS) as slots:
            lane.bind()
            views = [slot.view[:size] for slot in slots]
            at, number = 0, 0
            while clock.monotonic_s() - begin < SECONDS:
                place = number % SLOTS
                if number >= SLOTS and order["copies"]:
                    lane.wait(place)
                os.preadv(fd, [views[place]], base + at)
                if order["copies"]:
                    lane.copy_in(place, address, slots[place].address, size)
                at = (at + size) % (stripe - size)
                number += 1
            lane.finish()
            done[thread] = number * size

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(count)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return sum(done) / (clock.monotonic_s() - begin) / 1e9


if __name__ == "__main__":
    main()
