"""`snapagent run`: the daemon of a node."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from snapstore.cli.common import Json, Quiet, command

if TYPE_CHECKING:
    from collections.abc import Callable

    from snapagent.config import Settings

__all__ = ["run_command"]


def run_command(
    *,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Settings. Default: $SNAPAGENT_CONFIG, else /etc/snapagent.toml."
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
        import msgspec

        from snapagent.config import load_settings

        settings = load_settings(config)
        if check:
            from snapagent.server.listener import group_id
            from snapagent.server.stores import options_of

            options_of(settings)
            group_id(settings.socket_group)
            document = msgspec.to_builtins(settings)
            shown = {key: msgspec.json.encode(value).decode() for key, value in document.items()}
            console.result(document, "\n".join(f"{key} = {shown[key]}" for key in shown))
            return
        run = _load()
        run(settings, console.note)
        _leave()


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
