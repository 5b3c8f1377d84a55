"""HTTP: from a connection with its peer to a handler and back; errors as the commands' objects."""

from __future__ import annotations

import re
import sys
import traceback
from typing import TYPE_CHECKING, Any, Final

import msgspec
from aiohttp import web

from snapagent import api
from snapagent.errors import AgentError, DaemonBusy, DaemonEnding, PreflightFailed
from snapagent.server.policy import peer_of
from snapagent.server.routes import ROUTES, NoQuery, Route
from snapstore.errors import SnapError, UsageError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from snapagent.server.handlers import Handlers
    from snapagent.server.metrics import Metrics

__all__ = ["make_server", "status_of"]

_STATUSES: Final = {1: 422, 2: 400, 3: 404, 4: 502, 5: 502, 6: 409, 7: 403, 8: 507, 130: 409}
"""Of errors, by their exit codes."""


def status_of(error: SnapError) -> int:
    """Return the HTTP status that fits an error."""
    match error:
        case PreflightFailed():
            return 422
        case DaemonEnding():
            return 503
        case DaemonBusy():
            return 429
        case _:
            return _STATUSES.get(error.exit_code, 500)


def make_server(handlers: Handlers, metrics: Metrics) -> web.Application:
    """Return all of the API, still without connections."""
    app = web.Application(middlewares=[_middleware(metrics)], client_max_size=api.BODY_BYTES_MAX)
    for route in ROUTES:
        app.router.add_route(route.method, route.path, _endpoint(route, handlers))
    return app


def _middleware(metrics: Metrics) -> Any:  # noqa: ANN401 - aiohttp's own type is as vague
    """Return what turns every error into an answer that the API describes."""

    @web.middleware
    async def answer(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            response = await handler(request)
        except SnapError as error:
            response = _failure(status_of(error), api.error_body(error))
        except web.HTTPException as error:
            response = _refused(request, error)
        except Exception:  # noqa: BLE001 - a bug of ours: for the log, never for the peer
            traceback.print_exc(file=sys.stderr)
            failed = AgentError("the agent has failed", next_step="look into its log")
            response = _failure(500, api.error_body(failed))
        resource = request.match_info.route.resource
        where = resource.canonical if resource is not None else "none"
        metrics.answered(f"{request.method if resource else 'ANY'} {where}", response.status)
        return response

    return answer


def _failure(status: int, error: api.ErrorBody) -> web.Response:
    return web.Response(
        status=status,
        body=msgspec.json.encode(api.ErrorAnswer(error=error)),
        content_type="application/json",
    )


def _refused(request: web.Request, error: web.HTTPException) -> web.StreamResponse:
    """Say in our words what aiohttp refuses."""
    allow = error.headers.get("Allow")
    match error.status:
        case 404:
            text, step = f"there is nothing at {request.path[:200]}", "see /v1/openapi.json"
        case 405:
            text, step = f"not with {request.method[:20]}", f"use {allow}"
        case 413:
            text, step = "the body is too large", f"send at most {api.BODY_BYTES_MAX} bytes"
        case _:
            text, step = f"the request is refused: {error.reason}", "see /v1/openapi.json"
    response = _failure(error.status, api.error_body(UsageError(text, next_step=step)))
    if allow:
        response.headers["Allow"] = allow
    return response


def _endpoint(
    route: Route, handlers: Handlers
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    serve = getattr(handlers, route.name)

    async def endpoint(request: web.Request) -> web.StreamResponse:
        if request.transport is None:
            raise UsageError("the connection has ended", next_step="wait for the answer")
        arguments: list[Any] = [peer_of(request.transport.get_extra_info("socket"))]
        if "{id}" in route.path:
            arguments.append(_job_id(request))
        query = _query(request, route)
        if route.query is not NoQuery:
            arguments.append(query)
        if route.body is not None:
            arguments.append(await _body(request, route.body))
        if route.media == "application/x-ndjson":
            return await _stream(request, serve, arguments)
        answer = await serve(*arguments)
        status = route.status
        if isinstance(answer, api.Health) and not answer.healthy:
            status = 503
        body = answer if isinstance(answer, bytes) else msgspec.json.encode(answer)
        return web.Response(status=status, body=body, content_type=route.media)

    return endpoint


async def _stream(
    request: web.Request, serve: Callable[..., Awaitable[None]], arguments: list[Any]
) -> web.StreamResponse:
    """Answer line by line; what goes wrong before the first one is an answer of its own."""
    out = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
    lazily = _LazyStream(request, out)
    try:
        await serve(*arguments, lazily)
        await out.write_eof()
    except ConnectionError:
        pass  # Whoever asked has gone.
    return out


class _LazyStream:
    """Sends the head with the first line."""

    def __init__(self, request: web.Request, out: web.StreamResponse) -> None:
        self._request = request
        self._out = out

    async def write(self, data: bytes) -> None:
        if not self._out.prepared:
            await self._out.prepare(self._request)
        await self._out.write(data)


def _job_id(request: web.Request) -> str:
    job_id = request.match_info["id"]
    if re.fullmatch(api.JOB_ID, job_id) is None:
        raise UsageError("not an id of a job", next_step="it has 16 hexadecimal digits")
    return job_id


def _query(request: web.Request, route: Route) -> msgspec.Struct:
    given = request.rel_url.query
    if len(given) != len(set(given)):
        raise UsageError("a parameter is given twice", next_step="give each once")
    try:
        return msgspec.convert(dict(given), route.query, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"parameters: {error}", next_step="see /v1/openapi.json") from error


async def _body(request: web.Request, kind: type[msgspec.Struct]) -> msgspec.Struct:
    if request.content_type != "application/json":
        raise web.HTTPUnsupportedMediaType
    try:
        data = await request.read()
    except ConnectionError as error:
        # Nobody hears that any more; but it is no failure of ours, for the log.
        raise UsageError("the body was cut off", next_step="send all of it") from error
    try:
        # To JSON Schema 9.0 is an integer like 9.
        return msgspec.convert(_with_integers(msgspec.json.decode(data)), kind)
    except msgspec.DecodeError as error:
        raise UsageError(f"the body: {error}", next_step="see /v1/openapi.json") from error
    except RecursionError as error:
        raise UsageError("the body is too deep", next_step="see /v1/openapi.json") from error
    except UnicodeDecodeError as error:
        raise UsageError("the body is not UTF-8", next_step="send JSON") from error


def _with_integers(value: object) -> object:
    """Turn floats that are whole into integers. The decoder has bounded the depth."""
    if isinstance(value, dict):
        return {key: _with_integers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_integers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
