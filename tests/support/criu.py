"""Fixtures around CRIU: the program, a living process to dump, and two dumps ready made.

A test that uses one of them is marked `criu` by `conftest.py`, and is skipped where CRIU cannot
work. CRIU is looked for in `$SNAPSTORE_CRIU`, else where `tools/install_criu.sh` puts it.
"""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tools.live_process import DEFAULT_CRIU, Criu, LiveProcess

SIZE_MIB = 48
TOUCHED_MIB = 3


@dataclass(frozen=True)
class RealDumps:
    """Two dumps of one process. Shared by all tests of a run: read, never write."""

    first: Path
    """What CRIU wrote while the process went on."""
    second: Path
    """The same process with a few MiB rewritten in short runs of pages, and some more made."""


def criu_program() -> Path:
    """Return where CRIU should be, whether it is there or not."""
    configured = os.environ.get("SNAPSTORE_CRIU")  # noqa: TID251 - a setting of the tests alone
    return Path(configured) if configured else DEFAULT_CRIU


@pytest.fixture(scope="session")
def criu() -> Criu:
    """Return CRIU, or skip with the reason why it cannot be used."""
    program = criu_program()
    if not program.exists():
        pytest.skip(f"no CRIU at {program}: run tools/install_criu.sh")
    if os.geteuid() != 0:
        pytest.skip("CRIU needs root")
    return Criu(program)


@pytest.fixture
def live_process(criu: Criu, work_dir: Path) -> Iterator[LiveProcess]:
    """Start a small process to dump; it is ended afterwards, whatever life it is in by then."""
    home = work_dir / "home"
    home.mkdir()
    with LiveProcess(home, size_mib=SIZE_MIB) as process:
        yield process


@pytest.fixture(scope="session")
def real_dumps(criu: Criu, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealDumps]:
    """Dump one process twice, with some change in between. The process is gone then."""
    folder = tmp_path_factory.mktemp("real-dumps")
    dumps = RealDumps(folder / "first", folder / "second")
    home = folder / "home"
    for path in (home, dumps.first, dumps.second):
        path.mkdir()
    with LiveProcess(home, size_mib=SIZE_MIB) as process:
        criu.dump(process.pid, dumps.first, leave_running=True)
        process.ask(f"touch {TOUCHED_MIB} change")
        process.ask("grow 2 more")
        criu.dump(process.pid, dumps.second)
    yield dumps
    shutil.rmtree(folder)
