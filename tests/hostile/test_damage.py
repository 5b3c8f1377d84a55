"""Objects that the disk has damaged: cut off, with a bit turned over, swapped, or gone.

Each case says what a pull of the damaged snapshot does and whether pushing the same tree again
makes it whole. In every case the other snapshot of the store stays readable and nothing partial
has a final name.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from snapstore.backend.base import ObjectKind
from snapstore.errors import (
    DanglingRef,
    DigestMismatch,
    FormatError,
    IntegrityError,
    MissingChunk,
    MissingPack,
    RefNotFound,
    SnapError,
)
from snapstore.options import Integrity
from tests.support.damage import Lab, cut, flip, leftovers, swap, tree_state

Find = Callable[[Lab], Path]
Spoil = Callable[[Path], object]


def replace_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_symlink(path: Path) -> None:
    path.rename(path.with_name("x"))
    path.symlink_to("x")


DAMAGE: dict[str, Spoil] = {
    "cut": cut,
    "a byte short": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "empty": lambda path: cut(path, 0),
    "a byte long": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "first bit": lambda path: flip(path, 0),
    "last bit": lambda path: flip(path, 1),
    "middle bit": flip,
    "gone": Path.unlink,
    "a directory": replace_by_directory,
    "a symlink": replace_by_symlink,
}


def check_others(lab: Lab, to: Path) -> None:
    """Whatever is wrong with one snapshot, the other is there for everybody."""
    lab.pull(to, "other")
    assert tree_state(to) == tree_state(lab.tree.with_name("other-tree"))
    with lab.open() as store:
        told: list[str] = []
        listed = list(store.list(damaged=lambda name, _: told.append(str(name))))
    assert "other:latest" in {str(found.name) for found in listed}
    assert set(told) <= {lab.name}


def refused(lab: Lab, to: Path, integrity: Integrity = Integrity.STRONG) -> SnapError:
    """Pull what cannot be pulled; nothing has the name, and the message helps."""
    with pytest.raises(SnapError) as caught:
        lab.pull(to, integrity=integrity)
    assert not to.exists()
    assert caught.value.next_step
    return caught.value


def check_pulled(lab: Lab, to: Path) -> None:
    lab.pull(to)
    assert tree_state(to) == tree_state(lab.tree)
    assert leftovers(to) == []


def pack(lab: Lab) -> Path:
    return lab.packs_of()[0]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_pack(lab: Lab, tmp_path: Path, damage: str) -> None:
    """A pull ends with exit 4, and the advice that it gives leads to a whole snapshot.

    Proves: I6, I8, S5.
    """
    name = pack(lab).name
    DAMAGE[damage](pack(lab))
    if damage in {"a byte short", "a byte long", "last bit"}:
        # Frames are whole and readers of data never look at the end of a pack.
        check_pulled(lab, tmp_path / "out")
    else:
        error = refused(lab, tmp_path / "out")
        assert error.exit_code == 4
        assert name[:12] in str(error)
        is_same_length = damage.endswith("bit")
        assert isinstance(error, DigestMismatch if is_same_length else MissingPack)
        if is_same_length:
            # Only reading all of a pack would show a push that it is damaged.
            assert f"move packs/{name[:2]}/{name} away" in error.next_step
            lab.path(ObjectKind.PACK, name).unlink()
        assert "push the same tree again" in error.next_step
    check_others(lab, tmp_path / "other")
    result = lab.push()
    if damage != "last bit":
        assert any(name[:12] in warning for warning in result.warnings), result.warnings
        assert result.packed.packs == 1
    if (tmp_path / "out").exists():
        return
    lab.pull(tmp_path / "out", resume=True)
    assert tree_state(tmp_path / "out") == tree_state(lab.tree)
    check_others(lab, tmp_path / "other again")


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_index(lab: Lab, tmp_path: Path, damage: str) -> None:
    """A pull does not need it; a push sends what it listed again, says so, and mends it.

    Proves: I3.
    """
    (index,) = lab.indexes_of(lab.packs_of())
    DAMAGE[damage](index)
    check_pulled(lab, tmp_path / "out")
    check_others(lab, tmp_path / "other")
    first = lab.push()
    assert first.ingest.known_bytes < first.ingest.new_bytes, "its chunks are unknown"
    listed = damage not in {"gone", "a directory", "a symlink"}
    assert any(index.name[:12] in text for text in first.warnings) == listed, first.warnings
    check_pulled(lab, tmp_path / "again")
    second = lab.push()
    assert second.ingest.new_bytes == 0, "an index that is whole lists all by now"
    assert second.warnings == ()


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("position", [0, 2])
def test_a_damaged_rank_manifest(lab: Lab, tmp_path: Path, damage: str, position: int) -> None:
    """A pull ends with exit 4 and names the manifest; after its advice all is well.

    Proves: I1, I6.
    """
    rank = lab.rank_ids()[position]
    path = lab.path(ObjectKind.RANK, rank.hex)
    DAMAGE[damage](path)
    error = refused(lab, tmp_path / "out")
    assert error.exit_code == 4
    assert rank.short in str(error)
    check_others(lab, tmp_path / "other")
    advice = f"move ranks/{rank.hex[:2]}/{rank.hex} away"
    if damage not in {"gone", "a directory", "a symlink"}:
        assert advice in error.next_step
    if damage != "gone":
        if not damage.endswith("bit"):
            with pytest.raises(DigestMismatch, match="damaged") as caught:
                lab.push()
            assert advice in caught.value.next_step
        path.rename(tmp_path / "moved away")
    lab.push()
    check_pulled(lab, tmp_path / "out")


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_root_manifest(lab: Lab, tmp_path: Path, damage: str) -> None:
    """A pull ends with exit 4 by name and by id; a new push makes a new snapshot.

    Proves: I2.
    """
    snapshot = lab.snapshot_id()
    DAMAGE[damage](lab.path(ObjectKind.SNAPSHOT, snapshot.hex))
    error = refused(lab, tmp_path / "out")
    assert isinstance(error, DanglingRef | DigestMismatch)
    assert snapshot.short in str(error)
    with pytest.raises(SnapError) as caught:
        lab.pull(tmp_path / "out", f"any/name@b3:{snapshot.hex}")
    assert caught.value.exit_code in {3, 4}
    check_others(lab, tmp_path / "other")
    with lab.open() as store:
        store.push(lab.tree, lab.name, labels={"attempt": "second"})
    check_pulled(lab, tmp_path / "out")


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("is_only", [True, False], ids=["only", "newest"])
def test_a_damaged_layout(lab: Lab, tmp_path: Path, damage: str, is_only: bool) -> None:  # noqa: FBT001
    """An older layout or the indexes do as well, and nobody notices."""
    rank = lab.rank_ids()[0]
    (path,) = lab.layout_paths(rank)
    if not is_only:
        newest = path.with_name("00000002")
        newest.write_bytes(path.read_bytes())
        path = newest
    DAMAGE[damage](path)
    check_pulled(lab, tmp_path / "out")
    check_others(lab, tmp_path / "other")
    if path.is_symlink() or path.is_dir():
        return  # Whoever put that there has to take it away.
    lab.push()
    check_pulled(lab, tmp_path / "again")


def test_a_layout_and_an_index_are_damaged(lab: Lab, tmp_path: Path) -> None:
    """Then there is no way to the bytes, and the message says what is damaged; a push mends it."""
    for path in lab.layout_paths(lab.rank_ids()[0]):
        flip(path)
    (index,) = lab.indexes_of(lab.packs_of())
    flip(index)
    error = refused(lab, tmp_path / "out")
    assert isinstance(error, MissingChunk)
    assert index.name[:12] in str(error)
    lab.push()
    check_pulled(lab, tmp_path / "out")


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_ref(lab: Lab, tmp_path: Path, damage: str) -> None:
    """A pull ends with exit 4 (or 3 if it is gone); pushing to the name again is possible.

    Proves: I2, C3.
    """
    (name,) = lab.names(ObjectKind.REF, "team/")
    snapshot = lab.snapshot_id()
    path = lab.path(ObjectKind.REF, name)
    DAMAGE[damage](path)
    error = refused(lab, tmp_path / "out")
    is_there = damage not in {"gone", "a directory", "a symlink"}
    assert isinstance(error, FormatError if is_there else RefNotFound)
    assert lab.name in str(error)
    check_others(lab, tmp_path / "other")
    lab.pull(tmp_path / "exact", f"team/model@b3:{snapshot.hex}")
    assert tree_state(tmp_path / "exact") == tree_state(lab.tree)
    if path.is_symlink() or path.is_dir():
        path.rename(tmp_path / "moved away")
    lab.push()
    check_pulled(lab, tmp_path / "out")


@pytest.mark.parametrize("at", [number / 40 for number in range(40)])
def test_a_ref_with_a_bit_turned_over(lab: Lab, tmp_path: Path, at: float) -> None:
    """A ref has no digest; what it says is another snapshot that does not exist, or nonsense.

    Proves: I2.
    """
    (name,) = lab.names(ObjectKind.REF, "team/")
    flip(lab.path(ObjectKind.REF, name), at)
    # Unless it was in the nonce or the time, which do not say what the name points to.
    with contextlib.suppress(FormatError, IntegrityError):
        check_pulled(lab, tmp_path / "out")
        return
    assert not (tmp_path / "out").exists()


SWAPS: dict[str, Callable[[Lab], tuple[Path, Path]]] = {
    "packs": lambda lab: (lab.packs_of()[0], lab.packs_of("other")[0]),
    "ranks": lambda lab: (
        lab.path(ObjectKind.RANK, lab.rank_ids()[1].hex),
        lab.path(ObjectKind.RANK, lab.rank_ids()[2].hex),
    ),
    "roots": lambda lab: (
        lab.path(ObjectKind.SNAPSHOT, lab.snapshot_id().hex),
        lab.path(ObjectKind.SNAPSHOT, lab.snapshot_id("other").hex),
    ),
}


@pytest.mark.parametrize("integrity", Integrity)
@pytest.mark.parametrize("kind", SWAPS)
def test_swapped(lab: Lab, tmp_path: Path, kind: str, integrity: Integrity) -> None:
    """Each of two objects is whole, under the name of the other: never one for the other.

    Proves: I6.
    """
    swap(*SWAPS[kind](lab))
    error = refused(lab, tmp_path / "out", integrity=integrity)
    assert error.exit_code == 4


def test_swapped_where_it_does_not_matter(lab: Lab, tmp_path: Path) -> None:
    """Layouts and indexes under each other's names are passed over; swapped refs swap trees."""
    layouts = [lab.layout_paths(rank)[0] for rank in lab.rank_ids()[1:]]
    swap(layouts[0], layouts[1])
    check_pulled(lab, tmp_path / "out")
    indexes = [lab.path(ObjectKind.INDEX, name) for name in lab.names(ObjectKind.INDEX)]
    swap(indexes[0], indexes[1])
    assert len(lab.push().warnings) == 2
    check_pulled(lab, tmp_path / "again")
    refs = [lab.path(ObjectKind.REF, f"{chain}/00000001") for chain in ("other/@latest",)]
    refs.append(lab.path(ObjectKind.REF, lab.names(ObjectKind.REF, "team/")[-1]))
    swap(refs[0], refs[1])
    check_pulled(Lab(lab.root, lab.tree.with_name("other-tree")), tmp_path / "swapped")


def test_damage_in_one_rank_spares_the_others(lab: Lab, tmp_path: Path) -> None:
    """A rank that is whole can be pulled alone, whatever happened to the rest."""
    flip(lab.path(ObjectKind.RANK, lab.rank_ids()[1].hex))
    with lab.open() as store, pytest.raises(IntegrityError):
        store.pull(lab.name, tmp_path / "all")
    with lab.open() as store:
        store.pull(lab.name, tmp_path / "one", ranks=[1])
    assert (tmp_path / "one/rank1.bin").read_bytes() == (lab.tree / "rank1.bin").read_bytes()


def test_foreign_files_in_the_store(lab: Lab, tmp_path: Path) -> None:
    """What other programs leave in a store is neither read nor listed nor removed."""
    strangers = [
        ".nfs000001",
        "lost+found/x",
        "packs/ab/.swp",
        "packs/zz/" + "0" * 64,
        "packs/README",
        "indexes/ab/" + "ab" * 31,
        "indexes/" + "ab" * 32,
        "layouts/" + "0" * 64 + "/1",
        "layouts/" + lab.rank_ids()[0].hex + "/00000000",
        "refs/team/model/@v1/backup~",
        "refs/team/model/@v1/2",
        "refs/@x/00000001",
        "refs/.hidden/@v1/00000001",
        "snapshots/aa/" + "bb" * 32,
        "leases/x/00000001",
        "marks/packs/x/00000001",
        "marks/unknown/" + "0" * 64 + "/00000001",
        "tmp/put-" + "0" * 32,
    ]
    for key in strangers:
        path = lab.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"not an object")
    (lab.root / "packs/ab/loop").symlink_to("..")
    check_pulled(lab, tmp_path / "out")
    check_others(lab, tmp_path / "other")
    assert lab.push().warnings == ()
    check_pulled(lab, tmp_path / "again")
    assert all((lab.root / key).read_bytes() == b"not an object" for key in strangers)


@pytest.mark.parametrize("damage", ["cut", "empty", "first bit"])
def test_damaged_leases_and_hints_hurt_nobody(lab: Lab, tmp_path: Path, damage: str) -> None:
    """Leases of others are for pruners; a hint is advice."""
    lab.put(ObjectKind.HINT, "pages/order", b"anything")
    for name in lab.names(ObjectKind.LEASE):
        DAMAGE[damage](lab.path(ObjectKind.LEASE, name))
    lab.push()
    check_pulled(lab, tmp_path / "out")


def test_a_damaged_mark_counts_as_the_worst_that_it_may_have_said(lab: Lab, tmp_path: Path) -> None:
    """A pack whose mark is unreadable may be being removed, so a push does not rely on it.

    Proves: R3.
    """
    (old,) = lab.packs_of()
    lab.put(ObjectKind.MARK, f"packs/{old.name}/00000001", b"{")
    result = lab.push()
    assert result.packed.packs == 1
    old.unlink()
    check_pulled(lab, tmp_path / "out")
    rank = lab.rank_ids()[0]
    lab.put(ObjectKind.MARK, f"ranks/{rank.hex}/00000001", b"{")
    with pytest.raises(FormatError, match=rank.short) as caught:
        lab.push()
    assert f"move marks/ranks/{rank.hex} away" in caught.value.next_step
