"""What can go wrong with memory that outlives its process. Needs nothing but Python.

::

    ExternalMemoryError
    ├─ BrokerUnreachable   nobody answers at the broker's socket
    ├─ MemoryRefused       the broker does not give or take this; nothing has changed
    ├─ MemoryReleased      the memory is not mapped now: between `release` and `resume`
    ├─ MemoryLost          its content cannot be had any more
    └─ NotTheOwner         a child of `fork` asked for what only its parent may do
"""

from __future__ import annotations

__all__ = [
    "BrokerUnreachable",
    "ExternalMemoryError",
    "MemoryLost",
    "MemoryRefused",
    "MemoryReleased",
    "NotTheOwner",
]


class ExternalMemoryError(Exception):
    """Memory of the broker could not be had, mapped or given back.

    Attributes:
        next_step: What to do about it.
    """

    def __init__(self, message: str, *, next_step: str = "") -> None:
        super().__init__(f"{message}; {next_step}" if next_step else message)
        self.next_step = next_step


class BrokerUnreachable(ExternalMemoryError):
    """Nobody answers at the broker's socket. What is mapped stays mapped."""


class MemoryRefused(ExternalMemoryError):
    """The broker does not give or take this. Nothing has changed."""


class MemoryReleased(ExternalMemoryError):
    """The memory is released for a capture, and not mapped."""


class MemoryLost(ExternalMemoryError):
    """The content of this memory cannot be had any more: nobody has it."""


class NotTheOwner(ExternalMemoryError):
    """A child of `fork` shares the memory of its parent and cannot change what there is of it."""
