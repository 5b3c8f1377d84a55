"""`pytest --require`: in continuous integration a skip of what matters is a failure."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SKIPPED_TEST = """
import pytest

@pytest.mark.criu
def test_needs_criu():
    pytest.skip("no CRIU here")
"""
SKIPPED_BY_FIXTURE = """
import pytest

@pytest.fixture
def endpoint():
    pytest.skip("no endpoint here")

@pytest.mark.s3
def test_needs_s3(endpoint):
    pass
"""
SKIPPED_MODULE = """
import pytest

pytest.importorskip("no_such_module_anywhere")
"""
EXPECTED_FAILURE = """
import pytest

@pytest.mark.criu
@pytest.mark.xfail(strict=True, reason="known")
def test_known_failure():
    raise AssertionError
"""


def run_pytest(folder: Path, source: str, *options: str) -> tuple[int, str]:
    """Run one module under this project's conftest, in a process of its own."""
    module = folder / "test_module.py"
    module.write_text(source, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    # Loading it takes a third of such a run.
    command += ["-p", "no:schemathesis"]
    command += ["-c", str(ROOT / "pyproject.toml"), *options, str(module)]
    result = subprocess.run(  # noqa: S603 - this interpreter, with fixed arguments
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    return result.returncode, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("source", "required", "reason"),
    [
        (SKIPPED_TEST, "fuse,criu", "no CRIU here"),
        (SKIPPED_BY_FIXTURE, "s3", "no endpoint here"),
        (SKIPPED_MODULE, "s3", "no_such_module_anywhere"),
    ],
    ids=["by the test", "by a fixture", "by the module"],
)
def test_required_skip_fails_and_keeps_its_reason(
    tmp_path: Path, source: str, required: str, reason: str
) -> None:
    status, output = run_pytest(tmp_path, source, "--require", required)
    assert status in (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED), output
    assert reason in output


@pytest.mark.parametrize("options", [(), ("--require", "s3")], ids=["no option", "another marker"])
def test_other_skips_stay_skips(tmp_path: Path, options: tuple[str, ...]) -> None:
    status, output = run_pytest(tmp_path, SKIPPED_TEST, *options)
    assert status == pytest.ExitCode.OK, output


def test_expected_failures_count_as_run(tmp_path: Path) -> None:
    status, output = run_pytest(tmp_path, EXPECTED_FAILURE, "--require", "criu")
    assert status == pytest.ExitCode.OK, output


def test_unknown_marker_is_refused(tmp_path: Path) -> None:
    status, output = run_pytest(tmp_path, SKIPPED_TEST, "--require", "crui")
    assert status == pytest.ExitCode.USAGE_ERROR, output
    assert "crui" in output
