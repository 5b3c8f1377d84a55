"""Counting and comparing a store that lies: numbers, or an error of ours, and never a crash."""

import contextlib
import random
from collections.abc import Callable

import pytest

from snapstore.backend.base import ObjectKind
from snapstore.errors import SnapError
from snapstore.format import rank as rank_format
from snapstore.repository.store import Store
from tests.support.damage import Lab, Sections, cut, flip, nothing_left, rows

pytestmark = pytest.mark.slow

ASKED: list[Callable[[Store], object]] = [
    lambda store: store.diff("other", Lab.name),
    lambda store: store.diff(Lab.name, "other"),
    lambda store: store.history(Lab.name),
    lambda store: store.remove("other", dry_run=True),
    lambda store: store.remove(Lab.name, dry_run=True),
]


@pytest.mark.parametrize(
    "kind",
    [
        ObjectKind.REF,
        ObjectKind.LEASE,
        ObjectKind.SNAPSHOT,
        ObjectKind.RANK,
        ObjectKind.LAYOUT,
        ObjectKind.INDEX,
        ObjectKind.PACK,
    ],
)
def test_every_object_damaged_in_turn(lab: Lab, kind: ObjectKind) -> None:
    """Goal: `stats` always answers; the others do or say what is wrong.

    Method: flip, cut and remove each object of a kind, and bring it back after each time.
    """
    for name in lab.names(kind):
        path = lab.path(kind, name)
        whole = path.read_bytes()
        for spoil in (flip, cut, lambda path: cut(path, 0), lambda path: path.unlink()):
            spoil(path)
            with nothing_left(), lab.open() as store:
                found = store.stats()
                assert found.total.unique_bytes >= 0
                for ask in ASKED:
                    with contextlib.suppress(SnapError):
                        ask(store)
            path.write_bytes(whole)


def test_chunks_that_everybody_claims(lab: Lab) -> None:
    """Goal: sizes that contradict each other spoil numbers and nothing else.

    Method: a rank manifest, with a right digest, whose extents name the chunks of another with
    other lengths.
    """
    rng = random.Random(5)
    other = rank_format.parse_rank(
        lab.path(ObjectKind.RANK, lab.rank_ids("other")[0].hex).read_bytes()
    )
    ids = other.extents["id"][other.extents["chunk_length"] != 0]

    def change(sections: Sections) -> None:
        with rows(sections, b"XTNT", rank_format.EXTENT_DTYPE) as extents:
            for row in extents:
                if row["chunk_length"]:
                    row["id"] = ids[rng.randrange(len(ids))]

    lab.lie_in_rank(change)
    with lab.open() as store:
        found = store.stats(depth=2)
        assert not found.damaged
        total = store.diff("other", lab.name).total
        assert total.shared_bytes + total.new_bytes == total.logical_b_bytes - total.zero_b_bytes
        assert total.new_bytes < total.shared_bytes


def test_a_manifest_that_claims_too_much(lab: Lab) -> None:
    """What a root manifest says of sizes is not believed."""

    def change(manifest: dict[str, object]) -> None:
        ranks = manifest["ranks"]
        assert isinstance(ranks, list)
        ranks[0]["logical_bytes"] = ranks[0]["data_bytes"] = 1 << 62

    with lab.open() as store:
        honest = store.stats().total
    lab.lie_in_root(change)
    with lab.open() as store:
        assert store.stats().total == honest
