"""The emulated driver does what a real one was seen to do."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.gpu import EMULATOR, emulated_environment

ROOT = Path(__file__).parents[3]
SEEN = EMULATOR / "h200-driver-580.json"
"""What `tools.gpu.check_driver` said on an H200 with driver 580.159.04."""
CHECKS = ["without_context", "errors", "descriptor_keeps_memory", "checkpoint", "ipc"]
DIFFERENT = {
    # What descriptors are, where addresses are, and how much the driver itself needs.
    *("export", "fstat", "reserve", "reserve_hint", "map_again"),
    *("restore_thread", "freed_mib", "open_files_checkpointed"),
}


def comparable(found: dict[str, Any]) -> dict[str, object]:
    """Leave out what has to differ; how long something took only says that it worked."""
    return {
        name: "works" if isinstance(value, float) and not name.startswith("used_mib") else value
        for name, value in found.items()
        if name not in DIFFERENT
    }


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
def test_it_does_what_a_real_driver_did(check: str) -> None:
    variables = emulated_environment(
        devices=1, memory=2 << 30, seed=0x51510000 + CHECKS.index(check)
    )
    done = subprocess.run(  # noqa: S603 - this interpreter
        [sys.executable, "-m", "tools.gpu.check_driver", "--check", check],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", **variables},
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    seen = json.loads(SEEN.read_text(encoding="utf-8"))[check]
    assert comparable(json.loads(done.stdout)) == comparable(seen)
