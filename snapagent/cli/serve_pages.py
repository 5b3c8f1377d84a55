"""`snapagent serve-pages`: give the pages of a snapshot to plain CRIU."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from typing import Annotated

import typer

from snapstore.cli.common import (
    Json,
    Memory,
    Quiet,
    StoreUrl,
    Threads,
    command,
    path_given,
    store_url,
)
from snapstore.errors import UsageError
from snapstore.units import format_bytes, parse_bytes

__all__ = ["serve_pages"]

_PORT_MAX = 65535


def serve_pages(
    name: Annotated[str, typer.Argument(metavar="NAME[:TAG]", help="Which snapshot.")],
    *,
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Where clients connect; port 0 for any. Whoever can connect can read the memory.",
        ),
    ] = "127.0.0.1:0",
    write_images: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            parser=path_given,
            help="First write there what `criu restore --lazy-pages` needs beside the pages.",
        ),
    ] = None,
    images: Annotated[
        str | None, typer.Option(metavar="DIR", help="Which dump, if the snapshot has several.")
    ] = None,
    memory: Memory = "1GiB",
    threads: Threads = 0,
    store: StoreUrl = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Serve the pages of a snapshot, over CRIU's own protocol, to any number of clients.

    Run `criu lazy-pages --page-server --address HOST --port PORT -D DIR` and then `criu restore
    --lazy-pages -D DIR`. Serves until it is interrupted.
    """
    with command(json=json, quiet=quiet) as console:
        import snapstore
        from snapagent.serve import PagesService

        options = snapstore.StoreOptions(memory_bytes=parse_bytes(memory), threads=threads)
        with (
            snapstore.open_store(store_url(store), options) as opened,
            PagesService(
                opened,
                name,
                images=images,
                address=_address(listen),
                on_error=lambda error: console.warn(f"a client was ended: {error}"),
            ) as service,
        ):
            host, port = service.address
            written = service.write_images(write_images) if write_images is not None else 0
            document = {
                "snapshot": service.snapshot_id,
                "address": host,
                "port": port,
                "images": str(write_images) if write_images is not None else None,
                "image_bytes": written,
            }
            note = f", images in {write_images}" if write_images is not None else ""
            console.result(document, f"serving {name} at {host}:{port}{note}")
            # An interruption is its usual end.
            with contextlib.suppress(KeyboardInterrupt):
                signal.pause()
            console.note(f"sent {format_bytes(service.sent_bytes)}")


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > _PORT_MAX:
        raise UsageError(f"not an address: {text!r}", next_step="write HOST:PORT")
    return host.strip("[]"), int(port)
