"""Check whether a living process and all below it can be captured here and now."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from snapagent.preflight.criu_program import check_criu, find_criu, probe_criu
from snapagent.preflight.descriptors import OpenThings
from snapagent.preflight.machine import check_kernel, check_privileges
from snapagent.preflight.obstacles import Obstacle, Obstacles
from snapagent.preflight.options import CaptureConditions
from snapagent.preflight.procfs import Task, namespace_of, process_name, process_tree, read_text
from snapagent.preflight.sockets import check_sockets
from snapstore.units import KIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from snapagent.preflight.criu_program import CriuFacts

__all__ = ["check_process"]

# CRIU captures these kinds of one process tree only if all of it shares them.
_NOT_NESTED: Final = ("pid", "user", "time")
_KINDS: Final = ("pid", "mnt", "net", "ipc", "uts", "user", "cgroup", "time")
_KERNEL_THREADS: Final = 2


def check_process(pid: int, conditions: CaptureConditions | None = None) -> list[Obstacle]:
    """Tell what stands in the way of capturing a process, and what deserves a word.

    It only looks; nothing about the process changes. What it says holds for the moment at which it
    looked: a process that opens something afterwards may still fail to be captured, and then goes
    on as if nothing had happened.

    Args:
        pid: The root of the tree, as this process sees it.
        conditions: How it is to be captured.

    Returns:
        The obstacles, those that forbid it first.

    Raises:
        NoSuchProcess: There is none.
    """
    conditions = conditions or CaptureConditions()
    found = Obstacles()
    tasks = process_tree(pid)
    check_kernel(found)
    check_privileges(found)
    check_criu(found, conditions.criu, conditions.criu_cache)
    _check_tree(found, tasks, conditions)
    _check_namespaces(found, tasks)
    things = OpenThings(found, conditions)
    for task in tasks:
        _check_task(found, task)
        things.look_at(task)
    things.finish()
    check_sockets(found, things.sockets, conditions, _facts(conditions))
    _check_memory(found, tasks, conditions)
    return found.result()


def _facts(conditions: CaptureConditions) -> CriuFacts | None:
    program = find_criu(conditions.criu)
    return None if program is None else probe_criu(program, conditions.criu_cache)


def _check_tree(found: Obstacles, tasks: Sequence[Task], conditions: CaptureConditions) -> None:
    root, pids = tasks[0], {task.pid for task in tasks}
    if os.getpid() in pids:
        found.block(
            "own-process",
            f"the agent itself is below {root.title}",
            "run the agent outside of what it captures, or name a process further down",
        )
    if root.pid == _KERNEL_THREADS or "VmSize" not in root.status:
        if root.is_dead:
            parent = int(root.status.get("PPid", "0"))
            found.block(
                "ended",
                f"{root.title} has ended; its parent {parent} ({process_name(parent)}) has not "
                "asked how",
                "there is nothing left to capture",
            )
        else:
            found.block(
                "kernel-thread", f"{root.title} is part of the kernel", "name another process"
            )
    if "VmSize" in root.status:
        _check_sessions(found, tasks, conditions)


def _check_sessions(found: Obstacles, tasks: Sequence[Task], conditions: CaptureConditions) -> None:
    pids = {task.pid for task in tasks}
    for task in tasks:
        if task.session in pids:
            continue
        if task.is_led_from_outside_its_pids:
            found.block(
                "session-unknown",
                f"the session of {task.title} began outside of its pid namespace, where CRIU "
                "cannot name it",
                "start it with `setsid`",
            )
        else:
            found.add(
                "session-outside",
                f"{task.title} is in the session of process {task.session} "
                f"({process_name(task.session)}), which is outside of the tree",
                "start it with `setsid`, or let CRIU take such processes (its option --shell-job)",
                blocking=not conditions.shell_job,
            )
        break


def _check_task(found: Obstacles, task: Task) -> None:
    tracer = int(task.status.get("TracerPid", "0"))
    if tracer:
        found.block(
            "traced",
            f"{task.title} is traced by process {tracer} ({process_name(tracer)})",
            "end the debugger or tracer, since CRIU traces processes itself",
        )
    if task.status.get("State", "").startswith("D"):
        found.warn(
            "uninterruptible",
            f"{task.title} waits for a device or a network file system",
            "CRIU waits for it at most ten seconds; see what it waits for in /proc/PID/stack",
        )
    profile = _lsm_profile(task.pid)
    if profile:
        found.warn(
            "lsm-profile",
            f"{task.title} is confined by the profile {profile}",
            "the same profile must be loaded where it is restored",
        )
    if task.status.get("Seccomp") == "1":
        found.warn(
            "seccomp-strict",
            f"{task.title} may only read, write and exit (seccomp, strict)",
            "CRIU suspends this while it works, which needs CAP_SYS_ADMIN",
        )


def _lsm_profile(pid: int) -> str:
    """Return the profile of AppArmor or label of SELinux that confines a process."""
    try:
        profile = read_text(f"/proc/{pid}/attr/current").strip("\0\n ")
    except OSError:
        return ""
    is_free = profile in ("", "unconfined", "kernel") or ":unconfined_t:" in profile
    return "" if is_free else profile


def _check_namespaces(found: Obstacles, tasks: Sequence[Task]) -> None:
    root = tasks[0]
    root_of = {kind: namespace_of(root.pid, kind) for kind in _KINDS}
    inner_pid = root.status.get("NSpid", "1").split()[-1]
    if root_of["pid"] and root_of["pid"] != namespace_of("self", "pid") and inner_pid == "1":
        found.block(
            "is-init",
            f"{root.title} is the init of its pid namespace, whose place is taken in every other",
            "start it below an init, as `docker run --init` does, and name the process itself",
        )
    for task in tasks[1:]:
        for kind in _NOT_NESTED:
            inner = namespace_of(task.pid, kind)
            if inner and root_of[kind] and inner != root_of[kind]:
                found.block(
                    "nested-namespace",
                    f"{task.title} has a {kind} namespace of its own inside the tree",
                    "name that process itself: CRIU captures no nested ones",
                )
    # CRIU runs in the namespaces of the process, so that it finds its mounts and ids as they are.
    is_elsewhere = root_of["mnt"] and root_of["mnt"] != namespace_of("self", "mnt")
    if is_elsewhere and not Path(f"/proc/{root.pid}", "root", "bin", "sh").exists():
        found.block(
            "no-shell",
            f"{root.title} has a root directory without /bin/sh, which runs CRIU's script there",
            "use an image with a shell",
        )
    if root_of["user"] and root_of["user"] != namespace_of("self", "user"):
        found.warn(
            "user-namespace",
            f"{root.title} has a user namespace of its own",
            "it is recreated with the same mapping, for which the agent must be root outside",
        )


def _check_memory(found: Obstacles, tasks: Sequence[Task], conditions: CaptureConditions) -> None:
    limit = conditions.memory_bytes_max
    if limit is None:
        return
    total = sum(_resident_bytes(task) for task in tasks)
    if total > limit:
        found.block(
            "memory",
            f"the processes have {format_bytes(total)} of memory, more than {format_bytes(limit)}",
            "raise the limit, or let the process free some first",
        )


def _resident_bytes(task: Task) -> int:
    """Shared memory is counted for each process that has it: a bound, not a measurement."""
    fields = (task.status.get(name, "0") for name in ("VmRSS", "VmSwap"))
    return sum(int(field.split()[0]) for field in fields) * KIB
