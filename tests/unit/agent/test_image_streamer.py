"""Both image streamers, with a CRIU played by the test: pipes in any order, failures, hostility."""

import contextlib
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import pytest

from snapagent.criu.image_pipe import ImagePipe
from snapagent.criu.image_streamer import CaptureStreamer, RestoreStreamer
from snapagent.criu.protocol import encode_request
from snapagent.errors import AgentError, ProtocolError
from snapstore.units import MIB
from tests.support.peers import SECONDS_MAX, all_was_read, on_thread, send_slowly, until
from tests.support.processes import open_fds

LARGE = bytes(range(256)) * (3 * MIB // 256)


@pytest.fixture
def place() -> Iterator[Path]:
    """Return a folder whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="stream-") as path:
        yield Path(path)


class MemoryImages:
    """A sink and a source in memory."""

    def __init__(self, images: dict[str, bytes] | None = None) -> None:
        self.images = images or {}

    def store(self, name: str, pipe: ImagePipe) -> None:
        buffer = memoryview(bytearray(100_000))
        data = b""
        while count := pipe.read_into(buffer):
            data += buffer[:count]
        self.images[name] = data

    def find(self, name: str) -> Callable[[ImagePipe], None] | None:
        if name not in self.images:
            return None
        return lambda pipe: pipe.write(self.images[name])


class Peer:
    """What CRIU does at its end."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(SECONDS_MAX)
        try:
            self.socket.connect(str(path))
        except OSError:
            self.socket.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def give_fds(self, *fds: int) -> None:
        socket.send_fds(self.socket, [b"\0"], list(fds))

    def dump(self, name: str) -> int:
        """Ask for an image to be stored; return the end to write it into."""
        self.socket.sendall(encode_request(name))
        read_end, write_end = os.pipe()
        self.give_fds(read_end)
        os.close(read_end)
        return write_end

    def ask(self, name: str) -> bool:
        """Ask for an image; return whether it exists."""
        self.socket.sendall(encode_request(name))
        reply = self.socket.recv(6, socket.MSG_WAITALL)
        assert reply[:5] == b"\2\0\0\0\x08"
        return reply[5] == 1

    def open(self, name: str) -> int:
        """Ask for an image that exists; return the end to read it from."""
        assert self.ask(name)
        read_end, write_end = os.pipe()
        self.give_fds(write_end)
        os.close(write_end)
        return read_end

    def has_ended(self) -> bool:
        with contextlib.suppress(ConnectionError):
            return self.socket.recv(1) == b""
        return True


def write_all(fd: int, data: bytes) -> None:
    with os.fdopen(fd, "wb") as pipe:
        pipe.write(data)


def read_all(fd: int) -> bytes:
    with os.fdopen(fd, "rb") as pipe:
        return pipe.read()


def no_threads_left() -> bool:
    names = [thread.name for thread in threading.enumerate()]
    return not [name for name in names if name.startswith(("image ", "streamer-"))]


# -- capture --------------------------------------------------------------------------------------


def test_capture_takes_images_in_any_order(place: Path) -> None:
    """Goal: several images are open at once and end in another order than they began.

    Method: write a large one whole while an earlier one is open and not yet written.
    """
    sink = MemoryImages()
    with CaptureStreamer(place, sink) as streamer:
        with Peer(place / "streamer-capture.sock") as criu:
            first = criu.dump("core-1.img")
            second = criu.dump("pages-1.img")
            write_all(second, LARGE)
            write_all(first, b"core")
            write_all(criu.dump("inventory.img"), b"")
            assert streamer.settle() == 3
            expected = {"core-1.img": b"core", "pages-1.img": LARGE, "inventory.img": b""}
            assert sink.images == expected
        streamer.join()
    assert no_threads_left()
    assert list(place.iterdir()) == []


def test_settle_takes_what_was_not_yet_looked_at(place: Path) -> None:
    """Goal: after `settle` nothing is missing that CRIU had sent and closed before.

    Method: many sessions' worth of images, each sent and written before it is asked for.
    """
    sink = MemoryImages()
    with (
        CaptureStreamer(place, sink) as streamer,
        Peer(place / "streamer-capture.sock") as criu,
    ):
        for number in range(50):
            write_all(criu.dump(f"mm-{number}.img"), b"mm")
            assert streamer.settle() == number + 1
            assert len(sink.images) == number + 1


def test_capture_sink_error(place: Path) -> None:
    """What a sink raises is reported once; CRIU's pipe breaks, and so does its session."""

    class FullSink(MemoryImages):
        def store(self, name: str, pipe: ImagePipe) -> None:
            raise OSError(28, f"no space for {name}")

    errors: list[BaseException] = []
    streamer = CaptureStreamer(place, FullSink(), errors.append)
    with streamer, Peer(place / "streamer-capture.sock") as criu:
        write_end = criu.dump("core-1.img")
        assert criu.has_ended()
        with pytest.raises(OSError, match="no space for core-1"):
            streamer.settle()
        with pytest.raises(OSError, match="no space for core-1"):
            streamer.join()
        streamer.close()
        with pytest.raises(BrokenPipeError):
            os.write(write_end, b"1")
        os.close(write_end)
    assert errors == [streamer.error]


def begin(*parts: bytes) -> Callable[[Peer], None]:
    return lambda criu: criu.socket.sendall(b"".join(parts))


def send_two_descriptors(criu: Peer) -> None:
    criu.socket.sendall(encode_request("core-1.img"))
    ends = os.pipe()
    criu.give_fds(*ends)
    for end in ends:
        os.close(end)


def send_wrong_descriptor(criu: Peer) -> None:
    criu.socket.sendall(encode_request("core-1.img"))
    criu.give_fds(criu.socket.fileno())


def send_wrong_end(criu: Peer) -> None:
    criu.socket.sendall(encode_request("core-1.img"))
    ends = os.pipe()
    criu.give_fds(ends[1])
    for end in ends:
        os.close(end)


def send_many_descriptors(criu: Peer) -> None:
    criu.socket.sendall(encode_request("core-1.img"))
    criu.give_fds(*[criu.socket.fileno()] * 40)


def send_twice(criu: Peer) -> None:
    os.close(criu.dump("core-1.img"))
    criu.socket.sendall(encode_request("core-1.img"))


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (begin(b"\xff\xff\xff\xff"), "a request of 4294967295 bytes"),
        (begin(b"\x03\0\0\0abc"), "no request for an image: 616263"),
        (begin(encode_request("x" * 100).replace(b"xx", b"x/")), "cannot be an image's name"),
        (begin(encode_request("core-1.img")[:9]), "ended after 5 of 12 bytes"),
        (begin(encode_request("core-1.img")[:4]), "within a request"),
        (begin(encode_request("core-1.img")), "no pipe came for core-1.img: the session ended"),
        (begin(encode_request("core-1.img"), b"\0"), "what came for core-1.img is not"),
        (send_two_descriptors, "what came for core-1.img is not"),
        (send_wrong_descriptor, "what came for core-1.img is not"),
        (send_wrong_end, "what came for core-1.img is not"),
        (send_many_descriptors, "more than one came"),
        (send_twice, "core-1.img a second time"),
    ],
)
def test_peers_that_break_the_protocol(place: Path, act: Callable[[Peer], None], why: str) -> None:
    """The session ends, the error says what was received, and no descriptor is left."""
    before = open_fds()
    with CaptureStreamer(place, MemoryImages()) as streamer:
        with Peer(place / "streamer-capture.sock") as criu:
            act(criu)
            # It may have been hung up on already.
            with contextlib.suppress(OSError):
                criu.socket.shutdown(socket.SHUT_WR)
            assert criu.has_ended()
        with pytest.raises(ProtocolError, match=why):
            streamer.join()
    assert open_fds() == before
    assert no_threads_left()


def test_slow_requests(place: Path) -> None:
    sink = MemoryImages()
    with CaptureStreamer(place, sink) as streamer:
        with Peer(place / "streamer-capture.sock") as criu:
            send_slowly(criu.socket, encode_request("fs-1.img"))
            ends = os.pipe()
            criu.give_fds(ends[0])
            os.close(ends[0])
            write_all(ends[1], b"fs")
        streamer.join()
    assert sink.images == {"fs-1.img": b"fs"}


# -- restore --------------------------------------------------------------------------------------


def test_restore_serves_images_in_any_order(place: Path) -> None:
    """Goal: CRIU may leave an image unread while it reads others, and stop in the middle of one.

    Method: open three, read the last first, and close the first unread.
    """
    images = {"core-1.img": LARGE, "pages-1.img": LARGE[1:], "mm-1.img": b""}
    with RestoreStreamer(place, MemoryImages(images)) as streamer:
        with Peer(place / "streamer-serve.sock") as criu:
            assert not criu.ask("memfd.img")
            fds = {name: criu.open(name) for name in images}
            assert read_all(fds["mm-1.img"]) == b""
            assert read_all(fds["pages-1.img"]) == LARGE[1:]
            os.close(fds["core-1.img"])
            # An image may be asked for again.
            assert read_all(criu.open("core-1.img")) == LARGE
        streamer.join()
        assert streamer.error is None
    assert no_threads_left()
    assert list(place.iterdir()) == []


def test_failed_image_never_looks_whole(place: Path) -> None:
    """Goal: CRIU, which takes the end of a pipe for the end of an image, sees none.

    Method: a source writes half an image and fails. The error is reported and the session over,
    but reading the rest blocks until the owner closes the streamer.
    """

    class BadDisk(MemoryImages):
        def find(self, name: str) -> Callable[[ImagePipe], None] | None:
            def write(pipe: ImagePipe) -> None:
                pipe.write(b"half")
                raise OSError(5, "a bad disk")

            return write

    errors: list[BaseException] = []
    streamer = RestoreStreamer(place, BadDisk(), errors.append)
    with streamer, Peer(place / "streamer-serve.sock") as criu:
        read_end = criu.open("pagemap-1.img")
        assert criu.has_ended()
        with pytest.raises(OSError, match="a bad disk"):
            streamer.join()
        assert os.read(read_end, 100) == b"half"
        os.set_blocking(read_end, False)
        with pytest.raises(BlockingIOError):
            os.read(read_end, 100)
        streamer.close()
        assert os.read(read_end, 100) == b""
        os.close(read_end)
    assert errors == [streamer.error]


def test_source_that_cannot_look(place: Path) -> None:
    class NoIndex(MemoryImages):
        def find(self, name: str) -> Callable[[ImagePipe], None] | None:
            raise AgentError(f"cannot look for {name}")

    with RestoreStreamer(place, NoIndex()) as streamer:
        with Peer(place / "streamer-serve.sock") as criu:
            criu.socket.sendall(encode_request("core-1.img"))
            assert criu.has_ended()
        with pytest.raises(AgentError, match="cannot look for core-1"):
            streamer.join()


# -- ending ---------------------------------------------------------------------------------------


def test_closed_before_anybody_came(place: Path) -> None:
    streamer = CaptureStreamer(place, MemoryImages())
    streamer.close()
    with CaptureStreamer(place, MemoryImages()) as streamer:
        settling = on_thread(streamer.settle)
    with pytest.raises(AgentError, match="closed before CRIU"):
        settling.result(SECONDS_MAX)
    with pytest.raises(AgentError, match="closed before CRIU"):
        streamer.settle()
    assert list(place.iterdir()) == []
    streamer.close()


@pytest.mark.parametrize("cut", [0, 2, 9])
def test_closed_while_it_waits_for_a_request(place: Path, cut: int) -> None:
    streamer = CaptureStreamer(place, MemoryImages())
    with streamer, Peer(place / "streamer-capture.sock") as criu:
        os.close(criu.dump("core-1.img"))
        criu.socket.sendall(encode_request("core-2.img")[:cut])
        until(lambda: all_was_read(criu.socket))
        streamer.close()
        assert criu.has_ended()
    assert streamer.error is None
    assert no_threads_left()


def test_closed_while_pipes_block(place: Path) -> None:
    """Goal: threads that wait for CRIU at a pipe end with `close`, though CRIU lives.

    Method: open an image for dumping and write half of it; open one for restoring and read half.
    """
    streamers = (
        CaptureStreamer(place, MemoryImages()),
        RestoreStreamer(place, MemoryImages({"pages-1.img": LARGE})),
    )
    with (
        streamers[0],
        streamers[1],
        Peer(place / "streamer-capture.sock") as dumping,
        Peer(place / "streamer-serve.sock") as restoring,
    ):
        write_end = dumping.dump("pages-1.img")
        os.write(write_end, b"half")
        read_end = restoring.open("pages-1.img")
        assert os.read(read_end, 4) == LARGE[:4]
        for streamer in streamers:
            streamer.close()
            assert streamer.error is None
        os.close(write_end)
        os.close(read_end)
    assert no_threads_left()


def test_one_session_and_no_more(place: Path) -> None:
    path = place / "streamer-capture.sock"
    with CaptureStreamer(place, MemoryImages()) as streamer, Peer(path) as criu:
        os.close(criu.dump("core-1.img"))
        streamer.settle()
        with pytest.raises(FileNotFoundError):
            Peer(path)


def test_paths_that_are_too_long(place: Path) -> None:
    with pytest.raises(AgentError, match="longer than 107 bytes"):
        CaptureStreamer(place / ("x" * 100), MemoryImages())
    with pytest.raises(AgentError, match="cannot listen there"):
        RestoreStreamer(place / "absent", MemoryImages())
