"""What a command makes of answers of whoever listens at the agent's socket."""

import collections
import contextlib
import socket
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import pytest

from snapagent import api, client
from snapagent.client import Daemon
from snapagent.errors import ProtocolError
from snapagent.server.jobs import Job
from snapstore.errors import SnapError, UsageError

HEAD = b"HTTP/1.0 200 OK\r\n\r\n"
LIMIT = 1 << 20


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ANSWER_BYTES_MAX", LIMIT)


@contextlib.contextmanager
def listening(path: Path, *answers: Iterable[bytes]) -> Iterator[Daemon]:
    """Answer one request after the other with these pieces, and hang up."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        left = collections.deque(answers)

        def serve() -> None:
            while True:
                connection, _ = listener.accept()
                # Whoever asked may have had enough.
                with connection, contextlib.suppress(ConnectionError):
                    if not connection.recv(64 << 10):
                        return
                    connection.sendall(HEAD)
                    for piece in left.popleft():
                        connection.sendall(piece)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield Daemon(path)
        finally:
            # One that asks nothing ends it.
            with socket.socket(socket.AF_UNIX) as last:
                last.connect(str(path))
            thread.join()


def restore(daemon: Daemon) -> None:
    daemon.run_restore(api.RestoreRequestBody(name="team/a/b", store="file:///s"))


def test_a_job_may_have_any_number_of_events(tmp_path: Path) -> None:
    """Goal: whoever waits for hours is told how it ended; the limit is of one line."""
    job = Job(api.RestoreDone, name="team/a/b", store="file:///s", uid=0)
    job.warn("x" * (100 << 10))
    line = msgspec.json.encode(job.answer()) + b"\n"
    job.fail(UsageError("it was not to be"))
    end = msgspec.json.encode(job.answer()) + b"\n"
    events = [*[line] * (4 * LIMIT // len(line)), end]
    with (
        listening(tmp_path / "agent", [line[:-1]], events, [end[:-1]], [end]) as daemon,
        pytest.raises(SnapError, match="it was not to be"),
    ):
        restore(daemon)


@pytest.mark.parametrize("piece", [b"x" * (64 << 10), b"x" * (64 << 10) + b"\n"], ids=["", "lines"])
def test_an_answer_without_an_end_is_refused(tmp_path: Path, piece: bytes) -> None:
    answer = [piece] * (2 * LIMIT // len(piece))
    with (
        listening(tmp_path / "agent", answer) as daemon,
        pytest.raises(ProtocolError, match="has no end"),
    ):
        daemon.ask("GET", "/v1/health", api.Health)
