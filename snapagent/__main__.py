"""`python -m snapagent`."""

from snapagent.cli.main import run

if __name__ == "__main__":
    run()
