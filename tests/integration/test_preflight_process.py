"""What is said of a living process before its capture, beside what CRIU then says itself."""

import dataclasses
import os
import pty
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from snapagent.errors import NoSuchProcess, PreflightFailed
from snapagent.linux import processes
from snapagent.preflight import (
    CaptureConditions,
    Obstacle,
    check_images,
    check_process,
    obstacles_json,
    probe_criu,
    read_images,
    require,
)
from snapagent.preflight.criu_program import CriuFacts, _write_cache
from snapstore.units import MIB
from tests.support.obstructed import process_that
from tests.support.waiting import wait_until
from tools.live_process import Criu, CriuFailedError

# The child closes what the test waits for.
FORK = """if os.fork() == 0:
    os.close(ready); os.close(life)
    import signal; signal.pause()"""
CTYPES = "import ctypes; libc = ctypes.CDLL(None, use_errno=True)\n"
REFUSED = "raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))"

HARMLESS = {
    "nothing": "",
    "plain-devices": "keep = [open('/dev/' + n, 'rb') for n in ('null', 'zero', 'full', 'random',"
    " 'urandom')]",
    "kernel-log": "keep = open('/dev/kmsg', 'rb')",
    "listener": "keep = socket.create_server(('127.0.0.1', 0))",
    "own-connection": "a = socket.create_server(('127.0.0.1', 0))\n"
    "b = socket.create_connection(a.getsockname()); c = a.accept()",
    "own-socketpair": "keep = socket.socketpair()",
    "own-pipe": "keep = os.pipe()",
    "datagrams": "keep = socket.socket(type=socket.SOCK_DGRAM); keep.bind(('127.0.0.1', 0))",
    "kernel-descriptors": "keep = [os.eventfd(0), select.epoll(), os.pidfd_open(os.getpid())]",
    "memfd": "keep = os.memfd_create('name'); os.write(keep, b'x')",
    "removed-file": "keep = open('removed', 'wb'); keep.write(b'x'); keep.flush();"
    " os.unlink('removed')",
    "file-lock": "import fcntl; keep = open('lock', 'wb'); fcntl.flock(keep, fcntl.LOCK_EX)",
    "netlink": "keep = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); keep.bind((0, 0))",
    "packet": "keep = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)",
    "raw": "keep = socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
    "closed-peer": "keep, other = socket.socketpair(); other.close()",
    "lease": "import fcntl; keep = open('lease', 'w+'); fcntl.fcntl(keep, 1024, 1)",
    "no-directory": "os.mkdir('sub'); os.chdir('sub'); os.rmdir('../sub')",
    "own-status": "keep = open('/proc/self/status')",
    "dead-child": "if os.fork() == 0:\n    os._exit(0)",
    "own-network": CTYPES + "if libc.unshare(0x40000000): " + REFUSED,
    "own-system-v-memory": CTYPES
    + "if libc.unshare(0x08000000): "
    + REFUSED
    + "\n"
    + "libc.shmat.restype = ctypes.c_void_p\n"
    + "key = libc.shmget(0, 4096, 0o1600)\nlibc.shmat(key, None, 0)",
    "own-terminal": "import pty; keep = pty.openpty()",
    "children": "import signal\nfor _ in range(3):\n    if os.fork() == 0:\n"
    "        os.close(ready); os.close(life); signal.pause()",
}
"""What a process may do and still be captured."""

OBSTACLES = {
    "io-uring": (
        CTYPES + "if libc.syscall(425, 8, ctypes.create_string_buffer(120)) < 0: " + REFUSED,
        "io-uring",
    ),
    "userfaultfd": (CTYPES + "if libc.syscall(323, 0) < 0: " + REFUSED, "descriptor-kind"),
    "vsock": ("keep = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)", "socket-family"),
    "alg": ("keep = socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET)", "socket-family"),
    "sctp": ("keep = socket.socket(type=socket.SOCK_STREAM, proto=132)", "socket-protocol"),
    "mptcp": ("keep = socket.socket(type=socket.SOCK_STREAM, proto=262)", "socket-protocol"),
    "netlink-data": (
        (
            "keep = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); keep.bind((0, 0))\n"
            "keep.send(bytes.fromhex('14000000 1200 0103 01000000 00000000 11000000'))"
        ),
        "netlink-data",
    ),
    "waiting-connection": (
        "a = socket.create_server(('127.0.0.1', 0)); b = socket.create_connection(a.getsockname())",
        "tcp-waiting",
    ),
    "message-queue": (
        CTYPES + "rt = ctypes.CDLL('librt.so.1', use_errno=True)\n"
        "name = b'/preflight-%d' % os.getpid()\n"
        "if rt.mq_open(name, 0o102, 0o600, None) < 0: " + REFUSED + "\nrt.mq_unlink(name)",
        "mount-unknown",
    ),
    "secret-memory": (CTYPES + "if libc.syscall(447, 0) < 0: " + REFUSED, "mount-unknown"),
    "perf-event": (
        CTYPES + "import struct\n"
        "event = ctypes.create_string_buffer(struct.pack('II', 1, 128) + bytes(120))\n"
        "if libc.syscall(298, event, 0, -1, -1, 0) < 0: " + REFUSED,
        "descriptor-kind",
    ),
    "block-device": ("keep = open('/dev/loop0', 'rb')", "device"),
    "fuse": ("keep = open('/dev/fuse', 'rb')", "device"),
    "kvm": ("keep = open('/dev/kvm', 'rb')", "device"),
    "large-removed-file": (
        (
            "keep = open('removed', 'wb'); keep.write(bytes(2 << 20)); keep.flush()\n"
            "os.unlink('removed')"
        ),
        "removed-file",
    ),
    "large-removed-mapping": (
        (
            "import mmap\nwith open('removed', 'wb+') as file:\n    file.write(b'x' * (2 << 20))\n"
            "    file.flush(); keep = mmap.mmap(file.fileno(), 0)\nos.unlink('removed')"
        ),
        "removed-file",
    ),
    "system-v-memory": (
        CTYPES
        + "libc.shmat.restype = ctypes.c_void_p\n"
        + "key = libc.shmget(0, 4096, 0o1600)\nlibc.shmat(key, None, 0); libc.shmctl(key, 0, None)",
        "sysv-memory",
    ),
}
"""What CRIU cannot capture, with the word for it."""


@pytest.fixture
def conditions(criu: Criu) -> CaptureConditions:
    return CaptureConditions(criu=criu.program)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def blocking(obstacles: list[Obstacle]) -> set[str]:
    return {one.code for one in obstacles if one.blocking}


def dumps(criu: Criu, pid: int, home: Path, *extra: str) -> bool:
    """Whether CRIU captures a process; it goes on either way."""
    images = home.parent / "images"
    images.mkdir()
    options = ["--leave-running", "--tcp-established", "--network-lock", "nftables", *extra]
    try:
        criu._run(["dump", "--tree", str(pid), "--link-remap", *options], images)
    except CriuFailedError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_harmless_is_not_blocked_and_criu_agrees(
    criu: Criu, conditions: CaptureConditions, home: Path, name: str
):
    with process_that(HARMLESS[name], home) as process:
        found = check_process(process.pid, conditions)
        assert blocking(found) == set()
        require(found, of=f"process {process.pid}")
        assert dumps(criu, process.pid, home, "--file-locks")


def kernel_has(name: str) -> bool:
    """Whether this kernel knows the kind of socket that an obstacle is made of."""
    kinds = {"vsock": (40, 1, 0), "alg": (38, 5, 0), "sctp": (2, 1, 132), "mptcp": (2, 1, 262)}
    if name not in kinds:
        return True
    try:
        socket.socket(*kinds[name]).close()
    except OSError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in OBSTACLES if kernel_has(name)])
def test_what_criu_cannot_capture_is_said_before(
    criu: Criu, conditions: CaptureConditions, home: Path, name: str
):
    body, code = OBSTACLES[name]
    with process_that(body, home) as process:
        found = check_process(process.pid, conditions)
        assert blocking(found) == {code}
        with pytest.raises(PreflightFailed, match=code) as caught:
            require(found, of=f"process {process.pid}", done="captured")
        assert caught.value.exit_code == 7
        assert f"process {process.pid} cannot be captured here" in str(caught.value)
        assert not dumps(criu, process.pid, home, "--file-locks")


def contents(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


# -- what leads out of the tree ---------------------------------------------------------------


@pytest.mark.slow
def test_a_unix_socket_to_the_outside(criu: Criu, conditions: CaptureConditions, home: Path):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        body = "keep = socket.socket(fileno=given[0])"
        with process_that(body, home, give=[theirs.fileno()]) as process:
            theirs.close()
            found = check_process(process.pid, conditions)
            assert blocking(found) == {"unix-outside"}
            assert not dumps(criu, process.pid, home)


@pytest.mark.slow
def test_a_connection_to_the_outside(criu: Criu, conditions: CaptureConditions, home: Path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        body = f"keep = socket.create_connection(('127.0.0.1', {port}))"
        with process_that(body, home) as process, server.accept()[0]:
            found = check_process(process.pid, conditions)
            assert blocking(found) == set()
            (warning,) = [one for one in found if one.code == "tcp-outside"]
            assert f"127.0.0.1:{port}" in warning.subject
            refuse = dataclasses.replace(conditions, tcp="refuse")
            assert blocking(check_process(process.pid, refuse)) == {"tcp-connection"}
            assert dumps(criu, process.pid, home)


@pytest.mark.slow
def test_a_session_outside(criu: Criu, conditions: CaptureConditions, home: Path):
    with process_that(FORK, home) as leader:
        (member,) = processes.children(leader.pid)
        assert blocking(check_process(member, conditions)) == {"session-outside"}
        job = dataclasses.replace(conditions, shell_job=True)
        assert blocking(check_process(member, job)) == set()
        assert not dumps(criu, member, home)


@pytest.mark.slow
def test_a_session_from_outside_of_the_pids(criu: Criu, conditions: CaptureConditions, home: Path):
    ends = "read -r line"
    command = ["unshare", "--pid", "--fork", "--kill-child", "sh", "-c", f"sh -c '{ends}'; true"]
    with subprocess.Popen(  # noqa: S603 - the shells above.
        command, stdin=subprocess.PIPE, start_new_session=True
    ) as outer:
        try:
            wait_until(lambda: _grandchild(outer.pid) != 0, "the shell in the namespace")
            member = _grandchild(outer.pid)
            job = dataclasses.replace(conditions, shell_job=True)
            assert "session-unknown" in blocking(check_process(member, job))
            assert not dumps(criu, member, home)
        finally:
            outer.kill()


def _grandchild(pid: int) -> int:
    for child in processes.children(pid):
        for grandchild in processes.children(child):
            return grandchild
    return 0


@pytest.mark.slow
def test_a_terminal_of_somebody_else(criu: Criu, conditions: CaptureConditions, home: Path):
    master, slave = pty.openpty()
    try:
        with process_that("", home, stdin=slave) as process:
            job = dataclasses.replace(conditions, shell_job=True)
            assert blocking(check_process(process.pid, job)) == {"terminal"}
            accepted = dataclasses.replace(job, terminal=True)
            assert blocking(check_process(process.pid, accepted)) == set()
            # CRIU captures it only for somebody who restores it from a terminal.
            assert dumps(criu, process.pid, home, "--shell-job")
            images = home.parent / "images"
            found = check_images(read_images(lambda name: contents(images / name)), {})
            assert "terminal" in blocking(found)
    finally:
        os.close(master)
        os.close(slave)


@pytest.mark.slow
def test_a_traced_process(criu: Criu, conditions: CaptureConditions, home: Path):
    with process_that(CTYPES + "libc.ptrace(0, 0, 0, 0)", home) as process:
        found = check_process(process.pid, conditions)
        assert blocking(found) == {"traced"}
        assert f"process {os.getpid()}" in found[0].subject
        assert not dumps(criu, process.pid, home)


@pytest.mark.slow
def test_a_pid_namespace_inside(criu: Criu, conditions: CaptureConditions, home: Path):
    body = CTYPES + (
        "import signal\nif libc.unshare(0x20000000): " + REFUSED + "\n"
        "if os.fork() == 0:\n    os.close(ready); os.close(life); signal.pause()"
    )
    with process_that(body, home) as process:
        found = check_process(process.pid, conditions)
        assert blocking(found) == {"nested-namespace"}
        assert not dumps(criu, process.pid, home)


@pytest.mark.slow
def test_file_locks_need_a_word(criu: Criu, conditions: CaptureConditions, home: Path):
    with process_that(HARMLESS["file-lock"], home) as process:
        without = dataclasses.replace(conditions, file_locks=False)
        assert blocking(check_process(process.pid, without)) == {"file-lock"}
        assert not dumps(criu, process.pid, home)


# -- warnings ---------------------------------------------------------------------------------


def test_watches_and_pipes_deserve_a_word(conditions: CaptureConditions, home: Path):
    body = CTYPES + "keep = libc.inotify_init(); libc.inotify_add_watch(keep, b'.', 2)"
    reading, writing = os.pipe()
    try:
        with process_that(body, home, stdin=reading) as process:
            found = check_process(process.pid, conditions)
    finally:
        os.close(reading)
        os.close(writing)
    assert blocking(found) == set()
    assert {"inotify-watch", "pipe-outside"} <= {one.code for one in found}


def test_a_replaced_library_deserves_a_word(conditions: CaptureConditions, home: Path):
    body = (
        "import mmap\nwith open('lib', 'wb+') as file:\n    file.write(b'x' * 8192)\n"
        "    file.flush(); keep = mmap.mmap(file.fileno(), 0)\nos.unlink('lib')"
    )
    with process_that(body, home) as process:
        found = check_process(process.pid, conditions)
    assert blocking(found) == set()
    assert any(one.code == "removed-mapping" and "/lib" in one.subject for one in found)


# -- which process ----------------------------------------------------------------------------


def test_the_agent_does_not_capture_itself(conditions: CaptureConditions):
    assert "own-process" in blocking(check_process(os.getpid(), conditions))


def test_a_process_that_is_gone_is_an_error(conditions: CaptureConditions, home: Path):
    with process_that("", home) as process:
        pass
    with pytest.raises(NoSuchProcess, match=f"no process {process.pid}") as caught:
        check_process(process.pid, conditions)
    assert caught.value.exit_code == 3


def test_a_process_that_has_ended_has_nothing_left(conditions: CaptureConditions, home: Path):
    with process_that("", home) as process:
        process.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        found = check_process(process.pid, conditions)
    assert "ended" in blocking(found)
    assert str(os.getpid()) in found[0].subject


def test_processes_that_come_and_go_do_no_harm(conditions: CaptureConditions, home: Path):
    """Goal: whatever vanishes between two looks is left out, without an error.

    Method: look again and again at a process whose children live a moment.
    """
    body = (
        "import threading\ndef churn():\n    while True:\n"
        "        if (pid := os.fork()) == 0:\n            os._exit(0)\n        os.waitpid(pid, 0)\n"
        "threading.Thread(target=churn, daemon=True).start()"
    )
    with process_that(body, home) as process:
        for _ in range(50):
            assert blocking(check_process(process.pid, conditions)) == set()


def test_the_memory_may_be_limited(conditions: CaptureConditions, home: Path):
    limited = dataclasses.replace(conditions, memory_bytes_max=MIB)
    with process_that("", home) as process:
        assert blocking(check_process(process.pid, limited)) == {"memory"}


def test_a_usual_process_takes_a_moment(conditions: CaptureConditions, home: Path):
    body = HARMLESS["own-connection"] + "\nmore = [open('/dev/null') for _ in range(100)]"
    with process_that(body, home) as process:
        check_process(process.pid, conditions)
        started = time.perf_counter()
        check_process(process.pid, conditions)
        # It takes two milliseconds; the limit is for a machine with other work.
        assert time.perf_counter() - started < 0.5


def test_obstacles_are_plain_json(conditions: CaptureConditions):
    found = obstacles_json(check_process(os.getpid(), conditions))
    assert {"code", "subject", "remedy", "blocking"} == set(found[0])


# -- CRIU itself ------------------------------------------------------------------------------


def fake_criu(folder: Path, version: str, *, check: str = "Looks good.", status: int = 0) -> Path:
    program = folder / "criu"
    program.write_text(
        "#!/bin/sh\n"
        f'if [ "$1" = --version ]; then echo "Version: {version}"; exit 0; fi\n'
        f'echo "$@" >> {folder}/asked; echo "{check}"; exit {status}\n'
    )
    program.chmod(0o755)
    return program


def test_a_criu_that_is_missing_old_or_unwell(tmp_path: Path, home: Path):
    with process_that("", home) as process:
        missing = CaptureConditions(criu=tmp_path / "nowhere")
        found = check_process(process.pid, missing)
        assert blocking(found) == {"criu-missing"}
        assert "install" in found[0].remedy
        (tmp_path / "old").mkdir()
        old = CaptureConditions(criu=fake_criu(tmp_path / "old", "4.1.1"))
        assert blocking(check_process(process.pid, old)) == {"criu-old"}
        (tmp_path / "ill").mkdir()
        ill = CaptureConditions(criu=fake_criu(tmp_path / "ill", "4.3", check="no kcmp", status=1))
        (one,) = [one for one in check_process(process.pid, ill) if one.blocking]
        assert (one.code, "no kcmp" in one.subject) == ("criu-check", True)


def test_criu_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program, cache = fake_criu(tmp_path, "4.2"), tmp_path / "cache"
    facts = probe_criu(program, cache)
    asked = (tmp_path / "asked").read_text()
    # As another process of the agent would.
    monkeypatch.setattr("snapagent.preflight.criu_program._known", {})
    assert probe_criu(program, cache) == facts
    assert (tmp_path / "asked").read_text() == asked
    # Another program at the same path is asked again, and a cache of nonsense is no obstacle.
    cache.write_text("{")
    fake_criu(tmp_path, "4.20.3")
    assert probe_criu(program, cache).version == (4, 20, 3)


def test_an_answer_that_cannot_be_kept_leaves_nothing(tmp_path: Path):
    """Goal: on a full disk, asking CRIU again and again does not leave more and more files."""
    folder = tmp_path / "state"
    folder.mkdir()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        _write_cache(folder / "criu.json", (), CriuFacts((4, 2), "", can_lock_by_nftables=True))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(folder.iterdir())


@pytest.mark.slow
def test_missing_capabilities_are_named():
    """Goal: who runs without privileges learns which are missing.

    Method: run the check in a process that has dropped all but a few.
    """
    program = (
        "from snapagent.preflight.machine import check_privileges\n"
        "from snapagent.preflight.obstacles import Obstacles\n"
        "found = Obstacles(); check_privileges(found); print(*found.result(), sep='\\n')"
    )
    command = ["setpriv", "--bounding-set=-sys_ptrace,-net_admin", "--inh-caps=-all"]
    done = subprocess.run(  # noqa: S603 - the program above
        [*command, sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert "CAP_SYS_PTRACE" in done.stdout, done.stderr
    assert "CAP_NET_ADMIN" in done.stdout
    assert "CAP_SYS_ADMIN" not in done.stdout
