"""Write `format_spec/vectors` anew: `python -m tools.make_vectors [DIRECTORY]`.

The cases come from `tools/vectors`, which encodes by itself; the output is the same on every
machine, and a test compares it with what is checked in.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tools.vectors import binaries, documents, tables, trees

if TYPE_CHECKING:
    from tools.vectors.encode import Case

VECTORS = Path(__file__).parents[1] / "format_spec" / "vectors"


def vectors() -> dict[str, str]:
    """All files by their path below `format_spec/vectors`."""
    valid = documents.valid_documents() | {"tree": trees.valid_trees()}
    hostile = documents.hostile_documents() | {"tree": trees.hostile_trees()}
    trailers_valid, trailers_hostile = binaries.trailers()
    valid |= {
        "envelope": binaries.valid_envelopes(),
        "pack-footer": binaries.valid_footers(),
        "pack-trailer": trailers_valid,
        "index": tables.valid_indexes(),
        "index-bucket": tables.buckets(),
        "rank": tables.valid_ranks(),
        "layout": tables.valid_layouts(),
        **documents.transitions(),
    }
    hostile |= {
        "envelope": binaries.hostile_envelopes(),
        "pack-footer": binaries.hostile_footers(),
        "pack-trailer": trailers_hostile,
        "index": tables.hostile_indexes(),
        "rank": tables.hostile_ranks(),
        "layout": tables.hostile_layouts(),
    }
    files = {f"{kind}/valid.json": _file(kind, cases) for kind, cases in valid.items()}
    return files | {f"hostile/{kind}.json": _file(kind, cases) for kind, cases in hostile.items()}


def _file(kind: str, cases: list[Case]) -> str:
    names = [case["name"] for case in cases]
    assert len(set(names)) == len(names), [name for name in names if names.count(name) > 1]
    # One case a line: short files and readable differences.
    lines = ",\n".join(json.dumps(case, ensure_ascii=True) for case in cases)
    return f'{{"object": "{kind}", "cases": [\n{lines}\n]}}\n'


def main() -> None:
    """Write all files."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else VECTORS
    for path, content in vectors().items():
        file = target / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    print(f"{len(vectors())} files in {target}")


if __name__ == "__main__":
    main()
