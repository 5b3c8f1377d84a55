"""Budgets: what is counted, who goes first, and that a wrong count mends itself."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapstore.cache.directory import CacheDirectory, Occupant
from snapstore.cache.room import Room
from snapstore.testing.clock import ManualClock
from snapstore.units import KIB

BUDGET = 640 * KIB


class Shelf:
    """A directory whose files take room."""

    def __init__(self, path: Path) -> None:
        (path / "files").mkdir()
        self.state = CacheDirectory.open(path)
        self.files = self.state.below("files")
        self.kept: set[str] = set()
        self.room = self.open()

    def open(self) -> Room:
        return Room(
            self.state,
            "room",
            BUDGET,
            ManualClock(),
            survey=self.files.occupants,
            evict=self.evict,
        )

    def evict(self, occupant: Occupant) -> bool:
        if occupant.name in self.kept:
            return False
        self.files.unlink(occupant.name)
        return True

    def add(self, name: str, size_bytes: int, used_ns: int) -> None:
        path = self.files.path / name
        path.write_bytes(b"x" * size_bytes)
        os.utime(path, ns=(used_ns, used_ns))

    def names(self) -> set[str]:
        return set(self.files.names())


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    shelf = Shelf(tmp_path)
    yield shelf
    shelf.room.close()
    shelf.files.close()
    shelf.state.close()


def test_what_was_unused_longest_goes_first(shelf: Shelf) -> None:
    """Proves: N5."""
    for number in range(6):
        assert shelf.room.take(100 * KIB)
        shelf.add(f"f{number}", 100 * KIB, used_ns=(number * 7) % 6)
    shelf.kept = {"f0"}  # the oldest of all
    assert shelf.room.take(150 * KIB)
    # In the order of their use: f0, f1, f2, and so on; some more than is needed is freed.
    assert shelf.names() == {"f0", "f3", "f4", "f5"}
    assert shelf.room.used_bytes == 550 * KIB


def test_no_room(shelf: Shelf) -> None:
    """Proves: N5."""
    assert not shelf.room.take(BUDGET + 1)
    shelf.add("f", 600 * KIB, used_ns=1)
    shelf.kept = {"f"}
    assert shelf.room.take(600 * KIB)
    assert not shelf.room.take(100 * KIB)
    assert shelf.room.used_bytes == 600 * KIB
    shelf.kept = set()
    assert shelf.room.take(100 * KIB)
    assert shelf.names() == set()


def test_a_count_that_is_too_high_mends_itself(shelf: Shelf) -> None:
    """As after processes were killed between taking room and using it. Proves: N5."""
    assert shelf.room.take(600 * KIB)
    other = shelf.open()
    assert other.used_bytes == 600 * KIB
    assert other.take(600 * KIB)
    assert other.used_bytes == 600 * KIB
    other.give_back(200 * KIB)
    assert shelf.room.used_bytes == 400 * KIB
    other.close()


def test_shrinking_and_evicting(shelf: Shelf) -> None:
    for number in range(4):
        shelf.add(f"f{number}", 100 * KIB, used_ns=number)
    shelf.room.shrink(150 * KIB)
    assert shelf.names() == {"f2", "f3"}
    assert shelf.room.used_bytes == 200 * KIB
    assert shelf.room.evict(0, among=frozenset({"f3"})) == 100 * KIB
    assert shelf.names() == {"f2"}
    assert shelf.room.evict(100 * KIB) == 0


def test_a_damaged_count_is_taken_anew(shelf: Shelf) -> None:
    (shelf.state.path / "room").write_bytes(b"xy")
    assert shelf.room.take(100 * KIB)
    assert shelf.room.used_bytes == 100 * KIB


def test_trimming(shelf: Shelf) -> None:
    """What was written beyond the budget goes, what was unused longest first. Proves: N5."""
    for number in range(12):
        shelf.add(f"{number:02}", 64 * KIB, number)
    shelf.room.trim()
    assert shelf.names() == {f"{number:02}" for number in range(2, 12)}
    shelf.room.trim()
    assert len(shelf.names()) == 10


def test_how_much_fits(shelf: Shelf) -> None:
    assert shelf.room.fitting(BUDGET, 0) == BUDGET
    assert shelf.room.fitting(BUDGET - 1, 1) == BUDGET - 1
    # What making room leaves free would be taken from what is to stay.
    assert shelf.room.fitting(BUDGET + 1, 0) == BUDGET - 20 * KIB
    assert shelf.room.fitting(BUDGET, BUDGET) == 0
