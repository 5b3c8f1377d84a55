"""`snapstore push`: store a directory as a snapshot."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from snapstore.cli.common import (
    Json,
    Memory,
    Quiet,
    StoreUrl,
    Threads,
    command,
    parse_labels,
    path_given,
    store_url,
)
from snapstore.clock import SystemClock
from snapstore.options import Compression, StoreOptions
from snapstore.repository.store import open_store
from snapstore.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from snapstore.repository.write_session import PushResult

__all__ = ["push"]


def push(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", parser=path_given, help="The tree to store.")
    ],
    name: Annotated[str, typer.Argument(metavar="NAME[:TAG]", help="What to call it.")],
    *,
    label: Annotated[
        list[str] | None, typer.Option(metavar="K=V", help="Kept with the snapshot. Repeatable.")
    ] = None,
    rank_glob: Annotated[
        str | None,
        typer.Option(metavar="GLOB", help="Paths of each rank, with {N} for its number."),
    ] = None,
    classes: Annotated[
        list[str] | None,
        typer.Option(
            "--class",
            metavar="GLOB=CLASS",
            help="Cut matching files as pages, tensors, generic or device. Repeatable.",
        ),
    ] = None,
    skip_special: Annotated[
        bool, typer.Option("--skip-special", help="Leave out sockets, fifos and devices.")
    ] = False,
    compression: Annotated[
        Compression, typer.Option(help="Effort spent on making it smaller.")
    ] = Compression.AUTO,
    memory: Memory = "1GiB",
    threads: Threads = 0,
    store: StoreUrl = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Store a directory as a snapshot and let NAME point to it.

    Only what the store lacks is sent. Nothing has the name before all of it is durable; a push
    that failed or was killed is simply run again.
    """
    with command(json=json, quiet=quiet) as console:
        options = StoreOptions(
            memory_bytes=parse_bytes(memory), threads=threads, compression=compression
        )
        clock = SystemClock()
        started_s = clock.monotonic_s()
        with open_store(store_url(store), options) as opened, console.progress() as progress:
            result = opened.push(
                directory,
                name,
                labels=parse_labels(label or []),
                rank_glob=rank_glob,
                class_overrides=classes or [],
                skip_special=skip_special,
                progress=progress,
            )
        seconds = clock.monotonic_s() - started_s
        for warning in result.warnings:
            console.warn(warning)
        for path in result.skipped:
            console.warn(f"left out {path}")
        console.result(_document(result, seconds), _text(result, seconds))


def _document(result: PushResult, seconds: float) -> dict[str, object]:
    return {
        "snapshot": result.snapshot.hex,
        "name": str(result.name),
        "generation": result.generation,
        "kind": result.kind,
        "ranks": {str(rank): rank_id.hex for rank, rank_id in result.ranks.items()},
        "logical_bytes": result.ingest.logical_bytes,
        "zero_bytes": result.ingest.zero_bytes,
        "new_bytes": result.ingest.new_bytes,
        "new_chunks": result.ingest.new_chunks,
        "known_bytes": result.ingest.known_bytes,
        "known_chunks": result.ingest.known_chunks,
        "stored_again_bytes": result.ingest.rewritten_bytes,
        "stored_bytes": result.stored_bytes,
        "packs": result.packed.packs,
        "frames": result.packed.frames,
        "skipped": list(result.skipped),
        "warnings": list(result.warnings),
        "seconds": round(seconds, 3),
    }


def _text(result: PushResult, seconds: float) -> str:
    ingest = result.ingest
    rate = format_bytes(int(ingest.logical_bytes / max(seconds, 1e-3)))
    return (
        f"{result.name} is snapshot {result.snapshot.short} ({result.kind}, "
        f"{len(result.ranks)} {'rank' if len(result.ranks) == 1 else 'ranks'})\n"
        f"  {format_bytes(ingest.logical_bytes)} in {seconds:.2f} s ({rate}/s): "
        f"{format_bytes(ingest.zero_bytes)} zeros, {format_bytes(ingest.known_bytes)} known, "
        f"{format_bytes(ingest.new_bytes)} new\n"
        f"  the store grew by {format_bytes(result.stored_bytes)}"
    )
