import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from snapstore.errors import SourceError, TargetError
from snapstore.target import atomic
from snapstore.target.atomic import AtomicDirectory, cleanup
from tests.support.users import NOBODY, as_nobody, nobodys_directory


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def pull(
    final: Path,
    *,
    meanwhile: Callable[[], object] = lambda: None,
    error: BaseException | None = None,
    identity: str = "s",
    in_place: bool = False,
) -> None:
    """Pull one file; then let something happen, and fail or commit."""
    with AtomicDirectory(final, identity=identity, in_place=in_place) as place:
        (place.path / "f").write_bytes(b"half")
        place.journal.mark_done(b"f", 0, 4)
        meanwhile()
        if error is not None:
            raise error
        place.commit()


def work_of(final: Path, identity: str = "s") -> Path:
    name = atomic._work_name(os.fsencode(final.name), identity, b"partial")
    return final.with_name(os.fsdecode(name))


def fail_halfway(final: Path, *, identity: str = "s", in_place: bool = False) -> Path:
    """Leave a pull behind that has written one file."""
    error = SourceError("the store went away")
    with pytest.raises(SourceError):
        pull(final, identity=identity, in_place=in_place, error=error)
    return work_of(final, identity)


def fail_at_once(final: Path, *, in_place: bool = False) -> None:
    with AtomicDirectory(final, identity="s", in_place=in_place):
        raise SourceError("no such snapshot")


# -- success ----------------------------------------------------------------------------------


@pytest.mark.parametrize("exists", [False, True])
def test_the_tree_appears_whole_and_nothing_else_is_left(tmp_path: Path, exists: bool):  # noqa: FBT001
    final = tmp_path / "final"
    if exists:
        final.mkdir()
    with AtomicDirectory(final, identity="s") as place:
        assert not place.is_resumed
        assert place.path.parent == tmp_path
        assert place.path.name.startswith(".final.snapstore-partial-")
        (place.path / "f").write_bytes(b"data")
        place.commit()
    assert names(tmp_path) == ["final"]
    assert (final / "f").read_bytes() == b"data"


def test_until_commit_the_final_directory_is_as_it_was(tmp_path: Path):
    final = tmp_path / "final"
    final.mkdir()
    with AtomicDirectory(final, identity="s") as place:
        (place.path / "f").write_bytes(b"data")
        assert names(final) == []
        place.commit()
    assert names(final) == ["f"]


def test_a_tree_whose_root_forbids_writing_can_be_put_in_place():
    with nobodys_directory() as root, as_nobody():
        with AtomicDirectory(root / "final", identity="s") as place:
            place.path.chmod(0o500)
            place.commit()
        assert (root / "final").stat().st_mode & 0o777 == 0o500
        (root / "final").chmod(0o700)


@pytest.mark.parametrize(
    "name", ["-rf", "a b\n", "\udcff", "n" * 255, "\u00e9" * 127, ".hidden", "x.snapstore-partial-"]
)
def test_any_name_will_do(tmp_path: Path, name: str):
    final = tmp_path / name
    work = fail_halfway(final)
    assert work.exists()
    with AtomicDirectory(final, identity="s", resume=True) as place:
        assert place.path == work
        place.commit()
    assert names(tmp_path) == [name]


def test_long_names_with_a_common_beginning_do_not_meet(tmp_path: Path):
    first = AtomicDirectory(tmp_path / ("n" * 250 + "a"), identity="s")
    second = AtomicDirectory(tmp_path / ("n" * 250 + "b"), identity="s")
    assert first.path != second.path
    for place in (first, second):
        place.__exit__(None, None, None)


def test_the_current_directory_has_a_name_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with AtomicDirectory(Path(), identity="s", in_place=True) as place:
        (place.path / "f").touch()
        place.commit()
    assert names(tmp_path / "here") == ["f"]


@pytest.mark.parametrize("spelling", [".", "../here", "{0}/here", "{0}/link/here", ""])
def test_the_working_directory_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spelling: str
):
    """Goal: nobody is left in a directory that is removed, however it was named."""
    (tmp_path / "here").mkdir()
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(TargetError, match="is the working directory") as caught:
        AtomicDirectory(Path(spelling.format(tmp_path)), identity="s")
    assert "--in-place" in caught.value.next_step
    assert names(tmp_path) == ["here", "link"]


def test_a_working_directory_that_may_not_be_entered_is_not_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As of a service's user whom root's shell started."""
    tmp_path.chmod(0o700)
    monkeypatch.chdir(tmp_path)
    with nobodys_directory() as root, as_nobody():
        (root / "final").mkdir()
        pull(root / "final")
        assert names(root / "final") == ["f"]


# -- what may be there beforehand -------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("full", "is not empty"),
        ("file", "is no directory"),
        ("symlink", "is no directory"),
        ("dangling", "is no directory"),
    ],
)
def test_anything_but_an_empty_directory_is_refused_at_once(
    tmp_path: Path, kind: str, message: str
):
    final = tmp_path / "final"
    (tmp_path / "other").mkdir()
    if kind == "full":
        final.mkdir()
        (final / ".hidden").touch()
    elif kind == "file":
        final.touch()
    else:
        final.symlink_to("other" if kind == "symlink" else "nowhere")
    before = names(tmp_path)
    with pytest.raises(TargetError, match=message):
        AtomicDirectory(final, identity="s")
    assert names(tmp_path) == before


def test_a_missing_parent_is_refused(tmp_path: Path):
    with pytest.raises(TargetError, match="No such file") as caught:
        AtomicDirectory(tmp_path / "no" / "final", identity="s")
    assert caught.value.next_step == "create it first"


def test_a_parent_without_permission_is_refused():
    with nobodys_directory() as root, as_nobody():
        root.chmod(0o500)
        with pytest.raises(TargetError, match="cannot write"):
            AtomicDirectory(root / "final", identity="s")
        root.chmod(0o700)


def test_the_root_directory_is_refused():
    with pytest.raises(TargetError):
        AtomicDirectory(Path("/"), identity="s")


def test_a_mount_point_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a b").mkdir()
    line = f"36 35 98:0 / {tmp_path}/a\\040b rw - ext4 /dev/x rw\n".encode()
    real = Path.read_bytes
    monkeypatch.setattr(
        Path, "read_bytes", lambda path: line if path.name == "mountinfo" else real(path)
    )
    with pytest.raises(TargetError, match="mount point") as caught:
        AtomicDirectory(tmp_path / "a b", identity="s")
    assert "--in-place" in caught.value.next_step


# -- races at the end -------------------------------------------------------------------------


def test_whoever_fills_the_directory_meanwhile_keeps_what_they_have(tmp_path: Path):
    final = tmp_path / "final"

    def fill() -> None:
        final.mkdir()
        (final / "g").write_bytes(b"theirs")

    with pytest.raises(TargetError, match="somebody else put something there") as caught:
        pull(final, meanwhile=fill)
    assert str(work_of(final)) in str(caught.value)
    assert "--resume" in caught.value.next_step
    assert names(final) == ["g"]
    assert (work_of(final) / "f").read_bytes() == b"half"


def test_a_file_put_there_meanwhile_is_kept(tmp_path: Path):
    final = tmp_path / "final"
    with pytest.raises(TargetError, match="cannot put"):
        pull(final, meanwhile=lambda: final.write_bytes(b"theirs"))
    assert final.read_bytes() == b"theirs"


def test_a_symlink_put_there_meanwhile_is_not_followed(tmp_path: Path):
    final = tmp_path / "final"
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(TargetError, match="cannot put"):
        pull(final, meanwhile=lambda: final.symlink_to("elsewhere"))
    assert final.is_symlink()
    assert names(tmp_path / "elsewhere") == []


@pytest.mark.parametrize(
    ("number", "words"), [(errno.EBUSY, "--in-place"), (errno.EIO, "mend that")]
)
def test_other_failures_of_rename_say_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str
):
    def refuse(*_args: object, **_options: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(TargetError) as caught:
        pull(tmp_path / "f")
    assert words in caught.value.next_step


# -- failure and resume -----------------------------------------------------------------------


def test_a_failure_keeps_the_work_and_says_where(tmp_path: Path):
    final = tmp_path / "final"
    with pytest.raises(SourceError) as caught:
        pull(final, error=SourceError("the store went away"))
    assert str(work_of(final)) in caught.value.next_step
    assert "--resume" in caught.value.next_step
    assert not final.exists()
    assert names(work_of(final)) == ["f"]


def test_an_error_that_has_a_next_step_keeps_it_and_gets_a_note(tmp_path: Path):
    with pytest.raises(SourceError) as caught:
        pull(tmp_path / "f", error=SourceError("no", next_step="do this"))
    assert caught.value.next_step == "do this"
    assert "--resume" in caught.value.__notes__[0]


def test_an_interrupt_keeps_the_work(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt) as caught:
        pull(tmp_path / "f", error=KeyboardInterrupt())
    assert work_of(tmp_path / "f").is_dir()
    assert "--resume" in caught.value.__notes__[0]


def test_a_failure_before_anything_arrived_leaves_nothing(tmp_path: Path):
    with pytest.raises(SourceError) as caught:
        fail_at_once(tmp_path / "f")
    assert names(tmp_path) == []
    assert caught.value.next_step == ""


def test_resuming_goes_on_where_the_work_is(tmp_path: Path):
    final = tmp_path / "final"
    work = fail_halfway(final)
    with AtomicDirectory(final, identity="s", resume=True) as place:
        assert (place.is_resumed, place.path) == (True, work)
        assert place.journal.done_ranges(b"f") == [(0, 4)]
        place.commit()
    assert names(tmp_path) == ["final"]
    assert (final / "f").read_bytes() == b"half"


def test_resuming_nothing_starts_anew(tmp_path: Path):
    with AtomicDirectory(tmp_path / "f", identity="s", resume=True) as place:
        assert not place.is_resumed
        place.commit()


def test_work_of_an_earlier_pull_is_neither_overwritten_nor_forgotten(tmp_path: Path):
    work = fail_halfway(tmp_path / "final")
    with pytest.raises(TargetError, match="earlier pull") as caught:
        AtomicDirectory(tmp_path / "final", identity="s")
    assert "--resume" in caught.value.next_step
    assert names(work) == ["f"]
    with AtomicDirectory(tmp_path / "final", identity="s", resume=True) as place:
        assert place.journal.done_ranges(b"f") == [(0, 4)]


def test_another_snapshot_or_selection_has_its_own_work(tmp_path: Path):
    work = fail_halfway(tmp_path / "final", identity="s rank 0")
    with AtomicDirectory(tmp_path / "final", identity="s rank 1", resume=True) as place:
        assert (place.is_resumed, place.journal.is_empty) == (False, True)
        assert place.path != work
        place.commit()


def test_work_whose_journal_was_lost_is_resumed_with_nothing_done(tmp_path: Path):
    work = fail_halfway(tmp_path / "final")
    work.with_name(work.name + ".journal").unlink()
    with pytest.raises(TargetError, match="earlier pull"):
        AtomicDirectory(tmp_path / "final", identity="s")
    with AtomicDirectory(tmp_path / "final", identity="s", resume=True) as place:
        assert (place.is_resumed, place.journal.is_empty) == (True, True)


def test_a_journal_whose_work_was_removed_counts_for_nothing(tmp_path: Path):
    work = fail_halfway(tmp_path / "final")
    (work / "f").unlink()
    work.rmdir()
    with AtomicDirectory(tmp_path / "final", identity="s") as place:
        assert (place.is_resumed, place.journal.is_empty) == (False, True)


def test_two_pulls_do_not_work_in_the_same_place(tmp_path: Path):
    fail_halfway(tmp_path / "final")
    with AtomicDirectory(tmp_path / "final", identity="s", resume=True) as first:
        for resume in (True, False):
            with pytest.raises(TargetError, match="another pull"):
                AtomicDirectory(tmp_path / "final", identity="s", resume=resume)
        assert first.path.is_dir()


@pytest.mark.parametrize("kind", ["symlink", "file", "another user's"])
def test_a_planted_working_directory_is_refused(tmp_path: Path, kind: str):
    final, victim = tmp_path / "final", tmp_path / "victim"
    victim.mkdir()
    with AtomicDirectory(final, identity="s") as place:
        path = place.path
    if kind == "symlink":
        path.symlink_to(victim)
    elif kind == "file":
        path.touch()
    else:
        if os.geteuid() != 0:
            pytest.skip("only root can give directories away")
        path.mkdir()
        os.chown(path, NOBODY, NOBODY)
    for resume in (False, True):
        with pytest.raises(TargetError, match="not a directory of yours"):
            AtomicDirectory(final, identity="s", resume=resume)
    assert names(victim) == []


# -- in place ---------------------------------------------------------------------------------


def test_in_place_works_in_the_directory_itself(tmp_path: Path):
    final = tmp_path / "mount"
    final.mkdir()
    (final / "lost+found").mkdir()
    with AtomicDirectory(final, identity="s", in_place=True) as place:
        assert place.path == final
        (place.path / "f").touch()
        place.commit()
    assert names(tmp_path) == ["mount"]
    assert names(final) == ["f", "lost+found"]


@pytest.mark.parametrize("kind", ["missing", "file"])
def test_in_place_needs_a_directory(tmp_path: Path, kind: str):
    if kind == "file":
        (tmp_path / "file").touch()
    with pytest.raises(TargetError, match="is no directory"):
        AtomicDirectory(tmp_path / kind, identity="s", in_place=True)


def test_in_place_keeps_pulls_of_other_snapshots_out(tmp_path: Path):
    with (
        AtomicDirectory(tmp_path, identity="one", in_place=True),
        pytest.raises(TargetError, match="another pull is working"),
    ):
        AtomicDirectory(tmp_path, identity="two", in_place=True)
    with AtomicDirectory(tmp_path, identity="two", in_place=True):
        pass


def test_in_place_through_a_symlink_that_the_user_names(tmp_path: Path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with AtomicDirectory(tmp_path / "link", identity="s", in_place=True) as place:
        assert place.path == tmp_path / "real"
        place.commit()


def test_in_place_resumes_too(tmp_path: Path):
    final = tmp_path / "mount"
    final.mkdir()
    fail_halfway(final, in_place=True)
    with pytest.raises(TargetError, match="earlier pull"):
        AtomicDirectory(final, identity="s", in_place=True)
    with AtomicDirectory(final, identity="s", in_place=True, resume=True) as place:
        assert place.is_resumed
        assert place.journal.done_ranges(b"f") == [(0, 4)]
        place.commit()
    assert names(tmp_path) == ["mount"]


def test_in_place_does_without_a_journal_where_none_can_be():
    with nobodys_directory() as root, as_nobody():
        (root / "mount").mkdir()
        root.chmod(0o500)
        with AtomicDirectory(root / "mount", identity="s", in_place=True, resume=True) as place:
            assert not place.is_resumed
            place.journal.mark_done(b"f", 0, 1)
            place.commit()
        root.chmod(0o700)


def test_in_place_failure_before_anything_arrived_leaves_nothing(tmp_path: Path):
    (tmp_path / "mount").mkdir()
    with pytest.raises(SourceError):
        fail_at_once(tmp_path / "mount", in_place=True)
    assert names(tmp_path) == ["mount"]


# -- cleaning up ------------------------------------------------------------------------------


def test_cleanup_removes_what_pulls_left_whatever_its_modes(tmp_path: Path):
    final = tmp_path / "final"
    final.mkdir()
    first = fail_halfway(final, identity="1")
    second = fail_halfway(final, identity="2")
    (first / "d" / "e").mkdir(parents=True)
    (first / "d" / "e" / "f").touch(mode=0)
    (first / "link").symlink_to(tmp_path)
    (first / "d" / "e").chmod(0)
    (first / "d").chmod(0o400)
    fail_halfway(tmp_path / "other")
    fail_halfway(final, identity="3", in_place=True)
    assert set(cleanup(final)) >= {first, second}
    left = names(tmp_path)
    assert [name for name in left if name.startswith(".final.")] == []
    assert len([name for name in left if name.startswith(".other.")]) == 2
    assert names(final) == ["f"]


def test_cleanup_without_privilege_removes_closed_directories():
    with nobodys_directory() as root, as_nobody():
        work = fail_halfway(root / "final")
        (work / "d").mkdir()
        (work / "d" / "f").touch()
        (work / "d").chmod(0)
        assert cleanup(root / "final") == [work]
        assert names(root) == []


def test_cleanup_leaves_a_pull_at_work_alone(tmp_path: Path):
    with AtomicDirectory(tmp_path / "final", identity="s") as place:
        (place.path / "f").touch()
        assert cleanup(tmp_path / "final") == []
        place.commit()


def test_cleanup_touches_only_what_has_a_journal(tmp_path: Path):
    lookalike = tmp_path / ".final.snapstore-partial-0123456789ab"
    lookalike.mkdir()
    (tmp_path / ".final.snapstore-partial-zzz.journal").touch()
    assert cleanup(tmp_path / "final") == []
    assert lookalike.is_dir()


def test_a_crash_between_rename_and_the_end_leaves_only_a_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    final = tmp_path / "final"
    with AtomicDirectory(final, identity="s") as place:
        (place.path / "f").touch()
        with monkeypatch.context() as patch:
            patch.setattr(atomic.os, "unlink", lambda *_args, **_options: None)
            place.commit()
    assert (final / "f").exists()
    with pytest.raises(TargetError, match="not empty"):
        AtomicDirectory(final, identity="s", resume=True)
    assert len(cleanup(final)) == 1
    assert names(tmp_path) == ["final"]
