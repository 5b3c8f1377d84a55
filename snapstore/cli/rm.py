"""`snapstore rm`: take names away."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from snapstore.cli.common import Json, Memory, Quiet, StoreUrl, command, store_url
from snapstore.cli.freed import freed_document, freed_text, warn_of_freed
from snapstore.options import StoreOptions
from snapstore.repository.store import open_store
from snapstore.units import parse_bytes

if TYPE_CHECKING:
    from snapstore.repository.removal import RemovedName, RemoveResult

__all__ = ["rm"]


def rm(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME[:TAG]...", help="Which names; all or none.")
    ],
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only tell what could be freed.")
    ] = False,
    memory: Memory = "1GiB",
    store: StoreUrl = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Take names away, and tell what nothing else needs then.

    A snapshot stays as long as another name points to it. The history of a name stays too:
    `snapstore tag rollback NAME` brings it back while its data are there. Space comes back when
    packs that nothing needs are removed, not before.
    """
    with command(json=json, quiet=quiet) as console:
        options = StoreOptions(memory_bytes=parse_bytes(memory))
        with open_store(store_url(store), options, readonly=dry_run) as opened:
            result = opened.remove(*names, dry_run=dry_run)
        warn_of_freed(console, result.freed)
        console.result(_document(result), _text(result))


def _document(result: RemoveResult) -> dict[str, object]:
    return {
        "dry_run": result.dry_run,
        "removed": [
            {
                "name": str(one.name),
                "snapshot": one.snapshot.hex if one.snapshot is not None else None,
                "generation": one.generation,
                "others": [str(other) for other in one.others],
            }
            for one in result.removed
        ],
        "freed": freed_document(result.freed),
    }


def _text(result: RemoveResult) -> str:
    lines = [_line(one, dry_run=result.dry_run) for one in result.removed]
    verb = "could be" if result.dry_run else "can be"
    return "\n".join([*lines, f"  {verb} freed by pruning: {freed_text(result.freed)}"])


def _line(one: RemovedName, *, dry_run: bool) -> str:
    verb = "would be removed" if dry_run else "removed"
    was = "a damaged name" if one.snapshot is None else f"snapshot {one.snapshot.short}"
    others = f", kept by {', '.join(map(str, one.others))}" if one.others else ""
    return f"{one.name} {verb}: it was {was}{others}"
