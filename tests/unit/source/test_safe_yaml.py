import contextlib

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from snapstore.errors import FormatError, LimitExceeded, Malformed
from snapstore.source import safe_yaml
from snapstore.source.safe_yaml import YAML_BYTES_MAX, parse_yaml


@pytest.fixture(params=["C", "python"], autouse=True)
def loader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    if request.param == "python":
        monkeypatch.setattr(safe_yaml, "_LOADER", yaml.SafeLoader)
    elif not hasattr(yaml, "CSafeLoader"):
        pytest.skip("PyYAML was built without its C parser")


def test_plain_values_have_types_and_quoted_ones_are_text():
    text = (
        b"a: 5\nb: '5'\nc: true\nd: \"true\"\ne: ~\nf:\ng: null\nh: |\n  1\n"
        b"i: [1, -2, {k: v}]\nj: 2026-08-21T11:50:22Z\nk: 0x1F\nl: 1e3\nm: 12:30\nn: yes\n"
    )
    assert parse_yaml(text, "m") == {
        "a": 5,
        "b": "5",
        "c": True,
        "d": "true",
        "e": None,
        "f": None,
        "g": None,
        "h": "1\n",
        "i": [1, -2, {"k": "v"}],
        "j": "2026-08-21T11:50:22Z",
        "k": "0x1F",
        "l": "1e3",
        "m": "12:30",
        "n": "yes",
    }


@pytest.mark.parametrize(("text", "value"), [(b"", None), (b"# x", None), (b"a", "a"), (b"[]", [])])
def test_a_document_need_not_be_a_mapping(text: bytes, value: object):
    assert parse_yaml(text, "m") == value


def test_only_the_first_document_counts():
    assert parse_yaml(b"a: 1\n---\n*nonsense", "m") == {"a": 1}


def test_alias_bombs_are_refused_at_the_first_alias():
    bomb = b"a: &a [x, x]\n" + b"".join(
        b"%c: &%c [*%c, *%c]\n" % (c, c, c - 1, c - 1) for c in range(ord("b"), ord("z"))
    )
    with pytest.raises(Malformed, match="an alias in line 2"):
        parse_yaml(bomb, "m")


@pytest.mark.parametrize("text", [b"[" * 200_000, b"{a: " * 200_000, b"- " * 200_000, b"a:\n" * 9])
def test_depth_is_limited(text: bytes):
    with pytest.raises(FormatError):
        parse_yaml(text, "m")


def test_tags_construct_nothing():
    assert parse_yaml(b"!!python/object/apply:os.system [id]", "m") == ["id"]
    assert parse_yaml(b"a: !!int '5'", "m") == {"a": "5"}


@pytest.mark.slow
def test_numbers_that_would_take_quadratic_time_are_text():
    for text in (b"1" + b":1" * 200_000, b"9" * 500_000, b"0." + b"1" * 500_000):
        assert parse_yaml(text, "m") == text.decode()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"a: 1\na: 2", "the key 'a' twice in line 2"),
        (b"{[1]: 2}", "a key that is not text"),
        (b"a: b: c", "not YAML"),
        (b"\xff", "not UTF-8"),
        (b"a: \x00", "not YAML"),
    ],
)
def test_broken_documents_are_refused_with_the_place(text: bytes, reason: str):
    with pytest.raises(Malformed, match=f"manifest: {reason}"):
        parse_yaml(text, "manifest")


@pytest.mark.slow
def test_size_and_count_are_limited():
    with pytest.raises(LimitExceeded, match="bytes"):
        parse_yaml(b" " * (YAML_BYTES_MAX + 1), "m")
    with pytest.raises(LimitExceeded, match="values"):
        parse_yaml(b"- 1\n" * 100_001, "m")


@given(st.one_of(st.binary(max_size=80), st.text(max_size=80).map(str.encode)))
def test_arbitrary_bytes_never_do_more_than_refuse(data: bytes):
    with contextlib.suppress(FormatError):
        parse_yaml(data, "m")


@given(st.text(alphabet="ab:-[]{},&*!|>'\"#?%@ \n\t0159~\\u", max_size=60))
def test_arbitrary_syntax_never_does_more_than_refuse(text: str):
    try:
        value = parse_yaml(text.encode(), "m")
    except FormatError:
        return
    yaml.safe_dump(value)  # only plain values
