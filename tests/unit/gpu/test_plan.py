"""Which GPUs take the places of those of a snapshot, and what stands in the way."""

import itertools
import os
from collections.abc import Callable

import msgspec
import pytest

from snapagent.gpu.driver import Driver
from snapagent.gpu.facts import CudaFacts, cuda_facts
from snapagent.gpu.owned import GpuMemory
from snapagent.preflight import GpuPlan, Obstacles, plan_gpus
from tests.support.gpu import emulated_driver

MIB = 1 << 20
_seeds = itertools.count((os.getpid() << 8) + 192)
Here = Callable[..., Driver]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Here:
    """Let this process be on a machine with some GPUs from now on."""

    def enter(**settings: int) -> Driver:
        seed = settings.pop("seed", next(_seeds) & 0x7FFFFFFF)
        name = f"plan-{seed}-{abs(hash(tuple(settings.items())))}"
        return emulated_driver(monkeypatch, name, seed=seed, **settings)

    return enter


def plan(
    facts: CudaFacts | None, needed: dict[str, int], *, change: bool = False
) -> tuple[GpuPlan, list[str]]:
    found = Obstacles()
    chosen = plan_gpus(found, facts, needed, GpuMemory(), allow_driver_change=change)
    return chosen, [f"{'' if one.blocking else 'warning '}{one.code}" for one in found.result()]


def uuids(driver: Driver) -> list[str]:
    return [device.uuid for device in driver.devices]


def test_without_gpu_state_nothing_is_asked(here: Here) -> None:
    here(devices=0)
    assert plan(None, {}) == (GpuPlan(), [])


def test_each_stays_where_it_is_if_it_can(here: Here) -> None:
    driver = here(devices=3)
    one, two, three = uuids(driver)
    facts = cuda_facts(driver, [7])
    chosen, codes = plan(facts, {two: 4 * MIB})
    assert codes == []
    assert chosen.devices == {one: one, two: two, three: three}
    assert chosen.changed == {}


@pytest.mark.slow
def test_two_change_places_where_one_is_full(here: Here) -> None:
    driver = here(devices=2, memory=64 * MIB)
    one, two = uuids(driver)
    facts = cuda_facts(driver, [7])
    handle = driver.create_memory(0, 60 * MIB)
    chosen, codes = plan(facts, {one: 32 * MIB})
    assert codes == []
    assert chosen.changed == {one: two, two: one}
    handles = [handle, driver.create_memory(1, 60 * MIB)]
    chosen, codes = plan(facts, {one: 32 * MIB})
    assert codes == ["gpu-memory"]
    assert chosen.devices[one] == one
    for each in handles:
        driver.release_memory(each)


def test_only_those_with_memory_have_to_be_there(here: Here) -> None:
    facts = cuda_facts(here(devices=2), [7])
    one, two = (gpu.uuid for gpu in facts.gpus)
    (there,) = uuids(here(devices=1))
    chosen, codes = plan(facts, {two: 4 * MIB})
    assert codes == []
    assert chosen.devices == {two: there}
    assert plan(facts, {one: 4 * MIB, two: 4 * MIB})[1] == ["gpu-model"]
    # Nobody knows which of them the driver's state needs.
    assert plan(facts, {})[1] == ["gpu-model"]


@pytest.mark.parametrize("settings", [{"model": 1}, {"memory": 32 * MIB}], ids=["model", "size"])
def test_others_do_not_fit(here: Here, settings: dict[str, int]) -> None:
    facts = cuda_facts(here(memory=64 * MIB), [7])
    here(**({"memory": 64 * MIB} | settings))
    assert plan(facts, {})[1] == ["gpu-model"]


def test_another_driver_is_a_warning_if_it_is_allowed(here: Here) -> None:
    facts = cuda_facts(here(seed=next(_seeds)), [7])
    older = msgspec.structs.replace(facts, cuda=12080, driver="570.1")
    assert plan(older, {})[1] == ["cuda-driver"]
    assert plan(older, {}, change=True)[1] == ["warning cuda-driver"]


def test_what_the_snapshot_does_not_describe_is_refused(here: Here) -> None:
    driver = here()
    nobody = "GPU-ffffffff-ffff-ffff-ffff-ffffffffffff"
    assert plan(None, {nobody: MIB})[1] == ["gpu-unknown"]
    assert plan(cuda_facts(driver, [7]), {nobody: MIB})[1] == ["gpu-unknown"]


def test_without_a_driver_it_is_refused(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = cuda_facts(here(), [7])
    monkeypatch.setenv("SNAPAGENT_LIBCUDA", "/nowhere/libcuda.so.1")
    assert plan(facts, {})[1] == ["cuda-missing"]
