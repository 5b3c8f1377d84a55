"""Disks that are really full, mounts that are really read-only: with root, in a namespace."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.damage import REPOSITORY

pytestmark = pytest.mark.slow

HUGE_PAGES = 14

IN_NAMESPACE = ["unshare", "--mount", "--propagation", "private"]


@pytest.fixture(scope="module")
def namespace() -> list[str]:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([*IN_NAMESPACE, "true"], check=False).returncode:  # noqa: S603
        pytest.skip("no mount namespaces here")
    return IN_NAMESPACE


@pytest.fixture
def huge_pages() -> Iterator[None]:
    """Reserve huge pages of 2 MiB for a while."""
    number = Path("/proc/sys/vm/nr_hugepages")
    try:
        before = number.read_text("ascii")
        number.write_text(str(int(before) + HUGE_PAGES), "ascii")
    except OSError:
        pytest.skip("huge pages cannot be reserved here")
    try:
        if int(number.read_text("ascii")) != int(before) + HUGE_PAGES:
            pytest.skip("there are not enough huge pages")
        if "Hugepagesize:       2048 kB" not in Path("/proc/meminfo").read_text("ascii"):
            pytest.skip("huge pages have another size")
        yield
    finally:
        number.write_text(before, "ascii")


@pytest.mark.usefixtures("huge_pages")
def test_huge_pages(namespace: list[str], tmp_path: Path) -> None:
    """See `mounted_store.cache_huge`."""
    run_in(namespace, tmp_path, "cache_huge")


@pytest.mark.parametrize(
    "world", ["push_full", "pull_full", "readonly", "spool_full", "cache_full", "cache_unusable"]
)
def test_a_real_mount(namespace: list[str], tmp_path: Path, world: str) -> None:
    """What each world shows is said in `mounted_store.py`."""
    run_in(namespace, tmp_path, world)


def run_in(namespace: list[str], folder: Path, world: str) -> None:
    """Run a world, which must hold."""
    script = Path(__file__).with_name("mounted_store.py")
    result = subprocess.run(  # noqa: S603
        [*namespace, sys.executable, script, world, folder],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},  # noqa: TID251 - the child's, whole
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
