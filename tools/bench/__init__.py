"""Benchmarks: each is a program with `--help`, run as `python -m tools.bench.NAME`."""
