"""Snapshots in a store: writing, finding and reading them, on any backend."""
