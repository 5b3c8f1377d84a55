"""A real dump that arrives through pipes: the snapshot says and holds what a push of it does."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import snapstore
from tests.support.criu import RealDumps

pytestmark = [pytest.mark.criu, pytest.mark.slow]


def described(dump: Path) -> snapstore.Described:
    """Describe a dump from its small images, without the bytes of its pages."""
    files = {path.name: path.read_bytes() for path in dump.iterdir() if "pages-" not in path.name}
    sizes = {path.name: path.stat().st_size for path in dump.glob("pages-*.img")}
    return snapstore.describe_images(files, sizes)


def capture(store: snapstore.Store, dump: Path, name: str) -> snapstore.PushResult:
    """Let every image arrive through a pipe of its own, all at the same time."""
    what = described(dump)
    with store.begin(name) as writer:
        threads = []
        for path in dump.iterdir():
            kind = what.files[path.name]
            status = path.stat()
            file = writer.open_file(
                kind.rank,
                path.name,
                data_class=kind.data_class,
                mode=status.st_mode & 0o7777,
                mtime_ns=status.st_mtime_ns,
            )
            for work in pipe(path, file):
                threads.append(threading.Thread(target=work))
                threads[-1].start()
        for thread in threads:
            thread.join()
        return writer.commit(kind=what.kind, requirements=what.requirements, warnings=what.warnings)


def pipe(path: Path, file: snapstore.FileWriter) -> tuple[Callable[[], None], ...]:
    receiving, sending = os.pipe()

    def send() -> None:
        with os.fdopen(sending, "wb") as pipe, path.open("rb") as source:
            while data := source.read(50_000):
                pipe.write(data)

    def receive() -> None:
        with os.fdopen(receiving, "rb", buffering=0) as pipe, file:
            while count := pipe.readinto(file.buffer()):
                file.advance(count)

    return send, receive


def test_images_in_memory_are_described_as_a_directory_is(
    real_dumps: RealDumps, work_dir: Path
) -> None:
    with snapstore.init_store(str(work_dir / "store")) as store:
        for number, dump in enumerate((real_dumps.first, real_dumps.second)):
            pushed = store.push(dump, f"pushed:{number}")
            root = store.snapshot(f"pushed:{number}").manifest
            what = described(dump)
            assert (what.kind, what.requirements) == (root.kind, root.requirements)
            assert what.warnings == pushed.warnings
            assert {"criu", "processes", "mapped_files", "machine"} <= what.requirements.keys()
            assert {file.rank for file in what.files.values()} == {"host"}
            assert what.files["pages-1.img"].role == "criu-pages"
            assert what.files["pages-1.img"].data_class == "pages"


def test_a_captured_dump_is_the_pushed_dump(real_dumps: RealDumps, work_dir: Path) -> None:
    """Goal: whether a dump was captured or pushed makes no difference to anybody.

    Method: capture both dumps, then push their directories into the same store: nothing is new, and
    `show` says the same; but for the root's own time, the manifests are equal.
    """
    with snapstore.init_store(str(work_dir / "store")) as store:
        for number, dump in enumerate((real_dumps.first, real_dumps.second)):
            captured = capture(store, dump, f"captured:{number}")
            assert store.push(dump, f"pushed:{number}").ingest.new_bytes == 0
            one, other = (store.snapshot(f"{word}:{number}") for word in ("captured", "pushed"))
            assert one.manifest.requirements == other.manifest.requirements
            assert one.manifest.kind == other.manifest.kind == "criu"
            extents = [found.rank("host").read_extents().tobytes() for found in (one, other)]
            assert extents[0] == extents[1]
            store.pull(f"captured:{number}", work_dir / f"pulled-{number}")
            for path in dump.iterdir():
                pulled = work_dir / f"pulled-{number}" / path.name
                assert pulled.read_bytes() == path.read_bytes()
                assert pulled.stat().st_mtime_ns == path.stat().st_mtime_ns
            assert captured.kind == "criu"
