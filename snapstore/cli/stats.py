"""`snapstore stats`: a store in numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from snapstore.cli.common import Json, Memory, Quiet, StoreUrl, command, store_url
from snapstore.options import StoreOptions
from snapstore.repository.store import open_store
from snapstore.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from snapstore.cli.console import Console
    from snapstore.repository.stats import NamespaceStats, ObjectTotals, StoreStats

__all__ = ["stats"]


def stats(
    prefix: Annotated[
        str, typer.Argument(metavar="[PREFIX]", help="Count only names that start so.")
    ] = "",
    *,
    depth: Annotated[
        int, typer.Option(metavar="N", help="Components of a name that make a namespace.")
    ] = 1,
    memory: Memory = "1GiB",
    store: StoreUrl = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Count what a store holds, by namespace, and what of it no name needs.

    Shared is what another namespace has too; own is what no other has. What is damaged is warned
    of and left out.
    """
    with command(json=json, quiet=quiet) as console:
        options = StoreOptions(memory_bytes=parse_bytes(memory))
        with open_store(store_url(store), options, readonly=True) as opened:
            found = opened.stats(prefix, depth=depth)
        for text in found.damaged:
            console.warn(f"not counted: {text}")
        if json:
            console.result(msgspec.to_builtins(found), "")
        else:
            _print(console, found)


def _print(console: Console, found: StoreStats) -> None:
    console.table(
        [
            "namespace",
            "names>",
            "snapshots>",
            "logical>",
            "data>",
            "unique>",
            "shared>",
            "own>",
            "stored>",
            "own stored>",
        ],
        [*(_row(one, one.namespace) for one in found.namespaces), _row(found.total, "all")],
    )
    rows = [
        ("packs", _objects(found.packs)),
        ("", f"{_objects(found.unused_packs)} that no name needs"),
        ("", f"{format_bytes(found.loose_bytes)} of the rest in no frame that a name needs"),
        ("indexes", _objects(found.indexes)),
        ("manifests", f"{_objects(found.manifests)}, {found.unnamed_snapshots} without a name"),
        ("layouts", _objects(found.layouts)),
        ("pushes", f"{found.pushes} under way"),
    ]
    console.result({}, "\n".join(f"{title:<13} {text}" for title, text in rows))


def _row(one: NamespaceStats, title: str) -> list[str]:
    sizes = (
        one.logical_bytes,
        one.data_bytes,
        one.unique_bytes,
        one.shared_bytes,
        one.exclusive_bytes,
        one.stored_bytes,
        one.exclusive_stored_bytes,
    )
    return [title, str(one.names), str(one.snapshots), *map(format_bytes, sizes)]


def _objects(totals: ObjectTotals) -> str:
    return f"{totals.objects}, {format_bytes(totals.bytes)}"
