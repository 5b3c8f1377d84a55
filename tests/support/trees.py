"""Trees for tests: values that say what a tree is, written to disk, and read back for comparison.

A tree on disk is described by an independent reader (`read_tree`), so that pushing and pulling
share no mistake with the comparison.
"""

import contextlib
import dataclasses
import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from blake3 import blake3
from hypothesis import strategies as st

from snapstore.repository.windows import WINDOW_BYTES
from snapstore.units import KIB
from tests.support.samples import bf16, random_bytes, text

__all__ = [
    "Data",
    "Directory",
    "File",
    "HardLink",
    "Node",
    "Seen",
    "Symlink",
    "allocated_bytes",
    "data_page_runs",
    "read_tree",
    "same_trees",
    "trees",
    "write_tree",
]

MODE_MIN = 0 if os.geteuid() == 0 else 0o700
"""Who is not root could not read their own trees without these bits."""

SMALL_FILE_BYTES = 64 * KIB
PIECES: dict[str, Callable[[int, int], bytes]] = {
    "zeros": lambda size, _: bytes(size),
    "noise": lambda size, seed: random_bytes(size, seed).tobytes(),
    "text": lambda size, seed: text(size, seed).tobytes(),
    "numbers": lambda size, seed: bf16(size // 2 + 1, seed)[:size].tobytes(),
    "one byte": lambda size, seed: bytes([seed * 37 % 255 + 1]) * size,
}


@dataclasses.dataclass(frozen=True)
class Data:
    """A run of bytes of a file: what kind, how many, where."""

    kind: str
    offset: int
    size: int
    seed: int = 0

    def content(self) -> bytes:
        return PIECES[self.kind](self.size, self.seed)


@dataclasses.dataclass(frozen=True)
class Node:
    """What all entries have."""

    path: bytes
    mode: int = 0o755
    mtime_ns: int = 1_790_000_000_123_456_789
    xattrs: tuple[tuple[str, bytes], ...] = ()


@dataclasses.dataclass(frozen=True)
class Directory(Node):
    """A directory."""


@dataclasses.dataclass(frozen=True)
class File(Node):
    """A file: holes but for its data."""

    size: int = 0
    data: tuple[Data, ...] = ()


@dataclasses.dataclass(frozen=True)
class Symlink(Node):
    """A symbolic link."""

    target: bytes = b"x"


@dataclasses.dataclass(frozen=True)
class HardLink(Node):
    """Another name of a file."""

    first: bytes = b""


# -- writing --------------------------------------------------------------------------------------


def write_tree(root: Path, nodes: Sequence[Node], *, sparse: bool = True) -> None:
    """Write a tree; without `sparse` its holes are written as zeros."""
    for node in nodes:
        _create(os.fsencode(root), node, sparse=sparse)
    # Metadata from the leaves to the root: writing into a directory changes its time.
    for node in sorted(nodes, key=lambda node: node.path, reverse=True):
        _finish(os.fsencode(root), node)


def _create(root: bytes, node: Node, *, sparse: bool) -> None:
    path = os.path.join(root, node.path)  # noqa: PTH118 - paths are bytes
    if isinstance(node, Directory):
        if node.path or not os.path.isdir(path):  # noqa: PTH112
            os.mkdir(path)  # noqa: PTH102
    elif isinstance(node, Symlink):
        os.symlink(node.target, path)  # noqa: PTH211
    elif isinstance(node, HardLink):
        os.link(os.path.join(root, node.first), path)  # noqa: PTH118
    elif isinstance(node, File):
        with open(path, "wb") as file:  # noqa: PTH123
            file.truncate(node.size)
            if not sparse:
                starts = range(0, node.size, 1 << 20)
                file.writelines(bytes(min(1 << 20, node.size - start)) for start in starts)
                file.seek(0)
            for piece in node.data:
                file.seek(piece.offset)
                file.write(piece.content())


def _finish(root: bytes, node: Node) -> None:
    path = os.path.join(root, node.path)  # noqa: PTH118
    if isinstance(node, HardLink):
        return
    if not isinstance(node, Symlink):
        for name, value in node.xattrs:
            _set_xattr(path, name, value)
        os.chmod(path, node.mode)  # noqa: PTH101
    os.utime(path, ns=(node.mtime_ns, node.mtime_ns), follow_symlinks=False)


def _set_xattr(path: bytes, name: str, value: bytes) -> None:
    try:
        os.setxattr(path, name, value)
    except OSError as error:
        # Some file systems have none, or room for a few: the test goes on with what there is.
        if error.errno not in {errno.ENOTSUP, errno.ENOSPC, errno.EDQUOT}:
            raise


# -- reading --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Seen:
    """What a path is on disk. `names` are all names of the same file, itself included."""

    type: str
    mode: int
    owner: tuple[int, int]
    mtime_ns: int
    xattrs: tuple[tuple[str, bytes], ...]
    size: int = 0
    digest: str = ""
    target: bytes = b""
    names: tuple[bytes, ...] = ()


def read_tree(root: Path) -> dict[bytes, Seen]:
    """Describe everything below a directory, and the directory itself under an empty path."""
    top = os.fsencode(root)
    found: dict[bytes, os.stat_result] = {}
    for path in _walk(top, b""):
        found[path] = os.lstat(os.path.join(top, path))  # noqa: PTH118
    names: dict[tuple[int, int], list[bytes]] = {}
    for path, status in sorted(found.items()):
        if stat.S_ISREG(status.st_mode):
            names.setdefault((status.st_dev, status.st_ino), []).append(path)
    return {path: _see(top, path, status, names) for path, status in found.items()}


def same_trees(one: Path, other: Path) -> None:
    """Assert that two trees are the same, in names, content, links and metadata."""
    left, right = read_tree(one), read_tree(other)
    assert sorted(left) == sorted(right)
    for path, seen in left.items():
        assert right[path] == seen, path


def _walk(top: bytes, path: bytes) -> Iterator[bytes]:
    yield path
    with os.scandir(os.path.join(top, path) if path else top) as listing:  # noqa: PTH118
        entries = sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in listing)
    for name, is_directory in entries:
        below = path + b"/" + name if path else name
        if is_directory:
            yield from _walk(top, below)
        else:
            yield below


def _see(
    top: bytes, path: bytes, status: os.stat_result, names: dict[tuple[int, int], list[bytes]]
) -> Seen:
    full = os.path.join(top, path) if path else top  # noqa: PTH118
    kind = stat.S_IFMT(status.st_mode)
    size, digest, target = 0, "", b""
    same: tuple[bytes, ...] = ()
    if kind == stat.S_IFREG:
        with open(full, "rb") as file:  # noqa: PTH123
            size, digest = status.st_size, _digest(file)
        same = tuple(names[status.st_dev, status.st_ino])
    elif kind == stat.S_IFLNK:
        target = os.readlink(full)  # noqa: PTH115
    return Seen(
        type={stat.S_IFDIR: "directory", stat.S_IFREG: "file", stat.S_IFLNK: "symlink"}[kind],
        mode=stat.S_IMODE(status.st_mode),
        owner=(status.st_uid, status.st_gid),
        mtime_ns=status.st_mtime_ns,
        xattrs=_xattrs(full) if kind != stat.S_IFLNK else (),
        size=size,
        digest=digest,
        target=target,
        names=same,
    )


def _digest(file: BinaryIO) -> str:
    hasher = blake3()
    while piece := file.read(1 << 20):
        hasher.update(piece)
    return hasher.hexdigest()


def _xattrs(path: bytes) -> tuple[tuple[str, bytes], ...]:
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = sorted(name for name in os.listxattr(path) if name.startswith("user."))
    return tuple((name, os.getxattr(path, name)) for name in names)


def allocated_bytes(path: Path) -> int:
    """How much of a file is not holes."""
    return path.stat().st_blocks * 512


def data_page_runs(content: bytes) -> tuple[int, int]:
    """Count the pages of a file that are not zeros, and the runs that they make."""
    padded = np.zeros(-(-len(content) // 4096) * 4096, np.uint8)
    padded[: len(content)] = np.frombuffer(content, np.uint8)
    flags = np.append(padded.reshape(-1, 4096).any(axis=1), np.False_).astype(np.int8)
    return int(flags.sum()), int((np.diff(flags) == -1).sum())


# -- strategies -----------------------------------------------------------------------------------

SIZES = st.one_of(
    st.sampled_from(
        [0, 1, 2, 4095, 4096, 4097, SMALL_FILE_BYTES - 1, SMALL_FILE_BYTES, SMALL_FILE_BYTES + 1]
    ),
    st.integers(0, 200),
    st.integers(0, 300_000),
    st.sampled_from(
        [
            WINDOW_BYTES - 1,
            WINDOW_BYTES,
            WINDOW_BYTES + 1,
            2 * WINDOW_BYTES + 4097,
            3 * WINDOW_BYTES,
        ]
    ),
)
NAMES = st.one_of(
    st.sampled_from([b"pages-1.img", b"a.bin", b"b.safetensors", b"log.txt", b"core", b"rank-0"]),
    st.sampled_from([b"rank-1", b"rank2.bin", b"gpu-memory-0", b"manifest.yaml", b"inventory.img"]),
    st.sampled_from([b"\xff\xfe", b"new\nline", b" ", b"-", b"*", "schön".encode(), b"n" * 255]),
    st.binary(min_size=1, max_size=12).filter(
        lambda name: b"/" not in name and b"\0" not in name and name not in {b".", b".."}
    ),
)
TIMES = st.sampled_from(
    [0, 1, -1, -1_000_000_001, 999_999_999, 1_790_000_000_123_456_789, (1 << 33) * 10**9]
)
MODES = st.integers(0, 0o7777).map(lambda mode: mode | MODE_MIN)
XATTRS = st.dictionaries(
    st.sampled_from(["user.a", "user.b", "user.ümlaut"]), st.binary(max_size=60), max_size=2
).map(lambda found: tuple(sorted(found.items())))


@st.composite
def trees(draw: st.DrawFn, entries_max: int = 9) -> list[Node]:
    """A tree of a few entries; parents come before what is in them, files before their links."""
    nodes: list[Node] = [_node(draw, Directory, b"")]
    taken = {b""}
    shared: list[tuple[Data, ...]] = []
    for _ in range(draw(st.integers(0, entries_max))):
        parent = draw(st.sampled_from([node.path for node in nodes if isinstance(node, Directory)]))
        name = draw(NAMES)
        path = parent + b"/" + name if parent else name
        if path in taken:
            continue
        taken.add(path)
        nodes.append(_draw_node(draw, nodes, shared, path))
    return nodes


def _draw_node(
    draw: st.DrawFn, nodes: list[Node], shared: list[tuple[Data, ...]], path: bytes
) -> Node:
    kind = draw(st.sampled_from(["file", "file", "file", "directory", "symlink", "hardlink"]))
    files = [node.path for node in nodes if isinstance(node, File)]
    if kind == "directory":
        return _node(draw, Directory, path)
    if kind == "symlink":
        target = draw(st.binary(min_size=1, max_size=30).filter(lambda raw: b"\0" not in raw))
        return Symlink(path=path, target=target, mtime_ns=draw(TIMES))
    if kind == "hardlink" and files:
        return HardLink(path=path, first=draw(st.sampled_from(files)))
    size = draw(SIZES)
    data: tuple[Data, ...]
    is_copy: bool = draw(st.booleans())
    if shared and is_copy:
        data = draw(st.sampled_from(shared))
        size = max([size, *(piece.offset + piece.size for piece in data)])
    else:
        data = tuple(_pieces(draw, size))
        shared.append(data)
    plain = _node(draw, File, path)
    assert isinstance(plain, File)
    return dataclasses.replace(plain, size=size, data=data)


def _pieces(draw: st.DrawFn, size: int) -> Iterator[Data]:
    """A few runs of data, in large files at the borders of windows and anywhere."""
    for _ in range(draw(st.integers(0, 3)) if size else 0):
        borders = [offset for offset in (0, WINDOW_BYTES - 100, 2 * WINDOW_BYTES) if offset < size]
        offset = draw(st.one_of(st.sampled_from(borders), st.integers(0, size - 1)))
        length = draw(st.integers(1, min(size - offset, 150_000)))
        kind = draw(st.sampled_from(sorted(PIECES)))
        yield Data(kind, offset, length, draw(st.integers(0, 3)))


def _node(draw: st.DrawFn, kind: type[Node], path: bytes) -> Node:
    return kind(path=path, mode=draw(MODES), mtime_ns=draw(TIMES), xattrs=draw(XATTRS))
