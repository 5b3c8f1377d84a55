"""An agent with a broker, to be killed in a capture: `memory_agent SOCKET URL FOLDER PID NAME`.

Starts the broker, says so, waits for a line, captures, and says when the capture has made progress.
"""

import dataclasses
import sys
from pathlib import Path

import snapstore
from snapagent.capture import CaptureRequest, capture
from snapagent.config import AgentConfig
from snapagent.memory.broker import MemoryBroker


def main(path: str, url: str, folder: str, pid: str, name: str) -> None:
    """Do it."""
    config = dataclasses.replace(
        AgentConfig.from_environment(),
        run_directory=Path(folder, "run"),
        state_directory=Path(folder, "state"),
    )
    with MemoryBroker(Path(path)) as broker, snapstore.open_store(url) as store:
        print("ready", flush=True)  # noqa: T201 - to the test
        sys.stdin.readline()
        request = CaptureRequest(pid=int(pid), name=name, broker=broker)
        told: list[object] = []

        def tell(progress: object) -> None:
            if not told:
                print("capturing", flush=True)  # noqa: T201 - to the test
            told.append(progress)

        capture(store, request, config, tell)


if __name__ == "__main__":
    main(*sys.argv[1:])
