"""A bounded local record of captures and restores: what was done, how long it took, how it ended.

Lines of JSON in one file. An entry is begun when the work begins, and ended when it ends, so that
what was killed shows as interrupted. Writers append one line at a time under a lock; the file is
cut to its newest entries by replacing it. At no moment does a kill leave a file that cannot be
read: at worst its last line is torn, and ignored. The record is a convenience: where it cannot be
written, the work goes on, with one warning.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from snapagent.errors import JobExists
from snapstore.clock import SystemClock, format_utc
from snapstore.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from snapstore import SnapError
    from snapstore.clock import Clock

__all__ = ["Entry", "History", "Outcome", "read_history"]

ENTRIES_MAX: Final = 1000
BYTES_MAX: Final = 4 * MIB

TEXT_MAX: Final = 2000
ITEMS_MAX: Final = 64
LOCK_S_MAX: Final = 1.0
LOCK_POLL_S: Final = 0.005

# A quote inside a string is escaped, so that nothing but the beginning of a line looks like this.
_BEGIN: Final = b'{"event":"begin"'

Kind = Literal["capture", "restore"]
Result = Literal["running", "ok", "error", "interrupted"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a capture or a restore ended, and what it took.

    Attributes:
        snapshot: The id of the snapshot, in full.
        phases: Seconds by phase, in their order: `setup`, `criu`, `gpu`, `memory` and so on.
        first_answer_s: Seconds until the restored process answered.
        source_bytes: How much came from where: `store`, `cache`, `zeros`.
        faults: Page faults that were served.
        bottleneck: Which part the others waited for.
        gpu_bottleneck: Which step of filling GPUs the others waited for.
        error: The word of the error, its class; none if it went well.
        message: What the error said.
    """

    snapshot: str | None = None
    phases: Mapping[str, float] = dataclasses.field(default_factory=dict)
    first_answer_s: float | None = None
    source_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    faults: int | None = None
    bottleneck: str | None = None
    gpu_bottleneck: str | None = None
    error: str | None = None
    message: str | None = None

    def failed(self, error: SnapError) -> Outcome:
        """Return the same with an error."""
        return dataclasses.replace(self, error=error.code, message=str(error))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One capture or restore.

    Attributes:
        started: When, in UTC, as `2026-11-30T09:30:00Z`.
        result: `running` as long as the process that began it lives; `interrupted` if that ended
            without ending the entry.
        duration_s: From beginning to end; none unless it ended.
        reason: Of what was interrupted, as far as somebody could tell.
    """

    id: str
    kind: Kind
    name: str
    started: str
    result: Result
    duration_s: float | None
    reason: str | None
    outcome: Outcome


class History:
    """Writes the record. Any number of threads and processes may do so at once."""

    def __init__(
        self,
        path: Path,
        *,
        entries_max: int = ENTRIES_MAX,
        bytes_max: int = BYTES_MAX,
        warn: Callable[[str], None] = lambda _: None,
        clock: Clock | None = None,
    ) -> None:
        """Nothing is touched yet.

        Args:
            path: The file; its directory is made when it is first written.
            entries_max: How many entries are kept at least; a quarter more may be there.
            bytes_max: How large the file may be.
            warn: Is told, once, why the record cannot be written.
            clock: Tells the time.
        """
        self._path = path
        self._entries_max = entries_max
        self._bytes_max = bytes_max
        self._warn = warn
        self._clock = clock or SystemClock()
        self._has_warned = False
        self._began: dict[str, float] = {}

    def begin(
        self, kind: Kind, name: str, *, snapshot: str | None = None, entry_id: str | None = None
    ) -> str:
        """Begin an entry; returns its id, by default a new one, also where it cannot be written.

        Raises:
            JobExists: The record has an entry with this id, which a new one would hide.
        """
        if entry_id is None:
            entry_id = secrets.token_hex(8)
        else:
            self._require_new(entry_id)
        self._began[entry_id] = self._clock.monotonic_s()
        pid = os.getpid()
        self._append(
            {
                "event": "begin",
                "id": entry_id,
                "kind": kind,
                "name": name[:TEXT_MAX],
                "snapshot": snapshot,
                "started": format_utc(self._clock.now_ns()),
                "pid": pid,
                "life": _life_of(pid),
            }
        )
        return entry_id

    def end(self, entry_id: str, outcome: Outcome) -> None:
        """End an entry. What is too long to keep is cut."""
        began = self._began.pop(entry_id, None)
        duration = None if began is None else round(self._clock.monotonic_s() - began, 6)
        self._append({"event": "end", "id": entry_id, "duration_s": duration, **_bounded(outcome)})

    def note(self, entry_id: str, reason: str) -> None:
        """Say why an entry was interrupted, from another process than the one that began it."""
        self._append({"event": "note", "id": entry_id, "reason": reason[:TEXT_MAX]})

    def _require_new(self, entry_id: str) -> None:
        with contextlib.suppress(OSError):
            if f'"id":"{entry_id}"'.encode() in _tail(self._path, 2 * self._bytes_max):
                raise JobExists(
                    f"there was a job {entry_id} already",
                    next_step="choose ids at random, or leave them to the agent",
                )

    # -- writing ------------------------------------------------------------------------------

    def _append(self, fields: Mapping[str, object]) -> None:
        line = json.dumps(fields, separators=(",", ":")).encode() + b"\n"
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._locked():
                self._trim(len(line))
                _write_line(self._path, line)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                self._warn(f"the record {self._path} cannot be written: {error}")

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other writers out. The lock ends with its process, however that ends."""
        lock = self._path.with_name(self._path.name + ".lock")
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            deadline = self._clock.monotonic_s() + LOCK_S_MAX
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    # A writer that is stopped in the middle must not stop a restore.
                    if self._clock.monotonic_s() > deadline:
                        raise
                    self._clock.sleep_s(LOCK_POLL_S)
            yield
        finally:
            os.close(handle)

    def _trim(self, more_bytes: int) -> None:
        """Cut the file to its newest entries if it is too long; done while it is locked."""
        data = _tail(self._path, 2 * self._bytes_max)
        is_long = data.count(_BEGIN) > self._entries_max + self._entries_max // 4
        if not is_long and len(data) + more_bytes <= self._bytes_max:
            return
        kept = _newest(data, self._entries_max, self._bytes_max * 3 // 4)
        # One name only, so that what a kill leaves here is overwritten next time.
        new = self._path.with_name(self._path.name + ".new")
        handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            with open(handle, "wb") as file:  # noqa: PTH123 - it is open already
                file.write(kept)
                file.flush()
                os.fsync(file.fileno())
            new.replace(self._path)
        except OSError:
            new.unlink(missing_ok=True)
            raise


def _write_line(path: Path, line: bytes) -> None:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(handle).st_size
        if size and os.pread(handle, 1, size - 1) != b"\n":
            # The last writer was killed: its torn line stays a line of its own.
            line = b"\n" + line
        written = os.write(handle, line)
        if written < len(line):
            os.ftruncate(handle, size)
            raise OSError(f"only {written} bytes of {len(line)} went in")
    finally:
        os.close(handle)


def _newest(data: bytes, entries_max: int, bytes_max: int) -> bytes:
    """Keep the lines of the newest entries, whole entries only, in their order."""
    lines: dict[str, list[bytes]] = {}
    for line, fields in _lines(data):
        entry_id = str(fields.get("id"))
        if fields.get("event") == "begin":
            lines[entry_id] = [line]
        elif entry_id in lines:
            lines[entry_id].append(line)
    kept: list[bytes] = []
    size = 0
    for entry in list(lines.values())[: -entries_max - 1 : -1]:
        whole = b"".join(entry)
        size += len(whole)
        if size > bytes_max:
            break
        kept.append(whole)
    return b"".join(reversed(kept))


def _bounded(outcome: Outcome) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in dataclasses.asdict(outcome).items():
        if isinstance(value, str):
            found[key] = value[:TEXT_MAX]
        elif isinstance(value, dict):
            found[key] = {str(k)[:TEXT_MAX]: v for k, v in list(value.items())[:ITEMS_MAX]}
        elif value is not None:
            found[key] = value
    return found


def _life_of(pid: int) -> str:
    """Return what tells this process from a later one with the same id; empty if it is gone."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return ""
    # A zombie has ended, whoever has not noticed yet.
    return "" if fields[0] in (b"Z", b"X") else f"{boot}/{fields[19].decode('ascii')}"


# -- reading --------------------------------------------------------------------------------------


def read_history(path: Path, *, limit: int = ENTRIES_MAX, kind: Kind | None = None) -> list[Entry]:
    """Return entries, the newest first. Needs no lock, and changes nothing.

    Lines that are torn or make no sense are left out.

    Args:
        path: The file; without one, there are no entries.
        limit: How many at most.
        kind: Only captures, or only restores.

    Raises:
        OSError: The file cannot be read.
    """
    data = _tail(path, 2 * BYTES_MAX)
    begun: dict[str, dict[str, object]] = {}
    for _, fields in _lines(data):
        entry_id = str(fields.get("id"))
        event = fields.get("event")
        if event == "begin" and fields.get("kind") in ("capture", "restore"):
            begun[entry_id] = fields
        elif entry_id in begun and event in ("end", "note"):
            begun[entry_id] = begun[entry_id] | fields
    newest = reversed(begun.values())
    wanted = (fields for fields in newest if kind is None or fields["kind"] == kind)
    return [_entry(fields) for _, fields in zip(range(limit), wanted, strict=False)]


def _tail(path: Path, size_bytes: int) -> bytes:
    """Read the last part of a file; nothing if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - size_bytes, 0))
            return file.read(size_bytes)
    except FileNotFoundError:
        return b""


def _lines(data: bytes) -> Iterator[tuple[bytes, dict[str, object]]]:
    for line in data.splitlines(keepends=True):
        if line.endswith(b"\n"):
            with contextlib.suppress(ValueError, RecursionError):
                fields = json.loads(line)
                if isinstance(fields, dict) and isinstance(fields.get("id"), str):
                    yield line, fields


def _entry(fields: Mapping[str, object]) -> Entry:
    outcome = Outcome(
        snapshot=_text(fields, "snapshot"),
        phases={key: float(value) for key, value in _numbers(fields, "phases").items()},
        first_answer_s=_number(fields.get("first_answer_s")),
        source_bytes={key: int(value) for key, value in _numbers(fields, "source_bytes").items()},
        faults=None if (faults := _number(fields.get("faults"))) is None else int(faults),
        bottleneck=_text(fields, "bottleneck"),
        gpu_bottleneck=_text(fields, "gpu_bottleneck"),
        error=_text(fields, "error"),
        message=_text(fields, "message"),
    )
    return Entry(
        id=str(fields["id"]),
        kind="capture" if fields["kind"] == "capture" else "restore",
        name=_text(fields, "name") or "",
        started=_text(fields, "started") or "",
        result=_result(fields, outcome),
        duration_s=_number(fields.get("duration_s")),
        reason=_text(fields, "reason"),
        outcome=outcome,
    )


def _result(fields: Mapping[str, object], outcome: Outcome) -> Result:
    if fields.get("event") == "end" or "duration_s" in fields:
        return "ok" if outcome.error is None else "error"
    pid, life = fields.get("pid"), fields.get("life")
    is_alive = isinstance(pid, int) and pid > 0 and life and _life_of(pid) == life
    return "running" if is_alive else "interrupted"


def _text(fields: Mapping[str, object], key: str) -> str | None:
    value = fields.get(key)
    return value if isinstance(value, str) else None


def _number(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1e18 else None  # type: ignore[arg-type]


def _numbers(fields: Mapping[str, object], key: str) -> dict[str, float]:
    value = fields.get(key)
    items = value.items() if isinstance(value, dict) else ()
    numbers = ((name, _number(item)) for name, item in items)
    return {name: number for name, number in numbers if number is not None}
