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
         NoSuchJob (3)        the daemon has no such job, or none that this peer may see

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


class NoSuchJob(AgentError):
    """The daemon has no such job, or none that this peer may see."""

    exit_code = 3
