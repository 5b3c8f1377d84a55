"""The canonical encoding, at its edges."""

import enum
import json

import msgspec
import pytest

from snapstore.errors import LimitExceeded, Malformed, UnsupportedVersion
from snapstore.format import canonical, limits


class Word(enum.Enum):
    ONE = "one"


class Sample(msgspec.Struct, forbid_unknown_fields=True):
    zebra: int = 1
    apple: Word = Word.ONE
    format: str = "sample"
    version: int = 1


def test_struct_fields_are_sorted() -> None:
    assert canonical.encode(Sample()) == (
        b'{"apple":"one","format":"sample","version":1,"zebra":1}'
    )


def test_every_character_is_written_as_the_specification_says() -> None:
    """All of the basic plane but surrogates, and one beyond; only 34 of them are escaped."""
    short = {8: "\\b", 9: "\\t", 10: "\\n", 12: "\\f", 13: "\\r", 34: '\\"', 92: "\\\\"}
    points = [*range(0xD800), *range(0xE000, 0x10000), 0x1F600, 0x10FFFF]
    for point in points:
        expected = short.get(point) or (f"\\u00{point:02x}" if point < 0x20 else chr(point))
        assert canonical.encode(chr(point)) == f'"{expected}"'.encode()


def test_keys_are_sorted_by_code_point() -> None:
    keys = ["\U0001f600", "\uffff", "\ue000", "é", "z", "aa", "a", "Z", "\x7f", "\x00", ""]
    data = canonical.encode(dict.fromkeys(keys))
    assert list(json.loads(data)) == sorted(keys)
    assert sorted(keys) == sorted(keys, key=str.encode)


@pytest.mark.parametrize("number", [-(2**63), -1, 0, 1, 2**63 - 1])
def test_integers_of_64_bits(number: int) -> None:
    assert canonical.encode(number) == str(number).encode()
    assert canonical.decode(str(number).encode(), int) == number


@pytest.mark.parametrize(
    "odd",
    [-(2**63) - 1, 2**63, 2**64, 10**40, 1.0, float("nan"), b"bytes", {1: 2}, {None: 1}, {"set"}],
)
def test_what_cannot_be_said_is_refused(odd: object) -> None:
    with pytest.raises(Malformed):
        canonical.encode({"nested": [odd]})


def test_surrogates_are_refused() -> None:
    with pytest.raises(Malformed, match="not valid Unicode"):
        canonical.encode("\ud800")
    with pytest.raises(Malformed, match="not valid Unicode"):
        canonical.encode_typed({"\udfff": 1})


def test_depth_is_limited_alike_when_writing_and_reading() -> None:
    text = "[" * limits.JSON_DEPTH_MAX + "]" * limits.JSON_DEPTH_MAX
    value = canonical.decode(text.encode(), object)
    assert canonical.encode(value) == text.encode()
    with pytest.raises(LimitExceeded):
        canonical.encode([value])
    with pytest.raises(LimitExceeded):
        canonical.decode(f"[{text}]".encode(), object)


def test_buffers_decode_like_bytes() -> None:
    for data in (b'{"a":1}', bytearray(b'{"a":1}'), memoryview(b'{"a":1}')):
        assert canonical.decode(data, object) == {"a": 1}


def test_a_document_is_asked_for_its_version_first() -> None:
    def decode(data: bytes) -> Sample:
        return canonical.decode_document(
            data, Sample, format_word="sample", what="sample", limit_bytes=100
        )

    assert decode(canonical.encode(Sample())) == Sample()
    with pytest.raises(UnsupportedVersion, match="needs a snapstore that reads store format 7"):
        decode(b'{"version":7, "format":"sample", "what":[1.5]}')
    with pytest.raises(LimitExceeded):
        decode(canonical.encode(Sample()) + b" " * 100)


@pytest.mark.parametrize("text", ["2026-11-30T05:00:00Z", "0001-01-01T00:00:00Z"])
def test_times(text: str) -> None:
    canonical.check_time(text, what="test")
    for odd in (text[:-1], text + "Z", text.lower(), text.replace("T", " "), ""):
        with pytest.raises(Malformed):
            canonical.check_time(odd, what="test")
