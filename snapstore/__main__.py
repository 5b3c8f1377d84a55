"""Where the program begins: `snapstore`, and `python -m snapstore`."""

import gc

from snapstore.cli.startup import settle

__all__ = ["main"]


def main() -> None:
    """Load the program and run it."""
    # Collecting while modules load finds nothing and takes a tenth of the start; `run_program`
    # goes back to it.
    gc.disable()
    settle()
    from snapstore.cli.main import run  # noqa: PLC0415 - what is above has to come first

    run()


if __name__ == "__main__":
    main()
