"""`snapstore tag`: other names for snapshots, the history of a name, and the way back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup
from typing_extensions import override

from snapstore.cli.common import Json, Quiet, StoreUrl, command, store_url
from snapstore.repository.store import open_store

if TYPE_CHECKING:
    from snapstore.cli.console import Console
    from snapstore.repository.refs import NameGeneration, ResolvedRef

__all__ = ["tag"]

_DEFAULT = "set"


class _Group(TyperGroup):
    """Takes what is none of its commands for the arguments of `set`."""

    @override
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See `typer.core.TyperGroup`; versions of typer differ in where the context's type is."""
        if args and args[0] not in {*self.commands, *ctx.help_option_names}:
            args = [_DEFAULT, *args]
        return super().parse_args(ctx, args)


tag = typer.Typer(
    name="tag",
    cls=_Group,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Give snapshots other names, tell a name's history, go back in it. "
    "`snapstore tag NAME NEW` is short for `snapstore tag set NAME NEW`.",
)


@tag.command(_DEFAULT)
def set_tag(
    source: Annotated[
        str, typer.Argument(metavar="NAME[:TAG]", help="Which snapshot; or NAME@b3:ID.")
    ],
    name: Annotated[
        str, typer.Argument(metavar="NEW[:TAG]", help="What to point to it; moved if it exists.")
    ],
    *,
    store: StoreUrl = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Let NEW point to the same snapshot as NAME. Nothing is copied; safe to repeat."""
    with (
        command(json=json, quiet=quiet) as console,
        open_store(store_url(store)) as opened,
    ):
        _print_moved(console, opened.tag(source, name))


@tag.command()
def history(
    name: Annotated[str, typer.Argument(metavar="NAME[:TAG]", help="Which name.")],
    *,
    store: StoreUrl = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """List what a name has pointed to, the newest first, also if it was deleted."""
    with (
        command(json=json, quiet=quiet) as console,
        open_store(store_url(store), readonly=True) as opened,
    ):
        generations = opened.history(name)
        for one in generations:
            if one.damaged:
                console.warn(f"generation {one.number}: {one.damaged}")
        if json:
            console.result(
                {"name": name, "generations": [_document(one) for one in generations]}, ""
            )
        else:
            console.table(
                ["generation>", "created", "points to", "written by"],
                [
                    [str(one.number), one.created, _points_to(one), one.holder]
                    for one in generations
                ],
            )


@tag.command()
def rollback(
    name: Annotated[str, typer.Argument(metavar="NAME[:TAG]", help="Which name.")],
    *,
    to: Annotated[
        int | None,
        typer.Option(metavar="N", help="Which generation; by default the previous snapshot."),
    ] = None,
    store: StoreUrl = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Let a name point again to what it pointed to before; brings a deleted name back.

    This is a new generation: history only grows, and another rollback undoes this one. A snapshot
    whose data are gone is refused.
    """
    with (
        command(json=json, quiet=quiet) as console,
        open_store(store_url(store)) as opened,
    ):
        _print_moved(console, opened.rollback(name, to=to))


def _print_moved(console: Console, moved: ResolvedRef) -> None:
    console.result(
        {
            "name": str(moved.name),
            "snapshot": moved.snapshot.hex,
            "generation": moved.generation,
            "created": moved.created,
        },
        f"{moved.name} is snapshot {moved.snapshot.short} (generation {moved.generation})",
    )


def _document(one: NameGeneration) -> dict[str, object]:
    return {
        "generation": one.number,
        "created": one.created,
        "state": one.state,
        "snapshot": one.snapshot.hex if one.snapshot is not None else None,
        "present": one.present,
        "holder": one.holder,
    }


def _points_to(one: NameGeneration) -> str:
    if one.snapshot is None:
        return one.state
    return one.snapshot.short if one.present else f"{one.snapshot.short} (gone)"
