"""What all external memory of a workload has in common, whatever device it is of.

Blocks come out of regions, regions come from the broker; before a capture all of them are unmapped
and only their addresses are kept, and afterwards they are mapped again at the same addresses, in
the same process or in the one that was restored from the snapshot. `HostMemory` and `DeviceMemory`
say how addresses are had and how a region is mapped.

What is promised:

1. An address means the same bytes before `release` and after `resume`. In between, touching them is
   an error that ends the work, never wrong data.
2. What fails changes nothing: memory that cannot be given to the broker stays mapped, and memory
   that cannot be mapped again stays reserved, so that `resume` can be called again.
3. A broker that dies takes nothing away. The next one gets what is mapped from here, when it is
   next spoken to, and what was released from the process that holds it.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import os
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from snapagent.workload.client import Connection
from snapagent.workload.errors import (
    BrokerUnreachable,
    ExternalMemoryError,
    MemoryReleased,
    NotTheOwner,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeVar

    from typing_extensions import override

    from snapagent.workload.client import Answer
    from snapagent.workload.free_list import FreeList

    Method = TypeVar("Method", bound=Callable[..., object])
else:

    def override(method: Method) -> Method:
        """Stand in for that of `typing`, which is newer than the Python of some workloads."""
        return method


__all__ = [
    "ALIGNMENT",
    "GRAIN_BYTES",
    "REGION_BYTES",
    "SOCKET_DEFAULT",
    "SOCKET_VARIABLE",
    "ExternalMemory",
    "MemoryRegion",
    "close_file",
    "override",
    "rounded",
]

SOCKET_VARIABLE: Final = "SNAPAGENT_MEMORY_SOCKET"
SOCKET_DEFAULT: Final = "/run/snapagent/memory.sock"

GRAIN_BYTES = 2 << 20
"""Regions are multiples of this, and begin at such: one large page, of the host or of a GPU."""
REGION_BYTES = 64 << 20
ALIGNMENT = 64
_BATCH = 32
"""Regions whose descriptors go in one message."""
_ANSWER_S_MAX = 30.0


@dataclass(slots=True)
class MemoryRegion:
    """Memory of the broker, and where it is mapped."""

    number: int
    address: int
    length: int
    free: FreeList
    ordinal: int = -1
    """Of the GPU; -1 is the host."""
    device: str = ""
    """The broker's name of the GPU; empty is the host."""
    huge: bool = False
    fd: int = -1
    is_mapped: bool = False

    def document(self) -> dict[str, object]:
        """Say to the broker what it is."""
        found: dict[str, object] = {
            "region": self.number,
            "address": self.address,
            "length": self.length,
            "huge": self.huge,
        }
        return {**found, "device": self.device} if self.device else found


class ExternalMemory(abc.ABC):
    """External memory of one process: one session of the broker. All methods are thread-safe."""

    _version = 1
    """Of the protocol, the oldest that suffices."""

    def __init__(self, socket_path: str | None, *, region_bytes: int, rank: int | str) -> None:
        """Prepare; the broker is not asked yet."""
        self._path = socket_path or os.environ.get(SOCKET_VARIABLE) or SOCKET_DEFAULT
        self._region_bytes = rounded(region_bytes)
        self._rank = rank
        self._token = os.urandom(32).hex()
        self._lock = threading.RLock()
        self._regions: dict[int, MemoryRegion] = {}
        self._blocks: dict[int, tuple[MemoryRegion, int]] = {}
        """By address: its region and how much of it was taken."""
        self._dropped: collections.deque[int] = collections.deque()
        self._next_region = 1
        self._is_released = self._is_closed = self._is_guest = False
        self._connection: Connection | None = None
        _all.add(self)

    # -- what kinds of memory differ in -----------------------------------------------------------

    @abc.abstractmethod
    def _new_region_at(self, length: int, ordinal: int) -> MemoryRegion:
        """Reserve addresses for one more region, which the broker is not asked for yet."""

    @abc.abstractmethod
    def _give_addresses(self, region: MemoryRegion) -> None:
        """Give back the addresses of a region that is not mapped."""

    @abc.abstractmethod
    def _map_file(self, region: MemoryRegion) -> None:
        """Map what the region's descriptor is of; its addresses stay reserved if it fails."""

    @abc.abstractmethod
    def _unmap_file(self, region: MemoryRegion) -> None:
        """Unmap a region and keep its addresses reserved."""

    def _wait_for_devices(self) -> None:  # noqa: B027 - that of the host is never busy
        """Wait until nothing that was begun uses the memory any more."""

    def _note_device(self, region: MemoryRegion, device: str) -> None:  # noqa: B027
        """Learn on which GPU a region is now."""

    # -- blocks -----------------------------------------------------------------------------------

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
        """Free the block at an address; `free` of a block calls it."""
        with self._lock:
            self._check_owner("free")
            self.check_mapped()
            self._collect()
            self._give(address)

    def drop(self, address: int) -> None:
        """Free the block at an address some time later; never waits."""
        self._dropped.append(address)

    def _allocate(self, size_bytes: int, alignment: int, ordinal: int = -1) -> int:
        """Take memory for a block and return its address."""
        if size_bytes < 1 or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"cannot allocate {size_bytes} bytes at a multiple of {alignment}")
        if alignment > GRAIN_BYTES:
            raise ValueError(f"an alignment of {alignment} is more than {GRAIN_BYTES}")
        taken = -(-size_bytes // ALIGNMENT) * ALIGNMENT
        with self._lock:
            self._check_owner("allocate")
            self.check_mapped()
            self._collect()
            return self._place(taken, max(alignment, ALIGNMENT), ordinal)

    def _place(self, taken: int, alignment: int, ordinal: int) -> int:
        for region in self._regions.values():
            if region.ordinal == ordinal:
                address = region.free.take(taken, alignment)
                if address is not None:
                    break
        else:
            region = self._new_region(max(rounded(taken), self._region_bytes), ordinal)
            address = region.free.take(taken, alignment)
            assert address is not None, "a region begins at a multiple of every alignment"
        self._blocks[address] = (region, taken)
        return address

    def _new_region(self, length: int, ordinal: int) -> MemoryRegion:
        region = self._new_region_at(length, ordinal)
        try:
            answer = self._call("allocate", region.document())
            (region.fd,) = _exactly(answer, 1)
            region.huge = answer.values.get("huge") is True
            self._map(region)
        except BaseException:
            close_file(region)
            self._give_addresses(region)
            raise
        self._regions[region.number] = region
        return region

    def _next_number(self) -> int:
        number, self._next_region = self._next_region, self._next_region + 1
        return number

    def _give(self, address: int) -> None:
        region, taken = self._blocks.pop(address)
        region.free.give(address, taken)
        # One that is empty is kept, for whoever allocates next.
        spare = [
            one
            for one in self._regions.values()
            if one.free.is_whole and one.ordinal == region.ordinal
        ]
        if region.free.is_whole and (len(spare) > 1 or region.length > self._region_bytes):
            self._free_region(region)

    def _free_region(self, region: MemoryRegion) -> None:
        self._wait_for_devices()
        self._unmap(region)
        del self._regions[region.number]
        self._give_addresses(region)
        close_file(region)
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

        No thread may touch the memory from now on until `resume`. Idempotent.

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
        self._wait_for_devices()
        try:
            self._unmap_all()
            self._call("release")
        except BaseException:
            for region in self._regions.values():
                if not region.is_mapped:
                    self._map(region)
            raise
        self._hang_up()
        for region in self._regions.values():
            close_file(region)

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
                    close_file(region)
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
            answer = connection.call("take", {"regions": [region.number for region in batch]})
            fds = _exactly(answer, len(batch))
            devices = answer.values.get("devices")
            for number, (region, fd) in enumerate(zip(batch, fds, strict=True)):
                region.fd = fd
                if isinstance(devices, list) and len(devices) == len(batch):
                    self._note_device(region, str(devices[number]))
            for region in batch:
                self._map(region)
                if self._is_guest:
                    close_file(region)

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
            self._close_regions(regions)
            if not self._is_guest:
                # One that is not there has nothing that could be given back.
                with contextlib.suppress(ExternalMemoryError):
                    self._call("bye")
            self._hang_up()
            for region in regions:
                close_file(region)
            self._blocks.clear()
            self._dropped.clear()

    def _close_regions(self, regions: Sequence[MemoryRegion]) -> None:
        """Unmap them, and give their addresses back."""
        self._wait_for_devices()
        for region in regions:
            self._unmap(region)
            self._give_addresses(region)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _map(self, region: MemoryRegion) -> None:
        self._map_file(region)
        region.is_mapped = True

    def _unmap(self, region: MemoryRegion) -> None:
        if region.is_mapped:
            self._unmap_file(region)
            region.is_mapped = False

    def _unmap_all(self) -> None:
        for region in self._regions.values():
            self._unmap(region)

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
            "version": self._version,
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
                next_step=f"make a {type(self).__name__} of its own",
            )

    def _become_guest(self) -> None:
        """In a child right after `fork`: keep the memory, and nothing else of the parent's."""
        self._lock = threading.RLock()
        self._is_guest = True
        self._hang_up()
        for region in self._regions.values():
            close_file(region)


def _all_become_guests() -> None:
    for memory in list(_all):
        memory._become_guest()  # noqa: SLF001 - of this module


_all: weakref.WeakSet[ExternalMemory] = weakref.WeakSet()
os.register_at_fork(after_in_child=_all_become_guests)


def close_file(region: MemoryRegion) -> None:
    """Close a region's descriptor. Idempotent."""
    if region.fd >= 0:
        os.close(region.fd)
        region.fd = -1


def rounded(length: int) -> int:
    """Return the next length that a region can have."""
    return -(-length // GRAIN_BYTES) * GRAIN_BYTES


def _exactly(answer: Answer, count: int) -> Sequence[int]:
    if len(answer.fds) != count:
        for fd in answer.fds:
            os.close(fd)
        raise BrokerUnreachable(f"the broker sent {len(answer.fds)} regions instead of {count}")
    return answer.fds
