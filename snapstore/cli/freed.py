"""How `rm` and `diff` tell what could be freed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from snapstore.units import format_bytes

if TYPE_CHECKING:
    from snapstore.cli.console import Console
    from snapstore.repository.removal import Freed

__all__ = ["freed_document", "freed_text", "warn_of_freed"]


def freed_document(freed: Freed) -> dict[str, object]:
    """For programs."""
    return {
        "stored_bytes": freed.stored_bytes,
        "packs": freed.packs,
        "pack_bytes": freed.pack_bytes,
        "metadata_bytes": freed.metadata_bytes,
        "pushes": freed.pushes,
        "damaged": list(freed.damaged),
    }


def freed_text(freed: Freed) -> str:
    """For people."""
    if not freed.stored_bytes and not freed.metadata_bytes:
        return "nothing, all of it is needed by others"
    count = "1 pack" if freed.packs == 1 else f"{freed.packs} packs"
    packs = f"{count} of {format_bytes(freed.pack_bytes)}" if freed.packs else "no pack"
    return (
        f"{format_bytes(freed.stored_bytes)} of data and {format_bytes(freed.metadata_bytes)} of "
        f"manifests; {packs} can be removed whole"
    )


def warn_of_freed(console: Console, freed: Freed) -> None:
    """Say what makes the numbers too large."""
    for text in freed.damaged:
        console.warn(f"what this needs is not known: {text}")
    if freed.pushes:
        console.note(f"pushes under way, which may need some of it: {freed.pushes}")
