"""What the ways of cutting cost and save: the table behind decision 0002 on chunking.

    .venv/bin/python -m tools.bench.chunking --data DIR [--dumps OLD NEW]...

`DIR` holds `v1`, `v2` and `v2-odd` as `tools/bench/gen.py` makes them; each pair of dumps is two
CRIU image directories of one process. Prints Markdown: bytes of the second that the first lacks.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import xxhash

from snapstore.chunking.content import ContentCutter
from snapstore.chunking.pages import PageCutter
from snapstore.source.criu_pagemap import PageFlag, parse_pagemap
from snapstore.units import KIB, MIB, PAGE_BYTES

if TYPE_CHECKING:
    from snapstore.chunking.base import Cutter

ByteArray = npt.NDArray[np.uint8]
Spans = Iterable[tuple[int, int]]
Scheme = Callable[[ByteArray, list[int]], Spans]

_WINDOW_BYTES = 8 * MIB


def by_cutter(cutter: Cutter) -> Scheme:
    """Cut as the store does."""

    def cut(data: ByteArray, _starts: list[int]) -> Iterator[tuple[int, int]]:
        carried = 0
        for base in range(0, len(data), _WINDOW_BYTES):
            window = data[base : base + _WINDOW_BYTES]
            final = base + _WINDOW_BYTES >= len(data)
            cut = cutter.cut(cutter.analyse(window), carried=carried, final=final)
            carried = cut.carried
            for start, end, zero in zip(
                cut.starts.tolist(), cut.ends.tolist(), cut.zero.tolist(), strict=True
            ):
                if not zero:
                    yield base + start, base + end

    return cut


def by_grid(pages: int) -> Scheme:
    """Cut every so many pages, starting anew at each of `starts` and after zero pages."""

    def cut(data: ByteArray, starts: list[int]) -> Iterator[tuple[int, int]]:
        anew = set(starts)
        zero = ~data[: len(data) // PAGE_BYTES * PAGE_BYTES].reshape(-1, PAGE_BYTES).any(axis=1)
        begin = -1
        for page, is_zero in enumerate(np.append(zero, True).tolist()):
            full = begin >= 0 and page - begin == pages
            if begin >= 0 and (is_zero or full or page in anew):
                yield begin * PAGE_BYTES, page * PAGE_BYTES
                begin = -1
            if begin < 0 and not is_zero:
                begin = page

    return cut


PAGE_SCHEMES: dict[str, Scheme] = {
    **{f"grid {4 * pages} KiB": by_grid(pages) for pages in (1, 2, 4, 16)},
    **{
        f"page CDC, mean {4 * mean} KiB, max {4 * limit} KiB": by_cutter(PageCutter(mean, limit))
        for mean, limit in ((2, 8), (4, 16), (8, 32), (16, 64))
    },
}
TENSOR_SCHEMES: dict[str, Scheme] = {
    "grid 4 KiB": by_grid(1),
    **{
        f"byte CDC, mean {mean} KiB": by_cutter(ContentCutter(mean_bytes=mean * KIB))
        for mean in (16, 64, 128, 256, 512)
    },
}


def compare(
    scheme: Scheme, old: tuple[ByteArray, list[int]], new: tuple[ByteArray, list[int]]
) -> str:
    """Count what the second has that the first lacks, as cells of a table row."""
    known = {xxhash.xxh3_64_intdigest(old[0][a:b].data) for a, b in scheme(*old)}
    chunks = new_bytes = total = 0
    for start, end in scheme(*new):
        chunks += 1
        total += end - start
        name = xxhash.xxh3_64_intdigest(new[0][start:end].data)
        if name not in known:
            known.add(name)
            new_bytes += end - start
    return f"{chunks} | {total / max(chunks, 1) / KIB:.1f} | {new_bytes / 1e6:.1f}"


def table(
    title: str, schemes: dict[str, Scheme], old: list[int], new: list[int], paths: tuple[Path, Path]
) -> None:
    """Print one table."""
    print(f"\n### {title}\n\n| scheme | chunks | mean KiB | new MB |\n|---|---|---|---|")
    loaded = [np.fromfile(path, np.uint8) for path in paths]
    for name, scheme in schemes.items():
        print(f"| {name} | {compare(scheme, (loaded[0], old), (loaded[1], new))} |", flush=True)


def entry_starts(directory: Path, *, merged: bool) -> tuple[Path, list[int]]:
    """Find the pages image of a dump and the pages at which its pagemap entries start.

    CRIU splits a region into several entries where its pipes were full; `merged` joins those
    that continue at the next address.
    """
    pagemap_path = next(iter(sorted(directory.glob("pagemap-[0-9]*.img"))))
    pagemap = parse_pagemap(pagemap_path.read_bytes())
    starts: list[int] = []
    page, following = 0, -1
    for entry in pagemap.entries():
        if entry.flags & PageFlag.PRESENT:
            if not merged or entry.vaddr != following:
                starts.append(page)
            page += entry.nr_pages
            following = entry.vaddr + entry.nr_pages * PAGE_BYTES
    return directory / f"pages-{pagemap.pages_id}.img", starts


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--dumps", type=Path, nargs=2, action="append", default=[])
    options = parser.parse_args()
    data: Path = options.data
    for name, variant, schemes in (
        ("pages-1.img", "v2", PAGE_SCHEMES),
        ("pages-2.img", "v2", PAGE_SCHEMES),
        ("pages-2.img", "v2-odd", PAGE_SCHEMES),
        ("rank0.bin", "v2", TENSOR_SCHEMES),
        ("rank1.bin", "v2", TENSOR_SCHEMES),
    ):
        paths = (data / "v1" / name, data / variant / name)
        table(f"{name}, v1 to {variant}", schemes, [], [], paths)
    for old, new in options.dumps:
        for merged in (False, True):
            old_path, old_starts = entry_starts(old, merged=merged)
            new_path, new_starts = entry_starts(new, merged=merged)
            words = "joined" if merged else "as they are"
            title = f"dump {old.name} to {new.name}, pagemap entries {words}"
            table(title, PAGE_SCHEMES, old_starts, new_starts, (old_path, new_path))


if __name__ == "__main__":
    main()
