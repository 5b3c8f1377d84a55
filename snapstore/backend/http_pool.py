"""Plain HTTP with the caller's buffers: what the data of an object store travels over.

Knows nothing of any store. Bodies are received into memory that the caller owns and sent from
pieces that it keeps, without a copy in between; both release the GIL. Connections are kept alive
and used again by whichever thread is next.
"""

from __future__ import annotations

import dataclasses
import http.client
import socket
import ssl
import threading
import urllib.parse
from typing import TYPE_CHECKING

from snapstore.errors import BackendError, TransientBackendError
from snapstore.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from snapstore.clock import Clock

__all__ = ["HttpPool", "Reply", "Timeouts"]

_ERROR_BODY_BYTES = 64 * KIB
_STEP_BYTES = 1 * MIB
"""So much is moved between two looks at the clock."""

_NETWORK_ERRORS = (OSError, http.client.HTTPException)
_STALE = (
    BrokenPipeError,
    ConnectionResetError,
    ConnectionAbortedError,
    http.client.RemoteDisconnected,
    http.client.BadStatusLine,
)
"""What it looks like when the server has closed a connection while it was idle."""


@dataclasses.dataclass(frozen=True, slots=True)
class Reply:
    """What a server answered.

    Attributes:
        status: The HTTP status.
        headers: By name in lower case.
        body: Up to 64 KiB of it, where it was not received into a buffer.
        received: Whether the caller's buffer was filled.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes = b""
    received: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Timeouts:
    """How long to wait.

    Attributes:
        connect_s: For a connection.
        silence_s: For the next byte, in either direction.
        rate_bytes_per_s: A transfer that is slower than this over its whole length is given up.
    """

    connect_s: float = 10.0
    silence_s: float = 30.0
    rate_bytes_per_s: int = 256 * KIB


class HttpPool:
    """Keeps connections to servers. Thread-safe."""

    def __init__(
        self, clock: Clock, *, timeouts: Timeouts | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        self._clock = clock
        self._timeouts = timeouts or Timeouts()
        self._tls = tls
        self._idle: dict[tuple[str, str], list[http.client.HTTPConnection]] = {}
        self._closed = False
        self._lock = threading.Lock()

    def get(self, url: str, headers: Mapping[str, str], into: memoryview) -> Reply:
        """Receive a body of exactly the buffer's length.

        Nothing is received of an answer that is no success or announces another length: see
        `Reply.received`.

        Raises:
            TransientBackendError: The connection failed, stalled, or ended early.
            BackendError: The server's certificate is not trusted.
        """
        return self._exchange(_Request("GET", url, headers, into=into))

    def put(self, url: str, headers: Mapping[str, str], pieces: Sequence[memoryview]) -> Reply:
        """Send the pieces as one body.

        Raises:
            TransientBackendError: The connection failed or stalled; the request may have been
                carried out.
        """
        return self._exchange(_Request("PUT", url, headers, pieces=pieces))

    def close(self) -> None:
        """Close the connections, those in use when they are given back. Idempotent."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, {}
        for connections in idle.values():
            for connection in connections:
                connection.close()

    def _exchange(self, request: _Request) -> Reply:
        while True:
            connection, reused = self._take(request)
            try:
                reply, keep = self._talk(connection, request)
            except _NETWORK_ERRORS as error:
                connection.close()
                if reused and isinstance(error, _STALE):
                    continue
                raise TransientBackendError(
                    f"{request.method} {request.shown}: {str(error) or type(error).__name__}"
                ) from error
            except BaseException:
                connection.close()
                raise
            self._give(request, connection, keep=keep)
            return reply

    def _talk(
        self, connection: http.client.HTTPConnection, request: _Request
    ) -> tuple[Reply, bool]:
        """Do one exchange; tell also whether the connection can be used again."""
        length = sum(len(piece) for piece in request.pieces)
        size = length if request.into is None else len(request.into)
        deadline_s = self._deadline_s(size)
        connection.putrequest(request.method, request.target, skip_accept_encoding=True)
        for name, value in request.headers.items():
            connection.putheader(name, value)
        if request.into is None:
            connection.putheader("Content-Length", str(length))
        connection.endheaders()
        sent = self._send(connection, request.pieces, deadline_s)
        response = connection.getresponse()
        body, received = b"", False
        if request.into is None or not 200 <= response.status < 300:
            body = response.read(_ERROR_BODY_BYTES)
        elif response.length == len(request.into):
            self._receive(response, request.into, deadline_s)
            received = True
        keep = sent and response.isclosed() and not response.will_close
        headers = {name.lower(): value for name, value in response.getheaders()}
        return Reply(response.status, headers, body, received), keep

    def _send(
        self,
        connection: http.client.HTTPConnection,
        pieces: Sequence[memoryview],
        deadline_s: float,
    ) -> bool:
        """Send a body; False if the server stopped listening, which its answer then explains."""
        for piece in pieces:
            for start in range(0, len(piece), _STEP_BYTES):
                self._check(deadline_s)
                try:
                    connection.send(piece[start : start + _STEP_BYTES])
                except (BrokenPipeError, ConnectionResetError):
                    return False
        return True

    def _receive(
        self, response: http.client.HTTPResponse, into: memoryview, deadline_s: float
    ) -> None:
        done = 0
        while done < len(into):
            got = response.readinto(into[done : done + _STEP_BYTES])
            if not got:
                raise http.client.IncompleteRead(b"", len(into) - done)
            done += got
            self._check(deadline_s)

    def _deadline_s(self, size_bytes: int) -> float:
        allowed_s = self._timeouts.silence_s + size_bytes / self._timeouts.rate_bytes_per_s
        return self._clock.monotonic_s() + allowed_s

    def _check(self, deadline_s: float) -> None:
        if self._clock.monotonic_s() > deadline_s:
            raise TimeoutError("slower than any working connection")

    def _take(self, request: _Request) -> tuple[http.client.HTTPConnection, bool]:
        with self._lock:
            idle = self._idle.get(request.server)
            if idle:
                return idle.pop(), True
        try:
            return self._connect(*request.server), False
        except ssl.SSLCertVerificationError as error:
            raise BackendError(
                f"{request.server[1]} shows a certificate that nobody here trusts: "
                f"{error.verify_message}",
                next_step="name the file of the authority's certificate: ca=FILE in the URL",
            ) from error
        except _NETWORK_ERRORS as error:
            raise TransientBackendError(
                f"cannot connect to {request.server[1]}: {str(error) or type(error).__name__}"
            ) from error

    def _connect(self, scheme: str, address: str) -> http.client.HTTPConnection:
        timeout_s = self._timeouts.connect_s
        connection = (
            http.client.HTTPSConnection(address, timeout=timeout_s, context=self._tls)
            if scheme == "https"
            else http.client.HTTPConnection(address, timeout=timeout_s)
        )
        connection.connect()
        connection.sock.settimeout(self._timeouts.silence_s)
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def _give(
        self, request: _Request, connection: http.client.HTTPConnection, *, keep: bool
    ) -> None:
        with self._lock:
            if keep and not self._closed:
                self._idle.setdefault(request.server, []).append(connection)
                return
        connection.close()


@dataclasses.dataclass(frozen=True, slots=True)
class _Request:
    method: str
    url: str
    headers: Mapping[str, str]
    pieces: Sequence[memoryview] = ()
    into: memoryview | None = None

    @property
    def server(self) -> tuple[str, str]:
        parts = urllib.parse.urlsplit(self.url)
        return parts.scheme, parts.netloc

    @property
    def target(self) -> str:
        parts = urllib.parse.urlsplit(self.url)
        return urllib.parse.urlunsplit(("", "", parts.path, parts.query, ""))

    @property
    def shown(self) -> str:
        """The URL without its signature."""
        parts = urllib.parse.urlsplit(self.url)
        return f"{parts.netloc}{parts.path}"
