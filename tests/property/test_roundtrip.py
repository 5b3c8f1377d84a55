"""Any tree through the store and back: the same names, bytes, links, metadata and holes."""

import contextlib
import dataclasses
import itertools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import snapstore
from snapstore.format.rank import HOST, RankNumber
from snapstore.options import MEMORY_BYTES_MIN
from snapstore.source.scan import scan_tree
from snapstore.units import GIB, KIB, MIB
from tests.support.processes import open_fds
from tests.support.samples import bf16, pages, random_bytes, text
from tests.support.schemas import check_store
from tests.support.trees import (
    Data,
    Directory,
    File,
    Node,
    allocated_bytes,
    data_page_runs,
    read_tree,
    same_trees,
    trees,
    write_tree,
)

pytestmark = pytest.mark.slow

few = settings(max_examples=40)

_numbers = itertools.count()


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A directory for one example."""
    with tempfile.TemporaryDirectory(prefix="snapstore-") as name:
        yield Path(name)


def new_store(options: snapstore.StoreOptions | None = None) -> snapstore.Store:
    return snapstore.init_store(f"memory://roundtrip-{next(_numbers)}", options)


def written(root: Path, nodes: list[Node], *, sparse: bool = True) -> Path:
    root.mkdir()
    write_tree(root, nodes, sparse=sparse)
    return root


# -- there and back -------------------------------------------------------------------------------


@few
@given(trees(), st.sampled_from(list(snapstore.Integrity)))
def test_what_is_pulled_is_what_was_pushed(
    nodes: list[Node], integrity: snapstore.Integrity
) -> None:
    """Proves: I8, as far as success goes."""
    with folder() as place:
        source = written(place / "source", nodes)
        store = new_store(snapstore.StoreOptions(threads=2, integrity=integrity))
        pushed = store.push(source, "a/b:v1")
        pulled = store.pull("a/b:v1", place / "target")
        same_trees(source, place / "target")
        files = [node for node in nodes if isinstance(node, File)]
        assert pulled.files == len(files)
        assert pulled.logical_bytes == sum(file.size for file in files)
        assert pushed.ingest.logical_bytes == pulled.logical_bytes
        assert pulled.snapshot == pushed.snapshot
        for file in files:
            check_holes(place / "target" / os.fsdecode(file.path))


def check_holes(path: Path) -> None:
    """Check that what is zero takes no space, but for what is too short to be left out.

    Each run of data may have zeros beside it that share its chunk: on both sides up to two blocks
    and the shortest run that is left out, once more where a window ends.
    """
    pages_of_data, runs = data_page_runs(path.read_bytes())
    allowed = pages_of_data * 4 * KIB + (runs + 1) * 4 * 40 * KIB
    if path.stat().st_size < 64 * KIB:
        allowed = 64 * KIB
    # The block that a file system may take for attributes.
    assert allocated_bytes(path) <= allowed + 8 * KIB


@few
@given(trees())
def test_pushing_twice_stores_nothing_new(nodes: list[Node]) -> None:
    with folder() as place:
        source = written(place / "source", nodes)
        store = new_store(snapstore.StoreOptions(threads=2))
        first = store.push(source, "a:1")
        second = store.push(source, "a:2")
        assert second.ranks == first.ranks
        assert second.ingest.new_chunks == 0
        assert second.ingest.new_bytes == 0
        assert second.packed.packs == 0
        # A root manifest; the rank manifests and layouts are there.
        assert second.stored_bytes < 2000 + 500 * len(second.ranks)


OPTIONS = [
    snapstore.StoreOptions(threads=1),
    snapstore.StoreOptions(threads=4, memory_bytes=MEMORY_BYTES_MIN),
    snapstore.StoreOptions(threads=3, compression=snapstore.Compression.NONE),
    snapstore.StoreOptions(threads=2, compression=snapstore.Compression.MAX, memory_bytes=2 * GIB),
    snapstore.StoreOptions(threads=2, compression=snapstore.Compression.FAST),
]


@settings(max_examples=25)
@given(trees(entries_max=6))
def test_the_same_tree_has_the_same_rank_ids(nodes: list[Node]) -> None:
    """Goal: rank ids are a function of the tree alone. Proves: I5.

    Method: push it to stores of their own with other threads, memory and codecs, and to one that
    has other things already; and a copy of it whose holes are written zeros.
    """
    with folder() as place:
        source = written(place / "source", nodes)
        dense = written(place / "dense", nodes, sparse=False)
        expected = new_store(OPTIONS[0]).push(source, "a").ranks
        for options in OPTIONS[1:]:
            assert new_store(options).push(source, "b/c:d", labels={"x": "y"}).ranks == expected
        assert new_store(OPTIONS[1]).push(dense, "a").ranks == expected
        other = new_store(OPTIONS[1])
        (place / "other").mkdir()
        (place / "other" / "pages-1.img").write_bytes(random_bytes(MIB, 1).tobytes())
        (place / "other" / "text").write_bytes(text(MIB, 1).tobytes())
        other.push(place / "other", "other")
        assert other.push(source, "a").ranks == expected


LARGE = [
    Directory(path=b""),
    File(
        path=b"pages-1.img",
        size=40 * MIB,
        data=(Data("noise", 9 * MIB + 5000, 3 * MIB, 1), Data("numbers", 30 * MIB, 9 * MIB, 2)),
    ),
    File(
        path=b"weights.bin",
        size=33 * MIB + 12_345,
        data=(Data("numbers", 1, 5 * MIB, 3), Data("text", 20 * MIB - 7, 4 * MIB + 3, 4)),
    ),
    File(path=b"other", size=17 * MIB + 4097, data=(Data("noise", 0, 100, 5),)),
    File(path=b"all-hole", size=100 * MIB + 1),
]


def test_large_sparse_files_have_the_same_ids_however_they_are_pushed(tmp_path: Path) -> None:
    """Goal: many windows in flight, holes of many windows, and chunks that cross windows change
    nothing. Proves: I5.

    Method: as above, with files of many windows, on one thread and on four, with the least memory
    and with much, with holes and with written zeros; five times with four threads.
    """
    source = written(tmp_path / "source", LARGE)
    dense = written(tmp_path / "dense", LARGE, sparse=False)
    first = new_store(OPTIONS[0]).push(source, "a")
    for options in [*OPTIONS[1:], OPTIONS[1], OPTIONS[1]]:
        again = new_store(options).push(source, "a")
        assert again.ranks == first.ranks
        assert again.ingest.new_chunks == first.ingest.new_chunks
        assert again.ingest.zero_bytes == first.ingest.zero_bytes
    assert new_store(OPTIONS[1]).push(dense, "a").ranks == first.ranks


def test_large_sparse_files_come_back(tmp_path: Path) -> None:
    source = written(tmp_path / "source", LARGE)
    store = new_store(snapstore.StoreOptions(threads=4))
    store.push(source, "a")
    result = store.pull("a", tmp_path / "target")
    same_trees(source, tmp_path / "target")
    assert result.data_bytes < 24 * MIB
    assert allocated_bytes(tmp_path / "target" / "all-hole") <= 8 * KIB
    for name in ("pages-1.img", "weights.bin", "other"):
        check_holes(tmp_path / "target" / name)


def test_a_store_of_many_kinds_follows_the_format(tmp_path: Path) -> None:
    """Everything that pushes write passes the schemas and the checks of the whole store."""
    source = written(
        tmp_path / "source",
        [
            *LARGE[:3],
            Directory(path=b"rank-3"),
            File(path=b"rank-3/a.bin", size=200_000, data=(Data("numbers", 0, 200_000, 1),)),
            File(path=b"rank-3/small", size=5, data=(Data("text", 0, 5, 1),)),
        ],
    )
    root = tmp_path / "store"
    with snapstore.init_store(f"file://{root}", snapstore.StoreOptions(threads=2)) as store:
        store.push(source, "a/b:v1")
        store.push(source, "a/b:v2")
    counts = check_store(root)
    assert counts["snapshots"] in {1, 2}
    assert (counts["ranks"], counts["layouts"], counts["refs"], counts["leases"]) == (2, 2, 2, 2)


# -- changes --------------------------------------------------------------------------------------


@few
@given(trees(entries_max=6), st.data())
def test_a_changed_tree_shares(nodes: list[Node], data: st.DataObject) -> None:
    """Goal: a second version costs what is new in it, whatever else is in the tree.

    Method: rewrite, append to, or add one file of a tree, by 10 kB of noise. At most the chunks
    around the change may be stored again, and as much as is new for the sake of restore speed.
    """
    files = [node for node in nodes if isinstance(node, File)]
    noise = random_bytes(10_000, 77).tobytes()
    with folder() as place:
        source = written(place / "source", nodes)
        store = new_store(snapstore.StoreOptions(threads=2))
        store.push(source, "a:1")
        choice = data.draw(st.sampled_from([None, *files]))
        if choice is None:
            assume(not (source / "added").exists())
            (source / "added").write_bytes(noise)
        else:
            offset = data.draw(st.integers(0, choice.size))
            with (source / os.fsdecode(choice.path)).open("r+b") as file:
                file.seek(offset)
                file.write(noise)
        second = store.push(source, "a:2")
        # A file that grows beyond 64 KiB leaves the small ones and is cut anew; else a change
        # touches two chunks of a tensor file, of 1 MiB at most.
        assert second.ingest.new_bytes - second.ingest.rewritten_bytes <= 2 * MIB + len(noise)
        assert second.ingest.rewritten_bytes <= second.ingest.new_bytes / 2
        store.pull("a:2", place / "target")
        same_trees(source, place / "target")


def test_a_second_version_stores_what_changed(tmp_path: Path) -> None:
    """Goal: shares of a realistic change: pages rewritten, bytes inserted, a file moved.

    Method: 8 MiB of pages of which 3 % are rewritten, 8 MiB of numbers with an odd insertion, and
    8 MiB under another name.
    """
    source = tmp_path / "source"
    source.mkdir()
    image = pages(2048, 1).reshape(-1, 4096).copy()
    numbers = bf16(4 * MIB, 2).tobytes()
    (source / "pages-1.img").write_bytes(image.tobytes())
    (source / "weights.bin").write_bytes(numbers)
    (source / "moves.bin").write_bytes(random_bytes(8 * MIB, 3).tobytes())
    store = new_store(snapstore.StoreOptions(threads=2))
    first = store.push(source, "a:1")
    image[100:164] = pages(64, 4).reshape(-1, 4096)
    (source / "pages-1.img").write_bytes(image.tobytes())
    inserted = random_bytes(54_321, 5).tobytes()
    (source / "weights.bin").write_bytes(numbers[:MIB] + inserted + numbers[MIB:])
    (source / "moves.bin").rename(source / "moved.bin")
    second = store.push(source, "a:2")
    assert first.ingest.new_bytes == first.ingest.logical_bytes
    assert second.ingest.new_bytes <= 0.12 * second.ingest.logical_bytes
    assert second.stored_bytes <= 0.12 * first.stored_bytes
    store.pull("a:2", tmp_path / "target")
    same_trees(source, tmp_path / "target")


# -- ranks ----------------------------------------------------------------------------------------


def ranks_by_hand(source: Path, glob: str) -> dict[bytes, RankNumber]:
    """The rank of each path by the documented rule, for `--rank-glob gpu-{N}/` and no other."""
    assert glob == "gpu-{N}/"
    ranks: dict[bytes, RankNumber] = {}
    first_names: dict[tuple[bytes, ...], bytes] = {}
    for path, seen in sorted(read_tree(source).items()):
        parts = path.split(b"/")
        depth = len(parts) if seen.type == "directory" else len(parts) - 1
        numbers = [part[4:] for part in parts[:depth] if part.startswith(b"gpu-")]
        digits = [number for number in numbers if number.isdigit()]
        ranks[path] = int(digits[0]) if digits else HOST
        if len(seen.names) > 1:
            first = first_names.setdefault(seen.names, path)
            ranks[path] = ranks[first]
    return ranks


def above(path: bytes) -> Iterator[bytes]:
    while path:
        path = path.rpartition(b"/")[0]
        yield path


@few
@given(trees(entries_max=7), st.lists(st.integers(0, 3), min_size=1, max_size=3), st.data())
def test_selected_ranks_are_pulled_alone_and_together(
    nodes: list[Node], numbers: list[int], data: st.DataObject
) -> None:
    """Goal: pulling some ranks gives what belongs to them and the directories above, unchanged.

    Method: the same drawn tree below `gpu-<N>/` for some N and at the top; a subset of the ranks.
    """
    with folder() as place:
        source = written(place / "source", nodes)
        for number in sorted(set(numbers)):
            assume(not (source / f"gpu-{number}").exists())
            written(source / f"gpu-{number}", nodes)
        store = new_store(snapstore.StoreOptions(threads=2))
        pushed = store.push(source, "a", rank_glob="gpu-{N}/")
        ranks = ranks_by_hand(source, "gpu-{N}/")
        assert set(pushed.ranks) == {HOST, *ranks.values()}
        there: list[RankNumber] = [HOST, *sorted(set(numbers))]
        chosen = data.draw(st.lists(st.sampled_from(there), min_size=1, unique=True))
        result = store.pull("a", place / "target", ranks=chosen)
        everything = read_tree(source)
        kept = {path for path, rank in ranks.items() if rank in chosen}
        if HOST in chosen:
            kept |= {path for path, seen in everything.items() if seen.type == "directory"}
        kept |= {parent for path in kept for parent in above(path)} | {b""}
        pulled = read_tree(place / "target")
        assert sorted(pulled) == sorted(kept)
        for path, seen in pulled.items():
            assert seen == everything[path]
        assert result.files == len({seen.names for seen in pulled.values() if seen.names})


def test_equal_ranks_share_their_chunks_and_their_reads(tmp_path: Path) -> None:
    """Goal: what two ranks have in common is stored once and, pulled together, read once."""
    source = tmp_path / "source"
    content = random_bytes(5 * MIB, 1).tobytes()
    for number in range(2):
        (source / f"rank-{number}").mkdir(parents=True)
        (source / f"rank-{number}" / "weights.bin").write_bytes(content)
        (source / f"rank-{number}" / "own.bin").write_bytes(random_bytes(MIB, 9 + number).tobytes())
    store = new_store(snapstore.StoreOptions(threads=2))
    pushed = store.push(source, "a")
    assert set(pushed.ranks) == {HOST, 0, 1}
    assert pushed.ranks[0] != pushed.ranks[1]
    assert pushed.ingest.new_bytes == 7 * MIB
    both = store.pull("a", tmp_path / "both", ranks=[0, 1])
    one = store.pull("a", tmp_path / "one", ranks=[1])
    assert both.data_bytes == 12 * MIB
    assert both.read_bytes < 7 * MIB + 100 * KIB
    assert one.data_bytes == 6 * MIB
    assert one.read_bytes < 7 * MIB + 100 * KIB
    same_trees(source / "rank-1", tmp_path / "one" / "rank-1")
    same_trees(source, tmp_path / "both")


@pytest.mark.parametrize("rank", [1, 65535])
def test_a_rank_that_is_not_there_is_refused(tmp_path: Path, rank: int) -> None:
    (tmp_path / "source").mkdir()
    store = new_store()
    store.push(tmp_path / "source", "a")
    with pytest.raises(snapstore.SnapError, match=f"no rank {rank}"):
        store.pull("a", tmp_path / "target", ranks=[rank])
    assert not (tmp_path / "target").exists()


# -- odds and ends --------------------------------------------------------------------------------


def test_more_files_are_half_written_than_may_be_open(tmp_path: Path) -> None:
    """Goal: a pull needs a bounded number of descriptors, however its bytes arrive.

    Method: 400 files whose second halves are the same: these arrive first, all at once, since they
    are in one frame with the first file. Count the open descriptors at every step, beyond those
    that the process has before: tests that ran in it may have left some.
    """
    source = tmp_path / "source"
    source.mkdir()
    common = random_bytes(70_000, 1).tobytes()
    (source / "000-common").write_bytes(common)
    for number in range(400):
        own = random_bytes(66_000, 10 + number).tobytes()
        (source / f"{number:03}.bin").write_bytes(own + bytes(64 * KIB) + common)
    store = new_store(snapstore.StoreOptions(threads=2))
    pushed = store.push(source, "a", class_overrides=["*=tensors"])
    assert pushed.ingest.known_bytes > 300 * 60_000
    before = count = open_fds()

    def watch(_: snapstore.Progress) -> None:
        nonlocal count
        count = max(count, open_fds())

    store.pull("a", tmp_path / "target", progress=watch)
    assert count - before < 300
    same_trees(source, tmp_path / "target")


def test_an_empty_tree(tmp_path: Path) -> None:
    source = written(tmp_path / "source", [Directory(path=b"", mode=0o711)])
    store = new_store()
    pushed = store.push(source, "a")
    assert pushed.ingest.logical_bytes == pushed.packed.packs == 0
    store.pull("a", tmp_path / "target")
    same_trees(source, tmp_path / "target")
    assert store.show("a").logical_bytes == 0


def test_the_writer_of_this_test_finds_what_differs(tmp_path: Path) -> None:
    """The comparison itself: each kind of change is noticed."""
    nodes: list[Node] = [
        Directory(path=b""),
        File(path=b"f", size=9000, data=(Data("noise", 0, 9000, 1),), xattrs=(("user.a", b"1"),)),
        Directory(path=b"d"),
    ]
    written(tmp_path / "one", nodes)
    file = nodes[1]
    assert isinstance(file, File)
    others = [
        [nodes[0], dataclasses.replace(file, mode=0o600), nodes[2]],
        [nodes[0], dataclasses.replace(file, mtime_ns=5), nodes[2]],
        [nodes[0], dataclasses.replace(file, size=9001), nodes[2]],
        [nodes[0], dataclasses.replace(file, data=(Data("noise", 0, 9000, 2),)), nodes[2]],
        [nodes[0], file],
        [nodes[0], file, dataclasses.replace(nodes[2], mode=0o711)],
        [dataclasses.replace(nodes[0], mtime_ns=7), file, nodes[2]],
    ]
    for number, other in enumerate(others):
        with pytest.raises(AssertionError):
            same_trees(tmp_path / "one", written(tmp_path / f"other-{number}", other))
    written(tmp_path / "same", nodes)
    same_trees(tmp_path / "one", tmp_path / "same")
    assert scan_tree(tmp_path / "one").size_bytes == 9000


# -- in place -------------------------------------------------------------------------------------


@few
@given(trees(), st.data())
def test_what_is_read_in_place_is_what_was_pushed(nodes: list[Node], data: st.DataObject) -> None:
    """Any range of any file, without pulling it; the cache may be too small for one frame."""
    with folder() as place:
        source = written(place / "source", nodes)
        cache_bytes = data.draw(st.sampled_from([0, 100 * KIB, 64 * MIB]))
        store = new_store(snapstore.StoreOptions(threads=2, cache_bytes=cache_bytes))
        store.push(source, "a")
        snapshot = store.snapshot("a")
        found = {entry.path: entry for entry in snapshot.walk()}
        assert set(found) == set(read_tree(source))
        for path, entry in found.items():
            if not entry.is_file:
                continue
            content = (source / os.fsdecode(path)).read_bytes()
            file = snapshot.open(path)
            assert file.size_bytes == len(content)
            offset = data.draw(st.integers(0, len(content) + 1))
            size = data.draw(st.integers(0, len(content) + 1))
            assert file.read_at(offset, size) == content[offset : offset + size]
            assert file.read() == content
