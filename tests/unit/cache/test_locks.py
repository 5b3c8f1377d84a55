"""Claims on ranges: who has what, also among threads, and up to where."""

import os
from functools import partial
from pathlib import Path

import pytest

from snapstore.cache.locks import Patience, claim, try_lock_file, unlock_file
from snapstore.testing.clock import ManualClock


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"")
    return path


def test_claims_exclude_each_other_within_a_process(path: Path) -> None:
    """Proves: N4."""
    reopen = partial(os.open, path, os.O_RDWR)
    with claim(reopen, 100, 200) as first:
        assert first == 200
        with claim(reopen, 100, 200) as second:
            assert second == 100  # nothing of it
        with claim(reopen, 150, 250) as second:
            assert second == 150
        with claim(reopen, 50, 250) as second:
            assert second == 100  # up to the first
            with claim(reopen, 0, 60) as third:
                assert third == 50
        with claim(reopen, 200, 300) as second:
            assert second == 300
    with claim(reopen, 0, 1000) as all_of_it:
        assert all_of_it == 1000


def test_locks_of_files(path: Path) -> None:
    one, other = (os.open(path, os.O_RDWR) for _ in range(2))
    try:
        assert try_lock_file(one, shared=True)
        assert try_lock_file(other, shared=True)
        assert not try_lock_file(other)
        unlock_file(one)
        assert try_lock_file(other)
        assert not try_lock_file(one, shared=True)
    finally:
        os.close(one)
        os.close(other)


def test_patience_ends() -> None:
    clock = ManualClock()
    patience = Patience(clock, 1.0)
    before = clock.monotonic_s()
    while patience.wait():
        pass
    assert 1.0 <= clock.monotonic_s() - before < 1.1
