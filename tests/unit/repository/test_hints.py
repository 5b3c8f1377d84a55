"""Hints: advice that anybody may replace and that nobody needs."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import snapstore
from snapstore.backend.base import ObjectKind
from snapstore.backend.memory import MemoryBackend
from snapstore.backend.posix import PosixBackend
from snapstore.errors import AccessDenied, LimitExceeded, Malformed, UsageError
from snapstore.format import limits
from snapstore.format.page_order import PageRun, decode_page_order, encode_page_order
from snapstore.testing.clock import ManualClock
from tests.unit.repository.parts import open_on

ID = "a" * 64


def test_the_last_one_counts() -> None:
    store = open_on(MemoryBackend(), ManualClock())
    assert store.get_hint("page-order", ID) is None
    for data in (b"one", b"the other", b"one", b"one", b""):
        store.put_hint("page-order", ID, data)
        assert store.get_hint("page-order", ID) == data
    store.put_hint("other-topic", ID, b"other")
    assert store.get_hint("page-order", ID) == b""


def test_lengths_are_bounded() -> None:
    store = open_on(MemoryBackend(), ManualClock())
    store.put_hint("page-order", ID, b"12345")
    assert store.get_hint("page-order", ID, 4) is None
    assert store.get_hint("page-order", ID, 5) == b"12345"
    with pytest.raises(LimitExceeded):
        store.put_hint("page-order", ID, bytes(limits.HINT_BYTES_MAX + 1))
    assert store.get_hint("page-order", ID) == b"12345"


@pytest.mark.parametrize(
    ("topic", "name"), [("", "a"), ("a", ""), ("A", "a"), ("a", "../b"), ("a/b", "c"), ("a", "b/c")]
)
def test_names_are_checked(topic: str, name: str) -> None:
    store = open_on(MemoryBackend(), ManualClock())
    with pytest.raises(UsageError):
        store.put_hint(topic, name, b"data")
    with pytest.raises(UsageError):
        store.get_hint(topic, name)


def test_who_may_not_write_is_told(tmp_path: Path) -> None:
    """Goal: a hint is no reason to fail for who reads, and none to be silent for who writes."""
    snapstore.init_store(str(tmp_path)).close()
    with snapstore.open_store(str(tmp_path), readonly=True) as store:
        assert store.get_hint("page-order", ID) is None
        with pytest.raises(AccessDenied):
            store.put_hint("page-order", ID, b"data")
    with snapstore.open_store(str(tmp_path)) as store:
        store.put_hint("page-order", ID, b"data")
    with snapstore.open_store(str(tmp_path), readonly=True) as store:
        assert store.get_hint("page-order", ID) == b"data"
        with pytest.raises(AccessDenied):
            store.put_hint("page-order", ID, b"other")
        path = tmp_path / "hints" / "page-order" / ID
        path.unlink()
        path.mkdir()
        assert store.get_hint("page-order", ID) is None


def test_of_many_writers_any_one_wins(tmp_path: Path, rng: random.Random) -> None:
    """Goal: writers that replace one hint at once all succeed, and one of theirs is there.

    Method: threads write equally long hints of one byte each; readers meanwhile find nothing or
    all of one of them, never a mixture.
    """
    backend = PosixBackend.create(tmp_path / "store")
    store = open_on(backend, ManualClock())
    written = {bytes([number]) * 5000 for number in range(8)}

    def work(data: bytes) -> None:
        for _ in range(10):
            store.put_hint("page-order", ID, data)
            assert store.get_hint("page-order", ID) in {None, *written}

    with ThreadPoolExecutor(8) as executor:
        for done in [executor.submit(work, data) for data in rng.sample(sorted(written), 8)]:
            done.result()
    store.put_hint("page-order", ID, b"last")
    assert store.get_hint("page-order", ID) == b"last"
    assert [info.name for info in backend.list(ObjectKind.HINT)] == [f"page-order/{ID}"]
    backend.close()


_PATHS = st.sampled_from(["pages-1.img", "rank-0/pages-2.img", "é"])
_RUNS = st.builds(PageRun, _PATHS, st.integers(0, 1 << 37), st.integers(1, 1 << 37))


@given(st.lists(_RUNS))
def test_a_page_order_comes_back(runs: list[PageRun]) -> None:
    assert decode_page_order(encode_page_order(iter(runs))) == runs


def test_a_page_order_that_cannot_be_is_not_written() -> None:
    for run in (("", 0, 1), ("a", 0, 0), ("a", -1, 1), ("../a", 0, 1), ("a", 1 << 38, 1)):
        with pytest.raises(Malformed):
            encode_page_order([PageRun(*run)])
    with pytest.raises(Malformed):
        encode_page_order([PageRun("\udcff", 0, 1)])
    with pytest.raises(LimitExceeded) as caught:
        encode_page_order(PageRun("a", page, 1) for page in range(limits.PAGE_ORDER_RUNS_MAX + 1))
    assert caught.value.next_step
    with pytest.raises(LimitExceeded):
        encode_page_order(PageRun(f"{n}", 0, 1) for n in range(limits.PAGE_ORDER_FILES_MAX + 1))
