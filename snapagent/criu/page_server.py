"""A page server for plain `criu lazy-pages --page-server`: gives the pages it asks for.

One connection is one restore. CRIU has several requests under way, one in the background and one
for each page fault, and expects the answers in the order of the requests. An answer may hold fewer
pages than were asked for, since CRIU then asks for the rest: short answers let faults pass soon.
"""

from __future__ import annotations

import contextlib
import mmap
import select
import socket
import threading
from typing import TYPE_CHECKING, Protocol, Self

from snapagent.criu.protocol import (
    HEADER_BYTES,
    Command,
    PageFlag,
    PageHeader,
    decode_header,
    encode_header,
    encode_status,
)
from snapagent.criu.sessions import FirstError, WakeUp, receive, send, shut_down
from snapagent.errors import AgentError, ProtocolError
from snapstore.units import MIB, PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ANSWER_BYTES", "CLIENTS_MAX", "PageReader", "PageServer"]

ANSWER_BYTES = 1 * MIB
"""Of data in one answer at most, and the memory that a client costs. What a page fault waits for
when it arrives behind a request in the background."""

CLIENTS_MAX = 256


class PageReader(Protocol):
    """Where the pages come from. Called by several threads at once, one for each client."""

    def read(self, pid: int, vaddr: int, nr_pages_max: int, into: memoryview) -> int:
        """Put the pages of a task from an address on into `into`; return how many.

        At least one and at most `nr_pages_max`, which `into` has room for; up to wherever they
        stop to be easily had.

        Raises:
            SnapError: There is no page at that address, or it cannot be read. Ends the session of
                this client, whose CRIU fails then.
        """
        ...


class PageServer:
    """Serves all who connect, until it is closed. Methods are thread-safe."""

    def __init__(
        self,
        listener: socket.socket,
        reader: PageReader,
        *,
        answer_bytes: int = ANSWER_BYTES,
        clients_max: int = CLIENTS_MAX,
        on_error: Callable[[BaseException], None] | None = None,
    ) -> None:
        """Own a listening stream socket.

        Args:
            listener: Who may connect may read all memory: keep it to trusted networks.
            reader: Where the pages come from.
            answer_bytes: Of data in an answer at most; each client has a buffer of that size.
            clients_max: Further ones are hung up on.
            on_error: Called with each client's error, on that client's thread; the others go on.
        """
        self._listener = listener
        self._reader = reader
        self._answer_pages = max(1, answer_bytes // PAGE_BYTES)
        self._clients_max = clients_max
        self._on_error = on_error
        self._first_error = FirstError()
        self._wake_up = WakeUp()
        self._lock = threading.Lock()
        self._closing = threading.Lock()
        self._clients: dict[threading.Thread, socket.socket] = {}
        self._sent_bytes = 0
        self._thread = threading.Thread(target=self._accept_all, name="page-server", daemon=True)

    @property
    def error(self) -> BaseException | None:
        """The first error of any client, or of the listener."""
        return self._first_error.error

    @property
    def sent_bytes(self) -> int:
        """How many bytes of pages all clients together were sent."""
        with self._lock:
            return self._sent_bytes

    def start(self) -> None:
        """Accept clients on a thread. Call it once."""
        self._thread.start()

    def close(self) -> None:
        """Stop: no more clients, all connections ended, all threads gone. May be called again.

        Waits for readers that are at work; not for `on_error` to call.
        """
        self._wake_up.call()
        with self._closing:
            if self._thread.ident is not None:
                self._thread.join()
            with self._lock:
                clients = dict(self._clients)
            for connection in clients.values():
                shut_down(connection)
            for thread in clients:
                thread.join()
            self._listener.close()
            self._wake_up.close()

    def __enter__(self) -> Self:
        """Start it."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def _accept_all(self) -> None:
        # The wait, not `accept`, blocks: a client may be gone again before it is accepted.
        self._listener.settimeout(0)
        try:
            while self._wake_up.wait_for(self._listener.fileno(), select.POLLIN):
                with contextlib.suppress(BlockingIOError, ConnectionError):
                    connection, address = self._listener.accept()
                    self._begin(connection, f"{address[0]}:{address[1]}" if address else "a client")
        except BaseException as error:  # noqa: BLE001 - kept, and reported to the owner
            self._report(AgentError(f"the page server takes no more clients: {error}"))

    def _begin(self, connection: socket.socket, client: str) -> None:
        """Serve a client on a thread of its own."""
        connection.settimeout(None)
        thread = threading.Thread(
            target=self._serve, args=(connection, client), name=f"pages for {client}", daemon=True
        )
        # In the lock, so that a thread that ends at once finds itself among the clients.
        with self._lock:
            is_full = len(self._clients) >= self._clients_max
            if not is_full:
                thread.start()
                self._clients[thread] = connection
        if is_full:
            connection.close()
            self._report(AgentError(f"{client}: refused, {self._clients_max} clients are served"))

    def _serve(self, connection: socket.socket, client: str) -> None:
        try:
            with connection:
                # A Unix socket has no such delay, and no such option.
                with contextlib.suppress(OSError):
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._answer_all(connection)
        except ProtocolError as error:
            self._report(ProtocolError(f"{client}: {error}", next_step=error.next_step))
        except BaseException as error:  # noqa: BLE001 - kept, and reported to the owner
            self._report(error)
        finally:
            with self._lock:
                self._clients.pop(threading.current_thread(), None)

    def _answer_all(self, connection: socket.socket) -> None:
        """Answer requests in their order up to a CLOSE, or until the client just goes."""
        header = memoryview(bytearray(HEADER_BYTES))
        # The data begin with a page, which suits readers, and the header stands right before.
        memory = memoryview(mmap.mmap(-1, PAGE_BYTES + self._answer_pages * PAGE_BYTES))
        while receive(connection, header, "a request for pages"):
            request = decode_header(header)
            match request.command:
                case Command.GET:
                    self._answer(connection, request, memory)
                case Command.CLOSE | Command.FORCE_CLOSE:
                    send(connection, encode_status(0), "the answer to CLOSE")
                    # The client hangs up first, so that its port, not ours, lingers.
                    with contextlib.suppress(ConnectionError):
                        connection.recv(1)
                    return
                case _:
                    raise ProtocolError(
                        f"{request.command.name} in a session that only gives pages",
                        next_step="dump with snapagent capture, or to a page server of CRIU",
                    )

    def _answer(self, connection: socket.socket, request: PageHeader, memory: memoryview) -> None:
        """Send pages from the requested address on, at least one."""
        wanted = min(request.nr_pages, self._answer_pages)
        room = memory[PAGE_BYTES : PAGE_BYTES + wanted * PAGE_BYTES]
        count = self._reader.read(request.target, request.vaddr, wanted, room)
        if not 1 <= count <= wanted:
            raise AgentError(
                f"process {request.target}: {count} pages were read at {request.vaddr:#x}, "
                f"{wanted} were asked for"
            )
        answer = request._replace(command=Command.ADD_F, flags=PageFlag.PRESENT, nr_pages=count)
        start = PAGE_BYTES - HEADER_BYTES
        memory[start:PAGE_BYTES] = encode_header(answer)
        end = PAGE_BYTES + count * PAGE_BYTES
        send(connection, memory[start:end], f"{count} pages at {request.vaddr:#x}")
        with self._lock:
            self._sent_bytes += count * PAGE_BYTES

    def _report(self, error: BaseException) -> None:
        """Keep an error if it is the first, and call back unless the server is being closed."""
        if self._wake_up.called:
            return
        self._first_error.report(error)
        if self._on_error is not None:
            self._on_error(error)
