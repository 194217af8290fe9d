"""How the scripts are called: the options of those that draw, and one line where the input is at fault."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gradscope.errors import InputError

COMPLAINT = "error: "
"""Before the line that says what is at fault."""


@dataclass(frozen=True)
class Options:
    """Settings of the script."""

    out: Path = Path("figures")
    """Folder of pictures and tables."""
    scale: str = "cpu"
    """The scale of analyses/runs.toml whose runs are drawn."""


def exit_with(call: Callable[[], int | None]) -> None:
    """Exit with the status that `call` returns (None: 0); where the input or a file is at fault, with 2 and its line.

    A file is at fault that cannot be written, such as below an `--out` that is no folder.
    """
    try:
        status = call()
    except (InputError, OSError) as error:
        print(f"{COMPLAINT}{error}", file=sys.stderr)
        status = 2
    sys.exit(status)
