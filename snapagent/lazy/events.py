"""One thread that hears of all that happens in the memory of all tasks."""

from __future__ import annotations

import os
import select
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from snapagent.lazy.faults import FaultQueue
    from snapagent.lazy.stats import Tally
    from snapagent.lazy.task import LiveTask

__all__ = ["EventLoop"]

_READY_MAX = 64

_TASKS_MIN = 64
"""So many descriptors may be open before it is looked whether their processes live."""


class EventLoop:
    """Reads the events of tasks as they come, and passes faults on.

    `add` and `end` may be called from any thread; `run` belongs to one.
    """

    def __init__(
        self, waiting: FaultQueue, tally: Tally, on_fork: Callable[[LiveTask], None]
    ) -> None:
        self._waiting = waiting
        self._tally = tally
        self._on_fork = on_fork
        self._tasks: dict[int, LiveTask] = {}
        self._lock = threading.Lock()
        self._tasks_max = _TASKS_MIN
        self._is_over = False
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake, select.EPOLLIN)

    def add(self, task: LiveTask) -> None:
        """Listen to a task too."""
        with self._lock:
            self._tasks[task.fd] = task
            self._epoll.register(task.fd, select.EPOLLIN)

    def drop(self, task: LiveTask) -> None:
        """Listen no more to a task that is gone, and close it. Idempotent."""
        with self._lock:
            if self._tasks.get(task.fd) is task:
                del self._tasks[task.fd]
                self._epoll.unregister(task.fd)
        task.close()

    def run(self) -> None:
        """Read events until `end`.

        Raises:
            SnapError: An event cannot be read or understood.
        """
        while True:
            for fd, _ in self._epoll.poll(maxevents=_READY_MAX):
                if self._is_over:
                    return
                with self._lock:
                    task = self._tasks.get(fd)
                if task is not None:
                    self._read(task)

    def _read(self, task: LiveTask) -> None:
        faults, events = task.read_events(self._on_fork)
        if events:
            self._tally.add(events=events)
            if len(self._tasks) > self._tasks_max:
                self._tasks_max = max(_TASKS_MIN, 2 * self._drop_ended())
        for address in faults:
            self._tally.queued(self._waiting.put(task, address))
        if faults:
            self._tally.add(faults=len(faults))
            self._tally.happened("first_fault_s")

    def _drop_ended(self) -> int:
        """Drop all tasks whose process has ended; returns how many are left."""
        with self._lock:
            tasks = list(self._tasks.values())
        for task in tasks:
            if task.has_ended():
                self.drop(task)
        return len(self._tasks)

    def end(self) -> None:
        """Let `run` return soon."""
        self._is_over = True
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Release what this has; after `run` has returned."""
        self._epoll.close()
        os.close(self._wake)
