"""What a stream to be stored looks like to the pipeline: windows that know how to fill a buffer.

Windows come in order and abut. Filling runs on a worker thread; everything else is cheap.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from snapstore.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from snapstore.chunking.base import Before, Cutter, Offsets
    from snapstore.repository.hashed_chunks import HashedWindow

__all__ = ["WINDOW_BYTES", "StreamSource", "Window"]

WINDOW_BYTES = 12 * MIB
"""Large enough that the work per window hides the interpreter's share of it, small enough that
a dozen of them fit any budget."""

ByteArray = npt.NDArray[np.uint8]


@dataclasses.dataclass(frozen=True, slots=True)
class Window:
    """A run of a stream that is read, cut and hashed as one.

    Attributes:
        length: Bytes; at most `WINDOW_BYTES` unless it is a hole.
        load: Fills an array of `length` bytes; runs on any thread. None: a hole, all zeros.
        ends: Where to cut, relative to the window, instead of by content. The last is `length`.
        before: What lies before it, if it is a later part of a window that arrived in parts.
        hashed: What is known of its chunks already; then it says what to load, and where to cut.
    """

    length: int
    load: Callable[[ByteArray], None] | None
    ends: Offsets | None = None
    before: Before | None = None
    hashed: HashedWindow | None = None


class StreamSource(Protocol):
    """One stream to be stored. Iterated once, by one thread."""

    @property
    def cutter(self) -> Cutter:
        """How to cut it."""
        ...

    @property
    def data_class(self) -> str:
        """The word for its class of data in the manifest."""
        ...

    @property
    def origin(self) -> str:
        """Where it comes from, for people."""
        ...

    def windows(self) -> Iterator[Window]:
        """Give the windows in order; those of unknown total length end when there is no more."""
        ...

    def finish(self) -> None:
        """All windows were loaded: check that the origin did not change, release it.

        Raises:
            SourceChanged: It did, so what was read is no state it ever had.
        """
        ...

    def close(self) -> None:
        """Release the origin without checking it. Idempotent."""
        ...
