"""Blocks in memory: what is at hand is right, and never more than the budget."""

import random

import pytest

from snapstore.mount.blocks import BLOCK_BYTES, BlockMemory, FileBlocks
from snapstore.units import GIB, KIB


def put(memory: BlockMemory, file: FileBlocks, content: bytes, first: int, count: int) -> bool:
    if not memory.reserve(count):
        return False
    room = file.room(first, count)
    begin = first * BLOCK_BYTES
    room[:] = content[begin : begin + len(room)]
    memory.filled(file, first, count)
    return True


def test_any_blocks_in_any_order(rng: random.Random) -> None:
    """Goal: `peek` gives the file's bytes or None, and memory stays within the budget.

    Method: fill blocks of two files at random with a budget for a few, and look at all of both.
    """
    memory = BlockMemory(budget_bytes=5 * BLOCK_BYTES)
    contents = [rng.randbytes(4 * BLOCK_BYTES + 5), rng.randbytes(3 * BLOCK_BYTES)]
    files = [FileBlocks(memory, len(content)) for content in contents]
    seen = 0
    for _ in range(200):
        number = rng.randrange(2)
        file, content = files[number], contents[number]
        first = rng.randrange(file.count)
        count = min(rng.randint(1, 2), file.count - first)
        if not any(file.has(block) for block in range(first, first + count)):
            assert put(memory, file, content, first, count)
        assert memory.held_bytes <= 5 * BLOCK_BYTES
        for file, content in zip(files, contents, strict=True):
            offset = rng.randrange(len(content))
            length = min(rng.choice([1, 4 * KIB, BLOCK_BYTES]), len(content) - offset)
            found = file.peek(offset, length)
            if found is not None:
                seen += 1
                assert found == content[offset : offset + length]
    assert seen > 50


def test_what_was_read_last_stays() -> None:
    memory = BlockMemory(budget_bytes=3 * BLOCK_BYTES)
    content = bytes(range(4)) * (2 * BLOCK_BYTES)
    file = FileBlocks(memory, len(content))
    for block in range(3):
        assert put(memory, file, content, block, 1)
    assert file.peek(0, 10) is not None
    assert put(memory, file, content, 3, 1)
    assert [file.has(block) for block in range(4)] == [True, False, True, True]


def test_blocks_being_filled_are_not_taken() -> None:
    memory = BlockMemory(budget_bytes=2 * BLOCK_BYTES)
    file = FileBlocks(memory, 8 * BLOCK_BYTES)
    assert memory.reserve(2)
    file.room(0, 2)
    assert not memory.reserve(1)
    memory.failed(file, 0, 2)
    assert not file.has(0)
    assert memory.held_bytes == 0
    assert memory.reserve(2)


def test_a_range_across_windows() -> None:
    """A file of many gibibytes takes addresses for what is read of it, and ranges go across."""
    memory = BlockMemory(budget_bytes=4 * BLOCK_BYTES)
    file = FileBlocks(memory, 5 * GIB)
    last, first = GIB // BLOCK_BYTES - 1, GIB // BLOCK_BYTES
    assert file.blocks_together(last) == 1
    assert file.blocks_together(first) == GIB // BLOCK_BYTES
    for block, byte in ((last, b"a"), (first, b"b")):
        assert memory.reserve(1)
        file.room(block, 1)[:] = byte * BLOCK_BYTES
        memory.filled(file, block, 1)
    assert file.peek(GIB - 2, 4) == b"aabb"
    memory.forget(file)
    assert file.peek(GIB - 2, 1) is None
    assert memory.held_bytes == 0


@pytest.mark.parametrize("size", [1, BLOCK_BYTES, BLOCK_BYTES + 1])
def test_the_last_block_is_short(size: int) -> None:
    memory = BlockMemory(budget_bytes=4 * BLOCK_BYTES)
    file = FileBlocks(memory, size)
    assert memory.reserve(file.count)
    room = file.room(0, file.count)
    assert len(room) == size
    room[:] = b"x" * size
    memory.filled(file, 0, file.count)
    assert file.peek(0, size) == b"x" * size
