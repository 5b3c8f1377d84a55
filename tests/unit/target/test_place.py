import os
import stat
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapstore.errors import FormatError, Malformed, OutOfSpace, SnapError, TargetError
from snapstore.format.tree import EntryType, TreeEntry
from snapstore.source.scan import scan_tree
from snapstore.target.journal import Journal
from snapstore.target.place import PlaceReport, TreeTarget
from tests.support.processes import open_fds
from tests.support.users import NOBODY, as_nobody, nobodys_directory

SECOND_NS = 1_000_000_000
WHEN_NS = 1_700_000_000 * SECOND_NS + 123_456_789


def entry(path: bytes, kind: EntryType = EntryType.FILE, **values: object) -> TreeEntry:
    defaults: dict[str, object] = {
        "mode": 0o755 if kind is EntryType.DIRECTORY else 0o644,
        "uid": os.geteuid(),
        "gid": os.getegid(),
        "mtime_ns": WHEN_NS,
    }
    return TreeEntry(path=path, type=kind, **(defaults | values))  # type: ignore[arg-type]


def folder(path: bytes = b"", **values: object) -> TreeEntry:
    return entry(path, EntryType.DIRECTORY, **values)


def symlink(path: bytes, target: bytes) -> TreeEntry:
    return entry(path, EntryType.SYMLINK, mode=0o777, target=target)


def hardlink(path: bytes, target: bytes) -> TreeEntry:
    return entry(path, EntryType.HARDLINK, target=target)


def write(fd: int, data: bytes) -> None:
    assert os.pwrite(fd, data, 0) == len(data)


def place(
    root: Path, entries: Iterable[TreeEntry], data: bytes = b"", **options: bool
) -> PlaceReport:
    """Recreate a tree; every file begins with `data`."""
    journal = Journal(None, "test") if options.pop("in_place", False) else None
    with TreeTarget(root, entries, journal=journal, **options) as target:
        target.make_directories()
        for file in target.files:
            fd = target.open_file(file)
            write(fd, data[: file.size_bytes])
            target.finish_file(file, fd)
            os.close(fd)
        return target.finish()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return an empty directory with nothing but a victim beside it."""
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "f").write_bytes(b"precious")
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@pytest.fixture
def victim(root: Path) -> Iterator[Path]:
    """Return what no entry may touch, and check that none did."""
    victim = root.parent / "victim"
    before = victim.stat(), (victim / "f").stat()
    yield victim
    assert sorted(path.name for path in victim.iterdir()) == ["f"]
    assert (victim / "f").read_bytes() == b"precious"
    after = victim.stat(), (victim / "f").stat()
    for then, now in zip(before, after, strict=True):
        assert (then.st_mode, then.st_mtime_ns, then.st_nlink) == (
            now.st_mode,
            now.st_mtime_ns,
            now.st_nlink,
        )


# -- a whole tree -----------------------------------------------------------------------------


def test_a_scanned_tree_comes_back_as_it_was(tmp_path: Path):
    """Build a tree of all that can be stored, scan it, recreate it, and scan that."""
    source = tmp_path / "source"
    (source / "d" / "empty").mkdir(parents=True)
    for name in (b"\xff\n", b"-rf", b" ", b"n" * 255):
        Path(os.fsdecode(os.fsencode(source) + b"/d/" + name)).write_bytes(b"same data")
    (source / "executable").write_bytes(b"")
    (source / "executable").chmod(0o4755)
    (source / "closed").write_bytes(b"same data")
    (source / "closed").chmod(0)
    os.link(source / "d" / " ", source / "zz")
    for name, target in (("abs", "/etc/passwd"), ("up", ".."), ("dangling", "no\udcff")):
        (source / name).symlink_to(target)
    try:
        os.setxattr(source / "d", "user.a", b"\0")
        os.setxattr(source / "zz", "user.b", b"")
    except OSError:
        pass  # a file system without attributes: the rest still counts
    if os.geteuid() == 0:
        os.chown(source / "d", 12, 34)
        os.chown(source / "abs", 12, 34, follow_symlinks=False)
    for number, path in enumerate(sorted(source.rglob("*"), reverse=True)):
        os.utime(path, ns=(0, -number), follow_symlinks=False)
    (source / "d").chmod(0o500)
    os.utime(source / "d", ns=(0, WHEN_NS))
    os.utime(source, ns=(0, 1))
    entries = scan_tree(source).entries
    target = tmp_path / "target"
    target.mkdir()
    report = place(target, entries, b"same data", fsync=True)
    assert report == PlaceReport()
    assert report.warnings() == []
    assert scan_tree(target).entries == entries


def test_trees_of_several_ranks_share_their_directories(root: Path):
    first = [folder(), folder(b"d"), entry(b"d/a")]
    second = [folder(), folder(b"d"), entry(b"d/b")]
    place(root, [*second, *first])
    assert sorted(path.name for path in (root / "d").iterdir()) == ["a", "b"]


def test_files_are_holes_until_they_are_written(root: Path):
    size = 1 << 33
    with TreeTarget(root, [folder(), entry(b"f", size_bytes=size)]) as target:
        target.make_directories()
        fd = target.open_file(target.files[0])
        assert os.fstat(fd).st_size == size
        os.pwrite(fd, b"x", size - 1)
        target.finish_file(target.files[0], fd)
        os.close(fd)
        target.finish()
    status = (root / "f").stat()
    assert (status.st_size, status.st_mtime_ns) == (size, WHEN_NS)
    assert status.st_blocks * 512 < 1 << 20


def test_directories_are_closed_to_others_until_the_end(root: Path):
    with TreeTarget(root, [folder(), folder(b"d", mode=0o777), entry(b"d/f")]) as target:
        target.make_directories()
        assert stat.S_IMODE((root / "d").stat().st_mode) == 0o700
        os.close(target.open_file(target.files[0]))
        assert stat.S_IMODE((root / "d" / "f").stat().st_mode) == 0o600
        target.finish()
    assert stat.S_IMODE((root / "d").stat().st_mode) == 0o777
    assert (root / "d").stat().st_mtime_ns == WHEN_NS


def test_empty_files_need_not_be_opened(root: Path):
    with TreeTarget(root, [folder(), entry(b"f", mode=0o400)]) as target:
        target.make_directories()
        target.finish()
    assert stat.S_IMODE((root / "f").stat().st_mode) == 0o400


def test_a_file_with_data_that_nobody_wrote_is_our_bug(root: Path):
    with TreeTarget(root, [folder(), entry(b"f", size_bytes=1)]) as target:
        target.make_directories()
        with pytest.raises(AssertionError, match="'f'"):
            target.finish()


def test_files_may_be_opened_and_finished_by_many_threads(root: Path):
    files = [entry(b"d/%03d" % number, size_bytes=9) for number in range(200)]
    errors: list[BaseException] = []
    with TreeTarget(root, [folder(), folder(b"d"), *files]) as target:
        target.make_directories()

        def work(part: list[TreeEntry]) -> None:
            try:
                for file in part:
                    fd = target.open_file(file)
                    write(fd, b"some data")
                    target.finish_file(file, fd)
                    os.close(fd)
            except BaseException as error:  # noqa: BLE001 (reported by the test)
                errors.append(error)

        threads = [threading.Thread(target=work, args=(files[n::4],)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        target.finish()
    assert errors == []
    assert {path.read_bytes() for path in (root / "d").iterdir()} == {b"some data"}


def test_no_descriptor_is_left_open(root: Path):
    before = open_fds()
    tree = [folder(), folder(b"d"), entry(b"d/f"), symlink(b"l", b"d"), hardlink(b"z", b"d/f")]
    place(root, tree)
    with pytest.raises(TargetError):
        place(root, tree)
    assert open_fds() == before


def test_a_root_that_is_missing_is_refused(tmp_path: Path):
    with pytest.raises(TargetError, match="cannot open"):
        TreeTarget(tmp_path / "no", [folder()])


# -- owners, modes, attributes ----------------------------------------------------------------


def test_without_privilege_owners_are_kept_and_reported_once():
    """A set-id bit means something else under another owner, so it goes with it."""
    with nobodys_directory() as top, as_nobody():
        tree = [
            folder(uid=0, gid=0),
            folder(b"d", uid=0, gid=0, mode=0o2755),
            entry(b"d/f", uid=0, gid=0, mode=0o6755),
            entry(b"mine", mode=0o4755),
            TreeEntry(
                path=b"l",
                type=EntryType.SYMLINK,
                mode=0o777,
                uid=0,
                gid=0,
                mtime_ns=0,
                target=b"x",
            ),
        ]
        report = place(top, tree)
        assert (report.owners_kept, report.set_id_dropped) == (4, 2)
        assert len(report.warnings()) == 2
        status = (top / "d" / "f").stat()
        assert (status.st_uid, stat.S_IMODE(status.st_mode)) == (NOBODY, 0o755)
        assert stat.S_IMODE((top / "mine").stat().st_mode) == 0o4755


def test_without_privilege_closed_files_get_their_attributes_too():
    with nobodys_directory() as top, as_nobody():
        try:
            os.setxattr(top, "user.probe", b"")
        except OSError:
            pytest.skip("this file system has no extended attributes")
        closed = entry(b"f", mode=0, xattrs=((b"user.a", b"1"),))
        report = place(top, [folder(), closed])
        assert report == PlaceReport()
        (top / "f").chmod(0o400)
        assert os.getxattr(top / "f", "user.a") == b"1"


def test_attributes_that_cannot_be_set_are_counted_by_name(root: Path):
    bad = (
        (b"security.capability", b"nonsense"),
        (b"security.selinux", b"label"),
        (b"system.posix_acl_access", b"nonsense"),
        (b"user.\xff", b"1"),
    )
    report = place(root, [folder(), entry(b"f", xattrs=bad), entry(b"g", xattrs=bad)])
    skipped = dict(report.xattrs_skipped)
    skipped.pop(r"user.\xff", None)  # only where the file system has none at all
    assert skipped == {
        "security.capability": 2,
        "security.selinux": 2,
        "system.posix_acl_access": 2,
    }
    assert "security.selinux could not be set on 2 paths" in " ".join(report.warnings())


def acl(*entries: tuple[int, int, int]) -> bytes:
    """Build an ACL attribute of (tag, permissions, id), as the kernel has it."""
    parts = [(2).to_bytes(4, "little")]
    for tag, permissions, who in entries:
        parts.append(tag.to_bytes(2, "little") + permissions.to_bytes(2, "little"))
        parts.append(who.to_bytes(4, "little"))
    return b"".join(parts)


def acl_for(user: int) -> bytes:
    nobody_in_particular = 0xFFFF_FFFF
    return acl(
        (1, 7, nobody_in_particular),
        (2, 5, user),
        (4, 5, nobody_in_particular),
        (0x10, 5, nobody_in_particular),
        (0x20, 0, nobody_in_particular),
    )


def acl_names(path: Path) -> list[str]:
    return [name for name in os.listxattr(path) if "posix_acl" in name]


def test_acls_come_from_the_entries_and_not_from_around(root: Path):
    """Below a directory with a default ACL, everything new inherits one."""
    try:
        os.setxattr(root, "system.posix_acl_default", acl_for(NOBODY))
    except OSError:
        pytest.skip("this file system has no ACLs")
    wanted = acl_for(12)
    tree = [
        folder(),
        folder(b"d"),
        folder(b"e", mode=0o750, xattrs=((b"system.posix_acl_default", wanted),)),
        entry(b"d/f"),
        entry(b"d/g", mode=0o750, xattrs=((b"system.posix_acl_access", wanted),)),
    ]
    report = place(root, tree)
    assert report == PlaceReport()
    for name in (".", "d", "d/f"):
        assert acl_names(root / name) == []
    assert os.getxattr(root / "d" / "g", "system.posix_acl_access") == wanted
    assert acl_names(root / "e") == ["system.posix_acl_default"]
    assert stat.S_IMODE((root / "d" / "f").stat().st_mode) == 0o644


# -- hostile entries --------------------------------------------------------------------------

HOSTILE = [
    pytest.param([entry(b"../f")], id="up"),
    pytest.param([entry(b"/etc/f")], id="absolute"),
    pytest.param([folder(b"d"), entry(b"d/../../f")], id="up inside"),
    pytest.param([entry(b"./f")], id="dot"),
    pytest.param([folder(b"d"), entry(b"d//f")], id="empty component"),
    pytest.param([entry(b"a\0b")], id="nul"),
    pytest.param([entry(b"n" * 256)], id="long name"),
    pytest.param([symlink(b"l", b"../victim"), entry(b"l/f")], id="below a symlink"),
    pytest.param([entry(b"f"), entry(b"f/g")], id="below a file"),
    pytest.param([entry(b"d/f")], id="no parent"),
    pytest.param([entry(b"f"), entry(b"f")], id="twice"),
    pytest.param([folder(b"d"), folder(b"d", mode=0)], id="two directories that differ"),
    pytest.param([symlink(b"d", b"x"), folder(b"d")], id="two types"),
    pytest.param([hardlink(b"l", b"../victim/f")], id="hard link out"),
    pytest.param([hardlink(b"l", b"/etc/passwd")], id="hard link to absolute"),
    pytest.param([symlink(b"a", b"../victim/f"), hardlink(b"l", b"a")], id="hard link, symlink"),
    pytest.param([folder(b"d"), hardlink(b"l", b"d")], id="hard link to a directory"),
    pytest.param([hardlink(b"a", b"b"), entry(b"b")], id="hard link to a later name"),
    pytest.param([hardlink(b"a", b"a")], id="hard link to itself"),
    pytest.param([entry(b"f"), hardlink(b"g", b"f"), hardlink(b"h", b"g")], id="link to a link"),
    pytest.param([symlink(b"l", b"")], id="empty symlink"),
    pytest.param([symlink(b"l", b"a\0b")], id="symlink with nul"),
    pytest.param([symlink(b"l", b"x" * 4096)], id="long symlink"),
    pytest.param([entry(b"f", mode=0o10000)], id="mode"),
    pytest.param([entry(b"f", mode=-1)], id="negative mode"),
    pytest.param([entry(b"f", uid=1 << 32)], id="owner"),
    pytest.param([entry(b"f", gid=-1)], id="group"),
    pytest.param([entry(b"f", size_bytes=-1)], id="negative size"),
    pytest.param([entry(b"f", size_bytes=1 << 62)], id="size"),
    pytest.param([folder(b"d", size_bytes=1)], id="size of a directory"),
    pytest.param([entry(b"f", mtime_ns=1 << 63)], id="time"),
    pytest.param([entry(b"")], id="the root is a file"),
]


@pytest.mark.usefixtures("victim")
@pytest.mark.parametrize("entries", HOSTILE)
def test_hostile_entries_are_refused_before_anything_is_made(root: Path, entries: list[TreeEntry]):
    has_root = any(item.path == b"" for item in entries)
    with pytest.raises(FormatError):
        place(root, entries if has_root else [folder(), *entries])
    assert list(root.iterdir()) == []


@pytest.mark.usefixtures("victim")
@pytest.mark.parametrize("planted", ["../victim", "../victim/f", ".", "/", "nowhere"])
@pytest.mark.parametrize("options", [{}, {"resume": True}, {"in_place": True}])
@pytest.mark.parametrize(
    "tree",
    [
        pytest.param([folder(), folder(b"x"), entry(b"x/f", size_bytes=3)], id="directory"),
        pytest.param([folder(), entry(b"x", size_bytes=3)], id="file"),
        pytest.param([folder(), folder(b"d"), folder(b"d/x"), entry(b"d/x/f")], id="deeper"),
    ],
)
def test_a_planted_symlink_is_never_followed(
    root: Path, planted: str, options: dict[str, bool], tree: list[TreeEntry]
):
    where = root / "d" if tree[1].path == b"d" else root
    where.mkdir(exist_ok=True)
    (where / "x").symlink_to(planted)
    with pytest.raises(TargetError):
        place(root, tree, b"evil", **options)
    assert (where / "x").is_symlink()


@pytest.mark.usefixtures("victim")
@pytest.mark.parametrize("kind", [EntryType.SYMLINK, EntryType.HARDLINK])
def test_links_do_not_go_through_planted_symlinks(root: Path, kind: EntryType):
    """Only the last component may be in the way, and a resumed pull replaces that alone."""
    (root / "d").symlink_to("../victim")
    tree = [folder(), entry(b"a"), folder(b"d"), entry(b"d/l", kind, target=b"a", mode=0o777)]
    for options in ({}, {"resume": True}, {"in_place": True}):
        with pytest.raises(TargetError):
            place(root, tree, **options)


def test_what_a_planted_symlink_leads_to_keeps_its_mode(root: Path, victim: Path):
    victim.chmod(0o500)
    (root / "d").symlink_to(victim)
    with pytest.raises(TargetError):
        place(root, [folder(), folder(b"d", mode=0o777)], resume=True)
    assert stat.S_IMODE(victim.stat().st_mode) == 0o500
    victim.chmod(0o755)


def test_a_file_exchanged_before_it_gets_its_other_names_is_not_followed(root: Path, victim: Path):
    tree = [folder(), entry(b"a", size_bytes=3), hardlink(b"h", b"a")]
    with TreeTarget(root, tree) as target:
        target.make_directories()
        fd = target.open_file(target.files[0])
        target.finish_file(target.files[0], fd)
        os.close(fd)
        (root / "a").unlink()
        (root / "a").symlink_to(victim / "f")
        target.finish()
    assert (root / "h").is_symlink()
    assert (victim / "f").stat().st_nlink == 1


def test_a_link_in_the_way_is_replaced_only_when_resuming(root: Path, victim: Path):
    tree = [folder(), entry(b"a"), hardlink(b"h", b"a"), symlink(b"s", b"target")]
    for name in ("h", "s"):
        (root / name).symlink_to(victim / "f")
    with pytest.raises(TargetError, match="exists already"):
        place(root, tree)
    place(root, tree, resume=True)
    assert (root / "s").readlink() == Path("target")
    assert os.path.samestat((root / "h").stat(), (root / "a").stat())


@pytest.mark.usefixtures("victim")
def test_a_symlink_in_the_tree_is_made_but_never_used(root: Path):
    tree = [folder(), symlink(b"a", b"../victim"), symlink(b"b", b"/"), symlink(b"c", b"c")]
    place(root, tree)
    assert (root / "a").readlink() == Path("../victim")
    assert (root / "b").lstat().st_mtime_ns == WHEN_NS


@pytest.mark.parametrize("options", [{}, {"in_place": True}])
def test_nothing_that_exists_is_written_to(root: Path, options: dict[str, bool]):
    (root / "f").write_bytes(b"old")
    with pytest.raises(TargetError, match="'f' exists already"):
        place(root, [folder(), entry(b"f", size_bytes=3)], b"new", **options)
    assert (root / "f").read_bytes() == b"old"


def test_in_place_finds_out_what_is_in_the_way_before_it_makes_anything(root: Path):
    (root / "z").symlink_to("anywhere")
    tree = [folder(), folder(b"d"), entry(b"d/f", size_bytes=3), entry(b"z", size_bytes=3)]
    journal = Journal(None, "test")
    with (
        TreeTarget(root, tree, journal=journal) as target,
        pytest.raises(TargetError, match="'z' exists already; nothing was written"),
    ):
        target.make_directories()
    assert [path.name for path in root.iterdir()] == ["z"]
    assert journal.is_empty


def test_in_place_resumes_over_its_own_files_only(root: Path):
    """Goal: what somebody else put there between two runs is not ours to replace.

    Method: make one file and end; then somebody makes the other file and the link of the tree.
    """
    link = entry(b"l", EntryType.SYMLINK, target=b"a", mode=0o777)
    tree = [folder(), entry(b"a", size_bytes=3), entry(b"b", size_bytes=3), link]
    journal = Journal(None, "test")
    with TreeTarget(root, tree, journal=journal) as target:
        target.make_directories()
        os.close(target.open_file(tree[1]))
    (root / "b").write_bytes(b"theirs")
    with (
        TreeTarget(root, tree, journal=journal, resume=True) as target,
        pytest.raises(TargetError, match="'b' exists already"),
    ):
        target.make_directories()
    assert (root / "b").read_bytes() == b"theirs"
    (root / "b").unlink()
    with TreeTarget(root, tree, journal=journal, resume=True) as target:
        target.make_directories()
        for file in target.files:
            fd = target.open_file(file)
            write(fd, b"new")
            target.finish_file(file, fd)
            os.close(fd)
        target.finish()
    assert (root / "a").read_bytes() == (root / "b").read_bytes() == b"new"
    assert (root / "l").readlink() == Path("a")


@pytest.mark.parametrize("kind", ["fifo", "directory"])
def test_a_resumed_file_must_be_a_file(root: Path, kind: str):
    if kind == "fifo":
        os.mkfifo(root / "f")
    else:
        (root / "f").mkdir()
    with pytest.raises(TargetError):
        place(root, [folder(), entry(b"f", size_bytes=3)], b"new", resume=True)


paths = st.lists(
    st.sampled_from([b"a", b"b", b"..", b".", b"", b"victim", b"x\0"]), max_size=3
).map(b"/".join)
targets = st.sampled_from([b"../victim", b"../victim/f", b"/", b"a", b"..", b"", b"a/b"])
any_entry = st.builds(
    TreeEntry,
    path=paths,
    type=st.sampled_from(EntryType),
    mode=st.integers(0, 0o7777),
    uid=st.just(os.geteuid()),
    gid=st.just(os.getegid()),
    mtime_ns=st.integers(-SECOND_NS, WHEN_NS),
    size_bytes=st.integers(0, 2),
    target=targets,
)


@pytest.mark.slow
@given(entries=st.lists(any_entry, max_size=6), again=st.booleans())
def test_whatever_the_entries_say_nothing_outside_changes(
    tmp_path_factory: pytest.TempPathFactory,
    entries: list[TreeEntry],
    again: bool,  # noqa: FBT001
):
    top = tmp_path_factory.mktemp("top")
    (top / "victim").mkdir()
    (top / "victim" / "f").write_bytes(b"precious")
    (top / "root").mkdir()
    before = [scan_tree(top / "victim"), sorted(os.listdir("/"))]  # noqa: PTH208
    for options in ({}, {"resume": True}) if again else ({},):
        try:
            place(top / "root", [folder(), *entries], b"xx", **options)
        except SnapError:
            continue
    (top / "root").chmod(0o700)
    assert [scan_tree(top / "victim"), sorted(os.listdir("/"))] == before  # noqa: PTH208
    assert sorted(path.name for path in top.iterdir()) == ["root", "victim"]


# -- resume and in place ----------------------------------------------------------------------


def test_a_resumed_file_keeps_what_it_holds(root: Path):
    tree = [folder(), folder(b"d"), entry(b"d/f", size_bytes=8), entry(b"d/g", size_bytes=8)]
    with TreeTarget(root, tree) as target:
        target.make_directories()
        fd = target.open_file(target.files[0])
        write(fd, b"1234")
        os.close(fd)
    with TreeTarget(root, tree, resume=True) as target:
        target.make_directories()
        assert [target.survives(file) for file in target.files] == [True, False]
        for file in target.files:
            fd = target.open_file(file)
            os.pwrite(fd, b"5678", 4)
            os.close(fd)
        target.finish()
    assert (root / "d" / "f").read_bytes() == b"12345678"
    assert (root / "d" / "g").read_bytes() == b"\0\0\0\0005678"
    assert (root / "d" / "f").stat().st_mtime_ns == WHEN_NS


def test_a_file_of_another_size_does_not_survive(root: Path, victim: Path):
    tree = [folder(), entry(b"f", size_bytes=8)]
    (root / "f").write_bytes(b"123")
    with TreeTarget(root, tree, resume=True) as target:
        assert not target.survives(target.files[0])
        os.close(target.open_file(target.files[0]))
        assert target.survives(target.files[0])
    (root / "f").unlink()
    (root / "f").symlink_to(victim / "f")  # which has 8 bytes, too
    with TreeTarget(root, tree, resume=True) as target:
        assert not target.survives(target.files[0])


def test_a_pull_that_was_killed_at_the_very_end_is_resumed_without_privilege():
    """Every mode is final already, and forbids what has to be done again."""
    with nobodys_directory() as top, as_nobody():
        tree = [
            folder(),
            folder(b"d", mode=0o500),
            folder(b"d/closed", mode=0),
            entry(b"d/closed/f", mode=0, size_bytes=4),
            entry(b"d/g", mode=0o400, size_bytes=4),
            hardlink(b"d/h", b"d/g"),
            symlink(b"d/l", b"x"),
        ]
        place(top, tree, b"data")
        place(top, tree, b"data", resume=True)
        assert stat.S_IMODE((top / "d").stat().st_mode) == 0o500
        assert stat.S_IMODE((top / "d" / "closed").stat().st_mode) == 0
        assert (top / "d" / "g").stat().st_nlink == 2
        # Also where the data counts as done and no file is opened again.
        with TreeTarget(top, tree, resume=True) as target:
            target.make_directories()
            assert all(map(target.survives, target.files))
            target.finish()
        (top / "d" / "closed").chmod(0o700)
        assert stat.S_IMODE((top / "d" / "closed" / "f").stat().st_mode) == 0
        for path in (top / "d", top / "d" / "closed" / "f"):
            path.chmod(0o700)
        assert (top / "d" / "closed" / "f").read_bytes() == b"data"


def test_in_place_adds_to_a_directory_that_keeps_its_own_mode(root: Path):
    (root / "d").mkdir()
    (root / "d" / "theirs").write_bytes(b"old")
    root.chmod(0o750)
    tree = [folder(mode=0o700), folder(b"d", mode=0o711), entry(b"d/f", size_bytes=3)]
    place(root, tree, b"new", in_place=True)
    assert (root / "d" / "theirs").read_bytes() == b"old"
    assert (root / "d" / "f").read_bytes() == b"new"
    assert stat.S_IMODE(root.stat().st_mode) == 0o750
    assert stat.S_IMODE((root / "d").stat().st_mode) == 0o711


# -- failures ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "kind"), [(28, OutOfSpace), (122, OutOfSpace), (5, TargetError), (30, TargetError)]
)
def test_failures_of_the_system_are_named(
    root: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[SnapError]
):
    def refuse(*_args: object, **_options: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(kind, match="'f'"):
        place(root, [folder(), entry(b"f", size_bytes=3)])


def test_a_tree_that_is_not_the_targets_is_our_bug(root: Path):
    with TreeTarget(root, [folder(), entry(b"f")]) as target, pytest.raises(AssertionError):
        target.open_file(entry(b"g"))


def test_refused_trees_open_nothing(root: Path):
    before = open_fds()
    with pytest.raises(Malformed):
        TreeTarget(root, [entry(b"../f")])
    assert open_fds() == before
