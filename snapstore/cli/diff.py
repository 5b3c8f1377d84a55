"""`snapstore diff`: what two snapshots share."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from snapstore.cli.common import Json, Memory, Quiet, StoreUrl, command, store_url
from snapstore.cli.freed import freed_document, freed_text, warn_of_freed
from snapstore.options import StoreOptions
from snapstore.repository.store import open_store
from snapstore.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from snapstore.cli.console import Console
    from snapstore.repository.diff import DiffBytes, SnapshotDiff

__all__ = ["By", "diff"]

_STREAMS_SHOWN = 20


class By(enum.Enum):
    """What one row of the table is about."""

    RANK = "rank"
    CLASS = "class"
    STREAM = "stream"


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="NAME[:TAG] or NAME@b3:ID.")],
    b: Annotated[str, typer.Argument(metavar="B", help="NAME[:TAG] or NAME@b3:ID.")],
    *,
    by: Annotated[By, typer.Option(help="One row for each of these.")] = By.RANK,
    all_streams: Annotated[
        bool, typer.Option("--streams", help="With --by stream, list all, not only the largest.")
    ] = False,
    memory: Memory = "1GiB",
    store: StoreUrl = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Tell what B shares with A, what B costs on top of A, and what removing B would free.

    Shared are the bytes of B whose chunk is anywhere in A; the other data of B are new. With
    --json all of ranks, classes and streams are told.
    """
    with command(json=json, quiet=quiet) as console:
        options = StoreOptions(memory_bytes=parse_bytes(memory))
        with open_store(store_url(store), options, readonly=True) as opened:
            found = opened.diff(a, b)
        warn_of_freed(console, found.freed_without_b)
        if json:
            console.result(_document(found), "")
        else:
            _print(console, found, by, all_streams=all_streams)


def _document(found: SnapshotDiff) -> dict[str, object]:
    return {
        "a": found.a.hex,
        "b": found.b.hex,
        "total": msgspec.to_builtins(found.total),
        "ranks": [
            {"rank": rank, **msgspec.to_builtins(counted)}
            for rank, counted in found.by_rank.items()
        ],
        "classes": [
            {"data_class": name, **msgspec.to_builtins(counted)}
            for name, counted in found.by_class.items()
        ],
        "streams": [
            {
                "rank": stream.rank,
                "data_class": stream.data_class,
                "origin": stream.origin,
                **msgspec.to_builtins(stream.bytes),
            }
            for stream in found.streams
        ],
        "new_unique_bytes": found.new_unique_bytes,
        "shared_unique_bytes": found.shared_unique_bytes,
        "stored_a_bytes": found.stored_a_bytes,
        "stored_b_bytes": found.stored_b_bytes,
        "added_bytes": found.added_bytes,
        "added_metadata_bytes": found.added_metadata_bytes,
        "freed_without_b": freed_document(found.freed_without_b),
        "names_of_b": [str(name) for name in found.names_of_b],
    }


def _print(console: Console, found: SnapshotDiff, by: By, *, all_streams: bool) -> None:
    left = _print_table(console, found, by, all_streams=all_streams)
    names = ", ".join(map(str, found.names_of_b)) or "no name"
    unique = (
        f"{format_bytes(found.shared_unique_bytes)} shared, "
        f"{format_bytes(found.new_unique_bytes)} new, each chunk once"
    )
    added = (
        f"{format_bytes(found.added_bytes)} of data, "
        f"{format_bytes(found.added_metadata_bytes)} of manifests"
    )
    lines = [
        f"A             snapshot {found.a.short}, {format_bytes(found.stored_a_bytes)} stored",
        f"B             snapshot {found.b.short}, {format_bytes(found.stored_b_bytes)} stored",
        f"names of B    {names}",
        f"unique        {unique}",
        f"B adds to A   {added}",
        f"without B     could be freed: {freed_text(found.freed_without_b)}",
    ]
    console.result({}, "\n".join(lines))
    if left:
        console.note(f"{left} more streams: add --streams")


def _print_table(console: Console, found: SnapshotDiff, by: By, *, all_streams: bool) -> int:
    """Print a row for each rank, class or stream; returns how many were left out."""
    numbers = ["A>", "A zeros>", "B>", "B zeros>", "shared>", "new>", "gone>"]
    total = _sizes(found.total)
    if by is not By.STREAM:
        groups = found.by_rank if by is By.RANK else found.by_class
        rows = [[str(key), *_sizes(one)] for key, one in groups.items()]
        console.table([by.value, *numbers], [*rows, ["all", *total]])
        return 0
    streams = sorted(
        found.streams,
        key=lambda stream: -max(stream.bytes.logical_a_bytes, stream.bytes.logical_b_bytes),
    )
    shown = streams if all_streams else streams[:_STREAMS_SHOWN]
    rows = [
        [str(stream.rank), stream.data_class, *_sizes(stream.bytes), stream.origin]
        for stream in shown
    ]
    headings = ["rank", "class", *numbers, "origin"]
    console.table(headings, [*rows, ["all", "", *total, ""]])
    return len(streams) - len(shown)


def _sizes(counted: DiffBytes) -> list[str]:
    return [
        format_bytes(count)
        for count in (
            counted.logical_a_bytes,
            counted.zero_a_bytes,
            counted.logical_b_bytes,
            counted.zero_b_bytes,
            counted.shared_bytes,
            counted.new_bytes,
            counted.gone_bytes,
        )
    ]
