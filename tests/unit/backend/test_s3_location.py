"""URLs of stores in buckets: what is meant, what cannot be, and that they never hold secrets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapstore.backend import open_backend
from snapstore.backend.s3_location import S3Location
from snapstore.errors import UsageError


def test_all_parts() -> None:
    url = (
        "s3://bucket/a/b?endpoint=https://storage.example:9000&region=eu-1"
        "&addressing=virtual&profile=prod&ca=/etc/ca.pem"
    )
    location = S3Location.parse(url)
    assert location == S3Location(
        bucket="bucket",
        prefix="a/b/",
        endpoint="https://storage.example:9000",
        region="eu-1",
        addressing="virtual",
        profile="prod",
        ca="/etc/ca.pem",
    )
    assert S3Location.parse(location.url()) == location


@pytest.mark.parametrize("url", ["s3://bucket", "s3://bucket/", "s3://bucket//"])
def test_a_bucket_alone(url: str) -> None:
    assert S3Location.parse(url) == S3Location(bucket="bucket")
    assert S3Location.parse(url).url() == "s3://bucket"


@pytest.mark.parametrize(
    "url",
    [
        "s3://",
        "s3:///prefix",
        "s3://b",
        "s3://bu cket/x",
        "s3://key:secret@bucket/x",
        "s3://bucket/x#part",
        "s3://bucket/a/../b",
        "s3://bucket/a//b",
        "s3://bucket/./a",
        "s3://bucket/a%00b",
        "s3://bucket/a\\b",
        "s3://bucket/" + "x" * 401,
        "s3://bucket/x?endpint=http://h",
        "s3://bucket/x?endpoint=",
        "s3://bucket/x?endpoint=h:9000",
        "s3://bucket/x?endpoint=ftp://h",
        "s3://bucket/x?endpoint=http://key:secret@h",
        "s3://bucket/x?region=a&region=b",
        "s3://bucket/x?addressing=paths",
        "s3://bucket/x?access_key=A",
        "s3://[bucket/x",
        "s3://bucket/x?endpoint=http://[::1",
        "s3://bucket/x?endpoint=http://h:99999",
        "s3://bucket/x?endpoint=http://h:port",
        "s3://bucket/x?endpoint=http://h:0",
        "s3://bucket/x?endpoint=http://h/%3Fx=1",
    ],
)
def test_what_cannot_be_meant(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        S3Location.parse(url)
    assert "secret" not in str(caught.value) + caught.value.next_step


names = st.text("abcXYZ019-_.", min_size=1, max_size=9).filter(lambda t: t not in {".", ".."})


@given(st.lists(names, max_size=4), st.none() | st.just("http://127.0.0.1:8333"))
def test_a_location_survives_its_url(prefix: list[str], endpoint: str | None) -> None:
    path = "".join(f"{name}/" for name in prefix)
    location = S3Location(bucket="bucket", prefix=path, endpoint=endpoint)
    assert S3Location.parse(location.url()) == location


@pytest.mark.parametrize("url", ["s3:/bucket/x", "s3:bucket", "s3//bucket"])
def test_a_mistyped_scheme_is_no_directory(url: str) -> None:
    with pytest.raises(UsageError, match="not an S3 URL"):
        open_backend(url)
