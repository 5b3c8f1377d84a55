"""The large index that the benchmark writes is one that this library would have written."""

from pathlib import Path

import numpy as np
import pytest

from snapstore.backend.posix import PosixBackend
from snapstore.format.index import build_index, parse_index
from snapstore.repository.catalog import MISSING, Catalog
from snapstore.repository.frames import FrameTable
from tools.bench import index as bench


@pytest.mark.parametrize(
    ("chunks", "rows_at_once"),
    [(1, 10), (63, 10), (64, 64), (65, 7), (5000, 300), (40_000, 1 << 18)],
)
def test_it_is_the_same_when_it_is_streamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunks: int, rows_at_once: int
) -> None:
    monkeypatch.setattr(bench, "ROWS_AT_ONCE", rows_at_once)
    packs, frames = bench.tables(chunks, seed=chunks)
    parts = list(bench.chunk_rows(chunks, len(frames), seed=chunks))
    made = bench.write_index(tmp_path / "index", packs, frames, chunks, iter(parts))
    built = build_index(packs, frames, np.concatenate(parts))
    data = (tmp_path / "index").read_bytes()
    assert data == built.to_bytes()
    assert (made.root, made.length) == (built.root, built.length)
    assert len(parse_index(data, root=made.root).chunks) == chunks


def test_half_of_the_ids_are_in_it(tmp_path: Path) -> None:
    made, ids = bench.generate(tmp_path, 3000, 400, 5)
    words = bench.id_words(np.frombuffer(ids.read_bytes(), "V32"))
    backend = PosixBackend(tmp_path / "store")
    with Catalog(FrameTable(), budget_bytes=1 << 20) as catalog:
        # There are no packs: an index alone makes no chunk known.
        assert len(catalog.load(backend).lost) == -(-3000 // (32 * 64))
        assert (catalog.lookup(words).frames == MISSING).all()
    index = parse_index(
        (tmp_path / "store/indexes" / made.root.hex[:2] / made.root.hex).read_bytes()
    )
    listed = {raw.tobytes() for raw in index.chunks["id"]}
    assert sum(raw.tobytes() in listed for raw in np.frombuffer(ids.read_bytes(), "V32")) == 200
