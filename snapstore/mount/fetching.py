"""Bringing bytes in: each once at a time, for who waits and ahead of who reads in order.

Fetches run in tasks of their own, each with a thread of a bounded number. A reader that gives up
leaves its fetch to those that come after, so a store that is away holds up its threads at most.
"""

from __future__ import annotations

import collections
import logging
from typing import TYPE_CHECKING, TypeVar

import trio

from snapstore.errors import SnapError
from snapstore.mount.blocks import BLOCK_BYTES
from snapstore.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from snapstore.mount.content import Content

__all__ = ["FetchFailed", "Fetcher", "OpenFile", "Reader", "StoreSilent"]

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")

_TOGETHER_WAITED_FOR = 4
"""Blocks that are fetched at once for who reads in order and waits."""

_TOGETHER_AHEAD = 12
"""The same ahead of them. What lies across the borders of fetches is decoded for both at once and
copied, so there should be few of them: from 8 to 24 MiB a third of the processor time went."""

_RUN_BYTES_MIN = 256 * KIB
"""Read in order so far, to be worth reading ahead."""

_AHEAD_BYTES_MIN = 8 * MIB
_SLACK_BYTES = 2 * MIB
"""The kernel asks for what it reads ahead slightly out of order."""

_RETRY_S = 0.5
_DAMAGED_S = 10.0
"""How long blocks are not asked for again that hold bytes which are damaged or gone. What is sound
beside the damage is read without them meanwhile."""

_ROUNDS_MAX = 8
"""How often to wait for blocks that are gone again before they are read."""


class StoreSilent(SnapError):
    """The store has not answered for as long as readers wait."""

    exit_code = 5
    retryable = True


class FetchFailed(SnapError):
    """This machine could not take the bytes in, for want of memory or of room."""


class OpenFile:
    """A file of which something is open: its content, and what is on the way."""

    __slots__ = ("_damaged", "content", "name", "on_the_way")

    def __init__(self, content: Content, name: str) -> None:
        self.content = content
        self.name = name
        self.on_the_way: dict[int, _Fetch] = {}
        self._damaged: dict[int, tuple[float, SnapError | None]] = {}

    @property
    def end(self) -> int:
        """The number of its blocks."""
        return -(-self.content.size_bytes // BLOCK_BYTES)

    def is_coming(self, block: int) -> bool:
        """Whether a block is at hand or on the way."""
        return self.content.has(block) or block in self.on_the_way

    def note_damage(self, fetch: _Fetch, error: SnapError) -> None:
        """Remember for a while what a fetch has failed with."""
        until_s = trio.current_time() + _DAMAGED_S
        # Of several blocks nobody knows which one it was: each is to be tried by itself.
        known = error if fetch.count == 1 else None
        for block in range(fetch.first, fetch.first + fetch.count):
            self._damaged[block] = until_s, known

    def is_doubtful(self, block: int) -> bool:
        """Whether a fetch of this block, among others or alone, has failed a moment ago."""
        if block not in self._damaged:
            return False
        if self._damaged[block][0] > trio.current_time():
            return True
        del self._damaged[block]
        return False

    def damage(self, block: int) -> SnapError | None:
        """Why this very block could not be brought a moment ago, if that is so."""
        return self._damaged[block][1] if self.is_doubtful(block) else None


class Reader:
    """Who has a file open, and how they read it."""

    __slots__ = ("ahead_to", "file", "inode", "pid", "position", "run_bytes")

    def __init__(self, file: OpenFile, inode: int, pid: int) -> None:
        self.file = file
        self.inode = inode
        self.pid = pid
        self.position = 0
        self.run_bytes = 0
        self.ahead_to = 0

    @property
    def is_in_order(self) -> bool:
        """Whether they read from front to back."""
        return self.run_bytes >= _RUN_BYTES_MIN


class _Fetch:
    """Blocks on the way."""

    __slots__ = ("count", "done", "error", "first")

    def __init__(self, first: int, count: int) -> None:
        self.first = first
        self.count = count
        self.done = trio.Event()
        self.error: SnapError | None = None


class Fetcher:
    """All fetches of a mount. Used by the thread of the event loop alone."""

    def __init__(
        self, nursery: trio.Nursery, *, threads: int, timeout_s: float, ahead_bytes_max: int
    ) -> None:
        self._nursery = nursery
        self._threads = trio.CapacityLimiter(threads)
        # One thread is left for who waits, however much is read ahead.
        self._ahead = trio.CapacityLimiter(max(threads - 1, 1))
        self._timeout_s = timeout_s
        self._ahead_bytes_max = ahead_bytes_max
        # Some of them have to be on the way at once.
        self._together_ahead = max(1, min(_TOGETHER_AHEAD, ahead_bytes_max // BLOCK_BYTES // 2))
        self._room = trio.Event()

    # -- for who waits

    async def read(self, reader: Reader, offset: int, length: int) -> memoryview | bytes:
        """Give bytes that are not at hand; the range is within the file.

        Raises:
            StoreSilent: They have not come in time.
            SnapError: They are damaged or gone, or the store says no.
        """
        file = reader.file
        error: SnapError | None = None
        rounds = 0
        with trio.move_on_after(self._timeout_s):
            while rounds < _ROUNDS_MAX:
                data = file.content.peek(offset, length)
                if data is not None:
                    return data
                error = await self._bring(reader, offset, length)
                if error is None:
                    rounds += 1
                elif error.retryable:
                    await trio.sleep(_RETRY_S)
                else:
                    break
            # What is damaged may be beside these bytes, in the same block; or others take the
            # room away as soon as they have come.
            return await self._in_thread(lambda: file.content.read(offset, length))
        raise error or StoreSilent(f"the store has not answered for {self._timeout_s:g} s")

    async def _bring(self, reader: Reader, offset: int, length: int) -> SnapError | None:
        """Wait until the blocks of a range have come, or one of them cannot."""
        file = reader.file
        first, end = offset // BLOCK_BYTES, -(-(offset + length) // BLOCK_BYTES)
        for block in range(first, end):
            if not file.is_coming(block):
                damage = file.damage(block)
                if damage is not None:
                    return damage
                to = min(block + _TOGETHER_WAITED_FOR, file.end) if reader.is_in_order else end
                if not self._start(file, block, to, in_order=reader.is_in_order):
                    await self._room.wait()
                    return None
        for block in range(first, end):
            fetch = file.on_the_way.get(block)
            if fetch is not None:
                await fetch.done.wait()
                if fetch.error is not None:
                    return fetch.error
        return None

    # -- ahead of who reads in order

    def note(self, reader: Reader, offset: int, length: int) -> None:
        """Keep track of how a file is read, and read ahead of who reads in order.

        This may make room, so views of content from before are not to be used any more.
        """
        if -_SLACK_BYTES <= offset - reader.position <= _SLACK_BYTES:
            reader.run_bytes += length
            reader.position = max(reader.position, offset + length)
        else:
            reader.run_bytes = length
            reader.position = reader.ahead_to = offset + length
        if reader.run_bytes >= _RUN_BYTES_MIN:
            wanted = max(_AHEAD_BYTES_MIN, min(2 * reader.run_bytes, self._ahead_bytes_max))
            if reader.ahead_to - reader.position < wanted // 2:
                self._read_ahead(reader, reader.position + wanted)

    def _read_ahead(self, reader: Reader, to: int) -> None:
        file = reader.file
        block = max(reader.ahead_to, reader.position) // BLOCK_BYTES
        end = min(-(-to // BLOCK_BYTES), file.end)
        while block < end:
            count = 1
            if not file.is_coming(block) and not file.is_doubtful(block):
                count = self._start(file, block, end, in_order=True, is_ahead=True)
                if not count:
                    break
            block += count
        reader.ahead_to = block * BLOCK_BYTES

    async def warm(self, file: OpenFile, runs: Iterable[tuple[int, int]]) -> None:
        """Bring runs of blocks in, given by the first and their number, as background work.

        Raises:
            SnapError: One cannot be had.
        """
        going = collections.deque[_Fetch]()
        for first, count in runs:
            block, end = first, min(first + count, file.end)
            while block < end:
                if file.is_coming(block):
                    block += 1
                    continue
                started = self._start(file, block, end, in_order=True, is_ahead=True)
                if not started:
                    await self._room.wait()
                    continue
                going.append(file.on_the_way[block])
                block += started
                if len(going) > self._ahead.total_tokens:
                    await _arrived(going.popleft())
        while going:
            await _arrived(going.popleft())

    # -- one fetch

    def _start(
        self, file: OpenFile, block: int, end: int, *, in_order: bool, is_ahead: bool = False
    ) -> int:
        """Start to fetch blocks from one on, up to the first that is coming anyhow.

        Returns:
            How many; 0 if there is no room.
        """
        together = self._together_ahead if is_ahead else _TOGETHER_WAITED_FOR
        count_max = min(end - block, together, file.content.together(block))
        if file.is_doubtful(block):
            count_max = 1
        count = 1
        while (
            count < count_max
            and not file.is_coming(block + count)
            and not file.is_doubtful(block + count)
        ):
            count += 1
        fill = file.content.begin(block, count, in_order=in_order)
        if fill is None:
            return 0
        fetch = _Fetch(block, count)
        for number in range(block, block + count):
            file.on_the_way[number] = fetch
        work = self._ahead_of_readers(fill) if is_ahead else self._in_thread(fill)
        self._nursery.start_soon(self._run, file, fetch, work)
        return count

    async def _run(self, file: OpenFile, fetch: _Fetch, work: Awaitable[None]) -> None:
        is_filled = False
        try:
            await work
            is_filled = True
        except SnapError as error:
            fetch.error = error
            if not error.retryable and not isinstance(error, FetchFailed):
                file.note_damage(fetch, error)
            log.warning("%s: offset %d: %s", file.name, fetch.first * BLOCK_BYTES, error)
        finally:
            for number in range(fetch.first, fetch.first + fetch.count):
                del file.on_the_way[number]
            file.content.end(fetch.first, fetch.count, is_filled=is_filled)
            fetch.done.set()
            room, self._room = self._room, trio.Event()
            room.set()

    async def _ahead_of_readers(self, fill: Callable[[], None]) -> None:
        async with self._ahead:
            await self._in_thread(fill)

    async def _in_thread(self, work: Callable[[], _Result]) -> _Result:
        try:
            # Abandoned only when the mount ends.
            return await trio.to_thread.run_sync(
                work, limiter=self._threads, abandon_on_cancel=True
            )
        except (OSError, MemoryError) as error:
            raise FetchFailed(f"this machine cannot take it in: {error}") from error


async def _arrived(fetch: _Fetch) -> None:
    await fetch.done.wait()
    if fetch.error is not None:
        raise fetch.error
