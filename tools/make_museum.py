"""Make the museum: small stores, each broken in one way, with what every command must say to it.

    python -m tools.make_museum

Writes `tests/museum/NAME.tar.gz` and `NAME.json`. Stores hold random ids, so each run makes others:
make an exhibit once and keep it, as a store of its time. An exhibit that is there already is left
alone; remove its two files to make it anew.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import io
import json
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from snapstore.repository.store import init_store
from tools.museum_damage import EXHIBITS

if TYPE_CHECKING:
    from tools.museum_damage import Exhibit

__all__ = ["MUSEUM", "NAME", "OTHER", "main", "make_tree"]

ROOT = Path(__file__).resolve().parents[1]
MUSEUM = ROOT / "tests" / "museum"
NAME = "team/model:v1"
OTHER = "other:v1"
_TIME_NS = 1_790_000_000_000_000_000


def make_tree(folder: Path, *, seed: str = "tree") -> Path:
    """Write the tree that every exhibit holds as `NAME`, the same bytes each time."""
    for path in ("config.json", "rank-0/weights.bin", "rank-1/weights.bin"):
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(hashlib.shake_256(f"{seed} {path}".encode()).digest(1500))
    return folder


def main() -> int:
    """Make what is missing."""
    MUSEUM.mkdir(exist_ok=True)
    for exhibit in EXHIBITS:
        if not (MUSEUM / f"{exhibit.name}.tar.gz").exists():
            _make(exhibit)
            print(f"made {exhibit.name}")
        (MUSEUM / f"{exhibit.name}.json").write_text(_describe(exhibit), "utf-8")
    return 0


def _make(exhibit: Exhibit) -> None:
    with tempfile.TemporaryDirectory(prefix="snapstore-museum-") as name:
        folder = Path(name)
        root = folder / "store"
        with init_store(str(root)) as store:
            # The other first: then no index knows chunks of both.
            store.push(make_tree(folder / "other", seed="other"), OTHER)
            before = {path for path in root.rglob("*") if path.is_file()}
            store.push(make_tree(folder / "tree"), NAME)
        _anonymise(root)
        new = sorted(path for path in root.rglob("*") if path.is_file() and path not in before)
        exhibit.damage(root, new)
        (MUSEUM / f"{exhibit.name}.tar.gz").write_bytes(_packed(root))
        shutil.rmtree(root)


def _anonymise(root: Path) -> None:
    """Let leases not say on which machine an exhibit was made."""
    for path in (root / "leases").rglob("*"):
        if path.is_file():
            value = json.loads(path.read_bytes()) | {"holder": "museum"}
            path.write_text(json.dumps(value, sort_keys=True, separators=(",", ":")), "utf-8")


def _describe(exhibit: Exhibit) -> str:
    value = {
        "broken": exhibit.broken,
        "commands": [dataclasses.asdict(one) for one in exhibit.commands],
    }
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _packed(root: Path) -> bytes:
    """Pack a directory, sorted and without times or owners."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in sorted(root.rglob("*")):
            info = archive.gettarinfo(path, path.relative_to(root).as_posix())
            info.uid = info.gid = 0
            info.uname = info.gname = ""
            info.mtime = _TIME_NS // 10**9
            if path.is_file():
                with path.open("rb") as file:
                    archive.addfile(info, file)
            else:
                archive.addfile(info)
    return gzip.compress(plain.getvalue(), mtime=0)


if __name__ == "__main__":
    sys.exit(main())
