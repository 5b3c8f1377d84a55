"""The little HTTP that the examples need: one request a connection, answers in JSON.

Not a server for the world outside: no TLS, no limits on who asks.
"""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["Answer", "BadRequest", "answering", "answering_alone", "prompt_of"]

HEADER_BYTES_MAX = 16 << 10
BODY_BYTES_MAX = 1 << 20
REQUEST_S_MAX = 10

Answer = dict[str, Any]


class BadRequest(Exception):
    """The client is to blame; the text is its answer."""

    status = HTTPStatus.BAD_REQUEST


async def answering(
    answer: Callable[[str, bytes], Awaitable[Answer]], host: str, port: int
) -> asyncio.Server:
    """Listen, and give every request's path and body to `answer`."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            status, found = await _respond(reader, answer)
            writer.write(_encode(status, found))
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            pass  # The client has gone, or never said what it wants.
        finally:
            writer.close()

    return await asyncio.start_server(connected, host, port, limit=HEADER_BYTES_MAX)


def answering_alone(
    answer: Callable[[str, bytes], Answer], host: str, port: int, listening: Callable[[], None]
) -> None:
    """Answer one request after the other on this thread, for engines that block; for ever.

    Calls `listening` once clients can connect.
    """

    async def step(path: str, body: bytes) -> Answer:
        # Blocking the loop is what makes the next request wait.
        return answer(path, body)

    async def serve() -> None:
        async with await answering(step, host, port) as server:
            listening()
            await server.serve_forever()

    asyncio.run(serve())


def prompt_of(path: str, body: bytes) -> str:
    """Return what `POST /generate` with `{"prompt": "..."}` asks for."""
    if path != "/generate":
        raise BadRequest("post to /generate")
    try:
        prompt = json.loads(body)["prompt"]
    except (ValueError, KeyError, TypeError) as error:
        raise BadRequest('say {"prompt": "..."}') from error
    if not isinstance(prompt, str) or not prompt.strip():
        raise BadRequest("the prompt is empty")
    return prompt


async def _respond(
    reader: asyncio.StreamReader, answer: Callable[[str, bytes], Awaitable[Answer]]
) -> tuple[HTTPStatus, Answer]:
    try:
        async with asyncio.timeout(REQUEST_S_MAX):
            path, body = await _read(reader)
        return HTTPStatus.OK, await answer(path, body)
    except BadRequest as error:
        return error.status, {"error": str(error)}


async def _read(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.LimitOverrunError as error:
        raise BadRequest("the header is too long") from error
    first, *lines = head.rstrip().split("\r\n")
    parts = first.split(" ")
    if len(parts) != 3:
        raise BadRequest("this is no HTTP request")
    fields = dict(line.lower().split(":", 1) for line in lines if ":" in line)
    length = fields.get("content-length", "0").strip()
    if not length.isdecimal() or int(length) > BODY_BYTES_MAX:
        raise BadRequest(f"a body may have {BODY_BYTES_MAX} bytes")
    return parts[1], await reader.readexactly(int(length))


def _encode(status: HTTPStatus, answer: Answer) -> bytes:
    body = json.dumps(answer).encode() + b"\n"
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
