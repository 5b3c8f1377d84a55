"""A broker in a process of its own, to be killed: `memory_broker SOCKET`. Says who holds for it."""

import sys
from pathlib import Path

from snapagent.memory.broker import MemoryBroker

if __name__ == "__main__":
    with MemoryBroker(Path(sys.argv[1])) as broker:
        print(broker.holder_pid, flush=True)  # noqa: T201 - to the test
        sys.stdin.read()
