"""Every endpoint of the API as data: what serves it, what it takes, what it answers.

The server and its OpenAPI description are made of the same table, so that they cannot differ.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec

from snapagent import api

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ERRORS", "ROUTES", "HistoryQuery", "Media", "NoQuery", "Route", "WaitQuery"]

Media = Literal["application/json", "application/x-ndjson", "text/plain"]

ERRORS: Final[Mapping[int, str]] = {
    400: "The request cannot be meant",
    403: "Policy does not let this peer do that; the next step names the rule that is missing",
    404: "There is no such thing, or none that this peer may see",
    405: "Not with this method",
    409: "Somebody else decided first, or it was interrupted",
    413: "The body is too large",
    415: "The body is not JSON",
    422: "It cannot be done here, such as what preflight forbids",
    429: "Too much is under way",
    500: "The agent has failed",
    502: "The store cannot be reached, or is damaged",
    503: "The agent is about to end",
    507: "There is no space",
}
"""What the statuses of errors mean; each has an `ErrorAnswer` as its body."""


class _Query(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters after the question mark."""


class NoQuery(_Query, frozen=True):
    """None."""


class HistoryQuery(_Query, frozen=True):
    """How much of the history."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=1000, description="How many entries at most")] = 20


class WaitQuery(_Query, frozen=True):
    """Whether to wait for a change."""

    wait_s: Annotated[
        float, msgspec.Meta(ge=0, le=300, description="Answer after so many seconds at the latest")
    ] = 0
    seen: Annotated[
        int,
        msgspec.Meta(ge=0, description="Wait as long as this is the version and it has not ended"),
    ] = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Route:
    """One method of one path.

    Attributes:
        name: Of the operation, and of the method that serves it.
        summary: One line.
        method: Of HTTP.
        path: With `{id}` for the id of a job.
        answer: What it answers; a line of a stream, if it is one; none is text.
        status: Of success.
        body: What it takes.
        query: Parameters.
        media: Of the answer.
        errors: Statuses of errors, besides those of all requests.
    """

    name: str
    summary: str
    method: str
    path: str
    answer: type | None
    status: int = 200
    body: type[msgspec.Struct] | None = None
    query: type[msgspec.Struct] = NoQuery
    media: Media = "application/json"
    errors: tuple[int, ...] = ()

    @property
    def statuses(self) -> tuple[int, ...]:
        """All statuses of errors."""
        found = {400, 500, *self.errors}
        if self.body is not None:
            found |= {413, 415}
        if "{id}" in self.path:
            found.add(404)
        return tuple(sorted(found))


_BEGIN = (403, 409, 429, 503, 422)
_LOOK = (403, 404, 409, 422, 429, 502, 507)

ROUTES: Final = (
    Route(
        "begin_capture",
        "Begin to capture a process tree",
        "POST",
        "/v1/captures",
        api.CaptureJob,
        201,
        body=api.CaptureRequestBody,
        errors=_BEGIN,
    ),
    Route("list_captures", "List captures", "GET", "/v1/captures", api.CaptureJobs),
    Route(
        "get_capture",
        "Look at a capture, or wait for a change of it",
        "GET",
        "/v1/captures/{id}",
        api.CaptureJob,
        query=WaitQuery,
    ),
    Route(
        "watch_capture",
        "Follow a capture: a line of JSON for each change, up to its end",
        "GET",
        "/v1/captures/{id}/events",
        api.CaptureJob,
        media="application/x-ndjson",
    ),
    Route(
        "cancel_capture",
        "Cancel a capture; the processes go on",
        "DELETE",
        "/v1/captures/{id}",
        api.CaptureJob,
        errors=(403,),
    ),
    Route(
        "begin_restore",
        "Begin to restore a process tree",
        "POST",
        "/v1/restores",
        api.RestoreJob,
        201,
        body=api.RestoreRequestBody,
        errors=_BEGIN,
    ),
    Route("list_restores", "List restores", "GET", "/v1/restores", api.RestoreJobs),
    Route(
        "get_restore",
        "Look at a restore, or wait for a change of it",
        "GET",
        "/v1/restores/{id}",
        api.RestoreJob,
        query=WaitQuery,
    ),
    Route(
        "watch_restore",
        "Follow a restore: a line of JSON for each change, up to its end",
        "GET",
        "/v1/restores/{id}/events",
        api.RestoreJob,
        media="application/x-ndjson",
    ),
    Route(
        "cancel_restore",
        "Cancel a restore; what it has made is ended",
        "DELETE",
        "/v1/restores/{id}",
        api.RestoreJob,
        errors=(403,),
    ),
    Route(
        "preflight_process",
        "Say what stands in the way of a capture",
        "POST",
        "/v1/preflight/capture",
        api.PreflightAnswer,
        body=api.PreflightProcessBody,
        errors=_LOOK,
    ),
    Route(
        "preflight_snapshot",
        "Say what stands in the way of a restore",
        "POST",
        "/v1/preflight/restore",
        api.PreflightAnswer,
        body=api.PreflightSnapshotBody,
        errors=_LOOK,
    ),
    Route(
        "history",
        "List what was captured and restored on this node",
        "GET",
        "/v1/history",
        api.HistoryAnswer,
        query=HistoryQuery,
        errors=(429,),
    ),
    Route("status", "Describe the agent", "GET", "/v1/status", api.Status),
    Route("health", "Tell whether jobs are taken", "GET", "/v1/health", api.Health, errors=(503,)),
    Route("metrics", "Counters for Prometheus", "GET", "/v1/metrics", None, media="text/plain"),
    Route("openapi", "This description", "GET", "/v1/openapi.json", dict),
)
"""Every endpoint."""
