"""`snapstore init`: make a store."""

from __future__ import annotations

from snapstore.cli.common import Json, Quiet, StoreUrl, command, store_url
from snapstore.repository.store import init_store

__all__ = ["init"]


def init(*, store: StoreUrl = None, json: Json = False, quiet: Quiet = False) -> None:
    """Make a store, or find the one that is there already. Safe to repeat."""
    with command(json=json, quiet=quiet) as console, init_store(store_url(store)) as made:
        console.result(
            {"url": made.url, "store_id": made.config.store_id, "created": made.config.created},
            f"store {made.config.store_id} at {made.url}",
        )
