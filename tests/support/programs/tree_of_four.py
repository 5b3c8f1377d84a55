"""Four processes that hold one of everything and check themselves, made to be dumped and restored.

The first forks the other three. They have threads, private and shared memory, pipes, TCP
connections between all of them, a semaphore, open files, one of them deleted. Requests come as
lines of JSON to the Unix socket `control` in the working directory, which is found by its path and
so also from another network or process namespace. With `--control=@NAME` it is an abstract socket
instead, of which each network namespace may have its own.

`{"do": "ping"}`                        answer without touching anything
`{"do": "check", "blocks": N}`          verify everything; of the memory N random blocks, or all
`{"do": "touch", "bytes": N}`           rewrite short runs of pages in each process
`{"do": "grow", "bytes": N}`            map and fill more memory in each process
`{"do": "discard"}`, `"move"`, `"release"`   let the kernel drop, move, unmap memory in each process
`{"do": "fork"}`                        fork in each process; the child verifies what it inherited
`{"do": "zombie"}`                      have one more child, dead and not waited for
`{"do": "quit"}`                        end

Each answer has `problems`, which is empty when all is well, and `members`, one entry a process.
"""

import argparse
import contextlib
import json
import multiprocessing
import multiprocessing.synchronize
import os
import socket
from typing import TYPE_CHECKING, Any, BinaryIO

from tests.support.programs.tree_parts import (
    PATIENCE_S,
    Counters,
    Files,
    Memory,
    Mesh,
    Queued,
    SharedMemory,
    shared_memories,
)

if TYPE_CHECKING:
    from collections.abc import Callable

MEMBERS = 4
CONTROL = "control"

Message = dict[str, Any]


class Lines:
    """JSON messages over a pair of pipes, one a line."""

    def __init__(self, incoming: int, outgoing: int) -> None:
        self._incoming: BinaryIO = os.fdopen(incoming, "rb")
        self._outgoing: BinaryIO = os.fdopen(outgoing, "wb", buffering=0)

    def send(self, message: Message) -> None:
        """Write one message."""
        self._outgoing.write(json.dumps(message).encode() + b"\n")

    def receive(self) -> Message:
        """Read one message; ends this process when the other side is gone."""
        line = self._incoming.readline()
        if not line:
            os._exit(0)
        message: Message = json.loads(line)
        return message


class Member:
    """One process of the tree: what it holds, and what it can be asked."""

    def __init__(
        self,
        number: int,
        settings: argparse.Namespace,
        shared: list[SharedMemory],
        tokens: multiprocessing.synchronize.Semaphore,
    ) -> None:
        seed = settings.seed * MEMBERS + number
        self._number = number
        self._shared = shared
        self._tokens = tokens
        self._ids = (os.getpid(), os.getppid())
        self._dead_child: int | None = None
        self.mesh = Mesh()
        self._files = Files(number, seed)
        self._queued = Queued(seed)
        self._memory = Memory(seed)
        # In two parts, so that one can be unmapped.
        size = settings.bytes if number else settings.first_bytes
        self._memory.grow(size - size // 4)
        self._memory.grow(size // 4)
        self._counters = Counters(number, settings.threads, shared)

    def join(self, ports: list[int]) -> None:
        """Connect to the other processes, all of whose ports are known now, and count."""
        self.mesh.connect(ports[: self._number], MEMBERS - 1 - self._number)
        self._counters.start()

    def answer(self, request: Message) -> Message:
        """Do what is asked, and return what it found and how this process sees itself."""
        actions: dict[str, Callable[[Message], list[str] | None]] = {
            "ping": lambda _: None,
            "check": self._check,
            "touch": lambda request: self._memory.touch(request["bytes"]),
            "grow": lambda request: self._memory.grow(request["bytes"]),
            "discard": lambda _: self._memory.discard(),
            "move": lambda _: self._memory.move(),
            "release": lambda _: self._memory.release(),
            "fork": self._fork,
            "zombie": self._zombie,
            "quit": lambda _: None,
        }
        try:
            problems = actions[request["do"]](request) or []
        except Exception as error:  # noqa: BLE001 - told to whoever asked
            problems = [f"{request} failed: {error!r}"]
        return {
            "number": self._number,
            "pid": os.getpid(),
            "ticks": sum(self._counters.counts),
            "memory_bytes": self._memory.size_bytes(),
            "problems": [f"process {self._number}: {problem}" for problem in problems],
        }

    def _check(self, request: Message) -> list[str]:
        others = [number for number in range(MEMBERS) if number != self._number]
        found = self._memory.problems(blocks=request.get("blocks"))
        for shared in self._shared:
            found += shared.problems(others)
        for part in (self._counters, self.mesh, self._files, self._queued):
            found += part.problems()
        if not self._tokens.acquire(timeout=PATIENCE_S):
            found.append("the semaphore gives nothing")
        if (os.getpid(), os.getppid() if self._number else self._ids[1]) != self._ids:
            found.append(f"its ids were {self._ids} and are {(os.getpid(), os.getppid())}")
        if self._dead_child is not None and not self._is_zombie(self._dead_child):
            found.append(f"its dead child {self._dead_child} is no zombie")
        return found

    @staticmethod
    def _is_zombie(pid: int) -> bool:
        with contextlib.suppress(ChildProcessError):
            return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        return False

    def _fork(self, request: Message) -> list[str]:
        child = os.fork()
        if child == 0:
            os._exit(1 if self._memory.problems(blocks=request.get("blocks")) else 0)
        _, status = os.waitpid(child, 0)
        return [f"a forked child ended with status {status}"] if status else []

    def _zombie(self, _: Message) -> None:
        self._dead_child = os.fork()
        if self._dead_child == 0:
            os._exit(0)
        os.waitid(os.P_PID, self._dead_child, os.WEXITED | os.WNOWAIT)


class Tree:
    """The first process: it asks the others through their pipes."""

    def __init__(self, settings: argparse.Namespace) -> None:
        self._shared = shared_memories(settings.shared_bytes, settings.seed)
        # Made, and its name removed at once; the children inherit it.
        self._tokens = multiprocessing.get_context("fork").Semaphore(0)
        self._children = [self._start(number, settings) for number in range(1, MEMBERS)]
        self._self = Member(0, settings, self._shared, self._tokens)
        ports = [self._self.mesh.port, *(child.receive()["port"] for child in self._children)]
        for child in self._children:
            child.send({"ports": ports})
        self._self.join(ports)
        for child in self._children:
            child.receive()

    def _start(self, number: int, settings: argparse.Namespace) -> Lines:
        requests, answers = os.pipe(), os.pipe()
        if os.fork() == 0:
            os.close(requests[1])
            os.close(answers[0])
            be_a_child(
                Member(number, settings, self._shared, self._tokens), Lines(requests[0], answers[1])
            )
        os.close(requests[0])
        os.close(answers[1])
        return Lines(answers[0], requests[1])

    def answer(self, request: Message) -> Message:
        """Let all four do what is asked, at the same time."""
        if request["do"] == "check":
            for _ in range(MEMBERS):
                self._tokens.release()
        # One process has the dead child, and others need not fill its part of the answer.
        children = [] if request["do"] in {"ping", "zombie"} else self._children
        for child in children:
            child.send(request)
        members = [self._self.answer(request), *(child.receive() for child in children)]
        problems = [problem for member in members for problem in member["problems"]]
        return {"members": members, "problems": problems}


def be_a_child(member: Member, lines: Lines) -> None:
    """Serve the first process until it is gone."""
    lines.send({"port": member.mesh.port})
    member.join(lines.receive()["ports"])
    lines.send({})
    while True:
        request = lines.receive()
        lines.send(member.answer(request))
        if request["do"] == "quit":
            os._exit(0)


def serve(tree: Tree, listener: socket.socket) -> None:
    """Answer one connection after the other, until one says `quit`."""
    while True:
        connection, _ = listener.accept()
        with connection, connection.makefile("rwb") as stream:
            for line in stream:
                request = json.loads(line)
                stream.write(json.dumps(tree.answer(request)).encode() + b"\n")
                stream.flush()
                if request["do"] == "quit":
                    return


def address(control: str) -> str:
    """Return what a socket is bound to; a name that begins with `@` is an abstract one."""
    return "\0" + control[1:] if control.startswith("@") else control


def main() -> None:
    """Be the first process of the tree."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--first-bytes", type=int, required=True)
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--shared-bytes", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--control", default=CONTROL)
    settings = parser.parse_args()
    tree = Tree(settings)
    # By a relative name: the folder may have a longer one than an address has room for.
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address(settings.control))
        listener.listen(16)
        serve(tree, listener)


if __name__ == "__main__":
    main()
