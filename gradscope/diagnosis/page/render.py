"""Render a page as one self-contained HTML file, with all text escaped."""

from __future__ import annotations

import os
import re
from importlib.resources import files
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pandas as pd

from gradscope.diagnosis.page.drawings import inline_svg
from gradscope.diagnosis.page.page import Page, Table
from gradscope.diagnosis.page.viewer import viewer_data
from gradscope.diagnosis.wording import reword_html
from gradscope.runs import digits, write_text

TONES = {"plain": "", "good": "good", "warn": "caution", "bad": "problem"}
"""Text alternative for a finding's colour."""


def write_page(path: str | os.PathLike, page: Page) -> Path:
    """Render the page and write it atomically, creating its folder; return its path."""
    path = Path(path)
    html = render(page)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, html)
    return path


def render(page: Page) -> str:
    """Render the page as one self-contained HTML file; the same page gives the same text.

    All text is escaped. Raises InputError for a viewer that cannot be shown.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("gradscope.diagnosis.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_keep_together,
    )
    number = count(1)
    # The viewer's script comes first: for print, it adds every response to the page before folded parts unfold.
    script = "".join(_template(name) for name in (["viewer.js"] if page.viewer is not None else []) + ["page.js"])
    html = environment.get_template("page.html.jinja").render(
        page=page,
        viewer=None if page.viewer is None else (data := viewer_data(page.viewer)),
        viewer_json=None if page.viewer is None else Markup(data.json),
        style=Markup(_template("page.css")),
        script=Markup(script),
        tones=TONES,
        kind=lambda block: type(block).__name__,
        svg=lambda figure: Markup(inline_svg(figure.drawing, f"f{next(number)}", page.words)),
        cells=table_cells,
        link=lambda figure: quote(figure.csv),
    )
    # Lone surrogates, which broken tokens can contain, cannot be encoded as UTF-8.
    return reword_html(html, page.words).encode("utf-8", "replace").decode("utf-8")


def table_cells(table: Table) -> tuple[list[str], list[list[str]]]:
    """Return each column's kind, "number" or "words", and the rows as text."""
    columns = [table.frame.iloc[:, place] for place in range(table.frame.shape[1])]
    sorts = ["number" if all(map(_is_number, column)) else "words" for column in columns]
    texts = [[_cell(value, table.formats.get(column.name)) for value in column] for column in columns]
    return sorts, [list(row) for row in zip(*texts, strict=True)]


def _cell(value: Any, form: str | None) -> str:
    if value is None or value is pd.NA or value is pd.NaT or value != value:
        return "–"
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if not _is_number(value):
        return (form or "{}").format(value)
    if form is None and not isinstance(value, int | np.integer):
        return digits(value, 3)
    return (form or "{:,}").format(value).replace("-", "−")


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float | np.number) and not isinstance(value, bool))


def _keep_together(value: Any) -> Any:
    """Put no line break between a number and its unit or relation."""
    from markupsafe import Markup

    plain = isinstance(value, str) and not isinstance(value, Markup)
    return re.sub(r"(?<=[\d¼½¾π]) (?=[%<≤≥])|(?<=[<≤≥]) (?=[\dπ¼½¾])", "\N{NO-BREAK SPACE}", value) if plain else value


def _template(name: str) -> str:
    return files("gradscope.diagnosis.page").joinpath("templates", name).read_text(encoding="utf-8")
