"""Tests of removing what CRIU leaves of files that had lost their names."""

import os
from pathlib import Path

import pytest

from snapagent.linux.ghosts import remove_ghosts, remove_ghosts_below

LEFT = ["log.cr.1.ghost", "log.cr.a0f.ghost", "other.txt.cr.2.ghost"]
KEPT = [
    "log",
    "log.cr.1.ghost.txt",
    "log.cr..ghost",
    "log.cr.xyz.ghost",
    "log.cr.123456789.ghost",
    "not-ours.cr.1.ghost",
    "my.log.cr.1.ghost",
]


def fill(folder: Path) -> list[str]:
    folder.mkdir()
    for name in [*LEFT, *KEPT]:
        (folder / name).touch()
    return [f"{folder}/log", f"{folder}/other.txt", f"{folder}/no/such/folder/file"]


def test_only_what_criu_makes_is_removed(tmp_path: Path) -> None:
    remove_ghosts(fill(tmp_path / "folder"))
    assert {path.name for path in (tmp_path / "folder").iterdir()} == set(KEPT)


@pytest.mark.skipif(os.geteuid() != 0, reason="another root directory needs root")
def test_below_another_root(tmp_path: Path) -> None:
    """A link that leads out of it leads nowhere: its names are those of that root."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    fill(root / "folder")
    fill(outside)
    (root / "link").symlink_to(outside)
    fd = os.open(root, os.O_PATH | os.O_DIRECTORY)
    try:
        remove_ghosts_below(fd, ["/folder/log", "/folder/other.txt", "/link/log"])
    finally:
        os.close(fd)
    assert {path.name for path in (root / "folder").iterdir()} == set(KEPT)
    assert {path.name for path in outside.iterdir()} == {*LEFT, *KEPT}
