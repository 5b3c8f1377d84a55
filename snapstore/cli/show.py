"""`snapstore show`: one snapshot in detail."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from snapstore.cli.common import Json, Quiet, StoreUrl, command, store_url
from snapstore.cli.console import Console, one_line
from snapstore.repository.store import open_store
from snapstore.units import format_bytes

if TYPE_CHECKING:
    from snapstore.repository.summary import SnapshotSummary

__all__ = ["show"]

_STREAMS_SHOWN = 20
_VALUE_CHARS = 160


def show(
    name: Annotated[
        str, typer.Argument(metavar="NAME[:TAG]", help="Which snapshot; or NAME@b3:ID.")
    ],
    *,
    all_streams: Annotated[
        bool, typer.Option("--streams", help="List all streams, not only the largest.")
    ] = False,
    store: StoreUrl = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Tell what a snapshot holds, what it takes, and what it needs to run."""
    with (
        command(json=json, quiet=quiet) as console,
        open_store(store_url(store), readonly=True) as opened,
    ):
        summary = opened.show(name)
        if json:
            console.result(_document(summary), "")
        else:
            _print(console, summary, all_streams=all_streams)


def _document(summary: SnapshotSummary) -> dict[str, object]:
    document: dict[str, object] = msgspec.to_builtins(summary)
    # Ids are values with raw bytes, which would come out as base64.
    ranks = [{**msgspec.to_builtins(rank), "id": rank.id.hex} for rank in summary.ranks]
    return {**document, "id": summary.id.hex, "ranks": ranks}


def _print(console: Console, summary: SnapshotSummary, *, all_streams: bool) -> None:
    program = f"{summary.writer.get('program', '?')} {summary.writer.get('version', '')}"
    sizes = (
        (summary.logical_bytes, "logical"),
        (summary.data_bytes, "without zeros"),
        (summary.unique_bytes, "unique"),
        (summary.stored_bytes, "stored"),
    )
    lines = [
        f"snapshot      {summary.id}",
        f"created       {summary.created} by {program}",
        f"kind          {summary.kind}",
        "sizes         " + ", ".join(f"{format_bytes(count)} {word}" for count, word in sizes),
        *(
            f"label         {one_line(f'{key}={value}')}"
            for key, value in sorted(summary.labels.items())
        ),
        *(
            f"requirement   {key}: {_short(value)}"
            for key, value in sorted(summary.requirements.items())
        ),
        *(
            f"codec         {name}: {codec.frames} frames, {format_bytes(codec.plain_bytes)} in "
            f"{format_bytes(codec.stored_bytes)}"
            for name, codec in summary.codecs.items()
        ),
    ]
    console.result({}, "\n".join(lines))
    _print_ranks(console, summary)
    _print_streams(console, summary, all_streams=all_streams)


def _print_ranks(console: Console, summary: SnapshotSummary) -> None:
    console.table(
        [
            "rank",
            "files>",
            "logical>",
            "data>",
            "unique>",
            "stored>",
            "chunks>",
            "frames>",
            "packs>",
            "manifest",
        ],
        [
            [
                str(rank.rank),
                str(rank.files),
                format_bytes(rank.logical_bytes),
                format_bytes(rank.data_bytes),
                format_bytes(rank.unique_bytes),
                format_bytes(rank.stored_bytes),
                str(rank.chunks),
                str(rank.frames),
                str(rank.packs),
                rank.id.short,
            ]
            for rank in summary.ranks
        ],
    )


def _print_streams(console: Console, summary: SnapshotSummary, *, all_streams: bool) -> None:
    streams = [(rank.rank, stream) for rank in summary.ranks for stream in rank.streams]
    streams.sort(key=lambda item: -item[1].logical_bytes)
    shown = streams if all_streams else streams[:_STREAMS_SHOWN]
    console.table(
        ["rank", "stream>", "class", "logical>", "data>", "runs>", "origin"],
        [
            [
                str(rank),
                str(stream.number),
                stream.data_class,
                format_bytes(stream.logical_bytes),
                format_bytes(stream.data_bytes),
                str(stream.segments),
                stream.origin,
            ]
            for rank, stream in shown
        ],
    )
    if len(shown) < len(streams):
        console.note(f"{len(streams) - len(shown)} more streams: add --streams")


def _short(value: object) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= _VALUE_CHARS else text[: _VALUE_CHARS - 3] + "..."
