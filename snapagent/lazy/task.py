"""One living task whose memory is being filled: its userfaultfd, and what it still misses.

**The discipline of copies and events.** A copy looks up where data belong and then fills them in;
an event changes where they belong. From the moment a task begins to fork, move, unmap or discard
memory until the event has been read *and* the task's thread runs again, the kernel refuses copies
(`EAGAIN`). So a copy can only go wrong if an event is read between its look-up and its call: then
it would put old data where the task discarded or moved memory. Copies share a lock for look-up and
call together, and events are read, and applied, by its owner alone. A copy is at most 2 MiB
(`COPY_BYTES`) so that nobody waits for long. What was copied is taken off the books in the same
hold of the lock, so the books that a forked child inherits are exact.
"""

from __future__ import annotations

import enum
import errno
import os
import threading
from typing import TYPE_CHECKING, NamedTuple

from snapagent.errors import AgentError
from snapagent.lazy.shared_lock import SharedLock
from snapagent.linux import userfaultfd
from snapagent.linux.userfaultfd import Event, Message
from snapstore.units import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from snapagent.lazy.address_space import AddressSpace, Run
    from snapagent.lazy.memory import TaskMemory

__all__ = ["COPY_BYTES", "LiveTask", "Outcome"]

COPY_BYTES = 2 << 20
_RUNS_AT_ONCE = 64
_ZERO_BYTES = 64 << 10


class Outcome(enum.Enum):
    """How an attempt to fill memory ended."""

    DONE = enum.auto()
    """Nothing is missing there any more."""
    MORE = enum.auto()
    """Some was filled, and there may be more."""
    CHANGING = enum.auto()
    """The task is changing its mappings: look again after a moment."""


class _Filled(NamedTuple):
    covered_bytes: int
    """How much from the start on needs nothing more."""
    copied_bytes: int
    is_changing: bool


class LiveTask:
    """A restored task or a descendant of one. Thread-safe.

    Attributes:
        memory: What it was restored from.
        fd: Its userfaultfd; owned, and closed by `close`.
        is_gone: The process has ended: nothing can be filled any more.
        is_closed: The descriptor is closed.
        dropped_bytes: Missing memory that turned out to be mapped no more.
    """

    def __init__(self, memory: TaskMemory, fd: int, space: AddressSpace) -> None:
        self.memory = memory
        self.fd = fd
        self.is_gone = False
        self.is_closed = False
        self.dropped_bytes = 0
        self._space = space
        self._lock = SharedLock()
        # The books themselves are changed by several sharers of the lock above.
        self._books = threading.Lock()

    @property
    def missing_bytes(self) -> int:
        """How much of its memory is missing."""
        with self._books:
            return self._space.missing_bytes

    def missing_spans(self) -> list[tuple[int, int]]:
        """Return the parts of the image that it misses."""
        with self._books:
            return self._space.missing_spans()

    def misses(self, offset: int, end: int) -> bool:
        """Tell whether it misses anything of a part of the image."""
        with self._books:
            return self._space.misses(offset, end)

    def find(self, address: int) -> Run | None:
        """Return all that is missing in one piece around an address, if that is missing."""
        with self._books:
            return self._space.find(address)

    def discard(self, offset: int, end: int) -> int:
        """Leave a part of the image to the kernel, whose fresh pages are zeros; returns bytes."""
        with self._lock.shared(), self._books:
            return self._space.fill(offset, end - offset)

    def read_events(self, on_fork: Callable[[LiveTask], None]) -> tuple[list[int], int]:
        """Read what the kernel has to tell, and apply it.

        Args:
            on_fork: Gets a forked child. The books of parent and child stand still meanwhile.

        Returns:
            Addresses that threads wait for, and the number of other events.

        Raises:
            AgentError: The descriptor cannot be read.
        """
        faults: list[int] = []
        events = 0
        with self._lock.owned():
            if self.is_closed:
                return [], 0
            try:
                messages = userfaultfd.read_messages(self.fd)
            except OSError as error:
                raise AgentError(
                    f"cannot read the events of process {self.memory.pid}: {error.strerror}",
                    next_step="allow more open files if there are too many",
                ) from error
            for message in messages:
                if message.event == Event.PAGEFAULT:
                    faults.append(message.second & -PAGE_BYTES)
                else:
                    events += 1
                    with self._books:
                        self._apply(message, on_fork)
        return faults, events

    def _apply(self, message: Message, on_fork: Callable[[LiveTask], None]) -> None:
        if message.event == Event.FORK:
            on_fork(LiveTask(self.memory, message.first, self._space.fork()))
        elif message.event == Event.REMAP:
            self._space.remap(message.first, message.second, message.third)
        elif message.event in (Event.REMOVE, Event.UNMAP):
            # The range stays watched: to give that up could hit memory that was moved there
            # meanwhile. Faults in it get zeros.
            self._space.remove(message.first, message.second)
        else:
            raise AgentError(
                f"the kernel tells of event {message.event:#x} in process {self.memory.pid}, "
                "which nobody asked for",
                next_step="report this",
            )

    def copy(self, offset: int, length: int, source: int) -> tuple[Outcome, int]:
        """Fill what is missing of a part of the image, up to `COPY_BYTES` of it.

        Args:
            offset: Where in the image the part begins.
            length: How long it is.
            source: Address of its bytes in this process.

        Returns:
            Whether there is more to do, and how much was copied.
        """
        copied = 0
        with self._lock.shared():
            with self._books:
                runs = self._space.runs(offset, offset + length, COPY_BYTES)
            for run in runs[:_RUNS_AT_ONCE]:
                filled = self._copy_run(run, source + run.offset - offset)
                with self._books:
                    self._space.fill(run.offset, filled.covered_bytes)
                copied += filled.copied_bytes
                if filled.is_changing:
                    return Outcome.CHANGING, copied
        return (Outcome.MORE if runs else Outcome.DONE), copied

    def _copy_run(self, run: Run, source: int) -> _Filled:
        """Copy one run, piece by piece where the kernel wants it so."""
        done = copied = 0
        absent_at = -1
        piece = run.length
        while done < run.length:
            piece = min(piece, run.length - done)
            result = userfaultfd.copy_pages(self.fd, run.address + done, source + done, piece)
            done += result.done_bytes
            copied += result.done_bytes
            if result.error == 0:
                piece *= 2
            elif result.error == errno.EEXIST:
                # Of another copy of the same data, or written by the task since.
                done += PAGE_BYTES
            elif result.error == errno.ENOENT and piece > PAGE_BYTES:
                # The task may have divided the mapping since: only a page is never divided.
                piece = max(PAGE_BYTES, piece // 2 & -PAGE_BYTES)
            elif result.error == errno.ENOENT and absent_at != done:
                # The task may be about to tell that it has moved it: the kernel finds the mapping
                # gone before it looks for that. It looks for that first of all the next time, and
                # refuses, for no event is read meanwhile.
                absent_at = done
            elif result.error == errno.ENOENT:
                done += PAGE_BYTES
                self.dropped_bytes += PAGE_BYTES
            elif result.error == errno.EAGAIN and not result.done_bytes:
                return _Filled(done, copied, is_changing=True)
            elif result.error in userfaultfd.GONE:
                self._end()
                return _Filled(run.length, copied, is_changing=False)
            elif result.error != errno.EAGAIN:
                raise self._refused("copy to", run.address + done, result.error)
        return _Filled(min(done, run.length), copied, is_changing=False)

    def zero(self, address: int) -> Outcome:
        """Give a page of zeros to who waits for an address that the image has nothing for.

        Some pages around it get the same if that is no trouble.
        """
        with self._lock.shared():
            if self.is_gone:
                return Outcome.DONE
            block = address & -_ZERO_BYTES
            with self._books:
                if self._space.find(address):
                    return Outcome.CHANGING
                start, end = self._space.gap(address, block, block + _ZERO_BYTES)
            result = userfaultfd.zero_pages(self.fd, address, end - address)
            if result.error in (errno.ENOENT, errno.EINVAL) and end - address > PAGE_BYTES:
                # The mapping ends before.
                result = userfaultfd.zero_pages(self.fd, address, PAGE_BYTES)
            if start < address and not result.error:
                userfaultfd.zero_pages(self.fd, start, address - start)
        if result.error in (0, errno.EEXIST, errno.ENOENT) or result.done_bytes:
            return Outcome.DONE
        if result.error == errno.EAGAIN:
            return Outcome.CHANGING
        if result.error in userfaultfd.GONE:
            self._end()
            return Outcome.DONE
        raise self._refused("put zeros at", address, result.error)

    def unwatch(self) -> None:
        """Leave all of its mappings to the kernel, if nothing is missing.

        For a task that has not run yet: its mappings are those of the images.
        """
        with self._lock.owned():
            if self.is_closed or self._space.missing_bytes:
                return
            for start, end in self.memory.mappings:
                # Most are not watched, or cannot be. One that stays watched is served as before.
                userfaultfd.unregister(self.fd, start, end - start)

    def wake(self, address: int) -> None:
        """Let who waits for an address look again."""
        with self._lock.shared():
            if not self.is_closed:
                userfaultfd.wake(self.fd, address, PAGE_BYTES)

    def _end(self) -> None:
        self.is_gone = True
        with self._books:
            self._space.clear()

    def _refused(self, what: str, address: int, code: int) -> AgentError:
        return AgentError(
            f"cannot {what} {address:#x} of process {self.memory.pid}: {os.strerror(code)}",
            next_step="give the workload more memory" if code == errno.ENOMEM else "report this",
        )

    def has_ended(self) -> bool:
        """Find out whether the process has ended; it is gone then."""
        with self._lock.shared():
            if not self.is_gone and userfaultfd.has_ended(self.fd):
                self._end()
        return self.is_gone

    def close(self) -> None:
        """Close the descriptor. Idempotent.

        If nobody else has it open, what is missing reads as zeros from then on.
        """
        with self._lock.owned():
            if not self.is_closed:
                self.is_closed = self.is_gone = True
                os.close(self.fd)
                with self._books:
                    self._space.clear()
