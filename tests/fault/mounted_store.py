"""A store on real mounts; run by `test_mounts.py` in a mount namespace of its own."""

import contextlib
import mmap
import random
import subprocess
import sys
from pathlib import Path

import pytest

from snapstore.cache.node_cache import NodeCache
from snapstore.errors import AccessDenied, OutOfSpace, RefNotFound
from snapstore.options import StoreOptions
from snapstore.repository import memory
from snapstore.repository.store import init_store, open_store
from snapstore.units import GIB, KIB, MIB
from tests.support.caches import ByteContent
from tests.support.damage import (
    Lab,
    age,
    leftovers,
    make_tree,
    nothing_left,
    run_program,
    temporaries,
    tree_state,
)
from tests.support.schemas import check_store

HUGE_PAGES = 14
"""As many as two decoded files need there, and one that is of no use."""


def mount(*arguments: str | Path) -> None:
    """Mount something."""
    subprocess.run(["mount", *arguments], check=True)  # noqa: S603, S607


def small_disk(folder: Path, size: str) -> Path:
    """Make a disk of that size."""
    folder.mkdir()
    mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder)
    return folder


def push_full(folder: Path) -> None:
    """A push to a full disk: exit 8, nothing has the name, and the same push works with room.

    Method: a first snapshot and a file that takes the rest of the disk. Proves: I1, I2, I3, S4.
    """
    disk = small_disk(folder / "disk", "4m")
    lab = Lab(disk / "store", make_tree(folder / "tree", random.Random(1)))
    old = make_tree(folder / "old", random.Random(2))
    with init_store(str(lab.root), lab.options) as store:
        store.push(old, "old")
    ballast = disk / "ballast"
    free = 4 * MIB - sum(path.stat().st_blocks * 512 for path in disk.rglob("*"))
    # Room for a lease, for some of the data, and for all but the last few objects.
    for left in (0, 12 * KIB, 40 * KIB, 200 * KIB, 400 * KIB, 600 * KIB):
        ballast.write_bytes(bytes(free - left))
        with nothing_left(), lab.open() as store, pytest.raises(OutOfSpace) as caught:
            store.push(lab.tree, lab.name)
        assert caught.value.exit_code == 8
        assert "make room" in caught.value.next_step
        assert temporaries(lab.root) == []
        with lab.open() as store:
            with pytest.raises(RefNotFound):
                store.snapshot(lab.name)
            assert [str(found.name) for found in store.list()] == ["old:latest"]
            store.pull("old", folder / f"old-{left}")
        assert tree_state(folder / f"old-{left}") == tree_state(old)
        check_store(lab.root)
    result = run_program("push", lab.tree, lab.name, "--store", lab.root, "--json")
    assert result.returncode == 8, result.stderr
    assert '"code":"OutOfSpace"' in result.stdout
    ballast.unlink()
    lab.push()
    lab.pull(folder / "out")
    assert tree_state(folder / "out") == tree_state(lab.tree)
    check_store(lab.root)


def pull_full(folder: Path) -> None:
    """A pull to a full disk: exit 8, nothing has the name, and it goes on once there is room.

    Method: less and less ballast, so that it ends at other places. Proves: I8.
    """
    tree = make_tree(folder / "tree", random.Random(1))
    (tree / "more.bin").write_bytes(random.Random(3).randbytes(9 * MIB))
    age(tree)
    lab = Lab(folder / "store", tree)
    with init_store(str(lab.root), lab.options) as store:
        store.push(lab.tree, lab.name)
    disk = small_disk(folder / "disk", "10m")
    ballast, out = disk / "ballast", disk / "out"
    for left in (0, 4 * KIB, 24 * KIB, 1 * MIB, 6 * MIB, 9 * MIB):
        ballast.write_bytes(bytes(10 * MIB - left))
        with nothing_left(), pytest.raises(OutOfSpace) as caught:
            lab.pull(out, resume=True)
        assert caught.value.exit_code == 8
        assert caught.value.next_step
        assert not out.exists()
        assert bool(leftovers(out)) == (left > 0), left
        ballast.unlink()
    ballast.write_bytes(bytes(1 * MIB))
    result = run_program("pull", lab.name, out, "--resume", "--store", lab.root, "--json")
    assert result.returncode == 8, result.stderr
    assert "--resume" in result.stderr
    ballast.unlink()
    resumed = lab.pull(out, resume=True)
    assert resumed.resumed_bytes > 1 * MIB
    assert tree_state(out) == tree_state(lab.tree)
    assert leftovers(out) == []


def readonly(folder: Path) -> None:
    """A store on a read-only mount: push is exit 5, everything that reads works. Proves: I2."""
    lab = Lab.make(folder, random.Random(1))
    before = sorted(lab.root.rglob("*"))
    mount("--bind", lab.root, lab.root)
    mount("-o", "remount,ro,bind", lab.root)
    with lab.open() as store, pytest.raises(AccessDenied) as caught:
        store.push(lab.tree, lab.name)
    assert caught.value.exit_code == 5
    assert "mount" in caught.value.next_step
    lab.pull(folder / "out")
    assert tree_state(folder / "out") == tree_state(lab.tree)
    for arguments, code in (
        (("push", str(lab.tree), lab.name), 5),
        (("pull", lab.name, str(folder / "by-program")), 0),
        (("ls",), 0),
        (("show", lab.name), 0),
        (("diff", lab.name, "other"), 0),
        (("stats",), 0),
        (("tag", "history", lab.name), 0),
        (("tag", lab.name, "more"), 5),
        (("rm", lab.name, "--dry-run"), 0),
        (("rm", lab.name), 5),
        (("init",), 0),
    ):
        result = run_program(*arguments, "--store", lab.root)
        assert result.returncode == code, result.stderr
        assert "Traceback" not in result.stderr
    assert tree_state(folder / "by-program") == tree_state(lab.tree)
    assert sorted(lab.root.rglob("*")) == before


def spool_full(folder: Path) -> None:
    """No room for temporary files is not the store's fault, and the message says whose it is.

    Method: the directory for temporary files is a full disk, and chunk tables go there at once.
    """
    import tempfile  # noqa: PLC0415 - only here

    from snapstore.repository import rank_builder  # noqa: PLC0415 - to be changed

    lab = Lab.make(folder, random.Random(1))
    disk = small_disk(folder / "disk", "4k")
    (disk / "ballast").write_bytes(bytes(4 * KIB))
    tempfile.tempdir = str(disk)
    rank_builder._SPOOL_BYTES = 48
    with nothing_left(), pytest.raises(OutOfSpace, match="temporary") as caught:
        lab.push("other")
    assert str(disk) in str(caught.value)
    assert "TMPDIR" in caught.value.next_step
    check_store(lab.root)


def cache_full(folder: Path) -> None:
    """A cache on full disks costs its readers nothing but time. Proves: N5, N6.

    Method: disks for stored and decoded bytes that are smaller than what the cache may take there,
    and than the snapshot; one of them is filled by others as well.
    """
    lab = Lab.make(folder, random.Random(1))
    tree = folder / "large"
    tree.mkdir()
    content = random.Random(3).randbytes(6 * MIB)
    (tree / "noise").write_bytes(content)
    with init_store(str(lab.root)) as store:
        store.push(tree, "large")
    disk, memory = (small_disk(folder / name, "2m") for name in ("disk", "memory"))
    for place in (disk, memory):
        place.chmod(0o755)
    cache = disk / "cache"
    NodeCache.init(
        cache, budget_bytes=64 * MIB, memory=memory / "cache", memory_budget_bytes=64 * MIB
    ).close()
    for name, ballast in (("first", 0), ("second", 200 * KIB), ("third", 4 * MIB)):
        with contextlib.suppress(OSError):
            (disk / "ballast").write_bytes(bytes(ballast))
        options = StoreOptions(node_cache=cache, threads=2)
        with open_store(str(lab.root), options) as store:
            store.pull("large", folder / name)
            assert (folder / name / "noise").read_bytes() == content
            with store.snapshot("large").open("noise") as file:
                assert file.read() == content
                assert file.read_at(MIB, 5000) == content[MIB : MIB + 5000]
            assert store.cache is not None
            stats = store.cache.stats()
            assert stats.decoded.used_bytes <= 2 * MIB
            assert store.warm("large").missed_bytes > 0
    with pytest.raises(OutOfSpace, match="cannot write to the cache"):
        NodeCache.init(disk / "another", budget_bytes=MIB)


def cache_unusable(folder: Path) -> None:
    """A cache that cannot even be opened is passed by, and named in the log. Proves: N6.

    Method: one on a disk that became read-only, a new one on a full disk, and one whose memory is
    full. Who asks for the cache itself, rather than for a snapshot, is told.
    """
    lab = Lab.make(folder, random.Random(1))
    lab.push()
    disk = small_disk(folder / "disk", "64k")
    disk.chmod(0o755)
    NodeCache.init(disk / "cache", budget_bytes=MIB).close()
    (disk / "new").mkdir(mode=0o700)
    full = small_disk(folder / "memory", "8k,nr_inodes=2")
    full.chmod(0o755)
    memory = full / "cache"
    NodeCache.init(
        folder / "cache", budget_bytes=MIB, memory=memory, memory_budget_bytes=MIB
    ).close()
    memory.rmdir()
    for place in (disk, full):
        with contextlib.suppress(OSError):
            (place / "ballast").write_bytes(bytes(1 * MIB))
    passed_by(lab, disk / "new", folder / "full")
    passed_by(lab, folder / "cache", folder / "no-memory")
    mount("-o", "remount,ro", disk)
    passed_by(lab, disk / "cache", folder / "read-only")


def passed_by(lab: Lab, cache: Path, out: Path) -> None:
    """A pull works, and `cache warm` says what is wrong."""
    result = run_program("pull", lab.name, out, "--store", lab.root, "--cache", cache)
    assert result.returncode == 0, result.stderr
    assert "past the cache" in result.stderr
    assert tree_state(out) == tree_state(lab.tree)
    result = run_program("cache", "warm", lab.name, "--store", lab.root, "--cache", cache)
    assert result.returncode == 5, result.stderr
    assert f"cannot use {cache.parent}" in result.stderr or "memory" in result.stderr


def cache_huge(folder: Path) -> None:
    """Decoded files in huge pages: filled, mapped, found again, and without room read past them.

    Method: as many huge pages as two of four files need. Proves: N1, N6.
    """
    memory = folder / "huge"
    memory.mkdir()
    mount("-t", "hugetlbfs", "none", memory)
    memory.chmod(0o755)
    data = bytearray(random.Random(1).randbytes(9 * MIB + 777))
    data[4 * MIB : 6 * MIB] = bytes(2 * MIB)
    with NodeCache.init(
        folder / "cache", budget_bytes=0, memory=memory / "cache", memory_budget_bytes=GIB
    ) as cache:
        contents = [
            ByteContent(bytes(data), 256, frozenset({4, 5}), label=f"file {number}")
            for number in range(4)
        ]
        kept = 0
        with contextlib.ExitStack() as opened:
            for content in contents:
                file = opened.enter_context(cache.open_content(content))
                found = bytearray(len(data))
                file.read_into(0, found)
                assert found == data
                if not file.filled(0, len(data)):
                    continue
                kept += 1
                with mmap.mmap(file.fd, 12 * MIB, prot=mmap.PROT_READ) as mapped:
                    assert mapped[: len(data)] == data
                with cache.open_content(content) as again:
                    assert again.filled(0, len(data))
        assert kept == 2
        assert cache.stats().decoded.used_bytes <= HUGE_PAGES * 2 * MIB
        cache.evict()
        assert cache.stats().decoded.used_bytes == 0


if __name__ == "__main__":
    memory.PACK_BYTES = 120 * KIB
    worlds = {
        "push_full": push_full,
        "pull_full": pull_full,
        "readonly": readonly,
        "spool_full": spool_full,
        "cache_full": cache_full,
        "cache_unusable": cache_unusable,
        "cache_huge": cache_huge,
    }
    worlds[sys.argv[1]](Path(sys.argv[2]))
