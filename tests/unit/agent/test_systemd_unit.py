"""The unit of systemd is one that systemd understands, and keeps what has to outlive the agent."""

import configparser
import shutil
import subprocess
from pathlib import Path

import pytest

UNIT = Path(__file__).parents[3] / "manifests" / "systemd" / "snapagent.service"
PROGRAM = "/usr/bin/snapagent"


@pytest.mark.slow
def test_systemd_understands_it(tmp_path: Path) -> None:
    """Method: `systemd-analyze verify`, with a program that is there in place of the agent's."""
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd is not installed")
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text(encoding="utf-8").replace(PROGRAM, "/bin/true"))
    done = subprocess.run(  # noqa: S603 - no shell
        [analyze, "verify", "--man=no", copy], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_memory_and_restored_processes_outlive_it() -> None:
    """A holder that is killed with the agent would hold nothing; its socket has to stay as well."""
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(UNIT)
    service = unit["Service"]
    assert service["KillMode"] == "process"
    assert service["RuntimeDirectoryPreserve"] == "yes"
    assert int(service["LimitNOFILE"]) >= 1 << 20
