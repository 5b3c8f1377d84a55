"""The `snapagent` program."""

from __future__ import annotations

import gc
import sys
from typing import Annotated

import typer

from snapagent.cli.capture import capture
from snapagent.cli.history import history
from snapagent.cli.preflight import preflight
from snapagent.cli.restore import restore
from snapagent.cli.run import run_command
from snapagent.cli.serve_pages import serve_pages
from snapstore import VERSION

__all__ = ["app", "run"]

_SWITCH_INTERVAL_S = 0.0005

app = typer.Typer(
    name="snapagent",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Captures live processes straight into a store and restores them straight out of it.",
    epilog="Exit codes: 0 done, 1 failed, 2 wrong usage, 3 not found, 4 damaged or hostile data, "
    "5 store unreachable or access denied, 6 conflict or lease lost, "
    "7 refused by policy or preflight, 8 no space, 130 interrupted.",
)
app.command(name="run")(run_command)
for _command in (capture, restore, serve_pages, preflight, history):
    app.command()(_command)


def _print_version(wanted: bool) -> None:  # noqa: FBT001 - typer calls it with one positional
    if wanted:
        print(VERSION)
        raise typer.Exit


@app.callback()
def _options(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Options of the program itself."""


def run() -> None:
    """Entry point of the `snapagent` program."""
    # Threads come back from short library calls all the time: five milliseconds, the default, is
    # long for a fault to wait.
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    gc.freeze()
    if not __debug__:
        sys.exit("snapagent: refusing to run under python -O: its assertions guard processes")
    try:
        app()
    finally:
        gc.freeze()
