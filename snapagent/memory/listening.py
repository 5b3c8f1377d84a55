"""The broker's socket."""

from __future__ import annotations

import errno
import os
import socket
from typing import TYPE_CHECKING

from snapagent.errors import AgentError, AlreadyRunning

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["listen"]

_BACKLOG = 64
_PATH_BYTES_MAX = 107


def listen(path: Path, mode: int) -> socket.socket:
    """Listen at a path without ever blocking; a socket that a broker left there is replaced.

    Raises:
        AgentError: It cannot be, or another broker listens there.
    """
    if len(os.fsencode(path)) > _PATH_BYTES_MAX:
        raise AgentError(f"{path} is too long a path for a socket", next_step="give a shorter one")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        _remove_abandoned(path)
        listener.bind(str(path))
        path.chmod(mode)
        listener.listen(_BACKLOG)
        listener.setblocking(False)  # noqa: FBT003 - the only argument
    except OSError as error:
        listener.close()
        kind = AlreadyRunning if error.errno == errno.EADDRINUSE else AgentError
        raise kind(
            f"no memory broker can be at {path}: {error.strerror}",
            next_step="run as root, end the other broker, or choose another path",
        ) from error
    return listener


def _remove_abandoned(path: Path) -> None:
    """Remove the socket of a broker that was killed.

    Raises:
        OSError: There is another one that lives; `bind` would say the same.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            # Also said of what is no socket, which is not ours to remove.
            if path.is_socket():
                path.unlink()
        except OSError:
            return
