"""The console script and `python -m gradscope`, which end in one line from their first moment on."""

import os
import signal


def _end(number: int, _frame: object) -> None:
    """While the command line is loaded nothing has begun: an interruption has nothing to tidy up."""
    os.write(2, b"gradscope: interrupted before anything began\n")
    os._exit(128 + number)


def run() -> None:
    """Run the command that was asked for."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    from gradscope.cli import run_script

    signal.signal(signal.SIGINT, before)
    run_script()


if __name__ == "__main__":
    run()
