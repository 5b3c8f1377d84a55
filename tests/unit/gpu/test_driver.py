"""The typed driver against the emulated one, whose errors are those that CUDA documents."""

import itertools
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapagent.errors import GpuFailed, GpuOutOfMemory, GpuUnavailable
from snapagent.gpu.driver import (
    U32,
    U64,
    Driver,
    Gpu,
    address_of,
    format_uuid,
    load_driver,
    memory_at,
    parse_uuid,
)
from tests.support.gpu import EMULATOR, compiler, counter, emulated_driver

MIB = 1 << 20
GRAIN = 2 * MIB
_seeds = itertools.count(os.getpid() << 8)

KERNEL = """
#include "emulated_cuda.h"
const uint32_t add__sizes[] = {8, 4, 4, 0};
void add__block(const EmulatedLaunch *launch, void **arguments) {
  unsigned char *bytes = *(unsigned char **)arguments[0];
  uint32_t length = *(uint32_t *)arguments[1], by = *(uint32_t *)arguments[2];
  for (uint32_t thread = 0; thread < launch->block_dim.x; thread++) {
    uint32_t at = launch->block.x * launch->block_dim.x + thread;
    if (at < length) bytes[at] += by;
  }
}
"""


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Two devices of 64 MiB, none of which another test uses."""
    seed = next(_seeds)
    return emulated_driver(
        monkeypatch, f"driver-{seed}", devices=2, memory=64 * MIB, seed=seed, delay_us=2000
    )


@pytest.fixture
def gpu(driver: Driver) -> Iterator[Gpu]:
    with driver.open(0) as opened:
        yield opened


def test_without_a_driver_it_is_said_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(GpuUnavailable, match="cannot be loaded") as caught:
        load_driver(str(tmp_path / "libcuda.so.1"))
    assert "NVIDIA driver" in caught.value.next_step


def test_without_a_device_it_is_said_how_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = emulated_driver(monkeypatch, f"none-{next(_seeds)}", devices=0)
    assert driver.devices == ()
    with pytest.raises(GpuUnavailable, match="no GPU 0"):
        driver.open(0)


def test_devices_have_uuids_that_can_be_read_again(driver: Driver) -> None:
    assert [one.ordinal for one in driver.devices] == [0, 1]
    assert driver.version == 13000
    for one in driver.devices:
        assert format_uuid(parse_uuid(one.uuid)) == one.uuid
        assert driver.device(one.uuid) is one
        assert one.total_bytes == 64 * MIB
    with pytest.raises(GpuUnavailable, match="no GPU GPU-0"):
        driver.device("GPU-0")
    with pytest.raises(ValueError, match="no UUID"):
        parse_uuid("GPU-" + "0" * 32)


def test_bytes_go_to_the_device_and_back(driver: Driver, gpu: Gpu) -> None:
    stream, event = gpu.stream_create(), gpu.event_create()
    source, sink = gpu.host_alloc(GRAIN), gpu.host_alloc(GRAIN)
    memory_at(source, GRAIN)[:] = data = os.urandom(GRAIN)
    fd = driver.make_memory_file(0, 2 * GRAIN)
    try:
        with gpu.mapped(fd, 2 * GRAIN) as address:
            gpu.copy_in(address, source, GRAIN, stream)
            gpu.copy_within(address + GRAIN, address, GRAIN, stream)
            gpu.fill(address + GRAIN, 7, 10, stream)
            gpu.copy_out(sink, address + GRAIN, GRAIN, stream)
            gpu.event_record(event, stream)
            assert not gpu.event_is_done(event)
            assert not gpu.stream_is_done(stream)
            gpu.event_synchronize(event)
            assert gpu.event_is_done(event)
            assert memory_at(sink, GRAIN) == b"\x07" * 10 + data[10:]
            gpu.synchronize()
    finally:
        os.close(fd)
    assert counter(driver, "bytes_in") == GRAIN
    assert counter(driver, "pageable_bytes_in") == 0
    for address in (source, sink):
        gpu.host_free(address)
    gpu.event_destroy(event)
    gpu.stream_destroy(stream)


def test_memory_that_is_not_locked_is_counted(driver: Driver, gpu: Gpu) -> None:
    pageable = bytearray(os.urandom(GRAIN))
    fd = driver.make_memory_file(0, GRAIN)
    with gpu.mapped(fd, GRAIN) as address, memoryview(pageable) as view:
        host = address_of(view)
        gpu.copy_in(address, host, GRAIN, 0)
        assert counter(driver, "pageable_bytes_in") == GRAIN
        gpu.host_register(host, GRAIN)
        with pytest.raises(GpuFailed, match="HOST_MEMORY_ALREADY_REGISTERED"):
            gpu.host_register(host, GRAIN)
        gpu.copy_in(address, host, GRAIN, 0)
        assert counter(driver, "pageable_bytes_in") == GRAIN
        gpu.synchronize()
        gpu.host_unregister(host)
        with pytest.raises(GpuFailed, match="HOST_MEMORY_NOT_REGISTERED"):
            gpu.host_unregister(host)
    os.close(fd)


def test_a_stream_waits_for_what_another_one_does(driver: Driver, gpu: Gpu) -> None:
    first, second, event = gpu.stream_create(), gpu.stream_create(), gpu.event_create()
    sink = gpu.host_alloc(GRAIN)
    fd = driver.make_memory_file(0, GRAIN)
    with gpu.mapped(fd, GRAIN) as address:
        gpu.fill(address, 1, GRAIN, first)
        gpu.fill(address, 2, GRAIN, first)
        gpu.event_record(event, first)
        gpu.stream_wait_event(second, event)
        gpu.copy_out(sink, address, GRAIN, second)
        gpu.stream_synchronize(second)
        assert memory_at(sink, GRAIN) == b"\x02" * GRAIN
    os.close(fd)
    gpu.host_free(sink)


def test_memory_is_used_for_as_long_as_anybody_has_it(driver: Driver, gpu: Gpu) -> None:
    handle = driver.create_memory(0, 16 * GRAIN)
    assert gpu.memory_info() == (64 * MIB - 16 * GRAIN, 64 * MIB)
    fd = driver.export_memory(handle)
    driver.release_memory(handle)
    with pytest.raises(GpuFailed, match="cuMemRelease failed with CUDA_ERROR_INVALID_VALUE"):
        driver.release_memory(handle)
    assert gpu.memory_info()[0] == 32 * MIB
    with gpu.mapped(fd, 16 * GRAIN):
        os.close(fd)
        assert gpu.memory_info()[0] == 32 * MIB
    assert gpu.memory_info()[0] == 64 * MIB


def test_a_device_has_no_more_memory_than_it_has(driver: Driver) -> None:
    with pytest.raises(GpuOutOfMemory, match="GPU 1") as caught:
        driver.create_memory(1, 66 * MIB)
    assert caught.value.function == "cuMemCreate"
    assert caught.value.error_name == "CUDA_ERROR_OUT_OF_MEMORY"
    with pytest.raises(GpuFailed, match="INVALID_VALUE"):
        driver.create_memory(1, MIB)
    with pytest.raises(GpuFailed, match="INVALID_DEVICE"):
        driver.create_memory(2, GRAIN)


def test_mappings_are_checked(driver: Driver, gpu: Gpu) -> None:
    handle = driver.create_memory(0, GRAIN)
    address = driver.reserve(2 * GRAIN)
    with pytest.raises(GpuFailed, match="INVALID_VALUE"):
        driver.map(address + 4 * GRAIN, GRAIN, handle, [0])
    with pytest.raises(GpuFailed, match="INVALID_VALUE"):
        driver.map(address + 4096, GRAIN, handle, [0])
    driver.map(address, GRAIN, handle, [0])
    with pytest.raises(GpuFailed, match="INVALID_VALUE"):
        driver.map(address, GRAIN, handle, [0])
    with pytest.raises(GpuFailed, match="INVALID_VALUE"):
        driver.unmap(address + GRAIN, 4 * GRAIN)
    with pytest.raises(GpuFailed, match="INVALID_VALUE"):
        driver.free_addresses(address, 2 * GRAIN)
    gpu.fill(address, 0, GRAIN, 0)
    with pytest.raises(GpuFailed, match="INVALID_VALUE"):
        gpu.fill(address + GRAIN, 0, GRAIN, 0)
    gpu.synchronize()
    driver.unmap(address, GRAIN)
    assert driver.reserve(2 * GRAIN, address=address) != address
    driver.free_addresses(address, 2 * GRAIN)
    assert driver.reserve(2 * GRAIN, address=address) == address
    driver.free_addresses(address, 2 * GRAIN)
    driver.release_memory(handle)


def test_what_is_no_device_memory_is_not_imported(driver: Driver, tmp_path: Path) -> None:
    with (tmp_path / "file").open("w+b") as file:
        file.truncate(GRAIN)
        with pytest.raises(GpuFailed, match="cuMemImportFromShareableHandle"):
            driver.import_memory(file.fileno())


def test_unmapping_what_a_stream_still_uses_is_found(driver: Driver, gpu: Gpu) -> None:
    """The context is broken from then on, as after an illegal access on a GPU."""
    fd = driver.make_memory_file(0, GRAIN)
    with gpu.mapped(fd, GRAIN) as address:
        gpu.fill(address, 1, GRAIN, 0)
    os.close(fd)
    with pytest.raises(GpuFailed, match="ILLEGAL_ADDRESS"):
        gpu.synchronize()


def test_a_kernel_that_was_compiled_for_the_host_runs(
    driver: Driver, gpu: Gpu, tmp_path: Path
) -> None:
    source, library = tmp_path / "kernel.c", tmp_path / "kernel.so"
    source.write_text(KERNEL)
    command = [compiler(), "-shared", "-fPIC", f"-I{EMULATOR}", "-o", str(library), str(source)]
    subprocess.run(command, check=True)  # noqa: S603 - the compiler
    module = gpu.module_load(f"EMULATED-CUDA:{library}".encode())
    function = gpu.module_function(module, "add")
    with pytest.raises(GpuFailed, match="NOT_FOUND"):
        gpu.module_function(module, "subtract")
    fd, sink, stream = driver.make_memory_file(0, GRAIN), gpu.host_alloc(GRAIN), gpu.stream_create()
    with gpu.mapped(fd, GRAIN) as address:
        gpu.fill(address, 1, GRAIN, stream)
        arguments = [U64(address), U32(1000), U32(4)]
        gpu.launch(function, (4, 1, 1), (256, 1, 1), arguments, stream)
        gpu.copy_out(sink, address, GRAIN, stream)
        gpu.stream_synchronize(stream)
        assert memory_at(sink, GRAIN)[:1001] == b"\x05" * 1000 + b"\x01"
    os.close(fd)
    gpu.module_unload(module)


def test_a_gpu_that_was_closed_is_not_used(driver: Driver) -> None:
    gpu = driver.open(0)
    gpu.close()
    gpu.close()
    with pytest.raises(GpuFailed, match="INVALID_CONTEXT"):
        gpu.memory_info()
