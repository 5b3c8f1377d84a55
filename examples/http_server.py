"""A server with state that is captured and restored: asyncio and the standard library only.

    SNAPSHOT_CONTROL_DIR=/run/control python examples/http_server.py --port 8000 --warm-up 3

It fills some memory, answers `--warm-up` requests, and is ready to be captured. Restored, it waits
for the agent's word, checks its memory, and goes on counting where it was. Without
SNAPSHOT_CONTROL_DIR it only serves. With `--external-mebibytes` it keeps so much memory with the
agent's broker, at SNAPAGENT_MEMORY_SOCKET, as an engine would its weights.

    GET /state      how many requests it has answered, and a digest of all it keeps
    GET /item/N     one entry
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import hashlib
import random
from collections.abc import Iterator

from small_http import Answer, BadRequest, answering

from snapagent.workload import Block, HostMemory
from snapagent.workload.handshake import Handshake, Outcome
from snapagent.workload.procedure import park_async

FRAMEWORK = "http"
ITEMS = 50_000
MEBIBYTE = 1 << 20


class CountingServer:
    """Counts its requests and keeps much; has the four steps of `Engine`."""

    def __init__(self, mebibytes: int, warm_up: int, external_mebibytes: int = 0) -> None:
        """Make the state, which takes a moment: worth a snapshot."""
        source = random.Random(mebibytes)
        self._data = [source.randbytes(MEBIBYTE) for _ in range(mebibytes)]
        self._memory = HostMemory() if external_mebibytes else None
        self._weights: list[Block] = []
        if self._memory is not None:
            self._weights = [self._memory.allocate(MEBIBYTE) for _ in range(external_mebibytes)]
        for block in self._weights:
            block.buffer[:] = source.randbytes(MEBIBYTE)
        self._items = {number: f"item {source.getrandbits(64):016x}" for number in range(ITEMS)}
        self._requests = 0
        self._warm_up = warm_up
        self.is_warm = asyncio.Event()
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._under_way = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._digest = self._compute_digest()
        self._note_warmth()

    def _compute_digest(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for piece in self._pieces():
            digest.update(piece)
        return digest.hexdigest()

    def _pieces(self) -> Iterator[bytes | memoryview]:
        """Go through all that it keeps."""
        yield from self._data
        for block in self._weights:
            yield block.buffer
        yield "".join(f"{number}={item};" for number, item in self._items.items()).encode()

    def _note_warmth(self) -> None:
        if self._requests >= self._warm_up:
            self.is_warm.set()

    # -- requests ---------------------------------------------------------------------------------

    async def answer(self, path: str, body: bytes) -> Answer:
        """Answer one request; while the server is parked, it waits."""
        del body
        await self._is_open.wait()
        self._under_way += 1
        self._is_idle.clear()
        try:
            return self._answer(path)
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._is_idle.set()

    def _answer(self, path: str) -> Answer:
        if path.startswith("/item/"):
            number = path.removeprefix("/item/")
            if not number.isdecimal() or int(number) not in self._items:
                raise BadRequest(f"there is no item {number}")
            found: Answer = {"item": self._items[int(number)]}
        elif path == "/state":
            found = {"digest": self._compute_digest()}
        else:
            raise BadRequest("ask for /state or /item/N")
        self._requests += 1
        self._note_warmth()
        return found | {"requests": self._requests}

    # -- the steps of an engine -------------------------------------------------------------------

    async def quiesce(self) -> None:
        """Let new requests wait, and finish those under way."""
        self._is_open.clear()
        await self._is_idle.wait()

    def park(self) -> None:
        """Give back what is not needed, and lend the agent what it is to store itself."""
        gc.collect()
        if self._memory is not None:
            self._memory.release()

    def resume(self) -> None:
        """Get external memory back, and let requests in again."""
        if self._memory is not None:
            self._memory.resume()
        self._is_open.set()

    async def check(self) -> None:
        """Look whether everything is as it was made; requests are answered meanwhile."""
        digest = hashlib.blake2b(digest_size=16)
        for piece in self._pieces():
            digest.update(piece)
            await asyncio.sleep(0)
        if digest.hexdigest() != self._digest:
            raise RuntimeError("the memory of this server is not what it was")


async def serve(arguments: argparse.Namespace, handshake: Handshake | None) -> None:
    """Serve for ever, and be captured on the way."""
    counting = CountingServer(arguments.mebibytes, arguments.warm_up, arguments.external_mebibytes)
    async with await answering(counting.answer, arguments.host, arguments.port) as server:
        print(f"listening on port {server.sockets[0].getsockname()[1]}", flush=True)
        if handshake is not None:
            await counting.is_warm.wait()
            if await park_async(handshake, counting) is Outcome.RESTORED:
                handshake.announce_restored()
        await server.serve_forever()


def main() -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free")
    parser.add_argument("--mebibytes", type=int, default=64, help="how much to keep in memory")
    parser.add_argument(
        "--external-mebibytes", type=int, default=0, help="how much to keep with the agent's broker"
    )
    parser.add_argument("--warm-up", type=int, default=0, metavar="N", help="requests before ready")
    arguments = parser.parse_args()
    handshake = Handshake.from_environment(FRAMEWORK)
    if handshake is not None:
        if handshake.standby:
            handshake.stand_by()
        handshake.begin()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(arguments, handshake))


if __name__ == "__main__":
    main()
