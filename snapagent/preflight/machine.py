"""What this machine, and this process on it, must have for CRIU to work at all."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from snapagent.linux.probe import userfaultfd_error
from snapagent.preflight.procfs import read_text, status_fields

if TYPE_CHECKING:
    from snapagent.preflight.obstacles import Obstacles

__all__ = [
    "check_kernel",
    "check_privileges",
    "check_userfaultfd",
    "has_capability",
    "kernel_version",
    "memory_available_bytes",
]

KERNEL_MIN: Final = (5, 11)
"""What chooses the ids of processes, duplicates descriptors of others, and is tested with CRIU."""

# Numbers of `linux/capability.h`.
_NEEDED: Final = {
    0: "CAP_CHOWN",
    1: "CAP_DAC_OVERRIDE",
    3: "CAP_FOWNER",
    5: "CAP_KILL",
    6: "CAP_SETGID",
    7: "CAP_SETUID",
    8: "CAP_SETPCAP",
    18: "CAP_SYS_CHROOT",
    19: "CAP_SYS_PTRACE",
    21: "CAP_SYS_ADMIN",
}
_USEFUL: Final = {
    12: ("CAP_NET_ADMIN", "TCP connections cannot be held while a process is dumped or restored"),
    24: ("CAP_SYS_RESOURCE", "limits of a process above those of the agent are not restored"),
}
CAP_NET_ADMIN: Final = 12
CAP_SYS_PTRACE: Final = 19
CAP_SYS_ADMIN: Final = 21
CAP_CHECKPOINT_RESTORE: Final = 40


def check_privileges(found: Obstacles) -> None:
    """Name the capabilities that this process lacks."""
    effective = _capabilities()
    remedy = "run the agent as root, in a container with all capabilities (`privileged`)"
    missing = [name for number, name in _NEEDED.items() if not effective >> number & 1]
    if missing:
        found.block("capabilities", f"the agent lacks {', '.join(missing)}", remedy)
    for number, (name, effect) in _USEFUL.items():
        if not effective >> number & 1:
            found.warn("capabilities", f"the agent lacks {name}: {effect}", remedy)


def has_capability(number: int) -> bool:
    """Tell whether this process has a capability, by its number."""
    return bool(_capabilities() >> number & 1)


def _capabilities() -> int:
    return int(status_fields("self").get("CapEff", "0"), 16)


def kernel_version(release: str | None = None) -> tuple[int, ...]:
    """Return the first two numbers of a kernel's release, of the running one by default."""
    numbers = re.match(r"(\d{1,6})\.(\d{1,6})", release or os.uname().release)
    return tuple(map(int, numbers.groups())) if numbers else ()


def check_kernel(found: Obstacles) -> None:
    """Say whether the kernel is too old, or forbids to look into processes."""
    if kernel_version() < KERNEL_MIN:
        found.block(
            "kernel-old",
            f"the kernel is {os.uname().release}, at least 5.11 is needed",
            "use a node with a newer kernel",
        )
    try:
        scope = read_text("/proc/sys/kernel/yama/ptrace_scope").strip()
    except OSError:
        return
    if scope == "3":
        found.block(
            "ptrace-forbidden",
            "kernel.yama.ptrace_scope is 3: no process may look into another until the next boot",
            "set it to 2 or less where it is set at boot, and start the machine anew",
        )


def check_userfaultfd(found: Obstacles) -> None:
    """Say why memory cannot be filled after the start, if it cannot."""
    number = userfaultfd_error()
    if number == 0:
        return
    reason = errno.errorcode.get(number, str(number))
    if number == errno.ENOSYS:
        remedy = "use a kernel with CONFIG_USERFAULTFD"
    else:
        remedy = (
            "give the agent CAP_SYS_PTRACE, allow the call in its seccomp profile, or set the "
            "sysctl vm.unprivileged_userfaultfd to 1"
        )
    found.block("userfaultfd", f"the kernel refuses a userfaultfd ({reason})", remedy)


def memory_available_bytes(pid: int | None = None) -> int:
    """Return how much memory new processes may take: of the machine, and of the control group.

    Args:
        pid: Whose control group counts; by default that of this process.
    """
    fields = {
        key: int(value.split()[0]) << 10
        for key, _, value in (
            line.partition(":") for line in read_text("/proc/meminfo").splitlines()
        )
        if key in ("MemAvailable", "SwapFree")
    }
    available = sum(fields.values())
    for limit, used in _group_limits(pid or os.getpid()):
        available = min(available, max(limit - used, 0))
    return available


def _group_limits(pid: int) -> list[tuple[int, int]]:
    """Return limit and use of all control groups that a process is in, of version 2."""
    found: list[tuple[int, int]] = []
    root = Path("/sys/fs/cgroup")
    try:
        lines = read_text(f"/proc/{pid}/cgroup").splitlines()
    except OSError:
        return found
    path = next((line[3:] for line in lines if line.startswith("0::")), None)
    if path is None or ".." in path.split("/"):
        return found
    group = root / path.lstrip("/")
    while group.is_relative_to(root) and group != root:
        try:
            limit = read_text(f"{group}/memory.max").strip()
            used = int(read_text(f"{group}/memory.current"))
            if limit != "max":
                found.append((int(limit), used - _reclaimable(group)))
        except (OSError, ValueError):
            pass
        group = group.parent
    return found


def _reclaimable(group: Path) -> int:
    """Of the memory that a group uses, what the kernel takes back when it is short of it."""
    for line in read_text(f"{group}/memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key == "inactive_file":
            return int(value)
    return 0
