"""Redis and PostgreSQL from Debian's packages, with data, to be dumped and restored while in use.

`tools/install_servers.sh` installs them. Each server runs as its package's user in a folder of its
own and listens on a free port; each client keeps one TCP connection open, which has to survive.
"""

# ruff: noqa: S603 - it runs the programs that are named here, with no shell in between.

import contextlib
import hashlib
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from typing_extensions import override

from tests.support.lives import Living
from tests.support.processes import CLOCK
from tests.support.waiting import wait_until

LOOPBACK = "127.0.0.1"
ANSWER_S_MAX = 60
BATCH = 1_000

# What CRIU needs to know to dump either of them while clients are connected.
CRIU_OPTIONS = ("--tcp-established", "--network-lock", "nftables")


def free_port() -> int:
    """Return a TCP port that nobody listens on right now."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def folder_of(user: str) -> Iterator[Path]:
    """Make a folder that a user owns and can reach, which those of pytest are not."""
    entry = pwd.getpwnam(user)
    path = Path(tempfile.mkdtemp(prefix=f"{user}-"))
    os.chown(path, entry.pw_uid, entry.pw_gid)
    try:
        yield path
    finally:
        shutil.rmtree(path)


def in_own_namespace(user: str) -> list[str]:
    """Return what executes a command, in its own place, as a user in a new IPC namespace.

    PostgreSQL always has a little System V shared memory, and CRIU can only dump that together
    with its namespace.
    """
    entry = pwd.getpwnam(user)
    return ["unshare", "--ipc", f"--setgid={entry.pw_gid}", f"--setuid={entry.pw_uid}", "--"]


class Server(Living):
    """A server that runs until its context is left, in whatever life it is by then."""

    user: str

    def __init__(self, home: Path) -> None:
        """Start it in `home`, an empty folder of its user; returns when it takes connections."""
        self.home = home
        self.port = free_port()
        self._prepare()
        self.begin(home, [*in_own_namespace(self.user), *self._command()])

    @abstractmethod
    def _command(self) -> list[str]:
        """Return the program and its arguments."""

    @abstractmethod
    def _prepare(self) -> None:
        """Do what has to be done in its folder before it is started."""


# -- Redis ----------------------------------------------------------------------------------------


class RedisServer(Server):
    """A Redis that writes nothing to disk."""

    user = "redis"
    PROGRAM = "/usr/bin/redis-server"

    def _prepare(self) -> None:
        pass

    def _command(self) -> list[str]:
        settings = {
            "port": str(self.port),
            "bind": LOOPBACK,
            "dir": str(self.home),
            "save": "",
            "daemonize": "no",
        }
        words = [word for name, value in settings.items() for word in (f"--{name}", value)]
        return [self.PROGRAM, *words]

    @override
    def answers(self) -> bool:
        try:
            with RedisClient(self.port) as client:
                return client.ask("PING") == b"PONG"
        except OSError:
            return False


class RedisClient:
    """One connection to Redis, in its own protocol. Not for several threads."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection((LOOPBACK, port), timeout=ANSWER_S_MAX)
        self._stream = self._socket.makefile("rb")

    def ask(self, *words: str) -> bytes | int | None:
        """Send one command and return its answer."""
        return self.ask_all([words])[0]

    def ask_all(self, commands: list[tuple[str, ...]]) -> list[bytes | int | None]:
        """Send many commands at once and return their answers."""
        self._socket.sendall(b"".join(self._encode(words) for words in commands))
        return [self._read_answer() for _ in commands]

    @staticmethod
    def _encode(words: tuple[str, ...]) -> bytes:
        parts = [f"*{len(words)}\r\n".encode()]
        for word in words:
            data = word.encode()
            parts.append(b"$%d\r\n%s\r\n" % (len(data), data))
        return b"".join(parts)

    def _read_answer(self) -> bytes | int | None:
        line = self._stream.readline()
        if not line.endswith(b"\r\n"):
            raise ConnectionError("Redis has closed the connection")
        kind, rest = line[:1], line[1:-2]
        if kind == b"+":
            return rest
        if kind == b":":
            return int(rest)
        if kind == b"$":
            return None if rest == b"-1" else self._stream.read(int(rest) + 2)[:-2]
        raise ValueError(f"Redis answered {line!r}")

    def fill(self, keys: int) -> None:
        """Set so many keys."""
        for start in range(0, keys, BATCH):
            numbers = range(start, min(keys, start + BATCH))
            self.ask_all([("SET", f"key:{number}", value_of(number)) for number in numbers])

    def contents(self, keys: int) -> str:
        """Return a hash of the values of so many keys."""
        hasher = hashlib.sha256()
        for start in range(0, keys, BATCH):
            numbers = range(start, min(keys, start + BATCH))
            for value in self.ask_all([("GET", f"key:{number}") for number in numbers]):
                hasher.update(repr(value).encode())
        return hasher.hexdigest()

    def beat(self) -> int:
        """Count in the server, and return how far it has counted."""
        count = self.ask("INCR", "beat")
        assert isinstance(count, int)
        return count

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stream.close()
        self._socket.close()


def value_of(number: int) -> str:
    """Return what is stored for a number: a hundred characters that differ."""
    return hashlib.shake_128(str(number).encode()).hexdigest(50)


# -- PostgreSQL -----------------------------------------------------------------------------------


def postgres_program(name: str) -> Path:
    """Return a program of the newest PostgreSQL that is installed."""
    found = list(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    if not found:
        raise FileNotFoundError(f"no PostgreSQL with {name}: run tools/install_servers.sh")
    return max(found, key=lambda path: int(path.parts[-3]))


class PostgresServer(Server):
    """A PostgreSQL with an empty database of its own."""

    user = "postgres"

    def _prepare(self) -> None:
        # It is thrown away: nothing needs to reach a disk.
        subprocess.run(
            [
                *(postgres_program("initdb"), "--pgdata", self.home / "data", "--no-sync"),
                *("--username", self.user, "--auth=trust", "--locale=C", "--encoding=UTF8"),
            ],
            cwd=self.home,
            user=self.user,
            group=self.user,
            extra_groups=[],
            check=True,
            stdout=subprocess.DEVNULL,
        )

    def _command(self) -> list[str]:
        settings = {
            "port": str(self.port),
            "listen_addresses": LOOPBACK,
            "unix_socket_directories": "",
            "fsync": "off",
            # Its segments lie in the data directory then, which any other namespace has too.
            "dynamic_shared_memory_type": "mmap",
        }
        words = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        return [str(postgres_program("postgres")), "-D", str(self.home / "data"), *words]

    @override
    def answers(self) -> bool:
        try:
            with PostgresClient(self.port) as client:
                return client.ask("SELECT 1") == ["1"]
        except PostgresError:
            return False


class PostgresError(Exception):
    """`psql` has ended; the message is what it said."""


class PostgresClient:
    """One connection to PostgreSQL through its own client `psql`. Not for several threads."""

    _END = "end of answer"

    def __init__(self, port: int) -> None:
        self._psql = subprocess.Popen(
            [
                *(postgres_program("psql"), "--host", LOOPBACK, "--port", str(port)),
                *("--username", PostgresServer.user, "--set", "ON_ERROR_STOP=1"),
                *("--no-psqlrc", "--quiet", "--no-align", "--tuples-only"),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def ask(self, statement: str) -> list[str]:
        """Run one statement and return the rows of its result."""
        assert self._psql.stdin is not None
        assert self._psql.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._psql.stdin.write(f"{statement};\n\\echo {self._END}\n")
            self._psql.stdin.flush()
        rows: list[str] = []
        for line in self._psql.stdout:
            if line.rstrip("\n") == self._END:
                return rows
            rows.append(line.rstrip("\n"))
        raise PostgresError("\n".join(rows))

    def fill(self, rows: int) -> None:
        """Make a table of so many rows, and one that counts."""
        self.ask("CREATE TABLE things (id int, payload text)")
        numbers = f"generate_series(1, {rows}) AS n"
        self.ask(f"INSERT INTO things SELECT n, md5(n::text) FROM {numbers}")  # noqa: S608
        self.ask("CREATE INDEX ON things (payload)")
        self.ask("CREATE TABLE beats AS SELECT 0 AS count")

    def contents(self) -> list[str]:
        """Return the number of rows and a hash over all of them."""
        return self.ask("SELECT count(*), md5(string_agg(payload, '' ORDER BY id)) FROM things")

    def beat(self) -> int:
        """Count in the server, and return how far it has counted."""
        return int(self.ask("UPDATE beats SET count = count + 1 RETURNING count")[0])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._psql.kill()
        self._psql.communicate()


# -- a client in the middle of its work -----------------------------------------------------------


@dataclass
class Heartbeat:
    """A thread that lets a server count, one beat after the other, until its context is left.

    Leaving it fails if a beat failed, was lost or was done twice: a client may see a pause, and
    nothing else.
    """

    beat: Callable[[], int]
    longest_pause_s: float = 0.0
    count: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)
    _failures: list[Exception] = field(default_factory=list)

    def _run(self) -> None:
        try:
            last = self.beat()
            before = CLOCK.monotonic_s()
            while not self._stop.is_set():
                number = self.beat()
                now = CLOCK.monotonic_s()
                assert number == last + 1, f"beat {number} came after {last}"
                self.longest_pause_s = max(self.longest_pause_s, now - before)
                last, before = number, now
                self.count += 1
        except Exception as error:  # noqa: BLE001 - raised where the context is left
            self._failures.append(error)

    def await_beats(self, number: int) -> None:
        """Wait until it has beaten so many times more."""
        goal = self.count + number
        wait_until(
            lambda: self.count >= goal or bool(self._failures),
            "the server answers the client",
            seconds=ANSWER_S_MAX,
        )
        if self._failures:
            raise self._failures[0]

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        if error is not None:
            # It may wait for an answer that never comes, from a server that others end later.
            return
        self._thread.join(ANSWER_S_MAX)
        if self._failures:
            raise self._failures[0]
        assert not self._thread.is_alive(), "the server answers the client no more"
