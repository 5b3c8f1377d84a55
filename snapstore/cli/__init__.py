"""The command line: one file per command, over the same façade that Python programs use."""
