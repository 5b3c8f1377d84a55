"""Many pushes of a tree that changes: what is shared, what is stored again, what a pull decodes."""

from pathlib import Path

import numpy as np
import pytest

import snapstore
from snapstore.backend.base import ObjectKind
from snapstore.backend.memory import MemoryBackend
from snapstore.format.config import StoreConfig
from snapstore.format.index import parse_index
from snapstore.ids import ChunkId, Digest
from snapstore.options import MEMORY_BYTES_MIN
from snapstore.repository.locality import AMPLIFICATION_MAX
from snapstore.repository.objects import read_object
from snapstore.repository.store import Store
from snapstore.testing.clock import ManualClock
from snapstore.units import GIB, MIB, PAGE_BYTES
from tests.support.samples import ByteArray, bf16, pages, random_bytes, text
from tests.unit.repository.parts import add_index

CONFIG = StoreConfig(created="2026-11-30T05:00:00Z", store_id="0" * 32)


def new_store(memory_bytes: int = GIB) -> tuple[Store, MemoryBackend]:
    backend = MemoryBackend()
    options = snapstore.StoreOptions(threads=2, memory_bytes=memory_bytes)
    return Store(backend, CONFIG, options, ManualClock()), backend


def amplification(store: Store, name: str) -> float:
    """How many bytes a pull decodes for each byte that it writes."""
    (rank,) = store.snapshot(name).ranks()
    return float(rank.layout.frames["plain_length"].sum()) / rank.entry.data_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "bound"),
    [
        pytest.param("numbers", AMPLIFICATION_MAX + 0.2, id="frames of 1 MiB"),
        pytest.param("noise", AMPLIFICATION_MAX + 0.6, id="frames of 4 MiB"),
    ],
)
def test_the_tenth_generation_restores_nearly_as_fast_as_the_first(
    tmp_path: Path, kind: str, bound: float
) -> None:
    """Goal: restoring stays cheap however often a tree was changed and pushed.

    Method: ten generations of 24 MiB of pages, each with a sixth rewritten in short runs. Each
    must share with the one before, store no more again than is new, and decode at most about a
    quarter more than it has. Frames at the edges of windows are free, and there are fewer windows
    than frames would need: hence the slack, which is larger for large frames.
    """
    store, _ = new_store()
    file = tmp_path / "tree" / "pages-1.img"
    file.parent.mkdir()
    count = 6144
    rng = np.random.default_rng(1)

    def fresh(count: int) -> ByteArray:
        seed = int(rng.integers(1 << 32))
        data = bf16(count * PAGE_BYTES // 2, seed) if kind == "numbers" else pages(count, seed)
        return data.reshape(-1, PAGE_BYTES)

    data = fresh(count).copy()
    data[rng.random(count) < 0.1] = 0
    for generation in range(10):
        if generation:
            for start in rng.integers(0, count - 16, count // 6 // 8).tolist():
                data[start : start + 8] = fresh(8)
        file.write_bytes(data.tobytes())
        ingest = store.push(file.parent, f"pages:g{generation}").ingest
        assert ingest.logical_bytes == ingest.zero_bytes + ingest.new_bytes + ingest.known_bytes
        assert ingest.rewritten_bytes <= ingest.new_bytes - ingest.rewritten_bytes
        assert generation == 0 or ingest.known_bytes > 0.3 * ingest.logical_bytes
        assert amplification(store, f"pages:g{generation}") <= bound


def test_pushing_the_same_again_stores_nothing(tmp_path: Path) -> None:
    """Not even where chunks lie scattered over the frames of many earlier pushes."""
    store, backend = new_store()
    file = tmp_path / "tree" / "pages-1.img"
    file.parent.mkdir()
    data = pages(2048, 0).reshape(-1, PAGE_BYTES).copy()
    for generation in range(6):
        data[generation * 300 : generation * 300 + 2048 // 5] = pages(
            2048 // 5, 10 + generation
        ).reshape(-1, PAGE_BYTES)
        file.write_bytes(data.tobytes())
        store.push(file.parent, f"a:g{generation}")
    packs = len(list(backend.list(ObjectKind.PACK)))
    again = store.push(file.parent, "a:again")
    assert again.ingest.new_chunks == 0
    assert again.ingest.rewritten_bytes == 0
    assert again.packed.packs == 0
    assert len(list(backend.list(ObjectKind.PACK))) == packs
    assert again.stored_bytes < 2000


def test_small_changes_among_small_files_stay_small(tmp_path: Path) -> None:
    """Goal: changed small files share frames: they do not get one each, of 4 KiB at least.

    Method: two thousand small files of text, every second one changed. The second push may store
    about half of what the first did.
    """
    store, _ = new_store()
    tree = tmp_path / "tree"
    tree.mkdir()
    words = text(4 * MIB, 1).tobytes()
    for number in range(2000):
        (tree / f"{number:04}").write_bytes(words[number * 900 : number * 900 + 1000 + number % 7])
    first = store.push(tree, "a:1")
    for number in range(0, 2000, 2):
        begin = 2 * MIB + number * 900
        (tree / f"{number:04}").write_bytes(words[begin : begin + 1001 + number % 9])
    second = store.push(tree, "a:2")
    assert second.packed.pack_bytes <= 0.8 * first.packed.pack_bytes
    assert second.packed.frames <= first.packed.frames + 2


def test_the_indexes_of_a_push_are_merged(tmp_path: Path) -> None:
    """Goal: every pack has an index at once, and at the end one index has it all.

    Method: a push of three packs of 16 MiB. The last index must name the others as superseded, and
    hold each chunk once.
    """
    store, backend = new_store(memory_bytes=MEMORY_BYTES_MIN)
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "data.bin").write_bytes(random_bytes(40 * MIB, 1).tobytes())
    result = store.push(tree, "a")
    assert result.packed.packs == 3
    indexes = [
        parse_index(
            read_object(backend, ObjectKind.INDEX, info.name, limit_bytes=MIB),
            root=Digest.parse(info.name),
        )
        for info in backend.list(ObjectKind.INDEX)
    ]
    (merged,) = (index for index in indexes if index.supersedes)
    assert set(merged.supersedes) == {index.root for index in indexes} - {merged.root}
    assert len(merged.packs) == 3
    assert len(merged.chunks) == result.ingest.new_chunks
    assert sum(len(index.chunks) for index in indexes) == 2 * len(merged.chunks)


@pytest.mark.parametrize("kept", [0, 1])
def test_a_layout_can_be_derived_again(tmp_path: Path, kept: int) -> None:
    """Goal: layouts are derived: without any, reading finds everything through the indexes.

    Method: remove the layout, or damage it, and compare what is read with and without it.
    """
    store, backend = new_store()
    tree = tmp_path / "tree"
    tree.mkdir()
    content = np.concatenate(
        (random_bytes(3 * MIB, 1), np.zeros(2 * MIB, np.uint8), text(MIB, 2), random_bytes(MIB, 1))
    ).tobytes()
    (tree / "data.bin").write_bytes(content)
    (tree / "small").write_bytes(b"small")
    store.push(tree, "a")
    (before,) = [rank.layout for rank in store.snapshot("a").ranks()]
    (name,) = [info.name for info in backend.list(ObjectKind.LAYOUT)]
    backend.delete(ObjectKind.LAYOUT, name)
    if kept:
        backend.put_new(ObjectKind.LAYOUT, name, [b"SNAPLAYT and nothing else"])
    (after,) = [rank.layout for rank in store.snapshot("a").ranks()]
    for table in ("packs", "frames", "streams", "segments"):
        assert getattr(after, table).tobytes() == getattr(before, table).tobytes()
    store.pull("a", tmp_path / "out")
    assert (tmp_path / "out" / "data.bin").read_bytes() == content


def test_an_index_that_lies_about_a_length_is_not_believed(tmp_path: Path) -> None:
    """Goal: a known id with another length is no known chunk: it is stored, and can be read.

    Method: an index, newer than all others, that says that a chunk is one byte longer than it is.
    """
    store, backend = new_store()
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "small").write_bytes(b"content")
    add_index(backend, 1, [(ChunkId.of(b"content").raw, len(b"content") + 1)])
    pushed = store.push(tree, "a")
    assert pushed.ingest.new_chunks == 1
    store.pull("a", tmp_path / "out")
    assert (tmp_path / "out" / "small").read_bytes() == b"content"


def test_content_that_two_classes_share_is_cut_by_each(tmp_path: Path) -> None:
    """Classes cut differently, so they share little; what they store is right all the same."""
    store, _ = new_store()
    tree = tmp_path / "tree"
    tree.mkdir()
    content = pages(512, 1, zero_share=0.2).tobytes()
    for name in ("pages-1.img", "weights.bin", "other"):
        (tree / name).write_bytes(content)
    store.push(tree, "a")
    store.pull("a", tmp_path / "out")
    for name in ("pages-1.img", "weights.bin", "other"):
        assert (tmp_path / "out" / name).read_bytes() == content


def test_copies_within_one_push_are_stored_once(tmp_path: Path) -> None:
    """Also within one window, before anything of it is in the catalog."""
    store, _ = new_store()
    tree = tmp_path / "tree"
    tree.mkdir()
    block = random_bytes(60_000, 1).tobytes()
    for number in range(20):
        (tree / f"small-{number}").write_bytes(block)
    (tree / "a.bin").write_bytes(block * 70)
    (tree / "b.bin").write_bytes(block * 70)
    ingest = store.push(tree, "a").ingest
    assert ingest.logical_bytes == 160 * 60_000
    assert ingest.new_bytes <= len(block) + 70 * 60_000
    assert ingest.known_chunks >= 19
    store.pull("a", tmp_path / "out")
    assert (tmp_path / "out" / "b.bin").read_bytes() == block * 70
    assert (tmp_path / "out" / "small-19").read_bytes() == block
