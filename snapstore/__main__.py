"""`python -m snapstore`."""

from snapstore.cli.main import run

if __name__ == "__main__":
    run()
