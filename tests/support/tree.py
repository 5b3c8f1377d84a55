"""Start the tree of four processes, talk to it in any of its lives, and end it.

See `programs/tree_of_four.py` for what it holds and answers.
"""

import json
import os
import secrets
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from snapstore.units import MIB
from tests.support.lives import Living
from tests.support.programs.tree_parts import WRONG

ROOT = Path(__file__).parents[2]
PROGRAM = "tests.support.programs.tree_of_four"
CONTROL = "control"
MEMBERS = 4
ANSWER_S_MAX = 120

Answer = dict[str, Any]

# What CRIU needs to know before it dumps the tree, and again for its restore.
CRIU_OPTIONS = ("--tcp-established", "--network-lock", "nftables", "--ghost-limit", "1G")


@dataclass(frozen=True)
class TreeSizes:
    """How much a tree holds; the defaults are for tests that should be quick."""

    first_bytes: int = 4 * MIB
    """Private memory of the first process."""
    bytes: int = 2 * MIB
    """Private memory of each of the other three."""
    shared_bytes: int = MIB
    """Each of three kinds of shared memory."""
    threads: int = 3


class ProcessTree(Living):
    """Four processes made to be dumped. Leaving the context ends them, in whatever life."""

    def __init__(
        self,
        home: Path,
        sizes: TreeSizes | None = None,
        *,
        seed: int = 1,
        command: tuple[str, ...] = (),
        abstract: bool = False,
    ) -> None:
        """Start it in `home`, an existing folder; returns when it answers.

        It leads a session and has files as standard streams. `command` stands before it and has to
        execute it in place, such as `unshare --ipc`. With an abstract control socket several of
        its lives can be asked at once, each from within its own network.
        """
        sizes = sizes or TreeSizes()
        arguments = {
            "first-bytes": sizes.first_bytes,
            "bytes": sizes.bytes,
            "shared-bytes": sizes.shared_bytes,
            "threads": sizes.threads,
            "seed": seed,
        }
        self._abstract = f"tree-{secrets.token_hex(8)}" if abstract else None
        options = [f"--{name}={value}" for name, value in arguments.items()]
        options += [f"--control=@{self._abstract}"] if abstract else []
        self.begin(
            home,
            [*command, sys.executable, "-m", PROGRAM, *options],
            {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        )

    @override
    def answers(self) -> bool:
        """Tell whether somebody listens, without waiting."""
        try:
            with self._connection():
                return True
        except OSError:
            return False

    def responds(self) -> bool:
        """Tell whether a request is answered. While CRIU restores the listener, some are not."""
        try:
            self.ask("ping")
        except (OSError, ValueError):
            return False
        return True

    def _connection(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(ANSWER_S_MAX)
        # Through a descriptor, since its path may be longer than an address.
        home = os.open(self.home, os.O_PATH)
        path = f"/proc/self/fd/{home}/{CONTROL}"
        try:
            connection.connect(path if self._abstract is None else f"\0{self._abstract}")
        except BaseException:
            connection.close()
            raise
        finally:
            os.close(home)
        return connection

    def ask(self, request: str, **details: object) -> Answer:
        """Send one request and return its answer; fails when it tells of a problem."""
        with self._connection() as connection, connection.makefile("rwb") as stream:
            stream.write(json.dumps({"do": request, **details}).encode() + b"\n")
            stream.flush()
            line = stream.readline()
        if not line:
            raise ConnectionError(f"the tree ended while it was asked to {request}")
        answer: Answer = json.loads(line)
        if answer["problems"]:
            raise AssertionError("\n".join(answer["problems"]))
        return answer

    def check(self, *, blocks: int | None = None) -> Answer:
        """Let all four verify everything, of their memory at most so many blocks each."""
        answer = self.ask("check", blocks=blocks)
        assert [member["number"] for member in answer["members"]] == list(range(MEMBERS))
        return answer

    def wrong_memory(self) -> str:
        """Return what its processes have ever seen in their memory that was not right."""
        path = self.home / WRONG
        return path.read_text(encoding="utf-8") if path.exists() else ""
