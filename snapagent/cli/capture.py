"""`snapagent capture`: store a living process tree as a snapshot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from snapagent.cli.places import NoDaemon, daemon
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
    from snapagent.api import CaptureDone, CaptureRequestBody
    from snapagent.config import Settings
    from snapstore import ProgressCallback
    from snapstore.cli.console import Console

__all__ = ["capture"]

_SHORT_CHARS = 12
"""As many digits of an id as people are shown."""


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
    no_daemon: NoDaemon = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Store the living process tree below P and let NAME point to it.

    The tree stands still meanwhile and then goes on, also if the capture fails or is interrupted.
    Nothing has the name before all of it is durable. The daemon does it if it runs, within its own
    budget.
    """
    with command(json=json, quiet=quiet) as console:
        from snapagent.api import CaptureRequestBody
        from snapagent.config import load_settings

        settings = load_settings()
        body = CaptureRequestBody(
            name=name,
            pid=pid,
            store=store or settings.store or None,
            labels=parse_labels(label or []),
            stop=stop,
            freeze_fast=freeze_fast,
        )
        running = daemon(settings, unwanted=no_daemon)
        with console.progress() as progress:
            if running is not None:
                done = running.run_capture(body, progress, console.warn)
            else:
                done = _here(body, settings, (memory, threads), console, progress)
        for warning in done.warnings:
            console.warn(warning)
        console.result(_document(done), _text(done))


def _here(
    body: CaptureRequestBody,
    settings: Settings,
    budget: tuple[str, int],
    console: Console,
    progress: ProgressCallback | None,
) -> CaptureDone:
    """Do it in this process."""
    import msgspec

    import snapstore
    from snapagent.api import CaptureDone
    from snapagent.capture import CaptureRequest
    from snapagent.recorded import recorded_capture

    options = snapstore.StoreOptions(memory_bytes=parse_bytes(budget[0]), threads=budget[1])
    request = CaptureRequest(
        pid=body.pid,
        name=body.name,
        labels=body.labels,
        stop=body.stop,
        freeze_fast=body.freeze_fast,
    )
    with snapstore.open_store(store_url(body.store), options) as opened:
        result = recorded_capture(opened, request, settings.agent, progress, warn=console.warn)
    return msgspec.convert(result.document(), CaptureDone)


def _document(done: CaptureDone) -> dict[str, object]:
    import msgspec

    return msgspec.structs.asdict(done)


def _text(done: CaptureDone) -> str:
    ingest = done.ingest
    lock = (
        "\n  packets of its connections are dropped until it is restored in this network, or "
        f"until `nft delete table {done.network_lock}`"
        if done.network_lock
        else ""
    )
    external = (
        f"\n  {format_bytes(done.external_bytes)} of it external memory, which CRIU did not see"
        if done.external_bytes
        else ""
    )
    rate = format_bytes(int(ingest["logical_bytes"] / max(done.criu_dump_s + done.commit_s, 1e-3)))
    return (
        f"{done.name} is snapshot {done.snapshot[:_SHORT_CHARS]}; the tree "
        f"{'was ended' if done.stopped else 'goes on'}\n"
        f"  {format_bytes(ingest['logical_bytes'])} in {done.total_s:.2f} s ({rate}/s), "
        f"{done.frozen_s:.2f} s of them frozen: {format_bytes(ingest['zero_bytes'])} zeros, "
        f"{format_bytes(ingest['known_bytes'])} known, {format_bytes(ingest['new_bytes'])} new\n"
        f"  the store grew by {format_bytes(done.stored_bytes)}{external}{lock}"
    )
