"""What a capture is expected to store, and how it is told."""

import mmap
import os

from snapagent.capture_total import ExpectedTotal, resident_bytes
from snapstore import Progress
from snapstore.units import MIB


def test_resident_bytes() -> None:
    """Goal: memory that was touched counts, files that are mapped do not, nor who has ended."""
    here = os.getpid()
    before = resident_bytes([here])
    with mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE) as memory:
        assert resident_bytes([here]) - before < 8 * MIB
        memory.write(bytes(64 * MIB))
        assert abs(resident_bytes([here]) - before - 64 * MIB) < 8 * MIB
    assert before > 0
    assert resident_bytes([1 << 22]) == 0


def test_shared_memory_counts_once() -> None:
    here = os.getpid()
    alone = resident_bytes([here])
    with mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_SHARED) as memory:
        memory.write(bytes(64 * MIB))
        with_it = resident_bytes([here])
        assert abs(with_it - alone - 64 * MIB) < 8 * MIB
        assert resident_bytes([here, here]) < 2 * with_it - 56 * MIB


def test_the_total_is_told() -> None:
    """Goal: never less than what is done, and exact once all is stored."""
    told: list[Progress] = []
    expected = ExpectedTotal(told.append)
    expected(Progress("store", 0, 0))
    expected.expect(100)
    expected(Progress("store", 40, 0))
    expected(Progress("store", 120, 0))
    expected(Progress("commit", 130, 0))
    assert told == [
        Progress("store", 0, 0, is_estimate=True),
        Progress("store", 40, 100, is_estimate=True),
        Progress("store", 120, 120, is_estimate=True),
        Progress("commit", 130, 130),
    ]
