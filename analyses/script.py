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
    """Exit with the status that `call` returns (None: 0); where it raises InputError, with 2 and its line on stderr."""
    try:
        status = call()
    except InputError as error:
        print(f"{COMPLAINT}{error}", file=sys.stderr)
        status = 2
    sys.exit(status)
