"""What happens on real mounts; run by `test_mounts.py` in a mount namespace of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from snapstore.backend.base import ObjectKind
from snapstore.backend.posix import PosixBackend
from snapstore.errors import AccessDenied, CapabilityMissing, ObjectNotFound, OutOfSpace, SnapError
from snapstore.testing.contract_objects import read
from snapstore.units import KIB

OLD, NEW = "0a" * 32, "0b" * 32
DATA = bytes(range(256)) * (700 * KIB // 256)


def mount(*arguments: str | Path) -> None:
    subprocess.run(["mount", *arguments], check=True)  # noqa: S603, S607


def must_raise(error: type[SnapError], backend: PosixBackend, name: str, size_bytes: int) -> None:
    with pytest.raises(error) as caught:
        backend.put_new(ObjectKind.PACK, name, [DATA[:size_bytes]])
    assert caught.type is error
    with pytest.raises(ObjectNotFound):
        backend.stat(ObjectKind.PACK, name)


def full(folder: Path) -> None:
    """A disk of 1 MiB and 40 files takes one object of 700 KiB, and goes on when there is room."""
    mount("-t", "tmpfs", "-o", "size=1m,nr_inodes=40", "tmpfs", folder)
    root = folder / "store"
    backend = PosixBackend.create(root)
    backend.put_new(ObjectKind.PACK, OLD, [DATA])
    must_raise(OutOfSpace, backend, NEW, len(DATA))
    assert [*(root / "tmp").iterdir()] == []
    assert read(backend, ObjectKind.PACK, OLD) == DATA
    backend.delete(ObjectKind.PACK, OLD)
    backend.put_new(ObjectKind.PACK, NEW, [DATA])
    backend.delete(ObjectKind.PACK, NEW)
    stored = []
    for number in range(40):
        try:
            backend.put_new(ObjectKind.REF, f"n/@v/{number + 1:08d}", [b"x"])
        except OutOfSpace:
            break
        stored.append(f"n/@v/{number + 1:08d}")
    else:
        raise AssertionError("no limit of files was met")
    assert sorted(info.name for info in backend.list(ObjectKind.REF)) == stored
    assert [*(root / "tmp").iterdir()] == []


def readonly(root: Path) -> None:
    """A store on a read-only mount is read, and says so; one that becomes read-only refuses."""
    backend = PosixBackend.create(root)
    backend.put_new(ObjectKind.PACK, OLD, [DATA])
    assert backend.capabilities.writable
    mount("--bind", root, root)
    mount("-o", "remount,ro,bind", root)
    must_raise(AccessDenied, backend, NEW, 10)
    mounted = PosixBackend(root)
    assert not mounted.capabilities.writable
    assert read(mounted, ObjectKind.PACK, OLD) == DATA
    assert [info.name for info in mounted.list(ObjectKind.PACK)] == [OLD]
    must_raise(AccessDenied, mounted, NEW, 10)


def two_disks(root: Path) -> None:
    """A store whose folders lie on two file systems says that it cannot be written."""
    backend = PosixBackend.create(root)
    (root / "packs").mkdir()
    mount("-t", "tmpfs", "-o", "size=1m", "tmpfs", root / "packs")
    with pytest.raises(CapabilityMissing, match="hard links"):
        backend.put_new(ObjectKind.PACK, OLD, [b"x"])


if __name__ == "__main__":
    {"full": full, "readonly": readonly, "two_disks": two_disks}[sys.argv[1]](Path(sys.argv[2]))
