"""Small files in memory: whole or not at all, and together within a limit."""

from pathlib import Path

import pytest

import snapstore
from snapstore.mount import small
from snapstore.mount.small import SmallContent, SmallMemory
from snapstore.units import KIB


def fill(content: SmallContent) -> None:
    content.begin(0, 1, in_order=False)()
    content.end(0, 1, is_filled=True)


def test_the_first_go_for_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small, "_HELD_BYTES_MAX", 100 * KIB)
    tree = tmp_path / "tree"
    tree.mkdir()
    for number in range(3):
        (tree / f"{number}").write_bytes(bytes([number + 1]) * 40 * KIB)
    with snapstore.init_store(f"file://{tmp_path / 'store'}") as store:
        store.push(tree, "a")
        snapshot = store.snapshot("a")
        memory = SmallMemory()
        contents = [SmallContent(snapshot.open(f"{number}"), memory) for number in range(3)]
        assert contents[0].peek(0, 10) is None
        for content in contents:
            assert not content.has(0)
            fill(content)
        assert [content.has(0) for content in contents] == [False, True, True]
        assert contents[1].peek(40 * KIB - 3, 3) == b"\2\2\2"
        assert contents[0].read(5, 2) == b"\1\1"
        contents[1].close()
        fill(contents[0])
        assert [content.has(0) for content in contents] == [True, False, True]
