"""Root manifests (`format_spec/04-manifests.md`, section 1).

The snapshot id is the digest of these bytes, so they say what a snapshot is and never where.
"""

from typing import Annotated, Final, Literal

import msgspec

from snapstore.errors import Malformed
from snapstore.format import limits
from snapstore.format.canonical import (
    Hex64,
    Natural,
    Time,
    Word,
    check_time,
    decode_document,
    encode,
)
from snapstore.format.rank import HOST, RankNumber
from snapstore.ids import RankId, SnapshotId
from snapstore.units import BytesLike

__all__ = ["RankEntry", "RootManifest", "check_snapshot", "decode_snapshot", "encode_snapshot"]

FORMAT: Final = "snapstore/snapshot"

LabelKey = Annotated[str, msgspec.Meta(min_length=1, max_length=limits.LABEL_KEY_CHARS_MAX)]
LabelValue = Annotated[str, msgspec.Meta(max_length=limits.LABEL_VALUE_CHARS_MAX)]


class RankEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rank of a snapshot.

    Attributes:
        rank: A number, or `HOST`.
        manifest: The rank id, as hexadecimal digits.
        logical_bytes: Lengths of all streams together.
        data_bytes: Lengths of their data extents together, so without zeros.
        files: How many files the tree has.
    """

    rank: RankNumber
    manifest: Hex64
    logical_bytes: Natural
    data_bytes: Natural
    files: Natural

    @property
    def rank_id(self) -> RankId:
        """The id of the rank manifest."""
        return RankId.parse(self.manifest)


class RootManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a snapshot is: when, of what, and its ranks.

    Attributes:
        created: When it was taken.
        kind: What the tree was recognised as.
        ranks: `HOST` first, then ascending.
        labels: Of the user.
        requirements: What the checkpoint tells of where it can run.
        writer: Program and version.
    """

    created: Time
    kind: Word
    ranks: Annotated[tuple[RankEntry, ...], msgspec.Meta(min_length=1)]
    labels: dict[LabelKey, LabelValue] = {}
    requirements: dict[str, object] = {}
    writer: dict[str, object] = {}
    format: Literal["snapstore/snapshot"] = FORMAT
    version: Literal[1] = 1


def encode_snapshot(manifest: RootManifest) -> tuple[bytes, SnapshotId]:
    """Encode a root manifest; also returns its id.

    Raises:
        Malformed: It holds what the format cannot say.
        LimitExceeded: It is too large.
    """
    data = encode(manifest, what="root manifest")
    decode_snapshot(data)
    return data, SnapshotId.of(data)


def decode_snapshot(data: BytesLike) -> RootManifest:
    """Check and decode a root manifest (its digest is the caller's to check).

    Raises:
        FormatError: It is not what the format says.
    """
    manifest = decode_document(
        data,
        RootManifest,
        format_word=FORMAT,
        what="root manifest",
        limit_bytes=limits.SNAPSHOT_BYTES_MAX,
    )
    check_snapshot(manifest)
    return manifest


def check_snapshot(manifest: RootManifest) -> None:
    """Check the rules that the types do not express.

    Raises:
        Malformed: The ranks are out of order or there twice, or the time does not exist.
    """
    check_time(manifest.created, what="root manifest created")
    previous = -2
    for entry in manifest.ranks:
        number = -1 if entry.rank == HOST else entry.rank
        if number <= previous:
            raise Malformed(f"root manifest: rank {entry.rank} is out of order, or there twice")
        previous = number
