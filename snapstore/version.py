"""The version of this program, as manifests record it."""

from __future__ import annotations

import importlib.metadata

__all__ = ["VERSION", "WRITER"]

VERSION = importlib.metadata.version("snapstore")
WRITER: dict[str, object] = {"program": "snapstore", "version": VERSION}
