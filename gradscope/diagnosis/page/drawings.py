"""matplotlib drawings as SVG elements that share no id on a page."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING

from gradscope.diagnosis.wording import reword

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DOTS = 200
"""Resolution, per inch, of parts drawn as an image inside the SVG, such as a scatter of thousands of tokens."""
_FONTS = ["DejaVu Sans", "Verdana", "Geneva"]
"""Fonts for the page's reader: the one used for layout, or others as wide."""


def inline_svg(drawing: Figure | Axes, prefix: str, words: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return the drawing as an `svg` element; its ids begin with `prefix`, its width is the column's or its own.

    words: replaced in the drawing's text. The same drawing and prefix give the same text.
    """
    for text in drawing.figure.findobj(lambda artist: hasattr(artist, "set_text")) if words else ():
        text.set_text(reword(text.get_text(), words))
    root, inside = re.search(r"<svg([^>]*)>(.*)", _draw(drawing), re.S).groups()
    box, width = re.search(r'viewBox="[^"]*"', root)[0], re.search(r'width="([\d.]+)pt"', root)[1]
    inside = re.sub(r"<(metadata|style)\b.*?</\1>", "", inside, flags=re.S).replace(" xlink:href=", " href=")
    inside = re.sub(r'( id="|url\(#| href="#)', rf"\g<1>{prefix}-", inside)
    return f'<svg {box} style="--natural: {width}pt">{inside.rstrip()}'


def _draw(drawing: Figure | Axes) -> str:
    """Return the SVG's source without background, date or version; the drawing is left open."""
    import matplotlib as mpl

    from gradscope.plots import paper_style

    target, figure = io.StringIO(), drawing.figure
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with paper_style(), mpl.rc_context({"svg.fonttype": "none", "font.sans-serif": _FONTS}), _laid_out(figure):
        figure.savefig(target, format="svg", transparent=True, dpi=_DOTS, metadata=nothing)
    return target.getvalue()


@contextmanager
def _laid_out(figure: Figure) -> Iterator[None]:
    """Lay the figure out as saving does, which also draws it for that."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    if (layout := figure.get_layout_engine()) is None:
        yield
        return
    canvas, dpi = figure.canvas, figure.dpi
    try:
        layout.execute(figure)  # axes that it has made smaller may have wider ticks: it is executed again
        figure.dpi = 72  # an SVG's
        FigureCanvasSVG(figure)
        layout.execute(figure)
        figure.set_layout_engine(None)
        figure.dpi = dpi
        yield
    finally:
        figure.set_layout_engine(layout)
        figure.dpi = dpi
        figure.set_canvas(canvas)
