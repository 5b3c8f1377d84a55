import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapstore.errors import FormatError, LimitExceeded, Malformed
from snapstore.fstree import (
    is_kept_xattr,
    open_directory_below,
    parent_below,
    show_path,
    split_path,
)
from tests.support.processes import open_fds


@pytest.fixture
def root_fd(tmp_path: Path):
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


@pytest.mark.parametrize(
    "path", [b"/", b"/etc", b"a//b", b"a/", b"../x", b"a/../b", b"a/.", b".", b"..", b"a\0b", b"\0"]
)
def test_split_refuses_paths_that_leave_the_tree_or_name_nothing(path: bytes):
    with pytest.raises(Malformed):
        split_path(path)


@pytest.mark.parametrize("path", [b"n" * 256, b"/".join([b"n" * 200] * 21)])
def test_split_refuses_what_is_too_long(path: bytes):
    with pytest.raises(LimitExceeded):
        split_path(path)


@given(st.binary(max_size=40))
def test_split_gives_plain_names_or_refuses(path: bytes):
    try:
        names = split_path(path)
    except FormatError:
        return
    assert b"/".join(names) == path
    assert not {b"", b".", b".."} & {*names}


def test_directories_are_opened_below_the_root(tmp_path: Path, root_fd: int):
    (tmp_path / "a" / "b").mkdir(parents=True)
    for path, there in ((b"", tmp_path), (b"a", tmp_path / "a"), (b"a/b", tmp_path / "a" / "b")):
        fd = open_directory_below(root_fd, path)
        assert os.path.samestat(os.fstat(fd), there.stat())
        os.close(fd)


@pytest.mark.parametrize("target", ["/", ".", "..", "real", "nowhere"])
def test_no_symlink_is_followed_anywhere_on_the_way(tmp_path: Path, root_fd: int, target: str):
    (tmp_path / "real" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(target)
    (tmp_path / "real" / "link").symlink_to(target)
    for path in (b"link", b"link/inner", b"real/link", b"real/link/inner"):
        with pytest.raises(NotADirectoryError):
            open_directory_below(root_fd, path)
    with pytest.raises(NotADirectoryError), parent_below(root_fd, b"link/new"):
        pass


def test_walking_leaks_no_descriptors(tmp_path: Path, root_fd: int):
    (tmp_path / "a").mkdir()
    before = open_fds()
    for path in (b"", b"a", b"a/x", b"x"):
        with parent_below(root_fd, b"a/name"):
            pass
        try:
            os.close(open_directory_below(root_fd, path))
        except FileNotFoundError:
            continue
    assert open_fds() == before


def test_the_root_has_no_parent(root_fd: int):
    with pytest.raises(Malformed), parent_below(root_fd, b""):
        pass


def test_paths_are_shown_on_one_line_without_control_characters():
    assert show_path(b"a b") == "'a b'"
    assert show_path(b"\xff\n\x1b[31m") == r"'\\xff\n\x1b[31m'"
    assert show_path(b"") == "the root of the tree"


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        (b"user.a", True),
        (b"trusted.overlay.opaque", True),
        (b"security.capability", True),
        (b"system.posix_acl_access", True),
        (b"security.selinux", False),
        (b"system.nfs4_acl", False),
    ],
)
def test_machine_bound_attributes_are_no_part_of_a_tree(name: bytes, kept: bool):  # noqa: FBT001
    assert is_kept_xattr(name) is kept
