"""`snapstore mount`, for real: what was pushed is what is seen, whoever reads it and however."""

import concurrent.futures
import contextlib
import dataclasses
import errno
import json
import mmap
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import snapstore
from snapstore.clock import SystemClock
from snapstore.units import KIB, MIB
from tests.support.mounts import (
    SNAPSTORE,
    Mounts,
    look,
    names_in,
    own_environment,
    run_snapstore,
)
from tests.support.processes import stop_process
from tests.support.samples import random_bytes, text
from tests.support.servers import free_port
from tests.support.trees import (
    Data,
    Directory,
    File,
    HardLink,
    Symlink,
    allocated_bytes,
    same_trees,
    write_tree,
)
from tests.support.users import as_nobody, nobodys_directory
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

LONG = b"n" * 255
OLD = -1_000_000_001
FAR = (1 << 33) * 10**9
TREE = [
    Directory(path=b"", mode=0o750, mtime_ns=5),
    Directory(path=b"\xff\xfe", mode=0o700, mtime_ns=OLD),
    File(path=b"\xff\xfe/new\nline", mode=0o4755, size=5, data=(Data("noise", 0, 5),)),
    File(path=LONG, mode=0o600, mtime_ns=FAR, size=300_000, data=(Data("text", 0, 300_000),)),
    HardLink(path=LONG[:-1], first=LONG),
    Directory(path=b"empty", mode=0o1777),
    File(path=b"empty-file", mode=0o000),
    File(
        path=b"holes",
        size=40 * MIB + 5,
        data=(Data("noise", 3 * MIB, 1 * MIB, 1), Data("numbers", 20 * MIB, 5 * MIB, 2)),
        xattrs=(("user.a", b"\0b"), ("user.ümlaut", b"")),
    ),
    Directory(path=b"rank-0"),
    File(path=b"rank-0/weights", size=9 * MIB, data=(Data("numbers", 0, 9 * MIB, 3),)),
    Directory(path=b"rank-1"),
    File(path=b"rank-1/weights", size=7 * MIB, data=(Data("noise", 0, 7 * MIB, 4),)),
    Symlink(path=b"to-nowhere", target=b"../\xfe", mtime_ns=OLD),
    Symlink(path=b"to-weights", target=b"rank-0/weights"),
]


@dataclasses.dataclass(frozen=True)
class Shop:
    """A store with the snapshot `team/model:v1`, and what was pushed."""

    store: Path
    tree: Path
    files: dict[str, bytes]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    folder = tmp_path_factory.mktemp("shop")
    tree = folder / "tree"
    tree.mkdir()
    write_tree(tree, TREE)
    os.chown(tree / "rank-1" / "weights", 1234, 4_000_000_000)
    with snapstore.init_store(f"file://{folder / 'store'}") as store:
        store.push(tree, "team/model:v1")
    names = ("holes", "rank-0/weights", "rank-1/weights", LONG.decode())
    return Shop(folder / "store", tree, {name: (tree / name).read_bytes() for name in names})


# -- the same as what was pushed ------------------------------------------------------------------


@pytest.mark.parametrize("options", [(), ("--integrity", "strong"), ("--memory", "256MiB")])
def test_same_tree(shop: Shop, mounts: Mounts, options: tuple[str, ...]) -> None:
    mount = mounts.mount("team/model:v1", shop.store, *options)
    same_trees(mount.directory, shop.tree)
    for name, content in shop.files.items():
        there = allocated_bytes(mount.directory / name)
        assert abs(there - allocated_bytes(shop.tree / name)) <= 64 * KIB + len(content) // 50
    assert (mount.directory / "rank-0").stat().st_nlink == 2
    assert mount.directory.stat().st_nlink == 6


def test_manifests_are_beside_the_tree(shop: Shop, mounts: Mounts) -> None:
    mount = mounts.mount("team/model:v1", shop.store)
    control = mount.directory / ".snapstore"
    assert ".snapstore" not in names_in(mount.directory)
    assert names_in(control) == ["mount.json", "ranks", "snapshot.json"]
    assert json.loads((control / "mount.json").read_bytes()) == mount.about
    root = (control / "snapshot.json").read_bytes()
    assert snapstore.SnapshotId.of(root).hex == mount.about["snapshot"]
    ranks = {str(rank["rank"]): rank for rank in json.loads(root)["ranks"]}
    assert names_in(control / "ranks") == sorted(f"{rank}.json" for rank in ranks)
    for number, rank in ranks.items():
        document = json.loads((control / "ranks" / f"{number}.json").read_bytes())
        assert document["id"] == rank["manifest"]
        assert len(document["streams"]) == len(document["manifest"]["streams"])
        assert sum(stream["length"] for stream in document["streams"]) == rank["logical_bytes"]


def test_one_rank_alone(shop: Shop, mounts: Mounts) -> None:
    mount = mounts.mount("team/model:v1", shop.store, "--rank", "1")
    assert (mount.directory / "rank-1" / "weights").read_bytes() == shop.files["rank-1/weights"]
    assert names_in(mount.directory) == ["rank-1"]


CHANGES: list[Callable[[Path], object]] = [
    lambda root: (root / "new").write_bytes(b"x"),
    lambda root: (root / "new").mkdir(),
    lambda root: (root / "empty-file").unlink(),
    lambda root: (root / "empty").rmdir(),
    lambda root: (root / "holes").chmod(0o600),
    lambda root: os.truncate(root / "holes", 0),
    lambda root: (root / "holes").rename(root / "other"),
    lambda root: os.utime(root / "holes"),
    lambda root: os.setxattr(root / "holes", "user.a", b""),
    lambda root: (root / "b").symlink_to("a"),
    lambda root: (root / "b").hardlink_to(root / "holes"),
    lambda root: (root / ".snapstore" / "mount.json").write_bytes(b""),
]


def test_nothing_can_be_changed(shop: Shop, mounts: Mounts) -> None:
    mount = mounts.mount("team/model:v1", shop.store)
    for change in CHANGES:
        with pytest.raises(OSError, match="Read-only") as caught:
            change(mount.directory)
        assert caught.value.errno == errno.EROFS
    same_trees(mount.directory, shop.tree)


# -- ways of reading ------------------------------------------------------------------------------


def ranges(rng: random.Random, size: int, count: int) -> list[tuple[int, int]]:
    """Some ranges of all lengths, at borders of blocks and anywhere, also beyond the end."""
    found = []
    for _ in range(count):
        length = rng.choice([1, 512, 4096, 5000, 128 * KIB, 3 * MIB])
        offset = rng.randrange(size)
        if rng.random() < 0.3:
            offset = max(0, rng.randrange(0, size, MIB) + rng.randint(-5, 5))
        found.append((offset, length))
    return found


@pytest.mark.parametrize("memory", ["256MiB", "512MiB"])
def test_any_range(shop: Shop, mounts: Mounts, rng: random.Random, memory: str) -> None:
    mount = mounts.mount("team/model:v1", shop.store, "--memory", memory)
    for name, content in shop.files.items():
        with (mount.directory / name).open("rb", buffering=0) as file:
            for offset, length in ranges(rng, len(content), 60):
                found = os.pread(file.fileno(), length, offset)
                assert found == content[offset : offset + length], (name, offset, length)


def test_direct_reads(shop: Shop, mounts: Mounts, rng: random.Random) -> None:
    mount = mounts.mount("team/model:v1", shop.store)
    buffer = mmap.mmap(-1, 4 * MIB)
    for name, content in shop.files.items():
        file = os.open(mount.directory / name, os.O_RDONLY | os.O_DIRECT)
        try:
            for offset, length in ranges(rng, len(content), 30):
                begin, wanted = offset & -4096, -(-length // 4096) * 4096
                count = os.preadv(file, [memoryview(buffer)[:wanted]], begin)
                assert buffer[:count] == content[begin : begin + wanted], (name, begin, wanted)
        finally:
            os.close(file)


def test_mapped_and_executed(mounts: Mounts, tmp_path: Path, rng: random.Random) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    shutil.copy(shutil.which("sh") or "/bin/sh", tree / "program")
    (tree / "data").write_bytes(random_bytes(6 * MIB, 1).tobytes())
    content = (tree / "data").read_bytes()
    with snapstore.init_store(f"file://{tmp_path / 'store'}") as store:
        store.push(tree, "a")
    mount = mounts.mount("a", tmp_path / "store")
    done = subprocess.run(  # noqa: S603 - our copy of a shell
        [mount.directory / "program", "-c", "echo it runs"], capture_output=True, check=True
    )
    assert done.stdout == b"it runs\n"
    with (mount.directory / "data").open("rb") as file:
        for flags in (mmap.MAP_PRIVATE, mmap.MAP_SHARED):
            protection = mmap.PROT_READ | (mmap.PROT_WRITE if flags == mmap.MAP_PRIVATE else 0)
            with mmap.mmap(file.fileno(), 0, flags=flags, prot=protection) as mapped:
                for offset, length in ranges(rng, len(content), 40):
                    assert mapped[offset : offset + length] == content[offset : offset + length]
                if flags == mmap.MAP_PRIVATE:
                    mapped[4096:4099] = b"own"
                    assert mapped[4095:4100] == content[4095:4096] + b"own" + content[4099:4100]
        assert file.read() == content


def test_many_at_once(shop: Shop, mounts: Mounts, rng: random.Random) -> None:
    """Readers in order and anywhere, of the same files, with less memory than the files have."""
    mount = mounts.mount("team/model:v1", shop.store, "--memory", "256MiB")

    def read(seed: int) -> None:
        own = random.Random(seed)
        for name, content in own.sample(sorted(shop.files.items()), len(shop.files)):
            with (mount.directory / name).open("rb", buffering=0) as file:
                if own.random() < 0.5:
                    assert file.readall() == content
                for offset, length in ranges(own, len(content), 20):
                    assert os.pread(file.fileno(), length, offset) == content[offset:][:length]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(read, rng.getrandbits(32)) for _ in range(16)]:
            done.result(timeout=120)
    assert mount.peak_bytes <= 256 * MIB


def test_warm_brings_all_in(shop: Shop, mounts: Mounts) -> None:
    """Goal: after `--warm` nothing is asked of the store any more, also for hinted pages.

    Method: wait for the log to say so, move the packs away, and read everything.
    """
    with snapstore.open_store(str(shop.store)) as store:
        snapshot = store.snapshot("team/model:v1").id
        runs = [
            snapstore.PageRun("rank-1/weights", 900, 30),
            snapstore.PageRun("no/such", 0, 1),
            snapstore.PageRun("holes", 1 << 30, 1 << 30),
        ]
        store.put_hint("page-order", snapshot.hex, snapstore.encode_page_order(runs))
    mount = mounts.mount("team/model:v1", shop.store, "--warm")
    wait_until(lambda: "fetched" in mount.log, "everything is fetched")
    assert "fetched all" in mount.log
    packs, away = shop.store / "packs", shop.store / "away"
    packs.rename(away)
    try:
        for name in ("rank-0/weights", "rank-1/weights"):
            assert (mount.directory / name).read_bytes() == shop.files[name]
    finally:
        away.rename(packs)


# -- the node's cache -----------------------------------------------------------------------------


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory, which caches need."""
    with tempfile.TemporaryDirectory(prefix="mount-", dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.mark.parametrize("memory_bytes", [256 * MIB, 12 * MIB], ids=["room", "little room"])
def test_through_the_cache_of_the_node(
    shop: Shop,
    mounts: Mounts,
    tmp_path: Path,
    memory: Path,
    rng: random.Random,
    memory_bytes: int,
) -> None:
    """Goal: mounts share a cache, and go on without where it has no room.

    Method: read all through one mount, then move the packs away and read what was kept by another.
    """
    cache = tmp_path / "cache"
    made = run_snapstore(
        *("cache", "init", cache, "--bytes", "64MiB"),
        *("--memory", memory, "--memory-bytes", str(memory_bytes)),
    )
    assert made.returncode == 0, made.stderr
    options = ("--cache", str(cache), "--memory", "256MiB")
    first = mounts.mount("team/model:v1", shop.store, *options)
    same_trees(first.directory, shop.tree)
    second = mounts.mount("team/model:v1", shop.store, *options)
    for name, content in shop.files.items():
        with (second.directory / name).open("rb", buffering=0) as file:
            for offset, length in ranges(rng, len(content), 30):
                assert os.pread(file.fileno(), length, offset) == content[offset:][:length]
    if memory_bytes < 100 * MIB:
        return
    assert second.unmount().returncode == 0
    third = mounts.mount("team/model:v1", shop.store, *options)
    packs, away = shop.store / "packs", shop.store / "away"
    packs.rename(away)
    try:
        same_trees(third.directory, shop.tree)
    finally:
        away.rename(packs)


def test_what_was_warmed_for_mounts(
    shop: Shop, mounts: Mounts, tmp_path: Path, memory: Path
) -> None:
    """`cache warm --integrity fast` brings in what a mount by default reads, from there alone."""
    cache = ("--cache", str(tmp_path / "cache"))
    room = ("--bytes", "0", "--memory", str(memory), "--memory-bytes", "256MiB")
    warm = ("warm", "team/model:v1", "--integrity", "fast", "--store", shop.store, *cache)
    for command in (("init", tmp_path / "cache", *room), warm):
        done = run_snapstore("cache", *command)
        assert done.returncode == 0, done.stderr
    mount = mounts.mount("team/model:v1", shop.store, *cache)
    packs, away = shop.store / "packs", shop.store / "away"
    packs.rename(away)
    try:
        for name, content in shop.files.items():
            assert (mount.directory / name).read_bytes() == content
    finally:
        away.rename(packs)


# -- all names ------------------------------------------------------------------------------------


def test_all_names(mounts: Mounts, tmp_path: Path) -> None:
    """Goal: names appear, move and vanish while they are mounted, and what is open stays.

    Method: push, tag, move and remove names beside the mount, and wait until it shows them.
    """
    one, two = tmp_path / "one", tmp_path / "two"
    for number, tree in enumerate((one, two)):
        tree.mkdir(mode=0o705)
        (tree / "file").write_bytes(text(200_000 + number, number).tobytes())
    url = f"file://{tmp_path / 'store'}"
    with snapstore.init_store(url) as store:
        store.push(one, "team/model:v1")
        root = mounts.mount(None, url).directory
        assert names_in(root) == ["team"]
        assert names_in(root / "team" / "model") == ["v1"]
        # Until somebody looks inside, the root of a tree has attributes of no snapshot.
        assert names_in(root / "team" / "model" / "v1") == ["file"]
        same_trees(root / "team" / "model" / "v1", one)
        assert json.loads((root / ".snapstore" / "mount.json").read_bytes())["name"] is None
        store.push(two, "team/model:v2")
        store.push(two, "team/model/v1:other")
        model = root / "team" / "model"
        wait_until(lambda: names_in(model) == [":v1", "v1", "v2"], "both are there")
        assert names_in(model / "v1") == ["other"]
        for path, tree in ((":v1", one), (":v2", two), ("v1/other", two)):
            assert names_in(model / path) == ["file"]
            same_trees(model / path, tree)
        with (model / "v2" / "file").open("rb") as opened:
            store.tag("team/model:v1", "team/model:v2")
            wait_until(
                lambda: (model / "v2" / "file").stat().st_size == 200_000, "the name has moved"
            )
            assert (model / "v2" / "file").read_bytes() == (one / "file").read_bytes()
            assert opened.read() == (two / "file").read_bytes()
        store.remove("team/model:v2")
        wait_until(lambda: not (model / "v2").exists(), "the name is gone")
    assert not (root / "nobody").exists()


def test_names_stay_while_the_store_is_away(shop: Shop, mounts: Mounts, tmp_path: Path) -> None:
    """A volume that is unmounted is no store without names, which a mirror would follow."""
    volume, away = tmp_path / "volume", tmp_path / "away"
    shutil.copytree(shop.store, volume)
    mount = mounts.mount(None, volume)
    assert names_in(mount.directory) == ["team"]
    volume.rename(away)
    wait_until(
        lambda: names_in(mount.directory) != ["team"] or "those of before" in mount.log,
        "it was looked for",
    )
    assert names_in(mount.directory) == ["team"]
    assert names_in(mount.directory / "team" / "model") == ["v1"]
    away.rename(volume)
    weights = mount.directory / "team" / "model" / "v1" / "rank-0" / "weights"
    assert weights.read_bytes() == shop.files["rank-0/weights"]


# -- other users ----------------------------------------------------------------------------------


@pytest.mark.parametrize("allowed", [True, False])
def test_other_users(mounts: Mounts, tmp_path: Path, allowed: bool) -> None:  # noqa: FBT001
    """Others see what the permissions of files let them see, or nothing at all."""
    tree = tmp_path / "tree"
    tree.mkdir(mode=0o755)
    for name, mode in (("for-all", 0o644), ("for-root", 0o600)):
        (tree / name).write_bytes(b"content")
        (tree / name).chmod(mode)
    url = f"file://{tmp_path / 'store'}"
    with snapstore.init_store(url) as store:
        store.push(tree, "a")
    with nobodys_directory() as directory:
        mount = mounts.mount(
            "a", url, *([] if allowed else ["--no-allow-other"]), directory=directory
        )
        try:
            with as_nobody():
                if allowed:
                    assert (directory / "for-all").read_bytes() == b"content"
                with pytest.raises(PermissionError):
                    (directory / ("for-root" if allowed else "for-all")).read_bytes()
        finally:
            assert mount.unmount().returncode == 0


# -- unmounting -----------------------------------------------------------------------------------


def test_unmount_while_in_use(shop: Shop, mounts: Mounts) -> None:
    mount = mounts.mount("team/model:v1", shop.store)
    with (mount.directory / "holes").open("rb") as file:
        refused = mount.unmount("--json")
        assert refused.returncode == 6
        assert json.loads(refused.stdout)["error"]["code"] == "MountBusy"
        assert file.read(10) == shop.files["holes"][:10]
        assert mount.unmount("--lazy").returncode == 0
        assert names_in(mount.directory) == []
        assert file.read(10) == shop.files["holes"][10:20]
    wait_until(lambda: "unmounted" in mount.log, "the daemon ends with the last file")


def test_a_container_keeps_its_mount(shop: Shop, mounts: Mounts) -> None:
    """Who has a mount namespace of their own goes on, and `umount` says so; --force ends it."""
    mount = mounts.mount("team/model:v1", shop.store)
    command = ["unshare", "--mount", "--propagation", "private"]
    reader = [sys.executable, "-c", "import sys; sys.stdin.read(1); open(sys.argv[1], 'rb').read()"]
    with subprocess.Popen(  # noqa: S603 - fixed programs
        [*command, *reader, mount.directory / "rank-0" / "weights"], stdin=subprocess.PIPE
    ) as container:
        table = Path(f"/proc/{container.pid}/ns/mnt")
        wait_until(lambda: table.readlink() != Path("/proc/self/ns/mnt").readlink(), "it is apart")
        done = mount.unmount("--json")
        assert done.returncode == 0
        assert json.loads(done.stdout)["seen_by"] == [container.pid]
        assert names_in(mount.directory) == []
        assert "still have it" in done.stderr
        container.communicate(b"x")
    assert container.returncode == 0
    wait_until(lambda: "unmounted" in mount.log, "the daemon ends with the last mount")


@pytest.mark.parametrize("option", ["--force", "--lazy", "--json"])
def test_what_is_mounted_inside_is_not_taken_away(shop: Shop, mounts: Mounts, option: str) -> None:
    mount = mounts.mount("team/model:v1", shop.store)
    inner = mounts.mount("team/model:v1", shop.store, directory=mount.directory / "empty")
    refused = mount.unmount(option)
    assert refused.returncode == 6, refused.stderr
    assert str(inner.directory) in refused.stderr
    assert "weights" in names_in(inner.directory / "rank-0")
    assert inner.unmount(option).returncode == 0
    assert mount.unmount(option).returncode == 0


def test_what_is_hidden_by_a_mount_is_no_part_of_it(shop: Shop, mounts: Mounts) -> None:
    """Goal: what lies below a mount does not keep it, and is there again afterwards."""
    lower = mounts.mount("team/model:v1", shop.store)
    place = lower.directory.parent
    upper = mounts.mount("team/model:v1", shop.store, directory=place)
    assert upper.unmount().returncode == 0
    assert "rank-0" in names_in(lower.directory)
    assert lower.unmount().returncode == 0


@pytest.mark.parametrize("is_empty", [True, False])
def test_a_directory_that_is_not_empty(
    shop: Shop,
    fuse: None,
    tmp_path: Path,
    is_empty: bool,  # noqa: FBT001
) -> None:
    """Goal: who hides files behind a mount is told so."""
    there = tmp_path / "there"
    there.mkdir()
    if not is_empty:
        (there / "mine").touch()
    done = run_snapstore("mount", "team/model:v1", there, "--store", shop.store, "--quiet")
    try:
        assert done.returncode == 0, done.stderr
        assert ("is not empty" in done.stderr) != is_empty
    finally:
        assert run_snapstore("umount", there).returncode == 0


def test_forced_unmount_fails_readers(shop: Shop, mounts: Mounts) -> None:
    mount = mounts.mount("team/model:v1", shop.store)
    file = os.open(mount.directory / "rank-1" / "weights", os.O_RDONLY)
    done = mount.unmount("--force", "--json")
    assert done.returncode == 0, done.stderr
    document = {"directory": str(mount.directory), "ended": True, "seen_by": []}
    assert json.loads(done.stdout) == document
    with pytest.raises(OSError, match=r"not connected|abort|Input/output") as caught:
        os.pread(file, 10, 5 * MIB)
    assert caught.value.errno in {errno.ENOTCONN, errno.ECONNABORTED, errno.EIO}
    with contextlib.suppress(OSError):
        os.close(file)


def test_sigterm_unmounts(shop: Shop, mounts: Mounts) -> None:
    mount = mounts.mount("team/model:v1", shop.store)
    os.kill(mount.pid, signal.SIGTERM)
    wait_until(lambda: "unmounted" in mount.log, "it has unmounted")
    assert stat.S_ISDIR(mount.directory.stat().st_mode)
    assert names_in(mount.directory) == []


def test_killed_daemon_leaves_nobody_waiting(shop: Shop, mounts: Mounts) -> None:
    """Readers of a mount whose daemon was killed get an error, and mounting over it works."""
    mount = mounts.mount("team/model:v1", shop.store)
    mount.kill()
    code = "import sys; open(sys.argv[1], 'rb').read()"
    assert "Transport endpoint" in look(code, mount.directory / "holes", seconds=10)
    again = mounts.mount("team/model:v1", shop.store, directory=mount.directory)
    assert (again.directory / "holes").read_bytes() == shop.files["holes"]
    assert "took away" in again.log
    assert again.unmount().returncode == 0
    again = mounts.mount("team/model:v1", shop.store, directory=mount.directory)
    again.kill()
    assert again.unmount().returncode == 0
    assert names_in(mount.directory) == []


IMPATIENT = """
from snapstore.cli.main import run
from snapstore.mount import table
table._ANSWER_S_MAX = 0.5
run()
"""
"""The program, which waits for half a second instead of five for a mount to answer."""


def test_a_process_that_does_not_answer(shop: Shop, mounts: Mounts) -> None:
    """A stopped process holds up neither who unmounts nor who would mount there."""
    program = [sys.executable, "-c", IMPATIENT]
    mount = mounts.mount("team/model:v1", shop.store)
    stop_process(mount.pid)
    try:
        refused = run_snapstore("umount", "--json", mount.directory, program=program)
        assert (refused.returncode, error_of(refused)) == (6, "MountBusy")
        where = ("team/model:v1", mount.directory, "--store", shop.store, "--json")
        refused = run_snapstore("mount", *where, program=program)
        assert (refused.returncode, error_of(refused)) == (6, "AlreadyMounted")
        done = run_snapstore("umount", "--force", mount.directory, program=program)
        assert done.returncode == 0
        assert names_in(mount.directory) == []
    finally:
        os.kill(mount.pid, signal.SIGCONT)
    wait_until(lambda: "unmounted" in mount.log, "the process ends")


def test_not_twice_in_one_place(shop: Shop, mounts: Mounts) -> None:
    mount = mounts.mount("team/model:v1", shop.store)
    where = ("team/model:v1", mount.directory, "--store", shop.store, "--json")
    refused = run_snapstore("mount", *where)
    assert (refused.returncode, error_of(refused)) == (6, "AlreadyMounted")
    assert (mount.directory / "holes").read_bytes() == shop.files["holes"]


def test_through_a_symbolic_link(shop: Shop, mounts: Mounts, tmp_path: Path) -> None:
    """What was mounted where a link leads is found, taken away and replaced by either name."""
    where, link = tmp_path / "mounts" / "there", tmp_path / "link"
    where.mkdir()
    link.symlink_to("other-link")
    (tmp_path / "other-link").symlink_to(where)
    for place, other in ((link, where), (where, link)):
        mount = mounts.mount("team/model:v1", shop.store, directory=place)
        assert mount.about["directory"] == str(where)
        refused = run_snapstore("mount", "team/model:v1", other, "--store", shop.store, "--json")
        assert (refused.returncode, error_of(refused)) == (6, "AlreadyMounted")
        mount.kill()
        mounts.mount("team/model:v1", shop.store, directory=other)
        done = run_snapstore("umount", place)
        assert done.returncode == 0, done.stderr
    circle = tmp_path / "circle"
    circle.symlink_to("circle")
    assert run_snapstore("umount", circle).returncode == 3
    refused = run_snapstore("mount", "team/model:v1", circle, "--store", shop.store)
    assert refused.returncode == 2


def error_of(done: subprocess.CompletedProcess[str]) -> str:
    return str(json.loads(done.stdout)["error"]["code"])


def test_in_the_foreground(shop: Shop, fuse: None, mounts: Mounts, tmp_path: Path) -> None:
    """`--foreground` says that it is ready, logs to stderr, and ends with 0 on SIGINT."""
    there = tmp_path / "mounts" / "there"
    there.mkdir()
    command = ["mount", "-f", "team/model:v1", there, "--store", shop.store, "--json"]
    with subprocess.Popen(  # noqa: S603 - our own program
        [*SNAPSTORE, *map(str, command)],
        env=own_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    ) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["pid"] == process.pid
        assert (there / "rank-1" / "weights").read_bytes() == shop.files["rank-1/weights"]
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0
        assert process.stderr is not None
        assert "unmounted" in process.stderr.read()
    assert names_in(there) == []


# -- refusals -------------------------------------------------------------------------------------


def test_what_cannot_be_mounted(shop: Shop, fuse: None, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    for arguments, code, error in (
        (("mount", "nobody", there), 3, "RefNotFound"),
        (("mount", "team/model:v1", there, "--rank", "7"), 2, "UsageError"),
        (("mount", "team/model:v1", tmp_path / "nowhere"), 2, "UsageError"),
        (("mount", "team/model:v1"), 2, "UsageError"),
        (("mount", "--all", "team/model:v1", there), 2, "UsageError"),
        (("mount", "--all", there, "--warm"), 2, "UsageError"),
        (("mount", "team/model:v1", there, "--memory", "1MiB"), 2, "UsageError"),
        (("mount", "team/model:v1", there, "--log-file", there / "no" / "log"), 1, "TargetError"),
    ):
        done = run_snapstore(*arguments, "--store", shop.store, "--json")
        assert done.returncode == code, (arguments, done.stdout, done.stderr)
        assert json.loads(done.stdout)["error"]["code"] == error
    done = run_snapstore("mount", "team/model:v1", there, "--store", tmp_path, "--json")
    assert (done.returncode, json.loads(done.stdout)["error"]["code"]) == (3, "StoreNotFound")
    done = run_snapstore("umount", there, "--json")
    assert (done.returncode, json.loads(done.stdout)["error"]["code"]) == (3, "NotMounted")
    done = run_snapstore("umount", "/proc", "--json")
    assert (done.returncode, json.loads(done.stdout)["error"]["code"]) == (2, "UsageError")


def test_a_store_that_is_away_is_told_within_the_timeout(fuse: None, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    url = f"s3://bucket/?endpoint=http://127.0.0.1:{free_port()}"
    clock = SystemClock()
    started_s = clock.monotonic_s()
    done = run_snapstore("mount", "a", there, "--store", url, "--timeout", "1", "--json")
    assert done.returncode == 5, done.stderr
    assert clock.monotonic_s() - started_s < 30
