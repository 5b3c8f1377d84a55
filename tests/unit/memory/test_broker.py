"""The broker's protocol, mostly with peers that do not keep to it."""

import array
import contextlib
import fcntl
import json
import os
import resource
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from snapagent.errors import AgentError, AlreadyRunning, PreflightFailed
from snapagent.linux.memfds import check_memfd, make_memfd
from snapagent.linux.peers import Process, open_process
from snapagent.memory.broker import BrokerLimits, MemoryBroker
from snapagent.memory.held import HeldMemory, find_owners, socket_of, take_over
from snapagent.memory.ledger import Region, Session, State, session_id
from snapagent.memory.placement import RegionPlace, SessionPlace
from snapagent.workload import HostMemory, MemoryRefused
from tests.support.processes import open_fds
from tests.support.waiting import wait_until

PAGE = 4096
ROOT = Path(__file__).parents[3]
LIMITS = BrokerLimits(
    connections=20,
    connections_per_user=8,
    sessions=6,
    sessions_per_user=4,
    regions=10,
    regions_per_session=6,
    session_bytes=100 * PAGE,
    total_bytes=150 * PAGE,
)

Values = dict[str, Any]


class Peer:
    """A connection that says whatever the test wants."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(10)
        self.socket.connect(str(path))
        self.token = secrets.token_hex(32)
        self.fds: list[int] = []

    def say(self, data: bytes, fds: tuple[int, ...] = ()) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.socket.sendmsg([data], rights)

    def hear(self) -> Values | None:
        """Return the next answer; None if the broker has hung up."""
        try:
            data, ancillary, _, _ = self.socket.recvmsg(1 << 17, 4096)
        except ConnectionResetError:
            return None
        for _, _, raw in ancillary:
            found = array.array("i")
            found.frombytes(raw)
            self.fds += found
        return json.loads(data) if data else None

    def ask(self, kind: str, fds: tuple[int, ...] = (), **values: object) -> Values | None:
        with contextlib.suppress(BrokenPipeError):
            self.say(json.dumps({"kind": kind, **values}).encode(), fds)
        return self.hear()

    def hello(self, **values: object) -> Values | None:
        told = {"version": 1, "token": self.token, "create": True, "rank": "host"}
        return self.ask("hello", **(told | values))

    def allocate(self, region: int, **values: object) -> Values | None:
        told = {"region": region, "address": region << 30, "length": PAGE, "huge": False}
        return self.ask("allocate", **(told | values))

    def close(self) -> None:
        self.socket.close()
        for fd in self.fds:
            os.close(fd)


@pytest.fixture
def broker() -> Iterator[MemoryBroker]:
    with (
        tempfile.TemporaryDirectory(prefix="broker-") as folder,
        MemoryBroker(Path(folder) / "memory.sock", limits=LIMITS) as running,
    ):
        yield running


@pytest.fixture
def connect(broker: MemoryBroker) -> Iterator[Callable[[], Peer]]:
    with contextlib.ExitStack() as stack:

        def connect() -> Peer:
            peer = Peer(broker.path)
            stack.callback(peer.close)
            return peer

        yield connect


def assert_refused(answer: Values | None, words: str) -> None:
    assert answer is not None
    assert answer["kind"] == "refused", answer
    assert words in answer["message"]


NO_MESSAGES = [
    b"",
    b"\x00",
    b"{",
    b"[]",
    b"null",
    b'{"kind": 1}',
    b'{"kind": "nothing"}',
    b'{"kind": "allocate"}',
    b'{"kind": "resume"}',
    b'{"kind": "hello"}',
    b'{"kind": "hello", "version": 1, "token": 7}',
    b'{"kind": "hello", "version": 1, "token": "short", "rank": "host", "create": true}',
    b"[" * 100_000,
    b'{"kind": "' + b"x" * 150_000,
]


@pytest.mark.parametrize("message", NO_MESSAGES, ids=lambda message: repr(message[:50]))
def test_no_messages_end_the_connection_and_nothing_else(
    connect: Callable[[], Peer], message: bytes
) -> None:
    good = connect()
    assert good.hello() is not None
    bad = connect()
    with contextlib.suppress(OSError):
        bad.say(message)
    if message:
        bad.socket.shutdown(socket.SHUT_WR)
    assert bad.hear() is None
    assert (good.allocate(1) or {})["kind"] == "made"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"number": 1}, "there is a region 1 already"),
        ({"number": -1, "address": PAGE}, "a number up to"),
        ({"number": 10**4000, "address": PAGE}, "a number up to"),
        ({"address": 1 << 30}, "region 1 is at"),
        ({"address": (1 << 30) + 1}, "are no pages"),
        ({"address": 0}, "are no pages"),
        ({"address": -PAGE}, "are no pages"),
        ({"address": 1 << 60}, "no address"),
        ({"length": 0}, "are no pages"),
        ({"length": -PAGE}, "are no pages"),
        ({"length": 1}, "are no pages"),
        ({"length": 1 << 62}, "no address"),
        ({"length": 101 * PAGE}, "a process can have"),
    ],
)
def test_regions_that_cannot_be_are_refused(
    connect: Callable[[], Peer], values: Values, words: str
) -> None:
    peer = connect()
    peer.hello()
    assert (peer.allocate(1) or {})["kind"] == "made"
    told = dict(values)
    assert_refused(peer.allocate(told.pop("number", 2), **told), words)
    assert (peer.allocate(2) or {})["kind"] == "made"


def test_every_count_and_size_has_a_limit(
    broker: MemoryBroker, connect: Callable[[], Peer]
) -> None:
    """Goal: one user cannot have more than the limits, however it divides it."""
    first, second, third = connect(), connect(), connect()
    for peer in (first, second, third):
        peer.hello()
    for number in range(1, 7):
        assert (first.allocate(number) or {})["kind"] == "made"
    assert_refused(first.allocate(7), "6 regions")
    for number in range(1, 5):
        assert (second.allocate(number) or {})["kind"] == "made"
    assert_refused(second.allocate(5), "there are 10 regions")
    assert (first.ask("free", region=1) or {})["kind"] == "freed"
    assert (second.allocate(5, length=90 * PAGE) or {})["kind"] == "made"
    for _ in range(2):
        first.ask("free", region=len(first.fds))
        first.fds.append(os.dup(first.fds[0]))
    assert_refused(third.allocate(1, length=60 * PAGE), "all processes together")
    fourth, fifth = connect(), connect()
    fourth.hello()
    assert_refused(fifth.hello(), "user 0 has 4 sessions")
    assert (first.ask("bye") or {})["kind"] == "gone"
    assert (fifth.hello() or {})["kind"] == "welcome"
    assert len(broker.status()) == 4


def test_connections_have_a_limit(connect: Callable[[], Peer]) -> None:
    peers = [connect() for _ in range(8)]
    assert all(peer.hello(create=False) is not None for peer in peers)
    with contextlib.suppress(OSError):
        assert connect().hello() is None
    peers[0].close()
    peers[0].fds.clear()

    def has_room() -> bool:
        with contextlib.suppress(OSError):
            return connect().hello(create=False) is not None
        return False

    wait_until(has_room, "there is room again")


def test_a_peer_that_takes_no_answers_is_left(connect: Callable[[], Peer]) -> None:
    """Goal: nobody waits for a peer that asks on and on and never reads.

    Method: send until the broker hangs up; another peer is served meanwhile and afterwards.
    """
    deaf, other = connect(), connect()
    deaf.hello()
    other.hello()
    request = json.dumps({"kind": "take", "regions": []}).encode()
    with pytest.raises(OSError, match=r"Broken pipe|reset|not connected"):  # noqa: PT012
        for _ in range(1_000_000):
            deaf.say(request)
            if _ % 10_000 == 0:
                assert other.ask("take", regions=[]) is not None
    assert (other.allocate(1) or {})["kind"] == "made"


@contextlib.contextmanager
def no_free_descriptors() -> Iterator[None]:
    """Let this process open no file while the block runs."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, limits[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in taken:
            os.close(fd)


def test_without_descriptors_who_connects_is_hung_up_on(
    broker: MemoryBroker, connect: Callable[[], Peer]
) -> None:
    """Goal: the broker serves who is there, turns others away, and does not spin meanwhile."""
    there = connect()
    there.hello()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as late:
        late.settimeout(10)
        with no_free_descriptors():
            for _ in range(3):
                assert (there.ask("take", regions=[]) or {})["code"] == "wrong"
            late.connect(str(broker.path))
            assert late.recv(100) == b""
    assert (connect().hello() or {})["kind"] == "welcome"


def test_without_descriptors_no_memory_is_lost(connect: Callable[[], Peer]) -> None:
    """Goal: a process that cannot be watched for a lack of descriptors is not taken for dead."""
    first = connect()
    first.hello()
    first.allocate(1)
    assert (first.ask("release") or {})["kind"] == "released"
    again, other = connect(), connect()
    again.token = first.token
    again.hello(create=False)
    with no_free_descriptors():
        assert again.ask("resumed") is None
        assert other.hello() is None
    again = connect()
    again.token = first.token
    assert (again.hello(create=False) or {})["regions"] == [1]
    assert (again.ask("resumed") or {})["kind"] == "shared"


def test_files_that_nobody_asked_for_are_closed(connect: Callable[[], Peer]) -> None:
    before = open_fds()
    peer = connect()
    assert peer.ask("hello", (0, 1, 2), version=1, token=peer.token) is None
    wait_until(lambda: open_fds() <= before + 1, "they are closed")


def test_a_request_before_the_answer_ends_the_connection(
    broker: MemoryBroker, connect: Callable[[], Peer]
) -> None:
    peer = connect()
    peer.hello()
    peer.ask("release")
    (frozen,) = broker.freeze(os.getpid())
    peer.say(b'{"kind": "resume"}')
    assert peer.ask("resume") is None
    frozen.thaw()
    again = connect()
    again.token = peer.token
    assert (again.hello(create=False) or {})["kind"] == "welcome"


# -- states ---------------------------------------------------------------------------------------


def test_frozen_memory_is_nobodys(broker: MemoryBroker, connect: Callable[[], Peer]) -> None:
    """Goal: between freeze and thaw no descriptor is given away and nothing is freed."""
    peer = connect()
    peer.hello()
    peer.allocate(1)
    with pytest.raises(PreflightFailed, match="is shared"):
        broker.freeze(os.getpid())
    assert (peer.ask("release") or {})["kind"] == "released"
    (frozen,) = broker.freeze(os.getpid())
    with pytest.raises(PreflightFailed, match="is frozen"):
        broker.freeze(os.getpid())
    assert_refused(peer.ask("take", regions=[1]), "being read")
    assert_refused(peer.ask("free", region=1), "is frozen")
    assert_refused(peer.ask("resumed"), "is frozen")
    assert_refused(peer.ask("bye"), "is frozen")
    assert_refused(peer.allocate(2), "is frozen")
    threading.Thread(target=frozen.thaw).start()
    assert (peer.ask("resume") or {})["regions"] == [1]
    assert_refused(peer.ask("take", regions=[1, 2]), "does not have all")
    assert_refused(peer.ask("take", regions=[1] * 65), "at a time")
    taken = len(peer.fds)
    assert (peer.ask("take", regions=[1]) or {})["kind"] == "taken"
    assert len(peer.fds) == taken + 1
    assert (peer.ask("resumed") or {})["kind"] == "shared"


def test_what_was_asked_before_is_right_again(
    broker: MemoryBroker, connect: Callable[[], Peer]
) -> None:
    """Goal: an owner whose answers were lost comes again, and gets what it would have had.

    What waits in its earlier connections is void by then, so that it cannot come in between.
    """
    peer, again = connect(), connect()
    again.token = peer.token
    peer.hello()
    peer.allocate(1)
    peer.ask("release")
    assert (again.hello() or {})["released"] is True
    assert_refused(peer.ask("resumed"), "newer connection")
    holder = broker.holder_pid
    for _ in range(2):
        assert (again.ask("release") or {})["kind"] == "released"
        assert [one.state for one in broker.status()] == ["released"]
    assert broker.holder_pid == holder
    for _ in range(2):
        assert (again.ask("resumed") or {})["kind"] == "shared"
        assert [one.state for one in broker.status()] == ["shared"]
    assert (again.allocate(2) or {})["kind"] == "made"


@pytest.mark.slow
def test_memory_goes_to_its_own_process_only(
    broker: MemoryBroker, connect: Callable[[], Peer]
) -> None:
    """Goal: a token alone opens nothing. Method: a process that is no child of ours knows it."""
    peer = connect()
    peer.hello()
    peer.allocate(1)
    script = (
        "from tests.unit.memory.test_broker import Peer; from pathlib import Path;"
        f"peer = Peer(Path({str(broker.path)!r})); peer.token = {peer.token!r};"
        "print(peer.hello(create=False), flush=True); peer.close()"
    )
    child = subprocess.run(  # noqa: S603 - this interpreter
        [sys.executable, "-c", script], check=True, cwd=ROOT, capture_output=True, text=True
    )
    assert "'regions': [1]" in child.stdout
    stranger = subprocess.run(  # noqa: S603 - this interpreter
        [sys.executable, "-c", DAEMON + script],
        check=True,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert "has no memory of this process" in stranger.stdout


DAEMON = """
import os
reading, writing = os.pipe()
if os.fork() == 0:
    middle = os.getpid()
    if os.fork():
        os._exit(0)
    while os.getppid() == middle:
        pass
    os.dup2(writing, 1)
else:
    os.close(writing)
    os.wait()
    os.write(1, os.read(reading, 10_000))
    os._exit(0)
"""
"""Lets what follows run in a process whose parent has ended, so that it hangs from init."""


@pytest.mark.slow
def test_memory_of_the_dead_is_freed(broker: MemoryBroker) -> None:
    script = (
        "import sys; from tests.unit.memory.test_broker import Peer; from pathlib import Path;"
        f"peer = Peer(Path({str(broker.path)!r})); peer.hello(); peer.allocate(1);"
        "peer.ask('release'); print('ready', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(  # noqa: S603 - this interpreter
        [sys.executable, "-c", script], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert [one.pids for one in broker.status()] == [(process.pid,)]
        process.kill()
    wait_until(lambda: not broker.status(), "it is freed")


# -- adopting -------------------------------------------------------------------------------------


def test_only_sealed_memory_is_adopted(connect: Callable[[], Peer]) -> None:
    """Goal: nobody can let the broker read a file, or one that can be cut under its hands."""
    peer = connect()
    peer.hello()
    about = {"region": 1, "address": 1 << 30, "length": PAGE, "huge": False}
    with contextlib.ExitStack() as stack:

        def offer(fd: int) -> Values | None:
            stack.callback(os.close, fd)
            return peer.ask("adopt", (fd,), **about)

        plain = os.memfd_create("x", os.MFD_ALLOW_SEALING)
        os.ftruncate(plain, PAGE)
        assert_refused(offer(plain), "no memory that a broker made")
        fcntl.fcntl(plain, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        assert_refused(offer(os.dup(plain)), "no memory that a broker made")
        assert_refused(offer(os.open("/dev/zero", os.O_RDWR)), "no memory that a broker made")
        file = stack.enter_context(tempfile.TemporaryFile())
        file.truncate(PAGE)
        assert_refused(offer(os.dup(file.fileno())), "no memory that a broker made")
        assert_refused(offer(make_memfd(2 * PAGE, huge=False)), "no memory that a broker made")
        good = make_memfd(PAGE, huge=False)
        readonly = os.open(f"/proc/self/fd/{good}", os.O_RDONLY)
        assert_refused(offer(readonly), "no memory that a broker made")
        assert (offer(good) or {})["kind"] == "adopted"
    assert peer.ask("adopt", **about) is None


def test_memory_cannot_be_cut() -> None:
    fd = make_memfd(PAGE, huge=False)
    try:
        assert check_memfd(fd, PAGE)
        for length in (0, 2 * PAGE):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, length)
    finally:
        os.close(fd)


# -- restores -------------------------------------------------------------------------------------


def place(token: str, *lengths: int) -> SessionPlace:
    regions = [
        RegionPlace(
            region=number,
            order=number,
            address=(number + 1) << 30,
            length=length,
            huge=False,
            file=f"external/0-{number}.mem",
        )
        for number, length in enumerate(lengths)
    ]
    return SessionPlace(session=session_id(token), regions=tuple(regions))


def test_restored_memory_goes_out_when_it_is_whole(
    broker: MemoryBroker, connect: Callable[[], Peer]
) -> None:
    peer = connect()
    admissions = broker.admit([("host", place(peer.token, PAGE, 2 * PAGE))], os.getpid())
    (session,) = admissions.sessions
    os.pwrite(session.regions[1].fd, b"content", 100)
    session.close_regions()
    assert (peer.hello(create=False) or {})["kind"] == "welcome"
    assert_refused(peer.ask("take", regions=[0]), "being read or filled")
    threading.Thread(target=session.filled).start()
    assert (peer.ask("resume") or {})["regions"] == [0, 1]
    admissions.hand_over([os.getpid()])
    peer.ask("take", regions=[1])
    assert os.pread(peer.fds[-1], 7, 100) == b"content"
    assert not session.was_resumed
    peer.ask("resumed")
    assert session.was_resumed
    assert [one.state for one in broker.status()] == ["shared"]


@pytest.mark.slow
def test_copies_with_the_same_token_get_their_own_memory(broker: MemoryBroker) -> None:
    """Goal: copies of one snapshot never get each other's memory, though they know one token.

    Method: two processes of whom the broker only knows which restore they belong to.
    """
    token = "7" * 64
    script = (
        "import os, sys; from tests.unit.memory.test_broker import Peer; from pathlib import Path;"
        f"sys.stdin.readline(); peer = Peer(Path({str(broker.path)!r})); peer.token = {token!r};"
        "peer.hello(create=False); peer.ask('resume'); peer.ask('take', regions=[0]);"
        "print(os.pread(peer.fds[0], 3, 0).decode(), flush=True); sys.stdin.read()"
    )
    with contextlib.ExitStack() as stack:
        copies = [
            stack.enter_context(
                subprocess.Popen(  # noqa: S603 - this interpreter
                    [sys.executable, "-c", script],
                    cwd=ROOT,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
            )
            for _ in range(2)
        ]
        for number, copy in enumerate(copies):
            (session,) = broker.admit([("host", place(token, PAGE))], copy.pid).sessions
            os.pwrite(session.regions[0].fd, f"no{number}".encode(), 0)
            session.close_regions()
            session.filled()
        for number, copy in enumerate(copies):
            assert copy.stdin is not None
            assert copy.stdout is not None
            copy.stdin.write(b"go on\n")
            copy.stdin.flush()
            assert copy.stdout.readline() == f"no{number}\n".encode()
        for copy in copies:
            copy.kill()
    wait_until(lambda: not broker.status(), "all of it is freed")


def test_a_restore_that_fails_frees_its_memory(
    broker: MemoryBroker, connect: Callable[[], Peer]
) -> None:
    peer = connect()
    admissions = broker.admit([("host", place(peer.token, PAGE))], os.getpid())
    peer.hello(create=False)
    threading.Thread(target=admissions.abort).start()
    assert_refused(peer.ask("resume"), "given up")
    assert_refused(peer.ask("resume"), "given up")
    admissions.sessions[0].close_regions()
    assert not broker.status()


def test_a_restore_that_does_not_fit_leaves_nothing(broker: MemoryBroker) -> None:
    before = open_fds()
    places = [("host", place("a" * 64, PAGE)), (3, place("b" * 64, PAGE, 101 * PAGE))]
    with pytest.raises(AgentError, match="cannot be made: a process can have"):
        broker.admit(places, os.getpid())  # type: ignore[arg-type]
    assert not broker.status()
    wait_until(lambda: open_fds() <= before, "everything is closed")


def test_memory_whose_processes_are_gone_at_the_end_is_freed(broker: MemoryBroker) -> None:
    admissions = broker.admit([("host", place("a" * 64, PAGE))], os.getpid())
    admissions.sessions[0].close_regions()
    admissions.hand_over([])
    assert not broker.status()


# -- sockets --------------------------------------------------------------------------------------


def test_one_broker_at_a_path(broker: MemoryBroker) -> None:
    other = MemoryBroker(broker.path)
    with pytest.raises(AlreadyRunning, match="no memory broker can be at"):
        other.start()
    other.close()
    with Peer(broker.path).socket:
        pass


def test_what_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"precious")
    with pytest.raises(AgentError):
        MemoryBroker(tmp_path / "file").start()
    assert (tmp_path / "file").read_bytes() == b"precious"
    with pytest.raises(AgentError, match="too long"):
        MemoryBroker(tmp_path / ("x" * 100)).start()


def test_only_some_users_may_come() -> None:
    """Who may not is told so, and may go on with memory that was restored for it."""
    asked: list[tuple[int, frozenset[int]]] = []

    def may_use(uid: int, gids: frozenset[int]) -> bool:
        asked.append((uid, gids))
        return False

    with (
        tempfile.TemporaryDirectory(prefix="broker-") as folder,
        MemoryBroker(Path(folder) / "memory.sock", may_use=may_use) as broker,
    ):
        with pytest.raises(MemoryRefused, match=f"uid {os.geteuid()} may have no") as caught:
            HostMemory(str(broker.path), reserve_bytes=PAGE)
        assert "broker_users" in str(caught.value)
        assert find_owners(broker.path, {os.getpid()}) == set()
        assert set(asked) == {(os.geteuid(), frozenset({os.getegid(), *os.getgroups()}))}
        token = secrets.token_hex(32)
        region = RegionPlace(
            region=1, order=0, address=1 << 30, length=PAGE, huge=False, file="external/0-1.mem"
        )
        place = SessionPlace(session=session_id(token), regions=(region,))
        admitted = broker.admit([("host", place)], os.getpid())
        peer = Peer(broker.path)
        peer.token = token
        answer = peer.hello()
        assert answer is not None
        assert answer["kind"] == "welcome"
        peer.close()
        admitted.abort()


def give_back(broker: MemoryBroker, earlier: Peer) -> None:
    """End the session of a peer: this process owns it, so that a holder would keep it for long."""
    peer = Peer(broker.path)
    peer.token = earlier.token
    peer.hello(create=False)
    answer = peer.ask("bye")
    assert answer is not None
    assert answer["kind"] == "gone"
    peer.close()


def test_root_may_ask_who_has_memory(broker: MemoryBroker, connect: Callable[[], Peer]) -> None:
    """Of the broker, and of the holder when that is gone; asking changes nothing."""
    mine = {os.getpid()}
    assert find_owners(broker.path, mine | {1}) == set()
    peer = connect()
    peer.hello()
    peer.allocate(1)
    assert find_owners(broker.path, [*mine, *range(2000, 5000)]) == mine
    assert find_owners(broker.path, {1}) == set()
    peer.ask("release")
    broker.close()
    for _ in range(2):
        assert find_owners(broker.path, mine) == mine
    with MemoryBroker(broker.path) as again:
        assert [one.state for one in again.status()] == ["released"]
        assert find_owners(broker.path, mine) == mine
        give_back(again, peer)


def test_a_holder_that_dies_is_replaced(broker: MemoryBroker, connect: Callable[[], Peer]) -> None:
    """Goal: released memory survives the death of its holder, and then that of the broker.

    Method: write something, release, kill the holder, wait for the next one, close the broker, and
    look into what the next broker has. A release after that works as well.
    """
    peer, late = connect(), connect()
    for one in (peer, late):
        one.hello()
        one.allocate(1)
    os.pwrite(peer.fds[0], b"precious", 0)
    peer.ask("release")
    first = broker.holder_pid
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: broker.has_holder and broker.holder_pid != first, "another holder")
    answer = late.ask("release")
    assert answer is not None
    assert answer["kind"] == "released"
    broker.close()
    with MemoryBroker(broker.path) as again:
        assert sorted(one.state for one in again.status()) == ["released", "released"]
        back = connect()
        back.token = peer.token
        back.hello(create=False)
        back.ask("resume")
        back.ask("take", regions=[1])
        assert os.pread(back.fds[-1], 8, 0) == b"precious"
        for one in (peer, late):
            give_back(again, one)


def test_without_a_holder_nothing_is_released(
    broker: MemoryBroker, connect: Callable[[], Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: while no holder can be started, memory stays mapped; later all is well again.

    Method: let the interpreter be one that there is not, kill the holder, and put it back.
    """
    peer = connect()
    peer.hello()
    peer.allocate(1)
    with monkeypatch.context() as broken:
        broken.setattr(sys, "executable", "/nonexistent/python")
        os.kill(broker.holder_pid, signal.SIGKILL)
        wait_until(lambda: not broker.has_holder, "no holder")
        answer = peer.ask("release")
        assert answer is not None
        assert answer["code"] == "memory"
    wait_until(lambda: broker.has_holder, "another holder")
    answer = peer.ask("release")
    assert answer is not None
    assert answer["kind"] == "released"
    give_back(broker, peer)


@pytest.mark.slow
def test_a_holder_knows_the_owners_of_large_trees() -> None:
    """Goal: more processes own released memory than a message can name; this one is among them."""
    with tempfile.TemporaryDirectory(prefix="broker-") as folder:
        path = Path(folder) / "memory.sock"
        own = open_process(os.getpid())
        assert own is not None
        os.close(own[1])
        beyond_all = 1 << 23  # Of process ids; 4 million are the most.
        others = [Process(beyond_all + number, 10**18) for number in range(20_000)]
        owners = dict.fromkeys([*others, own[0]], -1)
        region = Region(0, 1 << 30, PAGE, huge=False, fd=make_memfd(PAGE, huge=False))
        session = Session("7" * 64, 3, 0, State.RELEASED, owners, {0: region})
        held = HeldMemory(path)
        held.hold(session)
        assert held.has(session)
        held.close()
        os.close(region.fd)
        (found,) = take_over(path)
        os.close(found.regions[0].fd)
        assert found.owners.keys() == owners.keys()
        assert (found.id, found.rank, found.uid) == (session.id, 3, 0)
        wait_until(lambda: not socket_of(path).exists(), "the holder has ended")


def test_closing_leaves_nothing() -> None:
    before = open_fds()
    with tempfile.TemporaryDirectory(prefix="broker-") as folder:
        broker = MemoryBroker(Path(folder) / "memory.sock")
        broker.start()
        peer = Peer(broker.path)
        peer.hello()
        peer.allocate(1)
        broker.close()
        broker.close()
        assert peer.ask("release") is None
        peer.close()
        assert not list(Path(folder).iterdir())
    assert open_fds() == before
