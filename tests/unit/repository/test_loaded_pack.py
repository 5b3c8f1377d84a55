"""Packs that are loaded part by part: their bytes, name and checks, however the parts come."""

import itertools
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import xxhash
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from snapstore import ChunkSource, PartGroups, Span
from snapstore.backend.base import ObjectKind
from snapstore.backend.drafts import begin_draft
from snapstore.backend.posix import PosixBackend
from snapstore.errors import DigestMismatch, Interrupted
from snapstore.format import limits
from snapstore.format import pack as pack_format
from snapstore.format.tables import Rows
from snapstore.ids import PackId
from snapstore.repository.chunk_source import CheckedFrame, Loads
from snapstore.repository.loaded_pack import LoadedFrame, LoadedPack, LoadedRun
from snapstore.units import MIB
from tests.support.samples import random_bytes
from tests.support.waiting import wait_until


class Bytes(ChunkSource):
    """Has a file in memory, gives it in parts of some length, and may hash it by itself."""

    def __init__(self, data: np.ndarray, *, part: int, hashes: bool, group: int = 1) -> None:
        self.data = data
        self.part = part
        self.group = group
        self.hashes = hashes

    @override
    def load(self, offset: int, length: int, into: memoryview) -> None:
        into[:] = self.data[offset : offset + length].data

    @override
    def parts(self, spans: Sequence[Span]) -> PartGroups:
        group = []
        for begin, end in spans:
            for at in range(begin, end, self.part):
                group.append(self.data[at : min(at + self.part, end)].data)
                if len(group) == self.group:
                    yield iter(group)
                    group = []
        yield iter(group)

    @property
    @override
    def joined_bytes_max(self) -> int:
        return 64 * MIB if self.hashes else 0

    @override
    def joined_digest(self, pieces: Sequence[Span | bytes]) -> bytes:
        hasher = blake3()
        for piece in pieces:
            some = piece if isinstance(piece, bytes) else self.data[slice(*piece)].tobytes()
            hasher.update(some)
        return hasher.digest()


def chunk_rows(data: np.ndarray, spans: Sequence[Span]) -> Rows:
    rows = np.zeros(len(spans), pack_format.CHUNK_DTYPE)
    for row, (begin, end) in enumerate(spans):
        rows[row] = (blake3(data[begin:end].data).digest(), end - begin)
    return rows


def frames_of(data: np.ndarray, lengths: Sequence[Sequence[tuple[int, int]]]) -> list[LoadedFrame]:
    """Frames of chunks; each is told by the gap before it and its length."""
    frames = []
    at = 0
    for number, frame in enumerate(lengths):
        spans = []
        for gap, length in frame:
            spans.append((at + gap, at + gap + length))
            at += gap + length
        size = sum(end - begin for begin, end in spans)
        frames.append(LoadedFrame(number, spans, size, chunk_rows(data, spans)))
    return frames


chunks = st.lists(
    st.tuples(st.sampled_from([0, 0, 7, 300]), st.integers(1, 6000)), min_size=1, max_size=5
)


@pytest.mark.slow
@given(
    lengths=st.lists(chunks, min_size=1, max_size=6),
    part=st.sampled_from([1000, 4096, 1 << 20]),
    group=st.integers(1, 4),
    hashed=st.sampled_from(["here", "there", "both"]),
    check_all=st.booleans(),
)
def test_it_is_a_pack(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[list[tuple[int, int]]],
    part: int,
    group: int,
    hashed: str,
    *,
    check_all: bool,
) -> None:
    """Goal: any frames, in any parts, make the pack of these frames, named by its bytes.

    Method: read its file back and take it apart, as a reader does. Proves: I4.
    """
    backend = PosixBackend.create(tmp_path_factory.mktemp("packs") / "s")
    data = random_bytes(sum(gap + length for frame in lengths for gap, length in frame), 1)
    frames = frames_of(data, lengths)
    source = Bytes(data, part=part, hashes=hashed != "here", group=group)
    loads = Loads(source, check_all=check_all)
    pack = LoadedPack(3, frames, loads, is_hashed_here=hashed == "both")
    draft = begin_draft(backend)
    pack.load(draft)
    footer = pack_format.encode_footer(pack.frame_rows, pack.chunk_rows, offset=pack.used)
    name = pack.name_with(footer)
    draft.write(pack.used, [memoryview(footer)])
    draft.publish(ObjectKind.PACK, name.hex)
    draft.discard()
    stored = bytearray(backend.stat(ObjectKind.PACK, name.hex).size_bytes)
    backend.get_range(ObjectKind.PACK, name.hex, 0, memoryview(stored))
    backend.close()
    assert PackId(blake3(stored).digest()) == name
    found = pack_format.parse_footer(
        stored[pack.used : -pack_format.limits.PACK_TRAILER_BYTES], footer_offset=pack.used
    )
    assert found.chunks.tolist() == np.concatenate([frame.chunks for frame in frames]).tolist()
    for row, frame in zip(found.frames, frames, strict=True):
        begin = int(row["offset"])
        plain = b"".join(data[slice(*span)].tobytes() for span in frame.spans)
        assert stored[begin : begin + int(row["stored_length"])] == plain
        assert xxhash.xxh3_128_digest(plain) == row["checksum"].tobytes()
    assert len(footer) <= pack_format.footer_bytes_max(len(frames), len(pack.chunk_rows))
    assert loads.bytes == sum(frame.length for frame in frames)


@given(
    lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=8),
    cuts=st.lists(st.integers(0, 40_000), max_size=6),
    checked=st.integers(0, 8),
    wrong=st.none() | st.integers(0, 40_000),
)
def test_a_wrong_chunk_is_found_if_it_is_looked_at(
    lengths: list[int], cuts: list[int], checked: int, wrong: int | None
) -> None:
    """Goal: what is checked does not depend on how the bytes come."""
    data = random_bytes(sum(lengths), 2)
    ends = np.cumsum(lengths).tolist()
    rows = chunk_rows(data, [(end - size, end) for size, end in zip(lengths, ends, strict=True)])
    is_found = False
    if wrong is not None:
        at = wrong % len(data)
        data[at] ^= 1
        is_found = at < sum(lengths[:checked])
    frame = CheckedFrame(rows[:checked])
    bounds = sorted({0, len(data), *(cut % len(data) for cut in cuts)})
    try:
        for begin, end in itertools.pairwise(bounds):
            frame.add(data[begin:end].data)
        assert frame.finish() == xxhash.xxh3_128_digest(data.data)
        assert not is_found
    except DigestMismatch:
        assert is_found


def test_a_source_that_hashes_wrongly_is_found(tmp_path: Path) -> None:
    """Goal: a name that is not that of the bytes is refused where the processor hashes as well."""

    class Wrong(Bytes):
        @override
        def joined_digest(self, pieces: Sequence[Span | bytes]) -> bytes:
            return blake3(b"other").digest()

    data = random_bytes(9000, 3)
    loads = Loads(Wrong(data, part=4096, hashes=True), check_all=False)
    pack = LoadedPack(0, frames_of(data, [[(0, 9000)]]), loads, is_hashed_here=True)
    draft = begin_draft(PosixBackend.create(tmp_path / "s"))
    pack.load(draft)
    with pytest.raises(DigestMismatch, match="where its bytes came from"):
        pack.name_with(b"footer")
    draft.discard()


def is_closed(loads: Loads) -> bool:
    try:
        with loads.parts([]):
            return False
    except Interrupted:
        return True


def test_nothing_is_loaded_after_the_end(tmp_path: Path) -> None:
    """Goal: whoever closes `Loads` can let the bytes go: no part is asked for any more."""
    data = random_bytes(9000, 3)
    loads = Loads(Bytes(data, part=1000, hashes=True), check_all=False)
    closing = threading.Thread(target=loads.close)
    with loads.parts([(0, 9000)]) as groups:
        assert [part.nbytes for part in next(groups)] == [1000]
        closing.start()
        wait_until(lambda: is_closed(loads), "the end")
        with pytest.raises(Interrupted):
            next(groups)
        assert closing.is_alive()
    closing.join()
    with pytest.raises(Interrupted), loads.parts([(0, 9000)]):
        pass
    with pytest.raises(Interrupted):
        loads.fill([(0, 1)], chunk_rows(data, [(0, 1)]), memoryview(bytearray(1)))
    with pytest.raises(Interrupted):
        loads.joined_digest([b"x"])
    draft = begin_draft(PosixBackend.create(tmp_path / "s"))
    with pytest.raises(Interrupted):
        LoadedPack(0, frames_of(data, [[(0, 9000)]]), loads, is_hashed_here=True).load(draft)
    draft.discard()


@pytest.mark.parametrize("chunk_bytes", [1, 256, 1 << 18])
def test_a_pack_has_room_for_its_footer(chunk_bytes: int) -> None:
    """Goal: no pack is longer than readers take, however short its chunks are."""
    count = min(16 * 1024, 4 * MIB // chunk_bytes)
    length = count * chunk_bytes
    frame = LoadedFrame(0, [(0, length)], length, np.zeros(count, pack_format.CHUNK_DTYPE))
    loads = Loads(Bytes(np.empty(0, np.uint8), part=1, hashes=False), check_all=True)
    run = LoadedRun(loads, left_bytes=0)
    while run.has_room(frame, 120 * MIB):
        run.add(frame)
    frames = len(run.waiting)
    assert frames > 0
    footer_bytes = pack_format.footer_bytes_max(frames, frames * count)
    assert run.used + footer_bytes <= limits.PACK_BYTES_MAX
