"""What the node's cache has in memory of the files that are pulled: placed without decoding it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from snapstore.backend.direct import page_aligned
from snapstore.cache.decoded import FileKey
from snapstore.repository.file_content import CACHED_BYTES_MIN, content_digest
from snapstore.repository.memory import READ_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from snapstore.cache.decoded import FoundFile
    from snapstore.format.tree import TreeEntry
    from snapstore.repository.file_sink import StreamFiles
    from snapstore.repository.read_plan import Destination, ReadPlan, ReadUnit
    from snapstore.repository.snapshot import LoadedRank, Snapshot
    from snapstore.repository.verifier import ChunkVerifier

__all__ = ["FoundFiles"]

_FILES_MAX = 256
"""Open at once, beside as many that are written; what is in further ones is read and decoded."""


_TAKEN_BYTES_MAX = 2 * READ_BYTES
"""What decodes to more than that is decoded: it was read quickly, and would need room here."""


class _Scratch(threading.local):
    """Memory of one thread."""

    def __init__(self) -> None:
        self._memory = page_aligned(0)

    def take(self) -> memoryview:
        if not len(self._memory):
            self._memory = page_aligned(_TAKEN_BYTES_MAX)
        return self._memory.data


_scratch = _Scratch()


class FoundFiles:
    """The decoded files of a snapshot that are there already. Thread-safe."""

    def __init__(
        self,
        snapshot: Snapshot,
        ranks: Sequence[LoadedRank],
        verifiers: Sequence[ChunkVerifier],
        plan: ReadPlan,
        files: StreamFiles,
    ) -> None:
        """Look nothing up yet; `verifiers` are those of the ranks, or none for fast integrity."""
        self._snapshot = snapshot
        self._ranks = ranks
        self._verifiers = verifiers
        self._plan = plan
        self._files = files
        self._lock = threading.Lock()
        self._found: dict[bytes, FoundFile | None] = {}
        self.taken_bytes = 0

    def take(self, unit: ReadUnit, place: Callable[[Destination, memoryview], None]) -> bool:
        """Place all bytes that a read would bring, if they are there; says whether it did."""
        if self._snapshot.node_cache is None:
            return False
        wanted = [
            destination
            for frame in range(unit.first, unit.last)
            for destination in self._plan.destinations(frame)
        ]
        # All or nothing: a frame that has to be decoded for one file is decoded for all of them.
        total = sum(destination.length for destination in wanted)
        if total > _TAKEN_BYTES_MAX or not all(self._has(destination) for destination in wanted):
            return False
        data = _scratch.take()
        done = 0
        for destination in wanted:
            if not self._read(destination, data[done : done + destination.length]):
                return False
            done += destination.length
        # Nothing is placed before all of it is here: it would be placed twice.
        for destination in wanted:
            place(destination, data[: destination.length])
            data = data[destination.length :]
        with self._lock:
            self.taken_bytes += unit.length
        return True

    def close(self) -> None:
        """Let go of all files. Idempotent."""
        with self._lock:
            for found in self._found.values():
                if found is not None:
                    found.close()
            self._found.clear()

    def _read(self, destination: Destination, into: memoryview) -> bool:
        for piece in self._files.pieces(destination):
            found = self._file(destination.source, piece.entry)
            target = into[piece.start : piece.start + piece.length]
            if found is None or not found.read(piece.file_offset, target):
                return False
        return True

    def _has(self, destination: Destination) -> bool:
        for piece in self._files.pieces(destination):
            found = self._file(destination.source, piece.entry)
            if found is None or not found.filled(piece.file_offset, piece.length):
                return False
        return True

    def _file(self, source: int, entry: TreeEntry) -> FoundFile | None:
        with self._lock:
            if entry.path not in self._found:
                self._found[entry.path] = self._look_up(source, entry)
            return self._found[entry.path]

    def _look_up(self, source: int, entry: TreeEntry) -> FoundFile | None:
        cache = self._snapshot.node_cache
        if cache is None or entry.size_bytes < CACHED_BYTES_MIN or len(self._found) >= _FILES_MAX:
            return None
        verifier = self._verifiers[source] if self._verifiers else None
        url = self._snapshot.backend.capabilities.url
        digest = content_digest(verifier, self._ranks[source].id, url, entry)
        return cache.find(FileKey(digest, entry.size_bytes))
