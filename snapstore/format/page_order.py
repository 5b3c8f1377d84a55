"""Page orders: which pages earlier restores touched first (`format_spec/05-names-refs.md`, 5)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, Literal, NamedTuple

import msgspec

from snapstore.errors import LimitExceeded, Malformed
from snapstore.format import limits
from snapstore.format.canonical import check_bytes_max, decode_head, decode_typed, encode_typed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from snapstore.units import BytesLike

__all__ = ["PageRun", "decode_page_order", "encode_page_order"]

FORMAT: Final = "snapstore/page-order"
_WHAT = "page order"

_File = Annotated[int, msgspec.Meta(ge=0, lt=limits.PAGE_ORDER_FILES_MAX)]
_First = Annotated[int, msgspec.Meta(ge=0, lt=limits.FILE_PAGES_MAX)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=limits.FILE_PAGES_MAX)]


class PageRun(NamedTuple):
    """Pages of one file that were touched one after the other.

    Attributes:
        path: The file, from the root of the snapshot's tree; text, so not every path can be told.
        first_page: Number of the first page in the file.
        page_count: How many pages of 4096 bytes.
    """

    path: str
    first_page: int
    page_count: int


class _Head(msgspec.Struct):
    format: str
    version: int


class _PageOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    files: Annotated[list[str], msgspec.Meta(max_length=limits.PAGE_ORDER_FILES_MAX)]
    runs: Annotated[
        list[tuple[_File, _First, _Count]], msgspec.Meta(max_length=limits.PAGE_ORDER_RUNS_MAX)
    ]
    format: Literal["snapstore/page-order"] = FORMAT
    version: Literal[1] = 1


def encode_page_order(runs: Iterable[PageRun]) -> bytes:
    """Encode the order in which pages were touched first.

    Raises:
        Malformed: A path or number is not what the format says.
        LimitExceeded: There are too many runs or files, or their names are too long.
    """
    files: dict[str, int] = {}
    rows = []
    for path, first, count in runs:
        rows.append((files.setdefault(path, len(files)), first, count))
        if len(rows) > limits.PAGE_ORDER_RUNS_MAX or len(files) > limits.PAGE_ORDER_FILES_MAX:
            raise LimitExceeded(
                f"{_WHAT}: more than {limits.PAGE_ORDER_RUNS_MAX} runs or "
                f"{limits.PAGE_ORDER_FILES_MAX} files",
                next_step="leave the last ones out: nothing depends on them",
            )
    data = encode_typed(_PageOrder(files=[*files], runs=rows), what=_WHAT)
    decode_page_order(data)
    return data


def decode_page_order(data: BytesLike) -> list[PageRun]:
    """Check and decode the order in which pages were touched first.

    Whether the files have these pages is for the caller to see.

    Raises:
        FormatError: It is not what the format says.
    """
    decode_head(
        data, _Head, format_word=FORMAT, what=_WHAT, limit_bytes=limits.PAGE_ORDER_BYTES_MAX
    )
    order = decode_typed(data, _PageOrder, what=_WHAT)
    for path in order.files:
        _check_path(path)
    if len(set(order.files)) != len(order.files):
        raise Malformed(f"{_WHAT}: a file twice")
    used = 0
    for row, (file, first, count) in enumerate(order.runs):
        if file > used or file >= len(order.files):
            raise Malformed(f"{_WHAT}, run {row}: files are not in order of first use")
        if first + count > limits.FILE_PAGES_MAX:
            raise Malformed(f"{_WHAT}, run {row}: ends beyond any file")
        used = max(used, file + 1)
    if used != len(order.files):
        raise Malformed(f"{_WHAT}: a file of which nothing is said")
    return [PageRun(order.files[file], first, count) for file, first, count in order.runs]


def _check_path(path: str) -> None:
    raw = path.encode()
    check_bytes_max(len(raw), limits.PATH_BYTES_MAX, what=f"{_WHAT}: path")
    components = raw.split(b"/")
    if b"\0" in raw or not {b"", b".", b".."}.isdisjoint(components):
        raise Malformed(f"{_WHAT}: not a path of a file: {path[:80]!r}")
