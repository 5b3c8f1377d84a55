"""Storage ports: opaque bytes by kind and name. Nothing here parses what it stores."""

from __future__ import annotations

import urllib.parse
from pathlib import Path
from typing import TYPE_CHECKING

from snapstore.backend.memory import MemoryBackend
from snapstore.backend.posix import PosixBackend
from snapstore.clock import SystemClock
from snapstore.errors import UsageError

if TYPE_CHECKING:
    from snapstore.backend.base import Backend
    from snapstore.clock import Clock

__all__ = ["check_store_url", "open_backend"]


def open_backend(
    url: str, *, create: bool = False, readonly: bool = False, clock: Clock | None = None
) -> Backend:
    """Open the storage at `file:///absolute/path`, a plain path, `s3://bucket/prefix`, `memory://name`.

    With `create` the place is made if it is missing (idempotent); a bucket must exist, and is tried
    out. Readers of a store should ask for `readonly`, although no backend writes anything before it
    is told to.

    Raises:
        UsageError: The URL has another scheme or cannot be meant.
        StoreNotFound: There is no such place.
    """
    if create and readonly:
        raise UsageError(f"cannot create a store that is open for reading only: {url}")
    scheme, separator, rest = url.partition("://")
    if scheme == "memory" and separator:
        _require_name(rest)
        return MemoryBackend.named(rest, create=create, readonly=readonly)
    clock = clock or SystemClock()
    if scheme == "s3" and separator:
        return _open_s3(url, clock, create=create, readonly=readonly)
    root = _path_of(url)
    if create:
        return PosixBackend.create(root, clock=clock)
    return PosixBackend(root, readonly=readonly, clock=clock)


def check_store_url(url: str) -> None:
    """Check that there can be a store at a URL or path, without looking whether there is one.

    Raises:
        UsageError: It has another scheme or cannot be meant.
    """
    scheme, separator, rest = url.partition("://")
    if scheme == "memory" and separator:
        _require_name(rest)
    elif scheme == "s3" and separator:
        from snapstore.backend.s3_location import S3Location

        S3Location.parse(url)
    else:
        _path_of(url)


def _require_name(name: str) -> None:
    if not name:
        raise UsageError("a store in memory needs a name", next_step="write memory://NAME")


def _open_s3(url: str, clock: Clock, *, create: bool, readonly: bool) -> Backend:
    # Loading botocore takes as long as all the rest, and most commands do without.
    from snapstore.backend.s3 import S3Backend
    from snapstore.backend.s3_location import S3Location

    backend = S3Backend(S3Location.parse(url), clock, readonly=readonly)
    if create:
        try:
            backend.probe()
        except BaseException:
            backend.close()
            raise
    return backend


def _path_of(url: str) -> Path:
    path = _path_of_file_url(url) if url.startswith("file:") else url
    if not path or "\0" in path:
        raise UsageError(f"not a path: {url[:120]!r}")
    scheme, separator, _ = path.partition("://")
    if path is url and url.startswith(("s3:", "s3//")):
        raise UsageError(f"not an S3 URL: {url[:120]!r}", next_step="write s3://BUCKET/PREFIX")
    if separator and "/" not in scheme and path is url:
        raise UsageError(
            f"no storage of scheme {scheme[:40]!r} is known",
            next_step="use file://, s3:// or memory://",
        )
    if path is not url:
        return Path(path)
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:
        raise UsageError(f"not a path: {url[:120]!r}: {error}") from error


def _path_of_file_url(url: str) -> str:
    rest = url.removeprefix("file:")
    path = rest.removeprefix("//localhost") if rest.startswith("//localhost/") else rest
    path = path.removeprefix("//")
    if not rest.startswith("//") or not path.startswith("/"):
        raise UsageError(f"not a file URL: {url[:120]!r}", next_step="write file:///absolute/path")
    if "?" in path or "#" in path:
        raise UsageError(
            f"a file URL has no query and no fragment: {url[:120]!r}",
            next_step="write %3F for '?' and %23 for '#' in a path",
        )
    return urllib.parse.unquote(path, errors="surrogateescape")
