#!/usr/bin/env python3
"""Generate deterministic synthetic snapshots of a process and its GPU memory.

    gen.py --out DIR [--variant v1|v2|v2-odd] [--seed 1] [--scale 1.0] [--insert-pages N]

Layout (scale 1.0 is about 2.0 GiB):
  pages-1.img   768 MiB of 4 KiB pages: 25 % zero, 10 % text-like and repeated, 65 % bf16 N(0, 0.02)
  pages-2.img   256 MiB, the same mix
  rank0.bin     512 MiB, a sequence of 'tensors' (1 to 32 MiB, sizes not multiples of a page):
  rank1.bin     512 MiB, 60 % bf16 N(0, 0.02), 25 % random fp8 bytes, 15 % zeros
  core-*.img, mm-*.img, fdinfo-*.img, pagemap-*.img, inventory.img, meta.json   small metadata

v2 (same seed) shares about 85 % of its content with v1; DIR.changes.json says what is new:
  pages-1.img   about 14 % of the pages rewritten in place (runs of 1 to 64 pages)
  pages-2.img   a quarter untouched, 4 MiB of new pages inserted (the rest shifts by whole pages),
                10 % of the rest rewritten
  rank0.bin     1,234,512 bytes inserted at 20 % (a shift that is no multiple of a page), about 15 %
                of the bytes in fresh tensors
  rank1.bin     the same tensors in another order, about 17 % of the bytes in fresh tensors

v2-odd is v2, but pages-2.img gets N (default 1027) new pages instead of the 4 MiB, so that the tail
shifts by an odd number of pages. Everything else, the rewritten pages included, is as in v2.

The bytes are a contract: published numbers name the variant, seed and scale only. The order of the
draws from each random generator must therefore never change.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 1 << 20
PAGE = 4096
ODD_PAGES = 1027
RANK0_INSERTED_BYTES = 1_234_512
# Kinds of tensors, and their shares in a rank.
BF16, RANDOM, ZERO = 0, 1, 2
TENSOR_SHARES = (0.60, 0.25, 0.15)
# Kinds of pages; the thresholds are cumulative.
ZERO_PAGES_BELOW, TEXT_PAGES_BELOW = 0.25, 0.35
PIDS = (1, 42, 57, 58, 61)
METADATA_SIZES = (("core", 1500), ("mm", 3800), ("fdinfo", 700), ("fs", 60), ("ids", 40))
WORDS = (
    b"/usr/lib/x86_64-linux-gnu/libtorch_cuda.so ",
    b"self.model.layers.",
    b"weight\x00",
    b"PYTHONPATH=",
    b"\x7fELF\x02\x01\x01\x00",
    b"def forward(self, hidden_states):\n        ",
    b"0123456789abcdef",
    b"\x00\x00\x00\x00\x01\x00\x00\x00",
)

Bytes = npt.NDArray[np.uint8]
Rng = np.random.Generator
Changes = dict[str, dict[str, object]]


@dataclass(frozen=True)
class Job:
    """One variant to write, and where."""

    out: Path
    variant: str
    seed: int
    scale: float
    insert_pages: int

    @property
    def changed(self) -> bool:
        """Whether this variant differs from v1."""
        return self.variant != "v1"

    def rng(self, *key: int) -> Rng:
        """Return the generator of one file, independent of those of the other files."""
        return np.random.default_rng([self.seed, *key])

    def mib(self, size_mib: int) -> int:
        """Return a size of the layout in bytes, at this scale."""
        return int(size_mib * self.scale) * MIB


def bf16(rng: Rng, count: int) -> Bytes:
    """Return `count` values of N(0, 0.02), truncated to bf16, as 2 * count bytes."""
    values = rng.standard_normal(count, dtype=np.float32)
    values *= np.float32(0.02)
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def bf16_pages(rng: Rng, count: int) -> Bytes:
    """Return `count` pages of bf16 values, one page a row."""
    return bf16(rng, count * PAGE // 2).reshape(-1, PAGE)


def text_pages(rng: Rng, count: int) -> Bytes:
    """Return pages drawn from a pool of 64, with a few bytes changed in half of them."""
    pool = np.zeros((64, PAGE), np.uint8)
    pool_rng = np.random.default_rng(12345)
    for row in pool:
        picks = pool_rng.integers(0, len(WORDS), 600)
        text = b"".join(WORDS[pick] for pick in picks)[:PAGE]
        row[: len(text)] = np.frombuffer(text, np.uint8)
    out: Bytes = pool[rng.integers(0, 64, count)].copy()
    half = np.nonzero(rng.random(count) < 0.5)[0]
    for _ in range(4):
        # The value is drawn before the place, as an assignment evaluates its right side first.
        values = rng.integers(0, 256, len(half), dtype=np.uint8)
        out[half, rng.integers(0, PAGE, len(half))] = values
    return out


def pages(rng: Rng, count: int) -> Bytes:
    """Return `count` pages whose kinds come in runs (VMAs), as in a real memory image."""
    out = np.zeros((count, PAGE), np.uint8)
    kinds = np.zeros(count, np.uint8)
    at = 0
    while at < count:
        draw = rng.random()
        kind = 0 if draw < ZERO_PAGES_BELOW else (1 if draw < TEXT_PAGES_BELOW else 2)
        run = min(count - at, 1 + int(rng.exponential(96)))
        kinds[at : at + run] = kind
        at += run
    text = np.nonzero(kinds == 1)[0]
    weights = np.nonzero(kinds == 2)[0]
    out[text] = text_pages(rng, len(text))
    for start in range(0, len(weights), 16384):
        rows = weights[start : start + 16384]
        out[rows] = bf16_pages(rng, len(rows))
    return out


def rewrite_runs(rng: Rng, image: Bytes, target_pages: int, run_pages_max: int) -> int:
    """Rewrite scattered runs of pages in place; return the number of pages written."""
    done = 0
    while done < target_pages:
        run = int(rng.integers(1, run_pages_max + 1))
        start = int(rng.integers(0, len(image) - run))
        image[start : start + run] = bf16_pages(rng, run)
        done += run
    return done


def one_tensor(rng: Rng, size_bytes: int, kind: int) -> Bytes:
    """Return one tensor of the given kind."""
    if kind == BF16:
        return bf16(rng, size_bytes // 2)
    if kind == RANDOM:
        return rng.integers(0, 256, size_bytes, dtype=np.uint8)
    return np.zeros(size_bytes, np.uint8)


def tensors(rng: Rng, total_bytes: int) -> list[Bytes]:
    """Return tensors of 1 to 32 MiB and mixed kinds that add up to `total_bytes`."""
    result = []
    left = total_bytes
    while left > 0:
        size = min(left, int(rng.integers(1 * MIB, 32 * MIB)) // 256 * 256 or 256)
        if left - size < 256 * 1024:
            size = left
        result.append(one_tensor(rng, size, int(rng.choice(3, p=TENSOR_SHARES))))
        left -= size
    return result


def refresh_tensors(rng: Rng, parts: list[Bytes], share: float) -> int:
    """Replace random tensors until more than `share` of the bytes are fresh; return those bytes."""
    total = sum(part.nbytes for part in parts)
    fresh = 0
    for index in rng.permutation(len(parts)):
        if fresh > share * total:
            break
        kind = int(rng.choice(2))
        parts[index] = one_tensor(rng, parts[index].nbytes, kind)
        fresh += parts[index].nbytes
    return fresh


def write(path: Path, *parts: Bytes) -> None:
    """Write arrays one after the other to a new file."""
    with path.open("wb") as file:
        for part in parts:
            file.write(np.ascontiguousarray(part).data)


def write_pages_1(job: Job, changes: Changes) -> None:
    """Write the large page image: rewritten in place in the later variants."""
    image = pages(job.rng(1), job.mib(768) // PAGE)
    if job.changed:
        done = rewrite_runs(job.rng(101), image, int(len(image) * 0.14), 64)
        changes["pages-1.img"] = {"rewritten_bytes": done * PAGE}
    write(job.out / "pages-1.img", image)


def write_pages_2(job: Job, changes: Changes) -> None:
    """Write the small page image: pages inserted and rewritten in the later variants."""
    image = pages(job.rng(2), job.mib(256) // PAGE)
    if not job.changed:
        write(job.out / "pages-2.img", image)
        return
    rng = job.rng(102)
    quarter = len(image) // 4
    # Drawn for v2-odd too, where it is thrown away, so that the pages rewritten below agree.
    inserted = bf16_pages(rng, int(4 * MIB * max(job.scale, 0.05)) // PAGE)
    if job.variant == "v2-odd":
        inserted = bf16_pages(job.rng(202), job.insert_pages)
    tail = image[quarter:].copy()
    done = rewrite_runs(rng, tail, int(len(image) * 0.10), 32)
    write(job.out / "pages-2.img", image[:quarter], inserted, tail)
    changes["pages-2.img"] = {"inserted_bytes": inserted.nbytes, "rewritten_bytes": done * PAGE}


def write_rank0(job: Job, changes: Changes) -> None:
    """Write the first rank: an insertion that is no multiple of a page, and fresh tensors."""
    parts = tensors(job.rng(3), job.mib(512))
    if not job.changed:
        write(job.out / "rank0.bin", *parts)
        return
    rng = job.rng(103)
    fresh = refresh_tensors(rng, parts, 0.15)
    whole = np.concatenate(parts)
    at = int(len(whole) * 0.2) // 2 * 2
    inserted = bf16(rng, RANK0_INSERTED_BYTES // 2)
    write(job.out / "rank0.bin", whole[:at], inserted, whole[at:])
    changes["rank0.bin"] = {"inserted_bytes": inserted.nbytes, "fresh_bytes": fresh}


def write_rank1(job: Job, changes: Changes) -> None:
    """Write the second rank: the tensors in another order, some of them fresh."""
    parts = tensors(job.rng(4), job.mib(512))
    if job.changed:
        rng = job.rng(104)
        fresh = refresh_tensors(rng, parts, 0.17)
        parts = [parts[index] for index in rng.permutation(len(parts))]
        changes["rank1.bin"] = {"reordered": True, "fresh_bytes": fresh}
    write(job.out / "rank1.bin", *parts)


def write_metadata(job: Job) -> None:
    """Write the small files; only the pagemaps, the inventory and meta.json differ by variant."""
    rng = job.rng(105 if job.changed else 5)
    for pid in PIDS:
        for name, size in METADATA_SIZES:
            content = job.rng(6, pid, size).integers(0, 64, size, dtype=np.uint8)
            write(job.out / f"{name}-{pid}.img", content)
        write(job.out / f"pagemap-{pid}.img", rng.integers(0, 8, 60000, dtype=np.uint8))
    inventory = b"\x00" * 32 + job.variant.encode()
    write(job.out / "inventory.img", np.frombuffer(inventory, np.uint8))
    meta = json.dumps({"variant": job.variant, "seed": job.seed})
    (job.out / "meta.json").write_text(meta)


def new_bytes(changes: Changes) -> int:
    """Add up every count of new bytes in the changes of all files."""
    return sum(
        value
        for change in changes.values()
        for key, value in change.items()
        if key.endswith("_bytes") and isinstance(value, int)
    )


def generate(job: Job) -> None:
    """Write one variant, and beside it what changed since v1."""
    job.out.mkdir(parents=True, exist_ok=True)
    changes: Changes = {}
    steps: tuple[Callable[[Job, Changes], None], ...]
    steps = (write_pages_1, write_pages_2, write_rank0, write_rank1)
    for step in steps:
        step(job, changes)
    write_metadata(job)
    total = sum(path.stat().st_size for path in job.out.iterdir())
    if job.changed:
        new = new_bytes(changes)
        shared = round(1 - new / total, 4)
        changes["total"] = {"bytes": total, "new_bytes": new, "shared": shared}
        beside = job.out.with_name(job.out.name + ".changes.json")
        beside.write_text(json.dumps(changes, indent=1))
    print(job.variant, total, json.dumps(changes))


def main() -> None:
    """Read the command line and write the variant it asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", required=True, type=Path, help="directory to write to")
    parser.add_argument("--variant", default="v1", choices=("v1", "v2", "v2-odd"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scale", type=float, default=1.0, help="1.0 is about 2 GiB")
    parser.add_argument("--insert-pages", type=int, help=f"v2-odd only; default {ODD_PAGES}")
    options = parser.parse_args()
    if options.insert_pages is not None and options.variant != "v2-odd":
        parser.error("--insert-pages applies to --variant v2-odd only")
    insert_pages = ODD_PAGES if options.insert_pages is None else options.insert_pages
    generate(Job(options.out, options.variant, options.seed, options.scale, insert_pages))


if __name__ == "__main__":
    main()
