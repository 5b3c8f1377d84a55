"""Files without a name: each restore has numbers of its own for them, and removes only its own."""

import os
import re
from pathlib import Path

import pytest

from snapagent.criu.ghosts import rename_ghosts
from snapagent.linux.ghosts import remove_ghosts, remove_ghosts_below
from snapstore import criu
from snapstore.criu import RegularFile, Remap
from snapstore.errors import FormatError

EXTRA = b"\x9a\x06\x03new"
"""A field 99, of a newer CRIU."""


def remap(file_id: int, target_id: int, kind: str = "ghost", extra: bytes = b"") -> Remap:
    number = {"linked": 0, "ghost": 1, "procfs": 2}[kind]
    return Remap(file_id, target_id, kind, bytes([8, file_id, 16, target_id, 24, number]) + extra)


def named(*names: str) -> dict[int, RegularFile]:
    return {number: RegularFile(name, 0, None) for number, name in enumerate(names, 1)}


def test_each_restore_draws_its_own_numbers() -> None:
    remaps = [remap(1, 1, extra=EXTRA), remap(2, 2), remap(3, 1), remap(4, 5, "linked", EXTRA)]
    files = named("/a/log", "/b/data", "/a/same", "/b/linked")
    seen = set()
    for _ in range(20):
        ghosts = rename_ghosts(remaps, files)
        assert ghosts is not None
        first, second, third, linked = criu.parse_remaps(ghosts.remaps)
        assert linked == remaps[3]
        assert [one.kind for one in (first, second, third)] == ["ghost"] * 3
        assert (first.file_id, second.file_id, third.file_id) == (1, 2, 3)
        assert first.target_id == third.target_id != second.target_id
        assert EXTRA in first.message
        assert ghosts.images == {
            f"ghost-file-{first.target_id:x}.img": "ghost-file-1.img",
            f"ghost-file-{second.target_id:x}.img": "ghost-file-2.img",
        }
        assert ghosts.paths == [
            f"/a/log.cr.{first.target_id:x}.ghost",
            f"/b/data.cr.{second.target_id:x}.ghost",
            f"/a/same.cr.{first.target_id:x}.ghost",
        ]
        seen |= {first.target_id, second.target_id}
    assert len(seen) == 40
    assert not seen & {0, 1, 2}


def test_nothing_to_rename() -> None:
    assert rename_ghosts([], {}) is None
    assert rename_ghosts([remap(1, 1, "linked"), remap(2, 2, "procfs")], named("/a", "/b")) is None


def test_images_of_old_say_then_what_they_are() -> None:
    """They say it by a bit of the number, which a new number would not have."""
    (old,) = criu.parse_remaps(_image(b"\x08\x01\x10\x82\x80\x80\x80\x08"))
    assert (old.kind, old.target_id) == ("ghost", 2)
    ghosts = rename_ghosts([old], named("/a"))
    assert ghosts is not None
    (new,) = criu.parse_remaps(ghosts.remaps)
    assert new.kind == "ghost"
    assert ghosts.images == {f"ghost-file-{new.target_id:x}.img": "ghost-file-2.img"}


@pytest.mark.parametrize("length", [237, 238, 243, 244, 245, 255])
def test_names_stay_as_short_as_they_have_to_be(length: int) -> None:
    """What a file system takes with the captured number, it takes with the new one."""
    remaps = [remap(1, 1), remap(2, 1)]
    ghosts = rename_ghosts(remaps, named("/short", "/folder/" + "ä" + "n" * (length - 2)))
    assert ghosts is not None
    path = ghosts.paths[1]
    assert re.search(r"\.cr\.[0-9a-f]{1,8}\.ghost$", path)
    assert len(os.fsencode(path.rpartition("/")[2])) <= max(255, length + len(".cr.1.ghost"))


def test_more_files_than_numbers() -> None:
    """With one digit there are too few numbers for all: each still has its own."""
    count = 40
    remaps = [remap(number, number) for number in range(1, count + 1)]
    ghosts = rename_ghosts(remaps, named(*[f"/{number:0244}" for number in range(count)]))
    assert ghosts is not None
    new = [one.target_id for one in criu.parse_remaps(ghosts.remaps)]
    assert len(set(new)) == count
    assert len(ghosts.images) == count


def test_hostile_lists() -> None:
    """Files that are not there, two ghosts of one file, a list cut short."""
    remaps = [remap(1, 1), remap(1, 2), remap(9, 3)]
    ghosts = rename_ghosts(remaps, named("/a"))
    assert ghosts is not None
    assert len(ghosts.paths) == 2
    assert len({one.target_id for one in criu.parse_remaps(ghosts.remaps)}) == 3
    with pytest.raises(FormatError):
        criu.parse_remaps(ghosts.remaps[:-1])


def _image(*messages: bytes) -> bytes:
    entries = (len(message).to_bytes(4, "little") + message for message in messages)
    return bytes.fromhex("19435654 54391359") + b"".join(entries)


# -- what is left of them ----------------------------------------------------------------------


def fill(folder: Path) -> list[str]:
    (folder / "there").mkdir(parents=True)
    for name in ["log.cr.1.ghost", "log.cr.2.ghost", "log", "moved.cr.4.ghost"]:
        (folder / name).touch()
    (folder / "there" / "data.cr.3.ghost").touch()
    return [
        f"{folder}/log.cr.1.ghost",
        f"{folder}/there/data.cr.3.ghost",
        f"{folder}/no/such/moved.cr.4.ghost",
        f"{folder}/there/never-made.cr.5.ghost",
        "",
    ]


def kept(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*")}


def test_only_its_own_are_removed(tmp_path: Path) -> None:
    """Where the folder is gone, CRIU makes the file in the nearest one that is there."""
    remove_ghosts(fill(tmp_path / "folder"))
    assert kept(tmp_path / "folder") == {"log", "log.cr.2.ghost", "there"}


@pytest.mark.skipif(os.geteuid() != 0, reason="another root directory needs root")
def test_below_another_root(tmp_path: Path) -> None:
    """A link that leads out of it leads nowhere: its names are those of that root."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    fill(root / "folder")
    fill(outside)
    before = kept(outside)
    (root / "link").symlink_to(outside)
    fd = os.open(root, os.O_PATH | os.O_DIRECTORY)
    try:
        remove_ghosts_below(fd, ["/folder/log.cr.1.ghost", "/link/log.cr.1.ghost"])
    finally:
        os.close(fd)
    assert kept(root / "folder") == {"log", "log.cr.2.ghost", "there", "moved.cr.4.ghost"} | {
        "data.cr.3.ghost"
    }
    assert kept(outside) == before
