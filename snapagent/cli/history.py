"""`snapagent history`: what was captured and restored on this node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from snapagent.cli.places import NoDaemon, daemon
from snapstore.cli.common import Json, Quiet, command
from snapstore.cli.console import writing
from snapstore.units import format_bytes

if TYPE_CHECKING:
    from snapagent.api import HistoryEntry
    from snapagent.config import Settings
    from snapstore.cli.console import Console

__all__ = ["history"]


def history(
    *,
    count: Annotated[
        int, typer.Option("--count", "-n", metavar="N", min=1, max=1000, help="How many at most.")
    ] = 20,
    no_daemon: NoDaemon = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """List captures and restores of this node, the newest first.

    What was killed shows as interrupted, with the reason if somebody lived to tell it.
    """
    with command(json=json, quiet=quiet) as console:
        import msgspec

        from snapagent.api import HistoryAnswer
        from snapagent.config import load_settings

        settings = load_settings()
        running = daemon(settings, unwanted=no_daemon)
        if running is not None:
            entries = running.ask("GET", f"/v1/history?limit={count}", HistoryAnswer).entries
        else:
            entries = _read_here(settings, count, console)
        if json:
            for entry in entries:
                with writing():
                    print(msgspec.json.encode(entry, order="sorted").decode())
            return
        headings = ["started", "", "name", "result", "time>", "phases", "bytes", "faults>"]
        console.table(headings, [_row(entry) for entry in entries])
        for entry in entries:
            why = entry.reason or entry.outcome.message
            if why and entry.result != "ok":
                console.note(f"{entry.started} {entry.name}: {why}")


def _read_here(settings: Settings, count: int, console: Console) -> list[HistoryEntry]:
    """Read it in this process."""
    import msgspec

    from snapagent.api import HistoryEntry
    from snapagent.history import History, read_history
    from snapagent.recorded import collect_reasons

    config = settings.agent
    collect_reasons(config, History(config.history_file, warn=console.note))
    found = read_history(config.history_file, limit=count)
    return [msgspec.convert(one, HistoryEntry, from_attributes=True) for one in found]


def _row(entry: HistoryEntry) -> list[str]:
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
