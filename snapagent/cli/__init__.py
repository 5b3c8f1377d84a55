"""The `snapagent` program: one file per command."""
