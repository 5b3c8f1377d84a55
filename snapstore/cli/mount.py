"""`snapstore mount` and `snapstore umount`: snapshots as volumes."""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from snapstore.cli.common import (
    CacheDirectory,
    Json,
    Memory,
    Quiet,
    StoreUrl,
    Threads,
    cache_directory,
    command,
    parse_ranks,
    path_given,
    store_url,
)
from snapstore.errors import UsageError
from snapstore.options import Integrity
from snapstore.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from snapstore.cli.console import Console
    from snapstore.mount.options import MountOptions

__all__ = ["mount", "umount"]

_UMOUNT_S = 30.0
_SHOWN_MAX = 5


Places = Annotated[
    list[str],
    typer.Argument(
        metavar="NAME[:TAG] DIR", help="Which snapshot, or NAME@b3:ID; and where, a directory."
    ),
]
AllNames = Annotated[
    bool, typer.Option("--all", help="Mount all names as NAME/TAG/…; give DIR alone.")
]
Ranks = Annotated[
    list[str] | None, typer.Option(metavar="N|host", help="Only this rank. Repeatable.")
]
Foreground = Annotated[
    bool, typer.Option("--foreground", "-f", help="Serve here, until Ctrl-C or umount.")
]
Warm = Annotated[
    bool, typer.Option("--warm", help="Fetch all in the background, in order of a restore.")
]
AllowOther = Annotated[
    bool | None,
    typer.Option(
        "--allow-other/--no-allow-other",
        help="Let other users in, by the permissions of the files. Default: if root mounts.",
    ),
]
Timeout = Annotated[
    float,
    typer.Option(metavar="SECONDS", help="How long readers wait for a store that does not answer."),
]
ReadAhead = Annotated[
    str, typer.Option(metavar="SIZE", help="What the kernel reads ahead; 0 leaves it alone.")
]
LogFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        parser=path_given,
        help="Where to log. Default: the system's log, or stderr.",
    ),
]
CheckedBy = Annotated[Integrity, typer.Option(help="Check frames only, or chunk ids as well.")]


def mount(
    places: Places,
    *,
    all_names: AllNames = False,
    rank: Ranks = None,
    foreground: Foreground = False,
    warm: Warm = False,
    allow_other: AllowOther = None,
    timeout: Timeout = 60.0,
    integrity: CheckedBy = Integrity.FAST,
    memory: Memory = "512MiB",
    read_ahead: ReadAhead = "2MiB",
    log_file: LogFile = None,
    cache: CacheDirectory = None,
    threads: Threads = 0,
    store: StoreUrl = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Mount a snapshot read-only; bytes are fetched and checked when they are read.

    Returns when the mount answers, and leaves a process that serves it: end it with `snapstore
    umount DIR`, or with SIGTERM. Manifests are in DIR/.snapstore, which is not listed.
    """
    with command(json=json, quiet=quiet) as console:
        _require_extra()
        from snapstore.mount.daemon import configure_log, serve_detached
        from snapstore.mount.options import MountOptions
        from snapstore.mount.table import place_of

        name, directory = _places(places, all_names=all_names)
        kept = cache_directory(cache)
        options = MountOptions(
            url=_absolute(store_url(store)),
            name=name,
            directory=place_of(directory),
            ranks=tuple(parse_ranks(rank or [])),
            memory_bytes=parse_bytes(memory),
            threads=threads,
            integrity=integrity,
            cache=None if kept is None else kept.absolute(),
            timeout_s=timeout,
            warm=warm,
            allow_other=allow_other,
            read_ahead_kib=parse_bytes(read_ahead) // 1024,
        )
        if _hides_something(options.directory):
            console.warn(f"{directory} is not empty: what is in it is hidden by the mount")
        configure_log(log_file, is_detached=not foreground)
        if foreground:
            _serve(options, functools.partial(_tell, console))
        else:
            _tell(console, serve_detached(functools.partial(_serve, options)))


def umount(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", parser=path_given, help="Where it is mounted.")
    ],
    *,
    force: Annotated[
        bool, typer.Option("--force", help="Even if it is in use: what is being read fails.")
    ] = False,
    lazy: Annotated[
        bool, typer.Option("--lazy", help="Now from sight; it ends when nobody uses it any more.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Unmount a snapshot; returns when the mount and the process that served it are gone."""
    with command(json=json, quiet=quiet) as console:
        from snapstore.mount.unmount import unmount

        done = unmount(directory, force=force, lazy=lazy, wait_s=_UMOUNT_S)
        if done.seen_by:
            shown = ", ".join(map(str, done.seen_by[:_SHOWN_MAX]))
            console.warn(f"processes with mounts of their own still have it: {shown}")
        elif not (done.has_ended or lazy):
            console.warn("the process that served it has not ended yet")
        document = {
            "directory": str(directory),
            "ended": done.has_ended,
            "seen_by": done.seen_by,
        }
        console.result(document, f"unmounted {directory}")


def _require_extra() -> None:
    try:
        import pyfuse3  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"mounting needs pyfuse3, which cannot be loaded: {error}",
            next_step="apt install fuse3 libfuse3-dev pkg-config gcc python3-dev, and "
            "pip install 'snapstore[fuse]'",
        ) from error


def _places(places: list[str], *, all_names: bool) -> tuple[str | None, Path]:
    wanted = ["DIR"] if all_names else ["NAME[:TAG]", "DIR"]
    if len(places) != len(wanted):
        raise UsageError(
            f"{' '.join(wanted)} must be given, and {len(places)} arguments are",
            next_step="write `snapstore mount NAME[:TAG] DIR` or `snapstore mount --all DIR`",
        )
    if not places[-1]:
        raise UsageError("DIR is empty", next_step="name a directory")
    return (None if all_names else places[0]), Path(places[-1])


def _absolute(url: str) -> str:
    """What the store is called from any directory: the daemon leaves the one it was started in."""
    return url if "://" in url else str(Path(url).absolute())


def _hides_something(directory: Path) -> bool:
    """Whether there is anything in a directory that is about to be mounted on."""
    from snapstore.mount.table import mounted_at

    # Where something is mounted, it may be dead, or hang; that is looked at later.
    if mounted_at(directory) is not None:
        return False
    with contextlib.suppress(OSError), os.scandir(directory) as listing:
        return next(listing, None) is not None
    return False


def _serve(options: MountOptions, ready: Callable[[Mapping[str, object]], None]) -> None:
    # In the process that serves: the library has threads of its own.
    from snapstore.mount.session import serve

    serve(options, ready)


def _tell(console: Console, mounted: Mapping[str, object]) -> None:
    what = mounted["name"] or "all names"
    console.result(mounted, f"{what} is mounted on {mounted['directory']}")
