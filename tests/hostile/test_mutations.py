"""Random changes below right digests: whatever they are, there is an answer, and it is no crash.

Every mutation is a pure function of its seed, so a failure names all that it takes to repeat it.
"""

import contextlib
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from snapstore.backend.base import ObjectKind
from snapstore.errors import FormatError, IntegrityError, SnapError
from snapstore.options import Integrity
from tests.support.damage import Lab, Sections, nothing_left, tree_state

pytestmark = pytest.mark.slow

MUTATIONS = 60
BATCHES = 3
BOUNDARIES = (0, 1, 0x7F, 0x80, 0xFF)


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Change a few bytes, or the length."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        at = rng.randrange(len(changed)) if changed else 0
        kind = rng.randrange(7)
        if kind == 0 and changed:
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and changed:
            changed[at] = rng.choice(BOUNDARIES)
        elif kind == 2:
            width = rng.choice((2, 4, 8))
            value = rng.choice((0, 1, (1 << 8 * width) - 1, 1 << (8 * width - 1), 1 << 7))
            start = at - at % width
            changed[start : start + width] = value.to_bytes(width, "little")
        elif kind == 3:
            del changed[at : at + rng.choice((1, 8, 16, 24, 48))]
        elif kind == 4:
            changed[at:at] = changed[at : at + rng.choice((1, 16, 24, 40, 48))]
        elif kind == 5:
            other = rng.randrange(len(changed)) if changed else 0
            size = rng.choice((4, 8, 16, 24, 48))
            changed[at : at + size] = changed[other : other + size]
        else:
            changed += rng.randbytes(rng.choice((1, 16, 48)))
    return bytes(changed)


def mutated(rng: random.Random) -> Callable[[Sections], None]:
    def change(sections: Sections) -> None:
        tag = rng.choice(sorted(sections))
        sections[tag] = mutate(sections[tag], rng)

    return change


def outcome(lab: Lab, to: Path, integrity: Integrity = Integrity.STRONG) -> SnapError | None:
    """Pull; an error is one of ours, and then nothing has the name. Also tidies up."""
    try:
        with nothing_left():
            lab.pull(to, integrity=integrity)
    except SnapError as error:
        assert not to.exists()
        return error
    finally:
        for path in to.parent.glob(f".{to.name}.*"):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
    return None


@pytest.mark.parametrize("batch", range(BATCHES))
def test_mutated_layouts(lab: Lab, tmp_path: Path, batch: int) -> None:
    """A pull gives the right tree or an error of exit code 4, with whatever layout.

    Method: mutate one section of the newest layout and write it as the next generation; an older
    one is there to fall back to, so most mutations are not noticed at all. Proves: H1, I6.
    """
    want = tree_state(lab.tree)
    to = tmp_path / "out"
    refused = 0
    for number in range(MUTATIONS):
        seed = f"layout {batch} {number}"
        path = lab.lie_in_layout(mutated(random.Random(seed)), position=number % 3)
        error = outcome(lab, to)
        if error is None:
            assert tree_state(to) == want, seed
            shutil.rmtree(to)
        else:
            assert error.exit_code == 4, (seed, error)
            assert error.next_step, (seed, error)
            refused += 1
        path.unlink()
    assert 0 < refused < MUTATIONS


@pytest.mark.parametrize("batch", range(BATCHES))
def test_mutated_rank_manifests(lab: Lab, tmp_path: Path, batch: int) -> None:
    """A pull gives some tree, whole, or an error; `show` likewise.

    What the manifest says is the truth, so a mutation may well be pulled: another mode, another
    name. Names may also be such that the file system refuses them (exit 1). Proves: H1, H2, I8.
    """
    to = tmp_path / "out"
    before = sorted(path.name for path in tmp_path.iterdir())
    refused = 0
    for number in range(MUTATIONS):
        seed = f"rank {batch} {number}"
        lab.lie_in_rank(mutated(random.Random(seed)), position=number % 3)
        integrity = (Integrity.STRONG, Integrity.FAST)[number % 2]
        error = outcome(lab, to, integrity)
        if error is None:
            shutil.rmtree(to)
        else:
            assert error.exit_code in {1, 4}, (seed, error)
            refused += 1
        with lab.open() as store, contextlib.suppress(FormatError, IntegrityError):
            store.show(lab.name)
        lab.point(first_snapshot(lab))
        assert sorted(path.name for path in tmp_path.iterdir()) == before, seed
    assert refused > 0


def first_snapshot(lab: Lab) -> str:
    """What the name pointed to in the beginning."""
    backup = lab.root / "first"
    if not backup.exists():
        body = lab.path(ObjectKind.REF, "team/model/@v1/00000001").read_text()
        backup.write_text(body.partition('"snapshot":"')[2][:64])
    return backup.read_text()


def test_mutated_documents(lab: Lab, tmp_path: Path) -> None:
    """Refs and root manifests: the right tree, or an error of exit code 1, 3 or 4."""
    to = tmp_path / "out"
    ref = lab.path(ObjectKind.REF, "team/model/@v1/00000001")
    root = lab.path(ObjectKind.SNAPSHOT, lab.snapshot_id().hex)
    good_ref, good_root = ref.read_bytes(), root.read_bytes()
    for number in range(2 * MUTATIONS):
        rng = random.Random(f"document {number}")
        ref.write_bytes(good_ref)
        if number % 2:
            ref.write_bytes(mutate(good_ref, rng))
        else:
            lab.put(ObjectKind.REF, "team/model/@v1/00000001", good_ref)
            digest = lab.put_named(ObjectKind.SNAPSHOT, mutate(good_root, rng))
            ref.write_bytes(good_ref.replace(root.name.encode(), digest.encode()))
        error = outcome(lab, to)
        if error is None:
            assert tree_state(to) == tree_state(lab.tree), number
            shutil.rmtree(to)
        else:
            assert error.exit_code in {1, 3, 4}, (number, error)


@pytest.mark.parametrize("batch", range(BATCHES))
def test_mutated_indexes(lab: Lab, tmp_path: Path, batch: int) -> None:
    """A push succeeds with whatever index; so does a pull that has to derive its layout, or exit 4.

    Method: the changed index lies beside the right one. It may win where both know a chunk, and
    be wrong; strong integrity then refuses what the derived layout shows. Proves: H1, I6.
    """
    want = tree_state(lab.tree)
    (index,) = lab.indexes_of(lab.packs_of())
    for rank in lab.rank_ids():
        for path in lab.layout_paths(rank):
            path.unlink()
    to = tmp_path / "out"
    pushed = 0
    for number in range(MUTATIONS):
        seed = f"index {batch} {number}"
        bad = lab.lie_in_index(mutated(random.Random(seed)), index)
        error = outcome(lab, to)
        if error is None:
            assert tree_state(to) == want, seed
            shutil.rmtree(to)
        else:
            assert error.exit_code == 4, (seed, error)
        if number % 10 == 0:
            with nothing_left():
                lab.push("pushed")
            pushed += 1
        if bad != index:
            bad.unlink()
    assert pushed
