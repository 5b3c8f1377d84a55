"""Storage with weather: what goes wrong is a function of the seed, and does what it is called."""

import collections
import random
from collections.abc import Callable

import pytest

from snapstore.backend.base import ObjectKind
from snapstore.backend.memory import MemoryBackend, MemoryObjects
from snapstore.errors import ObjectNotFound, TransientBackendError
from snapstore.testing.clock import ManualClock
from snapstore.testing.faults import Killed
from snapstore.testing.weather import Climate, Forecast, StormyBackend

CALM = {"fail": 0.0, "lose_reply": 0.0, "kill": 0.0, "stall": 0.0, "stale_share": 0.0}
NAME = "team/@v1/00000001"


class Place:
    """A storage in memory, a clock, and clients of a climate."""

    def __init__(self, seed: int = 1, *, calm_s: float = 1e12, **climate: float) -> None:
        self.clock = ManualClock()
        chosen = Climate(**{**CALM, **climate}, calm_s=calm_s)
        self.forecast = Forecast(seed, chosen, start_s=0, hours=2)
        self.inner = MemoryBackend(MemoryObjects(), clock=self.clock)

    def client(
        self, name: str = "1", meanwhile: Callable[[random.Random], None] = lambda _: None
    ) -> StormyBackend:
        return StormyBackend(self.inner, name, self.forecast, self.clock, meanwhile=meanwhile)

    def is_there(self) -> bool:
        try:
            self.inner.stat(ObjectKind.REF, NAME)
        except ObjectNotFound:
            return False
        return True


def put(client: StormyBackend) -> None:
    client.put_new(ObjectKind.REF, NAME, [b"body"])


def outcomes(place: Place, client: str) -> list[str]:
    found = []
    backend = place.client(client)
    for _ in range(60):
        try:
            put(backend)
            found.append("")
        except (TransientBackendError, Killed) as error:
            found.append(str(error))
    return found


def test_the_seed_decides() -> None:
    climate = {"fail": 0.2, "lose_reply": 0.2, "kill": 0.01}
    one = outcomes(Place(7, **climate), "a")
    assert one == outcomes(Place(7, **climate), "a")
    assert one != outcomes(Place(8, **climate), "a")
    assert one != outcomes(Place(7, **climate), "b")
    assert Place(7, calm_s=600).forecast.outages == Place(7, calm_s=600).forecast.outages != []


def test_calm_weather_only_takes_time() -> None:
    place = Place()
    client = place.client()
    put(client)
    into = bytearray(4)
    client.get_range(ObjectKind.REF, NAME, 0, memoryview(into))
    assert into == b"body"
    assert client.stat(ObjectKind.REF, NAME).size_bytes == 4
    assert [info.name for info in client.list(ObjectKind.REF)] == [NAME]
    assert client.put_bytes == {ObjectKind.REF: 4}
    client.delete(ObjectKind.REF, NAME)
    assert not place.is_there()
    assert client.events == collections.Counter()
    assert 0 < place.clock.monotonic_s() < 5 * place.forecast.climate.latency_s_max
    assert client.capabilities == place.inner.capabilities
    client.close()


def test_failures_and_lost_replies() -> None:
    place = Place(fail=1.0)
    with pytest.raises(TransientBackendError, match="failed"):
        put(place.client())
    assert not place.is_there()
    place = Place(lose_reply=1.0)
    with pytest.raises(TransientBackendError, match="no reply"):
        put(place.client())
    assert place.is_there()


def test_the_dead_do_nothing_more() -> None:
    """A death is before or after the operation; nothing of that client happens later."""
    found = set()
    for seed in range(20):
        place = Place(seed, kill=1.0)
        client = place.client()
        with pytest.raises(Killed):
            put(client)
        found.add(place.is_there())
        with pytest.raises(Killed, match="dead already"):
            client.stat(ObjectKind.REF, NAME)
        assert client.events["death"] == 1
    assert found == {False, True}


def test_outages_stop_everybody() -> None:
    place = Place(calm_s=600)
    begin_s, end_s = place.forecast.outages[0]
    place.clock.advance_s(begin_s + 0.3)
    for name in ("1", "2"):
        with pytest.raises(TransientBackendError, match="no answer"):
            put(place.client(name))
    place.clock.advance_s(max(0.0, end_s - place.clock.monotonic_s()))
    put(place.client("3"))
    assert place.is_there()


def test_listings_are_old() -> None:
    place = Place(stale_share=1.0, stale_s_max=90)
    client = place.client()
    put(client)
    seen = [bool([*client.list(ObjectKind.REF)]) for _ in range(20)]
    assert False in seen
    place.clock.advance_s(90)
    assert [*client.list(ObjectKind.REF)]


def test_others_act_meanwhile() -> None:
    place = Place(stall=1.0)
    other = place.client("other")
    client = place.client(meanwhile=lambda _: other.put_new(ObjectKind.REF, NAME, [b"body"]))
    with pytest.raises(ObjectNotFound):
        client.stat(ObjectKind.REF, "team/@v1/00000002")
    assert place.is_there()
    assert client.events["stall"] == 1
