"""The `snapstore` program."""

from __future__ import annotations

import gc
import sys
from typing import Annotated

import typer

from snapstore.cli.cache import cache
from snapstore.cli.diff import diff
from snapstore.cli.init import init
from snapstore.cli.ls import ls
from snapstore.cli.mount import mount, umount
from snapstore.cli.pull import pull
from snapstore.cli.push import push
from snapstore.cli.rm import rm
from snapstore.cli.show import show
from snapstore.cli.stats import stats
from snapstore.cli.tag import tag
from snapstore.cli.validate import validate_backend
from snapstore.version import VERSION

__all__ = ["app", "run"]

_SWITCH_INTERVAL_S = 0.0005

app = typer.Typer(
    name="snapstore",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Deduplicating, verified storage for snapshots of running GPU workloads.",
    epilog="Exit codes: 0 done, 1 failed, 2 wrong usage, 3 not found, 4 damaged or hostile data, "
    "5 store unreachable or access denied, 6 conflict or lease lost, 7 refused, 8 no space, "
    "130 interrupted.",
)
for _command in (
    init,
    push,
    pull,
    mount,
    umount,
    ls,
    show,
    diff,
    stats,
    rm,
    validate_backend,
):
    app.command()(_command)
app.add_typer(tag)
app.add_typer(cache)


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
    """Entry point of the `snapstore` program."""
    # Workers come back from short library calls all the time: five milliseconds, the default, is
    # long for them to wait while the deciding thread runs.
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    gc.freeze()
    gc.enable()
    if not __debug__:
        sys.exit("snapstore: refusing to run under python -O: its assertions guard your data")
    try:
        app()
    finally:
        # The process ends here: going through all that is left, object by object, is no use.
        gc.freeze()
