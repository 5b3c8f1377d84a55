"""The far end of `criu dump --stream` and `criu restore --stream`: images travel through pipes.

CRIU asks for one image after the other over a Unix socket in its images directory, and makes a
pipe for each. Several pipes are open at once and CRIU may use them in any order, so each has a
thread of its own and the thread that takes the requests never waits for any of them.

A restoring CRIU takes the end of a pipe for the end of an image and cannot tell a short one. So
where a source fails, its pipe stays open until `close`: whoever is told of the error ends CRIU
first and calls `close` then.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import select
import socket
import stat
import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Protocol, Self

from typing_extensions import override

from snapagent.criu.image_pipe import ImagePipe
from snapagent.criu.protocol import (
    IMAGES_MAX,
    LENGTH_BYTES,
    decode_request,
    decode_request_length,
    encode_reply,
)
from snapagent.criu.sessions import (
    FirstError,
    WakeUp,
    is_readable,
    receive,
    send,
    shut_down,
)
from snapagent.errors import AgentError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["CaptureStreamer", "ImageSink", "ImageSource", "RestoreStreamer"]

SOCKET_PATH_BYTES_MAX = 107
"""What fits in a Unix socket's address; CRIU uses the same path."""

_INT_BYTES = array.array("i").itemsize


class ImageSink(Protocol):
    """Where the images of a dump go."""

    def store(self, name: str, pipe: ImagePipe) -> None:
        """Read an image to its end and store it. Runs on a thread of its own for each image.

        Whatever it raises ends the session, and CRIU's dump with it. That the pipe ended does not
        say that the image is whole: CRIU may have died. What CRIU says after all images does.
        """
        ...


class ImageSource(Protocol):
    """Where the images of a restore come from."""

    def find(self, name: str) -> Callable[[ImagePipe], None] | None:
        """Return what writes an image into a pipe, or none if there is no such image.

        Must return at once: CRIU waits for it, and so does every other task that it restores.
        What it returns runs on a thread of its own. Whatever either raises ends the session.
        """
        ...


class _Streamer(ABC):
    """A listener, one session over it, and a thread for each image. Methods are thread-safe."""

    SOCKET_NAME: ClassVar[str]
    ACCESS: ClassVar[int]

    def __init__(
        self, directory: Path, on_error: Callable[[BaseException], None] | None = None
    ) -> None:
        """Listen in `directory`, CRIU's images directory, from now on.

        Args:
            directory: Where CRIU looks for the socket. The path must be short.
            on_error: Called once, on any thread, with the first error.

        Raises:
            AgentError: The path is too long for a socket, or nothing can be made there.
        """
        self._path = directory / self.SOCKET_NAME
        self._first_error = FirstError(on_error)
        self._wake_up = WakeUp()
        # Held while a request is taken, so that `settle` and the session's thread take turns.
        self._taking = threading.Lock()
        self._closing = threading.Lock()
        self._connected = threading.Event()
        self._connection: socket.socket | None = None
        self._count = 0
        self._failed_pipes: list[ImagePipe] = []
        self._image_threads: list[threading.Thread] = []
        self._listener = _listen(self._path)
        self._thread = threading.Thread(target=self._run, name=self.SOCKET_NAME, daemon=True)

    @property
    def error(self) -> BaseException | None:
        """The first error of any of the threads."""
        return self._first_error.error

    def start(self) -> None:
        """Wait for CRIU on a thread. Call it once."""
        self._thread.start()

    def join(self) -> None:
        """Wait until CRIU has ended the session and all images are through.

        Raises:
            Exception: The first error of any of the threads.
        """
        self._thread.join()
        self._join_images()
        self._first_error.raise_any()

    def close(self) -> None:
        """End the session if it still runs, wait for the threads, and remove the socket.

        A CRIU that restores must have ended before: it would take an image that ends early for
        a whole one. Waits for a sink or source that is busy with something else than its pipe.
        May be called again, but not by `on_error`, whose thread it would wait for.
        """
        self._wake_up.call()
        self._connected.set()
        with self._closing:
            # None yet: then the thread sees the wake-up before it reads anything.
            if self._connection is not None:
                shut_down(self._connection)
            if self._thread.ident is not None:
                self._thread.join()
            self._join_images()
            self._remove_listener()
            for pipe in self._failed_pipes:
                pipe.close()
            if self._connection is not None:
                self._connection.close()
            self._wake_up.close()

    def __enter__(self) -> Self:
        """Start it."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    # -- the session's thread ----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if self._wake_up.wait_for(self._listener.fileno(), select.POLLIN):
                self._connection, _ = self._listener.accept()
                # One session: whoever else connects is refused from now on.
                self._remove_listener()
                self._connected.set()
                while self._wake_up.wait_for(self._connection.fileno(), select.POLLIN):
                    if not self._take_ready():
                        break
        except BaseException as error:  # noqa: BLE001 - kept, and reported to the owner
            self._fail(error)
        finally:
            self._connected.set()

    def _take_ready(self) -> bool:
        """Take all requests that have arrived; false after the end of the session."""
        assert self._connection is not None
        with self._taking:
            while is_readable(self._connection.fileno()):
                if not self._take_request(self._connection):
                    return False
        return True

    def _take_request(self, connection: socket.socket) -> bool:
        head = memoryview(bytearray(LENGTH_BYTES))
        if not receive(connection, head, "a request for an image"):
            return False
        message = memoryview(bytearray(decode_request_length(head)))
        if not receive(connection, message, "a request for an image"):
            raise ProtocolError("image streamer: CRIU ended the session within a request")
        name = decode_request(message)
        self._serve(connection, name)
        return True

    @abstractmethod
    def _serve(self, connection: socket.socket, name: str) -> None:
        """Answer a request, take the pipe and begin with the image."""

    def _begin(self, name: str, fd: int, work: Callable[[ImagePipe], None]) -> None:
        """Work on an image on a thread of its own, which owns its pipe."""
        pipe = ImagePipe(name, fd, self._wake_up)
        thread = threading.Thread(
            target=self._work, args=(pipe, work), name=f"image {name}", daemon=True
        )
        # Those that are done need not be waited for; a large tree has a hundred thousand.
        self._image_threads = [other for other in self._image_threads if other.is_alive()]
        self._image_threads.append(thread)
        thread.start()

    def _work(self, pipe: ImagePipe, work: Callable[[ImagePipe], None]) -> None:
        try:
            # A broken pipe: CRIU has read as much as it wanted.
            with contextlib.suppress(BrokenPipeError):
                work(pipe)
        except BaseException as error:  # noqa: BLE001 - kept, and reported to the owner
            self._failed_pipes.append(pipe)
            self._fail(error)
        else:
            pipe.close()

    def _receive_pipe(self, connection: socket.socket, name: str) -> int:
        """Receive the descriptor of a pipe that CRIU has made for an image."""
        if self._count >= IMAGES_MAX:
            raise ProtocolError(f"image streamer: more than {IMAGES_MAX} images")
        self._count += 1
        fds = _receive_fds(connection, name)
        if len(fds) == 1 and _is_pipe(fds[0], self.ACCESS):
            return fds[0]
        for fd in fds:
            os.close(fd)
        raise ProtocolError(f"image streamer: what came for {name} is not the end of a pipe")

    def _fail(self, error: BaseException) -> None:
        """Report an error, unless it is one of ending the session on purpose."""
        if not self._wake_up.called:
            self._first_error.report(error)
        if self._connection is not None:
            shut_down(self._connection)

    def _join_images(self) -> None:
        with self._taking:
            threads = list(self._image_threads)
        for thread in threads:
            thread.join()

    def _remove_listener(self) -> None:
        if self._listener.fileno() >= 0:
            self._listener.close()
            self._path.unlink(missing_ok=True)


class CaptureStreamer(_Streamer):
    """Takes the images of `criu dump --stream`, 4.2 or later, and hands them to a sink."""

    SOCKET_NAME = "streamer-capture.sock"
    ACCESS = os.O_RDONLY

    def __init__(
        self,
        directory: Path,
        sink: ImageSink,
        on_error: Callable[[BaseException], None] | None = None,
    ) -> None:
        super().__init__(directory, on_error)
        self._sink = sink
        self._names: set[str] = set()

    def settle(self) -> int:
        """Wait until all images that CRIU has asked for so far are stored; return how many.

        Meant for the `post-dump` action, when CRIU has written the last one and waits, while the
        session goes on.

        Raises:
            Exception: The first error of any of the threads.
            AgentError: CRIU has not connected at all, and `close` was called.
        """
        self._connected.wait()
        if self._connection is None:
            self._first_error.raise_any()
            raise AgentError("image streamer: closed before CRIU connected")
        try:
            self._take_ready()
        except BaseException as error:
            self._fail(error)
            raise
        self._join_images()
        self._first_error.raise_any()
        return self._count

    @override
    def _serve(self, connection: socket.socket, name: str) -> None:
        if name in self._names:
            raise ProtocolError(f"image streamer: CRIU writes {name} a second time")
        self._names.add(name)
        fd = self._receive_pipe(connection, name)
        self._begin(name, fd, lambda pipe: self._sink.store(name, pipe))


class RestoreStreamer(_Streamer):
    """Gives `criu restore --stream`, 4.2 or later, the images it asks for, from a source."""

    SOCKET_NAME = "streamer-serve.sock"
    ACCESS = os.O_WRONLY

    def __init__(
        self,
        directory: Path,
        source: ImageSource,
        on_error: Callable[[BaseException], None] | None = None,
    ) -> None:
        super().__init__(directory, on_error)
        self._source = source

    @override
    def _serve(self, connection: socket.socket, name: str) -> None:
        write = self._source.find(name)
        send(connection, encode_reply(exists=write is not None), f"the answer for {name}")
        if write is not None:
            self._begin(name, self._receive_pipe(connection, name), write)


def _listen(path: Path) -> socket.socket:
    """Make a listening socket that only this user can connect to."""
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        raise AgentError(
            f"{path}: longer than {SOCKET_PATH_BYTES_MAX} bytes, which no socket's path can be",
            next_step="use a work directory with a shorter path",
        )
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(os.fspath(path))
        listener.listen(1)
    except OSError as error:
        listener.close()
        raise AgentError(f"{path}: cannot listen there: {error.strerror}") from error
    return listener


def _receive_fds(connection: socket.socket, name: str) -> list[int]:
    """Receive the one byte that descriptors come with, and the descriptors."""
    received = array.array("i")
    try:
        data, ancillary, flags, _ = connection.recvmsg(
            1, socket.CMSG_SPACE(2 * _INT_BYTES), socket.MSG_CMSG_CLOEXEC
        )
    except OSError as error:
        raise ProtocolError(f"image streamer: no pipe came for {name}: {error}") from error
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            received.frombytes(payload[: len(payload) // _INT_BYTES * _INT_BYTES])
    fds = received.tolist()
    if not data or flags & socket.MSG_CTRUNC:
        for fd in fds:
            os.close(fd)
        why = "the session ended" if not data else "more than one came, or no more can be open here"
        raise ProtocolError(f"image streamer: no pipe came for {name}: {why}")
    return fds


def _is_pipe(fd: int, access: int) -> bool:
    """Tell whether a descriptor is a pipe's end for reading or for writing alone."""
    is_fifo = stat.S_ISFIFO(os.fstat(fd).st_mode)
    return is_fifo and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == access
