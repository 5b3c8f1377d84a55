"""The agent's part of the error tree, below the library's root.

::

    snapstore.SnapError
    └─ AgentError             the agent could not do it (exit 1)
         CriuFailed           CRIU said no; the message has the lines of its log that matter
         ProtocolError        a peer on a socket sent what its protocol does not allow
         WorkloadLost         the restored processes died, or were killed because their memory
                              could not be filled
         PreflightFailed (7)  this snapshot cannot be restored, or this process not captured, here
         NoSuchProcess (3)    there is no such process
         CaptureRunning (6)   somebody else captures this process
         ConfigInvalid (2)    a setting cannot be meant
         AlreadyRunning (6)   another daemon has the socket or the directories
         DaemonBusy           the daemon has as many jobs as it takes
           DaemonEnding       it is about to end
         DaemonLost           the daemon went away in the middle of an answer
         JobExists (6)        there is or was a job with the id that somebody chose
         NoSuchJob (3)        the daemon has no such job, or none that this peer may see
         GpuUnavailable       there is no CUDA driver, or no such GPU
         GpuFailed            a function of the CUDA driver returned an error
           GpuOutOfMemory     a GPU has not as much memory left

Every error leaves nothing behind: no process half restored, no mount, no socket, no namespace, and
a process that was to be captured goes on.
"""

from __future__ import annotations

from snapstore import SnapError

__all__ = [
    "AgentError",
    "AlreadyRunning",
    "CaptureRunning",
    "ConfigInvalid",
    "CriuFailed",
    "DaemonBusy",
    "DaemonEnding",
    "DaemonLost",
    "GpuFailed",
    "GpuOutOfMemory",
    "GpuUnavailable",
    "JobExists",
    "NoSuchJob",
    "NoSuchProcess",
    "PreflightFailed",
    "ProtocolError",
    "WorkloadLost",
]


class AgentError(SnapError):
    """The agent could not do what was asked. Nothing of the attempt is left."""


class CriuFailed(AgentError):
    """CRIU ended with an error. A source goes on; a half-restored tree was removed."""


class ProtocolError(AgentError):
    """A peer broke the protocol of its socket. The session with it was ended."""


class WorkloadLost(AgentError):
    """The restored processes are gone; they never ran on memory that was not theirs."""


class PreflightFailed(AgentError):
    """Something about this machine, snapshot or process forbids it. Nothing was begun."""

    exit_code = 7


class NoSuchProcess(AgentError):
    """There is no process with this id. Nothing was begun."""

    exit_code = 3


class CaptureRunning(AgentError):
    """Another capture of this process is under way. It was not disturbed."""

    exit_code = 6
    retryable = True


class ConfigInvalid(AgentError):
    """A setting cannot be meant. Nothing was begun."""

    exit_code = 2


class AlreadyRunning(AgentError):
    """Another daemon has the socket or the directories; it was not touched."""

    exit_code = 6


class DaemonBusy(AgentError):
    """The daemon does not take this job now. Nothing was begun."""

    retryable = True


class DaemonEnding(DaemonBusy):
    """The daemon is about to end, and begins nothing more."""


class DaemonLost(AgentError):
    """The daemon went away: what it had under way is ended, and its next start tells of it."""

    retryable = True


class JobExists(AgentError):
    """There is or was a job with the id that was chosen for a new one. Nothing was begun."""

    exit_code = 6


class NoSuchJob(AgentError):
    """The daemon has no such job, or none that this peer may see."""

    exit_code = 3


class GpuUnavailable(AgentError):
    """There is no CUDA driver on this machine, or it has no such GPU. Nothing was begun."""


class GpuFailed(AgentError):
    """A function of the CUDA driver returned an error.

    Attributes:
        function: Its name.
        cuda_code: What it returned.
        error_name: The same in CUDA's words.
    """

    def __init__(
        self,
        message: str,
        *,
        function: str,
        cuda_code: int,
        error_name: str,
        next_step: str = "",
    ) -> None:
        super().__init__(message, next_step=next_step)
        self.function = function
        self.cuda_code = cuda_code
        self.error_name = error_name


class GpuOutOfMemory(GpuFailed):
    """A GPU has not as much memory left as was asked for. Nothing of it was taken."""
