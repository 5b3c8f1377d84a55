"""A writer of hashed chunks that dies while it writes packs part by part leaves no damage."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from typing_extensions import override

from snapstore import ChunkSource, Compression, HashedChunks, Store, StoreOptions, init_store
from snapstore.backend.posix import PosixBackend
from snapstore.errors import RefNotFound
from snapstore.units import KIB, MIB
from tests.support.damage import killed_at, open_on, temporaries
from tests.support.samples import random_bytes
from tests.support.schemas import check_store

pytestmark = pytest.mark.slow

CHUNK = 256 * KIB
OPTIONS = StoreOptions(threads=4, compression=Compression.NONE, memory_bytes=400 * MIB)
CHANGING = {"pwritev", "writev", "fsync", "link", "unlink", "mkdir"}


class Memory(ChunkSource):
    """Bytes that were hashed already."""

    def __init__(self, size: int) -> None:
        self.data = random_bytes(size, 7)
        lengths = np.minimum(CHUNK, size - np.arange(0, size, CHUNK))
        places = zip(np.arange(0, size, CHUNK).tolist(), lengths.tolist(), strict=True)
        ids = [blake3(self.data[at : at + length].data).digest() for at, length in places]
        self.chunks = HashedChunks(
            lengths=lengths,
            ids=np.frombuffer(b"".join(ids), np.uint8).reshape(-1, 32),
            zeros=np.zeros(len(ids), np.bool_),
        )

    @override
    def load(self, offset: int, length: int, into: memoryview) -> None:
        into[:] = self.data[offset : offset + length].data


def capture(store: Store, memory: Memory) -> int:
    """Write a snapshot; returns how many bytes were loaded for it."""
    with store.begin("a") as writer:
        with writer.open_file(0, "0.mem", data_class="device") as file:
            loaded = file.write_hashed(memory.chunks, memory).loaded_bytes
        writer.commit()
    return loaded


def capture_with(root: Path, memory: Memory, number: int | None) -> list[str]:
    """Capture, and die before that many file calls if a number is given; returns the calls."""
    return killed_at(root, number, lambda backend: capture(open_on(backend, root, OPTIONS), memory))


def test_a_capture_dies_between_file_calls(tmp_path: Path) -> None:
    """Goal: wherever it dies, the store is whole, and the next capture finds what was listed.

    Method: die before every seventh file call that changes something; look at everything in the
    store, and capture again to the end. Proves: S2, I2, I3.
    """
    memory = Memory(34 * MIB)
    empty = tmp_path / "empty"
    init_store(str(empty), OPTIONS).close()
    root = tmp_path / "store"
    shutil.copytree(empty, root)
    calls = capture_with(root, memory, None)
    assert calls.count("pwritev") > 2
    changing = [number for number, call in enumerate(calls) if call in CHANGING]
    assert len(changing) > 50
    for number in changing[::7]:
        shutil.rmtree(root)
        shutil.copytree(empty, root)
        capture_with(root, memory, number)
        check_store(root)
        garbage = temporaries(root)
        with reopened(root) as store:
            try:
                whole = store.snapshot("a").open("0.mem").readall() == memory.data.tobytes()
                assert whole, number
            except RefNotFound:
                assert capture(store, memory) <= len(memory.data)
            assert store.snapshot("a").open("0.mem").readall() == memory.data.tobytes()
        check_store(root)
        assert temporaries(root) == garbage


def reopened(root: Path) -> Store:
    return open_on(PosixBackend(root), root, OPTIONS)
