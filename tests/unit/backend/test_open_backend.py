"""URLs of stores: what is meant, what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from snapstore.backend import check_store_url, open_backend
from snapstore.backend.base import ObjectKind
from snapstore.errors import AccessDenied, StoreNotFound, UsageError

if TYPE_CHECKING:
    from pathlib import Path

NAME = "team/x/@v1/00000001"


@pytest.mark.parametrize("folder", ["plain", "two words", "a%20b", "ü#?:;&", "percent%", "a://b"])
def test_the_url_of_a_store_opens_it_again(tmp_path: Path, folder: str) -> None:
    root = tmp_path / folder
    backend = open_backend(root.as_uri(), create=True)
    backend.put_new(ObjectKind.REF, NAME, [b"x"])
    assert root.is_dir()
    assert backend.capabilities.url == root.as_uri()
    for url in (backend.capabilities.url, str(root), root.as_uri().replace("///", "//localhost/")):
        assert open_backend(url).stat(ObjectKind.REF, NAME).size_bytes == 1


def test_relative_paths_are_meant_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    open_backend("here/store", create=True).put_new(ObjectKind.REF, NAME, [b"x"])
    backend = open_backend("./here/store")
    monkeypatch.chdir("/")
    assert backend.stat(ObjectKind.REF, NAME).size_bytes == 1
    assert backend.capabilities.url == (tmp_path / "here/store").as_uri()


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_backend("~/s", create=True).capabilities.url == (tmp_path / "s").as_uri()
    with pytest.raises(UsageError):
        open_backend("~nobody-of-that-name/s")


def test_memory_is_shared_by_name() -> None:
    name = "memory://test_memory_is_shared_by_name"
    with pytest.raises(StoreNotFound):
        open_backend(name)
    open_backend(name, create=True).put_new(ObjectKind.REF, NAME, [b"x"])
    readonly = open_backend(name, readonly=True)
    assert readonly.stat(ObjectKind.REF, NAME).size_bytes == 1
    assert readonly.capabilities.url == name
    with pytest.raises(AccessDenied):
        readonly.delete(ObjectKind.REF, NAME)
    assert [*open_backend(name + "2", create=True).list(ObjectKind.REF)] == []


@pytest.mark.parametrize("readonly", [False, True])
def test_a_missing_directory_is_no_store(tmp_path: Path, readonly: bool) -> None:  # noqa: FBT001
    for missing in (tmp_path / "missing", tmp_path / "file" / "below"):
        (tmp_path / "file").touch()
        with pytest.raises(StoreNotFound):
            open_backend(str(missing), readonly=readonly)
    assert not (tmp_path / "missing").exists()


def test_a_file_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreNotFound):
        open_backend(str(tmp_path / "file"))
    for path in ("file", "file/below"):
        with pytest.raises(UsageError, match="not a directory"):
            open_backend(str(tmp_path / path), create=True)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "file:",
        "file://",
        "file:relative",
        "file:/one/slash",
        "file://host/path",
        "file:///a?b=c",
        "file:///a#b",
        "file:///a%00b",
        "a\0b",
        "memory://",
        "s4://bucket/x",
        "http://host/path",
        "S3://bucket",
    ],
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(UsageError):
        check_store_url(url)
    with pytest.raises(UsageError):
        open_backend(url)


def test_the_schemes_that_exist_are_named() -> None:
    with pytest.raises(UsageError) as caught:
        open_backend("nfs://server/export")
    assert "file://" in caught.value.next_step


def test_nothing_is_created_for_reading_only(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        open_backend(str(tmp_path / "s"), create=True, readonly=True)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    "url", ["{}", "file://{}", "memory://never", "s3://bucket/a?endpoint=http://[::1]:1", "~"]
)
def test_checking_a_url_touches_no_storage(tmp_path: Path, url: str) -> None:
    check_store_url(url.format(tmp_path / "store"))
    assert not list(tmp_path.iterdir())
    with pytest.raises(StoreNotFound):
        open_backend("memory://never")
