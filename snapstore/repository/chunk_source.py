"""Where the bytes of chunks come from that were hashed elsewhere, and what is checked of them."""

from __future__ import annotations

import abc
import contextlib
import threading
from collections.abc import Generator
from typing import TYPE_CHECKING

import xxhash
from blake3 import blake3

from snapstore.backend.direct import page_aligned
from snapstore.errors import DigestMismatch, Interrupted
from snapstore.ids import ChunkId
from snapstore.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from snapstore.format.tables import Rows

__all__ = ["CheckedFrame", "ChunkSource", "Loads", "PartGroups", "Span", "check_chunk"]

Span = tuple[int, int]
"""Where bytes of a file begin and end."""

PartGroups = Generator["Iterator[memoryview]", None, None]
"""See `ChunkSource.parts`."""

_PART_BYTES = 4 * MIB
"""As long as a raw frame can be."""


class ChunkSource(abc.ABC):
    """Brings bytes of a file whose chunks were hashed where they are.

    The one who has them makes a subclass; `FileWriter.write_hashed` calls its methods, on several
    threads at once.
    """

    @abc.abstractmethod
    def load(self, offset: int, length: int, into: memoryview) -> None:
        """Fill all of a buffer of that length with the file's bytes from an offset on."""

    def parts(self, spans: Sequence[Span]) -> PartGroups:
        """Lend the bytes of spans of the file, in this order.

        For who has them in memory of its own, or brings some while others are stored; by default
        they go through a buffer, with `load`.

        Returns:
            Groups of parts, of which none has bytes of two spans. All parts of a group are good
            until the next group is asked for or the generator is closed. They are written at once:
            the larger the group, the fewer calls.
        """
        buffer = page_aligned(_PART_BYTES).data
        for begin, end in spans:
            for offset in range(begin, end, _PART_BYTES):
                with buffer[: min(_PART_BYTES, end - offset)] as part:
                    self.load(offset, part.nbytes, part)
                    yield iter([part])

    @property
    def joined_bytes_max(self) -> int:
        """How much `joined_digest` can hash; 0, the default, if there is nothing like that."""
        return 0

    def joined_digest(self, pieces: Sequence[Span | bytes]) -> bytes:
        """Hash spans of the file, where they are, and bytes as if they were one: BLAKE3-256.

        Only asked for as much as `joined_bytes_max`, so never of one that has none.
        """
        raise AssertionError(
            f"{len(pieces)} pieces to hash where {self.joined_bytes_max} bytes fit"
        )


class Loads:
    """What one call of `write_hashed` loads: counted, checked, and ended with it. Thread-safe."""

    def __init__(self, source: ChunkSource, *, check_all: bool) -> None:
        """Prepare.

        Args:
            source: Has the bytes.
            check_all: Whether all chunks are hashed again, or some.
        """
        self.source = source
        self.check_all = check_all
        self.bytes = 0
        self._changed = threading.Condition()
        self._under_way = 0
        self._is_closed = False

    def fill(self, spans: Sequence[Span], chunks: Rows, into: memoryview) -> bytes:
        """Load a frame into the place from which it will be stored; returns its XXH3-128.

        Args:
            spans: Where its bytes are in the file.
            chunks: What it holds, rows of the pack's `CHUNK_DTYPE`.
            into: A buffer of its length.

        Raises:
            DigestMismatch: What was loaded is not what was hashed.
            Interrupted: Nobody wants it any more.
        """
        frame = CheckedFrame(chunks if self.check_all else chunks[:1])
        done = 0
        for begin, end in spans:
            with into[done : done + end - begin] as part, self._one():
                self.source.load(begin, end - begin, part)
                frame.add(part)
                done += part.nbytes
                self._count(part.nbytes)
        return frame.finish()

    @contextlib.contextmanager
    def parts(self, spans: Sequence[Span]) -> Iterator[PartGroups]:
        """Have spans lent; see `ChunkSource.parts`.

        Raises:
            Interrupted: Nobody wants it any more; also in the middle.
        """
        with (
            self._one(),
            contextlib.closing(self.source.parts(spans)) as lent,
        ):
            yield self._watched(lent)
        self._count(sum(end - begin for begin, end in spans))

    def joined_digest(self, pieces: Sequence[Span | bytes]) -> bytes:
        """See `ChunkSource.joined_digest`.

        Raises:
            Interrupted: Nobody wants it any more.
        """
        with self._one():
            return self.source.joined_digest(pieces)

    def close(self) -> None:
        """Begin nothing more, and wait for what is under way."""
        with self._changed:
            self._is_closed = True
            self._changed.wait_for(lambda: not self._under_way)

    @contextlib.contextmanager
    def _one(self) -> Iterator[None]:
        with self._changed:
            self._require_open()
            self._under_way += 1
        try:
            yield
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()

    def _watched(self, lent: PartGroups) -> PartGroups:
        for group in lent:
            yield group
            self._require_open()

    def _count(self, length: int) -> None:
        with self._changed:
            self.bytes += length

    def _require_open(self) -> None:
        if self._is_closed:
            raise Interrupted("the file is not written any more")


class CheckedFrame:
    """Looks at the bytes of a frame as they come: its checksum, and chunks of it."""

    def __init__(self, chunks: Rows) -> None:
        """Prepare.

        Args:
            chunks: Those at its beginning that are hashed, rows of the pack's `CHUNK_DTYPE`.
        """
        self._checksum = xxhash.xxh3_128()
        self._wanted = [(bytes(name), length) for name, length in chunks.tolist()]
        self._row = 0
        self._left = self._wanted[0][1] if self._wanted else 0
        self._hasher = blake3()

    def add(self, part: memoryview) -> None:
        """Take what follows.

        Raises:
            DigestMismatch: It is not what was hashed elsewhere.
        """
        self._checksum.update(part)
        done = 0
        while done < part.nbytes and self._row < len(self._wanted):
            count = min(self._left, part.nbytes - done)
            with part[done : done + count] as some:
                self._hasher.update(some)
            done += count
            self._left -= count
            if not self._left:
                self._end_chunk()

    def finish(self) -> bytes:
        """Return the XXH3-128 of all that came."""
        assert self._row == len(self._wanted), "the frame is not complete"
        return self._checksum.digest()

    def _end_chunk(self) -> None:
        wanted, length = self._wanted[self._row]
        check_chunk(self._hasher.digest(), wanted, length)
        self._row += 1
        if self._row < len(self._wanted):
            self._left = self._wanted[self._row][1]
            self._hasher = blake3()


def check_chunk(found: bytes, wanted: bytes, length: int) -> None:
    """Compare what was loaded as a chunk with what was hashed before.

    Raises:
        DigestMismatch: It is something else.
    """
    if found != wanted:
        raise DigestMismatch(
            f"{length} bytes came as chunk {ChunkId(found).short} that had been hashed "
            f"as {ChunkId(wanted).short}",
            next_step="nothing may change the memory while it is captured: capture again",
        )
