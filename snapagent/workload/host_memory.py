"""Host memory of a workload that belongs to the agent's broker, and so outlives the process.

CRIU sees nothing of it: before a capture `release` unmaps it and keeps only its addresses, and the
agent stores it beside CRIU; `resume` maps it again at the same addresses, in the same process or in
the one that was restored from the snapshot.

What is promised:

1. An address means the same bytes before `release` and after `resume`. In between, touching them is
   SIGSEGV, never wrong data.
2. What fails changes nothing: memory that cannot be given to the broker stays mapped, and memory
   that cannot be mapped again stays reserved, so that `resume` can be called again.
3. A broker that dies takes nothing away. The next one gets what is mapped from here, when it is
   next spoken to, and what was released from the process that holds it.
"""

from __future__ import annotations

import collections
import contextlib
import os
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from snapagent.workload import mappings
from snapagent.workload.block import Block
from snapagent.workload.client import PROTOCOL_VERSION, Connection
from snapagent.workload.errors import (
    BrokerUnreachable,
    ExternalMemoryError,
    MemoryRefused,
    MemoryReleased,
    NotTheOwner,
)
from snapagent.workload.free_list import FreeList

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from snapagent.workload.client import Answer

__all__ = ["SOCKET_DEFAULT", "SOCKET_VARIABLE", "HostMemory"]

SOCKET_VARIABLE: Final = "SNAPAGENT_MEMORY_SOCKET"
SOCKET_DEFAULT: Final = "/run/snapagent/memory.sock"

_ADDRESS_FIRST = 0x2000_0000_0000
_ADDRESS_LAST = 0x5000_0000_0000
"""Far from where kernels put programs, heaps, libraries and stacks."""
_ADDRESS_STEP = 1 << 40
_GRAIN_BYTES = 2 << 20
"""Regions are multiples of this, and begin at such: one large page."""
_REGION_BYTES = 64 << 20
_ALIGNMENT = 64
_BATCH = 32
"""Regions whose descriptors go in one message."""
_ANSWER_S_MAX = 30.0


@dataclass(slots=True)
class _Region:
    """A file of the broker, and where it is mapped."""

    number: int
    address: int
    length: int
    huge: bool
    free: FreeList
    fd: int = -1
    is_mapped: bool = False

    def document(self) -> dict[str, object]:
        return {
            "region": self.number,
            "address": self.address,
            "length": self.length,
            "huge": self.huge,
        }


class HostMemory:
    """External memory of one process, as many blocks of it as fit. All methods are thread-safe.

    A child of `fork` shares the memory with its parent: both see what either writes. It can also
    `release` and `resume`, which it must before a capture as well, but not allocate or free. Do not
    fork while another thread releases or resumes.

    ::

        memory = HostMemory()
        weights = memory.allocate(count * 2).numpy("float16", count)
        memory.release()   # a capture can be taken now
        memory.resume()    # here, or in what was restored from it
    """

    def __init__(
        self,
        socket_path: str | None = None,
        *,
        reserve_bytes: int | None = None,
        region_bytes: int = _REGION_BYTES,
        huge_pages: bool = False,
        rank: int | str = "host",
    ) -> None:
        """Reserve addresses, and make the acquaintance of the broker.

        Args:
            socket_path: Of the broker; by default `$SNAPAGENT_MEMORY_SOCKET`.
            reserve_bytes: How many addresses; by default as many as the machine has memory. They
                cost nothing, but there can never be more blocks than fit.
            region_bytes: What is asked of the broker at a time, if a block does not need more.
            huge_pages: Use large pages of the kernel (hugetlb), where some are set aside.
            rank: Which rank of a snapshot it goes to, a number or `host`.

        Raises:
            BrokerUnreachable: There is none.
            MemoryRefused: It does not want this workload, or there are not so many addresses.
        """
        self._path = socket_path or os.environ.get(SOCKET_VARIABLE) or SOCKET_DEFAULT
        self._region_bytes = _rounded(region_bytes)
        self._huge = huge_pages
        self._rank = rank
        self._token = os.urandom(32).hex()
        self._lock = threading.RLock()
        self._regions: dict[int, _Region] = {}
        self._blocks: dict[int, tuple[_Region, int]] = {}
        """By address: its region and how much of it was taken."""
        self._dropped: collections.deque[int] = collections.deque()
        self._next_region = 1
        self._is_released = self._is_closed = self._is_guest = False
        self._connection: Connection | None = None
        length = _rounded(reserve_bytes or _machine_bytes())
        self._reserved = (_reserve(length), length)
        self._space = FreeList(*self._reserved)
        try:
            self._connected()
        except BaseException:
            mappings.unmap(*self._reserved)
            raise
        _all.add(self)

    # -- blocks -----------------------------------------------------------------------------------

    def allocate(self, size_bytes: int, *, alignment: int = _ALIGNMENT) -> Block:
        """Allocate a block. Its content is undefined, like that of `malloc`.

        Args:
            size_bytes: How much; at least 1.
            alignment: Its address is a multiple of it; a power of two of at most 2 MiB.

        Raises:
            MemoryReleased: After `release`, before `resume`.
            MemoryRefused: The broker gives no more, or the reserved addresses do not suffice.
            BrokerUnreachable: It is gone, and more is needed of it.
            NotTheOwner: This process is a child of the one that made this.
            ValueError: The size or alignment cannot be.
        """
        if size_bytes < 1 or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"cannot allocate {size_bytes} bytes at a multiple of {alignment}")
        if alignment > _GRAIN_BYTES:
            raise ValueError(f"an alignment of {alignment} is more than {_GRAIN_BYTES}")
        taken = -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            self._check_owner("allocate")
            self.check_mapped()
            self._collect()
            address = self._place(taken, max(alignment, _ALIGNMENT))
        return Block(self, address, size_bytes)

    @property
    def size_bytes(self) -> int:
        """How much memory of the broker there is, whether blocks use it or not."""
        with self._lock:
            return sum(region.length for region in self._regions.values())

    def check_mapped(self) -> None:
        """Raise unless the memory can be touched.

        Raises:
            MemoryReleased: It is released or closed.
        """
        if self._is_closed:
            raise MemoryReleased("this memory was given back")
        if self._is_released:
            raise MemoryReleased(
                "this memory is released for a capture", next_step="call resume first"
            )

    def take_back(self, address: int) -> None:
        """Free the block at an address; `Block.free` calls it."""
        with self._lock:
            self._check_owner("free")
            self.check_mapped()
            self._collect()
            self._give(address)

    def drop(self, address: int) -> None:
        """Free the block at an address some time later; never waits."""
        self._dropped.append(address)

    def _place(self, taken: int, alignment: int) -> int:
        for region in self._regions.values():
            address = region.free.take(taken, alignment)
            if address is not None:
                break
        else:
            region = self._new_region(max(_rounded(taken), self._region_bytes))
            address = region.free.take(taken, alignment)
            assert address is not None, "a region begins at a multiple of every alignment"
        self._blocks[address] = (region, taken)
        return address

    def _new_region(self, length: int) -> _Region:
        address = self._space.take(length, _GRAIN_BYTES)
        if address is None:
            raise MemoryRefused(
                f"{length} bytes do not fit into the {self._reserved[1]} that were reserved",
                next_step="free some, or give a larger reserve_bytes",
            )
        number, self._next_region = self._next_region, self._next_region + 1
        region = _Region(number, address, length, self._huge, FreeList(address, length))
        try:
            answer = self._call("allocate", region.document())
            (region.fd,) = _exactly(answer, 1)
            region.huge = answer.values.get("huge") is True
            self._map(region)
        except BaseException:
            _close(region)
            self._space.give(address, length)
            raise
        self._regions[number] = region
        return region

    def _give(self, address: int) -> None:
        region, taken = self._blocks.pop(address)
        region.free.give(address, taken)
        # One that is empty is kept, for whoever allocates next.
        spare = [one for one in self._regions.values() if one.free.is_whole]
        if region.free.is_whole and (len(spare) > 1 or region.length > self._region_bytes):
            self._free_region(region)

    def _free_region(self, region: _Region) -> None:
        mappings.reserve_again(region.address, region.length)
        del self._regions[region.number]
        self._space.give(region.address, region.length)
        _close(region)
        # A broker that is not there does not have it; the next one will not be told of it.
        with contextlib.suppress(ExternalMemoryError):
            self._call("free", {"region": region.number})

    def _collect(self) -> None:
        """Free what nobody has any more."""
        while self._dropped:
            address = self._dropped.popleft()
            if not self._is_guest:
                self._give(address)

    # -- capture and restore ----------------------------------------------------------------------

    def release(self) -> None:
        """Unmap all memory and let go of the broker, so that CRIU sees nothing of it.

        No thread may touch the memory from now on until `resume`: that is SIGSEGV. Idempotent.

        Raises:
            BrokerUnreachable: It is gone. The memory stays mapped: nobody else would have it.
            MemoryRefused: The broker does not take it. The memory stays mapped.
        """
        with self._lock:
            if self._is_closed or self._is_released:
                return
            if self._is_guest:
                self._unmap_all()
            else:
                self._collect()
                self._release()
            self._is_released = True

    def _release(self) -> None:
        self._connected()
        self._unmap_all()
        try:
            self._call("release")
        except BaseException:
            for region in self._regions.values():
                self._map(region)
            raise
        self._hang_up()
        for region in self._regions.values():
            _close(region)

    def resume(self, timeout_s: float | None = None) -> None:
        """Map all memory again where it was; waits until it is filled or a capture has read it.

        Idempotent.

        Args:
            timeout_s: How long to wait; none for ever.

        Raises:
            BrokerUnreachable: There is no broker, or not in time. Call it again.
            MemoryLost: The broker does not have this memory: it was restored without the agent,
                or the broker and its holder both died while it was released.
        """
        with self._lock:
            if self._is_closed or not self._is_released:
                return
            connection = Connection(self._path, timeout_s=_ANSWER_S_MAX)
            try:
                self._attach(connection, timeout_s)
                if not self._is_guest:
                    connection.call("resumed")
            except BaseException:
                connection.close()
                self._unmap_all()
                for region in self._regions.values():
                    _close(region)
                raise
            if self._is_guest:
                connection.close()
            else:
                self._connection = connection
            self._is_released = False

    def _attach(self, connection: Connection, timeout_s: float | None) -> None:
        self._hello(connection, create=False)
        ready = connection.call("resume", timeout_s=timeout_s, waits=True)
        there = set(ready.numbers("regions"))
        regions = list(self._regions.values())
        if self._is_guest:
            # What the parent has freed meanwhile is nobody's.
            regions = [region for region in regions if region.number in there]
        for at in range(0, len(regions), _BATCH):
            batch = regions[at : at + _BATCH]
            numbers = [region.number for region in batch]
            fds = _exactly(connection.call("take", {"regions": numbers}), len(batch))
            for region, fd in zip(batch, fds, strict=True):
                region.fd = fd
            for region in batch:
                self._map(region)
                if self._is_guest:
                    _close(region)

    def close(self) -> None:
        """Give all memory and addresses back. No block may be used any more. Idempotent.

        In a child of `fork`, only the child loses it.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            regions = list(self._regions.values())
            self._regions.clear()
            mappings.unmap(*self._reserved)
            if not self._is_guest:
                # One that is not there has nothing that could be given back.
                with contextlib.suppress(ExternalMemoryError):
                    self._call("bye")
            self._hang_up()
            for region in regions:
                _close(region)
            self._blocks.clear()
            self._dropped.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _map(self, region: _Region) -> None:
        try:
            found = os.fstat(region.fd).st_size
            if found != region.length:
                # Touching what a file lacks would be SIGBUS some time later.
                raise MemoryRefused(f"region {region.number} has {found} bytes")
            mappings.map_shared(region.fd, region.address, region.length)
        except OSError as error:
            raise MemoryRefused(
                f"{region.length} bytes cannot be mapped at {region.address:#x}: {error.strerror}"
            ) from error
        region.is_mapped = True

    def _unmap_all(self) -> None:
        for region in self._regions.values():
            mappings.reserve_again(region.address, region.length)
            region.is_mapped = False

    # -- the broker -------------------------------------------------------------------------------

    def _call(self, kind: str, values: dict[str, object] | None = None) -> Answer:
        """Ask the broker; if it was started anew meanwhile, tell it first what there is."""
        if self._connection is not None:
            try:
                return self._connection.call(kind, values)
            except BrokerUnreachable:
                self._hang_up()
        return self._connected().call(kind, values)

    def _connected(self) -> Connection:
        if self._connection is not None:
            return self._connection
        connection = Connection(self._path, timeout_s=_ANSWER_S_MAX)
        try:
            welcome = self._hello(connection, create=True)
            if welcome.values.get("released") is True:
                # The answer to a release was lost: the memory stayed mapped, or is again.
                connection.call("resumed")
            there = set(welcome.numbers("regions"))
            if self._is_closed:
                there = set()  # It is only told that all of it goes.
            for number in there - self._regions.keys():
                # The answer that told of it was lost.
                connection.call("free", {"region": number})
            for region in self._regions.values():
                if region.number not in there:
                    connection.call("adopt", region.document(), [region.fd])
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        return connection

    def _hello(self, connection: Connection, *, create: bool) -> Answer:
        values = {
            "version": PROTOCOL_VERSION,
            "token": self._token,
            "create": create,
            "rank": self._rank,
        }
        return connection.call("hello", values)

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _check_owner(self, doing: str) -> None:
        if self._is_guest:
            raise NotTheOwner(
                f"a child of fork cannot {doing} memory of its parent",
                next_step="make a HostMemory of its own",
            )

    def _become_guest(self) -> None:
        """In a child right after `fork`: keep the memory, and nothing else of the parent's."""
        self._lock = threading.RLock()
        self._is_guest = True
        self._hang_up()
        for region in self._regions.values():
            _close(region)


def _all_become_guests() -> None:
    for memory in list(_all):
        memory._become_guest()  # noqa: SLF001 - of this module


_all: weakref.WeakSet[HostMemory] = weakref.WeakSet()
os.register_at_fork(after_in_child=_all_become_guests)


def _close(region: _Region) -> None:
    if region.fd >= 0:
        os.close(region.fd)
        region.fd = -1


def _exactly(answer: Answer, count: int) -> Sequence[int]:
    if len(answer.fds) != count:
        for fd in answer.fds:
            os.close(fd)
        raise BrokerUnreachable(f"the broker sent {len(answer.fds)} regions instead of {count}")
    return answer.fds


def _reserve(length: int) -> int:
    for address in _candidates(length):
        try:
            if mappings.reserve(address, length):
                return address
        except OSError as error:
            raise MemoryRefused(
                f"{length} bytes of addresses cannot be reserved: {error.strerror}",
                next_step="raise ulimit -v, or give a smaller reserve_bytes",
            ) from error
    raise MemoryRefused(
        f"no {length} bytes of addresses are free", next_step="give a smaller reserve_bytes"
    )


def _candidates(length: int) -> Iterator[int]:
    step = -(-length // _ADDRESS_STEP) * _ADDRESS_STEP
    return iter(range(_ADDRESS_FIRST, _ADDRESS_LAST - length, step))


def _machine_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * mappings.PAGE_BYTES


def _rounded(length: int) -> int:
    return -(-length // _GRAIN_BYTES) * _GRAIN_BYTES
