import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapstore.errors import UsageError
from snapstore.source.classes import DataClass, FileRole, class_of, parse_class_override
from snapstore.source.globs import PathGlob


@pytest.mark.parametrize(
    ("glob", "path", "matches"),
    [
        ("*.bin", b"a.bin", True),
        ("*.bin", b"x/y/a.bin", True),
        ("*.bin", b"a.bin.gz", False),
        ("*.bin", b"a\n.bin", True),
        ("a?c", b"abc", True),
        ("a?c", b"a/c", False),
        ("gpu", b"gpu/deep/file", True),
        ("gpu/", b"gpu", False),
        ("gpu/", b"gpu/file", True),
        ("x/gpu/", b"x/gpu/file", True),
        ("x/gpu/", b"y/x/gpu/file", False),
        ("/gpu", b"gpu", True),
        ("/gpu", b"x/gpu", False),
        ("a/*/c", b"a/b/c", True),
        ("a/*/c", b"a/b/b/c", False),
        ("a/**/c", b"a/b/b/c", True),
        ("a/**/c", b"a/c", True),
        ("a**z", b"a/b/z", True),
        ("[ab].x", b"b.x", True),
        ("[!ab].x", b"b.x", False),
        ("[!ab].x", b"c.x", True),
        ("[a-c]", b"b", True),
        ("[]]", b"]", True),
        ("[\\]", b"\\", True),
        ("[a--&&~~||]", b"a", True),
        ("(a|b)+$", b"(a|b)+$", True),
        ("\udcff*", b"\xffx", True),
        ("{a}", b"{a}", True),
    ],
)
def test_globs(glob: str, path: bytes, matches: bool):  # noqa: FBT001
    assert (PathGlob.parse(glob).match(path) is not None) is matches


def test_the_number_is_taken_from_the_outermost_match():
    glob = PathGlob.parse("gpu-{N}/")
    assert glob.match(b"gpu-007/x/gpu-9/f") == 7
    assert glob.match(b"x/gpu-12/f") == 12
    assert glob.match(b"gpu-3", is_directory=True) == 3
    assert glob.match(b"gpu-3") is None
    assert glob.match(b"gpu-x/f") is None
    assert glob.match(b"gpu-1234567890/f") is None


@pytest.mark.parametrize("glob", ["", "/", "//", "{N}{N}", "[z-a]", "x[]"])
def test_what_is_no_glob_is_refused(glob: str):
    with pytest.raises(UsageError):
        PathGlob.parse(glob)


@given(st.text(alphabet="ab/*?[]!-^\\{}N.|&~", max_size=12), st.binary(max_size=12))
def test_any_glob_compiles_or_is_refused(glob: str, path: bytes):
    try:
        parsed = PathGlob.parse(glob)
    except UsageError:
        return
    parsed.match(path)


@pytest.mark.parametrize(
    ("path", "data_class"),
    [
        (b"pages-1.img", DataClass.PAGES),
        (b"x/pages-shmem-9.img", DataClass.PAGES),
        (b"pages-1.img.old", DataClass.GENERIC),
        (b"rank0.bin", DataClass.TENSORS),
        (b"shards/shard_0000.bin", DataClass.TENSORS),
        (b"p/device-0000.bin", DataClass.TENSORS),
        (b"p/device-0000.bin.part-0001", DataClass.TENSORS),
        (b"model.safetensors", DataClass.TENSORS),
        (b"model.pt", DataClass.TENSORS),
        (b"core-1.img", DataClass.GENERIC),
        (b"bin", DataClass.GENERIC),
        (b"", DataClass.GENERIC),
    ],
)
def test_the_name_tells_where_no_role_does(path: bytes, data_class: DataClass):
    assert class_of(path, FileRole.OTHER) is data_class


def test_the_role_is_above_the_name_and_the_user_above_both():
    assert class_of(b"odd", FileRole.CRIU_PAGES) is DataClass.PAGES
    assert class_of(b"manifest.bin", FileRole.MANIFEST) is DataClass.GENERIC
    overrides = [parse_class_override("*=tensors"), parse_class_override("odd=generic")]
    assert class_of(b"odd", FileRole.CRIU_PAGES, overrides) is DataClass.GENERIC
    assert class_of(b"even", FileRole.CRIU_PAGES, overrides) is DataClass.TENSORS


def test_every_role_but_other_has_a_class():
    for role in FileRole:
        if role is not FileRole.OTHER:
            assert class_of(b"x", role) == class_of(b"pages-1.img", role)


@pytest.mark.parametrize("text", ["", "x", "x=", "=pages", "x=floats", "x=PAGES"])
def test_overrides_need_a_glob_and_a_class(text: str):
    with pytest.raises(UsageError):
        parse_class_override(text)
