"""Files in pieces, for devices: the bytes of the file, and the chunks to check them by."""

import numpy as np
import pytest
from blake3 import blake3

from snapstore import Integrity, ReadCheck, SnapshotFile, Store
from snapstore.backend.base import ObjectKind
from snapstore.backend.memory import MemoryBackend
from snapstore.errors import DigestMismatch, UsageError
from snapstore.format.config import StoreConfig
from snapstore.options import Compression, StoreOptions
from snapstore.testing.clock import ManualClock
from snapstore.units import KIB, MIB
from tests.support.samples import bf16, random_bytes, text

CONFIG = StoreConfig(created="2026-11-30T05:00:00Z", store_id="0" * 32)


def content() -> bytes:
    zeros = np.zeros(3 * MIB, np.uint8)
    parts = [random_bytes(9 * MIB + 5, 1), zeros, text(300 * KIB, 2), bf16(MIB, 3), zeros[:70_000]]
    return b"".join(part.tobytes() for part in [*parts, parts[0][: 2 * MIB]])


def stored(compression: Compression, integrity: Integrity) -> tuple[Store, MemoryBackend]:
    backend = MemoryBackend()
    options = StoreOptions(compression=compression, integrity=integrity, threads=2)
    store = Store(backend, CONFIG, options, ManualClock())
    with store.begin("a") as writer:
        writer.add_file(0, "large", content(), data_class="tensors")
        writer.add_file(0, "small", b"words", data_class="tensors")
        writer.add_file(0, "empty", b"")
        writer.commit()
    return store, backend


def read(file: SnapshotFile, check: ReadCheck) -> bytes:
    buffer = np.full(4 * MIB, 0xEE, np.uint8)
    found = []
    for piece in file.pieces():
        if piece.is_zeros:
            found.append(bytes(piece.length))
        else:
            file.read_piece(piece, buffer, check=check)
            found.append(buffer[: piece.length].tobytes())
    return b"".join(found)


@pytest.mark.slow
@pytest.mark.parametrize("integrity", list(Integrity))
@pytest.mark.parametrize("compression", [Compression.NONE, Compression.AUTO])
def test_pieces_give_the_file(compression: Compression, integrity: Integrity) -> None:
    store, _ = stored(compression, integrity)
    snapshot = store.snapshot("a")
    for check in ReadCheck:
        assert read(snapshot.open("large"), check) == content()
        assert read(snapshot.open("small"), check) == b"words"
        assert read(snapshot.open("empty"), check) == b""
    file = snapshot.open("large")
    ends = [piece.offset + piece.length for piece in file.pieces()]
    assert [piece.offset for piece in file.pieces()] == [0, *ends[:-1]]
    # Noise is raw anyhow.
    assert any(piece.stored for piece in file.pieces())
    pieces, listed = file.pieces(), [*file.pieces()]
    assert [pieces[number] for number in range(-len(listed), len(listed))] == listed * 2
    assert pieces[1:-1:2] == listed[1:-1:2]
    with pytest.raises(IndexError):
        pieces[len(listed)]


@pytest.mark.slow
@pytest.mark.parametrize("integrity", list(Integrity))
@pytest.mark.parametrize("name", ["large", "small"])
def test_chunks_hash_to_their_ids(integrity: Integrity, name: str) -> None:
    """They cover the file in order, and what is no chunk is zeros."""
    store, _ = stored(Compression.AUTO, integrity)
    file = store.snapshot("a").open(name)
    chunks, data = file.chunks(), file.read_at(0, file.size_bytes)
    ends = chunks.offsets + chunks.lengths
    assert chunks.offsets.tolist() == [0, *ends[:-1].tolist()]
    assert int(ends[-1]) == file.size_bytes
    for row, (offset, end) in enumerate(zip(chunks.offsets.tolist(), ends.tolist(), strict=True)):
        if chunks.zeros[row]:
            assert not any(data[offset:end])
        else:
            assert chunks.whole[row]
            assert blake3(data[offset:end]).digest() == chunks.ids[row].tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("about_bytes", [4 * MIB, 16 * MIB])
@pytest.mark.parametrize("compression", [Compression.NONE, Compression.AUTO])
def test_groups_lie_in_packs_as_they_say(compression: Compression, about_bytes: int) -> None:
    """Goal: who reads a group at its place in its pack has these bytes of the file.

    Method: frames of tensors begin at whole pages, so that there are gaps between them; those of
    devices are whole pages; and of one file they lie in another order.
    """
    store, backend = stored(compression, Integrity.FAST)
    halves = [content()[: 4 * MIB], content()[4 * MIB : 8 * MIB]]
    with store.begin("b") as writer:
        writer.add_file(0, "straight", b"".join(halves), data_class="device")
        writer.add_file(0, "turned", b"".join(reversed(halves)), data_class="device")
        writer.add_file(0, "other", random_bytes(40 * MIB, 7).tobytes(), data_class="device")
        writer.commit()
    read_at = multiple = 0
    for ref, name in (("a", "large"), ("a", "empty"), ("b", "turned"), ("b", "other")):
        file = store.snapshot(ref).open(name)
        data, pieces = file.read_at(0, file.size_bytes), file.pieces()
        groups = pieces.groups(about_bytes)
        assert [one.first for one in groups] == [0, *(one.last for one in groups)][: len(groups)]
        assert sum(one.last - one.first for one in groups) == len(pieces)
        for group in groups:
            members = pieces[group.first : group.last]
            assert group.offset == members[0].offset
            assert group.order == members[0].order
            assert group.length == sum(piece.length for piece in members)
            assert group.length < about_bytes + 4 * MIB or members[0].is_zeros
            packs = {piece.stored.pack if piece.stored else None for piece in members}
            assert packs == {group.pack}
            if group.at >= 0:
                assert group.pack is not None
                into = memoryview(bytearray(group.length))
                backend.get_range(ObjectKind.PACK, group.pack.hex, group.at, into)
                assert into == data[group.offset : group.offset + group.length]
                read_at += group.length
                multiple += len(members) > 1
    assert read_at > 40 * MIB
    assert bool(multiple) == (about_bytes > 4 * MIB)


@pytest.mark.slow
@pytest.mark.parametrize("check", list(ReadCheck))
def test_a_flipped_bit(check: ReadCheck) -> None:
    """Who asks for no check gets what is there, and everybody else an error. Proves: I6."""
    store, backend = stored(Compression.NONE, Integrity.STRONG)
    file = store.snapshot("a").open("large")
    piece = next(one for one in file.pieces() if one.stored)
    assert piece.stored is not None
    name = piece.stored.pack.hex
    data = bytearray(backend.stat(ObjectKind.PACK, name).size_bytes)
    backend.get_range(ObjectKind.PACK, name, 0, memoryview(data))
    data[piece.stored.frame.offset + 77] ^= 1
    backend.delete(ObjectKind.PACK, name)
    backend.put_new(ObjectKind.PACK, name, [data])
    buffer = bytearray(4 * MIB)
    if check is ReadCheck.NOTHING:
        file.read_piece(piece, buffer, check=check)
        assert buffer[77] == content()[piece.offset + 77] ^ 1
    else:
        with pytest.raises(DigestMismatch, match="frame at offset"):
            file.read_piece(piece, buffer, check=check)


def test_a_buffer_that_is_too_short() -> None:
    store, _ = stored(Compression.NONE, Integrity.FAST)
    file = store.snapshot("a").open("small")
    (piece,) = file.pieces()
    with pytest.raises(UsageError, match="too few"):
        file.read_piece(piece, bytearray(4))
    with pytest.raises(UsageError, match="cannot group"):
        file.pieces().groups(0)
