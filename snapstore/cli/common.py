"""Options that all commands share, and the frame in which every command runs."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from snapstore.cli.console import Console, OutputFailed, give_up_output, writing
from snapstore.cli.startup import interrupt_by_exception
from snapstore.errors import Interrupted, OutOfSpace, SnapError, UsageError
from snapstore.options import (
    NODE_CACHE_VARIABLE,
    STORE_URL_VARIABLE,
    node_cache_default,
    store_url_default,
)

if TYPE_CHECKING:
    from snapstore.format.rank import RankNumber

__all__ = [
    "CacheDirectory",
    "Json",
    "Memory",
    "Quiet",
    "StoreUrl",
    "Threads",
    "cache_directory",
    "command",
    "parse_ranks",
    "path_given",
    "store_url",
]

StoreUrl = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="URL",
        help=f"The store, such as file:///mnt/nfs/snapshots. Default: ${STORE_URL_VARIABLE}.",
    ),
]


def path_given(text: str | Path) -> Path:
    """Read an argument that is a path; for `parser=` of options and arguments.

    An empty one is refused: it comes from a variable that nobody has set, and would be the
    directory that the program happens to run in.

    Raises:
        typer.BadParameter: It is empty.
    """
    if not str(text):
        raise typer.BadParameter("the path is empty")
    return Path(text)


CacheDirectory = Annotated[
    Path | None,
    typer.Option(
        "--cache",
        parser=path_given,
        metavar="DIR",
        help=f"The node's cache, which what is read goes through. Default: ${NODE_CACHE_VARIABLE}.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout and nothing else there.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no notes.")]
Memory = Annotated[
    str, typer.Option(metavar="SIZE", help="Budget for buffers and tables, whatever the snapshot.")
]
Threads = Annotated[
    int, typer.Option(metavar="N", help="Worker threads; 0 means one per usable core.")
]


@contextlib.contextmanager
def command(*, json: bool, quiet: bool) -> Iterator[Console]:
    """Run a command: errors of the library become a message and the documented exit code.

    Ctrl-C and SIGTERM let the operation undo what must not stay, then exit with 130.
    """
    console = Console(json=json, quiet=quiet)
    signal.signal(signal.SIGTERM, _interrupt)
    interrupt_by_exception()
    try:
        yield console
        with writing():
            sys.stdout.flush()
    except OutputFailed as failed:
        give_up_output()
        cause = failed.__cause__
        assert isinstance(cause, OSError), cause
        # Whoever read our output may have seen enough.
        if isinstance(cause, BrokenPipeError):
            raise typer.Exit(1) from failed
        lost = _kind_of(cause)(f"cannot write the output: {cause.strerror}")
        console.error(lost)
        raise typer.Exit(lost.exit_code) from failed
    except OSError as error:
        refused = _error_of(error)
        console.error(refused)
        raise typer.Exit(refused.exit_code) from error
    except SnapError as error:
        console.error(error)
        raise typer.Exit(error.exit_code) from error
    except KeyboardInterrupt as interrupt:
        # Who left work behind has noted how to go on from it.
        notes = getattr(interrupt, "__notes__", ())
        step = "; ".join(notes) or "run the same command again to go on"
        stopped = Interrupted("interrupted", next_step=step)
        console.error(stopped)
        raise typer.Exit(stopped.exit_code) from interrupt


def _kind_of(error: OSError) -> type[SnapError]:
    return OutOfSpace if error.errno in {errno.ENOSPC, errno.EDQUOT} else SnapError


def _error_of(error: OSError) -> SnapError:
    """Say what the kernel refused where nobody knew better."""
    try:
        Path.cwd()
    except FileNotFoundError:
        return UsageError(
            "the working directory was removed", next_step="change to one that is there"
        )
    name = "" if error.filename is None else f"{os.fsdecode(error.filename)!r}: "
    return _kind_of(error)(f"{name}{error.strerror or error}")


def store_url(given: str | None) -> str:
    """The store to work with: the option, else the environment.

    Raises:
        UsageError: Neither says.
    """
    url = store_url_default() if given is None else given
    if not url:
        raise UsageError("no store given", next_step=f"add --store URL or set {STORE_URL_VARIABLE}")
    return url


def cache_directory(given: Path | None) -> Path | None:
    """The node's cache: the option, else the environment, else none."""
    return node_cache_default() if given is None else given


def parse_ranks(texts: list[str]) -> list[RankNumber]:
    """Read `--rank` values: numbers or `host`.

    Raises:
        UsageError: One is neither.
    """
    # It loads numpy, which most commands of the agent do without.
    from snapstore.format.rank import HOST

    ranks: list[RankNumber] = []
    for text in texts:
        if text == HOST:
            ranks.append(HOST)
        elif text.isascii() and text.isdecimal():
            ranks.append(int(text))
        else:
            raise UsageError(f"not a rank: {text!r}", next_step="give a number, or host")
    return ranks


def parse_labels(texts: list[str]) -> dict[str, str]:
    """Read `--label` values of the form `key=value`.

    Raises:
        UsageError: One is not of that form.
    """
    labels = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise UsageError(f"not a label: {text!r}", next_step="write it as key=value")
        if not _is_text(text):
            raise UsageError(f"not a label: {text!r}", next_step="write it in UTF-8")
        if key in labels:
            raise UsageError(f"two labels with the key {key!r}", next_step="give it once")
        labels[key] = value
    return labels


def _is_text(argument: str) -> bool:
    """Whether an argument is valid UTF-8; bytes that are not come as surrogates."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        return False
    return True


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
