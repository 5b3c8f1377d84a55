"""The version of this program, as manifests record it."""

from __future__ import annotations

__all__ = ["VERSION", "WRITER"]

VERSION = "0.1.0.dev0"
WRITER: dict[str, object] = {"program": "snapstore", "version": VERSION}
