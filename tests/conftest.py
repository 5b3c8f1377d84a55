"""What every test run does: required markers, one seed, Hypothesis profiles, what is together."""

import collections
import contextlib
import gc
import os
import random
import secrets
import shutil
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from snapagent.errors import AgentError
from snapagent.linux import namespaces
from snapagent.linux.network import fresh_network

# Fixtures that other tests may ask for.
pytest_plugins = [
    "tests.support.agent",
    "tests.support.caches",
    "tests.support.criu",
    "tests.support.daemon",
    "tests.support.external",
    "tests.support.lazy_pages",
    "tests.support.mounts",
    "tests.support.s3",
    "tests.support.workloads",
]

MARKERS = ["fuse: needs /dev/fuse and the privilege to mount"]
SEED_BITS = 32
ID_CHARS_MAX = 1000

# No deadlines: they measure the other load of the machine.
settings.register_profile("ci", max_examples=100, deadline=None, print_blob=True)
settings.register_profile("nightly", parent=settings.get_profile("ci"), max_examples=5_000)
settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of this project; Hypothesis brings `--hypothesis-profile nightly`."""
    group = parser.getgroup("snapstore")
    group.addoption(
        "--require",
        metavar="MARKER,...",
        default="",
        help="fail where a test with one of these markers is skipped",
    )
    group.addoption(
        "--seed", type=int, default=None, help="seed of the `rng` fixture (default: a new one)"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register markers, and choose the seed before xdist hands the options to its workers."""
    # A run in the background of a script ignores Ctrl-C, and so would every program it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    enter_own_network(config)
    # Thousands of programs are started, by workers of xdist too: they are compiled once.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # noqa: TID251 - handed on
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    if config.option.seed is None:
        config.option.seed = secrets.randbits(SEED_BITS)
    known = {line.split(":")[0].split("(")[0] for line in config.getini("markers")}
    unknown = required_markers(config) - known
    if unknown:
        raise pytest.UsageError(f"--require names unknown markers: {', '.join(sorted(unknown))}")


def enter_own_network(config: pytest.Config) -> None:
    """Give the whole run a network namespace, where that is allowed; CRIU needs as much.

    Else tables of nftables that CRIU makes in another run beside this one would be seen here, and
    be taken for what a test has left. Workers of xdist are in the one of their parent.
    """
    if hasattr(config, "workerinput") or os.geteuid() != 0:
        return
    with contextlib.suppress(AgentError, OSError):
        network = fresh_network()
        try:
            namespaces.set_namespace(network, namespaces.NETWORK)
        finally:
            os.close(network)


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say what it takes to repeat this run."""
    lines = [f"seed: {config.option.seed} (repeat with --seed {config.option.seed})"]
    if required := required_markers(config):
        lines.append(f"must not be skipped: {', '.join(sorted(required))}")
    return lines


# -- required markers -----------------------------------------------------------------------------


def required_markers(config: pytest.Config) -> set[str]:
    """Return the markers whose tests must run."""
    return {name.strip() for name in config.option.require.split(",") if name.strip()}


def turn_into_failure(report: pytest.TestReport | pytest.CollectReport, why: str) -> None:
    """Make a report of a skip one of a failure that keeps the reason of the skip."""
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    report.outcome = "failed"
    report.longrepr = f"{why}: {reason}"


# First of all wrappers, so that it sees what all others have made of the outcome.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a test that was skipped though one of its markers is required."""
    report = yield
    required = sorted(required_markers(item.config) & {mark.name for mark in item.iter_markers()})
    # An expected failure is reported as a skip too, but it did run.
    if report.skipped and required and not hasattr(report, "wasxfail"):
        turn_into_failure(report, f"skipped, though --require={','.join(required)}")
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Fail a module that skips itself: nobody can tell which markers its tests have."""
    report = yield
    if report.skipped and required_markers(collector.config):
        turn_into_failure(report, "a whole module is skipped, though --require is given")
    return report


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name long values by their length: a test's name also becomes an environment variable."""
    if isinstance(val, bytes | str) and len(val) > ID_CHARS_MAX:
        return f"{argname}-of-{len(val)}"
    return None


# -- which tests are together, and which come first -----------------------------------------------


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what uses CRIU, FUSE or S3, and keep together what has to be in one worker.

    Two restores at once may want the same process id, and a fresh process may take the id that
    another test's restore is about to need. What is restored may have a mount namespace of its own,
    which keeps mounts of other tests alive. One S3 server is enough. All other tests are kept by
    module, whose fixtures are then made once. xdist reads these marks when all items are collected.
    """
    for name in ("criu", "fuse", "s3"):
        if name in getattr(item, "fixturenames", ()):
            item.add_marker(name)
    # One group only: xdist makes a third one of what is in two, which runs beside both.
    homes = {"criu": "criu", "fuse": "criu", "s3": "s3"}
    groups = [home for name, home in homes.items() if item.get_closest_marker(name) is not None]
    item.add_marker(pytest.mark.xdist_group(groups[0] if groups else item.path.stem))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the groups that take longest, so that no worker is left with one of them alone.

    The one with CRIU takes as long as everything else together, and mostly waits. Modules with slow
    tests come next, and quick ones fill up what is left at the end.
    """
    slow = collections.Counter(group_of(item) for item in items if item.get_closest_marker("slow"))
    first = {"criu": 2, "s3": 1}
    items.sort(key=lambda item: (-first.get(group_of(item), 0), -slow[group_of(item)]))


def pytest_collection_finish() -> None:
    """Let the garbage collector forget thousands of tests, which stay until the end anyway."""
    gc.collect()
    gc.freeze()


def group_of(item: pytest.Item) -> str:
    """Return the name of the group of a test."""
    mark = item.get_closest_marker("xdist_group")
    return str(mark.args[0]) if mark is not None else ""


# -- fixtures for all -----------------------------------------------------------------------------


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Return a generator seeded by the run's seed and the test's name: repeatable alone."""
    seed = f"{request.config.option.seed}/{request.node.nodeid.split('@')[0]}"
    # pytest shows this beside a failure.
    print(f"rng: repeat with --seed {request.config.option.seed}")  # noqa: T201
    return random.Random(seed)


@pytest.fixture
def work_dir(tmp_path: Path) -> Iterator[Path]:
    """Return a folder for large files: unlike `tmp_path` itself, it is gone after the test."""
    folder = tmp_path / "work"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)
