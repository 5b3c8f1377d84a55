"""Keys: one per name and back, and nothing for what a store's directory may hold besides."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapstore.backend import layout
from snapstore.backend.base import CONTENT_NAMED, ObjectKind
from snapstore.errors import UsageError
from snapstore.ids import RefName
from snapstore.testing.contract_objects import HOSTILE_NAMES, HOSTILE_PREFIXES

ID = "ab" + "0123456789" * 6 + "cd"
LEASE = "ef" * 16

KEYS = [
    (ObjectKind.CONFIG, "", "snapstore.json"),
    (ObjectKind.PACK, ID, f"packs/ab/{ID}"),
    (ObjectKind.INDEX, ID, f"indexes/ab/{ID}"),
    (ObjectKind.RANK, ID, f"ranks/ab/{ID}"),
    (ObjectKind.SNAPSHOT, ID, f"snapshots/ab/{ID}"),
    (ObjectKind.LAYOUT, f"{ID}/00000001", f"layouts/{ID}/00000001"),
    (ObjectKind.REF, "team/x/@v1/00000003", "refs/team/x/@v1/00000003"),
    (ObjectKind.REF, "a/00000001/@b/99999999", "refs/a/00000001/@b/99999999"),
    (ObjectKind.LEASE, f"{LEASE}/00000002", f"leases/{LEASE}/00000002"),
    (ObjectKind.MARK, f"packs/{ID}/00000001", f"marks/packs/{ID}/00000001"),
    (ObjectKind.MARK, f"ranks/{ID}/00000001", f"marks/ranks/{ID}/00000001"),
    (ObjectKind.HINT, f"page-order/{ID}", f"hints/page-order/{ID}"),
]

STRAY = [
    "lost+found",
    ".nfs000000000000000100000001",
    "snapstore.json~",
    "snapstore.json/x",
    "tmp/put-" + "0" * 32,
    f"packs/{ID}",
    f"packs/ac/{ID}",
    f"packs/ab/{ID}.tmp",
    f"packs/ab/{ID}/x",
    f"packs/ab/.{ID}",
    f"packs/ab/{ID[:-1]}",
    "packs/ab",
    "packs",
    "packs/",
    "",
    f"refs/team/x/@v1/{ID}",
    "refs/team/x/@v1/00000000",
    "refs/team/x/@v1/.nfs00000001",
    "refs/@v1/00000001",
    "refs/team/x/@v1/00000001\n",
    f"leases/{ID}/00000001",
    f"marks/refs/{ID}/00000001",
    f"hints/{ID}/x",
]


@pytest.mark.parametrize(("kind", "name", "key"), KEYS)
def test_names_and_keys_are_one_to_one(kind: ObjectKind, name: str, key: str) -> None:
    assert layout.key_of(kind, name) == key
    assert layout.name_of(kind, key) == name
    assert all(layout.name_of(other, key) is None for other in ObjectKind if other is not kind)
    folders = layout.parent_keys(key)[:-1]
    assert all(layout.is_folder(kind, folder) for folder in folders)
    assert not layout.is_folder(kind, key)


@pytest.mark.parametrize("key", STRAY)
def test_stray_files_name_nothing(key: str) -> None:
    assert [layout.name_of(kind, key) for kind in ObjectKind] == [None] * len(ObjectKind)


@pytest.mark.parametrize(
    "key", ["refs/lost+found", "refs/.snapshot", "packs/abc", "packs/ab/cd", "refs/a/@b/c", "tmp"]
)
def test_stray_folders_are_not_entered(key: str) -> None:
    assert not any(layout.is_folder(kind, key) for kind in ObjectKind)


@pytest.mark.parametrize("kind", ObjectKind, ids=lambda kind: kind.value)
def test_hostile_names_have_no_key(kind: ObjectKind) -> None:
    for name in HOSTILE_NAMES:
        with pytest.raises(UsageError):
            layout.key_of(kind, name)
        assert layout.name_of(kind, f"{kind.value}/{name}") != name


@pytest.mark.parametrize("kind", ObjectKind, ids=lambda kind: kind.value)
def test_hostile_prefixes_are_refused(kind: ObjectKind) -> None:
    for prefix in HOSTILE_PREFIXES:
        with pytest.raises(UsageError):
            layout.listing_prefix(kind, prefix)


@pytest.mark.parametrize(
    ("prefix", "start"),
    [("", "packs/"), ("a", "packs/a"), ("ab", "packs/ab/ab"), ("ab0", "packs/ab/ab0")],
)
def test_a_prefix_of_digits_names_its_shard(prefix: str, start: str) -> None:
    assert layout.listing_prefix(ObjectKind.PACK, prefix) == start


@pytest.mark.parametrize("prefix", ["AB", "a/", "ab/", "x", ID + "0", "@"])
def test_a_prefix_that_no_digest_has_gives_nothing(prefix: str) -> None:
    assert layout.listing_prefix(ObjectKind.PACK, prefix) is None


def test_parents_come_innermost_first() -> None:
    assert layout.parent_keys("a/b/c") == ["a/b", "a", ""]
    assert layout.parent_keys("a") == [""]


WORD = st.from_regex(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,20}[A-Za-z0-9])?", fullmatch=True)


@given(st.lists(WORD, min_size=1, max_size=5), WORD, st.integers(1, 99_999_999))
def test_every_ref_that_users_can_write_has_a_key(
    components: list[str], tag: str, number: int
) -> None:
    ref = RefName("/".join(components), tag)
    name = f"{ref.name}/@{ref.tag}/{number:08d}"
    assert layout.name_of(ObjectKind.REF, layout.key_of(ObjectKind.REF, name)) == name


def test_the_longest_ref_has_a_key() -> None:
    ref = RefName("n" * 255, "t" * 128)
    key = layout.key_of(ObjectKind.REF, f"{ref.name}/@{ref.tag}/00000001")
    assert len(key) <= layout.KEY_CHARS_MAX
    assert layout.is_folder(ObjectKind.REF, key.rpartition("/")[0])


@given(st.sampled_from(list(ObjectKind)), st.text(max_size=80))
def test_any_text_is_a_name_or_refused(kind: ObjectKind, text: str) -> None:
    """No name leads out of its kind, whatever it is made of."""
    try:
        key = layout.key_of(kind, text)
    except UsageError:
        return
    assert key == kind.value or key.startswith(f"{kind.value}/")
    assert not {"", ".", ".."} & set(key.split("/"))


@given(
    st.sampled_from(sorted(CONTENT_NAMED, key=lambda kind: kind.value)),
    st.binary(min_size=32, max_size=32),
    st.integers(0, 64),
)
def test_names_lie_below_each_of_their_prefixes(kind: ObjectKind, raw: bytes, end: int) -> None:
    start = layout.listing_prefix(kind, raw.hex()[:end])
    assert start is not None
    assert layout.key_of(kind, raw.hex()).startswith(start)
