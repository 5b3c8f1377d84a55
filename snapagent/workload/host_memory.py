"""Host memory of a workload that belongs to the agent's broker, and so outlives the process."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from snapagent.workload import mappings
from snapagent.workload.block import Block
from snapagent.workload.errors import MemoryRefused
from snapagent.workload.external_memory import (
    ALIGNMENT,
    GRAIN_BYTES,
    REGION_BYTES,
    SOCKET_DEFAULT,
    SOCKET_VARIABLE,
    ExternalMemory,
    MemoryRegion,
    override,
    rounded,
)
from snapagent.workload.free_list import FreeList

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["SOCKET_DEFAULT", "SOCKET_VARIABLE", "HostMemory"]

_ADDRESS_FIRST = 0x2000_0000_0000
_ADDRESS_LAST = 0x5000_0000_0000
"""Far from where kernels put programs, heaps, libraries and stacks."""
_ADDRESS_STEP = 1 << 40


class HostMemory(ExternalMemory):
    """External memory of one process, as many blocks of it as fit. All methods are thread-safe.

    A child of `fork` shares the memory with its parent: both see what either writes. It can also
    `release` and `resume`, which it must before a capture as well, but not allocate or free. Do not
    fork while another thread releases or resumes. Touching released memory is SIGSEGV.

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
        region_bytes: int = REGION_BYTES,
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
        super().__init__(socket_path, region_bytes=region_bytes, rank=rank)
        self._huge = huge_pages
        length = rounded(reserve_bytes or _machine_bytes())
        self._reserved = (_reserve(length), length)
        self._space = FreeList(*self._reserved)
        try:
            self._connected()
        except BaseException:
            mappings.unmap(*self._reserved)
            raise

    def allocate(self, size_bytes: int, *, alignment: int = ALIGNMENT) -> Block:
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
        return Block(self, self._allocate(size_bytes, alignment), size_bytes)

    @override
    def _new_region_at(self, length: int, ordinal: int) -> MemoryRegion:
        address = self._space.take(length, GRAIN_BYTES)
        if address is None:
            raise MemoryRefused(
                f"{length} bytes do not fit into the {self._reserved[1]} that were reserved",
                next_step="free some, or give a larger reserve_bytes",
            )
        free = FreeList(address, length)
        return MemoryRegion(self._next_number(), address, length, free, ordinal, huge=self._huge)

    @override
    def _give_addresses(self, region: MemoryRegion) -> None:
        self._space.give(region.address, region.length)

    @override
    def _map_file(self, region: MemoryRegion) -> None:
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

    @override
    def _unmap_file(self, region: MemoryRegion) -> None:
        mappings.reserve_again(region.address, region.length)

    @override
    def _close_regions(self, regions: Sequence[MemoryRegion]) -> None:
        mappings.unmap(*self._reserved)


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
