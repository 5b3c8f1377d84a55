"""Objects that ask for far more memory than they are long."""

import contextlib
import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from snapstore.backend.base import ObjectKind
from snapstore.compression import Codec
from snapstore.errors import LimitExceeded, Malformed, SnapError
from snapstore.format.envelope import LAYOUT_MAGIC
from snapstore.format.layout import parse_layout
from snapstore.options import Integrity
from snapstore.units import GIB, MIB
from tests.support.damage import (
    Lab,
    Stored,
    run_program,
    seal_stored,
    tree_state,
    unseal,
    zstd_zeros,
)

PULL_BYTES = 48 * MIB
"""What a pull of the lab's snapshot may take: two readers with 8 MiB and two frames each."""


@contextlib.contextmanager
def bounded(limit_bytes: int = PULL_BYTES) -> Iterator[None]:
    """Check that no more than this is allocated, even if nobody ever touches it."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < limit_bytes, f"{peak / MIB:.0f} MiB"


def check_pulled(lab: Lab, to: Path) -> None:
    with bounded():
        lab.pull(to)
    assert tree_state(to) == tree_state(lab.tree)


def put_layout(lab: Lab, *changed: Stored) -> Path:
    """Write the layout of the host side with some sections as the test wants them."""
    rank = lab.rank_ids()[0]
    sections = unseal(lab.layout_paths(rank)[-1].read_bytes(), LAYOUT_MAGIC)
    stored = {tag: Stored(tag, data, len(data), 0) for tag, data in sections.items()}
    stored |= {one.tag: one for one in changed}
    data = seal_stored(LAYOUT_MAGIC, [*stored.values()])
    return lab.put(ObjectKind.LAYOUT, f"{rank.hex}/00000002", data)


BOMBS = {
    # Within the limits of the format: 4 GiB out of 128 KiB.
    "segments": Stored(b"SEGM", zstd_zeros(4 * GIB - 16 * MIB), 4 * GIB - 16 * MIB),
    "frames": Stored(b"FRAM", zstd_zeros(640 * MIB), 640 * MIB),
    "a section that nobody knows": Stored(b"MORE", zstd_zeros(3 * GIB), 3 * GIB),
    # Beyond them.
    "streams": Stored(b"STRM", zstd_zeros(1 * GIB), 1 * GIB),
    "META": Stored(b"META", zstd_zeros(1 * GIB), 1 * GIB),
    "more than zstd can do": Stored(b"SEGM", zstd_zeros(4096), 1 << 62),
    # The directory says less than the frame does.
    "a frame of another length": Stored(b"SEGM", zstd_zeros(2 * GIB), 4096),
    "a frame that lies": Stored(b"SEGM", zstd_zeros(2 * GIB, declared=4096), 4096),
    "a frame that is too short": Stored(b"SEGM", zstd_zeros(4096, declared=8192), 8192),
    "a huge window": Stored(b"SEGM", zstd_zeros(4096, window=0xF8), 4096),
    "something behind the frame": Stored(b"SEGM", zstd_zeros(4096) * 2, 4096),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_layout_that_decodes_to_too_much(lab: Lab, tmp_path: Path, bomb: str) -> None:
    """What a layout may take is known from the rank manifest; more is not even begun.

    Method: with the older layout still there, a pull passes the bomb over, and its memory is that
    of any pull. Proves: H1.
    """
    path = put_layout(lab, BOMBS[bomb])
    assert path.stat().st_size < MIB
    check_pulled(lab, tmp_path / "out")


def first_frame_bytes(lab: Lab) -> int:
    """The decoded length of the first frame of the host's layout."""
    tables = parse_layout(lab.layout_paths(lab.rank_ids()[0])[-1].read_bytes())
    return int(tables.frames["plain_length"][0])


def planes(width: int, head: int, tail: int, transform: int, lengths: list[int]) -> bytes:
    return bytes([width, head, tail, transform]) + np.array(lengths, "<u4").tobytes()


ON = 1 << 31
SIZE = 2212
"""A stand-in for the length that the frame has to have."""


def hostile_frames(size: int) -> dict[str, tuple[int, bytes]]:
    """Codec and stored bytes of frames that should decode to `size` bytes, and do not."""
    zstd, plane = int(Codec.ZSTD), int(Codec.PLANES)
    half = size // 2
    big = zstd_zeros(4 * GIB)
    return {
        "zstd that declares more": (zstd, big),
        "zstd that makes more": (zstd, zstd_zeros(4 * GIB, declared=size)),
        "zstd that makes a byte more": (zstd, zstd_zeros(size + 1, declared=size)),
        "zstd that makes less": (zstd, zstd_zeros(size - 1, declared=size)),
        "zstd with a huge window": (zstd, zstd_zeros(size, window=0xF8)),
        "zstd cut off": (zstd, zstd_zeros(size)[:-2]),
        "zstd that is none": (zstd, b"\0" * 100),
        "zstd of one byte": (zstd, b"\x28"),
        "zstd with a dictionary": (
            zstd,
            zstd_zeros(size)[:4] + b"\xc1" + zstd_zeros(size)[5:6] + b"\7" + zstd_zeros(size)[6:],
        ),
        "planes without header": (plane, b"\2\0"),
        "planes of width 3": (plane, planes(3, 0, 0, 0, [1, 1, 1])),
        "planes of width 0": (plane, planes(0, 0, 0, 0, [])),
        "planes with a long head": (plane, planes(2, 2, 0, 0, [half, half])),
        "planes of 2 GiB": (plane, planes(2, 0, 0, 0, [ON - 1, ON - 1])),
        "planes whose lengths wrap": (plane, planes(2, 0, 0, 0, [0xFFFFFFFF, 1])),
        "planes that are too short": (plane, planes(2, 0, 0, 0, [1, 1]) + b"xx"),
        "planes rotated at width 4": (plane, planes(4, 0, 0, 1, [half // 2] * 4) + bytes(2 * half)),
        "planes with an unknown transform": (plane, planes(2, 0, 0, 2, [half, half]) + bytes(size)),
        "planes of zstd that makes more": (
            plane,
            planes(2, 0, 0, 0, [len(zstd_zeros(2 * GIB, declared=half)) | ON, half])
            + zstd_zeros(2 * GIB, declared=half)
            + bytes(half),
        ),
    }


@pytest.mark.parametrize("name", hostile_frames(SIZE))
@pytest.mark.parametrize("integrity", Integrity)
def test_a_frame_that_does_not_decode(
    lab: Lab, tmp_path: Path, name: str, integrity: Integrity
) -> None:
    """A decoder gets room for the declared length and never takes more. Proves: H1, I8."""
    codec, stored = hostile_frames(first_frame_bytes(lab))[name]
    lab.lie_in_frame(codec, stored)
    with bounded(), pytest.raises(Malformed) as caught:
        lab.pull(tmp_path / "out", integrity=integrity)
    assert "frame at offset 0 of pack" in str(caught.value)
    assert caught.value.next_step
    assert not (tmp_path / "out").exists()


def test_a_frame_that_claims_to_be_huge(lab: Lab, tmp_path: Path) -> None:
    """A layout with a frame of 4 GiB, or of a pack of an exabyte, is passed over. Proves: H1."""
    rank = lab.rank_ids()[0]
    sections = unseal(lab.layout_paths(rank)[-1].read_bytes(), LAYOUT_MAGIC)
    frames = bytearray(sections[b"FRAM"])
    frames[8:16] = b"\xff" * 8  # both lengths of the first frame
    put_layout(lab, Stored(b"FRAM", bytes(frames), len(frames), 0))
    check_pulled(lab, tmp_path / "frame")
    packs = bytearray(sections[b"PACK"])
    packs[32:40] = (1 << 60).to_bytes(8, "little")
    put_layout(lab, Stored(b"PACK", bytes(packs), len(packs), 0))
    check_pulled(lab, tmp_path / "pack")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (ObjectKind.REF, "team/model/@v1/00000001"),
        (ObjectKind.SNAPSHOT, "snapshot"),
        (ObjectKind.RANK, "rank"),
    ],
)
def test_an_object_of_a_terabyte(lab: Lab, tmp_path: Path, kind: ObjectKind, name: str) -> None:
    """A file of holes costs its author nothing; its size is looked at before it is read.

    Proves: H1.
    """
    name = {"snapshot": lab.snapshot_id().hex, "rank": lab.rank_ids()[1].hex}.get(name, name)
    os.truncate(lab.path(kind, name), 1 << 40)
    with bounded(), pytest.raises(SnapError) as caught:
        lab.pull(tmp_path / "out")
    assert caught.value.exit_code == 4
    lab.pull(tmp_path / "other", "other")


def test_layouts_and_indexes_of_a_terabyte(lab: Lab, tmp_path: Path) -> None:
    """They are passed over: nobody depends on one of them. Proves: H1."""
    rank = lab.rank_ids()[0]
    layout = lab.put(ObjectKind.LAYOUT, f"{rank.hex}/00000002", b"x")
    os.truncate(layout, 1 << 40)
    check_pulled(lab, tmp_path / "out")
    index = lab.put(ObjectKind.INDEX, "0" * 64, b"x")
    os.truncate(index, 1 << 40)
    with bounded(192 * MIB):
        assert lab.push().ingest.new_bytes == 0
    os.truncate(index, 10 * GIB)
    with bounded(192 * MIB):
        lab.push()


def test_a_configuration_of_a_terabyte(lab: Lab) -> None:
    """The first object that anybody reads has a limit as well. Proves: H1."""
    os.truncate(lab.root / "snapstore.json", 1 << 40)
    with bounded(), pytest.raises(LimitExceeded, match=r"snapstore\.json"):
        lab.open()


def test_the_program_in_little_memory(lab: Lab, tmp_path: Path) -> None:
    """With 1 GiB of address space in all, a bomb of 4 GiB is passed over. Proves: H1."""
    put_layout(lab, BOMBS["segments"])
    result = run_program(
        *("pull", lab.name, tmp_path / "out", "--store", lab.root, "--threads", "1", "--json"),
        memory_bytes=1 * GIB,
    )
    assert result.returncode == 0, result.stderr
    assert tree_state(tmp_path / "out") == tree_state(lab.tree)
