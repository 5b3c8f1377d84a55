"""Captures and restores that leave a record on this node, whatever becomes of them.

The record outlives them: what was killed shows as interrupted, with what its supervisor said.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from typing import TYPE_CHECKING

from snapagent.capture import capture
from snapagent.history import History, Outcome
from snapagent.restore import Restoration
from snapstore import SnapError
from snapstore.errors import Interrupted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from snapagent.capture import CaptureRequest, CaptureResult
    from snapagent.config import AgentConfig
    from snapagent.control import Control
    from snapagent.history import Kind
    from snapagent.restore import RestoreRequest, RestoreResult
    from snapstore import ProgressCallback, Store

__all__ = ["collect_reasons", "recorded_capture", "recorded_restore"]

_REASON_BYTES_MAX = 16 << 10


def recorded_capture(
    store: Store,
    request: CaptureRequest,
    config: AgentConfig,
    progress: ProgressCallback | None = None,
    *,
    warn: Callable[[str], None],
    control: Control | None = None,
    entry: str | None = None,
) -> CaptureResult:
    """Capture and keep a record of it, under the id `entry` if that is given; see `capture`."""
    with _recorded(config, "capture", request.name, warn, entry) as record:
        result = capture(store, request, config, progress, control=control)
        ingest = result.pushed.ingest
        record.outcome = Outcome(
            snapshot=result.pushed.snapshot.hex,
            phases={
                "setup": result.setup_s,
                **({} if result.cuda_checkpoint_s is None else {"gpu": result.cuda_checkpoint_s}),
                "criu": result.dump_s,
                "commit": result.commit_s,
                "frozen": result.frozen_s,
            },
            source_bytes={
                "zeros": ingest.zero_bytes,
                "known": ingest.known_bytes,
                "new": ingest.new_bytes,
            },
        )
        return result


def recorded_restore(
    store: Store,
    request: RestoreRequest,
    config: AgentConfig,
    progress: ProgressCallback | None = None,
    *,
    warn: Callable[[str], None],
    control: Control | None = None,
    entry: str | None = None,
) -> RestoreResult:
    """Restore and keep a record of it, under the id `entry` if that is given; see `restore`."""
    with (
        _recorded(config, "restore", request.name, warn, entry) as record,
        Restoration(
            store, request, config, reason_file=record.reason_file, control=control
        ) as restoration,
    ):
        result = restoration.run(progress)
        lazy = result.lazy
        record.outcome = Outcome(
            snapshot=result.snapshot,
            phases={
                "setup": result.agent_setup_s,
                "criu": result.criu_restore_s,
                **({} if result.cuda_restore_s is None else {"gpu": result.cuda_restore_s}),
                "fill": result.fill_s,
            },
            first_answer_s=result.running_s,
            source_bytes={
                "eager": result.eager_bytes,
                "faults": lazy.fault_bytes,
                "fill": lazy.fill_bytes,
                "zeros": lazy.zero_bytes,
                **{f"external_{name}": count for name, count in result.external_sources.items()},
            },
            faults=lazy.faults,
            bottleneck=result.bottleneck,
            gpu_bottleneck=result.gpu_bottleneck,
        )
        return result


def collect_reasons(config: AgentConfig, history: History) -> int:
    """Take into the record what supervisors wrote whose agent was killed; return how many."""
    count = 0
    with contextlib.suppress(OSError):
        for path in config.reasons_directory.iterdir():
            reason = _read_reason(path)
            if reason:
                history.note(path.name, reason)
                path.unlink()
                count += 1
    return count


@dataclasses.dataclass(slots=True)
class _Record:
    """What is to be said of one piece of work when it ends."""

    reason_file: Path | None
    outcome: Outcome


@contextlib.contextmanager
def _recorded(
    config: AgentConfig, kind: Kind, name: str, warn: Callable[[str], None], entry: str | None
) -> Iterator[_Record]:
    history = History(config.history_file, warn=warn)
    collect_reasons(config, history)
    entry = history.begin(kind, name, entry_id=entry)
    reason_file: Path | None = config.reasons_directory / entry
    try:
        config.reasons_directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        reason_file = None  # The history has warned already.
    record = _Record(reason_file, Outcome())
    try:
        yield record
    except SnapError as error:
        history.end(entry, record.outcome.failed(error))
        raise
    except KeyboardInterrupt:
        history.end(entry, record.outcome.failed(Interrupted("interrupted")))
        raise
    else:
        history.end(entry, record.outcome)


def _read_reason(path: Path) -> str:
    """Return what a supervisor wrote last; it may be in the middle of it."""
    with path.open("rb") as file:
        lines = file.read(_REASON_BYTES_MAX).splitlines()
    with contextlib.suppress(ValueError, KeyError, TypeError, IndexError):
        return str(json.loads(lines[-1])["ended"])
    return ""
