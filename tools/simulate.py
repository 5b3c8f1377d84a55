"""Simulate hours of bad weather, seed after seed; prints one line for each.

    python -m tools.simulate --seed 7 --hours 2
    python -m tools.simulate --seeds 1000 --hours 2

Ends with 1 at the first promise that is broken, and says with which seed.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import tempfile
from pathlib import Path

from snapstore.testing.simulation import Report, Simulation

__all__ = ["main", "simulate"]


def simulate(seed: int, hours: float) -> Report:
    """Run one world in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="snapstore-simulation-") as folder:
        return Simulation(seed, Path(folder), hours=hours).run()


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description="Simulate a store in bad weather.")
    parser.add_argument("--seed", type=int, default=None, help="the first; default: a new one")
    parser.add_argument("--seeds", type=int, default=1, help="how many, one after the other")
    parser.add_argument("--hours", type=float, default=2.0, help="simulated time of each")
    given = parser.parse_args()
    first = secrets.randbits(32) if given.seed is None else given.seed
    for seed in range(first, first + given.seeds):
        try:
            print(simulate(seed, given.hours), flush=True)
        finally:
            if sys.exc_info()[0] is not None:
                step = f"python -m tools.simulate --seed {seed} --hours {given.hours:g}"
                print(f"repeat with: {step}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
