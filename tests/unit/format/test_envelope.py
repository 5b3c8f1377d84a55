"""Envelopes: built without copies, checked from the header alone, decoded within bounds."""

import tracemalloc

import numpy as np
import pytest

from snapstore.errors import DigestMismatch, LimitExceeded, Malformed
from snapstore.format import limits
from snapstore.format.envelope import (
    INDEX_MAGIC,
    LAYOUT_MAGIC,
    Section,
    SectionInfo,
    build,
    decode_section,
    parse_header,
    parse_whole,
    read_section,
)
from snapstore.ids import Digest
from snapstore.units import MIB


def test_big_sections_are_not_copied() -> None:
    big = bytearray(20 * MIB)
    table = np.zeros(20 * MIB // 8, np.uint64)
    tracemalloc.start()
    built = build(INDEX_MAGIC, [Section(b"AAAA", big), Section(b"BBBB", table)])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < MIB
    assert sum(map(len, built.pieces)) == built.length
    parse_whole(built.to_bytes(), magic=INDEX_MAGIC, root=built.root)


def test_a_table_that_is_not_contiguous_is_written_right() -> None:
    table = np.arange(10, dtype=np.uint64)[::2]
    data = build(INDEX_MAGIC, [Section(b"AAAA", table)]).to_bytes()
    envelope = parse_whole(data, magic=INDEX_MAGIC)
    section = read_section(envelope, data, b"AAAA", limit_bytes=100)
    assert np.frombuffer(section, np.uint64).tolist() == [0, 2, 4, 6, 8]


def test_the_header_is_enough_and_need_not_be_cut() -> None:
    sections = [Section(b"S%03d" % number, b"x" * number) for number in range(16)]
    data = build(INDEX_MAGIC, sections).to_bytes()
    whole = parse_whole(data, magic=INDEX_MAGIC)
    for length in (limits.HEADER_BYTES_MAX, limits.HEADER_BYTES_MAX + 1, len(data)):
        head = memoryview(data)[:length]
        assert parse_header(head, magic=INDEX_MAGIC, object_length=len(data)) == whole
    with pytest.raises(Malformed):
        parse_header(
            data[: limits.HEADER_BYTES_MAX - 1], magic=INDEX_MAGIC, object_length=len(data)
        )


def test_objects_longer_than_their_kind_are_refused_from_the_header() -> None:
    from tools.vectors.encode import draft  # noqa: PLC0415 - writes what the encoder refuses to

    made = draft(LAYOUT_MAGIC, {b"AAAA": b""}, packed=frozenset())
    made.entries[0].stored = made.entries[0].plain = limits.LAYOUT_PLAIN_BYTES_MAX
    made.length = 128 + limits.LAYOUT_PLAIN_BYTES_MAX
    with pytest.raises(LimitExceeded):
        parse_header(made.head(), magic=LAYOUT_MAGIC, object_length=made.length)


def test_another_root_digest() -> None:
    built = build(INDEX_MAGIC, [Section(b"AAAA", b"x")])
    with pytest.raises(DigestMismatch, match="its root digest is"):
        parse_whole(built.to_bytes(), magic=INDEX_MAGIC, root=Digest.of(b""))


def test_missing_sections() -> None:
    envelope = parse_whole(
        build(INDEX_MAGIC, [Section(b"AAAA", b"x")]).to_bytes(), magic=INDEX_MAGIC
    )
    assert envelope.find(b"BBBB") is None
    with pytest.raises(Malformed, match="BBBB is missing"):
        envelope.require(b"BBBB")


def test_compression_is_used_only_where_it_pays() -> None:
    noise = np.random.default_rng(1).bytes(1000)
    data = build(
        LAYOUT_MAGIC,
        [
            Section(b"AAAA", bytes(1000), compress=True),
            Section(b"BBBB", noise, compress=True),
            Section(b"CCCC", b"", compress=True),
        ],
    ).to_bytes()
    envelope = parse_whole(data, magic=LAYOUT_MAGIC)
    assert [info.encoding for info in envelope.sections] == [1, 0, 0]
    assert bytes(read_section(envelope, data, b"AAAA", limit_bytes=1000)) == bytes(1000)
    assert bytes(read_section(envelope, data, b"BBBB", limit_bytes=1000)) == noise


def test_a_section_above_its_limit_is_refused_before_it_is_read() -> None:
    info = SectionInfo(b"AAAA", 0, 128, 1 << 60, 1 << 60, bytes(32))
    with pytest.raises(LimitExceeded):
        decode_section(info, b"", limit_bytes=MIB)


def test_a_section_of_another_length_is_refused() -> None:
    built = build(INDEX_MAGIC, [Section(b"AAAA", b"abc")])
    (info,) = parse_whole(built.to_bytes(), magic=INDEX_MAGIC).sections
    with pytest.raises(Malformed, match="2 bytes instead of 3"):
        decode_section(info, b"ab", limit_bytes=MIB)


@pytest.mark.parametrize(
    "sections",
    [
        [],
        [Section(b"S%03d" % number, b"") for number in range(17)],
        [Section(b"AAAA", b""), Section(b"AAAA", b"")],
        [Section(b"AAA", b"")],
        [Section(b"aaaa", b"")],
        [Section(b"AAAA", b"", compress=True)],
    ],
)
def test_what_must_not_be_written_is_a_bug_of_the_caller(sections: list[Section]) -> None:
    with pytest.raises(AssertionError):
        build(INDEX_MAGIC, sections)
