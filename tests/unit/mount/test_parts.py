"""The small parts of a mount: its options, the kernel's table, signals, parallel work."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from snapstore.errors import LookupFailed, UsageError
from snapstore.mount import table
from snapstore.mount.options import MountOptions
from snapstore.mount.parallel import in_parallel
from snapstore.mount.unmount import clear_dead, unmount
from tests.support.processes import stop_process


@pytest.mark.parametrize(
    "wrong",
    [
        {"memory_bytes": 1},
        {"timeout_s": 0},
        {"timeout_s": float("nan")},
        {"threads": -1},
        {"read_ahead_kib": 1 << 20},
        {"name": None, "warm": True},
        {"name": None, "ranks": (1,)},
    ],
    ids=str,
)
def test_options_that_cannot_be_meant(wrong: dict[str, object]) -> None:
    given: dict[str, object] = {"url": "file:///x", "name": "a", "directory": Path("/x")}
    with pytest.raises(UsageError) as caught:
        MountOptions(**{**given, **wrong})  # type: ignore[arg-type]
    assert caught.value.next_step


def test_the_table_of_mounts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    place = tmp_path.resolve() / "with space\nand \\"
    place.mkdir()
    escaped = os.fsencode(place).replace(b"\\", rb"\134").replace(b" ", rb"\040")
    escaped = escaped.replace(b"\n", rb"\012")
    lines = (
        b"87 27 0:41 / / rw shared:1 - ext4 /dev/vda rw",
        b"88 27 0:42 / " + escaped + b" ro,nosuid - fuse.other x ro",
        b"89 27 0:43 / " + escaped + b" ro,nosuid - fuse.snapstore a/b:c ro",
        b"nonsense",
        b"90 27 0:44 / /x - ",
    )
    (tmp_path / "table").write_bytes(b"\n".join(lines) + b"\n")
    monkeypatch.setattr(table, "_TABLE", tmp_path / "table")
    found = table.mounted_at(place)
    assert found == (89, 27, "0:43", os.fsencode(place), "fuse.snapstore", "a/b:c")
    assert table.mounted_at(tmp_path) is None
    monkeypatch.chdir(tmp_path)
    assert table.mounted_at(Path("with space\nand \\")) == found


def test_nothing_to_unmount(tmp_path: Path) -> None:
    with pytest.raises(LookupFailed):
        unmount(tmp_path, wait_s=1)
    with pytest.raises(UsageError, match="no snapshot"):
        unmount(Path("/proc"), wait_s=1)
    assert not clear_dead(tmp_path)


def test_pending_signals() -> None:
    """Who ignores or blocks a signal has none to take; who is stopped with one has."""
    pytest.importorskip("pyfuse3")
    from snapstore.mount.waiting import has_signal  # noqa: PLC0415 - needs the extra

    code = """
import signal, sys
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
print("ready", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(  # noqa: S603 - this interpreter
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGUSR1)
        process.send_signal(signal.SIGUSR2)
        assert not has_signal(process.pid)
        stop_process(process.pid)
        process.send_signal(signal.SIGTERM)
        assert has_signal(process.pid)
        process.kill()
    assert not has_signal(process.pid)


def test_in_parallel_in_order() -> None:
    assert in_parallel(lambda number: number * 2, 20, threads=4) == [*range(0, 40, 2)]
    assert in_parallel(str, 0, threads=4) == []
    together = threading.Barrier(3, timeout=30)
    assert len(in_parallel(lambda _: together.wait(), 3, threads=3)) == 3


def test_in_parallel_the_first_error() -> None:
    def work(number: int) -> int:
        if number == 3:
            raise UsageError("three")
        return number

    with pytest.raises(UsageError, match="three"):
        in_parallel(work, 10, threads=3)


def test_without_the_extra() -> None:
    """Mounting says what to install; everything else works without pyfuse3."""
    code = """
import sys
sys.modules["pyfuse3"] = None
sys.argv = ["snapstore", "mount", "a", "/nowhere", "--store", "/nowhere"]
from snapstore.cli.main import run
run()
"""
    done = subprocess.run(  # noqa: S603 - this interpreter
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "snapstore[fuse]" in done.stderr
    assert "Traceback" not in done.stderr
