"""Let a directory appear whole or not at all, and let a pull that was killed go on.

The tree grows in a sibling, `.NAME.snapstore-partial-<id>`, beside a journal of the same name and
`.journal`. At the end one `rename` puts it in place. POSIX lets that replace an empty directory
and nothing else: whoever fills the directory meanwhile keeps what they have, and the pull fails
with its tree still in the sibling. So there is no need for RENAME_NOREPLACE, which NFS lacks.

In place (for mount points, which cannot be renamed to) the tree grows where it stays.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Self

from snapstore.errors import OutOfSpace, SnapError, TargetError
from snapstore.ids import Digest
from snapstore.target.journal import NO_SPACE, Journal, JournalHeldError
from snapstore.target.remove import remove_tree

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["AtomicDirectory", "cleanup"]

# Of 255 bytes, the rest of the working names takes up to 43.
NAME_BYTES_KEPT = 180

_RENAME_REFUSED = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR})
_NO_DIRECTORY = frozenset({errno.ENOENT, errno.ENOTDIR})
_NO_JOURNAL = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_UNNAMED = frozenset({"", ".", ".."})
_PARTIAL, _IN_PLACE = b"partial", b"in-place"
_OCTAL = re.compile(rb"\\([0-7]{3})")


class AtomicDirectory:
    """The place where one pull works, from an empty directory to the final one.

    Use it as a context manager: leaving it without `commit` keeps the work for `--resume`, and
    says so in the error. Nothing is left after `commit`, nor if nothing had arrived yet.

    Args:
        final: Where the tree is to be: absent or an empty directory; in place, a directory.
        identity: What is pulled: the snapshot and, if not all of it, which part. Work on another
            identity is never resumed.
        resume: Go on from what an earlier pull of the same identity left, if it left anything.
        in_place: Work in the directory itself. Not atomic.

    Attributes:
        path: Where to put the tree.
        journal: What is done of it.
        is_resumed: Whether there is something to go on from.

    Raises:
        TargetError: `final` or its parent cannot be used, another pull is at it, or an earlier
            one left its work and `resume` is not set.
    """

    def __init__(
        self, final: Path, *, identity: str, resume: bool = False, in_place: bool = False
    ) -> None:
        self._final = final.resolve() if in_place or final.name in _UNNAMED else final
        self._name = os.fsencode(self._final.name)
        if not self._name:
            raise TargetError(f"{os.fspath(final)!r} is no directory to pull into")
        self._in_place = in_place
        self._is_committed = False
        self._work_name = _work_name(self._name, identity, _IN_PLACE if in_place else _PARTIAL)
        self._journal_name = self._work_name + b".journal"
        self.path = self._final if in_place else self._final.parent / os.fsdecode(self._work_name)
        self._parent_fd = _open_parent(self._final)
        self._lock_fd = -1
        try:
            if in_place:
                self._lock_fd = self._lock_directory()
                self.journal = self._journal_in_place(identity)
            else:
                _check_final(self._parent_fd, self._name, self._final)
                self.journal = self._open_journal(identity)
            try:
                self.is_resumed = self._begin(resume=resume)
            except BaseException:
                self.journal.close()
                raise
        except BaseException:
            self._close()
            raise

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give up the lock, and if there is no result, say what is left."""
        try:
            if not self._is_committed and not self._drop_if_empty() and error is not None:
                self._explain(error)
        finally:
            self.journal.close()
            self._close()

    def _close(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
        os.close(self._parent_fd)

    def commit(self) -> None:
        """Put the tree in place, durably. All descriptors below it should be closed by now.

        Raises:
            TargetError: Somebody else filled the directory; the tree stays where it is.
        """
        if not self._in_place:
            try:
                os.rename(
                    self._work_name,
                    self._name,
                    src_dir_fd=self._parent_fd,
                    dst_dir_fd=self._parent_fd,
                )
            except OSError as error:
                raise self._rename_error(error) from error
            self._is_committed = True
            try:
                os.fsync(self._parent_fd)
            except OSError as error:
                raise TargetError(
                    f"{os.fspath(self._final)!r} is whole, but may not outlive a crash: "
                    f"{error.strerror}",
                    next_step="check the file system",
                ) from error
        self._is_committed = True
        self._remove_journal()

    def _remove_journal(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._journal_name, dir_fd=self._parent_fd)

    def _open_journal(self, identity: str) -> Journal:
        try:
            return Journal.open(self._parent_fd, self._journal_name, identity)
        except JournalHeldError as error:
            raise TargetError(
                f"another pull is working on {os.fspath(self._final)!r}",
                next_step="wait for it to end",
            ) from error
        except OSError as error:
            self._refuse_if_full(error)
            raise TargetError(
                f"cannot write to {os.fspath(self._final.parent)!r}: {error.strerror}",
                next_step="pull to where you may write; a mount point needs --in-place",
            ) from error

    def _lock_directory(self) -> int:
        """Keep other pulls of whatever snapshot out of the directory, where it can be locked."""
        try:
            fd = os.open(self._final, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            reason = "is no directory" if error.errno in _NO_DIRECTORY else error.strerror
            raise TargetError(
                f"cannot pull into {os.fspath(self._final)!r}: {reason}",
                next_step="create the directory first",
            ) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(fd)
            raise TargetError(
                f"another pull is working on {os.fspath(self._final)!r}",
                next_step="wait for it to end",
            ) from error
        except OSError:
            pass  # Network file systems may not lock directories.
        return fd

    def _journal_in_place(self, identity: str) -> Journal:
        """Open the journal beside the directory; where that is forbidden, keep it in memory."""
        try:
            return self._open_journal(identity)
        except TargetError as error:
            cause = error.__cause__
            if isinstance(cause, OSError) and cause.errno in _NO_JOURNAL:
                return Journal(None, identity)
            raise

    def _begin(self, *, resume: bool) -> bool:
        """Find out what an earlier pull left, else make the working directory."""
        is_known = self.journal.load()
        is_there = _is_own_directory(self._parent_fd, self._work_name)
        is_left = is_known if self._in_place else is_there
        if is_left and not resume:
            raise TargetError(
                f"an earlier pull left its work in {os.fspath(self.path)!r}",
                next_step="add --resume to go on from it, or remove it",
            )
        try:
            if not (is_known and is_left):
                self.journal.start()
            if not (self._in_place or is_there):
                self._make_work_directory()
        except BaseException:
            if not (is_known or is_there):
                self._remove_journal()
            raise
        return is_left

    def _make_work_directory(self) -> None:
        try:
            os.mkdir(self._work_name, 0o700, dir_fd=self._parent_fd)
        except OSError as error:
            self._refuse_if_full(error)
            raise TargetError(
                f"cannot create {os.fspath(self.path)!r}: {error.strerror}"
            ) from error

    def _refuse_if_full(self, error: OSError) -> None:
        if error.errno in NO_SPACE:
            raise OutOfSpace(
                f"no space in {os.fspath(self._final.parent)!r}: {error.strerror}",
                next_step="make room and run it again",
            ) from error

    def _drop_if_empty(self) -> bool:
        """Leave nothing behind if nothing has arrived."""
        if not self.journal.is_empty:
            return False
        try:
            if self._in_place:
                if any(self.path.iterdir()):
                    return False
            else:
                os.rmdir(self._work_name, dir_fd=self._parent_fd)
            os.unlink(self._journal_name, dir_fd=self._parent_fd)
        except OSError:
            return False
        return True

    def _explain(self, error: BaseException) -> None:
        text = (
            f"what was pulled so far stays in {os.fspath(self.path)!r}, and --resume goes on "
            "from there"
        )
        if isinstance(error, SnapError) and not error.next_step:
            error.next_step = text
        else:
            error.add_note(text)

    def _rename_error(self, error: OSError) -> SnapError:
        if error.errno in _RENAME_REFUSED:
            reason, step = "somebody else put something there meanwhile", "move that away"
        elif error.errno == errno.EBUSY:
            reason, step = "it is in use as a mount point", "use --in-place"
        else:
            reason, step = f"{error.strerror}", "mend that"
        kind = OutOfSpace if error.errno in NO_SPACE else TargetError
        return kind(
            f"cannot put the tree at {os.fspath(self._final)!r}: {reason}; it is whole, in "
            f"{os.fspath(self.path)!r}",
            next_step=f"{step}, and run it again with --resume",
        )


def cleanup(final: Path) -> list[Path]:
    """Remove what pulls to `final` have left behind, except where one is at work right now.

    Returns:
        What was removed.

    Raises:
        TargetError: The parent cannot be read, or something cannot be removed.
    """
    final = final.resolve() if final.name in _UNNAMED else final
    pattern = re.compile(
        rb"(%s)\.journal"
        % b"|".join(
            re.escape(_work_name(os.fsencode(final.name), None, kind)) + rb"[0-9a-f]{12}"
            for kind in (_PARTIAL, _IN_PLACE)
        )
    )
    removed: list[Path] = []
    parent_fd = _open_parent(final)
    try:
        with os.scandir(parent_fd) as listing:
            names = sorted(os.fsencode(item.name) for item in listing)
        for match in filter(None, map(pattern.fullmatch, names)):
            with contextlib.suppress(JournalHeldError):
                _remove_one(parent_fd, work_name=match[1], journal_name=match[0])
                removed.append(final.parent / os.fsdecode(match[1]))
    except OSError as error:
        raise TargetError(
            f"cannot clean up beside {os.fspath(final)!r}: {error.strerror}"
        ) from error
    finally:
        os.close(parent_fd)
    return removed


def _remove_one(parent_fd: int, *, work_name: bytes, journal_name: bytes) -> None:
    journal = Journal.open(parent_fd, journal_name, "")
    try:
        if _is_own_directory(parent_fd, work_name):
            remove_tree(parent_fd, work_name)
        os.unlink(journal_name, dir_fd=parent_fd)
    finally:
        journal.close()


def _work_name(name: bytes, identity: str | None, kind: bytes) -> bytes:
    """Name the sibling that belongs to a name and an identity; without one, the stem of all."""
    if len(name) > NAME_BYTES_KEPT:
        name = name[:NAME_BYTES_KEPT] + b"~" + Digest.of(name).short.encode("ascii")
    stem = b".%s.snapstore-%s-" % (name, kind)
    if identity is None:
        return stem
    return stem + Digest.of(identity.encode("utf-8", "surrogateescape")).short.encode("ascii")


def _open_parent(final: Path) -> int:
    try:
        return os.open(final.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise TargetError(
            f"cannot open {os.fspath(final.parent)!r}: {error.strerror}",
            next_step="create it first",
        ) from error


def _check_final(parent_fd: int, name: bytes, final: Path) -> None:
    """Refuse now what `rename` would refuse after hours of work."""
    try:
        status = os.stat(name, dir_fd=parent_fd, follow_symlinks=False)
    except FileNotFoundError:
        return
    shown = repr(os.fspath(final))
    if not stat.S_ISDIR(status.st_mode):
        raise TargetError(f"{shown} exists and is no directory", next_step="choose another name")
    if status.st_dev != os.fstat(parent_fd).st_dev or _is_mount_point(final):
        raise TargetError(f"{shown} is a mount point", next_step="use --in-place")
    fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent_fd)
    try:
        with os.scandir(fd) as listing:
            if next(listing, None) is not None:
                raise TargetError(
                    f"{shown} is not empty",
                    next_step="choose another directory, or --in-place to add to this one",
                )
    finally:
        os.close(fd)
    # By what it is, since it may have been given by another path.
    if _is_working_directory(status):
        raise TargetError(
            f"{shown} is the working directory: a rename would put another one in its place, and "
            "leave who is in it, such as your shell, in one that is removed",
            next_step="add --in-place, or pull from elsewhere",
        )


def _is_working_directory(status: os.stat_result) -> bool:
    try:
        return os.path.samestat(status, os.stat(os.curdir))  # noqa: PTH116 - compared with it
    except OSError:
        # This user may not enter it, as after `sudo -u`, or its file server is away.
        return False


def _is_mount_point(path: Path) -> bool:
    """Find bind mounts too, which have the device number of their parent."""
    wanted = os.fsencode(path.resolve())
    try:
        table = Path("/proc/self/mountinfo").read_bytes()
    except OSError:
        return False
    for line in table.splitlines():
        fields = line.split(b" ", 5)
        if len(fields) > 4:
            mount_point = _OCTAL.sub(lambda match: bytes([int(match[1], 8) & 0xFF]), fields[4])
            if mount_point == wanted:
                return True
    return False


def _is_own_directory(parent_fd: int, name: bytes) -> bool:
    """Say whether a directory is there; one that somebody else planted is refused."""
    try:
        status = os.stat(name, dir_fd=parent_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise TargetError(
            f"{os.fsdecode(name)!r} is not a directory of yours", next_step="have it removed"
        )
    return True
