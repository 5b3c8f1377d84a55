"""Something between a client and its S3 server that loses, delays and spoils what passes.

A plain HTTP/1.1 forwarder. Each request that arrives is numbered; a plan says what happens to
which. Without a plan everything passes as it is.
"""

import contextlib
import dataclasses
import http.client
import http.server
import socket
import socketserver
import ssl
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal

Trouble = Literal[
    "refused",  # the connection is closed before the request reaches the server
    "reply-lost",  # the server does its work, and nobody hears of it
    "slow-down",  # 503, as a busy server says it
    "internal-error",  # 500
    "stalled",  # no answer, ever
    "stalled-body",  # half of the body, and then nothing
    "truncated",  # half of the body, and then the end of the connection
    "wrong-bytes",  # the body with one bit flipped
    "wrong-range",  # another range than was asked for
    "expired",  # 403 ExpiredToken
    "denied",  # 403 AccessDenied
    "full",  # 507
    "no-bucket",  # 404 NoSuchBucket
]

_ERRORS: dict[str, tuple[int, str]] = {
    "slow-down": (503, "SlowDown"),
    "internal-error": (500, "InternalError"),
    "expired": (403, "ExpiredToken"),
    "denied": (403, "AccessDenied"),
    "full": (507, "InsufficientStorage"),
    "no-bucket": (404, "NoSuchBucket"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """What arrived."""

    number: int
    method: str
    path: str

    @property
    def is_data(self) -> bool:
        """Whether it is about a pack."""
        return "/packs/" in self.path


Plan = Callable[[Request], Trouble | None]


class Proxy:
    """A running proxy; `plan` may be changed while it runs."""

    def __init__(self, endpoint: str, *, tls: ssl.SSLContext | None = None) -> None:
        self.server_address = endpoint.removeprefix("http://")
        self.plan: Plan = lambda _: None
        self.seen: list[Request] = []
        self.delay_s = 0.0
        """How long reading data takes at least."""
        self.released = threading.Event()
        self.bytes_put = 0
        self._lock = threading.Lock()
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
            self.endpoint = f"https://localhost:{self._server.server_address[1]}"

    def note(self, method: str, path: str, body_bytes: int) -> tuple[Request, Trouble | None]:
        """Number a request and look up what is to happen to it."""
        with self._lock:
            request = Request(len(self.seen), method, path)
            self.seen.append(request)
            if method == "PUT":
                self.bytes_put += body_bytes
            return request, self.plan(request)

    @contextlib.contextmanager
    def running(self) -> Iterator["Proxy"]:
        """Forward until the block ends."""
        thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.released.set()
            self._server.shutdown()
            self._server.server_close()
            thread.join()


class _Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = False
    block_on_close = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._connections: list[socket.socket] = []

    def process_request(self, request: Any, client_address: Any) -> None:
        """Remember the connection, so that closing need not wait until its client gives it up."""
        self._connections.append(request)
        super().process_request(request, client_address)

    def server_close(self) -> None:
        """End all connections, and wait for their handlers."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        super().server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that go away are nothing to report."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Head and body are sent apart: else each body waited 40 ms for the receipt of its head.
    disable_nagle_algorithm = True
    owner: ClassVar[Proxy]

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Say nothing."""

    def forward(self) -> None:
        """Take one request through, or not."""
        length = int(self.headers.get("Content-Length") or 0)
        _, trouble = self.owner.note(self.command, self.path, length)
        body = b"" if trouble == "refused" else self.rfile.read(length)
        # Less than all: the client died while it was sending.
        if trouble == "refused" or len(body) < length:
            self.close_connection = True
            return
        if trouble in _ERRORS:
            self._say(*_ERRORS[trouble])
            return
        if trouble == "stalled":
            self._never()
            return
        status, headers, answer = self._ask(body)
        if trouble == "reply-lost":
            self.close_connection = True
            return
        if trouble == "wrong-range" and "Content-Range" in headers:
            headers["Content-Range"] = "bytes 1-" + headers["Content-Range"].split("-", 1)[1]
        if trouble == "wrong-bytes" and answer:
            middle = len(answer) // 2
            answer = answer[:middle] + bytes([answer[middle] ^ 1]) + answer[middle + 1 :]
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if trouble in {"truncated", "stalled-body"}:
            self.wfile.write(answer[: len(answer) // 2])
            self.wfile.flush()
            self.close_connection = True
            if trouble == "stalled-body":
                self._never()
            return
        self.wfile.write(answer)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = forward  # noqa: N815

    def _ask(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        if "/packs/" in self.path and self.command == "GET":
            self.owner.released.wait(self.owner.delay_s)
        connection = http.client.HTTPConnection(self.owner.server_address, timeout=60)
        try:
            connection.putrequest(
                self.command, self.path, skip_host=True, skip_accept_encoding=True
            )
            for name, value in self.headers.items():
                if name.lower() != "connection":
                    connection.putheader(name, value)
            connection.endheaders(body or None)
            response = connection.getresponse()
            answer = response.read()
            headers = {
                name: value
                for name, value in response.getheaders()
                if name.lower() not in {"connection", "transfer-encoding", "content-length"}
            }
            length = response.getheader("Content-Length") if self.command == "HEAD" else None
            headers["Content-Length"] = length or str(len(answer))
            return response.status, headers, answer
        finally:
            connection.close()

    def _say(self, status: int, code: str) -> None:
        answer = f"<?xml version='1.0'?><Error><Code>{code}</Code></Error>".encode()
        self.send_response_only(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer)

    def _never(self) -> None:
        self.close_connection = True
        self.owner.released.wait()
