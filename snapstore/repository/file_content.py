"""A file of a snapshot as the node's cache sees it: which content it is, and how to fetch it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from blake3 import blake3

from snapstore.cache.decoded import Cells, FileKey
from snapstore.fstree import show_path
from snapstore.repository.lazy import lazy
from snapstore.units import KIB, MIB

if TYPE_CHECKING:
    from snapstore.format.tree import TreeEntry
    from snapstore.ids import RankId
    from snapstore.repository.file_reader import SnapshotEntry, SnapshotFiles
    from snapstore.repository.verifier import ChunkVerifier

__all__ = ["CACHED_BYTES_MIN", "FileContent", "content_digest"]

CACHED_BYTES_MIN = 64 * KIB
"""Smaller files are as quickly read from frames that are kept, without a file of their own."""

_CELL_BYTES = 2 * MIB
"""A read of one byte fetches this much: mostly one frame, which has to be decoded whole."""

_ZEROS_BYTES_MIN = 1 * MIB


def content_digest(
    verifier: ChunkVerifier | None, rank: RankId, url: str, file: TreeEntry
) -> bytes:
    """Digest that files of the same length share only if they have the same bytes.

    Args:
        verifier: Knows the chunks of the rank; None with fast integrity, where nothing ties bytes
            to their chunks: then it is where they came from.
        rank: Whose file it is.
        url: Of the store.
        file: The file, and no other name of it.
    """
    if not file.size_bytes:
        return blake3().digest()
    if verifier is not None:
        return verifier.content_digest(file.stream, file.offset, file.size_bytes)
    return blake3(os.fsencode(f"fast {rank.hex} {file.stream} {file.offset} {url}")).digest()


class FileContent:
    """See `snapstore.cache.decoded.Content`. Thread-safe."""

    def __init__(self, files: SnapshotFiles, entry: SnapshotEntry) -> None:
        """Look up which content it is; loads the tables of its rank.

        Raises:
            IntegrityError: They are damaged or gone.
        """
        self._files = files
        self._entry = entry
        self.key = FileKey(files.content_digest(entry), entry.size_bytes)
        self.label = show_path(entry.path)

    def cache_names(self) -> set[str]:
        """The names that its cache files may have: as it is read here, and as it is read fast."""
        fast = FileKey(self._files.content_digest(self._entry, is_fast=True), self.key.size_bytes)
        return {self.key.name, fast.name}

    @lazy
    def cells(self) -> Cells:
        """See `Content.cells`."""
        ranges = self._files.ranges(
            self._entry, about_bytes=_CELL_BYTES, zeros_bytes_min=_ZEROS_BYTES_MIN
        )
        starts = [one.offset for one in ranges]
        return Cells([*starts, self._entry.size_bytes], [one.is_zeros for one in ranges])

    def fetch(self, offset: int, into: memoryview) -> None:
        """See `Content.fetch`."""
        self._files.stream_into(self._entry, offset, into)
