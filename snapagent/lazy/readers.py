"""Processes that read, decode and check images, so that no restore waits for the interpreter.

Chunks of pages are small, and a thread hands Python's interpreter over twice for each: four threads
of one process are hardly faster than one, and hold up all others, such as those that fill GPUs. A
process has an interpreter of its own. It reads into memory that it shares with the agent, which
copies from there into restored processes; their userfaultfds never leave the agent.

Nothing depends on these processes. What one does not read, since it has died or the store gave it
an error, the agent reads itself: then with all patience, and the error is the agent's own.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import select
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

from snapagent.lazy.fill import BUFFER_BYTES, LocalReader, read_part
from snapagent.linux.memfds import make_memfd
from snapagent.linux.packets import BadPacketError, channel_pair
from snapstore.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

    from snapagent.lazy.fill import Part, PartReader
    from snapagent.lazy.memory import PagesFile
    from snapagent.lazy.reader import Source

__all__ = ["ImageReaders", "ReaderPool", "ReaderProcess"]

ANSWER_S_MAX = 30.0
"""One that reads a part for so long hangs: then the agent reads it itself, with more patience."""

_ROOT: Final = str(Path(__file__).parents[2])
_CODE: Final = (
    f"import sys; {_ROOT!r} in sys.path or sys.path.insert(0, {_ROOT!r});"
    " from snapagent.lazy.reader import main; main(*map(int, sys.argv[1:]))"
)
_MADV_POPULATE_WRITE: Final = 23
"""Not in `mmap` yet. Kernels before 5.14 refuse it."""
_SEND_S_MAX: Final = 1.0
"""One that takes no message for so long is as good as dead."""
_LOOK_MS: Final = 100
"""How often who waits for an answer looks whether it is still wanted."""
_END_S_MAX: Final = 1.0


class ReaderProcess:
    """One of the processes. One thread at a time asks it; any may tell it something.

    Attributes:
        view: The memory that it reads into.
    """

    def __init__(self) -> None:
        """Start it; what it is told before it is ready it does then.

        Raises:
            OSError: It cannot be started.
        """
        fd = make_memfd(BUFFER_BYTES, huge=False)
        self._channel, theirs = channel_pair()
        try:
            self._map = mmap.mmap(fd, BUFFER_BYTES)
            _populate(self._map)
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter, a module of ours
                # In the agent's own directory: what a URL or the environment names may be relative.
                [sys.executable, "-P", "-c", _CODE, str(theirs.fileno()), str(fd)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), fd],
                # Ctrl-C is for the agent alone.
                start_new_session=True,
            )
        except BaseException:
            self._channel.close()
            raise
        finally:
            theirs.close()
            os.close(fd)
        self._channel.set_timeout(_SEND_S_MAX)
        self.view = memoryview(self._map)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.poll() is None

    def tell(self, kind: str, values: dict[str, object]) -> None:
        """Say something that has no answer; one that has ended or does not listen is ended."""
        try:
            self._channel.send(kind, values)
        except (OSError, BadPacketError):
            self._process.kill()

    def ask(self, values: dict[str, object], stop: threading.Event) -> bool:
        """Let it read something; tells whether it is in the buffer now.

        If not, nobody writes to the buffer any more. One that does not answer in time, or before
        `stop` is set, is ended.
        """
        self.tell("read", values)
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        clock = SystemClock()
        deadline_s = clock.monotonic_s() + ANSWER_S_MAX
        while not poll.poll(_LOOK_MS):
            if stop.is_set() or clock.monotonic_s() > deadline_s:
                self._end()
                return False
        try:
            answer = self._channel.receive()
        except (OSError, BadPacketError):
            answer = None
        if answer is None:
            self._end()
            return False
        return answer.kind == "read"

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()

    def dismiss(self) -> None:
        """Let it end, without waiting for that; nobody may ask it any more."""
        self._channel.close()

    def close(self, timeout_s: float = _END_S_MAX) -> None:
        """End it. Memory stays for those that still refer to it."""
        self.dismiss()
        try:
            self._process.wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            # It reads from a store that does not answer; it has nothing that could be lost.
            self._end()
        with contextlib.suppress(BufferError):
            self.view.release()
            self._map.close()


class ReaderPool:
    """Some of these processes, for all restores of an agent. Thread-safe."""

    def __init__(self, count: int) -> None:
        """Prepare; nothing runs before `start`."""
        self.count = count
        self._lock = threading.Lock()
        self._free: list[ReaderProcess] = []
        self._used: set[ReaderProcess] = set()
        self._missing = count
        """Those that neither wait nor are in use: that could not be started."""
        self._is_open = False

    def start(self) -> None:
        """Start all of them; they need a moment until they read.

        Those that cannot be are missed, until somebody who needs one tries it again.
        """
        with self._lock:
            self._is_open = True
        while (process := self._start_missing()) is not None:
            self.give(process)

    @property
    def pids(self) -> list[int]:
        """Of those that live and that nobody uses."""
        with self._lock:
            return [process.pid for process in self._free if process.is_alive]

    def tell(self, kind: str, values: dict[str, object]) -> None:
        """Say something to all, also to those in use, which do it next."""
        with self._lock:
            everyone = [*self._free, *self._used]
        for process in everyone:
            process.tell(kind, values)

    def take(self) -> ReaderProcess | None:
        """Take one for this thread alone; none if all are in use. One that has died is replaced."""
        with self._lock:
            process = self._free.pop() if self._free else None
            if process is not None and process.is_alive:
                self._used.add(process)
                return process
            if process is not None:
                self._missing += 1
        if process is not None:
            process.close()
        return self._start_missing()

    def _start_missing(self) -> ReaderProcess | None:
        """Start one and take it, if one is missing and that can be done."""
        with self._lock:
            if not self._is_open or not self._missing:
                return None
            self._missing -= 1
        process = None
        try:
            with contextlib.suppress(OSError):
                process = ReaderProcess()
        finally:
            with self._lock:
                if process is None:
                    self._missing += 1
                else:
                    self._used.add(process)
        return process

    def give(self, process: ReaderProcess) -> None:
        """Give one back."""
        with self._lock:
            self._used.discard(process)
            if self._is_open:
                self._free.append(process)
                return
        process.close()

    def close(self) -> None:
        """End them, also those in use, when these are given back. Idempotent."""
        with self._lock:
            self._is_open = False
            free, self._free = self._free, []
        # All at once, however many hang.
        clock = SystemClock()
        deadline_s = clock.monotonic_s() + _END_S_MAX
        for process in free:
            process.dismiss()
        for process in free:
            process.close(deadline_s - clock.monotonic_s())

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ImageReaders:
    """What a pool reads for one restore. Thread-safe."""

    def __init__(
        self,
        pool: ReaderPool,
        source: Source,
        paths: Mapping[str, str],
        files: Mapping[str, PagesFile],
    ) -> None:
        """Let the processes open an image, with what they need for reading that all images share.

        Args:
            pool: Must be open until this is closed.
            source: The snapshot.
            paths: Where in it each image is.
            files: The same images, opened here.
        """
        self._pool = pool
        self._source: dict[str, object] = dict(source._asdict())
        self._paths = paths
        self._files = files
        first = next(iter(paths.values()), None)
        if first is not None:
            pool.tell("open", self._source | {"path": first})

    @property
    def count(self) -> int:
        """How many processes there are, for this restore and others."""
        return self._pool.count

    def reader(self, stop: threading.Event) -> PartReader:
        """Return what reads for one thread: a process, or if none is free, that thread itself."""
        process = self._pool.take()
        if process is None:
            return LocalReader(self._files, BUFFER_BYTES)
        return _SharedReader(self, process, stop)

    def read(self, process: ReaderProcess, part: Part, stop: threading.Event) -> bool:
        """Let a process read a part; tells whether it has."""
        place = {"path": self._paths[part.image], "offset": part.offset, "length": part.length}
        return process.ask(self._source | place, stop)

    def read_here(self, part: Part, buffer: memoryview) -> None:
        """Read a part in this process."""
        read_part(self._files, part, buffer)

    def give_back(self, process: ReaderProcess) -> None:
        """Let others have a process."""
        process.tell("forget", self._source)
        self._pool.give(process)

    def close(self) -> None:
        """Let the processes forget the snapshot: its tables need memory."""
        self._pool.tell("forget", self._source)


class _SharedReader:
    """A process, for one thread of one restore."""

    def __init__(self, images: ImageReaders, process: ReaderProcess, stop: threading.Event) -> None:
        self._images = images
        self._process = process
        self._stop = stop
        self._helps = True
        self.view = process.view

    def read(self, part: Part) -> None:
        if self._helps and self._images.read(self._process, part, self._stop):
            return
        if self._stop.is_set():
            return  # Nobody looks at the memory any more.
        # What one could not read, it will not read the next time either.
        self._helps = False
        self._images.read_here(part, self.view)

    def close(self) -> None:
        self._images.give_back(self._process)


def _populate(memory: mmap.mmap) -> None:
    """Get all of its pages.

    What is not there when it is copied from takes the kernel a detour for each page, and if it
    cannot be had then, whoever touches it is killed.

    Raises:
        OSError: There is no such memory.
    """
    try:
        memory.madvise(_MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
