"""The budget adds up: whatever the memory and the threads, nothing large is allocated beyond it."""

import os

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from snapstore.errors import UsageError
from snapstore.format import limits
from snapstore.options import MEMORY_BYTES_MIN, Compression, StoreOptions
from snapstore.repository import memory
from snapstore.repository.arriving_file import HELD_BYTES_MIN
from snapstore.repository.ingest import INGEST_BUFFER_BYTES
from snapstore.repository.memory import MemoryPlan
from snapstore.repository.windows import WINDOW_BYTES
from snapstore.units import GIB, MIB

budgets = st.one_of(
    st.integers(MEMORY_BYTES_MIN, 64 * GIB),
    st.integers(MEMORY_BYTES_MIN, 1 * GIB),
    st.sampled_from([MEMORY_BYTES_MIN, 512 * MIB - 1, 512 * MIB, GIB, 64 * GIB]),
)


efforts = st.sampled_from(list(Compression))


def plan_of(budget: int, threads: int, effort: Compression = Compression.AUTO) -> MemoryPlan:
    return MemoryPlan.of(StoreOptions(memory_bytes=budget, threads=threads, compression=effort))


@given(budgets, st.integers(1, 64), efforts)
@example(MEMORY_BYTES_MIN, 1, Compression.MAX)
@example(MEMORY_BYTES_MIN, 64, Compression.MAX)
@example(MEMORY_BYTES_MIN, 64, Compression.AUTO)
@example(512 * MIB, 64, Compression.AUTO)
@example(64 * GIB, 64, Compression.AUTO)
def test_push_and_pull_stay_within_the_budget(
    budget: int, threads: int, effort: Compression
) -> None:
    """Goal: what each operation allocates at most, added up here again, fits the budget.

    Method: the sizes that the parts really use. A push holds packs with room for one more frame
    and their tables, windows with what they carry over and their encoded frames, and the catalog.
    A pull holds for each reader stored bytes, a decoded frame, and its planes while it is decoded.
    """
    plan = plan_of(budget, threads, effort)
    is_max = effort is Compression.MAX
    working = memory._THREAD_BYTES_MAX_EFFORT if is_max else memory._THREAD_BYTES
    packs = plan.packs_in_flight * (plan.pack_bytes + limits.FRAME_STORED_BYTES_MAX)
    windows = plan.window_buffers * (INGEST_BUFFER_BYTES + WINDOW_BYTES)
    push = packs + windows + plan.catalog_bytes + plan.threads * working
    assert memory._INTERPRETER_BYTES + push <= budget
    stored = max(plan.read_bytes, limits.FRAME_STORED_BYTES_MAX)
    pull = plan.readers_max * (stored + 2 * limits.FRAME_PLAIN_BYTES_MAX)
    assert memory._INTERPRETER_BYTES + pull <= budget


@given(budgets, st.integers(1, 64), efforts)
@example(MEMORY_BYTES_MIN, 64, Compression.MAX)
def test_there_is_always_enough_to_go_on(budget: int, threads: int, effort: Compression) -> None:
    plan = plan_of(budget, threads, effort)
    assert 1 <= plan.threads <= threads
    assert 1 <= plan.readers <= min(threads + 1, plan.readers_max)
    # One window is cut while another is read.
    assert plan.window_buffers >= 2
    assert plan.packs_in_flight >= 2
    assert plan.pack_bytes >= 16 * MIB
    assert plan.pack_bytes <= limits.PACK_BYTES_MAX - limits.PACK_FOOTER_BYTES_MAX
    assert plan.catalog_bytes >= 8 * MIB
    assert plan.read_bytes >= limits.FRAME_PLAIN_BYTES_MAX


@given(budgets, st.integers(1, 64), efforts)
@example(MEMORY_BYTES_MIN, 1, Compression.MAX)
@example(MEMORY_BYTES_MIN, 64, Compression.MAX)
@example(MEMORY_BYTES_MIN, 64, Compression.AUTO)
@example(GIB, 2, Compression.AUTO)
def test_files_that_arrive_stay_within_the_budget(
    budget: int, threads: int, effort: Compression
) -> None:
    """As for a push, with what files hold before they fill windows, and windows half full."""
    options = StoreOptions(memory_bytes=budget, threads=threads, compression=effort)
    plan = MemoryPlan.for_arrivals(options)
    working = memory._THREAD_BYTES_MAX_EFFORT if effort is Compression.MAX else memory._THREAD_BYTES
    packs = plan.packs_in_flight * (plan.pack_bytes + limits.FRAME_STORED_BYTES_MAX)
    count = plan.window_buffers + min(plan.windows_filled, plan.windows_spare)
    windows = count * (INGEST_BUFFER_BYTES + WINDOW_BYTES)
    held = plan.catalog_bytes + plan.threads * working + plan.held_bytes
    assert memory._INTERPRETER_BYTES + packs + windows + held <= budget
    assert plan.threads >= 1
    # One window is left for the pipeline however many wait half full.
    assert 1 <= plan.windows_filled < count
    assert plan.held_bytes // 2 // HELD_BYTES_MIN >= 15
    assert plan.catalog_bytes >= 8 * MIB


@given(st.integers(1, 64), st.integers(MEMORY_BYTES_MIN, 4 * GIB), st.integers(0, 4 * GIB))
def test_more_memory_is_never_fewer_threads(threads: int, budget: int, more: int) -> None:
    small, large = plan_of(budget, threads), plan_of(budget + more, threads)
    assert large.readers >= small.readers
    assert large.pack_bytes >= small.pack_bytes
    if large.pack_bytes == small.pack_bytes:
        assert large.threads >= small.threads


def test_the_default_budget_has_room_for_many_threads() -> None:
    for threads in (1, 2, 8, 32, 50):
        plan = plan_of(GIB, threads)
        assert (plan.threads, plan.readers) == (threads, threads + 1)
        assert plan.window_buffers >= min(threads + 3, 12)
        assert plan.catalog_bytes == GIB // 8


def test_zero_threads_are_one_per_usable_core() -> None:
    assert plan_of(4 * GIB, 0).threads == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("budget", [0, 1, MEMORY_BYTES_MIN - 1])
def test_too_small_a_budget_is_refused(budget: int) -> None:
    with pytest.raises(UsageError, match="too small"):
        StoreOptions(memory_bytes=budget)


def test_a_negative_number_of_threads_is_refused() -> None:
    with pytest.raises(UsageError):
        StoreOptions(threads=-1)
