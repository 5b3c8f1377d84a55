"""Indexes: merging, contradictions, buckets read alone, sizes."""

import numpy as np
import pytest

from snapstore.errors import LimitExceeded, Malformed
from snapstore.format.index import (
    CHUNK_DTYPE,
    FRAME_DTYPE,
    PACK_DTYPE,
    bucket_of,
    build_index,
    check_bucket,
    check_places,
    fanout_bits,
    parse_index,
)
from snapstore.ids import Digest
from snapstore.units import MIB


def sample(seed: int, *, chunks: int = 1000) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    packs = np.zeros(3, PACK_DTYPE)
    packs["id"] = np.frombuffer(rng.bytes(96), "V32")
    packs["length"] = 64 * MIB
    frames = np.zeros(9, FRAME_DTYPE)
    frames["pack"] = [2, 0, 1] * 3
    frames["offset"] = np.repeat([8, 0, 4], 3) * MIB
    frames["stored_length"], frames["plain_length"], frames["codec"] = MIB, 4 * MIB, 1
    table = np.zeros(chunks, CHUNK_DTYPE)
    table["id"] = np.frombuffer(rng.bytes(32 * chunks), "V32")
    table["frame"] = rng.integers(0, 9, chunks)
    table["offset"], table["length"] = rng.integers(0, MIB, chunks), MIB
    return packs, frames, table


def merged(*parts: tuple[np.ndarray, np.ndarray, np.ndarray]) -> tuple[np.ndarray, ...]:
    """Put tables one after the other, as a writer does that merges indexes."""
    packs, frames, chunks = [], [], []
    for pack, frame, chunk in parts:
        frame, chunk = frame.copy(), chunk.copy()  # noqa: PLW2901 - renumbered below
        frame["pack"] += sum(map(len, packs))
        chunk["frame"] += sum(map(len, frames))
        packs.append(pack)
        frames.append(frame)
        chunks.append(chunk)
    return np.concatenate(packs), np.concatenate(frames), np.concatenate(chunks)


def test_an_index_merged_with_itself_is_itself() -> None:
    one = sample(1)
    assert build_index(*merged(one, one)).root == build_index(*one).root


def test_merging_does_not_depend_on_the_order() -> None:
    one, two = sample(1), sample(2)
    assert build_index(*merged(one, two)).root == build_index(*merged(two, one)).root


def test_the_callers_tables_are_not_changed() -> None:
    tables = sample(1)
    before = [table.tobytes() for table in tables]
    build_index(*tables)
    assert [table.tobytes() for table in tables] == before


def test_of_two_places_of_a_chunk_the_first_stays() -> None:
    packs, frames, chunks = sample(1, chunks=2)
    chunks["id"][1] = chunks["id"][0]
    chunks["offset"] = [5, 6]
    read = parse_index(build_index(packs, frames, chunks).to_bytes())
    assert read.chunks["offset"].tolist() == [5]


def test_contradictions_are_refused() -> None:
    one, two = sample(1), sample(1)
    two[0]["length"] += 4096
    with pytest.raises(Malformed, match="one pack with two lengths"):
        build_index(*merged(one, two))
    two = sample(1)
    two[1]["plain_length"] -= 1
    with pytest.raises(Malformed, match="one frame in two versions"):
        build_index(*merged(one, two))


def test_rows_that_point_nowhere_are_refused() -> None:
    packs, frames, chunks = sample(1)
    with pytest.raises(Malformed, match="no such pack"):
        build_index(packs[:2], frames, chunks)
    with pytest.raises(Malformed, match="no such frame"):
        build_index(packs, frames[:5], chunks)


def test_places_outside_are_refused() -> None:
    packs, frames, chunks = sample(1)
    chunks["offset"][7] = 4 * MIB
    with pytest.raises(Malformed, match="does not end within its frame"):
        build_index(packs, frames, chunks)


def test_what_an_index_replaces_is_sorted() -> None:
    ids = [Digest.of(bytes([number])) for number in range(5)]
    read = parse_index(build_index(*sample(1), supersedes=[*ids, ids[0]]).to_bytes())
    assert read.supersedes == tuple(sorted(ids))


def test_buckets_are_checked_alone() -> None:
    read = parse_index(build_index(*sample(1)).to_bytes())
    bits = fanout_bits(len(read.chunks))
    bucket = bucket_of(read.chunks["id"][500].tobytes(), bits)
    run = read.chunks[int(read.fanout[bucket]) : int(read.fanout[bucket + 1])].copy()
    assert len(run) > 2
    check_bucket(run, bucket=bucket, bits=bits, frame_count=9)
    check_bucket(run[:0], bucket=bucket, bits=bits, frame_count=9)
    for match, rows, number in (
        ("not of bucket", run, bucket ^ 1),
        ("not sorted", run[::-1], bucket),
        ("not sorted", np.repeat(run, 2), bucket),
    ):
        with pytest.raises(Malformed, match=match):
            check_bucket(rows, bucket=number, bits=bits, frame_count=9)
    with pytest.raises(Malformed, match="no such frame"):
        check_bucket(run, bucket=bucket, bits=bits, frame_count=int(run["frame"].max()))
    run["length"][1] = MIB + 1
    with pytest.raises(LimitExceeded):
        check_bucket(run, bucket=bucket, bits=bits, frame_count=9)


def test_places_are_checked_alone() -> None:
    _, _, chunks = sample(1)
    check_places(chunks, np.full(len(chunks), 2 * MIB, np.uint64))
    with pytest.raises(Malformed, match="does not end within its frame"):
        check_places(chunks, np.full(len(chunks), MIB, np.uint64))


@pytest.mark.slow
def test_a_million_chunks_take_seconds() -> None:
    """Sorting is by vector operations; a step of Python for each chunk would take minutes."""
    built = build_index(*sample(3, chunks=1_000_000))
    assert len(parse_index(built.to_bytes()).chunks) == 1_000_000
