"""The contract of the storage port as checks that anybody can run on any storage.

Each check tests one statement of `snapstore.backend.base` or of `format_spec/SEMANTICS.md`,
section 1. Nothing here knows a test framework: a check raises, or it does not. It removes what it
stored, so it may be run on a storage in use; only empty directories stay.

::

    subject = Subject(open=lambda: open_backend("file:///mnt/new", create=True))
    for check in CHECKS:
        if not check.lacking(subject):
            check.run(subject, random.Random(seed))
"""

from __future__ import annotations

from snapstore.testing import contract_files, contract_objects, contract_races
from snapstore.testing.contract_base import Check, Subject

__all__ = ["CHECKS", "Check", "Subject"]

CHECKS: tuple[Check, ...] = (
    *contract_objects.CHECKS,
    *contract_races.CHECKS,
    *contract_files.CHECKS,
)
