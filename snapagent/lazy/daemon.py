"""The lazy-pages daemon of a restore: CRIU connects, the processes run, their memory follows.

Threads: one starts the others, speaks with CRIU and sees to the filling (`_oversee`), one reads
events, some serve faults, some fill in the background. The first error of any stops them all and
leaves the userfaultfds open, so that whoever touches missing memory waits: nobody ever runs on
zeros that should be data. What to do then is the owner's decision; `close` only after the
processes are dead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import threading
from typing import TYPE_CHECKING

from snapagent.errors import AgentError, ProtocolError
from snapagent.lazy.events import EventLoop
from snapagent.lazy.faults import FaultQueue, FaultServer
from snapagent.lazy.fill import LocalReader, PartFiller, WorkList, left_over, plan_parts
from snapagent.lazy.handshake import SOCKET_NAME, listen, receive_tasks
from snapagent.lazy.memory import missing_memory
from snapagent.lazy.stats import LazyStats, PageRun, Recorder, Tally
from snapagent.lazy.task import LiveTask
from snapagent.precedence import Precedence
from snapstore.units import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType
    from typing import Self

    from snapagent.lazy.fill import Part, PartReader
    from snapagent.lazy.memory import PagesFile, TaskMemory

__all__ = ["LazyPages"]

FAULT_THREADS = 4
"""They mostly wait for the store; more of them do not make one fault faster."""

RECORDED_RUNS_MAX = 1 << 17
"""Of 64 KiB: what a process touches later than 8 GB is no start any more."""
FIRST_PAUSE_S, PAUSE_S = 0.1, 0.005
"""How long filling waits at most for processes that fault. What they touch first decides when they
answer, and they share the processors with it. Later it waits for less time than a part takes, so
that a process that never stops faulting slows it down but does not stop it."""


class LazyPages:
    """Fills the memory of the processes of one restore. Thread-safe."""

    def __init__(  # noqa: PLR0913 - all but the first two are settings with names
        self,
        directory: Path,
        tasks: Mapping[int, TaskMemory],
        *,
        threads: int,
        buffer_bytes: int,
        hold: Callable[[int], None],
        on_error: Callable[[BaseException], None],
        fill: bool = True,
        order: Sequence[tuple[str, int, int]] = (),
        record: bool = False,
        precedence: Precedence | None = None,
        readers: Callable[[threading.Event], PartReader] | None = None,
    ) -> None:
        """Prepare; nothing runs before `start`.

        Args:
            directory: CRIU's work directory, where the socket will be.
            tasks: Memory by process id in the images; only dead tasks may be left out.
            threads: How many fill in the background, each with a buffer.
            buffer_bytes: Size of such a buffer, whole pages; 8 MiB is good.
            hold: Gets each userfaultfd, also of forked children, before any of its memory is
                touched, to keep a duplicate elsewhere: so that missing memory does not turn into
                zeros if this process dies. It must not keep the number itself.
            on_error: Gets the first error, once, on some thread. It must not call `close`.
            fill: Fill in the background once CRIU has restored all tasks; else only after
                `start_fill`.
            order: Image, first page and number of pages, as they may be needed first.
            record: Keep in which order pages were asked for.
            precedence: Taken while it fills in the background.
            readers: Makes what reads for a thread that fills, into a buffer as large, until the
                event is set. By default each reads itself.

        Raises:
            AgentError: A pagemap says what cannot be.
        """
        assert threads >= 1, threads
        assert buffer_bytes > 0, buffer_bytes
        assert buffer_bytes % PAGE_BYTES == 0, buffer_bytes
        self._directory = directory
        self._memories = dict(tasks)
        self._spaces = {pid: missing_memory(memory) for pid, memory in tasks.items()}
        self._files: dict[str, PagesFile] = {m.image: m.file for m in tasks.values()}
        # By image. Lists are only ever appended to, see `PartFiller.fill`.
        self._tasks: dict[str, list[LiveTask]] = {image: [] for image in self._files}
        self._thread_count = threads
        self._buffer_bytes = buffer_bytes
        self._hold = hold
        self._on_error = on_error
        self._order = order
        self._precedence = precedence or Precedence()
        self._readers = readers or (lambda _: LocalReader(self._files, buffer_bytes))
        self._tally = Tally()
        self._recorder = Recorder(RECORDED_RUNS_MAX) if record else None
        self._stop = threading.Event()
        self._may_fill = threading.Event()
        if fill:
            self._may_fill.set()
        self._restored = threading.Event()
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._closing = threading.Lock()
        self._is_closed = False
        self._waiting = FaultQueue()
        self._events = EventLoop(self._waiting, self._tally, self._adopt)
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._received: set[int] = set()

    # -- for the owner ----------------------------------------------------------------------------

    def start(self) -> None:
        """Listen for CRIU and begin to serve; returns at once. Only then may CRIU be started.

        Raises:
            AgentError: The socket cannot be made.
        """
        try:
            self._sockets.append(listen(self._directory))
        except OSError as error:
            raise AgentError(
                f"cannot listen at {SOCKET_NAME} in {self._directory}: {error.strerror}",
                next_step="give a directory that exists and can be written",
            ) from error
        self._spawn("lazy-oversee", self._oversee)

    def wait_restored(self, timeout_s: float | None = None) -> bool:
        """Wait until CRIU has restored all tasks, which do not run yet; returns whether it has.

        Raises:
            SnapError: What stopped it.
        """
        return self._wait(self._restored, timeout_s) and self.stats.restored_s is not None

    def start_fill(self) -> None:
        """Begin to fill in the background, if that was not to be from the start. Idempotent."""
        self._may_fill.set()

    def wait_filled(self, timeout_s: float | None = None) -> bool:
        """Wait until no memory is missing; returns whether.

        Duplicates of the userfaultfds can be closed now, and then this be closed. In this order:
        while one of them is open and nobody serves it, whoever touches memory that was never used
        before waits.

        Raises:
            SnapError: What stopped it.
        """
        return self._wait(self._over, timeout_s) and self.stats.filled_s is not None

    def unwatch(self) -> None:
        """Let nobody wait for this daemon any more, once no memory is missing.

        Else whoever touches memory that was never used before waits for zeros of it, for as long
        as it or a duplicate of a userfaultfd is open. For tasks none of which has run yet.
        """
        for task in self._all_tasks():
            task.unwatch()

    @property
    def error(self) -> BaseException | None:
        """What stopped it, if something has."""
        return self._error

    @property
    def stats(self) -> LazyStats:
        """Counts of now."""
        dropped = sum(task.dropped_bytes for task in self._all_tasks())
        return dataclasses.replace(self._tally.read(), dropped_bytes=dropped)

    @property
    def recorded_order(self) -> list[PageRun]:
        """In which order pages were asked for, for as much as was recorded."""
        return self._recorder.read() if self._recorder is not None else []

    def close(self) -> None:
        """End all threads and close all userfaultfds. Idempotent.

        Memory that is missing reads as zeros from then on, unless there are duplicates: then who
        touches it waits.
        """
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
            self._halt()
            # The first one starts all others, so the list is complete when that has ended.
            for thread in self._threads:
                thread.join()
            for task in self._all_tasks():
                task.close()
            self._events.close()
            for each in self._sockets:
                each.close()
            with contextlib.suppress(FileNotFoundError):
                (self._directory / SOCKET_NAME).unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- threads ----------------------------------------------------------------------------------

    def _spawn(self, name: str, body: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                body()
            except BaseException as error:  # noqa: BLE001 - handed to the owner
                self._fail(error)

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)
        return thread

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            is_first = self._error is None and not self._stop.is_set()
            if is_first:
                self._error = error
                self._stop.set()
        self._halt()
        if is_first:
            self._on_error(error)

    def _halt(self) -> None:
        """Let all threads end soon."""
        self._stop.set()
        self._end_servers()
        for each in self._sockets.copy():
            # Wakes whoever waits for it.
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for event in (self._may_fill, self._restored, self._over):
            event.set()

    def _end_servers(self) -> None:
        self._events.end()
        self._waiting.end(FAULT_THREADS)

    def _wait(self, event: threading.Event, timeout_s: float | None) -> bool:
        happened = event.wait(timeout_s)
        if self._error is not None:
            raise self._error
        return happened

    def _all_tasks(self) -> list[LiveTask]:
        return [task for tasks in self._tasks.values() for task in tasks]

    def _oversee(self) -> None:
        """Start all others, speak with CRIU, and fill."""
        for number in range(FAULT_THREADS):
            self._spawn(f"lazy-fault-{number}", self._serve_faults)
        self._spawn("lazy-events", self._events.run)
        plan: list[Part] = []
        planner = self._spawn("lazy-plan", lambda: plan.extend(self._plan()))
        self._speak()
        planner.join()
        self._may_fill.wait()
        # The processes are about to run.
        self._waiting.expect()
        with self._precedence.taken():
            self._fill(plan)
            while not self._stop.is_set() and (
                parts := left_over(self._all_tasks(), self._buffer_bytes)
            ):
                self._fill(parts)
        if not self._stop.is_set():
            self._tally.happened("filled_s")
            self._over.set()

    def _plan(self) -> list[Part]:
        spaces = [(self._memories[pid].image, space) for pid, space in self._spaces.items()]
        return plan_parts(self._files, spaces, self._order, self._buffer_bytes)

    def _speak(self) -> None:
        """Take the tasks from CRIU."""
        try:
            connection, _ = self._sockets[0].accept()
        except OSError as error:
            raise ProtocolError(f"{SOCKET_NAME}: {error.strerror}") from error
        self._sockets.append(connection)
        if self._stop.is_set():
            return
        receive_tasks(connection, self._receive)
        self._tally.happened("restored_s")
        self._restored.set()
        for each in self._sockets:
            each.close()

    def _receive(self, pid: int, fd: int) -> None:
        memory, space = self._memories.get(pid), self._spaces.get(pid)
        if memory is None or space is None or pid in self._received:
            os.close(fd)
            raise ProtocolError(
                f"{SOCKET_NAME}: process {pid} was announced, which is not one to expect",
                next_step="restore the images that the daemon was started for",
            )
        self._received.add(pid)
        # Of the original, since that serves for the plan.
        self._adopt(LiveTask(memory, fd, space.fork()))

    def _adopt(self, task: LiveTask) -> None:
        """Take responsibility for a task; for a child, while its parent's books stand still."""
        self._tasks[task.memory.image].append(task)
        self._tally.add(tasks=1)
        self._hold(task.fd)
        self._events.add(task)

    def _serve_faults(self) -> None:
        server = FaultServer(self._waiting, self._tally, self._recorder, self._stop)
        try:
            server.run()
        finally:
            server.close()

    def _fill(self, parts: Sequence[Part]) -> None:
        """Fill parts by some threads, and wait for these."""
        work = WorkList(parts)
        workers = [
            self._spawn(f"lazy-fill-{number}", lambda: self._work(work))
            for number in range(min(self._thread_count, len(parts)))
        ]
        for worker in workers:
            worker.join()

    def _work(self, work: WorkList) -> None:
        filler = PartFiller(self._readers(self._stop), self._stop)
        pause_s = FIRST_PAUSE_S
        try:
            while not self._stop.is_set() and (part := work.take()) is not None:
                self._waiting.wait_until_quiet(self._stop, pause_s)
                pause_s = PAUSE_S
                tasks = self._tasks[part.image]
                fill_bytes, zero_bytes = filler.fill(part, tasks)
                self._tally.add(fill_bytes=fill_bytes, zero_bytes=zero_bytes)
                for task in tasks:
                    if task.is_gone and not task.is_closed:
                        self._events.drop(task)
        finally:
            filler.close()
            self._tally.add(read_s=filler.read_s, copy_s=filler.copy_s)
