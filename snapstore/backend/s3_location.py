"""Where a store on S3 is, as its URL says."""

from __future__ import annotations

import dataclasses
import re
import urllib.parse
from typing import Self

from snapstore.errors import UsageError

__all__ = ["S3Location"]

_PARAMETERS = ("endpoint", "region", "addressing", "profile", "ca")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_PREFIX = re.compile(r"[A-Za-z0-9!_.*'()/-]*")
_ADDRESSING = frozenset({"auto", "path", "virtual"})
_PREFIX_CHARS_MAX = 400
"""Leaves room for our own keys: S3 allows 1024 bytes for both."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class S3Location:
    """Where a store is. Never holds credentials, so it can be shown.

    Attributes:
        bucket: Must exist.
        prefix: Empty, or ends in `/`.
        endpoint: URL of another service than AWS.
        region: For signing; by default what the AWS configuration says, else `us-east-1`.
        addressing: `path` or `virtual`; `auto` is `path` with an endpoint.
        profile: Of the AWS configuration.
        ca: File with the certificates to trust.
    """

    bucket: str
    prefix: str = ""
    endpoint: str | None = None
    region: str | None = None
    addressing: str = "auto"
    profile: str | None = None
    ca: str | None = None

    @classmethod
    def parse(cls, url: str) -> Self:
        """Read `s3://BUCKET/PREFIX?endpoint=URL&region=R&addressing=path&profile=P&ca=FILE`.

        Raises:
            UsageError: The URL cannot be meant.
        """
        parts = _split(url)
        if "@" in parts.netloc or parts.fragment:
            raise UsageError(
                "an S3 URL holds no credentials and no fragment",
                next_step="give credentials the usual AWS way, by environment or profile",
            )
        if _BUCKET.fullmatch(parts.netloc) is None:
            raise UsageError(
                f"no bucket in {url[:120]!r}", next_step="write s3://BUCKET or s3://BUCKET/PREFIX"
            )
        values = _parameters(parts.query)
        prefix = urllib.parse.unquote(parts.path).strip("/")
        components = prefix.split("/")
        if (
            _PREFIX.fullmatch(prefix) is None
            or len(prefix) > _PREFIX_CHARS_MAX
            or (prefix and not {"", ".", ".."}.isdisjoint(components))
        ):
            raise UsageError(
                f"a store cannot lie below {prefix[:120]!r}",
                next_step="use letters, digits and -_.!*'() between single slashes",
            )
        return cls(bucket=parts.netloc, prefix=f"{prefix}/" if prefix else "", **values)

    def url(self) -> str:
        """The URL again, for messages and other processes."""
        query = {
            name: value
            for name in _PARAMETERS
            if (value := getattr(self, name)) and (name, value) != ("addressing", "auto")
        }
        tail = "?" + urllib.parse.urlencode(query, safe=":/") if query else ""
        path = f"/{self.prefix}".rstrip("/")
        return f"s3://{self.bucket}{path}{tail}"


def _parameters(query: str) -> dict[str, str]:
    values: dict[str, str] = {}
    for name, value in urllib.parse.parse_qsl(query, keep_blank_values=True):
        if name not in _PARAMETERS or name in values or not value:
            raise UsageError(
                f"the S3 URL has a parameter {name[:40]!r} that is unknown, empty, or there twice",
                next_step=f"the parameters are {', '.join(_PARAMETERS)}",
            )
        values[name] = value
    if values.get("addressing", "auto") not in _ADDRESSING:
        raise UsageError("addressing is path or virtual")
    _check_endpoint(values.get("endpoint", "https://default"))
    return values


def _check_endpoint(text: str) -> None:
    parts = _split(text)
    try:
        has_port = parts.port != 0
    except ValueError:
        has_port = False
    whole = parts.scheme in {"http", "https"} and parts.hostname and has_port
    if not whole or parts.query or parts.fragment or "@" in parts.netloc:
        raise UsageError("the endpoint is no URL", next_step="write endpoint=https://HOST:PORT")


def _split(url: str) -> urllib.parse.SplitResult:
    try:
        return urllib.parse.urlsplit(url)
    except ValueError as error:
        raise UsageError(f"not a URL: {url[:120]!r}: {error}") from error
