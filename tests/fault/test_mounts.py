"""Disks that are really full, mounts that are really read-only: with root, in a namespace."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.damage import REPOSITORY

pytestmark = pytest.mark.slow

IN_NAMESPACE = ["unshare", "--mount", "--propagation", "private"]


@pytest.fixture(scope="module")
def namespace() -> list[str]:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([*IN_NAMESPACE, "true"], check=False).returncode:  # noqa: S603
        pytest.skip("no mount namespaces here")
    return IN_NAMESPACE


@pytest.mark.parametrize(
    "world", ["push_full", "pull_full", "readonly", "spool_full", "cache_full"]
)
def test_a_real_mount(namespace: list[str], tmp_path: Path, world: str) -> None:
    """What each world shows is said in `mounted_store.py`."""
    script = Path(__file__).with_name("mounted_store.py")
    result = subprocess.run(  # noqa: S603
        [*namespace, sys.executable, script, world, tmp_path],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},  # noqa: TID251 - the child's, whole
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
