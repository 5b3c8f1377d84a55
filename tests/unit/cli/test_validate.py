"""`snapstore validate-backend`: what it reports was done, and its verdict can be no."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from snapstore.backend.base import ObjectKind
from snapstore.backend.memory import MemoryBackend, MemoryObjects
from snapstore.clock import SystemClock
from snapstore.errors import UsageError
from snapstore.testing.contract import CHECKS
from snapstore.testing.contract_base import Subject
from snapstore.testing.subjects import subject_of
from snapstore.testing.validate import validate
from snapstore.units import MIB, BytesLike
from tests.support.damage import run_program

pytestmark = pytest.mark.slow


def test_a_directory_is_fine(tmp_path: Path) -> None:
    place = tmp_path / "store"
    result = run_program("validate-backend", f"file://{place}", "--size", "64MiB", "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["usable"] is True
    assert {one["outcome"] for one in found["checks"]} == {"passed"}
    assert len(found["checks"]) == len(CHECKS)
    assert len(found["latencies"]) == 5
    assert all(one["bytes_per_s"] > 0 for one in found["rates"])
    # Nothing of it stays.
    assert [path for path in place.rglob("*") if path.is_file()] == []


def test_two_mounts_are_both_used(tmp_path: Path) -> None:
    """Method: the same directory under two names; each handle is on the next of them."""
    real = tmp_path / "real"
    subject = subject_of(f"file://{real}", mounts=[real, real / "../real"])
    roots = [str(subject.open().capabilities.url) for _ in range(4)]
    assert roots[0] == roots[2] != roots[1] == roots[3]


def test_another_place_is_no_mount(tmp_path: Path) -> None:
    """A mistyped or unmounted directory would get garbage, and the verdict would mean nothing."""
    (tmp_path / "other").mkdir()
    for other in (tmp_path / "other", tmp_path / "missing"):
        with pytest.raises(UsageError, match="is not a mount"):
            subject_of(f"file://{tmp_path / 'real'}", mounts=[tmp_path / "real", other])
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_bucket_has_no_mounts(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        subject_of("memory://validated", mounts=[tmp_path, tmp_path])


def test_a_storage_that_overwrites_is_told_apart() -> None:
    """Goal: the verdict is not always yes. Method: a storage whose put-if-absent is a put."""

    class Overwriting(MemoryBackend):
        def put_new(self, kind: ObjectKind, name: str, pieces: Sequence[BytesLike]) -> None:
            self.delete(kind, name)
            super().put_new(kind, name, pieces)

    objects = MemoryObjects()
    found = validate(
        Subject(open=lambda: Overwriting(objects)),
        random.Random(1),
        SystemClock(),
        data_bytes=64 * MIB,
    )
    assert not found.usable
    failed = {one.name for one in found.checks if one.outcome == "failed"}
    assert "one_of_many_threads_wins" in failed
    assert {one.reason for one in found.checks if one.outcome == "not tested"} > {""} or failed
    assert all(one.reason for one in found.checks if one.outcome != "passed")


def test_a_place_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    result = run_program("validate-backend", f"file://{tmp_path / 'file'}", "--json")
    assert result.returncode == 2
    assert json.loads(result.stdout)["error"]["code"] == "UsageError"
