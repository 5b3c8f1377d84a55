"""BLAKE3 as GPUs compute it, on the processor: against the package that does it everywhere else."""

import os
import random

import numpy as np
import pytest
from blake3 import blake3

from snapagent.gpu.hash_plan import batches, plan_hashes
from snapagent.gpu.hashing import PieceHasher, device_buffer
from tests.support.blake3_host import emulated_kernels, host_digests
from tests.support.gpu import emulated_driver

VECTOR_LENGTHS = [
    *(1, 2, 3, 4, 5, 6, 7, 8, 63, 64, 65, 127, 128, 129, 1023, 1024, 1025, 2048, 2049, 3072, 3073),
    *(4096, 4097, 5120, 5121, 6144, 6145, 7168, 7169, 8192, 8193, 16384, 31744, 102400),
]
"""Those of the official test vectors, but for nothing at all, which no chunk is."""


def digests_of(data: np.ndarray, places: list[tuple[int, int]]) -> list[str]:
    offsets = np.array([offset for offset, _ in places], np.int64)
    lengths = np.array([length for _, length in places], np.int64)
    found = host_digests(plan_hashes(offsets + data.ctypes.data, lengths))
    return [found[at : at + 32].hex() for at in range(0, len(found), 32)]


def expected_of(data: np.ndarray, places: list[tuple[int, int]]) -> list[str]:
    return [blake3(data[offset : offset + length]).hexdigest() for offset, length in places]


def test_official_vectors() -> None:
    """Their input counts up to 250 and begins again; one published digest stands for the rest."""
    data = (np.arange(max(VECTOR_LENGTHS)) % 251).astype(np.uint8)
    places = [(0, length) for length in VECTOR_LENGTHS]
    found = digests_of(data, places)
    assert found == expected_of(data, places)
    assert found[0] == "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213"


@pytest.mark.parametrize("shift", range(17))
def test_any_address(shift: int) -> None:
    """Pieces begin anywhere: at quads, at words, and at odd bytes, which are read differently."""
    data = np.random.default_rng(shift).integers(0, 256, 9000, np.uint8)
    places = [(shift, length) for length in (1, 63, 64, 65, 1023, 1024, 1025, 4096, 4097, 8000)]
    assert digests_of(data, places) == expected_of(data, places)


def test_random_pieces_together() -> None:
    """Neighbours in a launch have trees of any heights, up to that of the longest chunk."""
    source = random.Random(7)
    data = np.random.default_rng(7).integers(0, 256, 3 << 20, np.uint8)
    lengths = [1 << 20, *(source.randint(1, 1 << source.randint(1, 18)) for _ in range(60)), 1]
    places = [(source.randint(0, len(data) - length), length) for length in lengths]
    assert digests_of(data, places) == expected_of(data, places)


def test_zeros_and_long_pieces() -> None:
    data = np.zeros((4 << 20) + 1, np.uint8)
    places = [(0, 4 << 20), (1, 4 << 20), (0, len(data))]
    assert digests_of(data, places) == expected_of(data, places)


def test_batches_cover_everything_in_order() -> None:
    """No batch has too many leaves, nor too many pieces."""
    lengths = np.array([1, 1024, 1025, 3000, 5, 5, 4096, 1, 1024, 1, 1, 1, 1], np.int64)
    found = list(batches(lengths, leaves_max=4, pieces_max=3))
    assert [row for one in found for row in range(one.start, one.stop)] == list(range(len(lengths)))
    for one in found:
        assert int((-(-lengths[one] // 1024)).sum()) <= 4
        assert one.stop - one.start <= 3
    assert list(batches(lengths[:0], leaves_max=4, pieces_max=3)) == []


def test_hashing_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: the same through the driver, more pieces than one batch takes.

    Method: the emulated driver launches the kernels that were compiled for the processor.
    """
    driver = emulated_driver(monkeypatch, "hashing", devices=1, memory=256 << 20, seed=os.getpid())
    monkeypatch.setattr("snapagent.gpu.hashing._LEAVES_MAX", 1500)
    source = random.Random(3)
    data = np.random.default_rng(3).integers(0, 256, 4 << 20, np.uint8)
    lengths = [1 << 20, *(source.randint(1, 200_000) for _ in range(50)), 1]
    places = [(source.randint(0, len(data) - length), length) for length in lengths]
    with (
        driver.open(0) as gpu,
        device_buffer(gpu, len(data)) as address,
        PieceHasher(gpu, emulated_kernels()) as hasher,
    ):
        gpu.copy_in(address, data.ctypes.data, len(data), 0)
        gpu.synchronize()
        offsets = np.array([offset for offset, _ in places], np.int64)
        found = hasher.digests(offsets + address, np.array(lengths, np.int64))
        assert [row.tobytes().hex() for row in found] == expected_of(data, places)
        assert hasher.digests(offsets[:0], offsets[:0]).shape == (0, 32)
