"""`snapagent restore`: bring a captured process tree back to life."""

from __future__ import annotations

import enum
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
from snapstore.cli.common import Json, Memory, Quiet, StoreUrl, Threads, command, store_url
from snapstore.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from snapagent.api import RestoreDone, RestoreRequestBody
    from snapagent.config import Settings
    from snapstore import ProgressCallback
    from snapstore.cli.console import Console

__all__ = ["restore"]


class _Integrity(enum.Enum):
    STRONG = "strong"
    FAST = "fast"


def restore(
    name: Annotated[str, typer.Argument(metavar="NAME[:TAG]", help="Which snapshot.")],
    *,
    eager: Annotated[
        bool, typer.Option("--eager", help="Fill all memory before the processes run.")
    ] = False,
    record: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Fill only what is touched for so long, and keep the order as a hint for later "
            "restores; then fill the rest.",
        ),
    ] = None,
    pids: Pids = Where.HERE,
    network: Network = Where.HERE,
    into_pid: IntoPid = None,
    images: Annotated[
        str | None, typer.Option(metavar="DIR", help="Which dump, if the snapshot has several.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Try although preflight says that it cannot work.")
    ] = False,
    allow_driver_change: DriverChange = False,
    integrity: Annotated[
        _Integrity | None,
        typer.Option(help="Check chunk ids (the default), or only checksums of frames."),
    ] = None,
    memory: Memory = "1GiB",
    threads: Threads = 0,
    store: StoreUrl = None,
    no_daemon: NoDaemon = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Bring the process tree of a snapshot back to life.

    It runs after a fraction of a second, while its private memory is filled behind it, what it
    touches first; the command ends when all is there. If it fails or is interrupted before that,
    the tree is ended and nothing is left. The daemon does it if it runs, within its own budget.
    """
    with command(json=json, quiet=quiet) as console:
        import msgspec

        from snapagent.api import RestoreRequestBody
        from snapagent.config import load_settings

        settings = load_settings()
        require_place(pids, network, into_pid)
        body = RestoreRequestBody(
            name=name,
            store=store or settings.store or None,
            images=images,
            pids=pids.value,
            network=network.value,
            into_pid=into_pid,
            eager=eager,
            record_s=record,
            force=force,
            allow_driver_change=allow_driver_change,
            integrity=integrity.value if integrity is not None else None,
        )
        running = daemon(settings, unwanted=no_daemon)
        with console.progress() as progress:
            if running is not None:
                done = running.run_restore(body, progress, console.warn)
            else:
                done = _here(body, settings, (memory, threads), console, progress)
        console.result(msgspec.structs.asdict(done), _text(done))


def _here(
    body: RestoreRequestBody,
    settings: Settings,
    budget: tuple[str, int],
    console: Console,
    progress: ProgressCallback | None,
) -> RestoreDone:
    """Do it in this process."""
    import msgspec

    import snapstore
    from snapagent.api import RestoreDone
    from snapagent.recorded import recorded_restore
    from snapagent.restore import RestoreRequest
    from snapagent.supervision import Place

    options = snapstore.StoreOptions(
        memory_bytes=parse_bytes(budget[0]),
        threads=budget[1],
        integrity=snapstore.Integrity(body.integrity or settings.integrity),
        node_cache=settings.node_cache_directory,
    )
    request = RestoreRequest(
        name=body.name,
        images=body.images,
        place=Place(network=body.network, pids=body.pids, join_pid=body.into_pid),
        eager=body.eager,
        record_s=body.record_s,
        force=body.force,
        allow_driver_change=body.allow_driver_change,
    )
    with snapstore.open_store(store_url(body.store), options) as opened:
        result = recorded_restore(opened, request, settings.agent, progress, warn=console.warn)
    return msgspec.convert(result.document(), RestoreDone)


def _text(done: RestoreDone) -> str:
    lazy = {key: int(value or 0) for key, value in done.lazy.items()}
    filled = lazy["fault_bytes"] + lazy["fill_bytes"] + lazy["zero_bytes"]
    seconds = done.cuda_restore_s
    cuda = "no CUDA" if seconds is None else f"CUDA restore {seconds:.2f} s"
    rate = format_bytes(int(filled / max(done.fill_s, 1e-3)))
    external = ""
    if done.external_s is not None:
        size = format_bytes(done.external_bytes)
        external = f"  {size} of external memory, whole after {done.external_s:.2f} s"
        cached = done.external_sources["cache"] + done.external_sources["registered"]
        if cached:
            external += f", {format_bytes(cached)} of it from the node's cache"
        if done.gpu_bottleneck is not None:
            external += f"; GPUs waited for: {done.gpu_bottleneck}"
        external += "\n"
    return (
        f"{done.name} runs as process {done.root_pid}: it could answer after "
        f"{done.running_s:.2f} s, and was whole after {done.total_s:.2f} s\n"
        f"  agent setup {done.agent_setup_s:.2f} s, CRIU restore {done.criu_restore_s:.2f} s, "
        f"{cuda}, fill {done.fill_s:.2f} s ({rate}/s)\n"
        f"  {format_bytes(done.eager_bytes)} loaded first "
        f"({format_bytes(done.shared_bytes)} shared memory), {format_bytes(lazy['fault_bytes'])} "
        f"by {lazy['faults']} faults, {format_bytes(lazy['fill_bytes'])} behind them, "
        f"{format_bytes(lazy['zero_bytes'])} zeros\n{external}"
        f"  most of the time went into {done.bottleneck}"
    )
