"""Files that arrive interleaved in any way are the files that a push has: bytes and chunks."""

import contextlib
import dataclasses
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import snapstore
from snapstore.format.rank import RankNumber
from snapstore.options import MEMORY_BYTES_MIN
from snapstore.repository.memory import MemoryPlan
from snapstore.units import KIB
from tests.support.samples import random_bytes, text

pytestmark = pytest.mark.slow

_numbers = itertools.count()

Run = tuple[int, str, int]
"""Bytes, kind and seed."""

lengths = st.one_of(
    st.sampled_from([0, 1, 4096, 32 * KIB, 64 * KIB - 1, 64 * KIB, 64 * KIB + 1, 300 * KIB]),
    st.integers(0, 400 * KIB),
)
runs = st.lists(
    st.tuples(lengths, st.sampled_from(["random", "text", "zeros"]), st.integers(0, 5)), max_size=6
)
names = ["pages-1.img", "pages-2.img", "weights.bin", "log", "core-1.img", "rank-0/a.bin"]
files = st.dictionaries(st.sampled_from(names), runs, max_size=len(names))


def bytes_of(content: list[Run]) -> bytes:
    made = {"random": random_bytes, "text": text, "zeros": lambda size, _: np.zeros(size, np.uint8)}
    return b"".join(made[kind](size, seed).tobytes() for size, kind, seed in content)


@contextlib.contextmanager
def new_store() -> Iterator[snapstore.Store]:
    options = snapstore.StoreOptions(memory_bytes=MEMORY_BYTES_MIN, threads=2)
    with snapstore.init_store(f"memory://writing-{next(_numbers)}", options) as store:
        yield store


def rank_of(name: str) -> RankNumber:
    return 0 if name.startswith("rank-0/") else "host"


def write_interleaved(
    store: snapstore.Store, contents: dict[str, bytes], turns: list[tuple[int, int]]
) -> snapstore.PushResult:
    """Write some files, taking turns: which of those that are open, and how many bytes."""
    with store.begin("written:v1") as writer:
        opened = {name: writer.open_file(rank_of(name), name, mtime_ns=0) for name in contents}
        left = {name: memoryview(data) for name, data in contents.items()}
        for choice, count in itertools.cycle(turns):
            if not left:
                return writer.commit()
            name = list(left)[choice % len(left)]
            opened[name].write(left[name][:count])
            left[name] = left[name][count:]
            if not left[name].nbytes:
                opened[name].close()
                del left[name]
    raise AssertionError


@settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    files,
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 200 * KIB)), min_size=1, max_size=8),
    st.sampled_from([0, 1]),
)
def test_any_interleaving_is_what_a_push_stores(
    monkeypatch: pytest.MonkeyPatch,
    made: dict[str, list[Run]],
    turns: list[tuple[int, int]],
    in_place: int,
) -> None:
    """Goal: however files are interleaved, they read back, and have the manifests of a push.

    Method: write them in turns with the smallest budget, with one window to be filled in place or
    none, so that large files hand on parts; read them; pull, and push into a store of its own.
    Equal rank ids mean equal trees, streams and chunk tables.
    """
    planned = MemoryPlan.for_arrivals.__func__  # type: ignore[attr-defined]
    contents = {name: bytes_of(content) for name, content in made.items()}
    with monkeypatch.context() as patch, new_store() as store, new_store() as other:
        patch.setattr(
            MemoryPlan,
            "for_arrivals",
            classmethod(lambda *args: _filling(planned(*args), in_place)),
        )
        written = write_interleaved(store, contents, turns)
        snapshot = store.snapshot("written:v1")
        for name, data in contents.items():
            with snapshot.open(name) as file:
                assert file.read() == data
        with tempfile.TemporaryDirectory(prefix="snapstore-") as folder:
            store.pull("written:v1", Path(folder) / "tree")
            again = store.push(Path(folder) / "tree", "again:v1")
            pushed = other.push(Path(folder) / "tree", "pushed:v1")
    assert again.ingest.new_bytes == 0
    assert written.ranks == pushed.ranks == again.ranks


def _filling(plan: MemoryPlan, in_place: int) -> MemoryPlan:
    return dataclasses.replace(plan, windows_filled=in_place, held_bytes=1024 * KIB)
