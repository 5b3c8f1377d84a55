"""What a cache directory says of itself: budgets, and where its part in memory is."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from snapstore.errors import UsageError
from snapstore.units import GIB, KIB

if TYPE_CHECKING:
    from snapstore.cache.directory import CacheDirectory

__all__ = ["CONFIG_NAME", "CacheConfig", "check_config", "read_config", "write_config"]

CONFIG_NAME = "cache.json"
_CONFIG_BYTES_MAX = 64 * KIB
_VERSION = 1
_FREE_SHARE = 2
"""By default stored bytes take half of what is free when the cache is made."""


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a node's cache, for all processes that use it.

    Attributes:
        version: Of this file.
        bytes: What stored ranges may take on disk; 0 keeps none.
        memory: A directory on tmpfs or hugetlbfs for decoded files; None keeps none.
        memory_bytes: What those may take.
    """

    version: int = _VERSION
    bytes: int = 0
    memory: str | None = None
    memory_bytes: int = 0


def read_config(directory: CacheDirectory) -> CacheConfig:
    """Read the settings; an empty directory gets default ones.

    Raises:
        UsageError: It holds other things, or its settings cannot be meant.
        OSError: It cannot be read or written.
    """
    with contextlib.suppress(FileNotFoundError):
        return _read(directory)
    _require_empty(directory)
    default = CacheConfig(bytes=directory.free_bytes() // _FREE_SHARE // GIB * GIB)
    # Whoever was first has made it.
    with contextlib.suppress(FileExistsError):
        write_config(directory, default, replace=False)
    return _read(directory)


def require_cache(directory: CacheDirectory) -> None:
    """Raise `UsageError` if nobody has made a cache of it."""
    names = directory.names()
    if CONFIG_NAME not in names:
        _require_empty(directory)
        raise UsageError(
            f"there is no cache at {directory.path}",
            next_step=f"name another one, or make it: snapstore cache init {directory.path}",
        )


def write_config(directory: CacheDirectory, config: CacheConfig, *, replace: bool) -> None:
    """Write the settings.

    Raises:
        UsageError: They cannot be meant, or the directory holds other things.
        FileExistsError: There are some, which are not to be replaced.
        OSError: They cannot be written.
    """
    check_config(directory, config)
    if CONFIG_NAME not in directory.names():
        _require_empty(directory)
    data = msgspec.json.format(msgspec.json.encode(config, order="sorted"))
    directory.write(CONFIG_NAME, data + b"\n", replace=replace)


def _read(directory: CacheDirectory) -> CacheConfig:
    data = directory.read(CONFIG_NAME, _CONFIG_BYTES_MAX)
    try:
        config = msgspec.json.decode(data[:_CONFIG_BYTES_MAX], type=CacheConfig)
    except msgspec.MsgspecError as error:
        raise UsageError(
            f"{directory.path / CONFIG_NAME} is not what a cache says of itself: {error}",
            next_step=f"write it again: snapstore cache init {directory.path}",
        ) from error
    check_config(directory, config)
    return config


def check_config(directory: CacheDirectory, config: CacheConfig) -> None:
    """Raise `UsageError` for settings that cannot be meant."""
    wrong = None
    if config.version != _VERSION:
        wrong = f"version {config.version} is not known"
    elif config.bytes < 0 or config.memory_bytes < 0:
        wrong = "a budget cannot be negative"
    elif config.memory is not None and not Path(config.memory).is_absolute():
        wrong = f"the directory in memory has to be absolute, not {config.memory!r}"
    elif config.memory is not None and not _is_writable_text(config.memory):
        wrong = f"the directory in memory cannot be called {config.memory!r}"
    elif (config.memory is None) != (config.memory_bytes == 0):
        wrong = "a directory in memory and its budget go together"
    if wrong is not None:
        raise UsageError(
            f"cannot use the cache at {directory.path}: {wrong}",
            next_step="snapstore cache init DIR --bytes SIZE --memory DIR --memory-bytes SIZE",
        )


def _is_writable_text(path: str) -> bool:
    """Whether a path can be in this file, which is UTF-8, and in a system call."""
    try:
        return b"\0" not in path.encode()
    except UnicodeEncodeError:
        return False


def _require_empty(directory: CacheDirectory) -> None:
    # What others are writing at this moment begins with a dot.
    foreign = sorted(name for name in directory.names() if not name.startswith(".part-"))
    if foreign and foreign != [CONFIG_NAME]:
        raise UsageError(
            f"{directory.path} holds other things, such as {foreign[0]!r}",
            next_step="give the cache a directory of its own",
        )
