"""The console script and `python -m gradscope`."""

import os


def run() -> None:
    """Run the command that was asked for."""
    try:
        from gradscope.cli import run_script
    except KeyboardInterrupt:  # before anything began
        os._exit(130)
    run_script()


if __name__ == "__main__":
    run()
