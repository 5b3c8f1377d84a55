"""`snapagent capture`: store a living process tree as a snapshot."""

from __future__ import annotations

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
    store_url,
)
from snapstore.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from snapagent.capture import CaptureResult

__all__ = ["capture"]


def capture(
    name: Annotated[str, typer.Argument(metavar="NAME[:TAG]", help="What to call it.")],
    *,
    pid: Annotated[int, typer.Option(min=1, metavar="P", help="Root of the process tree.")],
    stop: Annotated[
        bool, typer.Option("--stop", help="End the tree once the snapshot is durable.")
    ] = False,
    freeze_fast: Annotated[
        bool,
        typer.Option(
            "--freeze-fast", help="Store raw frames: the tree stands still for less time."
        ),
    ] = False,
    label: Annotated[
        list[str] | None, typer.Option(metavar="K=V", help="Kept with the snapshot. Repeatable.")
    ] = None,
    memory: Memory = "1GiB",
    threads: Threads = 0,
    store: StoreUrl = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Store the living process tree below P and let NAME point to it.

    The tree stands still meanwhile and then goes on, also if the capture fails or is interrupted.
    Nothing has the name before all of it is durable.
    """
    with command(json=json, quiet=quiet) as console:
        import snapstore
        from snapagent.capture import CaptureRequest
        from snapagent.config import AgentConfig
        from snapagent.recorded import recorded_capture

        options = snapstore.StoreOptions(memory_bytes=parse_bytes(memory), threads=threads)
        request = CaptureRequest(
            pid=pid,
            name=name,
            labels=parse_labels(label or []),
            stop=stop,
            freeze_fast=freeze_fast,
        )
        config = AgentConfig.from_environment()
        with (
            snapstore.open_store(store_url(store), options) as opened,
            console.progress() as progress,
        ):
            result = recorded_capture(opened, request, config, progress, warn=console.warn)
        for warning in result.pushed.warnings:
            console.warn(warning)
        console.result(result.document(), _text(result))


def _text(result: CaptureResult) -> str:
    ingest = result.pushed.ingest
    lock = (
        "\n  packets of its connections are dropped until it is restored in this network, or "
        f"until `nft delete table {result.network_lock}`"
        if result.network_lock
        else ""
    )
    rate = format_bytes(int(ingest.logical_bytes / max(result.dump_s + result.commit_s, 1e-3)))
    return (
        f"{result.pushed.name} is snapshot {result.pushed.snapshot.short}; the tree "
        f"{'was ended' if result.stopped else 'goes on'}\n"
        f"  {format_bytes(ingest.logical_bytes)} in {result.total_s:.2f} s ({rate}/s), "
        f"{result.frozen_s:.2f} s of them frozen: {format_bytes(ingest.zero_bytes)} zeros, "
        f"{format_bytes(ingest.known_bytes)} known, {format_bytes(ingest.new_bytes)} new\n"
        f"  the store grew by {format_bytes(result.pushed.stored_bytes)}{lock}"
    )
