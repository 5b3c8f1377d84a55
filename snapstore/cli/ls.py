"""`snapstore ls`: what a store holds."""

from __future__ import annotations

from typing import Annotated

import typer

from snapstore.cli.common import Json, Quiet, StoreUrl, command, store_url
from snapstore.errors import SnapError
from snapstore.repository.store import open_store
from snapstore.units import format_bytes

__all__ = ["ls"]


def ls(
    prefix: Annotated[
        str, typer.Argument(metavar="[PREFIX]", help="Only names that start so.")
    ] = "",
    *,
    store: StoreUrl = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """List names and the snapshots that they point to. With --json one object a line."""
    rows = []
    with (
        command(json=json, quiet=quiet) as console,
        open_store(store_url(store), readonly=True) as opened,
    ):
        for found in opened.list(prefix, damaged=lambda _, error: console.warn(str(error))):
            try:
                manifest = opened.snapshot(found.name).manifest
            except SnapError as error:
                console.warn(f"{found.name}: {error}")
                continue
            logical = sum(rank.logical_bytes for rank in manifest.ranks)
            if json:
                console.result(
                    {
                        "name": str(found.name),
                        "snapshot": found.snapshot.hex,
                        "generation": found.generation,
                        "created": manifest.created,
                        "kind": manifest.kind,
                        "ranks": len(manifest.ranks),
                        "logical_bytes": logical,
                        "labels": manifest.labels,
                    },
                    "",
                )
            rows.append(
                [
                    str(found.name),
                    found.snapshot.short,
                    manifest.created,
                    manifest.kind,
                    str(len(manifest.ranks)),
                    format_bytes(logical),
                ]
            )
        if not json:
            console.table(["name", "snapshot", "created", "kind", "ranks>", "size>"], rows)
