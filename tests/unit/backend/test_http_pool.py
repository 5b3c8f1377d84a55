"""HTTP into and out of the caller's buffers, with servers that do what servers should not."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from snapstore.backend.http_pool import HttpPool, Timeouts
from snapstore.clock import SystemClock
from snapstore.errors import TransientBackendError
from snapstore.testing.clock import ManualClock

Script = Callable[[socket.socket], None]
QUICK = Timeouts(connect_s=2.0, silence_s=0.3)


@contextlib.contextmanager
def server(*scripts: Script) -> Iterator[str]:
    """Play one script for each connection, in turn; give the address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for script in scripts:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection, contextlib.suppress(OSError):
                    script(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/bucket/key?signature=secret"
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
            thread.join()


@contextlib.contextmanager
def pool(timeouts: Timeouts = QUICK) -> Iterator[HttpPool]:
    with contextlib.closing(HttpPool(SystemClock(), timeouts=timeouts)) as made:
        yield made


def head_of(connection: socket.socket) -> bytes:
    """Read up to the end of a request's head, and what came with it."""
    data = b""
    while b"\r\n\r\n" not in data:
        got = connection.recv(65536)
        if not got:
            raise ConnectionError
        data += got
    return data


def answers(*bodies: bytes, status: str = "206 Partial Content", extra: str = "") -> Script:
    """Answer that many requests of one connection."""

    def play(connection: socket.socket) -> None:
        for body in bodies:
            head_of(connection)
            head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{extra}\r\n"
            connection.sendall(head.encode() + body)

    return play


def says(data: bytes) -> Script:
    """Answer with exactly these bytes, and then nothing until the client is gone."""

    def play(connection: socket.socket) -> None:
        head_of(connection)
        connection.sendall(data)
        connection.recv(1)

    return play


def test_a_body_is_received_in_place() -> None:
    with server(answers(b"first", b"other")) as url, pool() as client:
        into = memoryview(bytearray(5))
        reply = client.get(url, {"Range": "bytes=0-4"}, into)
        assert (reply.status, reply.received, bytes(into)) == (206, True, b"first")
        # The same connection again: the server plays one script for each.
        assert client.get(url, {}, into).received
        assert bytes(into) == b"other"


@pytest.mark.parametrize("body", [b"", b"four", b"sixsix"])
def test_another_length_is_not_received(body: bytes) -> None:
    with server(answers(body)) as url, pool() as client:
        into = memoryview(bytearray(b"." * 5))
        reply = client.get(url, {}, into)
        assert not reply.received
        assert bytes(into) == b"." * 5


def test_an_unknown_length_is_not_received() -> None:
    chunked = b"HTTP/1.1 206 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n0\r\n\r\n"
    with server(says(chunked)) as url, pool() as client:
        assert not client.get(url, {}, memoryview(bytearray(5))).received


def test_an_error_has_its_body() -> None:
    with (
        server(answers(b"<Code>NoSuchKey</Code>", status="404 Not Found")) as url,
        pool() as client,
    ):
        reply = client.get(url, {}, memoryview(bytearray(5)))
        assert (reply.status, reply.body, reply.received) == (404, b"<Code>NoSuchKey</Code>", False)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"HTTP/1.1 206 OK\r\nContent-Length: 5\r\n\r\nfi",
        b"HTTP/1.1 206 OK\r\n",
        b"HTTP/1.1 999999 OK\r\n\r\n",
        b"\x00\xff nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200 + b"\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000 + b"\r\n\r\n",
    ],
)
def test_nonsense_and_silence_are_passing_troubles(data: bytes) -> None:
    with server(says(data)) as url, pool() as client:
        with pytest.raises(TransientBackendError) as caught:
            client.get(url, {}, memoryview(bytearray(5)))
        assert "secret" not in str(caught.value)


def test_an_idle_connection_that_the_server_closed_is_replaced() -> None:
    with server(answers(b"first"), answers(b"other")) as url, pool() as client:
        into = memoryview(bytearray(5))
        client.get(url, {}, into)
        client.get(url, {}, into)
        assert bytes(into) == b"other"


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pool() as client, pytest.raises(TransientBackendError, match="cannot connect"):
        client.get(f"http://127.0.0.1:{port}/x", {}, memoryview(bytearray(5)))


def test_a_trickle_is_given_up() -> None:
    """Each byte comes in time, and all of them would take hours."""
    clock = ManualClock()

    def play(connection: socket.socket) -> None:
        head_of(connection)
        size = 8 << 20
        connection.sendall(f"HTTP/1.1 206 OK\r\nContent-Length: {size}\r\n\r\n".encode())
        for _ in range(size >> 20):
            clock.advance_s(60)
            connection.sendall(bytes(1 << 20))

    with (
        server(play) as url,
        contextlib.closing(HttpPool(clock, timeouts=QUICK)) as client,
        pytest.raises(TransientBackendError, match="slower than any"),
    ):
        client.get(url, {}, memoryview(bytearray(8 << 20)))


def test_pieces_are_sent_as_one_body() -> None:
    heard = []

    def play(connection: socket.socket) -> None:
        data = head_of(connection)
        while len(data.partition(b"\r\n\r\n")[2]) < 9:
            data += connection.recv(65536)
        heard.append(data)
        connection.sendall(b'HTTP/1.1 200 OK\r\nETag: "e"\r\nContent-Length: 0\r\n\r\n')

    with server(play) as url, pool() as client:
        reply = client.put(url, {"If-None-Match": "*"}, [memoryview(b"four"), memoryview(b"and 5")])
    assert (reply.status, reply.headers["etag"]) == (200, '"e"')
    head, _, body = heard[0].partition(b"\r\n\r\n")
    assert body == b"fourand 5"
    assert b"Content-Length: 9" in head
    assert b"If-None-Match: *" in head


def test_a_refusal_in_the_middle_of_a_body_is_heard() -> None:
    """A server that has seen enough answers and closes; its answer says why."""

    def play(connection: socket.socket) -> None:
        head_of(connection)
        answer = b"<Code>EntityTooLarge</Code>"
        head = f"HTTP/1.1 400 No\r\nConnection: close\r\nContent-Length: {len(answer)}\r\n\r\n"
        connection.sendall(head.encode() + answer)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1 << 20):
            pass

    with server(play) as url, pool() as client:
        reply = client.put(url, {}, [memoryview(bytes(8 << 20))])
        assert (reply.status, reply.body) == (400, b"<Code>EntityTooLarge</Code>")
