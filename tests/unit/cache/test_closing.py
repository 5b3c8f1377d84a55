"""A cache that is closed while threads still use it: no number of a closed descriptor is used."""

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from snapstore.backend.base import ObjectKind
from snapstore.backend.memory import MemoryBackend
from snapstore.cache.directory import CacheDirectory
from snapstore.cache.handle import Handle
from snapstore.cache.node_cache import NodeCache
from snapstore.units import GIB, KIB, PAGE_BYTES
from tests.support.caches import ByteContent
from tests.support.samples import random_bytes

NAME = "ab" * 32
SIZE = 300 * KIB


def test_the_last_user_closes() -> None:
    handle = Handle(os.open("/", os.O_RDONLY))
    with handle.used() as fd, handle.used():
        handle.close()
        assert os.path.samestat(os.fstat(fd), os.stat("/"))  # noqa: PTH116 - beside a descriptor
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    with pytest.raises(OSError, match="was closed"), handle.used():
        pass
    handle.close()


def test_a_directory_that_is_closed_uses_no_number(tmp_path: Path) -> None:
    """Goal: not even a number that is another file's by then.

    Method: close a directory within one of its own methods, take the number that it had if that is
    free, and let the method go on.
    """
    for name in ("one", "two"):
        (tmp_path / name).write_bytes(b"x")
    directory = CacheDirectory.open(tmp_path)
    looks = directory._looks()  # the middle of `occupants`
    next(looks)
    directory.close()
    with contextlib.ExitStack() as others:
        for _ in range(8):
            others.callback(os.close, os.open("/proc", os.O_RDONLY))
        assert len(list(looks)) == 1
        with pytest.raises(OSError, match="was closed"):
            directory.open_file("one")


class _Closing(MemoryBackend):
    """Closes something in the middle of every read."""

    close: Callable[[], None]

    def get_range(self, kind: ObjectKind, name: str, offset: int, into: memoryview) -> None:
        """See `Backend.get_range`."""
        self.close()
        super().get_range(kind, name, offset, into)


def test_a_read_of_packs_ends_well(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = random_bytes(SIZE, 1).tobytes()
    store = _Closing()
    store.put_new(ObjectKind.PACK, NAME, [data])
    cache = NodeCache.init(tmp_path / "cache", budget_bytes=GIB)
    store.close = cache.close  # type: ignore[method-assign]
    found = bytearray(SIZE)
    with caplog.at_level(logging.DEBUG, "snapstore.cache"):
        cache.backend(store, "0" * 32).get_range(ObjectKind.PACK, NAME, 0, memoryview(found))
    assert bytes(found) == data
    assert caplog.messages == []


def test_what_is_filled_meanwhile_is_kept(tmp_path: Path, memory_directory: Path) -> None:
    """Goal: a file that is closed while it is filled is closed after that, and keeps its bytes."""
    data = random_bytes(SIZE, 1).tobytes()
    content = ByteContent(data, pages_per_cell=SIZE // PAGE_BYTES)
    with NodeCache.init(
        tmp_path / "cache", budget_bytes=0, memory=memory_directory, memory_budget_bytes=GIB
    ) as cache:
        file = cache.open_content(content)
        fetch = content.fetch

        def fetch_and_close(offset: int, into: memoryview) -> None:
            file.close()
            fetch(offset, into)

        content.fetch = fetch_and_close  # type: ignore[method-assign]
        found = bytearray(SIZE)
        file.read_into(0, found)
        assert bytes(found) == data
        assert file.fd == -1
        with pytest.raises(OSError, match="closed"):
            file.hold()
        with cache.open_content(content) as again:
            assert again.filled(0, SIZE)
    assert max(content.fetched) == 1


def test_a_read_beside_a_close_has_its_descriptor(
    tmp_path: Path, memory_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: a read that has begun never reads from another file.

    Method: close the file right before the system call, and take numbers that are free by then.
    """
    data = random_bytes(SIZE, 1).tobytes()
    with contextlib.ExitStack() as opened:
        cache = opened.enter_context(
            NodeCache.init(
                tmp_path / "cache", budget_bytes=0, memory=memory_directory, memory_budget_bytes=GIB
            )
        )
        file = cache.open_content(ByteContent(data, pages_per_cell=SIZE // PAGE_BYTES))
        file.read_into(0, bytearray(SIZE))
        preadv = os.preadv

        def close_first(fd: int, into: object, offset: int) -> int:
            file.close()
            for _ in range(4):
                opened.callback(os.close, os.open("/dev/zero", os.O_RDONLY))
            return preadv(fd, into, offset)  # type: ignore[arg-type]

        monkeypatch.setattr(os, "preadv", close_first)
        found = bytearray(SIZE)
        file.read_into(0, found)
        assert bytes(found) == data
        assert file.fd == -1
