"""Reads a snapshot through a cache: `cache_reader HOW URL CACHE NAME [HOLD] [--processes N]`.

It says `ready`, waits for a line, reads all files and prints as JSON how many bytes it read from
the store and a digest of what it got. HOW is `files`, which reads decoded files where there are
some, or `pull`. With N it loads everything once, and that many processes, forked from it, do so at
once, each with a line of its own. With HOLD its third read of a pack stops for ever, after the
file of that name was made.
"""

import argparse
import json
import os
import sys
import tempfile
import threading
from pathlib import Path

from blake3 import blake3

import snapstore
from snapstore.backend.base import ObjectKind
from snapstore.backend.posix import PosixBackend
from snapstore.backend.s3 import S3Backend

HELD_READ = 3
DATA = frozenset({ObjectKind.PACK, ObjectKind.RANK, ObjectKind.LAYOUT, ObjectKind.SNAPSHOT})


class Counter:
    """Counts what comes from the store, and holds what it is to hold."""

    def __init__(self, hold: str | None) -> None:
        self.bytes = 0
        self._packs = 0
        self._hold = hold
        self._lock = threading.Lock()

    def watch(self, backend: type) -> None:
        original = backend.get_range  # type: ignore[attr-defined]

        def get_range(
            this: object, kind: ObjectKind, name: str, offset: int, into: memoryview
        ) -> None:
            with self._lock:
                self.bytes += into.nbytes if kind in DATA else 0
                self._packs += kind is ObjectKind.PACK
                is_held = self._hold is not None and self._packs == HELD_READ
            if is_held:
                Path(str(self._hold)).touch()
                threading.Event().wait()
            original(this, kind, name, offset, into)

        backend.get_range = get_range  # type: ignore[attr-defined]


def digest_of(snapshot: snapstore.Snapshot) -> str:
    hasher = blake3()
    for entry in snapshot.walk():
        if entry.is_file:
            hasher.update(entry.path)
            with snapshot.open(entry.path) as file:
                for part in file.ranges():
                    data = bytearray(part.length)
                    file.read_into(part.offset, data, streaming=True)
                    hasher.update(data)
    return hasher.hexdigest()


def digest_of_tree(root: Path) -> str:
    hasher = blake3()
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        hasher.update(str(path.relative_to(root)).encode())
        hasher.update(path.read_bytes())
    return hasher.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("how", "url", "cache", "name"):
        parser.add_argument(name)
    parser.add_argument("hold", nargs="?")
    parser.add_argument("--processes", type=int)
    given = parser.parse_args()
    counter = Counter(given.hold)
    for backend in (PosixBackend, S3Backend):
        counter.watch(backend)
    say("ready")
    sys.stdin.readline()
    if given.processes is None:
        read(given, counter)
    else:
        read_in_processes(given, counter)


def read(given: argparse.Namespace, counter: Counter) -> None:
    options = snapstore.StoreOptions(node_cache=Path(given.cache), threads=2)
    with (
        snapstore.open_store(given.url, options, readonly=True) as store,
        tempfile.TemporaryDirectory() as folder,
    ):
        if given.how == "pull":
            store.pull(given.name, Path(folder) / "tree")
            digest = digest_of_tree(Path(folder) / "tree")
        else:
            digest = digest_of(store.snapshot(given.name))
    say(json.dumps({"fetched": counter.bytes, "digest": digest}))


def read_in_processes(given: argparse.Namespace, counter: Counter) -> None:
    """Fork all of them, and let them begin when the last one is there."""
    waiting, gate = os.pipe()
    children = []
    for _ in range(given.processes):
        child = os.fork()
        if child == 0:
            os.close(gate)
            os.read(waiting, 1)
            read(given, counter)
            os._exit(0)
        children.append(child)
    os.close(gate)
    ends = [os.waitpid(child, 0)[1] for child in children]
    sys.exit(any(ends))


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
