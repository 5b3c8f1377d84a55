"""Headers and messages of CRIU's protocols: what can be said comes back, all else is refused."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapagent.criu.pagemaps import build_pagemap
from snapagent.criu.protocol import (
    HEADER_BYTES,
    NAME_BYTES_MAX,
    Command,
    ImageKind,
    PageHeader,
    PagesImage,
    check_image_name,
    decode_header,
    decode_image_id,
    decode_request,
    decode_request_length,
    encode_header,
    encode_image_id,
    encode_reply,
    encode_request,
)
from snapagent.errors import ProtocolError
from snapstore.source.criu_pagemap import parse_pagemap
from snapstore.units import PAGE_BYTES

U64_MAX = (1 << 64) - 1
ADDRESS_PAGES = (1 << 64) // PAGE_BYTES

uint64 = st.integers(0, U64_MAX)
names = st.text(
    st.characters(min_codepoint=0x21, max_codepoint=0x7E, exclude_characters="/"),
    min_size=1,
    max_size=NAME_BYTES_MAX,
).filter(lambda name: name not in (".", ".."))


@st.composite
def runs(draw: st.DrawFn) -> tuple[int, int]:
    """Draw an address and how many pages there are from it on."""
    first = draw(st.integers(0, ADDRESS_PAGES - 1))
    return first * PAGE_BYTES, draw(st.integers(1, ADDRESS_PAGES - first))


@given(st.sampled_from(Command), st.integers(0, 7), runs(), uint64)
def test_headers_come_back(command: Command, flags: int, run: tuple[int, int], target: int) -> None:
    header = PageHeader(command, flags, run[1], run[0], target)
    encoded = encode_header(header)
    assert len(encoded) == HEADER_BYTES == 32
    assert decode_header(encoded) == header


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_any_header_is_read_or_refused(data: bytes) -> None:
    try:
        header = decode_header(data)
    except ProtocolError:
        pass
    else:
        # The four bytes of padding say nothing.
        assert encode_header(header) == data[:4] + bytes(4) + data[8:]


def test_header_has_the_layout_of_the_c_structure() -> None:
    header = PageHeader(Command.ADD_F, 6, 256, 0x7F0000001000, encode_image_id(ImageKind.TASK, 77))
    data = struct.pack("<IIQQQ", 6 << 16 | 6, 0, 256, 0x7F0000001000, 77 << 8 | 1)
    assert encode_header(header) == data
    # What C leaves in the padding is anything.
    assert decode_header(data[:4] + b"\xff\xee\xdd\xcc" + data[8:]) == header


@pytest.mark.parametrize(
    "header",
    [
        PageHeader(Command.ADD_F, 4, 0, 4096, 1),
        PageHeader(Command.GET, 0, 1, 4097, 1),
        PageHeader(Command.ADD_F, 8, 1, 4096, 1),
        PageHeader(Command.ADD, 0, ADDRESS_PAGES, 4096, 1),
        PageHeader(Command.ADD_F, 4, U64_MAX, 0, 1),
    ],
)
def test_pages_that_cannot_be_are_refused(header: PageHeader) -> None:
    with pytest.raises(ProtocolError, match=header.command.name):
        decode_header(encode_header(header))


@given(uint64)
def test_image_ids_come_back(target: int) -> None:
    try:
        kind, number = decode_image_id(target)
    except ProtocolError:
        assert target & 0xFF not in (1, 2) or not 0 < target >> 8 < 1 << 31
    else:
        assert encode_image_id(kind, number) == target


def test_images_have_the_names_that_criu_gives_them() -> None:
    task = PagesImage(ImageKind.TASK, 7, 65537)
    assert (task.pagemap_name, task.pages_name) == ("pagemap-7.img", "pages-65537.img")
    assert PagesImage(ImageKind.SHMEM, 9, 2).pagemap_name == "pagemap-shmem-9.img"


@given(names)
def test_requests_come_back(name: str) -> None:
    data = encode_request(name)
    assert decode_request_length(data[:4]) == len(data) - 4
    assert decode_request(data[4:]) == name


@given(st.binary(max_size=200))
def test_any_request_is_read_or_refused(message: bytes) -> None:
    try:
        name = decode_request(message)
    except ProtocolError:
        pass
    else:
        assert encode_request(name)[4:] == message


@pytest.mark.parametrize("length", [0, 2, 2 + NAME_BYTES_MAX + 1, 0xFFFFFFFF])
def test_requests_of_other_lengths_are_refused(length: int) -> None:
    with pytest.raises(ProtocolError, match=f"request of {length} bytes"):
        decode_request_length(struct.pack("<I", length))


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "a/b", "../core-1.img", "a\0b", "a b", "a\nb", "käse.img", "x" * 128],
)
def test_names_that_are_no_names(name: str) -> None:
    with pytest.raises(ProtocolError, match="cannot be an image's name"):
        check_image_name(name)


def test_replies() -> None:
    assert encode_reply(exists=True) == b"\2\0\0\0\x08\x01"
    assert encode_reply(exists=False) == b"\2\0\0\0\x08\x00"


@given(st.integers(0, (1 << 32) - 1), st.lists(st.tuples(runs(), st.integers(0, 3)), max_size=4))
def test_pagemaps_are_read_as_they_were_built(
    pages_id: int, entries: list[tuple[tuple[int, int], int]]
) -> None:
    rows = [(vaddr, count, flags) for (vaddr, count), flags in entries]
    pagemap = parse_pagemap(build_pagemap(pages_id, rows))
    assert pagemap.pages_id == pages_id
    assert [entry[:3] for entry in pagemap.entries()] == rows
    assert pagemap.has_wide_counts == bool(rows)
