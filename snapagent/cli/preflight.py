"""`snapagent preflight`: what stands in the way of a capture or a restore."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from snapagent.cli.places import IntoPid, Network, Pids, Where, parse_place
from snapstore.cli.common import Json, Quiet, StoreUrl, command, store_url
from snapstore.errors import UsageError

if TYPE_CHECKING:
    from snapagent.preflight import Obstacle

__all__ = ["preflight"]


def preflight(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME[:TAG]]", help="A snapshot to be restored.")
    ] = None,
    *,
    pid: Annotated[
        int | None, typer.Option(min=1, metavar="P", help="Root of a process tree to be captured.")
    ] = None,
    pids: Pids = Where.HERE,
    network: Network = Where.HERE,
    into_pid: IntoPid = None,
    images: Annotated[
        str | None, typer.Option(metavar="DIR", help="Which dump, if the snapshot has several.")
    ] = None,
    stop: Annotated[bool, typer.Option("--stop", help="As for capture.")] = False,
    store: StoreUrl = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """List every obstacle to capturing process P, or to restoring NAME here, with its remedy.

    Nothing is changed. Exits with 7 if one of them forbids it.
    """
    with command(json=json, quiet=quiet) as console:
        from snapagent.config import AgentConfig
        from snapagent.preflight import obstacles_json

        if (name is None) == (pid is None):
            raise UsageError(
                "preflight looks at a process or at a snapshot",
                next_step="give either --pid P or NAME",
            )
        config = AgentConfig.from_environment()
        if pid is not None:
            from snapagent.capture import find_obstacles as of_process

            obstacles = of_process(pid, config, stop=stop)
        else:
            import snapstore
            from snapagent.restore import RestoreRequest
            from snapagent.restore import find_obstacles as of_snapshot

            assert name is not None, "one of both"
            place = parse_place(pids, network, into_pid)
            request = RestoreRequest(name=name, images=images, place=place)
            with snapstore.open_store(store_url(store), readonly=True) as opened:
                obstacles = of_snapshot(opened, request, config)
        blocking = any(one.blocking for one in obstacles)
        document = {"possible": not blocking, "obstacles": obstacles_json(obstacles)}
        console.result(document, _text(obstacles))
        if blocking:
            raise typer.Exit(7)


def _text(obstacles: list[Obstacle]) -> str:
    if not obstacles:
        return "nothing stands in the way"
    lines = []
    for one in obstacles:
        word = "forbids it" if one.blocking else "mind"
        lines += [f"{one.code} ({word}): {one.subject}", f"  {one.remedy}"]
    return "\n".join(lines)
