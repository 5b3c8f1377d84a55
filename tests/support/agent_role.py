"""Plays an agent that will be killed: it starts a supervisor, runs a tree, and waits.

The argument is a JSON object with `place`, `work`, `reasons`, `argv`, `task`, `directories` and
`step`. It prints what the test has to know as one line of JSON, and ends when its input does.
"""

import json
import sys
import threading
from pathlib import Path

from snapagent.supervision import Place, Supervisor


def main() -> None:
    """Play it."""
    order = json.loads(sys.argv[1])
    supervisor = Supervisor.start(
        Place(**order["place"]),
        Path(order["work"]),
        task=order["task"],
        directories={name: Path(path) for name, path in order["directories"].items()},
        reason_file=Path(order["reasons"]),
    )
    if order["step"] == "running":
        # The program is still running when the agent is killed.
        threading.Thread(target=supervisor.run, args=(order["argv"],), daemon=True).start()
    else:
        supervisor.run(order["argv"])
    print(json.dumps({"pid": supervisor.pid, "keeper": supervisor.keeper_pid}), flush=True)  # noqa: T201
    sys.stdin.read()


if __name__ == "__main__":
    main()
