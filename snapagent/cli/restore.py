"""`snapagent restore`: bring a captured process tree back to life."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Annotated

import typer

from snapagent.cli.places import IntoPid, Network, Pids, Where, parse_place
from snapstore.cli.common import Json, Memory, Quiet, StoreUrl, Threads, command, store_url
from snapstore.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from snapagent.restore import RestoreResult

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
    integrity: Annotated[
        _Integrity, typer.Option(help="Check chunk ids, or only checksums of frames.")
    ] = _Integrity.STRONG,
    memory: Memory = "1GiB",
    threads: Threads = 0,
    store: StoreUrl = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Bring the process tree of a snapshot back to life.

    It runs after a fraction of a second, while its private memory is filled behind it, what it
    touches first; the command ends when all is there. If it fails, is interrupted or killed before
    that, the tree is ended and nothing is left.
    """
    with command(json=json, quiet=quiet) as console:
        import snapstore
        from snapagent.config import AgentConfig
        from snapagent.restore import RestoreRequest
        from snapagent.restore import restore as restore_tree

        options = snapstore.StoreOptions(
            memory_bytes=parse_bytes(memory),
            threads=threads,
            integrity=snapstore.Integrity(integrity.value),
        )
        request = RestoreRequest(
            name=name,
            images=images,
            place=parse_place(pids, network, into_pid),
            eager=eager,
            record_s=record,
            force=force,
        )
        config = AgentConfig.from_environment()
        with (
            snapstore.open_store(store_url(store), options) as opened,
            console.progress() as progress,
        ):
            result = restore_tree(opened, request, config, progress)
        console.result(result.document(), _text(result))


def _text(result: RestoreResult) -> str:
    lazy = result.lazy
    filled = lazy.fault_bytes + lazy.fill_bytes + lazy.zero_bytes
    rate = format_bytes(int(filled / max(result.fill_s, 1e-3)))
    return (
        f"{result.name} runs as process {result.root_pid}: it could answer after "
        f"{result.running_s:.2f} s, and was whole after {result.total_s:.2f} s\n"
        f"  agent setup {result.agent_setup_s:.2f} s, CRIU restore {result.criu_restore_s:.2f} s, "
        f"no CUDA, fill {result.fill_s:.2f} s ({rate}/s)\n"
        f"  {format_bytes(result.eager_bytes)} loaded first "
        f"({format_bytes(result.shared_bytes)} shared memory), {format_bytes(lazy.fault_bytes)} by "
        f"{lazy.faults} faults, {format_bytes(lazy.fill_bytes)} behind them, "
        f"{format_bytes(lazy.zero_bytes)} zeros\n"
        f"  most of the time went into {result.bottleneck}"
    )
