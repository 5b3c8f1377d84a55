"""How much a capture will store, as far as anybody can know before it has."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from snapstore import Progress, ProgressCallback

__all__ = ["ExpectedTotal", "resident_bytes"]

_STORING = "store"
_STATUS_BYTES_MAX = 64 << 10
_OWN = (b"RssAnon", b"VmSwap")
_SHARED = b"RssShmem"


class ExpectedTotal:
    """Tells of progress with the total that is expected. Thread-safe as its callback is called."""

    def __init__(self, callback: ProgressCallback) -> None:
        self._callback = callback
        self._expected_bytes = 0

    def expect(self, count_bytes: int) -> None:
        """Say how many bytes are to be expected from now on."""
        self._expected_bytes = count_bytes

    def __call__(self, now: Progress) -> None:
        """Tell of it; see `ProgressCallback`."""
        is_storing = now.phase == _STORING
        total = max(self._expected_bytes if is_storing else 0, now.done_bytes)
        self._callback(dataclasses.replace(now, total_bytes=total, is_estimate=is_storing))


def resident_bytes(pids: Iterable[int]) -> int:
    """Estimate what CRIU finds in the memory of processes, in memory of the machine or swapped out.

    Files that are only mapped are not counted, since they are not dumped. Of shared memory every
    process tells all, so the largest is taken for that of all. What has ended counts nothing.
    """
    own = shared = 0
    for pid in pids:
        fields = _fields(pid)
        own += sum(fields.get(key, 0) for key in _OWN)
        shared = max(shared, fields.get(_SHARED, 0))
    return own + shared


def _fields(pid: int) -> dict[bytes, int]:
    """Read the sizes in `/proc/PID/status`, in bytes."""
    try:
        with Path(f"/proc/{pid}/status").open("rb", buffering=0) as file:
            lines = file.read(_STATUS_BYTES_MAX).splitlines()
    except OSError:
        return {}
    found = {}
    for line in lines:
        key, _, value = line.partition(b":")
        words = value.split()
        if len(words) == 2 and words[1] == b"kB" and words[0].isdigit():
            found[key] = int(words[0]) * 1024
    return found
