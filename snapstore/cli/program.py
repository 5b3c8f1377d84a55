"""What the programs share: the frame of their command line, and how their process runs."""

from __future__ import annotations

import gc
import sys
from typing import Annotated, Any, NoReturn

import typer

from snapstore.version import VERSION

__all__ = ["SWITCH_INTERVAL_S", "new_program", "run_program"]

SWITCH_INTERVAL_S = 0.0005
"""Threads come back from short library calls all the time: five milliseconds, the default, is long
for workers to wait while the deciding thread runs, and for a fault."""


def new_program(name: str, *, purpose: str, refused: str) -> typer.Typer:
    """Return a program without commands, with the documented exit codes in its help.

    Args:
        name: The name it is called by.
        purpose: One sentence for its help.
        refused: What exit code 7 means here.
    """
    app = typer.Typer(
        name=name,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
        help=purpose,
        epilog="Exit codes: 0 done, 1 failed, 2 wrong usage, 3 not found, 4 damaged or hostile "
        "data, 5 store unreachable or access denied, 6 conflict or lease lost, "
        f"7 {refused}, 8 no space, 130 interrupted.",
    )
    app.callback()(_options)
    return app


def run_program(app: typer.Typer, *, guarded: str) -> None:
    """Run a program whose commands are complete; it ends the process, as typer does.

    Args:
        app: The program.
        guarded: What its assertions guard, for who turned them off.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.freeze()
    gc.enable()
    if not __debug__:
        sys.exit(
            f"{app.info.name}: refusing to run under python -O: its assertions guard {guarded}"
        )
    try:
        if _wants_json(sys.argv[1:]):
            _run_for_json(app)
        app()
    finally:
        # The process ends here: going through all that is left, object by object, is no use.
        gc.freeze()


def _wants_json(arguments: list[str]) -> bool:
    """Whether JSON is asked for, as far as that can be told of a command line that is wrong."""
    if "--" in arguments:
        arguments = arguments[: arguments.index("--")]
    return "--json" in arguments


def _run_for_json(app: typer.Typer) -> NoReturn:
    """Run a program, and tell of wrong usage as of any other error."""
    # Typer has the classes of click, without saying where.
    base = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
    try:
        status = app(standalone_mode=False)
    except Exception as error:
        if not isinstance(error, base):
            raise
        from snapstore.cli.console import Console
        from snapstore.errors import UsageError

        wrong: Any = error
        context = getattr(wrong, "ctx", None)
        path = app.info.name if context is None else context.command_path
        refused = UsageError(wrong.format_message(), next_step=f"see `{path} --help`")
        Console(json=True, quiet=True).error(refused)
        sys.exit(refused.exit_code)
    sys.exit(status)


def _print_version(wanted: bool) -> None:  # noqa: FBT001 - typer calls it with one positional
    if wanted:
        print(VERSION)
        raise typer.Exit


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
