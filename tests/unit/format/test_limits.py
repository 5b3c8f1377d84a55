"""The numbers of `limits.py` are those of the specification."""

import re
from pathlib import Path

from snapstore.format import limits

SPECIFICATION = Path(__file__).parents[3] / "format_spec" / "01-objects.md"
POWERS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹", "0123456789")
UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def numbers(what: str) -> list[int]:
    """All numbers of a row of the table of limits, in order, as they are meant."""
    text = SPECIFICATION.read_text().split("## 4. Limits")[1].split("## 5.")[0]
    (row,) = re.findall(rf"^\| {re.escape(what)} \| (.*) \|$", text, re.MULTILINE)
    found = []
    for power, number, unit in re.findall(
        r"2([⁰¹²³⁴-⁹]+)(?:\u22121)?|([0-9,]+) ?(KiB|MiB|GiB)?", row
    ):
        if power:
            found.append(1 << int(power.translate(POWERS)))
        elif number.strip(","):
            found.append(int(number.replace(",", "")) * UNITS[unit])
    return found


def test_chunks_frames_and_packs() -> None:
    assert numbers("chunk") == [1, limits.CHUNK_BYTES_MAX]
    assert numbers("frame, decoded") == [limits.FRAME_PLAIN_BYTES_MAX]
    assert sum(numbers("frame, stored")) == limits.FRAME_STORED_BYTES_MAX
    assert numbers("pack") == [
        limits.PACK_BYTES_MAX,
        limits.PACK_BYTES_TARGET,
        limits.PACK_FRAMES_MAX,
        limits.PACK_CHUNKS_MAX,
        limits.PACK_FOOTER_BYTES_MAX,
    ]


def test_indexes_ranks_and_layouts() -> None:
    assert numbers("index") == [
        limits.INDEX_BYTES_MAX,
        limits.INDEX_CHUNKS_MAX,
        limits.INDEX_FRAMES_MAX,
        limits.INDEX_PACKS_MAX,
        limits.INDEX_SUPERSEDES_MAX,
    ]
    assert numbers("rank manifest") == [
        limits.RANK_BYTES_MAX,
        limits.RANK_META_BYTES_MAX,
        limits.RANK_TREE_BYTES_MAX,
        limits.RANK_STREAMS_MAX,
        limits.RANK_EXTENTS_MAX,
    ]
    assert numbers("layout") == [
        limits.LAYOUT_PLAIN_BYTES_MAX,
        limits.LAYOUT_META_BYTES_MAX,
        limits.LAYOUT_SEGMENTS_MAX,
        limits.LAYOUT_FRAMES_MAX,
        limits.LAYOUT_PACKS_MAX,
    ]
    assert numbers("rank number") == [limits.RANK_NUMBER_MAX]
    assert numbers("stream; all streams of a rank") == [
        limits.STREAM_BYTES_MAX,
        limits.RANK_LOGICAL_BYTES_MAX + 1,
    ]


def test_documents_and_paths() -> None:
    assert numbers("root manifest, config") == [limits.SNAPSHOT_BYTES_MAX, limits.CONFIG_BYTES_MAX]
    assert numbers("ref, lease, mark") == [limits.REF_BYTES_MAX]
    assert numbers("hint, page order") == [
        limits.HINT_BYTES_MAX,
        limits.PAGE_ORDER_BYTES_MAX,
        limits.PAGE_ORDER_RUNS_MAX,
        limits.PAGE_ORDER_FILES_MAX,
    ]
    assert limits.REF_BYTES_MAX == limits.LEASE_BYTES_MAX == limits.MARK_BYTES_MAX
    assert numbers("path, component, symlink target") == [
        limits.PATH_BYTES_MAX,
        limits.COMPONENT_BYTES_MAX,
        limits.SYMLINK_TARGET_BYTES_MAX,
    ]
    assert numbers("extended attributes of one file") == [
        limits.XATTRS_MAX,
        limits.XATTR_NAME_BYTES_MAX,
        limits.XATTRS_BYTES_MAX,
    ]
    assert numbers("JSON nesting") == [limits.JSON_DEPTH_MAX]
