"""`snapagent run`: the daemon of a node."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from snapstore.cli.common import Json, Quiet, command, path_given

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from snapagent.config import Settings
    from snapstore.cli.console import Console

__all__ = ["run_command"]


def run_command(
    *,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            parser=path_given,
            help="Settings. Default: $SNAPAGENT_CONFIG, else /etc/snapagent.toml.",
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Only check the settings, and print them.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Serve this node: take captures and restores over a socket, for commands and for programs.

    Other commands use it while it runs. SIGTERM ends it in order: what is under way gets a while to
    be done, captured processes go on, and restored ones that are not whole are ended.
    """
    with command(json=json, quiet=quiet) as console:
        from snapagent.config import check_store, load_file, load_settings, unknown_variables

        settings = load_settings(config)
        check_store(settings)
        unknown = unknown_variables()
        if check:
            _check(settings, unknown)
            # Also what a variable of this environment hides: the daemon's may not have it.
            of_file = load_file(config)
            check_store(of_file)
            _check(of_file, unknown)
            if json or not quiet:
                _show(settings, console)
            return
        for text in unknown:
            console.warn(text)
        run = _load()
        run(settings, console.note)
        _leave()


def _check(settings: Settings, unknown: Sequence[str]) -> None:
    """Check what the daemon would stumble over when it starts.

    Raises:
        ConfigInvalid: Of a variable of the environment that it would not read, too.
        UsageError: The settings do not go together.
    """
    from snapagent.errors import ConfigInvalid
    from snapagent.server.listener import group_id
    from snapagent.server.stores import options_of

    options_of(settings)
    group_id(settings.socket_group)
    if unknown:
        raise ConfigInvalid("; ".join(unknown), next_step="correct it, or take it away")


def _show(settings: Settings, console: Console) -> None:
    import msgspec

    document = msgspec.to_builtins(settings)
    shown = {key: msgspec.json.encode(value).decode() for key, value in document.items()}
    console.result(document, "\n".join(f"{key} = {shown[key]}" for key in shown))


def _leave() -> None:
    """End the program without the exit handlers of libraries.

    A thread may still wait for a store that does not answer, or be opening one. OpenSSL frees its
    locks at exit, and whoever takes one then dies of SIGSEGV, as if the daemon had failed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _load() -> Callable[[Settings, Callable[[str], None]], None]:
    try:
        from snapagent.server.run import run_daemon
    except ModuleNotFoundError as error:
        from snapagent.errors import AgentError

        if error.name not in {"aiohttp", "prometheus_client"}:
            raise
        raise AgentError(
            f"the daemon needs {error.name}", next_step="pip install 'snapstore[agent]'"
        ) from error
    return run_daemon
