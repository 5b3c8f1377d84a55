import contextlib
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from snapstore.errors import LimitExceeded, SourceChanged, SourceError, UnsupportedFileType
from snapstore.format.tree import EntryType, TreeEntry
from snapstore.source.scan import (
    ScannedTree,
    check_unchanged,
    data_ranges,
    open_source_file,
    read_source_file,
    scan_tree,
)
from tests.support.users import as_nobody, nobodys_directory
from tests.unit.source.builders import make_sparse, write_tree

ODD_NAMES = [
    b"\xff\n",
    b"-rf",
    b" leading and trailing ",
    b"tab\there",
    b"*",
    b"\xc3\xa9",
    b"e\xcc\x81",
    b"n" * 255,
    b".hidden",
    b"a",
    b"a.b",
    b"a-b",
]


@pytest.fixture
def deep_dir(tmp_path: Path):
    """Return a directory for trees that are too deep for pytest to remove."""
    path = tmp_path / "deep"
    path.mkdir()
    yield path
    subprocess.run(["/bin/rm", "-rf", path], check=True)  # noqa: S603 (fixed words)


def entry_of(tree: ScannedTree, path: bytes) -> TreeEntry:
    return next(entry for entry in tree.entries if entry.path == path)


DEPTH = sys.getrecursionlimit() + 50


def set_xattr(path: Path, name: str, value: bytes) -> None:
    try:
        os.setxattr(path, name, value)
    except OSError as error:
        pytest.skip(f"this file system or user cannot set {name}: {error.strerror}")


# -- names and types --------------------------------------------------------------------------


def test_an_empty_directory_is_one_entry(tmp_path: Path):
    tree = scan_tree(tmp_path)
    status = tmp_path.stat()
    assert tree.entries == (
        TreeEntry(
            path=b"",
            type=EntryType.DIRECTORY,
            mode=stat.S_IMODE(status.st_mode),
            uid=status.st_uid,
            gid=status.st_gid,
            mtime_ns=status.st_mtime_ns,
        ),
    )
    assert not tree.identities


def test_names_are_raw_bytes_sorted_by_path(tmp_path: Path):
    root = os.fsencode(tmp_path)
    (tmp_path / "a").mkdir()
    for name in ODD_NAMES[:-3]:
        Path(os.fsdecode(root + b"/a/" + name)).write_bytes(name)
    for name in ODD_NAMES[-2:]:
        Path(os.fsdecode(root + b"/" + name)).write_bytes(name)
    paths = [entry.path for entry in scan_tree(tmp_path).entries]
    expected = [b"", b"a", *ODD_NAMES[-2:], *(b"a/" + name for name in ODD_NAMES[:-3])]
    assert paths == sorted(expected)
    assert paths.index(b"a-b") < paths.index(b"a/-rf")  # by bytes, not by component


def test_metadata_is_taken_as_it_is(tmp_path: Path):
    path = tmp_path / "f"
    path.write_bytes(b"12345")
    path.chmod(0o6751)
    os.utime(path, ns=(1, 1_234_567_890_123_456_789))
    (tmp_path / "empty").mkdir(mode=0o700)
    if os.geteuid() == 0:
        os.chown(path, 12, 34)
        path.chmod(0o6751)
    tree = scan_tree(tmp_path)
    entry, status = entry_of(tree, b"f"), path.stat()
    assert (entry.type, entry.size_bytes, entry.mode) == (EntryType.FILE, 5, 0o6751)
    assert (entry.uid, entry.gid) == (status.st_uid, status.st_gid)
    assert entry.mtime_ns == 1_234_567_890_123_456_789
    assert (entry.stream, entry.offset) == (0, 0)
    assert entry_of(tree, b"empty").type is EntryType.DIRECTORY
    identity = tree.identities[b"f"]
    assert (identity.ino, identity.size_bytes) == (status.st_ino, 5)


def test_a_time_before_the_epoch_is_kept(tmp_path: Path):
    (tmp_path / "f").touch()
    os.utime(tmp_path / "f", ns=(0, -1_000_000_001))
    assert entry_of(scan_tree(tmp_path), b"f").mtime_ns == -1_000_000_001


def test_hard_links_lead_to_the_first_name_in_order(tmp_path: Path):
    (tmp_path / "d").mkdir()
    (tmp_path / "z").write_bytes(b"data")
    os.link(tmp_path / "z", tmp_path / "d" / "y")
    os.link(tmp_path / "z", tmp_path / "m")
    tree = scan_tree(tmp_path)
    assert entry_of(tree, b"d/y").type is EntryType.FILE
    for path in (b"m", b"z"):
        link = entry_of(tree, path)
        assert (link.type, link.target, link.size_bytes) == (EntryType.HARDLINK, b"d/y", 0)
    assert tree.size_bytes == 4


def test_a_hard_link_to_something_outside_is_a_file(tmp_path: Path):
    (tmp_path / "in").mkdir()
    (tmp_path / "out").write_bytes(b"data")
    os.link(tmp_path / "out", tmp_path / "in" / "f")
    assert entry_of(scan_tree(tmp_path / "in"), b"f").type is EntryType.FILE


@pytest.mark.parametrize("target", ["/etc/passwd", "..", "../..", "dangling", "loop", "d"])
def test_symlinks_are_read_and_never_followed(tmp_path: Path, target: str):
    (tmp_path / "d").mkdir()
    (tmp_path / "loop").symlink_to(target)
    tree = scan_tree(tmp_path)
    entry = entry_of(tree, b"loop")
    assert (entry.type, entry.target) == (EntryType.SYMLINK, target.encode())
    assert len(tree.entries) == 3


def test_the_root_itself_may_be_named_by_a_symlink(tmp_path: Path):
    write_tree(tmp_path, {"real/f": b"x"})
    (tmp_path / "link").symlink_to("real")
    tree = scan_tree(tmp_path / "link")
    assert [entry.path for entry in tree.entries] == [b"", b"f"]
    assert read_source_file(tree, entry_of(tree, b"f"), size_bytes_max=10) == b"x"


@pytest.mark.parametrize("name", ["missing", "file"])
def test_a_root_that_is_no_directory_is_refused(tmp_path: Path, name: str):
    (tmp_path / "file").touch()
    with pytest.raises(SourceError, match=name):
        scan_tree(tmp_path / name)


def test_special_files_are_named_or_skipped(tmp_path: Path):
    write_tree(tmp_path, {"a": b"", "d/": b""})
    for number in range(7):
        os.mkfifo(tmp_path / f"fifo{number}")
    path = tmp_path / "d" / "sock"
    with socket.socket(socket.AF_UNIX) as sock, contextlib.chdir(path.parent):
        sock.bind("sock")
    with pytest.raises(UnsupportedFileType, match=r"'d/sock' \(socket\), 'fifo0' \(fifo\).*and 3"):
        scan_tree(tmp_path)
    tree = scan_tree(tmp_path, skip_special=True)
    assert [entry.path for entry in tree.entries] == [b"", b"a", b"d"]
    assert tree.skipped[:2] == (b"d/sock", b"fifo0")
    assert len(tree.skipped) == 8


def test_a_path_longer_than_can_be_stored_is_refused(deep_dir: Path):
    fd = os.open(deep_dir, os.O_RDONLY)
    for _ in range(17):
        os.mkdir("n" * 250, dir_fd=fd)
        inner = os.open("n" * 250, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(fd)
    with pytest.raises(SourceError, match="4096"):
        scan_tree(deep_dir)


@pytest.mark.slow
def test_a_tree_deeper_than_the_stack_is_read(deep_dir: Path):
    fd = os.open(deep_dir, os.O_RDONLY)
    for _ in range(DEPTH):
        os.mkdir("d", dir_fd=fd)
        inner = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(os.open("leaf", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
    os.close(fd)
    tree = scan_tree(deep_dir)
    assert tree.entries[-1].path == b"d/" * DEPTH + b"leaf"
    assert read_source_file(tree, tree.entries[-1], size_bytes_max=1) == b""


# -- extended attributes ----------------------------------------------------------------------


def test_attributes_of_all_types_are_sorted_and_machine_bound_ones_left_out(tmp_path: Path):
    write_tree(tmp_path, {"f": b"", "d/": b""})
    for path in (tmp_path / "f", tmp_path / "d"):
        set_xattr(path, "user.z", b"\0\xff")
        set_xattr(path, "user.a", b"")
    tree = scan_tree(tmp_path)
    for path in (b"f", b"d"):
        assert entry_of(tree, path).xattrs == ((b"user.a", b""), (b"user.z", b"\0\xff"))
    set_xattr(tmp_path / "f", "security.selinux", b"label")
    set_xattr(tmp_path / "f", "trusted.t", b"t")
    names = [name for name, _ in entry_of(scan_tree(tmp_path), b"f").xattrs]
    assert names == [b"trusted.t", b"user.a", b"user.z"]


def test_attributes_of_a_symlink_are_its_own(tmp_path: Path):
    write_tree(tmp_path, {"f": b""})
    set_xattr(tmp_path / "f", "user.a", b"of the file")
    (tmp_path / "l").symlink_to("f")
    assert entry_of(scan_tree(tmp_path), b"l").xattrs == ()


def test_attributes_are_read_where_proc_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_tree(tmp_path, {"f": b"data"})
    (tmp_path / "l").symlink_to("f")
    set_xattr(tmp_path / "f", "user.a", b"1")
    real = os.listxattr

    def refuse_proc(path: int | bytes, *, follow_symlinks: bool = True) -> list[str]:
        if isinstance(path, bytes) and path.startswith(b"/proc"):
            raise PermissionError(13, "closed")
        return real(path, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(os, "listxattr", refuse_proc)
    tree = scan_tree(tmp_path)
    assert entry_of(tree, b"f").xattrs == ((b"user.a", b"1"),)
    assert entry_of(tree, b"l").xattrs == ()


def test_a_file_system_without_attributes_is_tolerated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_args: object, **_options: object) -> list[str]:
        raise OSError(95, "not supported")

    write_tree(tmp_path, {"f": b""})
    monkeypatch.setattr(os, "listxattr", refuse)
    assert entry_of(scan_tree(tmp_path), b"f").xattrs == ()


def test_more_attributes_than_can_be_stored_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_tree(tmp_path, {"f": b""})
    names = [f"user.{number}" for number in range(1025)]
    monkeypatch.setattr(os, "listxattr", lambda *_args, **_options: names)
    monkeypatch.setattr(os, "getxattr", lambda *_args, **_options: b"")
    with pytest.raises(SourceError, match="1025 extended attributes"):
        scan_tree(tmp_path)


# -- permissions ------------------------------------------------------------------------------


def test_everything_unreadable_is_named_before_anything_is_read():
    with nobodys_directory() as root, as_nobody():
        write_tree(root, {"a": b"", "secret": b"", "d/": b""})
        (root / "secret").chmod(0)
        (root / "d").chmod(0)
        with pytest.raises(SourceError, match=r"cannot read 'd', 'secret'"):
            scan_tree(root)
        (root / "d").chmod(0o700)


# -- change while reading ---------------------------------------------------------------------


def test_an_unchanged_file_opens_and_stays_unchanged(tmp_path: Path):
    write_tree(tmp_path, {"d/f": b"12345"})
    tree = scan_tree(tmp_path)
    fd = open_source_file(tree, entry_of(tree, b"d/f"))
    assert os.read(fd, 10) == b"12345"
    check_unchanged(fd, tree.identities[b"d/f"])
    os.close(fd)


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def rewrite_in_place(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"54321")
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def rewrite_and_hide_it(path: Path) -> None:
    before = path.stat()
    path.write_bytes(b"54321")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace(path: Path) -> None:
    path.rename(path.with_name("old"))
    path.write_bytes(b"12345")


@pytest.mark.parametrize("change", [append, rewrite_in_place, rewrite_and_hide_it, replace])
def test_a_changed_file_is_named(tmp_path: Path, change):  # noqa: ANN001 (one of four)
    write_tree(tmp_path, {"d/f": b"12345"})
    tree = scan_tree(tmp_path)
    change(tmp_path / "d" / "f")
    with pytest.raises(SourceChanged, match="'d/f' changed"):
        open_source_file(tree, entry_of(tree, b"d/f"))


@pytest.mark.parametrize("change", [append, rewrite_in_place, rewrite_and_hide_it])
def test_a_file_that_changes_while_it_is_read_is_named(tmp_path: Path, change):  # noqa: ANN001
    write_tree(tmp_path, {"f": b"12345"})
    tree = scan_tree(tmp_path)
    fd = open_source_file(tree, entry_of(tree, b"f"))
    change(tmp_path / "f")
    with pytest.raises(SourceChanged, match="'f' changed"):
        check_unchanged(fd, tree.identities[b"f"])
    os.close(fd)


@pytest.mark.parametrize("to", ["symlink", "nothing", "fifo", "parent-symlink"])
def test_a_file_replaced_by_something_else_is_not_followed(tmp_path: Path, to: str):
    write_tree(tmp_path, {"d/f": b"12345", "other/f": b"12345"})
    tree = scan_tree(tmp_path)
    path = tmp_path / "d" / "f"
    path.unlink()
    if to == "symlink":
        path.symlink_to("../other/f")
    elif to == "fifo":
        os.mkfifo(path)
    elif to == "parent-symlink":
        path.parent.rmdir()
        path.parent.symlink_to("other")
    with pytest.raises(SourceChanged, match="'d/f'"):
        open_source_file(tree, entry_of(tree, b"d/f"))


def test_another_root_under_the_same_name_is_noticed(tmp_path: Path):
    write_tree(tmp_path, {"a/f": b"1", "b/f": b"1"})
    tree = scan_tree(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "c")
    (tmp_path / "b").rename(tmp_path / "a")
    with pytest.raises(SourceChanged, match="another directory"):
        open_source_file(tree, entry_of(tree, b"f"))


def test_what_vanishes_during_the_scan_is_an_error_to_retry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_tree(tmp_path, {"f": b""})
    real = os.stat

    def vanish(path: object, *args: object, **options: object) -> os.stat_result:
        if path == b"f":
            raise FileNotFoundError(2, "gone")
        return real(path, *args, **options)

    monkeypatch.setattr(os, "stat", vanish)
    with pytest.raises(SourceChanged, match="'f' vanished") as caught:
        scan_tree(tmp_path)
    assert caught.value.retryable


def test_small_files_are_read_whole_or_not_at_all(tmp_path: Path):
    write_tree(tmp_path, {"f": b"0123456789"})
    tree = scan_tree(tmp_path)
    entry = entry_of(tree, b"f")
    assert read_source_file(tree, entry, size_bytes_max=10) == b"0123456789"
    assert read_source_file(tree, entry, size_bytes_max=4, is_prefix_enough=True) == b"0123"
    with pytest.raises(LimitExceeded):
        read_source_file(tree, entry, size_bytes_max=9)


# -- holes ------------------------------------------------------------------------------------

MIB = 1 << 20


@pytest.mark.parametrize(
    ("size", "runs", "expected"),
    [
        (0, [], []),
        (5 * MIB, [], []),
        (5 * MIB, [(0, b"x" * 4096)], [(0, 4096)]),
        (5 * MIB, [(MIB, b"x" * MIB), (4 * MIB, b"y" * MIB)], [(MIB, MIB), (4 * MIB, MIB)]),
        (4097, [(4096, b"x")], [(4096, 1)]),
        (10, [(0, b"0123456789")], [(0, 10)]),
    ],
)
def test_holes_are_left_out(
    tmp_path: Path, size: int, runs: list[tuple[int, bytes]], expected: list[tuple[int, int]]
):
    make_sparse(tmp_path / "f", size, *runs)
    with (tmp_path / "f").open("rb") as file:
        assert list(data_ranges(file.fileno(), size)) == expected


def test_data_beyond_the_scanned_size_is_ignored(tmp_path: Path):
    (tmp_path / "f").write_bytes(b"x" * 20_000)
    with (tmp_path / "f").open("rb") as file:
        assert list(data_ranges(file.fileno(), 5000)) == [(0, 5000)]
        assert list(data_ranges(file.fileno(), 50_000)) == [(0, 20_000)]


def test_one_range_where_the_file_system_does_not_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_args: object) -> int:
        raise OSError(22, "invalid argument")

    make_sparse(tmp_path / "f", 10_000)
    monkeypatch.setattr(os, "lseek", refuse)
    with (tmp_path / "f").open("rb") as file:
        assert list(data_ranges(file.fileno(), 10_000)) == [(0, 10_000)]
