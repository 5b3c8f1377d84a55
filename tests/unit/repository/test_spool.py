"""Rows come back by key, however they were added and wherever they waited."""

import collections
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snapstore.errors import BackendError
from snapstore.repository.spool import KeySpool, begins_of

Row = tuple[int, int, int, int]
Counts = collections.Counter[tuple[int, int, int]]

# Few different values, so that keys and groups meet; the largest must not wrap.
WORDS = st.sampled_from([0, 1, 255, 1 << 56, (1 << 56) + 1, (1 << 64) - 1])
ROWS = st.lists(st.tuples(WORDS, WORDS, st.integers(1, 1 << 40), st.integers(0, 2)), max_size=30)


def add(spool: KeySpool, rows: list[Row]) -> None:
    columns = list(zip(*rows, strict=True)) if rows else [(), (), (), ()]
    high, low, counted = (np.array(column, np.uint64) for column in columns[:3])
    # What a key names has one size, whoever has it.
    sizes = high % np.uint64(1000)
    groups = np.array(columns[3], np.int64)
    spool.add(high, low, counted=counted, sizes=sizes, groups=groups)


def collect(spool: KeySpool) -> Counts:
    """Add up what a spool gives, and check that it is sorted and keys are together."""
    found: Counts = collections.Counter()
    seen: set[tuple[int, int]] = set()
    for table in spool.buckets():
        order = table[["high", "low", "group"]].tolist()
        assert order == sorted(order)
        keys = {(high, low) for high, low, _ in order}
        assert not keys & seen
        seen |= keys
        assert int(begins_of(table).sum()) == len(keys)
        assert int(begins_of(table, with_group=True).sum()) == len(set(order))
        assert (table["size"] == table["high"] % np.uint64(1000)).all()
        for key, counted in zip(order, table["bytes"].tolist(), strict=True):
            found[key] += counted
    return found


@settings(max_examples=60)
@given(st.lists(ROWS, max_size=5), st.sampled_from([1, 1000, 1 << 20]))
def test_sums_by_key_and_group(calls: list[list[Row]], memory_bytes: int) -> None:
    """Goal: nothing is lost, added twice or given to another, in memory as in the file.

    Method: compare sums with those of a dictionary; the smallest budget spills at every call.
    """
    wanted: Counts = collections.Counter()
    with KeySpool(memory_bytes=memory_bytes) as spool:
        for rows in calls:
            add(spool, rows)
            for high, low, counted, group in rows:
                wanted[high, low, group] += counted
        assert collect(spool) == wanted


def test_equal_rows_of_one_call_are_one() -> None:
    with KeySpool(memory_bytes=1 << 20) as spool:
        add(spool, [(5, 6, 10, 0)] * 1000)
        (table,) = spool.buckets()
    assert table["bytes"].tolist() == [10_000]


def test_the_file_is_where_temporary_files_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A place that cannot be written is told, with what to do."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with KeySpool(memory_bytes=1) as spool:
        with pytest.raises(BackendError, match="nowhere") as caught:
            add(spool, [(1, 2, 3, 0)])
        assert "TMPDIR" in caught.value.next_step
