"""Where the real data sets lie."""

from __future__ import annotations

import os
from pathlib import Path


def data_folder() -> Path:
    """`$GRADSCOPE_DATA` if it is set, else `shared/data` beside the repository. The folder need not exist."""
    if given := os.environ.get("GRADSCOPE_DATA"):
        return Path(given)
    return Path(__file__).resolve().parents[2].parent / "shared" / "data"
