"""Act without privilege for a while, in this process."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

NOBODY = 65534


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Drop to a user without privilege; skips the test where that is not possible."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


@contextlib.contextmanager
def nobodys_directory() -> Iterator[Path]:
    """Make a directory that belongs to the user of `as_nobody` and that it can reach."""
    with tempfile.TemporaryDirectory(prefix="snapstore-") as name:
        if os.geteuid() == 0:
            os.chown(name, NOBODY, NOBODY)
        yield Path(name)
