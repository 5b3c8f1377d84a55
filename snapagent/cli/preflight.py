"""`snapagent preflight`: what stands in the way of a capture or a restore."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from snapagent.cli.places import (
    DriverChange,
    IntoPid,
    Network,
    NoDaemon,
    Pids,
    Where,
    daemon,
    require_place,
)
from snapstore.cli.common import Json, Quiet, StoreUrl, command, store_url
from snapstore.errors import UsageError

if TYPE_CHECKING:
    from snapagent.api import PreflightAnswer, PreflightProcessBody, PreflightSnapshotBody
    from snapagent.client import Daemon
    from snapagent.config import Settings
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
    allow_driver_change: DriverChange = False,
    stop: Annotated[bool, typer.Option("--stop", help="As for capture.")] = False,
    store: StoreUrl = None,
    no_daemon: NoDaemon = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """List every obstacle to capturing process P, or to restoring NAME here, with its remedy.

    Nothing is changed. Exits with 7 if one of them forbids it.
    """
    with command(json=json, quiet=quiet) as console:
        import msgspec

        from snapagent.api import PreflightProcessBody, PreflightSnapshotBody
        from snapagent.config import load_settings

        if (name is None) == (pid is None):
            raise UsageError(
                "preflight looks at a process or at a snapshot",
                next_step="give either --pid P or NAME",
            )
        settings = load_settings()
        require_place(pids, network, into_pid)
        running = daemon(settings, unwanted=no_daemon)
        if pid is not None:
            found = _of_process(PreflightProcessBody(pid=pid, stop=stop), settings, running)
        else:
            assert name is not None, "one of both"
            body = PreflightSnapshotBody(
                name=name,
                store=store or settings.store or None,
                images=images,
                pids=pids.value,
                network=network.value,
                into_pid=into_pid,
                allow_driver_change=allow_driver_change,
            )
            found = _of_snapshot(body, settings, running)
        console.result(msgspec.to_builtins(found), _text(found))
        if not found.possible:
            raise typer.Exit(7)


def _of_process(
    body: PreflightProcessBody, settings: Settings, running: Daemon | None
) -> PreflightAnswer:
    from snapagent.api import PreflightAnswer

    if running is not None:
        return running.ask("POST", "/v1/preflight/capture", PreflightAnswer, body)
    from snapagent.capture import find_obstacles

    return _answer(find_obstacles(body.pid, settings.agent, stop=body.stop))


def _of_snapshot(
    body: PreflightSnapshotBody, settings: Settings, running: Daemon | None
) -> PreflightAnswer:
    from snapagent.api import PreflightAnswer

    if running is not None:
        return running.ask("POST", "/v1/preflight/restore", PreflightAnswer, body)
    import snapstore
    from snapagent.restore import RestoreRequest, find_obstacles
    from snapagent.supervision import Place

    place = Place(network=body.network, pids=body.pids, join_pid=body.into_pid)
    request = RestoreRequest(
        name=body.name,
        images=body.images,
        place=place,
        allow_driver_change=body.allow_driver_change,
    )
    with snapstore.open_store(store_url(body.store), readonly=True) as opened:
        return _answer(find_obstacles(opened, request, settings.agent))


def _answer(obstacles: list[Obstacle]) -> PreflightAnswer:
    from snapagent.api import ObstacleBody, PreflightAnswer

    return PreflightAnswer(
        possible=not any(one.blocking for one in obstacles),
        obstacles=[
            ObstacleBody(
                code=one.code, subject=one.subject, remedy=one.remedy, blocking=one.blocking
            )
            for one in obstacles
        ],
    )


def _text(found: PreflightAnswer) -> str:
    if not found.obstacles:
        return "nothing stands in the way"
    lines = []
    for one in found.obstacles:
        word = "forbids it" if one.blocking else "mind"
        lines += [f"{one.code} ({word}): {one.subject}", f"  {one.remedy}"]
    return "\n".join(lines)
