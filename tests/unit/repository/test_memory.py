"""The budget adds up: whatever the memory and the threads, nothing large is allocated beyond it."""

import os

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from snapstore.errors import UsageError
from snapstore.format import limits
from snapstore.options import MEMORY_BYTES_MIN, StoreOptions
from snapstore.repository import memory
from snapstore.repository.ingest import INGEST_BUFFER_BYTES
from snapstore.repository.memory import MemoryPlan
from snapstore.repository.windows import WINDOW_BYTES
from snapstore.units import GIB, MIB

budgets = st.one_of(
    st.integers(MEMORY_BYTES_MIN, 64 * GIB),
    st.integers(MEMORY_BYTES_MIN, 1 * GIB),
    st.sampled_from([MEMORY_BYTES_MIN, 512 * MIB - 1, 512 * MIB, GIB, 64 * GIB]),
)


@given(budgets, st.integers(1, 64))
@example(MEMORY_BYTES_MIN, 1)
@example(MEMORY_BYTES_MIN, 64)
@example(512 * MIB, 64)
@example(64 * GIB, 64)
def test_push_and_pull_stay_within_the_budget(budget: int, threads: int) -> None:
    """Goal: what each operation allocates at most, added up here again, fits the budget.

    Method: the sizes that the parts really use. A push holds packs with room for one more frame
    and their tables, windows with what they carry over and their encoded frames, and the catalog.
    A pull holds for each reader stored bytes, a decoded frame, and its planes while it is decoded.
    """
    plan = MemoryPlan.of(StoreOptions(memory_bytes=budget, threads=threads))
    rest = memory._INTERPRETER_BYTES
    packs = plan.packs_in_flight * (plan.pack_bytes + limits.FRAME_STORED_BYTES_MAX)
    windows = plan.window_buffers * (INGEST_BUFFER_BYTES + WINDOW_BYTES)
    assert rest + packs + windows + plan.catalog_bytes <= budget
    stored = max(plan.read_bytes, limits.FRAME_STORED_BYTES_MAX)
    readers = plan.readers * (stored + 2 * limits.FRAME_PLAIN_BYTES_MAX)
    assert rest + readers <= budget


@given(budgets, st.integers(1, 64))
@example(MEMORY_BYTES_MIN, 64)
def test_there_is_always_enough_to_go_on(budget: int, threads: int) -> None:
    plan = MemoryPlan.of(StoreOptions(memory_bytes=budget, threads=threads))
    assert plan.threads == threads
    assert 1 <= plan.readers <= threads
    # One window is cut while another is read.
    assert plan.window_buffers >= 2
    assert plan.packs_in_flight >= 2
    assert plan.pack_bytes >= 16 * MIB
    assert plan.pack_bytes <= limits.PACK_BYTES_MAX - limits.PACK_FOOTER_BYTES_MAX
    assert plan.catalog_bytes >= 8 * MIB
    assert plan.read_bytes >= limits.FRAME_PLAIN_BYTES_MAX


@given(st.integers(1, 64), st.integers(MEMORY_BYTES_MIN, 4 * GIB), st.integers(0, 4 * GIB))
def test_more_memory_is_never_less_of_anything(threads: int, budget: int, more: int) -> None:
    small = MemoryPlan.of(StoreOptions(memory_bytes=budget, threads=threads))
    large = MemoryPlan.of(StoreOptions(memory_bytes=budget + more, threads=threads))
    assert large.readers >= small.readers
    assert large.pack_bytes >= small.pack_bytes
    if large.pack_bytes == small.pack_bytes:
        assert large.window_buffers >= small.window_buffers
        assert large.catalog_bytes >= small.catalog_bytes


def test_the_default_uses_all_threads() -> None:
    cores = len(os.sched_getaffinity(0))
    plan = MemoryPlan.of(StoreOptions())
    assert plan.threads == cores
    assert plan.readers == min(cores, 58)


@pytest.mark.parametrize("budget", [0, 1, MEMORY_BYTES_MIN - 1])
def test_too_small_a_budget_is_refused(budget: int) -> None:
    with pytest.raises(UsageError, match="too small"):
        StoreOptions(memory_bytes=budget)


def test_a_negative_number_of_threads_is_refused() -> None:
    with pytest.raises(UsageError):
        StoreOptions(threads=-1)
