"""Filling memory in the background: in which order, and one part of an image into all tasks."""

from __future__ import annotations

import bisect
import collections
import contextlib
import mmap
import threading
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from snapagent.errors import AgentError
from snapagent.lazy.task import Outcome
from snapagent.linux.userfaultfd import address_of
from snapstore.clock import SystemClock
from snapstore.units import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from snapagent.lazy.address_space import AddressSpace
    from snapagent.lazy.memory import PagesFile
    from snapagent.lazy.task import LiveTask

__all__ = [
    "BUFFER_BYTES",
    "CHANGING_PAUSE_S",
    "LocalReader",
    "Part",
    "PartFiller",
    "PartReader",
    "ReadBuffer",
    "WorkList",
    "left_over",
    "plan_parts",
    "read_part",
]

BUFFER_BYTES: Final = 16 << 20
"""Of a buffer to read parts into, where nobody says otherwise."""

CHANGING_PAUSE_S = 0.0002
"""How long to wait when a task changes its mappings: nothing tells when it is done."""


class Part(NamedTuple):
    """A part of a pages image to fill into every task that misses something of it."""

    image: str
    offset: int
    length: int
    is_zeros: bool


class ReadBuffer:
    """Memory to read into and copy from, whole pages, large ones where the kernel has them."""

    def __init__(self, size_bytes: int) -> None:
        self._map = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A kernel without large pages says so.
        with contextlib.suppress(OSError):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._map)
        self.address = address_of(self.view)

    def close(self) -> None:
        """Give the memory back, or leave it to those that still refer to it.

        Such as the traceback of a read that failed, which is on its way to whoever has to know.
        """
        with contextlib.suppress(BufferError):
            self.view.release()
            self._map.close()


class PartReader(Protocol):
    """Brings parts of images into memory, for one thread.

    Attributes:
        view: Where they are then.
    """

    view: memoryview

    def read(self, part: Part) -> None:
        """Bring a part to the beginning of the memory, checked.

        Raises:
            SnapError: It cannot be had.
        """
        ...

    def close(self) -> None:
        """End this, and give the memory back."""
        ...


def read_part(files: Mapping[str, PagesFile], part: Part, buffer: memoryview) -> None:
    """Read a part in this process, to the beginning of a buffer.

    Raises:
        SnapError: It cannot be had.
    """
    with buffer[: part.length] as view:
        files[part.image].read_into(part.offset, view, streaming=True)


class LocalReader:
    """Reads by itself, into a buffer of its own."""

    def __init__(self, files: Mapping[str, PagesFile], buffer_bytes: int) -> None:
        self._files = files
        self._buffer = ReadBuffer(buffer_bytes)
        self.view = self._buffer.view

    def read(self, part: Part) -> None:
        """Bring a part to the beginning of the buffer."""
        read_part(self._files, part, self.view)

    def close(self) -> None:
        """Give the buffer back."""
        self._buffer.close()


class WorkList:
    """Parts to be taken one by one. Thread-safe."""

    def __init__(self, parts: Iterable[Part]) -> None:
        self._parts = collections.deque(parts)
        self._lock = threading.Lock()

    def take(self) -> Part | None:
        """Take the next one; none if there are no more."""
        with self._lock:
            return self._parts.popleft() if self._parts else None


def plan_parts(
    files: Mapping[str, PagesFile],
    spaces: Sequence[tuple[str, AddressSpace]],
    hint: Sequence[tuple[str, int, int]],
    buffer_bytes: int,
) -> list[Part]:
    """Divide images into parts that fit into a buffer, best first.

    Zeros come first, for they take no time. Then what holds pages of the hint, in its order, and
    then all else as it lies in the store.

    Args:
        files: The images.
        spaces: What is missing, by image: parts of which nothing is are left out.
        hint: Image, first page and number of pages, as they may be needed. It may be nonsense.
        buffer_bytes: Size of the buffer, whole pages.

    Raises:
        AgentError: An image is divided in a way that cannot be.
        SnapError: The store says why.
    """
    about_bytes = max(1, buffer_bytes * 2 // 3 // PAGE_BYTES) * PAGE_BYTES
    parts: list[tuple[int, Part]] = []
    for image, file in files.items():
        users = [space for name, space in spaces if name == image]
        for part in file.ranges(about_bytes=about_bytes):
            end = part.offset + part.length
            if (part.offset | end) % PAGE_BYTES or not 0 <= part.offset < end <= file.size_bytes:
                raise AgentError(
                    f"{image}: {part.length} bytes at {part.offset} are no part of "
                    f"{file.size_bytes} bytes to fill memory with",
                    next_step="the snapshot is damaged: verify the store, or use another one",
                )
            if any(space.misses(part.offset, end) for space in users):
                order = -1 if part.is_zeros else part.order
                parts.append((order, Part(image, part.offset, part.length, part.is_zeros)))
    parts.sort()
    return [piece for part in _hinted_first(parts, hint) for piece in _pieces(part, buffer_bytes)]


def _hinted_first(
    parts: list[tuple[int, Part]], hint: Sequence[tuple[str, int, int]]
) -> Iterator[Part]:
    """Yield all parts, those of the hint before others."""
    ordered = [part for _, part in parts]
    by_place = sorted(part for part in ordered if not part.is_zeros)
    places = [(part.image, part.offset) for part in by_place]
    # The next part at or behind each that was not taken yet: a hint may name all of them again
    # and again, and comes from anybody.
    following = list(range(len(by_place) + 1))
    taken: set[Part] = set()
    yield from (part for part in ordered if part.is_zeros)
    for image, first_page, count in hint:
        offset, end = first_page * PAGE_BYTES, (first_page + count) * PAGE_BYTES
        at = _next_free(following, max(0, bisect.bisect_right(places, (image, offset)) - 1))
        while at < len(by_place) and places[at] < (image, end):
            part = by_place[at]
            if part.image == image and part.offset + part.length > offset:
                taken.add(part)
                following[at] = at + 1
                yield part
            at = _next_free(following, at + 1)
    yield from (part for part in ordered if not part.is_zeros and part not in taken)


def _next_free(following: list[int], at: int) -> int:
    while following[at] != at:
        # Halves the way for who comes next.
        following[at] = following[following[at]]
        at = following[at]
    return at


def _pieces(part: Part, buffer_bytes: int) -> Iterator[Part]:
    """Cut a part so that it fits; zeros need no room."""
    step = part.length if part.is_zeros else buffer_bytes
    for begin in range(0, part.length, step):
        length = min(step, part.length - begin)
        yield part._replace(offset=part.offset + begin, length=length)


def left_over(tasks: Sequence[LiveTask], buffer_bytes: int) -> list[Part]:
    """Return what tasks still miss, whatever the ranges of their image say."""
    spans = {
        Part(task.memory.image, start, end - start, is_zeros=False)
        for task in tasks
        for start, end in task.missing_spans()
    }
    return [piece for part in sorted(spans) for piece in _pieces(part, buffer_bytes)]


class PartFiller:
    """Fills parts of images into tasks, for one thread. Owns its reader.

    Attributes:
        read_s: Seconds spent on getting data, checked and decoded.
        copy_s: Seconds spent on copying them into tasks.
    """

    def __init__(self, reader: PartReader, stop: threading.Event) -> None:
        self.read_s = self.copy_s = 0.0
        self._reader = reader
        self._address = address_of(reader.view)
        self._stop = stop
        self._clock = SystemClock()

    def close(self) -> None:
        """Close the reader."""
        self._reader.close()

    def fill(self, part: Part, tasks: Sequence[LiveTask]) -> tuple[int, int]:
        """Fill one part into all tasks that miss something of it.

        Args:
            part: The part.
            tasks: The tasks of that image. Children that are forked meanwhile are appended to it,
                before their parent's memory changes again: so whoever goes to its very end sees
                every child that misses what its parent missed.

        Returns:
            How many bytes were copied, and how many left to the kernel since they are zeros.

        Raises:
            SnapError: The data cannot be had; nothing of this part was filled since.
        """
        copied = zeros = at = 0
        is_read = False
        while at < len(tasks) and not self._stop.is_set():
            task = tasks[at]
            at += 1
            if part.is_zeros:
                zeros += task.discard(part.offset, part.offset + part.length)
            elif task.misses(part.offset, part.offset + part.length):
                began_s = self._clock.monotonic_s()
                if not is_read:
                    self._reader.read(part)
                    is_read = True
                read_s = self._clock.monotonic_s()
                copied += self._copy(part, task)
                self.read_s += read_s - began_s
                self.copy_s += self._clock.monotonic_s() - read_s
        return copied, zeros

    def _copy(self, part: Part, task: LiveTask) -> int:
        total = 0
        while not self._stop.is_set():
            outcome, copied = task.copy(part.offset, part.length, self._address)
            total += copied
            if outcome is Outcome.DONE:
                break
            if outcome is Outcome.CHANGING:
                self._stop.wait(CHANGING_PAUSE_S)
        return total
