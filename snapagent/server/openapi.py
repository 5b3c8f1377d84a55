"""The OpenAPI 3.1 description of the API, made from the table of its routes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

import snapstore
from snapagent import api
from snapagent.server.routes import ERRORS, ROUTES, Route

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["description"]

_TEMPLATE = "#/components/schemas/{name}"


def description() -> dict[str, object]:
    """Describe all of it."""
    types = [route.answer for route in ROUTES if route.answer not in {None, dict}]
    types += [route.body for route in ROUTES if route.body is not None]
    types.append(api.ErrorAnswer)
    references, components = msgspec.json.schema_components(types, ref_template=_TEMPLATE)
    schemas: dict[object, object] = dict(zip(types, references, strict=True))
    paths: dict[str, dict[str, object]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "snapagent",
            "version": snapstore.VERSION,
            "description": "Captures and restores of living processes on one node.",
        },
        "paths": paths,
        "components": {"schemas": components},
    }


def _operation(route: Route, schemas: Mapping[object, object]) -> dict[str, object]:
    responses: dict[str, object] = {str(route.status): _success(route, schemas)}
    failure = {"application/json": {"schema": schemas[api.ErrorAnswer]}}
    for status in route.statuses:
        responses[str(status)] = {"description": ERRORS[status], "content": failure}
    operation: dict[str, object] = {
        "operationId": route.name,
        "summary": route.summary,
        "responses": responses,
    }
    if route.name == "health":
        health = {"application/json": {"schema": schemas[api.Health]}}
        responses["503"] = {"description": ERRORS[503], "content": health}
    if parameters := _parameters(route):
        operation["parameters"] = parameters
    if route.body is not None:
        content = {"application/json": {"schema": schemas[route.body]}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _success(route: Route, schemas: Mapping[object, object]) -> dict[str, object]:
    schema: object = schemas.get(route.answer, {"type": "object"})
    if route.media == "text/plain":
        schema = {"type": "string"}
    if route.media == "application/x-ndjson":
        # A schema of one line; OpenAPI 3.1 has no word for a sequence of them.
        schema = {"type": "string", "contentMediaType": "application/json", "contentSchema": schema}
    return {"description": route.summary, "content": {route.media: {"schema": schema}}}


def _parameters(route: Route) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    if "{id}" in route.path:
        schema: dict[str, object] = {"type": "string", "pattern": api.JOB_ID}
        found.append({"name": "id", "in": "path", "required": True, "schema": schema})
    described: dict[str, Any] = msgspec.json.schema(route.query)
    fields = described["$defs"][route.query.__name__]["properties"]
    found += [
        {"name": name, "in": "query", "required": False, "schema": field}
        for name, field in fields.items()
    ]
    return found
