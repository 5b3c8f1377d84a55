"""What ranks use, as keys to be counted: their chunks, and the frames of their layouts.

A chunk's key is the first half of its id: two chunks that share 16 bytes do not occur by accident,
and who makes them on purpose spoils counts and nothing else. A frame's key is its place.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import numpy as np

from snapstore.errors import FormatError, IntegrityError
from snapstore.format.tables import id_words
from snapstore.repository.snapshot import LoadedRank, load_snapshot

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    import numpy.typing as npt

    from snapstore.backend.base import Backend
    from snapstore.format.layout import LayoutTables
    from snapstore.format.snapshot import RankEntry
    from snapstore.format.tables import Rows
    from snapstore.ids import RankId, SnapshotId
    from snapstore.repository.frames import FrameTable, Numbers
    from snapstore.repository.spool import KeySpool

__all__ = ["RankUsers", "add_chunks", "add_frames", "sums_of_streams"]

_SLICE_ROWS = 1 << 18
"""Extents looked at together, so that temporary arrays stay small beside a large table."""


class RankUsers:
    """Rank manifests and who uses each: snapshots of one family share many.

    What cannot be read is passed over, and said in `damaged`.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.damaged: list[str] = []
        self.entries: dict[RankId, RankEntry] = {}
        self.users: dict[RankId, set[int]] = {}

    def add(self, snapshot: SnapshotId, users: Collection[int], *, named: str = "") -> list[RankId]:
        """Say who uses a snapshot, and return its ranks."""
        ranks: list[RankId] = []
        with self.passing_over():
            manifest = load_snapshot(self._backend, snapshot, named=named).manifest
            for entry in manifest.ranks:
                self.entries.setdefault(entry.rank_id, entry)
                self.users.setdefault(entry.rank_id, set()).update(users)
                ranks.append(entry.rank_id)
        return ranks

    def load(self, rank: RankId) -> LoadedRank:
        """Load a rank.

        Raises:
            IntegrityError: It is damaged or gone.
        """
        loaded = LoadedRank(self._backend, self.entries[rank])
        assert loaded.meta.rank == loaded.number, loaded.number  # and refused by then if it is not
        return loaded

    @contextlib.contextmanager
    def passing_over(self) -> Iterator[None]:
        """Do something with one rank; if it is damaged, say so in `damaged` and go on."""
        try:
            yield
        except (FormatError, IntegrityError) as error:
            self.damaged.append(str(error))


def add_chunks(spool: KeySpool, extents: Rows, groups: npt.NDArray[np.integer]) -> None:
    """Add the chunks of a chunk table: the bytes of extents count, a chunk's length is its size.

    Args:
        spool: Where to.
        extents: Rows of `EXTENT_DTYPE`; zeros are left out.
        groups: The group of each extent.
    """
    for first in range(0, len(extents), _SLICE_ROWS):
        part = extents[first : first + _SLICE_ROWS]
        data = part["chunk_length"] != 0
        words = id_words(part["id"][data])
        spool.add(
            words[:, 0],
            words[:, 1],
            counted=part["length"][data],
            sizes=part["chunk_length"][data],
            groups=groups[first : first + _SLICE_ROWS][data],
        )


def add_frames(spool: KeySpool, layout: LayoutTables, packs: FrameTable, group: int) -> Numbers:
    """Add the frames of a layout with their stored lengths; returns its packs' numbers.

    Args:
        spool: Where to.
        layout: The layout.
        packs: Numbers packs.
        group: Who has these frames.

    Raises:
        Malformed: It contradicts what other layouts say of a pack.
    """
    numbers = packs.add_packs(layout.packs)
    first_words = id_words(layout.packs["id"])[:, 0]
    frames = layout.frames
    # Packs are at most 128 MiB long, so an offset in one has 27 bits.
    places = (numbers.astype(np.uint64) << np.uint64(32))[frames["pack"]] | frames["offset"]
    stored = frames["stored_length"]
    spool.add(
        first_words[frames["pack"]],
        places,
        counted=stored,
        sizes=stored,
        groups=np.broadcast_to(np.int64(group), len(frames)),
    )
    return numbers


def sums_of_streams(streams: Rows, values: npt.NDArray[np.integer]) -> Numbers:
    """Add up one value per extent for each stream, exactly."""
    totals = np.zeros(len(values) + 1, np.int64)
    np.cumsum(values.astype(np.int64), out=totals[1:])
    firsts = streams["first"].astype(np.int64)
    sums: Numbers = totals[firsts + streams["count"].astype(np.int64)] - totals[firsts]
    return sums
