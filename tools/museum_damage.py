"""What is broken in each store of the museum, and what every command must say to it.

`{tree}` in a command is the tree that the store holds, `{target}` a directory that does not exist.
Commands run one after the other on one copy, so a push that heals is followed by a pull.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

__all__ = ["EXHIBITS", "Command", "Exhibit"]


@dataclasses.dataclass(frozen=True, slots=True)
class Command:
    """One command and what must come of it.

    Attributes:
        run: Its arguments.
        exit: Its exit code.
        says: Part of what it prints; of the error, if it fails.
    """

    run: tuple[str, ...]
    exit: int = 0
    says: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Exhibit:
    """One store.

    Attributes:
        name: Of its files.
        broken: What is wrong with it.
        damage: Takes the root of a store and the files that the push of its tree has made.
        commands: What to run.
    """

    name: str
    broken: str
    damage: Callable[[Path, Sequence[Path]], object]
    commands: tuple[Command, ...]


def _ls(says: str = "team/model:v1", *, code: int = 0) -> Command:
    return Command(("ls",), code, says)


def _show(code: int = 0, says: str = "rank") -> Command:
    return Command(("show", "team/model:v1"), code, says)


def _pull(code: int = 0, says: str = "") -> Command:
    return Command(("pull", "team/model:v1", "{target}"), code, says)


def _push(code: int = 0, says: str = "") -> Command:
    return Command(("push", "{tree}", "team/model:v1"), code, says)


_OTHER = Command(("pull", "other:v1", "{target}"))
_HEALS = (_push(), _pull())


# -- ways to break a file -------------------------------------------------------------------------


def _of(kind: str, files: Sequence[Path]) -> list[Path]:
    """The new files of one kind, such as `packs`."""
    found = [path for path in files if kind in path.parts]
    assert found, kind
    return found


def _gone(*kinds: str) -> Callable[[Path, Sequence[Path]], None]:
    def damage(_: Path, files: Sequence[Path]) -> None:
        for kind in kinds:
            for path in _of(kind, files):
                path.unlink()

    return damage


def _flipped(kind: str, at: float) -> Callable[[Path, Sequence[Path]], None]:
    def damage(_: Path, files: Sequence[Path]) -> None:
        for path in _of(kind, files):
            data = bytearray(path.read_bytes())
            data[int(len(data) * at)] ^= 1
            path.write_bytes(data)

    return damage


def _cut(kind: str, keep: float) -> Callable[[Path, Sequence[Path]], None]:
    def damage(_: Path, files: Sequence[Path]) -> None:
        for path in _of(kind, files):
            data = path.read_bytes()
            path.write_bytes(data[: int(len(data) * keep)])

    return damage


def _swapped_packs(root: Path, files: Sequence[Path]) -> None:
    (mine,) = _of("packs", files)
    (other,) = (path for path in (root / "packs").rglob("*") if path.is_file() and path != mine)
    first, second = mine.read_bytes(), other.read_bytes()
    mine.write_bytes(second)
    other.write_bytes(first)


def _config(change: Callable[[dict[str, object]], object]) -> Callable[[Path, object], None]:
    def damage(root: Path, _: object) -> None:
        path = root / "snapstore.json"
        value = json.loads(path.read_bytes())
        change(value)
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        path.write_text(text, "utf-8")

    return damage


def _half_a_push(_: Path, files: Sequence[Path]) -> None:
    """As far as a push comes that is killed before it has a rank manifest."""
    _gone("refs", "snapshots", "ranks", "layouts")(_, files)
    leases = sorted(_of("leases", files))
    for path in leases[1:]:
        path.unlink()


def _deleted_name(root: Path, _: object) -> None:
    first = root / "refs/team/model/@v1/00000001"
    value = json.loads(first.read_bytes()) | {"nonce": "0" * 32, "snapshot": None}
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    first.with_name("00000002").write_text(text, "utf-8")


def _deleting_pack(root: Path, files: Sequence[Path]) -> None:
    """A pruner has decided to remove the pack and died before it did."""
    (pack,) = _of("packs", files)
    for number, state in enumerate(("condemned", "deleting"), 1):
        mark = root / f"marks/packs/{pack.name}/{number:08d}"
        mark.parent.mkdir(parents=True, exist_ok=True)
        value = {
            "created": "2026-11-30T05:00:00Z",
            "format": "snapstore/mark",
            "nonce": f"{number:032x}",
            "state": state,
            "version": 1,
        }
        mark.write_text(json.dumps(value, sort_keys=True, separators=(",", ":")), "utf-8")


def _foreign_files(root: Path, _: object) -> None:
    """What people and file systems leave in directories."""
    for path in ("packs/.nfs000012", "packs/lost+found/x", "notes.txt", "refs/team/.snapshot/x"):
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("not of the store\n", "utf-8")


# -- the exhibits ---------------------------------------------------------------------------------

EXHIBITS = (
    Exhibit("whole", "Nothing.", lambda *_: None, (_ls(), _show(), _pull(), _OTHER, _push())),
    Exhibit(
        "pack-bit",
        "One bit of a frame in a pack is wrong.",
        _flipped("packs", 0.05),
        (_ls(), _show(), _pull(4, "its checksum differs"), _OTHER),
    ),
    Exhibit(
        "pack-gone",
        "A pack is gone.",
        _gone("packs"),
        (_show(), _pull(4, "is gone or cut short"), *_HEALS, _OTHER),
    ),
    Exhibit(
        "pack-cut",
        "A pack ends in its middle.",
        _cut("packs", 0.5),
        (_pull(4, "is gone or cut short"), _OTHER),
    ),
    Exhibit(
        "packs-swapped",
        "Two packs have each other's names.",
        _swapped_packs,
        (_ls(), _pull(4, "frame at offset")),
    ),
    Exhibit(
        "index-gone",
        "The index of a push is gone: its chunks are sent again, its snapshot is readable.",
        _gone("indexes"),
        (_pull(), *_HEALS),
    ),
    Exhibit(
        "index-bit",
        "One bit of an index is wrong.",
        _flipped("indexes", 0.9),
        (_pull(), _push(says="index"), _pull()),
    ),
    Exhibit(
        "layouts-gone",
        "All layouts of a snapshot are gone: they are derived from the indexes.",
        _gone("layouts"),
        (_show(), _pull(), *_HEALS),
    ),
    Exhibit(
        "layouts-bit",
        "One bit of every layout is wrong.",
        _flipped("layouts", 0.5),
        (_show(), _pull(), *_HEALS),
    ),
    Exhibit(
        "layouts-and-index-gone",
        "Nothing says where the chunks are.",
        _gone("layouts", "indexes"),
        (_ls(), _pull(4, "are in no index"), *_HEALS, _OTHER),
    ),
    Exhibit(
        "rank-gone",
        "The rank manifests of a snapshot are gone.",
        _gone("ranks"),
        (_ls(), _show(4, "is not in the store"), _pull(4, "is not in the store"), *_HEALS),
    ),
    Exhibit(
        "rank-bit",
        "One bit of the tree in every rank manifest is wrong.",
        _flipped("ranks", 0.6),
        (_ls(), _pull(4, "pull another snapshot, or move ranks/"), _OTHER),
    ),
    Exhibit(
        "snapshot-gone",
        "A name points to a root manifest that is gone.",
        _gone("snapshots"),
        (_ls(), _show(4, "is not in the store"), _pull(4, "is not in the store"), *_HEALS),
    ),
    Exhibit(
        "snapshot-bit",
        "One bit of a root manifest is wrong.",
        _flipped("snapshots", 0.5),
        (_pull(4, "its digest differs"), _OTHER),
    ),
    Exhibit(
        "ref-cut",
        "A ref ends in its middle.",
        _cut("refs", 0.5),
        (
            _ls("the name team/model:v1 is damaged"),
            _pull(4, "the name team/model:v1 is damaged"),
            _OTHER,
            *_HEALS,
        ),
    ),
    Exhibit(
        "ref-deleted",
        "Nothing: the name was deleted, and its snapshot is still there.",
        _deleted_name,
        (_ls("other:v1"), _pull(3, "no snapshot is named team/model:v1"), *_HEALS),
    ),
    Exhibit(
        "config-gone",
        "The configuration is gone.",
        lambda root, _: (root / "snapstore.json").unlink(),
        (_ls("there is no store", code=3), _pull(3, "there is no store")),
    ),
    Exhibit(
        "config-newer",
        "Nothing: the store is of a later version of the format.",
        _config(lambda value: value.update(version=2)),
        (_ls("store format 2", code=1), _pull(1, "store format 2"), _push(1, "upgrade")),
    ),
    Exhibit(
        "config-feature",
        "Nothing: the store needs what this program does not know.",
        _config(lambda value: value.update(required_features=["ed25519"])),
        (_ls("ed25519", code=1), _pull(1, "upgrade snapstore")),
    ),
    Exhibit(
        "config-garbage",
        "The configuration is not JSON.",
        lambda root, _: (root / "snapstore.json").write_bytes(b"\0" * 100),
        (_ls("configuration", code=4), _push(4, "configuration")),
    ),
    Exhibit(
        "push-killed",
        "Nothing: a push was killed, and left a lease, a pack and an index.",
        _half_a_push,
        (_ls("other:v1"), _pull(3, "no snapshot is named"), *_HEALS, _OTHER),
    ),
    Exhibit(
        "pack-deleting",
        "Nothing: a pruner has decided to remove a pack, and died. A push must not rely on it.",
        _deleting_pack,
        (_pull(), *_HEALS),
    ),
    Exhibit(
        "foreign-files",
        "Files lie about that are not of the store.",
        _foreign_files,
        (_ls(), _show(), _pull(), *_HEALS),
    ),
)
