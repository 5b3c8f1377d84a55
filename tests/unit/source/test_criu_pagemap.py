import struct
import tracemalloc

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from snapstore.errors import FormatError, LimitExceeded, Malformed
from snapstore.source import criu_pagemap
from snapstore.source.criu_pagemap import (
    MAGIC_PAGEMAP,
    PageFlag,
    Pagemap,
    PagemapEntry,
    parse_pagemap,
)
from snapstore.source.criu_reader import MAGIC_COMMON
from snapstore.units import MIB, PAGE_BYTES
from tests.unit.source.builders import image, message, pagemap, varint

LAZY, PRESENT, PARENT = PageFlag.LAZY, PageFlag.PRESENT, PageFlag.PARENT
RUNS = ((0x10000, 2, PRESENT), (0x20000, 5, LAZY), (0x7FFF_FFFF_F000, 1, PRESENT | LAZY))
HEAD = message((1, 9))


def rows(data: bytes) -> list[PagemapEntry]:
    return list(parse_pagemap(data).entries())


def parse_one_by_one(data: bytes) -> Pagemap:
    """Parse without the vectorized decoder: the oracle for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(criu_pagemap, "_decode_usual", lambda *_: None)
        return parse_pagemap(data)


@pytest.mark.parametrize("old", [False, True])
def test_data_lies_in_the_order_of_the_present_entries(old: bool):  # noqa: FBT001
    parsed = parse_pagemap(pagemap(7, *RUNS, old=old))
    assert list(parsed.entries()) == [
        (0x10000, 2, PRESENT, 0),
        (0x20000, 5, LAZY, None),
        (0x7FFF_FFFF_F000, 1, PRESENT | LAZY, 2 * PAGE_BYTES),
    ]
    assert parsed.pages_id == 7
    assert parsed.present_bytes == 3 * PAGE_BYTES
    assert parsed.has_wide_counts is not old
    assert not parsed.has_parent


def test_the_wide_count_is_the_one_that_counts():
    assert rows(image(MAGIC_PAGEMAP, HEAD, message((1, 0), (2, 3), (4, 4), (5, 8))))[0][1] == 8
    # A narrow zero beside a wide zero is no page, not an old entry.
    assert rows(image(MAGIC_PAGEMAP, HEAD, message((1, 0), (2, 3), (4, 4), (5, 0))))[0][1] == 0


@pytest.mark.parametrize(
    ("fields", "flags"),
    [
        (((1, 0), (2, 1)), PRESENT),
        (((1, 0), (2, 1), (3, 0)), PRESENT),
        (((1, 0), (2, 1), (3, 1)), PARENT),
    ],
)
def test_entries_without_flags_are_present_or_in_the_parent(fields: tuple, flags: int):
    parsed = parse_pagemap(image(MAGIC_PAGEMAP, HEAD, message(*fields)))
    assert [entry.flags for entry in parsed.entries()] == [flags]
    assert parsed.has_parent is (flags == PARENT)


def test_no_entries_is_a_pagemap_too():
    parsed = parse_pagemap(pagemap(1))
    assert (parsed.present_bytes, list(parsed.entries())) == (0, [])


def test_the_common_magic_may_be_missing():
    data = image(MAGIC_PAGEMAP, HEAD, message((1, 0), (2, 1), (4, 4)), common=False)
    assert parse_pagemap(data).present_bytes == PAGE_BYTES


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(message((5, 2), (4, 4), (2, 0), (1, 0x3000)), id="any order"),
        pytest.param(message((1, 0x3000), (2, 0), (4, 4), (5, 2), (77, b"x")), id="unknown"),
        pytest.param(message((1, 1), (1, 0x3000), (2, 0), (4, 4), (5, 2)), id="last one counts"),
        pytest.param(b"\x08\x80\xe0\x80\x00" + message((2, 0), (4, 4), (5, 2)), id="padded"),
    ],
)
def test_what_protobuf_allows_beside_the_usual_shape_means_the_same(entry: bytes):
    assert rows(image(MAGIC_PAGEMAP, HEAD, entry)) == [(0x3000, 2, 4, 0)]


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(message((2, 1), (4, 4)), id="no address"),
        pytest.param(message((1, 0), (4, 4)), id="no count"),
        pytest.param(b"", id="empty"),
        pytest.param(message((1, 1), (2, 1), (4, 4)), id="unaligned"),
        pytest.param(message((1, 0), (2, 1), (4, 8)), id="unknown flag"),
        pytest.param(message((1, 2**64 - 4096), (2, 2), (4, 4)), id="beyond the address space"),
        pytest.param(message((1, 0), (2, 0), (4, 4), (5, 2**52 + 1)), id="too many"),
        pytest.param(message((1, 0), (2, 0), (4, 4), (5, 2**51)), id="no file is so long"),
        pytest.param(message((1, b"\0"), (2, 1), (4, 4)), id="bytes for a number"),
        pytest.param(message((1, 0), (2, 1), (4, 4)) + b"\x28", id="cut in a field"),
        pytest.param(message((1, 0), (2, 1), (4, 4)) + b"\x28\xff", id="cut in a number"),
        pytest.param(b"\x08" + b"\xff" * 10 + b"\x01", id="endless number"),
        pytest.param(b"\x08" + b"\xff" * 9 + b"\x7f", id="number above 64 bits"),
        pytest.param(b"\x0b\x0c", id="groups"),
        pytest.param(b"\x00\x01", id="field 0"),
        pytest.param(message((7, b"abc"))[:-1], id="bytes cut"),
    ],
)
def test_impossible_entries_are_refused_with_their_place(entry: bytes):
    with pytest.raises(Malformed, match=r"p\.img: .* at byte|p\.img: field"):
        parse_pagemap(image(MAGIC_PAGEMAP, HEAD, entry), "p.img")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x19\x43",
        struct.pack("<I", MAGIC_COMMON),
        struct.pack("<II", MAGIC_COMMON, MAGIC_PAGEMAP),
        struct.pack("<II", MAGIC_COMMON, 1),
        image(MAGIC_PAGEMAP, message((2, 1))),
        image(MAGIC_PAGEMAP, message((1, 2**32))),
        image(MAGIC_PAGEMAP, HEAD) + b"\1",
        image(MAGIC_PAGEMAP, HEAD) + struct.pack("<I", 1),
        image(MAGIC_PAGEMAP, HEAD) + struct.pack("<I", 2**32 - 1),
        image(MAGIC_PAGEMAP) + struct.pack("<I", 2**31) + bytes(100),
    ],
)
def test_broken_frames_are_refused(data: bytes):
    with pytest.raises(FormatError):
        parse_pagemap(data)


def test_the_sum_of_many_large_counts_cannot_wrap_around():
    with pytest.raises(Malformed, match="more pages than a file can hold"):
        parse_pagemap(pagemap(1, *[(0, 2**50, PRESENT)] * 64))
    # What is not present takes no room in the file, however much it is.
    assert parse_pagemap(pagemap(1, *[(0, 2**50, LAZY)] * 64)).present_bytes == 0


def test_too_many_entries_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(criu_pagemap, "PAGEMAP_ENTRIES_MAX", 3)
    assert len(rows(pagemap(1, *[(0, 1, PRESENT)] * 3))) == 3
    with pytest.raises(LimitExceeded):
        parse_pagemap(pagemap(1, *[(0, 1, PRESENT)] * 4))


# -- one decoder against the other ------------------------------------------------------------

numbers = st.one_of(
    st.integers(0, 300),
    st.sampled_from([2**32 - 1, 2**32, 2**52, 2**63, 2**64 - 4096, 2**64 - 1]),
    st.integers(0, 2**52).map(lambda value: value * 4096),
)
fields = st.tuples(st.integers(1, 7), st.one_of(numbers, numbers, st.binary(max_size=3)))
entries = st.one_of(
    st.tuples(numbers, numbers, st.integers(0, 8), numbers).map(
        lambda row: message((1, row[0]), (2, row[1]), (4, row[2]), (5, row[3]))
    ),
    st.lists(fields, max_size=6).map(lambda table: message(*table)),
    st.binary(max_size=24),
)


@given(st.lists(entries, max_size=8), st.binary(max_size=5))
@example([varint(8) + varint(4096 << 58)], b"")
def test_both_decoders_agree(table: list[bytes], tail: bytes):
    """The vectorized decoder says what reading field by field says, down to the refusal."""
    data = image(MAGIC_PAGEMAP, HEAD, *table) + tail
    try:
        expected = parse_one_by_one(data)
    except FormatError as error:
        with pytest.raises(type(error)):
            parse_pagemap(data)
        return
    parsed = parse_pagemap(data)
    assert list(parsed.entries()) == list(expected.entries())
    assert parsed.present_bytes == expected.present_bytes
    assert parsed.has_wide_counts == expected.has_wide_counts


@pytest.mark.slow
def test_memory_is_bounded_by_the_number_of_entries():
    """Parse 200,000 entries of the smallest kind and measure the peak."""
    entry = message((1, 0), (2, 1))
    data = image(MAGIC_PAGEMAP, HEAD) + (struct.pack("<I", len(entry)) + entry) * 200_000
    tracemalloc.start()
    try:
        parsed = parse_pagemap(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert parsed.present_bytes == 200_000 * PAGE_BYTES
    assert peak < 64 * MIB
