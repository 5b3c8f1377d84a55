"""Whether device memory holds the chunks that a snapshot's manifest says, and which it does not."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from snapstore.units import MIB

if TYPE_CHECKING:
    from snapagent.gpu.hashing import PieceHasher
    from snapstore import FileChunks

__all__ = ["ChunkPlace", "DeviceChunks", "place_of", "zero_digests"]

_ZEROS_BYTES_MAX: Final = 1 * MIB
_ZEROS = bytes(_ZEROS_BYTES_MAX)

Numbers = npt.NDArray[np.int64]
Digests = npt.NDArray[np.uint8]


class ChunkPlace(NamedTuple):
    """Which chunk a byte of a file belongs to, for messages; zeros are none."""

    offset: int
    length: int
    chunk: str


@dataclass(frozen=True, slots=True)
class DeviceChunks:
    """What device memory that was filled from a file has to hash to, zeros included.

    Attributes:
        offsets: Where each piece begins.
        lengths: Their lengths.
        digests: What each must hash to, a row of 32 bytes.
    """

    offsets: Numbers
    lengths: Numbers
    digests: Digests

    @classmethod
    def of(cls, chunks: FileChunks) -> Self | None:
        """Say it of a file; None if it has parts of chunks, which cannot be hashed by themselves.

        No part of the file is left out: what the manifest calls zeros is hashed as well, so that it
        does not matter what a layout says is there.
        """
        if not (chunks.whole | chunks.zeros).all():
            return None
        counts = np.where(chunks.zeros, -(-chunks.lengths // _ZEROS_BYTES_MAX), 1)
        row = np.repeat(np.arange(len(counts)), counts)
        number = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        offsets = chunks.offsets[row] + number * _ZEROS_BYTES_MAX
        ends = (chunks.offsets + chunks.lengths)[row]
        zeros = chunks.zeros[row]
        lengths = ends - offsets
        lengths[zeros] = np.minimum(lengths[zeros], _ZEROS_BYTES_MAX)
        digests = chunks.ids[row]
        digests[zeros] = zero_digests(lengths[zeros])
        return cls(offsets, lengths, digests)

    def first_wrong(self, hasher: PieceHasher, address: int) -> ChunkPlace | None:
        """Hash all of the memory that begins at an address, and name the first chunk that differs.

        Raises:
            GpuFailed: The driver failed.
        """
        found = hasher.digests(address + self.offsets, self.lengths)
        wrong = (found != self.digests).any(axis=1)
        if not wrong.any():
            return None
        row = int(wrong.argmax())
        chunk = self.digests[row].tobytes().hex()[:12]
        return ChunkPlace(int(self.offsets[row]), int(self.lengths[row]), chunk)


def zero_digests(lengths: Numbers) -> Digests:
    """Give the digests of zeros, each of up to 1 MiB."""
    different, which = np.unique(lengths, return_inverse=True)
    rows = [np.frombuffer(_zero_digest(length), np.uint8) for length in different.tolist()]
    return np.array(rows, np.uint8).reshape(-1, 32)[which]


@functools.lru_cache(maxsize=256)
def _zero_digest(length: int) -> bytes:
    return blake3(memoryview(_ZEROS)[:length]).digest()


def place_of(chunks: FileChunks, offset: int, data: memoryview) -> ChunkPlace:
    """Name the first chunk that bytes of a file, from `offset` on, differ in.

    If none of those that are whole within the bytes differs, it is the one at their beginning.
    """
    end = offset + data.nbytes
    ends = chunks.offsets + chunks.lengths
    first = int(np.searchsorted(ends, offset, side="right"))
    last = int(np.searchsorted(chunks.offsets, end, side="left"))
    named = first
    for row in range(first, last):
        begin, stop = int(chunks.offsets[row]), int(ends[row])
        if chunks.whole[row] and begin >= offset and stop <= end:
            digest = blake3(data[begin - offset : stop - offset]).digest()
            if digest != chunks.ids[row].tobytes():
                named = row
                break
    chunk = "zeros" if chunks.zeros[named] else chunks.ids[named].tobytes().hex()[:12]
    return ChunkPlace(int(chunks.offsets[named]), int(chunks.lengths[named]), chunk)
