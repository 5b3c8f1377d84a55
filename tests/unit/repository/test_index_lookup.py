"""Looking into an index where it lies gives what loading it gives, and believes nothing."""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snapstore.backend.base import ObjectInfo, ObjectKind
from snapstore.backend.memory import MemoryBackend
from snapstore.errors import DigestMismatch, FormatError, LimitExceeded, Malformed
from snapstore.format import index as index_format
from snapstore.format.envelope import INDEX_MAGIC, Built, Section, build
from snapstore.format.tables import Rows
from snapstore.repository import index_blocks, index_lookup
from snapstore.repository.chunk_runs import MISSING
from snapstore.repository.frames import FrameTable
from snapstore.repository.index_lookup import IndexLookup, open_blocks
from snapstore.units import KIB, MIB
from tests.unit.repository.parts import chunk_id, words_of

Tables = tuple[Rows, Rows, Rows]


@pytest.fixture(scope="module")
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def all_usable(packs: Rows) -> np.ndarray:
    return np.ones(len(packs), np.bool_)


def tables_of(ids: list[bytes], *, packs: int = 3, frames: int = 9) -> Tables:
    """Packs, frames and chunks; the places tell the number of the chunk."""
    pack_rows = np.zeros(packs, index_format.PACK_DTYPE)
    pack_rows["id"] = sorted(chunk_id(10**6 + number) for number in range(packs))
    pack_rows["length"] = 64 * MIB
    frame_rows = np.zeros(frames, index_format.FRAME_DTYPE)
    numbers = np.arange(frames)
    frame_rows["pack"], frame_rows["offset"] = numbers * packs // frames, numbers * MIB
    frame_rows["stored_length"], frame_rows["plain_length"] = MIB, 4 * MIB
    frame_rows["codec"] = 1
    chunk_rows = np.zeros(len(ids), index_format.CHUNK_DTYPE)
    if ids:
        chunk_rows["id"] = np.array(ids, "V32")
    numbers = np.arange(len(ids))
    chunk_rows["frame"], chunk_rows["offset"] = numbers % frames, numbers % 4096
    chunk_rows["length"] = numbers % 4096 + 1
    return pack_rows, frame_rows, chunk_rows


def store(backend: MemoryBackend, built: Built) -> ObjectInfo:
    backend.put_new(ObjectKind.INDEX, built.root.hex, built.pieces)
    return backend.stat(ObjectKind.INDEX, built.root.hex)


def opened(
    built: Built, executor: ThreadPoolExecutor, frames: FrameTable, *, fanout_bytes_max: int = 0
) -> IndexLookup:
    backend = MemoryBackend()
    info = store(backend, built)
    return IndexLookup(
        info.name,
        open_blocks(backend, info, executor, None),
        frames,
        all_usable,
        fanout_bytes_max=fanout_bytes_max,
    )


Answer = tuple[bytes, int, int, int] | None


def answers(index: IndexLookup, frames: FrameTable, ids: list[bytes]) -> list[Answer]:
    """For each id the checksum of nothing but its place: pack, frame offset, offset, length."""
    places = index.lookup(words_of(ids))
    found: list[Answer] = []
    for frame, offset, length in zip(
        places.frames.tolist(), places.offsets.tolist(), places.lengths.tolist(), strict=True
    ):
        if frame == MISSING:
            assert (offset, length) == (0, 0)
            found.append(None)
            continue
        row = frames.rows[frame]
        pack = frames.pack_rows(np.array([row["pack"]], np.int64))["id"][0].tobytes()
        found.append((pack, int(row["offset"]), offset, length))
    return found


def expected(tables: Tables, ids: list[bytes]) -> list[Answer]:
    packs, frames, chunks = tables
    model: dict[bytes, Answer] = {}
    for raw, frame, offset, length in chunks.tolist():
        row = frames[frame]
        model.setdefault(
            bytes(raw), (packs["id"][row["pack"]].tobytes(), int(row["offset"]), offset, length)
        )
    return [model.get(raw) for raw in ids]


sizes = st.one_of(st.integers(0, 200), st.sampled_from([0, 1, 63, 64, 65, 128, 129, 3000]))


@settings(max_examples=60)
@given(sizes, st.integers(0, 2**16), st.integers(1, 70), st.integers(1, 200))
def test_it_answers_like_the_loaded_index(
    executor: ThreadPoolExecutor, count: int, seed: int, first_words: int, at_once: int
) -> None:
    """Goal: whatever the index and the batch, the places are those that the tables say.

    Method: random ids, some of which share their first eight bytes; batches in random order with
    repetitions and unknown ids; small parts, so that a batch is many of them.
    """
    rng = np.random.default_rng(seed)
    ids = [
        chunk_id(
            seed * 10**5 + n, first_word=n << 40 if n < 5 * first_words and n % 9 == 0 else None
        )
        for n in range(count)
    ]
    tables = tables_of(ids)
    frames = FrameTable()
    index = opened(
        index_format.build_index(*tables), executor, frames, fanout_bytes_max=seed % 2 * MIB
    )
    pool = ids + [chunk_id(-1 - n) for n in range(20)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_lookup, "_IDS_AT_ONCE", at_once)
        patch.setattr(index_lookup, "_ROWS_AT_ONCE", 100)
        patch.setattr(index_blocks, "_RUNS_PER_TASK_MIN", 1)
        patch.setattr(index_blocks, "_RUN_BLOCKS", 4)
        for _ in range(2):
            asked = [pool[n] for n in rng.integers(0, len(pool), 300).tolist()]
            assert answers(index, frames, asked) == expected(tables, asked)
    assert answers(index, frames, []) == []
    # Each frame that was asked for has one number.
    assert len(frames) <= 9


def test_packs_that_cannot_be_relied_on_hide_what_is_in_them(executor: ThreadPoolExecutor) -> None:
    ids = [chunk_id(number) for number in range(900)]
    tables = tables_of(ids)
    bad = tables[0]["id"][1].tobytes()
    frames, backend = FrameTable(), MemoryBackend()
    info = store(backend, index_format.build_index(*tables))

    def usable(packs: Rows) -> np.ndarray:
        return np.array([raw.tobytes() != bad for raw in packs["id"]], np.bool_)

    index = IndexLookup(info.name, open_blocks(backend, info, executor, None), frames, usable)
    for _ in range(2):
        right = [None if one and one[0] == bad else one for one in expected(tables, ids)]
        assert answers(index, frames, ids) == right
        assert None in right


# -- hostile indexes ------------------------------------------------------------------------------


def lying(**tables: Rows) -> Built:
    """An index with a right digest that may say anything."""
    return build(INDEX_MAGIC, [Section(tag.encode(), rows) for tag, rows in tables.items()])


def honest(count: int = 1000) -> dict[str, Rows]:
    packs, frames, chunks = tables_of([chunk_id(number) for number in range(count)])
    read = index_format.parse_index(index_format.build_index(packs, frames, chunks).to_bytes())
    fanout = read.fanout.view([("first", "<u8")])
    return {
        "PACK": read.packs.copy(),
        "FRAM": read.frames.copy(),
        "FANO": fanout.copy(),
        "CHNK": read.chunks.copy(),
    }


def spoil(tables: dict[str, Rows], tag: str, field: str, rows: slice, value: object) -> None:
    tables[tag][field][rows] = value


EVERY = slice(None)
LIES = {
    "fanout descends": ("FANO", "first", slice(3, 4), 10**6, FormatError),
    "fanout beyond the end": ("FANO", "first", slice(1, None), 10**7, Malformed),
    "fanout is huge": ("FANO", "first", slice(1, None), 2**63, Malformed),
    "fanout is empty": ("FANO", "first", EVERY, 0, None),
    "wrong bucket": ("FANO", "first", slice(4, 5), 0, Malformed),
    "no such frame": ("CHNK", "frame", EVERY, 9, Malformed),
    "frame of 2^32": ("CHNK", "frame", EVERY, 2**32 - 1, Malformed),
    "outside the frame": ("CHNK", "offset", EVERY, 4 * MIB, Malformed),
    "empty chunk": ("CHNK", "length", EVERY, 0, Malformed),
    "long chunk": ("CHNK", "length", EVERY, 2 * MIB, LimitExceeded),
    "one id": ("CHNK", "id", EVERY, np.void(bytes(32)), Malformed),
    "no such pack": ("FRAM", "pack", EVERY, 3, Malformed),
    "unaligned frame": ("FRAM", "offset", EVERY, 17, Malformed),
    "outside the pack": ("FRAM", "offset", EVERY, 64 * MIB, Malformed),
    "unknown codec": ("FRAM", "codec", EVERY, 77, Malformed),
    "empty pack": ("PACK", "length", EVERY, 0, Malformed),
    "long pack": ("PACK", "length", EVERY, 1 << 40, LimitExceeded),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_index_that_lies_is_refused(executor: ThreadPoolExecutor, lie: str) -> None:
    """Goal: a lie under a right digest is an error that names the index, or finds nothing."""
    tag, field, rows, value, error = LIES[lie]
    tables = honest()
    spoil(tables, tag, field, rows, value)
    built = lying(**tables)
    index = opened(built, executor, FrameTable())
    words = words_of([chunk_id(number) for number in range(1000)])
    if error is None:
        assert (index.lookup(words).frames == MISSING).all()
        return
    with pytest.raises(error, match=f"index {built.root.hex[:12]}: "):
        index.lookup(words)


@pytest.mark.parametrize("at_once", [3, 1000])
@pytest.mark.parametrize("lie", [lie for lie in LIES if lie.startswith("fanout")])
def test_a_fanout_that_lies_is_refused_when_it_is_held(
    executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, lie: str, at_once: int
) -> None:
    monkeypatch.setattr(index_lookup, "_FANOUT_AT_ONCE", at_once)
    tag, field, rows, value, error = LIES[lie]
    tables = honest()
    spoil(tables, tag, field, rows, value)
    if error is not None:
        with pytest.raises(Malformed, match="FANO does not ascend"):
            opened(lying(**tables), executor, FrameTable(), fanout_bytes_max=MIB)


@pytest.mark.parametrize("tag", ["PACK", "FRAM", "FANO", "CHNK"])
def test_tables_that_are_missing_or_no_rows_are_refused(
    executor: ThreadPoolExecutor, tag: str
) -> None:
    tables = honest()
    del tables[tag]
    with pytest.raises(Malformed, match="missing"):
        opened(lying(**tables), executor, FrameTable())
    tables = honest()
    tables[tag] = np.zeros(tables[tag].nbytes + 1, "V1")
    with pytest.raises(Malformed, match="are no rows of"):
        opened(lying(**tables), executor, FrameTable())


def test_a_fanout_of_another_size_is_refused(executor: ThreadPoolExecutor) -> None:
    tables = honest()
    tables["FANO"] = tables["FANO"][:-1]
    with pytest.raises(Malformed, match="rows for 1000 chunks"):
        opened(lying(**tables), executor, FrameTable())


def test_a_crowded_bucket_is_refused(
    executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has so many chunks whose ids begin alike: it must not fill the memory."""
    monkeypatch.setattr(index_lookup, "_BUCKET_ROWS_MAX", 20)
    index = opened(lying(**honest()), executor, FrameTable())
    with pytest.raises(LimitExceeded, match="a bucket has more than"):
        index.lookup(words_of([chunk_id(5)]))


def test_indexes_that_it_contains_are_named(executor: ThreadPoolExecutor) -> None:
    tables = tables_of([chunk_id(1)])
    inner = index_format.build_index(*tables).root
    index = opened(index_format.build_index(*tables, supersedes=[inner]), executor, FrameTable())
    assert index.supersedes() == (inner.hex,)


# -- blocks ---------------------------------------------------------------------------------------


class Bytes:
    """A source that can be spoilt."""

    def __init__(self, data: bytes) -> None:
        self.data = bytearray(data)
        self.is_distrusted = False

    def read(self, offset: int, into: memoryview) -> None:
        """See `Source.read`."""
        into[:] = self.data[offset : offset + into.nbytes]

    def distrust(self) -> None:
        """See `Source.distrust`."""
        self.is_distrusted = True


def sums_of(data: bytes) -> np.ndarray:
    return np.array(index_blocks._sums(memoryview(data)), np.uint64)


ranges = st.lists(st.tuples(st.integers(0, 60_000), st.integers(0, 9000)), max_size=40)


@given(ranges, st.integers(1, 70_000), st.integers(0, 40), st.integers(1, 8))
def test_ranges_are_gathered_in_order(
    executor: ThreadPoolExecutor,
    some: list[tuple[int, int]],
    length: int,
    gap: int,
    run_blocks: int,
) -> None:
    data = np.random.default_rng(length).bytes(length)
    begins = np.array(sorted(min(begin, length) for begin, _ in some), np.int64)
    steps = np.array([size for _, size in some], np.int64)
    ends = np.maximum.accumulate(np.minimum(begins + steps, length)) if len(some) else begins
    source = Bytes(data)
    reader = index_blocks.BlockReader([source], length, sums_of(data), executor, readers=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_blocks, "_GAP_BLOCKS", gap)
        patch.setattr(index_blocks, "_RUN_BLOCKS", run_blocks)
        patch.setattr(index_blocks, "_RUNS_PER_TASK_MIN", 1)
        right = b"".join(data[b:e] for b, e in zip(begins.tolist(), ends.tolist(), strict=True))
        assert reader.gather(begins, ends) == right


def test_the_next_source_is_asked_where_one_is_wrong(executor: ThreadPoolExecutor) -> None:
    """Goal: damage in a copy is never used and never an error while the store is whole."""
    data = np.random.default_rng(5).bytes(100 * KIB + 17)
    for position in (0, 4095, 50_000, len(data) - 1):
        copy, stored = Bytes(data), Bytes(data)
        copy.data[position] ^= 16
        reader = index_blocks.BlockReader(
            [copy, stored], len(data), sums_of(data), executor, readers=3
        )
        begins = np.arange(0, len(data), 7000)
        ends = np.minimum(begins + 7000, len(data))
        assert reader.gather(begins, ends) == data
        assert (copy.is_distrusted, stored.is_distrusted) == (True, False)
        stored.data[position] ^= 1
        with pytest.raises(DigestMismatch, match=f"offset {position // 4096 * 4096} "):
            reader.gather(begins, ends)


def test_what_was_not_asked_for_may_be_damaged(executor: ThreadPoolExecutor) -> None:
    data = bytes(64 * KIB)
    source = Bytes(data)
    reader = index_blocks.BlockReader([source], len(data), sums_of(data), executor, readers=3)
    source.data[5000] = 1
    begins, ends = np.array([0, 8192]), np.array([4096, 12288])
    assert reader.gather(begins, ends) == bytes(8192)


def test_every_byte_of_an_index_is_verified(executor: ThreadPoolExecutor) -> None:
    """Goal: no bit of an index can change unnoticed, wherever the pieces of a survey end."""
    tables = tables_of([chunk_id(number) for number in range(20)])
    built = index_format.build_index(*tables)
    data = built.to_bytes()
    with pytest.MonkeyPatch.context() as patch:
        for piece_bytes in (4096, 8192, 4 * MIB):
            patch.setattr(index_blocks, "_PIECE_BYTES", piece_bytes)
            sums = index_blocks.survey(Bytes(data), built.root, len(data), executor)
            assert sums.tolist() == sums_of(data).tolist()
        for position, bit in itertools.product(range(0, len(data), 3), (0, 7)):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            with pytest.raises((FormatError, DigestMismatch)):
                index_blocks.survey(Bytes(damaged), built.root, len(data), executor)
