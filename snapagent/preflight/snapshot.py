"""Check whether a snapshot can be restored here and now, before anything is begun."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from snapagent.preflight.cpu import check_machine
from snapagent.preflight.criu_program import check_criu, find_criu, probe_criu
from snapagent.preflight.files import check_files
from snapagent.preflight.images import Images, read_images, snapshot_reader
from snapagent.preflight.machine import (
    CAP_CHECKPOINT_RESTORE,
    CAP_SYS_ADMIN,
    check_kernel,
    check_privileges,
    check_userfaultfd,
    has_capability,
    memory_available_bytes,
)
from snapagent.preflight.network import check_network
from snapagent.preflight.obstacles import Obstacle, Obstacles
from snapagent.preflight.options import RestoreConditions
from snapagent.preflight.procfs import PROC, process_name, read_text
from snapstore.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from snapagent.preflight.options import RestorePlace
    from snapstore import Snapshot

__all__ = ["Here", "check_images", "check_snapshot"]

HOLDERS_NAMED_MAX: Final = 5


@dataclasses.dataclass(frozen=True, slots=True)
class Here:
    """The place that is asked about when none is named: the agent's own namespaces."""

    network: str = "here"
    addresses: tuple[str, ...] = ()
    pids: str = "here"
    join_pid: int | None = None


def check_snapshot(
    snapshot: Snapshot,
    place: RestorePlace | None = None,
    conditions: RestoreConditions | None = None,
) -> list[Obstacle]:
    """Tell what stands in the way of restoring a snapshot, and what deserves a word.

    It reads the small images out of the store, and only looks at this machine.

    Args:
        snapshot: One that was captured; its images are in its root.
        place: Where the processes are to live; by default here.
        conditions: How it is to be restored.

    Returns:
        The obstacles, those that forbid it first.

    Raises:
        PreflightFailed: The snapshot has no dump of CRIU's in its root.
        FormatError: An image is not what it should be.
        BackendError: The store does not answer.
    """
    images = read_images(snapshot_reader(snapshot))
    return check_images(images, snapshot.manifest.requirements, place, conditions)


def check_images(
    images: Images,
    requirements: Mapping[str, object],
    place: RestorePlace | None = None,
    conditions: RestoreConditions | None = None,
) -> list[Obstacle]:
    """Do the same for images that were read already; see `check_snapshot`."""
    conditions = conditions or RestoreConditions()
    place = place or Here()
    found = Obstacles()
    check_kernel(found)
    check_privileges(found)
    check_criu(found, conditions.criu, conditions.criu_cache)
    check_userfaultfd(found)
    program = find_criu(conditions.criu)
    facts = None if program is None else probe_criu(program, conditions.criu_cache)
    check_machine(found, _requirements(images, requirements), facts.version if facts else ())
    if place.join_pid is not None and not Path(f"/proc/{place.join_pid}").exists():
        found.block(
            "place-gone",
            f"there is no process {place.join_pid} whose namespaces could be entered",
            "start the placeholder first, and give its id as this pid namespace shows it",
        )
        return found.result()
    for pty in sorted(images.terminals):
        found.block(
            "terminal",
            f"it has the terminal /dev/pts/{pty} open, which belonged to somebody else",
            "capture it anew, started with its streams elsewhere; or pull the snapshot, and "
            "restore it with `criu restore --shell-job` from a terminal",
        )
    _check_pids(found, images, place)
    if "mnt" in images.own_namespaces:
        found.warn(
            "mount-namespace",
            "the images bring their own mounts; files are looked up in those",
            "the root directory that CRIU is given must be the one of the capture",
        )
    else:
        check_files(found, images, f"/proc/{place.join_pid}/root" if place.join_pid else "/")
    has_connections = any(one.is_connected for one in images.files.inet)
    if has_connections and conditions.tcp == "keep" and facts and not facts.can_lock_by_nftables:
        found.block(
            "network-lock",
            "this CRIU was built without nftables, and the snapshot has TCP connections",
            "use a CRIU that has it",
        )
    check_network(found, images, place, conditions)
    _check_lsm(found, images)
    _check_room(found, images, conditions)
    return found.result()


def _requirements(images: Images, requirements: Mapping[str, object]) -> dict[str, object]:
    """Add what the images say themselves of the machine, if nobody else does."""
    known = dict(requirements)
    for core in images.cores.values():
        known.setdefault("machine", core.machine)
    return known


def _check_pids(found: Obstacles, images: Images, place: RestorePlace) -> None:
    if place.pids == "fresh" or "pid" in images.own_namespaces:
        return
    if not (
        has_capability(CAP_CHECKPOINT_RESTORE)
        or has_capability(CAP_SYS_ADMIN)
        or os.access("/proc/sys/kernel/ns_last_pid", os.W_OK)
    ):
        found.block(
            "pid-choice",
            "the agent may not choose the ids of new processes",
            "give it CAP_CHECKPOINT_RESTORE, or restore into fresh pids (`--pids fresh`)",
        )
    largest = max(images.pids)
    limit = int(read_text("/proc/sys/kernel/pid_max"))
    if largest >= limit:
        found.block(
            "pid-max",
            f"the snapshot has the process id {largest}, this kernel allows those below {limit}",
            f"set the sysctl kernel.pid_max to more than {largest}",
        )
    # The /proc that the placeholder sees is the one of its pid namespace.
    proc = Path(f"/proc/{place.join_pid}", "root", "proc") if place.join_pid else PROC
    taken = sorted(pid for pid in images.pids if (proc / str(pid)).exists())
    if taken:
        holders = ", ".join(
            f"{pid} ({process_name(pid, proc)})" for pid in taken[:HOLDERS_NAMED_MAX]
        )
        more = len(taken) - HOLDERS_NAMED_MAX
        found.block(
            "pids-taken",
            f"process ids of the snapshot are in use: {holders}"
            + (f" and {more} more" if more > 0 else ""),
            "restore into fresh pids (`--pids fresh`), or end those processes; one that has ended "
            "keeps its id until its parent waits for it",
        )


def _check_lsm(found: Obstacles, images: Images) -> None:
    lsm = images.inventory.lsm
    if lsm == "none":
        return
    folder = {"apparmor": "/sys/module/apparmor", "selinux": "/sys/fs/selinux"}.get(lsm)
    if folder is None or not Path(folder).exists():
        found.warn(
            "lsm-profile",
            f"it was captured under {lsm}, which this kernel has not",
            "if CRIU fails because of a profile, load it, or capture an unconfined process",
        )


def _check_room(found: Obstacles, images: Images, conditions: RestoreConditions) -> None:
    needed = images.private_bytes + images.shared_bytes
    available = memory_available_bytes()
    if needed > available:
        found.block(
            "memory",
            f"the processes have {format_bytes(needed)} of memory, {format_bytes(available)} are "
            "free",
            "free some, or raise the limit of the control group",
        )
    folder = conditions.work_directory
    try:
        space = os.statvfs(folder)
    except OSError as error:
        found.block(
            "work-directory",
            f"the work directory {folder} cannot be used: {error.strerror}",
            "make it, or name another one",
        )
        return
    free = space.f_bavail * space.f_frsize
    if free < conditions.work_bytes:
        found.block(
            "work-directory",
            f"{folder} has {format_bytes(free)} left, {format_bytes(conditions.work_bytes)} are "
            "needed",
            "free some, or name another work directory",
        )
