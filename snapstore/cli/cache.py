"""`snapstore cache`: what this node keeps of stores, and filling it before it is needed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from snapstore.cache.contents import CacheEntry, CacheTier, TierStats
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
from snapstore.clock import SystemClock, format_utc
from snapstore.errors import LookupFailed, OutOfSpace, UsageError
from snapstore.options import NODE_CACHE_VARIABLE, Integrity, StoreOptions
from snapstore.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from snapstore.cache.node_cache import NodeCache
    from snapstore.cli.console import Console
    from snapstore.repository.store import Store
    from snapstore.repository.warming import WarmResult

__all__ = ["cache"]

cache = typer.Typer(
    name="cache",
    no_args_is_help=True,
    rich_markup_mode=None,
    help="What this node keeps of stores: stored bytes on disk, decoded files in memory.",
)

_Name = Annotated[str, typer.Argument(metavar="NAME[:TAG]", help="Which snapshot; or NAME@b3:ID.")]
_Tier = Annotated[
    CacheTier | None, typer.Option(help="Which part; by default decoded files, if it has some.")
]


@cache.command()
def init(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", parser=path_given, help="Where; a directory of its own on a local disk."
        ),
    ],
    *,
    size: Annotated[
        str | None,
        typer.Option(
            "--bytes", metavar="SIZE", help="For stored bytes in DIR; 0 for none. Default: half."
        ),
    ] = None,
    memory: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", parser=path_given, help="On tmpfs or hugetlbfs, for decoded files."
        ),
    ] = None,
    memory_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="For decoded files; with --memory.")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Make a cache, or change what one may take.

    Every process that is given DIR finds the settings there. Those that have it open keep the ones
    that they found. Without this command a cache in a fresh directory gets half of the free room,
    and nothing in memory.
    """
    from snapstore.cache.node_cache import NodeCache

    with command(json=json, quiet=quiet) as console:
        if (memory is None) != (memory_bytes is None):
            raise UsageError(
                "--memory and --memory-bytes go together", next_step="give both, or neither"
            )
        with NodeCache.init(
            directory,
            budget_bytes=None if size is None else parse_bytes(size),
            memory=memory,
            memory_budget_bytes=0 if memory_bytes is None else parse_bytes(memory_bytes),
        ) as made:
            if made.has_decoded and not made.has_large_pages:
                console.note(
                    f"{memory} has small pages: on a tmpfs that is mounted with huge=within_size, "
                    "decoded files are read about three times as fast"
                )
            _print_stats(console, made)


@cache.command()
def stats(*, directory: CacheDirectory = None, json: Json = False, quiet: Quiet = False) -> None:
    """Tell how much is in the cache, and how much may be."""
    with command(json=json, quiet=quiet) as console, _open(directory) as opened:
        _print_stats(console, opened)


@cache.command()
def ls(*, directory: CacheDirectory = None, json: Json = False, quiet: Quiet = False) -> None:
    """List what is in the cache, what was unused longest first."""
    with command(json=json, quiet=quiet) as console, _open(directory) as opened:
        entries = opened.entries()
        pins = opened.pins()
        if json:
            document = {
                "entries": [_entry(entry) for entry in entries],
                "pins": [{"snapshot": pin.snapshot, "name": pin.label} for pin in pins],
            }
            console.result(document, "")
            return
        console.table(
            ["tier", "held>", "of>", "last used", "", "what"],
            [
                [
                    entry.tier.value,
                    format_bytes(entry.held_bytes),
                    format_bytes(entry.size_bytes),
                    format_utc(entry.used_ns),
                    "pinned" if entry.is_pinned else "",
                    entry.label or entry.name,
                ]
                for entry in entries
            ],
        )
        for pin in pins:
            console.note(f"pinned: {pin.label} (snapshot {pin.snapshot[:12]})")


@cache.command()
def warm(
    name: _Name,
    *,
    tier: _Tier = None,
    rank: Annotated[
        list[str] | None, typer.Option(metavar="N|host", help="Only this rank. Repeatable.")
    ] = None,
    max_rate: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Read no more than this from the store in a second."),
    ] = None,
    pin: Annotated[bool, typer.Option("--pin", help="Keep it until `cache unpin`.")] = False,
    integrity: Annotated[
        Integrity,
        typer.Option(help="For whom to decode: `strong` as pulls and restores, `fast` as mounts."),
    ] = Integrity.STRONG,
    memory: Memory = "1GiB",
    threads: Threads = 0,
    store: StoreUrl = None,
    directory: CacheDirectory = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Fetch what the cache lacks of a snapshot, checked, before somebody needs it.

    If there is no room for all of it, that is said beforehand, only what fits is fetched, and it
    exits with 8. May be interrupted; the next run goes on.
    """
    with command(json=json, quiet=quiet) as console:
        options = StoreOptions(
            memory_bytes=parse_bytes(memory),
            threads=threads,
            integrity=integrity,
            node_cache=_required(directory),
        )
        rate = None if max_rate is None else _rate(max_rate)
        clock = SystemClock()
        started_s = clock.monotonic_s()
        with (
            _store(store, options, create=True) as opened,
            console.progress() as progress,
        ):
            if pin:
                opened.pin(name)
            result = opened.warm(
                name,
                tier=tier,
                ranks=parse_ranks(rank or []),
                bytes_per_s=rate,
                progress=progress,
                warn=console.warn,
            )
        seconds = clock.monotonic_s() - started_s
        if result.missed_bytes:
            raise OutOfSpace(
                f"{format_bytes(result.missed_bytes)} of {format_bytes(result.wanted_bytes)} did "
                f"not fit into the cache ({result.tier.value})",
                next_step="give it more room with `snapstore cache init`, unpin something, or "
                "warm one --rank",
            )
        console.result(_warmed(result, seconds), _warmed_text(result, seconds))


@cache.command()
def pin(
    name: _Name,
    *,
    store: StoreUrl = None,
    directory: CacheDirectory = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Keep what the cache has of a snapshot, now and later. Fetches no data."""
    with command(json=json, quiet=quiet) as console:
        options = StoreOptions(node_cache=_required(directory))
        with _store(store, options) as opened:
            snapshot = opened.pin(name)
        console.result(
            {"snapshot": snapshot.hex, "name": name},
            f"{name} is pinned (snapshot {snapshot.short})",
        )


@cache.command()
def unpin(
    name: Annotated[
        str, typer.Argument(metavar="NAME[:TAG]", help="As it was pinned; or the snapshot's id.")
    ],
    *,
    directory: CacheDirectory = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Let what a snapshot has in the cache go when its turn comes. Needs no store."""
    with command(json=json, quiet=quiet) as console, _open(directory) as opened:
        found = [one for one in opened.pins() if name in {one.label, one.snapshot}]
        if not found:
            raise LookupFailed(
                f"{name} is not pinned", next_step="`snapstore cache ls` lists what is"
            )
        for one in found:
            opened.unpin(one.snapshot)
        console.result({"unpinned": [one.snapshot for one in found]}, f"{name} is not pinned now")


@cache.command()
def evict(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME[:TAG]]", help="Only what this snapshot has there."),
    ] = None,
    *,
    every: Annotated[bool, typer.Option("--all", help="All that may go.")] = False,
    keep: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="All but so much of each part, used last."),
    ] = None,
    store: StoreUrl = None,
    directory: CacheDirectory = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Remove from the cache what is neither pinned nor open.

    What packs of a snapshot have for others goes as well.
    """
    with command(json=json, quiet=quiet) as console:
        if (name is not None) + every + (keep is not None) != 1:
            raise UsageError(
                "say what is to go", next_step="give a NAME, --all or --keep, one of them"
            )
        if name is not None:
            with _store(store, StoreOptions(node_cache=_required(directory))) as opened_store:
                freed = opened_store.evict(name)
        else:
            with _open(directory) as opened:
                freed = opened.evict(keep_bytes=0 if keep is None else parse_bytes(keep))
        console.result({"freed_bytes": freed}, f"{format_bytes(freed)} freed")


def _required(given: Path | None) -> Path:
    directory = cache_directory(given)
    if directory is None:
        raise UsageError(
            "no cache given", next_step=f"add --cache DIR or set {NODE_CACHE_VARIABLE}"
        )
    return directory


def _open(given: Path | None) -> NodeCache:
    from snapstore.cache.node_cache import NodeCache

    return NodeCache(_required(given), create=False)


def _store(url: str | None, options: StoreOptions, *, create: bool = False) -> Store:
    from snapstore.cache.node_cache import NodeCache
    from snapstore.repository.store import open_store

    assert options.node_cache is not None
    # What cannot be used now is only passed by where it is not what somebody asked for.
    NodeCache(options.node_cache, create=create).close()
    return open_store(store_url(url), options, readonly=True)


def _rate(text: str) -> float:
    rate = parse_bytes(text.removesuffix("/s"))
    if not rate:
        raise UsageError("cannot read 0 bytes in a second", next_step="give a larger --max-rate")
    return float(rate)


def _print_stats(console: Console, opened: NodeCache) -> None:
    found = opened.stats()
    tiers = {CacheTier.PACKS: found.packs, CacheTier.DECODED: found.decoded}
    document: dict[str, object] = {
        tier.value: dataclasses.asdict(stats) for tier, stats in tiers.items()
    }
    lines = [f"cache at {opened.directory}, {found.pins} pinned"]
    lines += [f"{tier.value}: {_tier_text(stats)}" for tier, stats in tiers.items()]
    console.result(
        {**document, "directory": str(opened.directory), "pins": found.pins}, "\n".join(lines)
    )


def _tier_text(stats: TierStats) -> str:
    if stats.directory is None:
        return "none are kept"
    return (
        f"{format_bytes(stats.used_bytes)} of {format_bytes(stats.budget_bytes)} in {stats.files} "
        f"files, {format_bytes(stats.pinned_bytes)} pinned, at {stats.directory}"
    )


def _entry(entry: CacheEntry) -> dict[str, object]:
    return {
        "tier": entry.tier.value,
        "name": entry.name,
        "label": entry.label,
        "bytes": entry.size_bytes,
        "held_bytes": entry.held_bytes,
        "used": format_utc(entry.used_ns),
        "pinned": entry.is_pinned,
    }


def _warmed(result: WarmResult, seconds: float) -> dict[str, object]:
    return {
        "tier": result.tier.value,
        "bytes": result.wanted_bytes,
        "missed_bytes": result.missed_bytes,
        "files": result.files,
        "seconds": round(seconds, 3),
    }


def _warmed_text(result: WarmResult, seconds: float) -> str:
    rate = format_bytes(int(result.wanted_bytes / max(seconds, 1e-3)))
    return (
        f"{format_bytes(result.wanted_bytes)} are in the cache ({result.tier.value}) after "
        f"{seconds:.2f} s ({rate}/s)"
    )
