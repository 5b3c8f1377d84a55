"""`snapagent history`: what was captured and restored on this node."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from snapstore.cli.common import Json, Quiet, command
from snapstore.units import format_bytes

if TYPE_CHECKING:
    from snapagent.history import Entry

__all__ = ["history"]


def history(
    *,
    count: Annotated[
        int, typer.Option("--count", "-n", min=1, metavar="N", help="How many at most.")
    ] = 20,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """List captures and restores of this node, the newest first.

    What was killed shows as interrupted, with the reason if somebody lived to tell it.
    """
    with command(json=json, quiet=quiet) as console:
        import msgspec

        from snapagent.config import AgentConfig
        from snapagent.history import History, read_history
        from snapagent.recorded import collect_reasons

        config = AgentConfig.from_environment()
        collect_reasons(config, History(config.history_file, warn=console.note))
        entries = read_history(config.history_file, limit=count)
        if json:
            for entry in entries:
                print(msgspec.json.encode(dataclasses.asdict(entry), order="sorted").decode())
            return
        headings = ["started", "", "name", "result", "time>", "phases", "bytes", "faults>"]
        console.table(headings, [_row(entry) for entry in entries])
        for entry in entries:
            why = entry.reason or entry.outcome.message
            if why and entry.result != "ok":
                console.note(f"{entry.started} {entry.name}: {why}")


def _row(entry: Entry) -> list[str]:
    outcome = entry.outcome
    return [
        entry.started,
        entry.kind,
        entry.name,
        entry.result if outcome.error is None else f"{entry.result}: {outcome.error}",
        "" if entry.duration_s is None else f"{entry.duration_s:.2f} s",
        ", ".join(f"{name} {seconds:.2f}" for name, seconds in outcome.phases.items()),
        ", ".join(f"{name} {format_bytes(n)}" for name, n in outcome.source_bytes.items() if n),
        "" if outcome.faults is None else str(outcome.faults),
    ]
