"""What commands print: results on stdout, everything else on stderr, and how errors look."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping

import msgspec

from snapstore.clock import SystemClock
from snapstore.errors import SnapError
from snapstore.progress import Progress, ProgressCallback
from snapstore.units import format_bytes

__all__ = ["Console", "OutputFailed", "give_up_output", "one_line", "writing"]

_PLAIN_INTERVAL_S = 5.0
_PIPE_COLUMNS = 200
_CONTROL = {
    code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"
}
"""Names and labels come from trees and stores of others: they must not steer a terminal."""


class OutputFailed(Exception):
    """What was found cannot be printed; the `OSError` that says why is its cause."""


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """Mark errors of what prints to stdout, so that no others are taken for them.

    Raises:
        OutputFailed: It cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise OutputFailed from error


def give_up_output() -> None:
    """Let nothing go to stdout any more, not even what the interpreter flushes at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Console:
    """Where one command prints.

    With `json` stdout carries nothing but JSON: one object, or one a line for listings. Rich is
    loaded only to draw a table or a bar: it would be a tenth of a short command.
    """

    def __init__(self, *, json: bool, quiet: bool) -> None:
        self.json = json
        self.quiet = quiet

    def result(self, value: Mapping[str, object], text: str) -> None:
        """Print what a command found or did: an object, or a line or more for people."""
        with writing():
            if self.json:
                print(_as_json(value), flush=True)
            else:
                print(_shown(text))

    def table(self, headings: list[str], rows: list[list[str]]) -> None:
        """Print a table for people; columns whose heading ends in `>` are right-aligned."""
        import rich.box
        import rich.console
        import rich.table

        table = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
        for heading in headings:
            table.add_column(
                heading.rstrip(">"),
                justify="right" if heading.endswith(">") else "left",
                no_wrap=True,
            )
        for row in rows:
            table.add_row(*(one_line(_shown(cell)) for cell in row))
        # Tables keep their columns when the output goes to a file or a pipe.
        width = None if sys.stdout.isatty() else _PIPE_COLUMNS
        with writing():
            rich.console.Console(highlight=False, markup=False, width=width).print(table)

    def note(self, text: str) -> None:
        """Tell people something on the side."""
        if not self.quiet:
            _complain(text)

    def warn(self, text: str) -> None:
        """Tell people something that they should look at, even with `--quiet`."""
        _complain(f"warning: {text}")

    def error(self, error: SnapError) -> None:
        """Print an error: the object, then the next step."""
        if self.json:
            document = {
                "error": {
                    "code": error.code,
                    "exit_code": error.exit_code,
                    "message": str(error),
                    "next_step": error.next_step,
                    "retryable": error.retryable,
                }
            }
            try:
                print(_as_json(document), flush=True)
            except OSError:
                # It is said below as well, and decides how the command ends.
                give_up_output()
        lines = [f"error: {error}", *(f"note: {note}" for note in getattr(error, "__notes__", ()))]
        if error.next_step:
            lines.append(f"next: {error.next_step}")
        _complain("\n".join(lines))

    @contextlib.contextmanager
    def progress(self) -> Iterator[ProgressCallback | None]:
        """Show progress while the block runs: a bar on a terminal, lines elsewhere."""
        if self.quiet:
            yield None
        elif sys.stderr.isatty():
            with _bar() as callback:
                yield callback
        else:
            yield _PlainProgress()


def one_line(text: str) -> str:
    """Write a text of others so that it cannot pretend to be more lines of ours."""
    return text.replace("\n", "\\n")


def _complain(text: str) -> None:
    print(_shown(text), file=sys.stderr, flush=True)


def _shown(text: str) -> str:
    return _as_text(text).translate(_CONTROL)


def _as_json(value: Mapping[str, object]) -> str:
    try:
        return msgspec.json.encode(value, order="sorted").decode()
    except UnicodeEncodeError:
        return msgspec.json.encode(_with_text(value), order="sorted").decode()


def _with_text(value: object) -> object:
    """Copy a document, with its paths that are no text written as `_as_text` does."""
    if isinstance(value, str):
        return _as_text(value)
    if isinstance(value, Mapping):
        return {key: _with_text(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_text(item) for item in value]
    return value


def _as_text(text: str) -> str:
    r"""Write bytes of a path that are not UTF-8 as `\xNN`, as elsewhere in what we print."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


@contextlib.contextmanager
def _bar() -> Iterator[ProgressCallback]:
    import rich.console
    import rich.progress

    console = rich.console.Console(stderr=True, highlight=False, markup=False)
    columns = (
        rich.progress.TextColumn("{task.description:7}"),
        rich.progress.BarColumn(),
        rich.progress.DownloadColumn(),
        rich.progress.TransferSpeedColumn(),
        rich.progress.TimeRemainingColumn(),
    )
    with rich.progress.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("start", total=None)

        def show(now: Progress) -> None:
            total = now.total_bytes or None
            bar.update(task, description=now.phase, completed=now.done_bytes, total=total)

        yield show


class _PlainProgress:
    """Lines for logs: at each new phase and every few seconds."""

    def __init__(self) -> None:
        self._clock = SystemClock()
        self._phase = ""
        self._started_s = self._shown_s = self._clock.monotonic_s()

    def __call__(self, now: Progress) -> None:
        moment_s = self._clock.monotonic_s()
        if now.phase != self._phase:
            self._phase = now.phase
            self._started_s = self._shown_s = moment_s
            total = f": {_total(now)}" if now.total_bytes else ""
            _complain(f"{now.phase}{total}")
            return
        if moment_s - self._shown_s < _PLAIN_INTERVAL_S:
            return
        self._shown_s = moment_s
        rate = now.done_bytes / max(moment_s - self._started_s, 1e-3)
        line = f"{now.phase}: {format_bytes(now.done_bytes)}"
        if now.total_bytes:
            left_s = (now.total_bytes - now.done_bytes) / max(rate, 1)
            line += f" of {_total(now)}, {left_s:.0f} s left"
        _complain(f"{line}, {format_bytes(int(rate))}/s")


def _total(now: Progress) -> str:
    return f"{'about ' if now.is_estimate else ''}{format_bytes(now.total_bytes)}"
