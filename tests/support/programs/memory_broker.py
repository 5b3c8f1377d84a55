"""A broker in a process of its own, to be killed: `memory_broker SOCKET`. Says when it is ready."""

import sys
from pathlib import Path

from snapagent.memory.broker import MemoryBroker

if __name__ == "__main__":
    with MemoryBroker(Path(sys.argv[1])):
        print("ready", flush=True)  # noqa: T201 - to the test
        sys.stdin.read()
