"""The `snapagent` program."""

from __future__ import annotations

from snapagent.cli.capture import capture
from snapagent.cli.history import history
from snapagent.cli.preflight import preflight
from snapagent.cli.restore import restore
from snapagent.cli.run import run_command
from snapagent.cli.serve_pages import serve_pages
from snapstore.cli.program import new_program, run_program

__all__ = ["app", "run"]

app = new_program(
    "snapagent",
    purpose="Captures live processes straight into a store and restores them straight out of it.",
    refused="refused by policy or preflight",
)
app.command(name="run")(run_command)
for _command in (capture, restore, serve_pages, preflight, history):
    app.command()(_command)


def run() -> None:
    """Entry point of the `snapagent` program."""
    run_program(app, guarded="processes")
