"""What is settled before a program loads itself: its streams, and what Ctrl-C does meanwhile."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING

from typing_extensions import override

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["interrupt_by_exception", "settle"]

_STREAMS = 3
_INTERRUPTED = 130


def settle() -> None:
    """Prepare the process; to be called first of all, by its only thread.

    - Descriptors 0 to 2 that are closed become `/dev/null`. Otherwise the files of a store or of
      a tree would get these numbers, and whoever prints there would write into them.
    - What cannot be written to stderr is lost, and nothing else: progress on a full disk ends no
      transfer. Results that cannot be written to stdout stay an error.
    - Ctrl-C and SIGTERM end the process with 130 while it loads, since nothing is begun yet.
    - numpy gets no threads for linear algebra, of which nothing here does any: it would make one
      for each processor, and all of them spin for a tenth of a second.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # noqa: TID251 - for a library, no setting
    _open_missing()
    _forgive_stderr()
    for number, usual in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGTERM, signal.SIG_DFL),
    ):
        # What is ignored stays so, as in the background of a script.
        if signal.getsignal(number) == usual:
            signal.signal(number, _leave)


def interrupt_by_exception() -> None:
    """Let Ctrl-C raise `KeyboardInterrupt` again: from now on there is something to undo."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(_number: int, _frame: FrameType | None) -> None:
    with contextlib.suppress(OSError):
        os.write(2, b"error: interrupted\n")
    os._exit(_INTERRUPTED)


def _open_missing() -> None:
    for number in range(_STREAMS):
        try:
            os.fstat(number)
        except OSError:
            # The lowest number that is free is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # noqa: FBT003
    # The interpreter has none of those that were closed when it started.
    if sys.stdin is None:
        sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, "rb", closefd=False)))
    if sys.stdout is None:
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "wb", closefd=False)))


def _forgive_stderr() -> None:
    before = sys.stderr
    sys.stderr = io.TextIOWrapper(
        io.BufferedWriter(_Messages(2, "wb", closefd=False)),
        encoding="utf-8" if before is None else before.encoding,
        errors="backslashreplace",
        line_buffering=True,
    )


class _Messages(io.FileIO):
    """Descriptor 2, which takes everything, whether it can be written or not."""

    @override
    def write(self, data: ReadableBuffer, /) -> int:
        try:
            written: int | None = super().write(data)
        except OSError:
            written = None
        return memoryview(data).nbytes if written is None else written
