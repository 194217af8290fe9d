"""Empty pictures, for tests of numbers and words: drawing takes longer than most of them."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

EMPTY = '<svg xmlns="http://www.w3.org/2000/svg" width="9pt" height="9pt" viewBox="0 0 9 9"/>'


def draw_nothing(change: Callable[..., object] = setattr) -> None:
    """Figures save an empty picture, and nothing is laid out; change: as setattr."""
    change(Figure, "savefig", _save)
    change(Figure, "draw_without_rendering", lambda _figure: None)
    change(ConstrainedLayoutEngine, "execute", lambda _engine, _figure: None)


def _save(_figure: Figure, target: str | os.PathLike | io.StringIO, **_: object) -> None:
    if isinstance(target, io.StringIO):
        target.write(EMPTY)
    else:
        Path(target).write_text(EMPTY)
