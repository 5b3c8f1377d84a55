"""Serving a mount from a process of its own that says whether it answers."""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from snapstore.errors import SnapError, TargetError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Serve = Callable[[Callable[[Mapping[str, object]], None]], None]

__all__ = ["configure_log", "serve_detached"]

_SYSLOG = Path("/dev/log")
_REPORT_BYTES_MAX = 1 << 20


def configure_log(log_file: Path | None, *, is_detached: bool) -> None:
    """Send what happens to a file, else to the system's log, or in the foreground to stderr.

    Raises:
        TargetError: The file cannot be written.
    """
    handler: logging.Handler
    text = "%(asctime)s %(levelname)s %(message)s"
    if log_file is not None:
        try:
            handler = logging.FileHandler(log_file, encoding="utf-8")
        except OSError as error:
            raise TargetError(
                f"cannot write the log {str(log_file)!r}: {error.strerror}",
                next_step="give another with --log-file",
            ) from error
    elif not is_detached:
        handler = logging.StreamHandler(sys.stderr)
    elif _SYSLOG.exists():
        handler = logging.handlers.SysLogHandler(str(_SYSLOG))
        text = "snapstore[%(process)d]: %(levelname)s %(message)s"
    else:
        handler = logging.NullHandler()
    handler.setFormatter(logging.Formatter(text))
    root = logging.getLogger("snapstore")
    root.addHandler(handler)
    root.setLevel(logging.INFO)


def serve_detached(serve: Serve) -> Mapping[str, object]:
    """Run `serve` in a process without a terminal; returns what it tells when it answers.

    Raises:
        SnapError: What it failed with before that.
    """
    reads, writes = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if not child:
        os.close(reads)
        _run_child(serve, writes)
    os.close(writes)
    try:
        return _await_report(reads)
    except KeyboardInterrupt:
        os.kill(child, signal.SIGTERM)
        raise
    finally:
        os.close(reads)


def _run_child(serve: Serve, writes: int) -> NoReturn:
    status = 1
    try:
        os.setsid()
        os.chdir("/")
        signal.signal(signal.SIGINT, signal.default_int_handler)

        def ready(document: Mapping[str, object]) -> None:
            _report(writes, {"mounted": dict(document)})
            _leave_terminal()

        serve(ready)
        status = 0
    except SnapError as error:
        logging.getLogger("snapstore").error("%s", error)  # noqa: TRY400 - no bug of ours
        status = error.exit_code
        _report(writes, {"error": _document(error)})
    except BaseException:
        # The end of the process, which is nobody's to handle: said where it may be read.
        logging.getLogger("snapstore").exception("the mount ends")
        raise
    finally:
        logging.shutdown()
        # Threads that wait for a store, and what the other process has registered, are left alone.
        os._exit(status)
    raise AssertionError("unreachable")


def _report(writes: int, document: Mapping[str, object]) -> None:
    """Tell the process that has started this one, once."""
    try:
        os.write(writes, json.dumps(document).encode() + b"\n")
        os.close(writes)
    except OSError:
        return  # It has not waited.


def _leave_terminal() -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    os.close(nothing)


def _await_report(reads: int) -> Mapping[str, object]:
    text = bytearray()
    while not text.endswith(b"\n") and len(text) < _REPORT_BYTES_MAX:
        piece = os.read(reads, 1 << 16)
        if not piece:
            break
        text += piece
    if not text.endswith(b"\n"):
        raise TargetError(
            "the process that should serve the mount has ended before it answered",
            next_step="run it with --foreground to see why",
        )
    document = json.loads(text)
    if "error" in document:
        raise _error(document["error"])
    mounted: Mapping[str, object] = document["mounted"]
    return mounted


def _document(error: SnapError) -> dict[str, object]:
    return {
        "code": error.code,
        "exit_code": error.exit_code,
        "message": str(error),
        "next_step": error.next_step,
        "notes": list(getattr(error, "__notes__", ())),
        "retryable": error.retryable,
    }


def _error(document: Mapping[str, object]) -> SnapError:
    """Make the error of the other process one of this."""
    members = {"exit_code": document["exit_code"], "retryable": document["retryable"]}
    kind = type(str(document["code"]), (SnapError,), members)
    error: SnapError = kind(str(document["message"]), next_step=str(document["next_step"]))
    notes = document["notes"]
    assert isinstance(notes, list)
    for note in notes:
        error.add_note(str(note))
    return error
