"""The server of pages on demand: several clients, short answers, clients that misbehave."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Self

import pytest

from snapagent.criu.page_server import PageServer
from snapagent.criu.protocol import (
    HEADER_BYTES,
    Command,
    PageFlag,
    PageHeader,
    decode_header,
    encode_header,
)
from snapagent.errors import AgentError, ProtocolError
from snapstore.units import PAGE_BYTES
from tests.support.peers import SECONDS_MAX, on_thread, until

BASE = 0x500000000000
SIZE_PAGES = 1000


def page(pid: int, number: int) -> bytes:
    return (pid << 32 | number).to_bytes(8, "little") * (PAGE_BYTES // 8)


class MadeUpMemory:
    """A page reader over processes of 1000 pages each, every page another."""

    def read(self, pid: int, vaddr: int, nr_pages_max: int, into: memoryview) -> int:
        first = (vaddr - BASE) // PAGE_BYTES
        count = min(nr_pages_max, SIZE_PAGES - first)
        if not 0 <= first < SIZE_PAGES:
            raise AgentError(f"process {pid} has no page at {vaddr:#x}")
        assert len(into) == nr_pages_max * PAGE_BYTES
        into[: count * PAGE_BYTES] = b"".join(page(pid, first + i) for i in range(count))
        return count


class Client:
    """What CRIU does at its end."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.socket = socket.create_connection(address, timeout=SECONDS_MAX)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def ask(self, pid: int, first: int, count: int) -> None:
        vaddr = BASE + first * PAGE_BYTES
        self.socket.sendall(encode_header(PageHeader(Command.GET, 0, count, vaddr, pid)))

    def receive(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            got = self.socket.recv(count - len(data))
            assert got, f"the end after {len(data)} of {count} bytes"
            data += got
        return data

    def answer(self) -> tuple[PageHeader, bytes]:
        header = decode_header(self.receive(HEADER_BYTES))
        return header, self.receive(header.nr_pages * PAGE_BYTES)

    def has_ended(self) -> bool:
        with contextlib.suppress(ConnectionError):
            return self.socket.recv(1) == b""
        return True


class Serving:
    """A server with what it reported."""

    def __init__(self, **options: int) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        self.errors: list[BaseException] = []
        self.server = PageServer(
            listener,
            MadeUpMemory(),
            on_error=self.errors.append,
            **options,  # type: ignore[arg-type]
        )


@pytest.fixture
def serving() -> Iterator[Serving]:
    made = Serving(answer_bytes=100 * PAGE_BYTES)
    with made.server:
        yield made


def test_answers_come_in_order_and_may_be_short(serving: Serving) -> None:
    """Goal: requests are answered one after the other, each with what fits, at least a page.

    Method: ask for much, and at once for single pages, as CRIU does at page faults.
    """
    with Client(serving.address) as client:
        client.ask(7, 10, 500)
        client.ask(7, 900, 1)
        client.ask(8, 990, 50)
        answers = [client.answer() for _ in range(3)]
        client.socket.sendall(encode_header(PageHeader(Command.CLOSE)))
        assert client.receive(4) == bytes(4)
    expected = [(7, 10, 100), (7, 900, 1), (8, 990, 10)]
    for (header, data), (pid, first, count) in zip(answers, expected, strict=True):
        vaddr = BASE + first * PAGE_BYTES
        assert header == PageHeader(Command.ADD_F, PageFlag.PRESENT, count, vaddr, pid)
        assert data == b"".join(page(pid, first + i) for i in range(count))
    assert serving.server.sent_bytes == 111 * PAGE_BYTES
    assert serving.server.error is None


def test_clients_at_once(serving: Serving) -> None:
    """Each of eight clients gets all the memory of its process, none the memory of another."""
    start = threading.Barrier(8)

    def fetch(pid: int) -> bool:
        with Client(serving.address) as client:
            start.wait(SECONDS_MAX)
            first = 0
            while first < SIZE_PAGES:
                client.ask(pid, first, SIZE_PAGES)
                header, data = client.answer()
                count = header.nr_pages
                assert data == b"".join(page(pid, first + i) for i in range(count))
                first += count
        return True

    clients = [on_thread(lambda pid=pid: fetch(pid)) for pid in range(1, 9)]  # type: ignore[misc]
    assert all(client.result(SECONDS_MAX) for client in clients)
    assert serving.errors == []


@pytest.mark.parametrize(
    ("sent", "kind", "why"),
    [
        (b"GET / HTTP/1.1\r\nHost: somewhere\r\n", ProtocolError, "unknown command"),
        (encode_header(PageHeader(Command.OPEN2, target=257)), ProtocolError, "only gives pages"),
        (encode_header(PageHeader(Command.GET, 0, 0, BASE, 7)), ProtocolError, "GET of 0 pages"),
        (encode_header(PageHeader(Command.GET, 0, 1, BASE - PAGE_BYTES, 7)), AgentError, "no page"),
        (encode_header(PageHeader(Command.CLOSE))[:5], ProtocolError, "after 5 of 32 bytes"),
    ],
)
def test_bad_clients_cost_only_themselves(
    serving: Serving, sent: bytes, kind: type[Exception], why: str
) -> None:
    with Client(serving.address) as good, Client(serving.address) as bad:
        bad.socket.sendall(sent)
        # It may have been hung up on already.
        with contextlib.suppress(OSError):
            bad.socket.shutdown(socket.SHUT_WR)
        assert bad.has_ended()
        until(lambda: bool(serving.errors))
        with pytest.raises(kind, match=why):
            raise serving.errors[0]
        assert serving.server.error is serving.errors[0]
        good.ask(1, 0, 1)
        assert good.answer()[1] == page(1, 0)


def test_clients_that_just_go_are_no_error(serving: Serving) -> None:
    with Client(serving.address) as client:
        client.ask(1, 0, 1)
        client.answer()
    with Client(serving.address) as client:
        client.ask(1, 0, 1)
        client.answer()
        assert serving.errors == []


def test_too_many_clients() -> None:
    made = Serving(clients_max=1)
    with made.server, Client(made.address) as first:
        first.ask(1, 0, 1)
        first.answer()
        with Client(made.address) as second:
            assert second.has_ended()
        until(lambda: bool(made.errors))
        with pytest.raises(AgentError, match="refused, 1 clients"):
            raise made.errors[0]
        first.ask(1, 1, 1)
        assert first.answer()[1] == page(1, 1)


@pytest.mark.slow
def test_close_ends_all(serving: Serving) -> None:
    """Goal: `close` from another thread ends clients that are idle, in the middle, or do not read.

    Method: one client of each kind; after `close` they see the end, no thread is left, nobody can
    connect, and no error was reported.
    """
    with (
        Client(serving.address) as idle,
        Client(serving.address) as cut,
        Client(serving.address) as deaf,
    ):
        for client in (idle, cut, deaf):
            client.ask(1, 0, 1)
            client.answer()
        cut.socket.sendall(b"12345")
        deaf.socket.settimeout(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                deaf.ask(1, 0, 100)
        serving.server.close()
        serving.server.close()
        assert idle.has_ended()
        assert cut.has_ended()
    assert not [thread for thread in threading.enumerate() if "page" in thread.name]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(serving.address, timeout=SECONDS_MAX)
    assert serving.errors == []
