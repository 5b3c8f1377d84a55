"""Doubles and suites for tests, here and in programs that bring a backend of their own."""
