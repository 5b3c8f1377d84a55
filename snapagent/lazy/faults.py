"""Serving threads of restored processes that wait for a page: who waits comes first."""

from __future__ import annotations

import queue
from typing import TYPE_CHECKING

from snapagent.lazy.fill import CHANGING_PAUSE_S, ReadBuffer
from snapagent.lazy.stats import PageRun
from snapagent.lazy.task import LiveTask, Outcome
from snapstore.clock import SystemClock
from snapstore.units import PAGE_BYTES

if TYPE_CHECKING:
    import threading

    from snapagent.lazy.address_space import Run
    from snapagent.lazy.stats import Recorder, Tally

__all__ = ["FAULT_BYTES", "FaultQueue", "FaultServer"]

FAULT_BYTES = 64 << 10
"""How much around an address is filled at once: what is near is needed soon."""


QUIET_S = 0.003
"""A process that touches one page after the other asks again within less."""


class FaultQueue:
    """Addresses that somebody waits for. Thread-safe."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[LiveTask, int] | None] = queue.SimpleQueue()
        self._clock = SystemClock()
        self._asked_s = 0.0

    def put(self, task: LiveTask, address: int) -> int:
        """Add one; returns how many wait about now."""
        self.expect()
        self._waiting.put((task, address))
        return self._waiting.qsize()

    def get(self) -> tuple[LiveTask, int] | None:
        """Take one; blocks. None says that it is over."""
        return self._waiting.get()

    def expect(self) -> None:
        """Note that somebody asks, or is about to."""
        self._asked_s = self._clock.monotonic_s()

    def wait_until_quiet(self, stop: threading.Event, longest_s: float) -> None:
        """Wait until nobody has asked for `QUIET_S`, but not longer than `longest_s`."""
        deadline_s = self._clock.monotonic_s() + longest_s
        while not stop.is_set():
            left_s = min(self._asked_s + QUIET_S, deadline_s) - self._clock.monotonic_s()
            if left_s <= 0:
                return
            stop.wait(left_s)

    def end(self, readers: int) -> None:
        """Wake that many readers, who get None after all that is waiting."""
        for _ in range(readers):
            self._waiting.put(None)


class FaultServer:
    """Serves faults, for one thread. Owns its buffer."""

    def __init__(
        self, waiting: FaultQueue, tally: Tally, recorder: Recorder | None, stop: threading.Event
    ) -> None:
        self._waiting = waiting
        self._tally = tally
        self._recorder = recorder
        self._stop = stop
        self._buffer = ReadBuffer(FAULT_BYTES)

    def close(self) -> None:
        """Give the buffer back."""
        self._buffer.close()

    def run(self) -> None:
        """Serve until there is nothing more to come.

        Raises:
            SnapError: Data cannot be had; who waits for them goes on waiting.
        """
        while (fault := self._waiting.get()) is not None:
            self._serve(*fault)

    def _serve(self, task: LiveTask, address: int) -> None:
        """Fill the memory around an address, and wake who waits for it.

        Once woken they look again, and if the page is missing still there is another fault. So
        nothing is lost if the task moves the memory meanwhile.
        """
        while not self._stop.is_set():
            run = task.find(address)
            if run is not None:
                self._fill(task, run, address)
                break
            if task.zero(address) is Outcome.DONE:
                self._tally.add(zero_faults=1)
                break
            self._stop.wait(CHANGING_PAUSE_S)
        if not self._stop.is_set():
            task.wake(address)

    def _fill(self, task: LiveTask, run: Run, address: int) -> None:
        begin = max(run.address, address & -FAULT_BYTES)
        end = min(run.address + run.length, (address & -FAULT_BYTES) + FAULT_BYTES)
        offset, length = run.offset + begin - run.address, end - begin
        if self._recorder is not None:
            self._recorder.add(
                PageRun(task.memory.image, offset // PAGE_BYTES, length // PAGE_BYTES)
            )
        with self._buffer.view[:length] as view:
            task.memory.file.read_into(offset, view)
        while not self._stop.is_set():
            outcome, copied = task.copy(offset, length, self._buffer.address)
            self._tally.add(fault_bytes=copied)
            if outcome is Outcome.DONE:
                break
            if outcome is Outcome.CHANGING:
                self._stop.wait(CHANGING_PAUSE_S)
