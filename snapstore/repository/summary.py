"""What a snapshot holds and what it takes, for `show`: read from manifests and layouts alone."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from snapstore.compression import Codec
from snapstore.format.layout import ZEROS, LayoutTables
from snapstore.format.tables import Rows, id_words

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from snapstore.format.rank import RankNumber
    from snapstore.ids import RankId, SnapshotId
    from snapstore.repository.snapshot import LoadedRank, Snapshot

__all__ = ["CodecSummary", "RankSummary", "SnapshotSummary", "StreamSummary", "summarise"]


@dataclasses.dataclass(frozen=True, slots=True)
class StreamSummary:
    """One stream: what it is and how it lies in the store."""

    number: int
    data_class: str
    origin: str
    logical_bytes: int
    data_bytes: int
    segments: int


@dataclasses.dataclass(frozen=True, slots=True)
class CodecSummary:
    """Frames of one codec."""

    frames: int
    plain_bytes: int
    stored_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class RankSummary:
    """One rank.

    Attributes:
        rank: Its number, or `host`.
        id: Of its manifest.
        files: Files in its tree.
        logical_bytes: Length of all its streams.
        data_bytes: Without zeros.
        unique_bytes: Each chunk counted once.
        chunks: Chunks, counted as often as they occur.
        unique_chunks: Each counted once.
        stored_bytes: Stored bytes of the frames that it needs.
        frames: How many these are.
        packs: In how many packs they are.
        streams: Its streams.
    """

    rank: RankNumber
    id: RankId
    files: int
    logical_bytes: int
    data_bytes: int
    unique_bytes: int
    chunks: int
    unique_chunks: int
    stored_bytes: int
    frames: int
    packs: int
    streams: Sequence[StreamSummary]


@dataclasses.dataclass(frozen=True, slots=True)
class SnapshotSummary:
    """A whole snapshot; sums count what ranks share once."""

    id: SnapshotId
    created: str
    kind: str
    labels: Mapping[str, str]
    requirements: Mapping[str, object]
    writer: Mapping[str, object]
    ranks: Sequence[RankSummary]
    logical_bytes: int
    data_bytes: int
    unique_bytes: int
    stored_bytes: int
    codecs: Mapping[str, CodecSummary]


def summarise(snapshot: Snapshot) -> SnapshotSummary:
    """Read all manifests and layouts of a snapshot and add them up.

    Raises:
        IntegrityError: A manifest is damaged or gone.
    """
    ranks: list[RankSummary] = []
    chunks: list[Rows] = []
    frames: list[Rows] = []
    for loaded in snapshot.ranks():
        extents = loaded.read_extents()
        chunks.append(_unique_chunks(extents))
        frames.append(_frames(loaded.layout))
        ranks.append(_summarise_rank(loaded, extents, chunks[-1]))
    manifest = snapshot.manifest
    all_frames = np.unique(np.concatenate(frames))
    return SnapshotSummary(
        id=snapshot.id,
        created=manifest.created,
        kind=manifest.kind,
        labels=manifest.labels,
        requirements=manifest.requirements,
        writer=manifest.writer,
        ranks=ranks,
        logical_bytes=sum(rank.logical_bytes for rank in ranks),
        data_bytes=sum(rank.data_bytes for rank in ranks),
        unique_bytes=int(_unique_chunks(np.concatenate(chunks))["chunk_length"].sum()),
        stored_bytes=int(all_frames["stored"].sum()),
        codecs=_codecs(all_frames),
    )


_FRAME_DTYPE = np.dtype(
    [("pack", "S32"), ("offset", "<u8"), ("stored", "<u8"), ("plain", "<u8"), ("codec", "<u2")]
)


def _summarise_rank(loaded: LoadedRank, extents: Rows, unique: Rows) -> RankSummary:
    layout = loaded.layout
    streams = []
    for number, (info, row) in enumerate(zip(loaded.meta.streams, layout.streams, strict=True)):
        segments = layout.segments[int(row["first"]) : int(row["first"] + row["count"])]
        data = segments["frame"] != ZEROS
        streams.append(
            StreamSummary(
                number=number,
                data_class=info.data_class,
                origin=info.origin,
                logical_bytes=int(row["length"]),
                data_bytes=int(segments["length"][data].sum()),
                segments=len(segments),
            )
        )
    return RankSummary(
        rank=loaded.number,
        id=loaded.id,
        files=loaded.entry.files,
        logical_bytes=sum(stream.logical_bytes for stream in streams),
        data_bytes=sum(stream.data_bytes for stream in streams),
        unique_bytes=int(unique["chunk_length"].sum()),
        chunks=int((extents["chunk_length"] != 0).sum()),
        unique_chunks=len(unique),
        stored_bytes=int(layout.frames["stored_length"].astype(np.int64).sum()),
        frames=len(layout.frames),
        packs=len(layout.packs),
        streams=streams,
    )


def _unique_chunks(extents: Rows) -> Rows:
    data = extents[extents["chunk_length"] != 0]
    words = id_words(data["id"])
    order = np.lexsort(words.T[::-1])
    ordered = words[order]
    first = np.ones(len(order), np.bool_)
    first[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    unique: Rows = data[order[first]]
    return unique


def _frames(layout: LayoutTables) -> Rows:
    rows = np.zeros(len(layout.frames), _FRAME_DTYPE)
    if len(rows):
        # Byte strings compare and sort in numpy, void items do not; the digests keep their length
        # for this purpose, since only trailing zeros could be lost and offsets tell those apart.
        rows["pack"] = layout.packs["id"][layout.frames["pack"]].view("S32")
    rows["offset"], rows["codec"] = layout.frames["offset"], layout.frames["codec"]
    rows["stored"] = layout.frames["stored_length"]
    rows["plain"] = layout.frames["plain_length"]
    return rows


def _codecs(frames: Rows) -> dict[str, CodecSummary]:
    found = {}
    for codec in Codec:
        rows = frames[frames["codec"] == codec]
        if len(rows):
            found[codec.name.lower()] = CodecSummary(
                frames=len(rows),
                plain_bytes=int(rows["plain"].sum()),
                stored_bytes=int(rows["stored"].sum()),
            )
    return found
