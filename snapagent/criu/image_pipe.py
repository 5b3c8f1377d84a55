"""One end of the pipe through which CRIU and the image streamer pass one image.

The end of a pipe cannot be shut down like a socket, so that a thread that reads it would block
for as long as anybody has the other end. Here it waits for the pipe and for a wake-up at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
from typing import TYPE_CHECKING

from snapagent.errors import AgentError
from snapstore.units import MIB

if TYPE_CHECKING:
    from snapagent.criu.sessions import WakeUp
    from snapstore.units import BytesLike

__all__ = ["ImagePipe"]

PIPE_BYTES = 1 * MIB
"""What the kernel allows without privilege unless it was told otherwise; 64 KiB are slow."""


class ImagePipe:
    """A pipe's end with the image's name. For one thread at a time."""

    def __init__(self, name: str, fd: int, wake_up: WakeUp) -> None:
        """Own `fd`, which becomes non-blocking; CRIU's end of the pipe does not."""
        self.name = name
        self._fd = fd
        self._wake_up = wake_up
        os.set_blocking(fd, False)
        # Only slower where the user may not have so much in pipes.
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    def read_into(self, buffer: memoryview) -> int:
        """Read what there is, at least a byte, into `buffer`; zero once CRIU has written all.

        Raises:
            AgentError: The session was ended meanwhile.
        """
        while True:
            try:
                return os.readv(self._fd, [buffer])
            except BlockingIOError:
                self._wait(select.POLLIN)

    def write(self, data: BytesLike) -> None:
        """Write all of `data`.

        Raises:
            BrokenPipeError: CRIU wants no more of this image, which is no failure. The streamer
                takes it as the image's end, so that it can be left to it.
            AgentError: The session was ended meanwhile.
        """
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(self._fd, left) :]
            except BlockingIOError:
                self._wait(select.POLLOUT)

    def write_steadily(self, data: BytesLike) -> None:
        """Write all of `data` like `write`, while other threads of this process are busy.

        Waits in the kernel, not here: else the write of each mebibyte would have to wait for its
        turn among them. That ends when CRIU reads or ends, which whoever ends the session sees to.

        Raises:
            BrokenPipeError: CRIU wants no more of this image, or has ended.
        """
        os.set_blocking(self._fd, True)
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(self._fd, left) :]
        finally:
            os.set_blocking(self._fd, False)

    def _wait(self, events: int) -> None:
        if not self._wake_up.wait_for(self._fd, events):
            raise AgentError(f"{self.name}: the session with CRIU was ended before the image was")

    def close(self) -> None:
        """Close it; CRIU sees the end of the image, or a broken pipe if it still writes."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
