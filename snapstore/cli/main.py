"""The `snapstore` program."""

from __future__ import annotations

from snapstore.cli.diff import diff
from snapstore.cli.init import init
from snapstore.cli.ls import ls
from snapstore.cli.program import new_program, run_program
from snapstore.cli.pull import pull
from snapstore.cli.push import push
from snapstore.cli.rm import rm
from snapstore.cli.show import show
from snapstore.cli.stats import stats
from snapstore.cli.tag import tag
from snapstore.cli.validate import validate_backend

__all__ = ["app", "run"]

app = new_program(
    "snapstore",
    purpose="Deduplicating, verified storage for snapshots of running GPU workloads.",
    refused="refused",
)
for _command in (init, push, pull, ls, show, diff, stats, rm, validate_backend):
    app.command()(_command)
app.add_typer(tag)


def run() -> None:
    """Entry point of the `snapstore` program."""
    run_program(app, guarded="your data")
