"""Directories that others could have prepared are refused, and so are settings that cannot be."""

import os
from pathlib import Path

import msgspec
import pytest

from snapstore.cache.directory import CacheDirectory
from snapstore.cache.node_cache import NodeCache
from snapstore.errors import AccessDenied, PolicyRefused, SnapError, UsageError
from snapstore.units import GIB, MIB
from tests.support.caches import tmpfs

is_root = os.geteuid() == 0


def refused(path: Path, kind: type[SnapError], words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        NodeCache(path)
    assert caught.value.next_step


def test_a_fresh_directory_is_made_for_its_user_alone(tmp_path: Path) -> None:
    """Proves: N7."""
    with NodeCache(tmp_path / "a" / "cache") as cache:
        assert cache.directory.stat().st_mode & 0o7777 == 0o700
        assert not cache.has_decoded
    NodeCache(tmp_path / "a" / "cache").close()


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_writable_by_others(tmp_path: Path, mode: int) -> None:
    """Proves: N7."""
    path = tmp_path / "cache"
    path.mkdir()
    path.chmod(mode)
    refused(path, PolicyRefused, "can be written by others")


def test_symbolic_link(tmp_path: Path) -> None:
    """Proves: N7."""
    (tmp_path / "real").mkdir()
    (tmp_path / "cache").symlink_to("real")
    refused(tmp_path / "cache", PolicyRefused, "symbolic link")
    (tmp_path / "dangling").symlink_to("nothing")
    refused(tmp_path / "dangling", PolicyRefused, "symbolic link")
    NodeCache.init(tmp_path / "real").close()
    (tmp_path / "real" / "packs").rmdir()
    (tmp_path / "real" / "packs").symlink_to(tmp_path)
    refused(tmp_path / "real", PolicyRefused, "symbolic link")


@pytest.mark.skipif(not is_root, reason="only root can give files away")
def test_of_another_owner(tmp_path: Path) -> None:
    """Proves: N7."""
    path = tmp_path / "cache"
    path.mkdir(mode=0o700)
    os.chown(path, 12345, 12345)
    refused(path, PolicyRefused, "belongs to user 12345")


def test_full_of_other_things(tmp_path: Path) -> None:
    """Proves: N7."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "thesis.tex").write_text("")
    refused(tmp_path / "cache", UsageError, "thesis.tex")
    with pytest.raises(UsageError, match=r"thesis\.tex"):
        NodeCache.init(tmp_path / "cache", budget_bytes=GIB)
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", UsageError, "no directory")


@pytest.mark.skipif(not is_root, reason="only root can give files away")
def test_a_file_of_another_owner_is_not_used(tmp_path: Path) -> None:
    """Proves: N7."""
    directory = CacheDirectory.open(tmp_path)
    (tmp_path / "theirs").write_bytes(b"x")
    os.chown(tmp_path / "theirs", 12345, -1)
    (tmp_path / "link").symlink_to("theirs")
    for name in ("theirs", "link"):
        with pytest.raises(OSError):  # noqa: PT011 - of several kinds
            directory.open_file(name)
    directory.close()


@pytest.mark.parametrize(
    "settings",
    [
        b"",
        b"{}garbage",
        b'{"version": 2}',
        b'{"bytes": -1}',
        b'{"memory": "relative", "memory_bytes": 5}',
        b'{"memory": "/dev/shm/x"}',
        b'{"memory_bytes": 5}',
        b'{"unknown": 5}',
        b'{"bytes": "many"}',
        b" " * 70_000,
    ],
)
def test_settings_that_cannot_be(tmp_path: Path, settings: bytes) -> None:
    path = tmp_path / "cache"
    NodeCache(path).close()
    (path / "cache.json").write_bytes(settings)
    refused(path, UsageError, "cache")
    # And they are mended as the message says.
    with NodeCache.init(path, budget_bytes=MIB) as cache:
        assert cache.config.bytes == MIB


def test_init_changes_what_it_is_told(tmp_path: Path, memory_directory: Path) -> None:
    path = tmp_path / "cache"
    with NodeCache.init(
        path, budget_bytes=5 * MIB, memory=memory_directory, memory_budget_bytes=7 * MIB
    ) as cache:
        assert cache.has_decoded
    with NodeCache(path) as cache:
        assert (cache.config.bytes, cache.config.memory_bytes) == (5 * MIB, 7 * MIB)
        assert cache.config.memory == str(memory_directory)
        assert memory_directory.stat().st_mode & 0o777 == 0o700
    with NodeCache.init(path) as cache:
        assert (cache.config.bytes, cache.config.memory) == (5 * MIB, None)
    settings = msgspec.json.decode((path / "cache.json").read_bytes())
    assert settings == {"version": 1, "bytes": 5 * MIB, "memory": None, "memory_bytes": 0}


def test_decoded_files_have_to_be_in_memory(tmp_path: Path) -> None:
    NodeCache.init(tmp_path / "cache").close()
    settings = {"memory": f"/proc/{os.getpid()}/fd", "memory_bytes": MIB}
    (tmp_path / "cache" / "cache.json").write_bytes(msgspec.json.encode(settings))
    refused(tmp_path / "cache", UsageError, "not in memory")


@pytest.mark.parametrize("name", ["/run/a\0b", "/run/a\udcffb"])
def test_a_directory_in_memory_that_settings_cannot_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="cannot be called"):
        NodeCache.init(tmp_path / "cache", memory=name, memory_budget_bytes=MIB)
    settings = b'{"memory": "/dev/shm/a\\u0000b", "memory_bytes": 5}'
    (tmp_path / "cache" / "cache.json").write_bytes(settings)
    refused(tmp_path / "cache", UsageError, "cannot be called")


def test_init_that_is_refused_leaves_the_settings_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    NodeCache.init(path, budget_bytes=5 * MIB).close()
    # The one is everybody's, the other not in memory.
    for memory, kind in ((Path("/dev/shm"), PolicyRefused), (Path("/"), UsageError)):  # noqa: S108
        with pytest.raises(kind):
            NodeCache.init(path, memory=memory, memory_budget_bytes=MIB)
        with NodeCache(path) as cache:
            assert (cache.config.bytes, cache.config.memory) == (5 * MIB, None)


@pytest.mark.skipif(is_root, reason="root may write anywhere")
def test_no_permission(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o500)
    refused(tmp_path / "cache", AccessDenied, "cannot use")


def test_a_fifo_in_place_of_the_settings_is_no_wait(tmp_path: Path) -> None:
    NodeCache(tmp_path / "cache").close()
    (tmp_path / "cache" / "cache.json").unlink(missing_ok=True)
    os.mkfifo(tmp_path / "cache" / "cache.json", 0o600)
    with pytest.raises(SnapError, match="no file of this user"):
        NodeCache(tmp_path / "cache")


@pytest.mark.parametrize(
    ("option", "has_large"),
    [
        ("mode=700", False),
        ("huge=never", False),
        ("huge=advise", False),
        ("huge=within_size", True),
        ("huge=always", True),
    ],
)
def test_large_pages_are_what_it_was_mounted_with(
    tmp_path: Path, option: str, *, has_large: bool
) -> None:
    with tmpfs(tmp_path / "memory", f"size=4m,{option}") as memory:
        made = NodeCache.init(
            tmp_path / "cache", budget_bytes=0, memory=memory / "d", memory_budget_bytes=MIB
        )
        with made:
            assert made.has_large_pages == has_large
    with NodeCache.init(tmp_path / "other", budget_bytes=MIB) as other:
        assert not other.has_large_pages
