"""Give what was recreated its owner, extended attributes, mode and times.

What the system does not permit is left out and counted: a user without privilege owns what they
pull. A set-id bit whose id could not be given is dropped, since with another owner it would mean
something else.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import stat
import threading
from typing import TYPE_CHECKING

from snapstore.fstree import is_kept_xattr

if TYPE_CHECKING:
    from collections.abc import Callable

    from snapstore.format.tree import TreeEntry

__all__ = ["MetadataWriter", "PlaceReport"]

_ACL_ACCESS = b"system.posix_acl_access"
_ACL_DEFAULT = b"system.posix_acl_default"
_NOT_PERMITTED = frozenset({errno.EPERM, errno.EACCES})
# EINVAL: an owner that this user namespace does not know, or a value that the kernel refuses.
_OWNER_REFUSED = _NOT_PERMITTED | {errno.EINVAL}
_XATTR_REFUSED = _NOT_PERMITTED | {errno.EINVAL, errno.ENOTSUP, errno.E2BIG, errno.ERANGE}


@dataclasses.dataclass(slots=True)
class PlaceReport:
    """What could not be recreated, as counts of paths."""

    owners_kept: int = 0
    set_id_dropped: int = 0
    xattrs_skipped: dict[str, int] = dataclasses.field(default_factory=dict)

    def warnings(self) -> list[str]:
        """Say it in sentences, one for each kind of loss."""
        texts = []
        if self.owners_kept:
            texts.append(
                f"{self.owners_kept} paths belong to you instead of their owner: restoring "
                "owners takes privilege"
            )
        if self.set_id_dropped:
            texts.append(f"{self.set_id_dropped} paths lost their set-id bits with their owner")
        texts.extend(
            f"the extended attribute {name} could not be set on {count} paths"
            for name, count in sorted(self.xattrs_skipped.items())
        )
        return texts


class MetadataWriter:
    """Applies entries' metadata below one root. Safe from several threads."""

    def __init__(self, root_fd: int) -> None:
        self.report = PlaceReport()
        self._lock = threading.Lock()
        # With a default ACL, everything made below the root has ACLs that no entry asks for.
        self._inherits_acl = _has_xattr(root_fd, _ACL_DEFAULT)

    def apply(self, fd: int, entry: TreeEntry) -> None:
        """Give an open file or directory all of it.

        The order matters: changing the owner clears capabilities and set-id bits, and a mode
        without write permission forbids setting attributes.

        Raises:
            OSError: Something else than permission is wrong.
        """
        mode = self._owned_mode(entry, os.fstat(fd), lambda uid, gid: os.chown(fd, uid, gid))
        self._set_xattrs(fd, entry, follow=True)
        os.fchmod(fd, mode)
        os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))

    def apply_to_symlink(self, parent_fd: int, name: bytes, entry: TreeEntry) -> None:
        """Give a symlink its owner, attributes and time; it has no mode.

        Raises:
            OSError: Something else than permission is wrong.
        """
        self._owned_mode(
            entry,
            os.stat(name, dir_fd=parent_fd, follow_symlinks=False),
            lambda uid, gid: os.chown(name, uid, gid, dir_fd=parent_fd, follow_symlinks=False),
        )
        if entry.xattrs:
            # There is no `setxattrat`; a path through /proc has the same effect.
            path = b"/proc/self/fd/%d/%s" % (parent_fd, name)
            self._set_xattrs(path, entry, follow=False)
        times = (entry.mtime_ns, entry.mtime_ns)
        os.utime(name, ns=times, dir_fd=parent_fd, follow_symlinks=False)

    def _owned_mode(
        self, entry: TreeEntry, status: os.stat_result, chown: Callable[[int, int], None]
    ) -> int:
        """Set the owner as far as permitted; return the mode that goes with the result."""
        uid_fits = status.st_uid == entry.uid
        gid_fits = status.st_gid == entry.gid
        if not (uid_fits and gid_fits):
            uid_fits = gid_fits = _succeeds(chown, entry.uid, entry.gid)
            if not uid_fits:
                uid_fits = status.st_uid == entry.uid
                # A user may give their files to any group that they are in.
                gid_fits = status.st_gid == entry.gid or _succeeds(chown, -1, entry.gid)
        lost = (0 if uid_fits else stat.S_ISUID) | (0 if gid_fits else stat.S_ISGID)
        if not (uid_fits and gid_fits):
            with self._lock:
                self.report.owners_kept += 1
                self.report.set_id_dropped += bool(entry.mode & lost)
        return entry.mode & ~lost

    def _set_xattrs(self, where: int | bytes, entry: TreeEntry, *, follow: bool) -> None:
        # ACLs last: they may take away the permission that setting the others needs.
        for name, value in sorted(entry.xattrs, key=lambda pair: pair[0].startswith(b"system.")):
            try:
                if not is_kept_xattr(name):
                    raise OSError(errno.ENOTSUP, "not an attribute that trees have")  # noqa: TRY301
                os.setxattr(where, name, value, follow_symlinks=follow)
            except OSError as error:
                if error.errno not in _XATTR_REFUSED:
                    raise
                with self._lock:
                    skipped = self.report.xattrs_skipped
                    text = name.decode("utf-8", "backslashreplace")
                    skipped[text] = skipped.get(text, 0) + 1
        if self._inherits_acl and follow:
            _drop_inherited_acls(where, {name for name, _ in entry.xattrs})


def _succeeds(chown: Callable[[int, int], None], uid: int, gid: int) -> bool:
    try:
        chown(uid, gid)
    except OSError as error:
        if error.errno not in _OWNER_REFUSED:
            raise
        return False
    return True


def _has_xattr(fd: int, name: bytes) -> bool:
    try:
        os.getxattr(fd, name)
    except OSError:
        return False
    return True


def _drop_inherited_acls(where: int | bytes, wanted: set[bytes]) -> None:
    for name in {_ACL_ACCESS, _ACL_DEFAULT} - wanted:
        try:
            os.removexattr(where, name)
        except OSError as error:
            # Files have no default ACL, and the access ACL may be gone already.
            if error.errno not in {errno.ENODATA, errno.EACCES, errno.ENOTSUP, errno.EPERM}:
                raise
