"""Two hours of bad weather in simulated time: several clients, one store, and what must be true.

The seed of each world is printed; `python -m tools.simulate --seed N --hours 2` repeats it.
"""

import random
from pathlib import Path

import pytest

from snapstore.testing.simulation import Simulation

pytestmark = pytest.mark.slow

HOURS = 2.0
WORLDS = 3


@pytest.mark.parametrize("world", range(WORLDS))
def test_two_hours_of_bad_weather(tmp_path: Path, rng: random.Random, world: int) -> None:
    """What was reported is there, nothing else is visible, and little is sent twice.

    Proves: I1, I2, I3, I4, I8, C1, C3, C4, S4, S6.
    """
    (tmp_path / "world").mkdir()
    seed = rng.getrandbits(32) + world
    print(f"repeat with: python -m tools.simulate --seed {seed} --hours {HOURS:g}")  # noqa: T201
    report = Simulation(seed, tmp_path / "world", hours=HOURS).run()
    print(report)  # noqa: T201
    assert report.simulated_s >= HOURS * 3600
    for event in ("pushes", "pulls", "listings", "failure", "lost reply", "old listing"):
        assert report.events[event], event
