"""The far end of `criu dump --page-server`: the memory of the dumped processes comes in here.

CRIU opens one image after the other, tasks and shared memory segments, and sends the entries of
its pagemap, each followed by its pages. They are received straight into memory of the sink. The
sink's backpressure is that of the whole chain: as long as it has no buffer, nothing is read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
from typing import Protocol

from snapagent.criu.pagemaps import ENTRIES_MAX
from snapagent.criu.protocol import (
    HEADER_BYTES,
    IMAGES_MAX,
    Command,
    PageFlag,
    PageHeader,
    PagesImage,
    decode_header,
    decode_image_id,
    encode_status,
)
from snapagent.criu.sessions import receive, send, shut_down
from snapagent.errors import AgentError, ProtocolError
from snapstore.units import MIB, PAGE_BYTES

__all__ = ["FIRST_PAGES_ID", "PageReceiver", "PageSink", "PageTotals", "page_sockets"]

FIRST_PAGES_ID = 0x10001
"""Where CRIU's own page server begins to number pages images. During such a dump, CRIU may write
some itself, numbered from one on."""

SOCKET_BUFFER_BYTES = 1 * MIB
"""What may be under way. CRIU sends runs of this size; the usual 208 KiB halve the rate."""

_NO_PARENT = b"\0"
_SO_SNDBUFFORCE = 32  # of Linux; Python does not name it


class PageSink(Protocol):
    """Where a dump's pages go. All calls come from the one thread that runs the receiver.

    Whatever a method raises ends the session, and CRIU's dump with it. An image whose `end` was
    not called is incomplete.
    """

    def begin(self, image: PagesImage) -> None:
        """Take what follows as this image."""
        ...

    def entry(self, vaddr: int, nr_pages: int, flags: int) -> None:
        """Take an entry of the pagemap; its data follows if the flags say `PRESENT`."""
        ...

    def buffer(self) -> memoryview:
        """Return memory to receive data into, at least one byte; may block until there is some."""
        ...

    def advance(self, count: int) -> None:
        """Take the first `count` bytes of the last buffer as the next of the image's data."""
        ...

    def end(self) -> None:
        """Take the image as complete."""
        ...


@dataclasses.dataclass(slots=True)
class PageTotals:
    """What came in during one session."""

    images: int = 0
    entries: int = 0
    data_bytes: int = 0


class PageReceiver:
    """One session with a dumping CRIU, 4.2 or later. `close` alone may be called by any thread."""

    def __init__(self, connection: socket.socket, sink: PageSink) -> None:
        """Prepare a session over a connected stream socket, which stays the caller's to close.

        For `--ps-socket`, `page_sockets` makes it, with the end that CRIU gets.
        """
        self._connection = connection
        self._sink = sink
        self._header = memoryview(bytearray(HEADER_BYTES))
        self._totals = PageTotals()
        self._opened: set[int] = set()
        self._current: int | None = None
        self._entries = 0
        self._closed = False

    def run(self) -> PageTotals:
        """Receive everything up to CRIU's `CLOSE`, and confirm it once the sink has it all.

        Returns only after that; CRIU's dump goes on to its `post-dump` script then. With any
        error the connection is ended, so that CRIU's dump fails and its source goes on.

        Raises:
            ProtocolError: CRIU, or whoever it is, sent what it must not, or ended too soon.
            AgentError: `close` was called.
            Exception: What the sink raised.
        """
        try:
            while not self._take_message():
                pass
        except BaseException as error:
            shut_down(self._connection)
            if self._closed and isinstance(error, ProtocolError):
                raise AgentError("page server: closed before the dump was through") from error
            raise
        return self._totals

    def close(self) -> None:
        """End the session if it still runs; `run` raises then, unless its sink blocks."""
        self._closed = True
        shut_down(self._connection)

    def _take_message(self) -> bool:
        """Receive one message and act on it; true after the last."""
        if not receive(self._connection, self._header, "a page server header"):
            raise ProtocolError(
                f"page server: CRIU ended the connection without a CLOSE, after "
                f"{self._totals.images} images and {self._totals.data_bytes} bytes",
                next_step="look into CRIU's log for why its dump ended",
            )
        header = decode_header(self._header)
        match header.command:
            case Command.OPEN:
                self._open(header)
            case Command.OPEN2:
                self._open(header)
                send(self._connection, _NO_PARENT, "the answer to OPEN2")
            case Command.PARENT:
                decode_image_id(header.target)
                send(self._connection, encode_status(0), "the answer to PARENT")
            case Command.ADD:
                self._add(header._replace(flags=PageFlag.PRESENT))
            case Command.ADD_F:
                self._add(header)
            case Command.CLOSE | Command.FORCE_CLOSE:
                self._finish(header.command)
                return True
            case Command.HOLE:
                raise _incremental(header)
            case Command.GET:
                raise ProtocolError("page server: GET in a session that receives pages")
        return False

    def _open(self, header: PageHeader) -> None:
        """Begin an image, which ends the one before."""
        kind, number = decode_image_id(header.target)
        if header.target in self._opened:
            raise ProtocolError(f"page server: {kind.name.lower()} {number} is opened twice")
        if len(self._opened) >= IMAGES_MAX:
            raise ProtocolError(f"page server: more than {IMAGES_MAX} images")
        self._end_current()
        image = PagesImage(kind, number, FIRST_PAGES_ID + len(self._opened))
        self._opened.add(header.target)
        self._current = header.target
        self._entries = 0
        self._totals.images += 1
        self._sink.begin(image)

    def _add(self, header: PageHeader) -> None:
        """Take one entry of the open image, and its pages."""
        if header.target != self._current:
            raise ProtocolError(
                f"page server: pages for {header.target:#x}, but "
                + ("nothing" if self._current is None else f"{self._current:#x}")
                + " is open"
            )
        if header.flags & PageFlag.PARENT:
            raise _incremental(header)
        if not header.flags & PageFlag.PRESENT:
            raise ProtocolError(
                f"page server: {header.nr_pages} pages from {header.vaddr:#x} on without their "
                f"data (flags {header.flags:#x})",
                next_step="dump without --lazy-pages",
            )
        if self._entries >= ENTRIES_MAX:
            raise ProtocolError(f"page server: more than {ENTRIES_MAX} entries in one pagemap")
        self._entries += 1
        self._totals.entries += 1
        self._sink.entry(header.vaddr, header.nr_pages, header.flags)
        self._receive_data(header.nr_pages * PAGE_BYTES)

    def _receive_data(self, left: int) -> None:
        """Receive that many bytes into buffers of the sink."""
        while left:
            buffer = self._sink.buffer()
            assert len(buffer), "a sink without a buffer waits, or raises"
            want = min(len(buffer), left)
            try:
                count = self._connection.recv_into(buffer, want, socket.MSG_WAITALL)
            except OSError as error:
                raise ProtocolError(f"page server: the connection broke: {error}") from error
            if not count:
                raise ProtocolError(f"page server: the connection ended {left} bytes too soon")
            self._sink.advance(count)
            self._totals.data_bytes += count
            left -= count

    def _end_current(self) -> None:
        if self._current is not None:
            self._sink.end()
            self._current = None

    def _finish(self, command: Command) -> None:
        """Confirm that everything is stored, and see the connection's end where there is one.

        After `FORCE_CLOSE` other processes may hold CRIU's end, so that nothing tells of it.
        """
        self._end_current()
        send(self._connection, encode_status(0), f"the answer to {command.name}")
        if command is Command.CLOSE:
            with contextlib.suppress(OSError):
                if self._connection.recv(1):
                    raise ProtocolError("page server: CRIU sent more after its CLOSE")


def page_sockets() -> tuple[socket.socket, socket.socket]:
    """Make the receiver's socket and the one that CRIU inherits for `--ps-socket`.

    The caller closes its own copy of CRIU's once CRIU has it, else nobody sees CRIU die.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Beyond what the machine allows everybody, for who may.
        theirs.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, SOCKET_BUFFER_BYTES)
    except PermissionError:
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
    return ours, theirs


def _incremental(header: PageHeader) -> ProtocolError:
    return ProtocolError(
        f"page server: {header.nr_pages} pages from {header.vaddr:#x} on are said to be in the "
        "images of an earlier dump, and there is none",
        next_step="dump without --track-mem and --prev-images-dir",
    )
