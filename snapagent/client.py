"""Asking the daemon over its socket, from a command that should start at once.

HTTP/1.0: an answer ends with its connection, which makes streams of lines as easy as documents, and
spares the loading of a client that knows all of HTTP.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

import snapstore
from snapagent import api
from snapagent.errors import DaemonLost, NoSuchJob, ProtocolError
from snapstore.errors import SnapError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from pathlib import Path

    from snapstore import ProgressCallback

__all__ = ["Daemon", "find_daemon"]

CONNECT_S_MAX: Final = 5.0
ANSWER_S_MAX: Final = 600.0
"""For an answer to come; streams send a line more often than that."""
HEAD_BYTES_MAX: Final = 64 << 10
ANSWER_BYTES_MAX: Final = 64 << 20
"""Of a document, or of one line of a stream, which may have any number of them."""
_RECEIVE_BYTES = 256 << 10
_STATUS_ERROR_MIN = 400

A = TypeVar("A")
J = TypeVar("J", api.CaptureJob, api.RestoreJob)


def find_daemon(path: Path) -> Daemon | None:
    """Return the daemon that listens there; none if nobody does, or this user may not ask."""
    with contextlib.suppress(OSError):
        _connect(path).close()
        return Daemon(path)
    return None


class Daemon:
    """A daemon to ask. Stateless: each request is a connection of its own; thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def ask(
        self, method: str, target: str, answer: type[A], body: msgspec.Struct | None = None
    ) -> A:
        """Ask once.

        Raises:
            SnapError: The daemon's own error, with its code and exit code.
            DaemonLost: It went away before it had answered.
            ProtocolError: Its answer makes no sense.
        """
        document = b""
        with contextlib.closing(self._lines(method, target, body)) as lines:
            for line in lines:
                document += line
                _require_end(document)
        return _decoded(document, answer)

    def run_capture(
        self,
        body: api.CaptureRequestBody,
        progress: ProgressCallback | None = None,
        warn: Callable[[str], None] = lambda _: None,
    ) -> api.CaptureDone:
        """Capture, as `recorded_capture` does; an exception here, such as Ctrl-C, cancels it.

        Where Ctrl-C comes too late for that, `warn` is told, and the result is returned.
        """
        job_id = body.id or secrets.token_hex(8)
        body = msgspec.structs.replace(body, id=job_id)
        mine = f"/v1/captures/{job_id}"
        done = self._follow(mine, api.CaptureJob, body, progress, warn).result
        assert done is not None, "what is done has a result"
        return done

    def run_restore(
        self,
        body: api.RestoreRequestBody,
        progress: ProgressCallback | None = None,
        warn: Callable[[str], None] = lambda _: None,
    ) -> api.RestoreDone:
        """Restore, as `recorded_restore` does; an exception here, such as Ctrl-C, cancels it.

        Where Ctrl-C comes too late for that, `warn` is told, and the result is returned.
        """
        job_id = body.id or secrets.token_hex(8)
        body = msgspec.structs.replace(body, id=job_id)
        mine = f"/v1/restores/{job_id}"
        done = self._follow(mine, api.RestoreJob, body, progress, warn).result
        assert done is not None, "what is done has a result"
        return done

    def _follow(
        self,
        mine: str,
        kind: type[J],
        body: msgspec.Struct,
        progress: ProgressCallback | None,
        warn: Callable[[str], None],
    ) -> J:
        job: J | None = None
        try:
            job = self.ask("POST", mine.rpartition("/")[0], kind, body)
            job = self._watch(mine, job, progress, warn)
        except BaseException as interruption:
            if job is None and _is_refusal(interruption):
                raise
            # Also before the answer has come: the daemon may have begun it by then. Ended for good
            # before anybody is told: who asks next finds nothing half done.
            job = self._cancel(mine, kind, warn) or job
            # Who was told "interrupted" would do again what has been done.
            if not isinstance(interruption, KeyboardInterrupt) or job is None or job.result is None:
                raise
        if job.error is not None:
            raise api.to_error(job.error)
        return job

    def _cancel(self, mine: str, kind: type[J], warn: Callable[[str], None]) -> J | None:
        """End a job and return it as it ended; none where that cannot be known."""
        job: J | None = None
        try:
            job = self.ask("DELETE", mine, kind)
            if not job.cancelling and job.error is None:
                warn("it is too late to cancel this: it is done")
            job = self._watch(mine, job, None, lambda _: None)
        except (DaemonLost, ProtocolError):
            pass
        except SnapError as error:
            # Then it has not begun, and the daemon will not begin it.
            if error.code != NoSuchJob.__name__:
                raise
        return job

    def _watch(
        self,
        target: str,
        job: J,
        progress: ProgressCallback | None,
        warn: Callable[[str], None],
    ) -> J:
        """Take in a job's events up to its end."""
        kind = type(job)
        warned = 0
        with contextlib.closing(self._lines("GET", f"{target}/events", None)) as lines:
            for line in lines:
                job = _decoded(line, kind)
                for text in job.warnings[warned:]:
                    warn(text)
                warned = len(job.warnings)
                if progress is not None and job.progress is not None:
                    now = job.progress
                    progress(
                        snapstore.Progress(
                            now.phase,
                            now.done_bytes,
                            now.total_bytes,
                            is_estimate=now.total_is_estimate,
                        )
                    )
        if job.result is None and job.error is None:
            raise DaemonLost(
                f"the agent at {self._path} ended in the middle of it",
                next_step="start it again: it removes what is left, and `snapagent history` tells",
            )
        return job

    def _lines(self, method: str, target: str, body: msgspec.Struct | None) -> Generator[bytes]:
        """Send a request and give the lines of the answer as they come.

        Raises:
            SnapError: The daemon's own error.
        """
        try:
            data = b"" if body is None else msgspec.json.encode(body)
        except UnicodeEncodeError as error:
            raise UsageError(
                f"not text: {error.object!r}", next_step="names, paths and URLs have to be UTF-8"
            ) from error
        head = f"{method} {target} HTTP/1.0\r\nHost: agent\r\nContent-Length: {len(data)}\r\n"
        if body is not None:
            head += "Content-Type: application/json\r\n"
        try:
            with _connect(self._path) as connection:
                connection.settimeout(ANSWER_S_MAX)
                connection.sendall(head.encode() + b"\r\n" + data)
                yield from self._receive(connection)
        except OSError as error:
            raise DaemonLost(
                f"the agent at {self._path} does not answer: {error}",
                next_step="look at it, or add --no-daemon",
            ) from error

    def _receive(self, connection: socket.socket) -> Generator[bytes]:
        buffer, status = b"", 0
        while data := connection.recv(_RECEIVE_BYTES):
            buffer += data
            _require_end(buffer)
            if status == 0:
                head, found, buffer = _divided(buffer)
                if not found:
                    continue
                status = _status(head)
            if status >= _STATUS_ERROR_MIN:
                continue
            *lines, buffer = buffer.split(b"\n")
            yield from lines
        if status == 0:
            raise DaemonLost(f"the agent at {self._path} hung up", next_step="look at its log")
        if status >= _STATUS_ERROR_MIN:
            raise api.to_error(_decoded(buffer, api.ErrorAnswer).error)
        if buffer:
            yield buffer


def _is_refusal(error: BaseException) -> bool:
    """Whether an error is the daemon's answer, so that it has begun nothing."""
    return isinstance(error, SnapError) and not isinstance(error, DaemonLost | ProtocolError)


def _divided(buffer: bytes) -> tuple[bytes, bool, bytes]:
    head, end, rest = buffer.partition(b"\r\n\r\n")
    if end:
        return head, True, rest
    if len(buffer) > HEAD_BYTES_MAX:
        raise ProtocolError("the agent's answer has no end of its head")
    return b"", False, buffer


def _require_end(answer: bytes) -> None:
    if len(answer) > ANSWER_BYTES_MAX:
        raise ProtocolError("the agent's answer has no end")


def _status(head: bytes) -> int:
    words = head.split(b" ", 2)
    number = words[1][:3] if len(words) > 1 else b""
    if not head.startswith(b"HTTP/") or not number.isdigit():
        raise ProtocolError("what listens at the agent's socket does not speak HTTP")
    return int(number)


def _decoded(data: bytes, kind: type[A]) -> A:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"the agent's answer makes no sense: {error}") from error


def _connect(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(CONNECT_S_MAX)
    try:
        connection.connect(str(path))
    except BaseException:
        connection.close()
        raise
    return connection
