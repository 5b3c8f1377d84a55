"""A container without an engine: its own namespaces and root directory, and an init that idles."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from snapagent.linux import processes
from tests.support.waiting import wait_until

SYSTEM_DIRECTORIES = ["/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/dev"]

# Mounts are made in the container's own mount namespace, so they end with it.
PREPARE = """
set -e
root=$1; shift
mount -t tmpfs -o mode=755 placeholder "$root"
mkdir -m 1777 "$root/tmp"
mkdir "$root/proc"
for path in "$@"; do
  mkdir -p "$root$path"
  mount --rbind "$path" "$root$path"
done
for path in /usr /bin /sbin /lib /lib64 /etc; do
  if [ -d "$root$path" ]; then mount -o remount,bind,ro "$root$path"; fi
done
mount -t proc proc "$root/proc"
ip link set lo up
touch "$root/ready"
exec chroot "$root" /bin/sh -c 'while :; do sleep 1000 & wait; done'
"""


@dataclass(frozen=True)
class Placeholder:
    """A running one."""

    pid: int
    """Of its init, as seen from outside."""


@contextmanager
def placeholder_container(root: Path, also: Sequence[Path] = ()) -> Iterator[Placeholder]:
    """Run a container whose root directory is `root`, which is made and removed.

    In it is the system, read-only, Python, and what `also` names, under the same paths.
    """
    root.mkdir()
    shared = [path for path in SYSTEM_DIRECTORIES if Path(path).is_dir()]
    shared += [sys.base_prefix, *(str(path) for path in also)]
    unshare = ["unshare", "--mount", "--pid", "--net", "--ipc", "--uts", "--cgroup", "--fork"]
    command = [*unshare, "--kill-child", "/bin/sh", "-c", PREPARE, "sh", str(root), *shared]
    outer = subprocess.Popen(  # noqa: S603 - the script above.
        command, stdin=subprocess.DEVNULL, start_new_session=True
    )
    try:
        wait_until(lambda: _init_of(outer.pid) != 0, "the placeholder's init")
        yield Placeholder(_init_of(outer.pid))
    finally:
        for pid in processes.children(outer.pid):
            os.kill(pid, signal.SIGKILL)
        outer.wait()
        shutil.rmtree(root)


def _init_of(outer: int) -> int:
    """Return the init once its root directory is the container's, or 0."""
    for pid in processes.children(outer):
        try:
            if Path(f"/proc/{pid}/root", "ready").exists() and processes.children(pid):
                return pid
        except OSError:
            continue
    return 0
