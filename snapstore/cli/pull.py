"""`snapstore pull`: recreate a snapshot's tree."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from snapstore.cli.common import (
    CacheDirectory,
    Json,
    Memory,
    Quiet,
    StoreUrl,
    Threads,
    cache_directory,
    command,
    parse_ranks,
    path_given,
    store_url,
)
from snapstore.clock import SystemClock
from snapstore.options import Integrity, StoreOptions
from snapstore.repository.store import open_store
from snapstore.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from snapstore.repository.pull import PullResult

__all__ = ["pull"]


def pull(
    name: Annotated[
        str, typer.Argument(metavar="NAME[:TAG]", help="Which snapshot; or NAME@b3:ID.")
    ],
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            parser=path_given,
            help="Where to; must not exist or be empty, nor be where you are.",
        ),
    ],
    *,
    rank: Annotated[
        list[str] | None,
        typer.Option(metavar="N|host", help="Only this rank. Repeatable."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with what an earlier pull left behind.")
    ] = False,
    in_place: Annotated[
        bool,
        typer.Option("--in-place", help="Write straight into DIR, such as a mount. Not atomic."),
    ] = False,
    sync: Annotated[
        bool, typer.Option("--sync", help="Return only when the files are durable.")
    ] = False,
    integrity: Annotated[
        Integrity, typer.Option(help="Check frames only, or chunk ids as well.")
    ] = Integrity.STRONG,
    memory: Memory = "1GiB",
    threads: Threads = 0,
    store: StoreUrl = None,
    cache: CacheDirectory = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Recreate a snapshot's tree, byte for byte, checked as it is written.

    DIR gets its name only when all of it is there. A pull that failed or was killed leaves a
    `.DIR.snapstore-partial-…` beside it, which --resume takes up.
    """
    with command(json=json, quiet=quiet) as console:
        options = StoreOptions(
            memory_bytes=parse_bytes(memory),
            threads=threads,
            integrity=integrity,
            node_cache=cache_directory(cache),
        )
        clock = SystemClock()
        started_s = clock.monotonic_s()
        with open_store(store_url(store), options) as opened, console.progress() as progress:
            result = opened.pull(
                name,
                directory,
                ranks=parse_ranks(rank or []),
                resume=resume,
                in_place=in_place,
                sync=sync,
                progress=progress,
            )
        seconds = clock.monotonic_s() - started_s
        for warning in result.warnings:
            console.warn(warning)
        console.result(
            _document(result, directory, integrity, seconds), _text(result, directory, seconds)
        )


def _document(
    result: PullResult, directory: Path, integrity: Integrity, seconds: float
) -> dict[str, object]:
    return {
        "snapshot": result.snapshot.hex,
        "directory": str(directory),
        "files": result.files,
        "bytes": result.logical_bytes,
        "data_bytes": result.data_bytes,
        "read_bytes": result.read_bytes,
        "resumed_bytes": result.resumed_bytes,
        "integrity": integrity.value,
        "warnings": list(result.warnings),
        "seconds": round(seconds, 3),
    }


def _text(result: PullResult, directory: Path, seconds: float) -> str:
    rate = format_bytes(int(result.logical_bytes / max(seconds, 1e-3)))
    return (
        f"snapshot {result.snapshot.short} is in {directory}: {result.files} files, "
        f"{format_bytes(result.logical_bytes)} in {seconds:.2f} s ({rate}/s)"
    )
