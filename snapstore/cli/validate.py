"""`snapstore validate-backend`: try a storage before trusting it."""

from __future__ import annotations

import dataclasses
import random
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from snapstore.cli.common import Json, Quiet, command
from snapstore.clock import SystemClock
from snapstore.errors import CapabilityMissing
from snapstore.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from snapstore.cli.console import Console
    from snapstore.testing.validate import CheckResult, Validation

__all__ = ["validate_backend"]

_SEED_BITS = 32


def validate_backend(
    url: Annotated[str, typer.Argument(metavar="URL", help="The storage; a store may be in it.")],
    *,
    mounts: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="A B", help="The same storage in two mounts, as two machines see it."),
    ] = None,
    size: Annotated[
        str, typer.Option(metavar="SIZE", help="How much to write and read for the rates.")
    ] = "256MiB",
    seed: Annotated[
        int | None, typer.Option(metavar="N", help="Repeat a run with its names and bytes.")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Try a storage before trusting it with a store.

    Runs the checks that snapstore's own storage has to pass, measures latency and rate, and removes
    what it wrote. Exits with 0 if a store can be kept there, with 5 if not.
    """
    with command(json=json, quiet=quiet) as console:
        from snapstore.testing.subjects import subject_of
        from snapstore.testing.validate import validate

        chosen = secrets.randbits(_SEED_BITS) if seed is None else seed
        data_bytes = parse_bytes(size)

        def show(result: CheckResult) -> None:
            if not json:
                console.note(f"{result.outcome:10} {result.seconds:7.3f} s  {result.statement}")

        found = validate(
            subject_of(url, mounts=mounts or ()),
            random.Random(chosen),  # noqa: S311 - names and bytes of a test
            SystemClock(),
            data_bytes=data_bytes,
            checked=show,
        )
        _report(console, found, chosen)
        if not found.usable:
            raise typer.Exit(CapabilityMissing.exit_code)


def _report(console: Console, found: Validation, seed: int) -> None:
    document = {**dataclasses.asdict(found), "usable": found.usable, "seed": seed}
    console.result(document, _text(found))


def _text(found: Validation) -> str:
    lines = [
        f"{one.operation:34} median {one.median_s * 1e3:8.2f} ms   worst {one.worst_s * 1e3:.2f} ms"
        for one in found.latencies
    ]
    lines += [f"{one.operation:34} {format_bytes(int(one.bytes_per_s))}/s" for one in found.rates]
    by_outcome = {
        outcome: [one for one in found.checks if one.outcome == outcome]
        for outcome in ("passed", "failed", "not tested")
    }
    lines += [f"FAILED: {one.statement} ({one.reason})" for one in by_outcome["failed"]]
    lines += [f"not tested: {one.statement} ({one.reason})" for one in by_outcome["not tested"]]
    counts = ", ".join(f"{len(them)} {outcome}" for outcome, them in by_outcome.items())
    verdict = "can hold a store" if found.usable else "CANNOT hold a store"
    return "\n".join([*lines, f"{found.url} {verdict}: {counts}"])
