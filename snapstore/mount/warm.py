"""In which order to fetch all of a snapshot: what restores touch first, then the rest."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from snapstore.errors import FormatError
from snapstore.format import limits
from snapstore.format.page_order import decode_page_order
from snapstore.mount.blocks import BLOCK_BYTES
from snapstore.units import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from snapstore.mount.snapshot_tree import SnapshotTree
    from snapstore.repository.file_reader import SnapshotFile
    from snapstore.repository.snapshot import Snapshot
    from snapstore.repository.store import Store

__all__ = ["restore_order"]

_TOPIC = "page-order"
_BLOCK_PAGES = BLOCK_BYTES // PAGE_BYTES

Runs = list[tuple[int, int]]


def restore_order(
    store: Store, snapshot: Snapshot, tree: SnapshotTree
) -> Iterator[tuple[int, Callable[[SnapshotFile], Runs]]]:
    """Give inodes, and what divides each file into runs of blocks; a file may come twice.

    Page orders are advice of strangers: what they name that is not there is passed over.
    """
    data = store.get_hint(_TOPIC, snapshot.id.hex, limits.PAGE_ORDER_BYTES_MAX)
    first: dict[int, dict[int, None]] = {}
    if data is not None:
        _add_hinted(data, tree, first)
    hinted = [(inode, functools.partial(_these, [*blocks])) for inode, blocks in first.items()]
    return iter([*hinted, *((inode, _all_data) for inode in tree.files())])


def _add_hinted(data: bytes, tree: SnapshotTree, first: dict[int, dict[int, None]]) -> None:
    try:
        runs = decode_page_order(data)
    except FormatError:
        return
    for run in runs:
        inode = tree.find(run.path.encode("utf-8", "surrogateescape"))
        if inode is not None:
            begin = run.first_page // _BLOCK_PAGES
            # What a hint says of one run is no reason to go through blocks without end.
            last = min((run.first_page + run.page_count - 1) // _BLOCK_PAGES, begin + 1024)
            first.setdefault(inode, {}).update(dict.fromkeys(range(begin, last + 1)))


def _these(blocks: list[int], file: SnapshotFile) -> Runs:
    end = -(-file.size_bytes // BLOCK_BYTES)
    return [(block, 1) for block in blocks if block < end]


def _all_data(file: SnapshotFile) -> Runs:
    """All blocks of a file but those that are zeros, which cost nothing when they are read."""
    runs: Runs = []
    for part in file.ranges():
        if part.is_zeros:
            continue
        begin = part.offset // BLOCK_BYTES
        if runs:
            begin = max(begin, runs[-1][0] + runs[-1][1])
        end = -(-(part.offset + part.length) // BLOCK_BYTES)
        if begin < end:
            runs.append((begin, end - begin))
    return runs
