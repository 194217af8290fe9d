"""Drawings as SVG that can stand inside a page: no ids in common, nothing that runs, nothing that fetches."""

from __future__ import annotations

import io
import re
from xml.etree import ElementTree

from gradscope.errors import InputError

_DROPPED = {"metadata", "style", "title", "script", "foreignObject", "a", "animate", "set", "iframe"}
_REFERENCE = re.compile(r"url\(#([^)]+)\)")
_DOTS = 200
"""Per inch, of what is drawn as an image inside the SVG, such as a scatter of thousands of tokens."""
_FONTS = ["DejaVu Sans", "Verdana", "Geneva"]
"""What letters are drawn with where the page is read: the font they were laid out in, or one as wide."""


def inline_svg(drawing: object, prefix: str) -> str:
    """The drawing as an `svg` element; ids begin with `prefix`, and its width is that of the column, or its own.

    drawing: a matplotlib Figure or Axes, or the source of an SVG. The same drawing and prefix give the same text.
    Raises InputError for anything else.
    """
    source = drawing if isinstance(drawing, str) else draw_svg(drawing)
    try:
        root = ElementTree.fromstring(source)
    except ElementTree.ParseError as error:
        raise InputError(f"a figure's SVG cannot be read ({error}); pass a matplotlib figure, or an SVG") from error
    if _plain(root.tag) != "svg":
        raise InputError(f"a figure's source is a {_plain(root.tag)!r} element; an SVG is wanted")
    _clean(root, prefix)
    width, height = (_points(root.attrib.pop(side, "")) for side in ("width", "height"))
    # Without a viewBox, the units inside are pixels of ¾ point.
    box = root.attrib.setdefault("viewBox", f"0 0 {(width or 300) / 0.75:g} {(height or 225) / 0.75:g}")
    root.set("style", f"--natural: {width or 0.75 * float(box.split()[2]):g}pt")
    root.attrib.pop("version", None)
    return ElementTree.tostring(root, encoding="unicode")


def draw_svg(drawing: object) -> str:
    """A matplotlib Figure or Axes as SVG without background, date or version; it is left open."""
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from gradscope.plots import paper_style

    while isinstance(drawing, Axes):
        drawing = drawing.figure
    if not isinstance(drawing, Figure):
        raise InputError(f"a figure's drawing is a {type(drawing).__name__}; a matplotlib Figure or Axes is wanted")
    target = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with paper_style(), mpl.rc_context({"svg.fonttype": "none", "font.sans-serif": _FONTS}):
        drawing.draw_without_rendering()  # axes that the layout has made smaller may have wider ticks: once more
        drawing.savefig(target, format="svg", transparent=True, dpi=_DOTS, metadata=nothing)
    return target.getvalue()


def _clean(element: ElementTree.Element, prefix: str) -> None:
    """Strip namespaces, rename ids and the references to them, and drop what could run or fetch."""
    element.tag = _plain(element.tag)
    attributes = dict(element.attrib)
    element.attrib.clear()
    for name, value in attributes.items():
        name = _plain(name)
        if name == "id":
            value = f"{prefix}-{value}"
        elif name == "href":
            if not value.startswith(("#", "data:image/png;base64,")):
                continue
            value = f"#{prefix}-{value[1:]}" if value.startswith("#") else value
        elif name.startswith("on"):
            continue
        element.set(name, _REFERENCE.sub(rf"url(#{prefix}-\1)", value))
    for child in list(element):
        if not isinstance(child.tag, str) or _plain(child.tag) in _DROPPED:
            element.remove(child)
        else:
            _clean(child, prefix)


def _plain(name: str) -> str:
    """A name without its namespace."""
    return name.rpartition("}")[2]


def _points(length: str) -> float | None:
    """A length in points; None if it is relative or absent."""
    found = re.fullmatch(r"([\d.]+)(pt|px|)", length)
    return None if found is None else float(found[1]) * (1 if found[2] == "pt" else 0.75)
