"""The receiving end of a dump's pages, with peers that are slow, broken, or no CRIU at all."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from snapagent.criu.page_receiver import FIRST_PAGES_ID, PageReceiver, page_sockets
from snapagent.criu.protocol import (
    Command,
    ImageKind,
    PageFlag,
    PageHeader,
    PagesImage,
    encode_header,
    encode_image_id,
)
from snapagent.errors import AgentError, ProtocolError
from snapstore.units import PAGE_BYTES
from tests.support.peers import SECONDS_MAX, all_was_read, on_thread, send_slowly, until

TASK = encode_image_id(ImageKind.TASK, 7)
SHMEM = encode_image_id(ImageKind.SHMEM, 3)
BASE = 0x7F0000000000
LAZY = PageFlag.LAZY | PageFlag.PRESENT


class MemorySink:
    """Keeps everything, through a buffer whose size does not fit anything."""

    def __init__(self, buffer_bytes: int = 5000) -> None:
        self.calls: list[object] = []
        self.data: dict[PagesImage, bytes] = {}
        self.image = PagesImage(ImageKind.TASK, 0, 0)
        self.memory = memoryview(bytearray(buffer_bytes))

    def begin(self, image: PagesImage) -> None:
        self.image = image
        self.data[image] = b""
        self.calls.append(image)

    def entry(self, vaddr: int, nr_pages: int, flags: int) -> None:
        self.calls.append((vaddr, nr_pages, flags))

    def buffer(self) -> memoryview:
        return self.memory

    def advance(self, count: int) -> None:
        self.data[self.image] += self.memory[:count]

    def end(self) -> None:
        self.calls.append("end")


def opened(target: int = TASK) -> bytes:
    return encode_header(PageHeader(Command.OPEN2, target=target))


def pages(data: bytes, vaddr: int = BASE, flags: int = LAZY, target: int = TASK) -> bytes:
    count = len(data) // PAGE_BYTES
    return encode_header(PageHeader(Command.ADD_F, flags, count, vaddr, target)) + data


def closed(command: Command = Command.FORCE_CLOSE) -> bytes:
    return encode_header(PageHeader(command))


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = page_sockets()
    theirs.settimeout(SECONDS_MAX)
    with ours, theirs:
        yield ours, theirs


def content(label: int, count: int) -> bytes:
    return bytes([label]) * PAGE_BYTES * count


def test_a_session(sockets: tuple[socket.socket, socket.socket]) -> None:
    """Goal: everything arrives in order, and each question gets its answer.

    Method: play CRIU with a shared memory segment and a task, whose data fits no buffer.
    """
    ours, theirs = sockets
    sink = MemorySink()
    running = on_thread(PageReceiver(ours, sink).run)

    theirs.sendall(encode_header(PageHeader(Command.PARENT, target=TASK)))
    assert theirs.recv(100) == bytes(4)
    theirs.sendall(opened(SHMEM))
    assert theirs.recv(100) == b"\0"
    theirs.sendall(pages(content(1, 3), 0, PageFlag.PRESENT, SHMEM) + opened())
    assert theirs.recv(100) == b"\0"
    theirs.sendall(pages(content(2, 1)) + pages(content(3, 40), BASE + PAGE_BYTES) + closed())
    assert theirs.recv(100) == bytes(4)

    totals = running.result(SECONDS_MAX)
    assert (totals.images, totals.entries, totals.data_bytes) == (2, 3, 44 * PAGE_BYTES)
    shmem = PagesImage(ImageKind.SHMEM, 3, FIRST_PAGES_ID)
    task = PagesImage(ImageKind.TASK, 7, FIRST_PAGES_ID + 1)
    assert sink.calls == [
        shmem,
        (0, 3, PageFlag.PRESENT),
        "end",
        task,
        (BASE, 1, LAZY),
        (BASE + PAGE_BYTES, 40, LAZY),
        "end",
    ]
    assert sink.data == {shmem: content(1, 3), task: content(2, 1) + content(3, 40)}


def test_a_slow_peer(sockets: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = sockets
    sink = MemorySink()
    running = on_thread(PageReceiver(ours, sink).run)
    send_slowly(theirs, opened())
    send_slowly(theirs, pages(content(5, 1)))
    send_slowly(theirs, closed())
    assert running.result(SECONDS_MAX).data_bytes == PAGE_BYTES
    assert list(sink.data.values()) == [content(5, 1)]


def test_close_waits_for_the_end(sockets: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = sockets
    running = on_thread(PageReceiver(ours, MemorySink()).run)
    theirs.sendall(closed(Command.CLOSE))
    assert theirs.recv(4) == bytes(4)
    assert not running.done()
    theirs.close()
    assert running.result(SECONDS_MAX).images == 0


def header(command: Command, flags: int = 0, count: int = 1, target: int = TASK) -> bytes:
    return encode_header(PageHeader(command, flags, count, BASE, target))


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"", "without a CLOSE"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n123456", "unknown command"),
        (opened()[:31], "after 31 of 32 bytes"),
        (opened(), "without a CLOSE, after 1 images"),
        (opened() + pages(content(1, 2))[:-1], "bytes too soon"),
        (header(Command.GET), "GET in a session that receives"),
        (pages(content(1, 1)), "nothing is open"),
        (opened(SHMEM) + pages(content(1, 1)), "0x302 is open"),
        (opened() + opened(SHMEM) + opened(), "task 7 is opened twice"),
        (opened(TASK & ~0xFF | 9), "no image of kind 9"),
        (header(Command.PARENT, target=0), "no image of kind 0"),
        (opened() + header(Command.HOLE), "earlier dump"),
        (opened() + header(Command.ADD_F, PageFlag.PARENT), "earlier dump"),
        (opened() + header(Command.ADD_F, PageFlag.LAZY), "without their data"),
        (opened() + header(Command.ADD_F, 0x40), "unknown flags"),
        (opened() + header(Command.ADD_F, LAZY, 1 << 60), "ADD_F of 11529"),
        (closed(Command.CLOSE) + b"more", "more after its CLOSE"),
    ],
)
def test_peers_that_break_the_protocol(
    sockets: tuple[socket.socket, socket.socket], sent: bytes, why: str
) -> None:
    """The session ends with an error that says what was received, and so does the connection."""
    ours, theirs = sockets
    sink = MemorySink()
    theirs.sendall(sent)
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(ProtocolError, match=why):
        PageReceiver(ours, sink).run()
    while theirs.recv(4096):
        pass  # the answers before; then the end


def test_sink_errors_come_out_as_they_are(sockets: tuple[socket.socket, socket.socket]) -> None:
    class FullSink(MemorySink):
        def buffer(self) -> memoryview:
            raise OSError(28, "no space")

    ours, theirs = sockets
    theirs.sendall(opened() + pages(content(1, 1)))
    sink = FullSink()
    with pytest.raises(OSError, match="no space"):
        PageReceiver(ours, sink).run()
    assert "end" not in sink.calls
    assert theirs.recv(100) == b"\0"
    ours.close()
    # What was never read makes of the connection's end a reset.
    with pytest.raises(ConnectionError):
        theirs.recv(1)


@pytest.mark.parametrize("sent", [b"", opened()[:9], opened() + pages(content(1, 4))[:5000]])
def test_closed_while_it_waits(sockets: tuple[socket.socket, socket.socket], sent: bytes) -> None:
    ours, theirs = sockets
    receiver = PageReceiver(ours, MemorySink())
    running = on_thread(receiver.run)
    theirs.sendall(sent)
    until(lambda: all_was_read(theirs))
    receiver.close()
    receiver.close()
    with pytest.raises(AgentError, match="closed before"):
        running.result(SECONDS_MAX)


@pytest.mark.slow
def test_a_full_sink_stops_the_peer(sockets: tuple[socket.socket, socket.socket]) -> None:
    """Goal: nothing is read that the sink has no room for.

    Method: send without blocking until nothing fits any more while the sink waits, then let it go
    on and see that all arrives.
    """
    room, waits = threading.Event(), threading.Event()

    class BusySink(MemorySink):
        def buffer(self) -> memoryview:
            waits.set()
            assert room.wait(SECONDS_MAX)
            return super().buffer()

    ours, theirs = sockets
    running = on_thread(PageReceiver(ours, BusySink(1 << 20)).run)
    data = memoryview(opened() + pages(content(1, 4096)) + closed())
    assert theirs.send(data[:32]) == 32
    assert theirs.recv(1) == b"\0"
    left = data[32:]
    assert theirs.send(left[:32]) == 32
    left = left[32:]
    assert waits.wait(SECONDS_MAX)

    theirs.settimeout(0)
    with contextlib.suppress(BlockingIOError):
        while left:
            left = left[theirs.send(left[: 1 << 16]) :]
    assert len(left) > len(data) // 2
    room.set()
    theirs.settimeout(SECONDS_MAX)
    theirs.sendall(left)
    assert running.result(SECONDS_MAX).data_bytes == 4096 * PAGE_BYTES
