"""Any two trees compared, and the store that holds them counted: the sums of an own model."""

import contextlib
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings

import snapstore
from tests.support.trees import Node, trees, write_tree

pytestmark = pytest.mark.slow

few = settings(max_examples=40)

_numbers = itertools.count()

Extents = list[tuple[str, int, int, bytes]]


@contextlib.contextmanager
def pushed(**given_trees: list[Node]) -> Iterator[snapstore.Store]:
    """A store in memory with these trees under their names."""
    with tempfile.TemporaryDirectory(prefix="snapstore-") as place:
        options = snapstore.StoreOptions(threads=2)
        store = snapstore.init_store(f"memory://inspection-{next(_numbers)}", options)
        for name, nodes in given_trees.items():
            folder = Path(place) / name
            folder.mkdir()
            write_tree(folder, nodes)
            store.push(folder, f"{name}/x", skip_special=True, labels={"of": name})
        yield store


def extents_of(store: snapstore.Store, name: str) -> Extents:
    """Rank, length, length of the chunk, and its id, of every extent."""
    return [
        (str(rank.number), length, chunk_length, bytes(chunk))
        for rank in store.snapshot(name).ranks()
        for length, _, chunk_length, chunk in rank.read_extents().tolist()
    ]


def frames_of(store: snapstore.Store, name: str) -> dict[tuple[bytes, int], int]:
    """Stored length of each frame that a snapshot's layouts use, by pack and offset."""
    found = {}
    for rank in store.snapshot(name).ranks():
        packs = [bytes(raw) for raw in rank.layout.packs["id"].tolist()]
        for frame in rank.layout.frames:
            place = (packs[int(frame["pack"])], int(frame["offset"]))
            found[place] = int(frame["stored_length"])
    return found


def chunks_in(extents: Extents) -> dict[bytes, int]:
    return {chunk: size for _, _, size, chunk in extents if size}


@few
@given(trees(), trees())
def test_diff_adds_up(one: list[Node], other: list[Node]) -> None:
    """Goal: shared and new are all of B that is not zeros, by rank too, as a plain model says."""
    with pushed(a=one, b=other) as store:
        found = store.diff("a/x", "b/x")
        a, b = extents_of(store, "a/x"), extents_of(store, "b/x")
        in_a, in_b = chunks_in(a), chunks_in(b)
        total = found.total
        assert total.shared_bytes + total.new_bytes == sum(row[1] for row in b if row[2])
        assert total.shared_bytes == sum(row[1] for row in b if row[3] in in_a and row[2])
        assert total.gone_bytes == sum(row[1] for row in a if row[3] not in in_b and row[2])
        assert total.zero_b_bytes == sum(row[1] for row in b if not row[2])
        assert total.logical_a_bytes == sum(row[1] for row in a)
        new = {chunk: size for chunk, size in in_b.items() if chunk not in in_a}
        assert found.new_unique_bytes == sum(new.values())
        for rank, counted in found.by_rank.items():
            assert counted.logical_b_bytes == sum(row[1] for row in b if row[0] == str(rank))
        for group in (found.by_rank, found.by_class):
            sums = snapstore.DiffBytes()
            for counted in group.values():
                sums = sums.plus(counted)
            assert sums == total
        frames_a, frames_b = frames_of(store, "a/x"), frames_of(store, "b/x")
        added = sum(size for place, size in frames_b.items() if place not in frames_a)
        assert found.added_bytes == found.freed_without_b.stored_bytes == added
        assert found.stored_a_bytes == sum(frames_a.values())


@few
@given(trees(), trees(), trees())
def test_stats_add_up(one: list[Node], two: list[Node], three: list[Node]) -> None:
    """Goal: what namespaces share and have alone, as sets of chunks and frames say."""
    with pushed(a=one, b=two, c=three) as store:
        found = store.stats()
        chunks = {name: chunks_in(extents_of(store, f"{name}/x")) for name in "abc"}
        frames = {name: frames_of(store, f"{name}/x") for name in "abc"}
        everything = chunks["a"] | chunks["b"] | chunks["c"]
        assert found.total.unique_bytes == sum(everything.values())
        all_frames = frames["a"] | frames["b"] | frames["c"]
        assert found.total.stored_bytes == sum(all_frames.values())
        for space in found.namespaces:
            name = space.namespace
            others = [chunks[other] for other in "abc" if other != name]
            shared = {one for one in chunks[name] if any(one in other for other in others)}
            assert space.shared_bytes == sum(chunks[name][chunk] for chunk in shared)
            assert space.unique_bytes == sum(chunks[name].values())
            assert space.exclusive_bytes == space.unique_bytes - space.shared_bytes
            assert space.stored_bytes == sum(frames[name].values())
            freed = store.remove(f"{name}/x", dry_run=True).freed
            assert space.exclusive_stored_bytes == freed.stored_bytes
        assert found.unused_packs.objects == 0
        assert not found.damaged
