"""Two hours of bad weather in simulated time: several clients, one store, and what must be true.

The seed of each world is printed; `python -m tools.simulate --seed N --hours 2` repeats it.
"""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from snapstore.backend.base import Backend, ObjectKind
from snapstore.repository import chains, write_session
from snapstore.testing.simulation import PromiseBroken, Simulation

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


# -- it notices -----------------------------------------------------------------------------------


def believes_listings(patch: pytest.MonkeyPatch) -> None:
    """Generations after the newest one listed are not looked for (C3)."""
    patch.setattr(chains, "_exists", lambda *_: False)


def stores_nothing(patch: pytest.MonkeyPatch) -> None:
    """Root manifests are reported and not stored (I3)."""
    put = write_session.WriteSession.put

    def forget(
        self: write_session.WriteSession, kind: ObjectKind, name: str, built: write_session.Built
    ) -> None:
        if kind is not ObjectKind.SNAPSHOT:
            put(self, kind, name, built)

    patch.setattr(write_session.WriteSession, "put", forget)


def forgets_what_was_sent(patch: pytest.MonkeyPatch) -> None:
    """No index is ever found, so everything is sent again (I4)."""
    load = write_session.Catalog.load

    def nothing(self: write_session.Catalog, backend: Backend, **_: object) -> object:
        return load(self, _NoIndexes(backend))

    patch.setattr(write_session.Catalog, "load", nothing)


class _NoIndexes:
    """A storage whose listings are empty."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def list(self, *_: object) -> list[object]:
        return []


@pytest.mark.parametrize("bug", [believes_listings, stores_nothing, forgets_what_was_sent])
def test_it_notices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bug: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """Goal: the simulation has teeth. Method: break the library, and let worlds find it out."""
    bug(monkeypatch)

    def find_out() -> None:
        for seed in range(10):
            world = tmp_path / str(seed)
            world.mkdir()
            Simulation(f"planted {seed}", world, hours=HOURS).run()

    with pytest.raises(PromiseBroken):
        find_out()
