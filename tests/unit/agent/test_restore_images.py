"""Images that CRIU loads itself are read ahead by threads, and given in order."""

import contextlib
import random
import threading
from pathlib import Path

import pytest

import snapstore
from snapagent.restore_images import _read_ahead
from snapstore.errors import IntegrityError

pytestmark = pytest.mark.slow

MIB = 1 << 20


@pytest.fixture
def data(rng: random.Random) -> bytes:
    return rng.randbytes(24 * MIB)


@pytest.fixture
def store(tmp_path: Path, data: bytes) -> snapstore.Store:
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "pages-1.img").write_bytes(data)
    store = snapstore.init_store(f"file://{tmp_path}/store")
    store.push(tmp_path / "dir", "test/pages:v1")
    return store


def test_ranges_come_in_order(store: snapstore.Store, data: bytes) -> None:
    file = store.snapshot("test/pages:v1").open("pages-1.img")
    ranges = [(0, 9 * MIB + 4096), (10 * MIB, 4096), (11 * MIB, 13 * MIB)]
    expected = b"".join(data[at : at + length] for at, length in ranges)
    assert b"".join(bytes(piece) for piece in _read_ahead(file, ranges)) == expected
    with contextlib.closing(_read_ahead(file, ranges)) as read:
        assert next(read) == data[: 8 * MIB]
    assert not [one for one in threading.enumerate() if one.name.startswith("snapagent-ahead")]
    store.close()


def test_damage_is_told(store: snapstore.Store, tmp_path: Path) -> None:
    for pack in (tmp_path / "store" / "packs").rglob("*"):
        if pack.is_file():
            raw = bytearray(pack.read_bytes())
            raw[len(raw) // 2] ^= 1
            pack.chmod(0o600)
            pack.write_bytes(raw)
    file = store.snapshot("test/pages:v1").open("pages-1.img")
    with pytest.raises(IntegrityError):
        for _ in _read_ahead(file, [(0, 24 * MIB)]):
            pass
    store.close()
