"""What the daemon and its clients say to each other: the bodies of requests and answers, version 1.

Values only. `snapagent.server` makes the OpenAPI description out of these very types.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal

import msgspec

from snapagent.control import CaptureState, RestoreState
from snapstore import SnapError

__all__ = [
    "BODY_BYTES_MAX",
    "JOB_ID",
    "CaptureDone",
    "CaptureJob",
    "CaptureJobs",
    "CaptureRequestBody",
    "ErrorAnswer",
    "ErrorBody",
    "Found",
    "Health",
    "HistoryAnswer",
    "HistoryEntry",
    "Job",
    "ObstacleBody",
    "PreflightAnswer",
    "PreflightProcessBody",
    "PreflightSnapshotBody",
    "ProgressBody",
    "RestoreDone",
    "RestoreJob",
    "RestoreJobs",
    "RestoreRequestBody",
    "Status",
    "error_body",
    "job_of",
    "to_error",
]

BODY_BYTES_MAX: Final = 256 << 10
JOB_ID: Final = "^[0-9a-f]{16}$"

Pid = Annotated[int, msgspec.Meta(ge=1, le=(1 << 22))]
_PART = "[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
_NAME = f"^(?=[^:@]{{1,255}}(?:[:@]|$)){_PART}(?:/{_PART})*"
_TAG = f":(?=.{{1,128}}$){_PART}"
# The grammar of names, so that the description has it; `parse_snapshot_ref` decides.
NewName = Annotated[str, msgspec.Meta(pattern=f"{_NAME}(?:{_TAG})?$", max_length=384)]
Name = Annotated[
    str, msgspec.Meta(pattern=f"{_NAME}(?:{_TAG}|@b3:[0-9a-f]{{64}})?$", max_length=384)
]
Url = Annotated[str, msgspec.Meta(min_length=1, max_length=2048)]
# The length as well: to some patterns, `$` is also before a newline at the end.
JobId = Annotated[
    str,
    msgspec.Meta(
        pattern=JOB_ID,
        min_length=16,
        max_length=16,
        description="The id of the job, chosen at random, so that it can be cancelled before the "
        "answer has come; default: the daemon chooses",
    ),
]
Where = Literal["here", "fresh"]
Count = Annotated[int, msgspec.Meta(ge=0)]


class _Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a client sends: a key that nobody knows is an error."""


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What the daemon answers: clients overlook keys that they do not know."""


# -- requests -------------------------------------------------------------------------------------


class CaptureRequestBody(_Body, frozen=True):
    """Capture the tree below `pid`; see `snapagent capture --help`."""

    name: NewName
    pid: Pid
    store: Url | None = None
    labels: Annotated[
        dict[
            Annotated[str, msgspec.Meta(max_length=256)],
            Annotated[str, msgspec.Meta(max_length=4096)],
        ],
        msgspec.Meta(max_length=64),
    ] = msgspec.field(default_factory=dict)
    stop: bool = False
    freeze_fast: bool = False
    id: JobId | None = None


class RestoreRequestBody(_Body, frozen=True):
    """Restore a snapshot; see `snapagent restore --help`."""

    name: Name
    store: Url | None = None
    images: Annotated[str, msgspec.Meta(max_length=4096)] | None = None
    pids: Where = "here"
    network: Where = "here"
    into_pid: Pid | None = None
    eager: bool = False
    record_s: Annotated[float, msgspec.Meta(ge=0, le=86400)] | None = None
    force: bool = False
    allow_driver_change: bool = False
    integrity: Literal["strong", "fast"] | None = None
    id: JobId | None = None


class PreflightProcessBody(_Body, frozen=True):
    """What stands in the way of capturing the tree below `pid`."""

    pid: Pid
    stop: bool = False


class PreflightSnapshotBody(_Body, frozen=True):
    """What stands in the way of restoring a snapshot here."""

    name: Name
    store: Url | None = None
    images: Annotated[str, msgspec.Meta(max_length=4096)] | None = None
    pids: Where = "here"
    network: Where = "here"
    into_pid: Pid | None = None
    allow_driver_change: bool = False


# -- errors ---------------------------------------------------------------------------------------


class ErrorBody(_Answer, frozen=True):
    """An error, as commands print it with `--json`."""

    code: str
    exit_code: int
    message: str
    next_step: str
    retryable: bool
    notes: list[str] = []


class ErrorAnswer(_Answer, frozen=True):
    """The body of every answer with a status from 400 on."""

    error: ErrorBody


def error_body(error: SnapError) -> ErrorBody:
    """Say an error in the words of the API."""
    return ErrorBody(
        code=error.code,
        exit_code=error.exit_code,
        message=str(error),
        next_step=error.next_step,
        retryable=error.retryable,
        notes=list(getattr(error, "__notes__", ())),
    )


def to_error(body: ErrorBody) -> SnapError:
    """Make an error of the daemon one of this process, with the same code and exit code."""
    name = body.code if body.code.isidentifier() else "SnapError"
    kind = type(name, (SnapError,), {"exit_code": body.exit_code, "retryable": body.retryable})
    error: SnapError = kind(body.message, next_step=body.next_step)
    for note in body.notes:
        error.add_note(note)
    return error


# -- jobs -----------------------------------------------------------------------------------------


class CaptureDone(_Answer, frozen=True):
    """What a capture did; times in seconds."""

    name: str
    snapshot: str
    generation: int
    stopped: bool
    network_lock: str | None
    frozen_s: float
    agent_setup_s: float
    criu_dump_s: float
    commit_s: float
    total_s: float
    page_bytes: int
    cuda_checkpoint_s: float | None
    external_bytes: int
    ingest: dict[str, int]
    stored_bytes: int
    warnings: list[str]


class RestoreDone(_Answer, frozen=True):
    """What a restore did; times in seconds from when it was begun.

    `external_s` is when all external memory was there, if there is any. `external_sources` says
    how much of it came from the `store`, from where the node's `cache` has it decoded, and from
    files of that whose pages were `registered` with the CUDA driver; `gpu_bottleneck` whether
    filling GPUs waited to `read`, `copy` or `hash`.
    """

    name: str
    snapshot: str
    root_pid: int
    pids: list[int]
    agent_setup_s: float
    criu_restore_s: float
    cuda_restore_s: float | None
    fill_s: float
    running_s: float
    total_s: float
    eager_bytes: int
    shared_bytes: int
    external_bytes: int
    external_sources: dict[str, int]
    external_s: float | None
    gpu_bottleneck: str | None
    lazy: dict[str, int | float | None]
    bottleneck: str


class ProgressBody(_Answer, frozen=True):
    """How far a job is; `total_bytes` is 0 if nobody knows.

    It is an estimate while a capture stores: what is resident, and external memory.
    """

    phase: str
    done_bytes: int
    total_bytes: int
    total_is_estimate: bool = False


class CaptureStep(_Answer, frozen=True):
    """When a capture came into a state."""

    state: CaptureState
    at: str


class RestoreStep(_Answer, frozen=True):
    """When a restore came into a state."""

    state: RestoreState
    at: str


class Job(_Answer, frozen=True):
    """What captures and restores have in common.

    `id` is that of its entry in the history as well. `version` grows with every change but
    progress. What a killed daemon had under way is `interrupted`.
    """

    id: str
    version: int
    name: str
    store: str
    uid: int
    cancelling: bool
    progress: ProgressBody | None = None
    error: ErrorBody | None = None
    warnings: list[str] = []


class CaptureJob(Job, frozen=True, kw_only=True, tag_field="kind", tag="capture"):
    """A capture, as far as it is."""

    state: CaptureState
    steps: list[CaptureStep]
    result: CaptureDone | None = None


class RestoreJob(Job, frozen=True, kw_only=True, tag_field="kind", tag="restore"):
    """A restore, as far as it is."""

    state: RestoreState
    steps: list[RestoreStep]
    result: RestoreDone | None = None


def job_of(fields: Mapping[str, object]) -> CaptureJob | RestoreJob:
    """Put a job together from its fields, `kind` among them, and check it."""
    return msgspec.convert(fields, CaptureJob | RestoreJob, from_attributes=True)


class CaptureJobs(_Answer, frozen=True):
    """Captures that the peer may see, the newest first."""

    captures: list[CaptureJob]


class RestoreJobs(_Answer, frozen=True):
    """Restores that the peer may see, the newest first."""

    restores: list[RestoreJob]


# -- the rest -------------------------------------------------------------------------------------


class ObstacleBody(_Answer, frozen=True):
    """What stands in the way, and what to do about it."""

    code: str
    subject: str
    remedy: str
    blocking: bool


class PreflightAnswer(_Answer, frozen=True):
    """Whether it is possible, and all that stands in the way."""

    possible: bool
    obstacles: list[ObstacleBody]


class HistoryOutcome(_Answer, frozen=True):
    """How it ended, and what it took."""

    snapshot: str | None = None
    phases: dict[str, float] = {}
    first_answer_s: float | None = None
    source_bytes: dict[str, int] = {}
    faults: int | None = None
    bottleneck: str | None = None
    gpu_bottleneck: str | None = None
    error: str | None = None
    message: str | None = None


class HistoryEntry(_Answer, frozen=True):
    """One capture or restore of this node, by the daemon or by a command."""

    id: str
    kind: Literal["capture", "restore"]
    name: str
    started: str
    result: Literal["running", "ok", "error", "interrupted"]
    duration_s: float | None
    reason: str | None
    outcome: HistoryOutcome


class HistoryAnswer(_Answer, frozen=True):
    """Entries that the peer may read, the newest first."""

    entries: list[HistoryEntry]


class Health(_Answer, frozen=True):
    """Whether jobs are taken; the status is 503 if not.

    `memory_is_held` is false while released external memory would be lost with the daemon.
    """

    healthy: bool
    memory_is_held: bool | None


class Found(_Answer, frozen=True):
    """What a start found that an earlier daemon had left, and removed."""

    jobs: list[str]
    directories: list[str]
    reasons: int
    stale_socket: bool


class MemoryStatus(_Answer, frozen=True):
    """External memory of workloads, as the broker of the daemon has it.

    `processes` counts those that have some, by the state of it. Without `holder_pid`, memory that
    is released would be lost with the daemon; another holder is tried for each second.
    """

    socket: str
    holder_pid: int | None
    processes: dict[str, int]
    regions: int
    size_bytes: int


class GpuStatus(_Answer, frozen=True):
    """What the daemon has of one GPU.

    What is not `ready` is made when it is first needed. `hashes` tells whether chunks are hashed on
    the GPU; if not, `without_kernels` says why.
    """

    uuid: str
    model: str
    ready: bool
    workers: int
    pinned_bytes: int
    hashes: bool
    without_kernels: str | None
    last_fill_bottleneck: str | None


class GpusStatus(_Answer, frozen=True):
    """What the daemon has of GPUs, and how much of the node's cache is page-locked for them.

    `warming` counts snapshots that are still to be put into the cache.
    """

    gpus: list[GpuStatus]
    registered_bytes: int
    registered_bytes_max: int
    warming: int


class Status(_Answer, frozen=True):
    """The daemon itself. Without `memory`, it has no broker; without `gpu`, it has used no GPU.

    `readers` counts processes that read memory for restores.
    """

    version: str
    pid: int
    started: str
    stopping: bool
    socket: str
    store: str | None
    stores_open: list[str]
    readers: int
    jobs: dict[str, dict[str, int]]
    memory: MemoryStatus | None
    gpu: GpusStatus | None
    found_at_start: Found
