"""Tables: sorting ids, run checks with sums that would wrap, row limits."""

import numpy as np
import pytest

from snapstore.errors import LimitExceeded, Malformed
from snapstore.format.tables import STREAM_DTYPE, as_rows, check_runs, order_of_ids, unsorted_ids

PAIR = np.dtype([("a", "<u4"), ("b", "<u4")])


def ids_of(*ids: bytes) -> np.ndarray:
    return np.array([one.ljust(32, b"\0") for one in ids], "V32")


def test_rows_are_seen_in_place() -> None:
    data = bytearray(bytes(range(16)))
    rows = as_rows(data, PAIR, what="test", rows_max=2)
    data[0] = 9
    assert rows["a"].tolist() == [0x03020109, 0x0B0A0908]
    assert len(as_rows(b"", PAIR, what="test", rows_max=0)) == 0
    with pytest.raises(Malformed, match="7 bytes are not whole rows of 8"):
        as_rows(bytes(7), PAIR, what="test", rows_max=2)
    with pytest.raises(LimitExceeded, match="3 rows"):
        as_rows(bytes(24), PAIR, what="test", rows_max=2)


def test_ids_that_differ_late_are_sorted() -> None:
    """Equal in the first eight bytes, so that the other words decide, also with their top bit."""
    same = b"\x80" * 8
    ids = [same + bytes([one]) * 8 + bytes([two]) * 16 for one in (255, 1, 128) for two in (3, 2)]
    found = [ids[row] for row in order_of_ids(ids_of(*ids))]
    assert found == sorted(ids)
    assert not unsorted_ids(ids_of(*found)).any()
    assert unsorted_ids(ids_of(*found[::-1])).tolist() == [False] + [True] * 5


def test_equal_ids_keep_their_order() -> None:
    ids = ids_of(b"b", b"a", b"b", b"a", b"b")
    assert order_of_ids(ids).tolist() == [1, 3, 0, 2, 4]
    assert unsorted_ids(ids_of(b"a", b"a")).tolist() == [False, True]
    assert order_of_ids(ids_of()).tolist() == []


def runs(*streams: tuple[int, int, int]) -> np.ndarray:
    return np.array(list(streams), STREAM_DTYPE)


def test_runs_that_add_up() -> None:
    lengths = np.array([1, 2, 3], np.uint64)
    check_runs(runs((0, 2, 3), (2, 0, 0), (2, 1, 3)), lengths, what="test")
    check_runs(runs(), lengths[:0], what="test")


def test_all_streams_together_stay_below_63_bits() -> None:
    count = 1 << 13
    streams = np.zeros(count, STREAM_DTYPE)
    streams["first"], streams["count"], streams["length"] = np.arange(count), 1, 1 << 50
    lengths = np.full(count, 1 << 50, np.uint64)
    with pytest.raises(LimitExceeded, match="add up"):
        check_runs(streams, lengths, what="test")
    check_runs(streams[:-1], lengths[:-1], what="test")
