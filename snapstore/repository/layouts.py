"""Deriving a layout from a rank manifest and the indexes, when no stored one can be used."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import numpy as np

from snapstore.errors import MissingChunk
from snapstore.format import layout as layout_format
from snapstore.format.tables import STREAM_DTYPE, Rows, id_words
from snapstore.ids import ChunkId, Digest, PackId
from snapstore.repository.catalog import MISSING, Catalog
from snapstore.repository.frames import FrameTable, Numbers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from snapstore.backend.base import Backend
    from snapstore.format.envelope import Built

__all__ = [
    "ZERO_FRAME",
    "SegmentTable",
    "build_layout",
    "derive_layout",
    "join_segments",
    "stream_rows",
]

ZERO_FRAME = -1
"""The frame number of pieces that are zeros."""

SegmentTable = np.ndarray[tuple[int, int], np.dtype[np.int64]]
"""Rows of (length, frame number, offset in the decoded frame)."""


def join_segments(lengths: Numbers, frames: Numbers, offsets: Numbers) -> SegmentTable:
    """Join consecutive pieces that are zeros or abut in the same frame."""
    if not len(lengths):
        return np.zeros((0, 3), np.int64)
    same = frames[1:] == frames[:-1]
    abut = (frames[1:] == ZERO_FRAME) | (offsets[1:] == offsets[:-1] + lengths[:-1])
    begins = np.flatnonzero(np.concatenate(([True], ~(same & abut))))
    return np.stack((np.add.reduceat(lengths, begins), frames[begins], offsets[begins]), axis=1)


def build_layout(
    rank_id: Digest, created: str, frames: FrameTable, streams: list[SegmentTable]
) -> tuple[Built, list[PackId]]:
    """Encode a layout from the segments of each stream, and list its packs.

    All frames must have been placed and their packs sealed.
    """
    table = np.concatenate([np.zeros((0, 3), np.int64), *streams])
    data = table[:, 1] != ZERO_FRAME
    used, rows = np.unique(table[data, 1], return_inverse=True)
    segments = np.zeros(len(table), layout_format.SEGMENT_DTYPE)
    segments["length"] = table[:, 0]
    segments["frame"] = layout_format.ZEROS
    segments["frame"][data] = rows
    segments["offset"][data] = table[data, 2]
    frame_rows = frames.rows[used].copy()
    pack_numbers, pack_rows = np.unique(frame_rows["pack"], return_inverse=True)
    frame_rows["pack"] = pack_rows
    packs = frames.pack_rows(pack_numbers.astype(np.int64))
    meta = layout_format.LayoutMeta(rank=rank_id.hex, nonce=secrets.token_hex(16), created=created)
    counts = [len(part) for part in streams]
    stream_table = stream_rows(counts, [int(part[:, 0].sum()) for part in streams])
    built = layout_format.build_layout(meta, packs, frame_rows, stream_table, segments)
    return built, [PackId(bytes(raw)) for raw in packs["id"].tolist()]


def derive_layout(
    backend: Backend, rank_id: Digest, streams: Rows, extents: Rows
) -> layout_format.LayoutTables:
    """Find where all chunks of a rank are and lay them out as a push would have.

    Raises:
        MissingChunk: The indexes lack one.
    """
    frames = FrameTable()
    data = extents["chunk_length"] != 0
    with Catalog(frames, budget_bytes=1 << 40) as catalog:
        loaded = catalog.load(backend)
        places = catalog.lookup(id_words(extents["id"][data]))
    lost = places.frames == MISSING
    if lost.any():
        first = ChunkId(bytes(extents["id"][data][int(lost.argmax())]))
        raise MissingChunk(
            f"{int(lost.sum())} chunks of rank manifest {rank_id.short} are in no index, the "
            f"first is {first.short}" + "".join(f"; {text}" for text in loaded.warnings),
            next_step="push the same tree again, or pull another snapshot",
        )
    numbers = np.full(len(extents), ZERO_FRAME, np.int64)
    offsets = np.zeros(len(extents), np.int64)
    numbers[data] = places.frames
    offsets[data] = places.offsets + extents["chunk_offset"][data]
    lengths = extents["length"].astype(np.int64)
    per_stream = []
    for first, count, _ in streams.tolist():
        rows = slice(first, first + count)
        per_stream.append(join_segments(lengths[rows], numbers[rows], offsets[rows]))
    built, _ = build_layout(rank_id, "1970-01-01T00:00:00Z", frames, per_stream)
    return layout_format.parse_layout(built.to_bytes())


def stream_rows(counts: Sequence[int], lengths: Sequence[int]) -> Rows:
    """Make the stream table of a rank manifest or layout.

    Args:
        counts: How many extents or segments each stream has; they follow one another.
        lengths: How long each stream is.
    """
    rows = np.zeros(len(counts), STREAM_DTYPE)
    rows["count"], rows["length"] = counts, lengths
    rows["first"] = np.cumsum([0, *counts])[:-1]
    return rows
