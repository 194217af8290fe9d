"""From a page to one HTML file: all text escaped, figures and data inside, and a policy that forbids all fetching."""

from __future__ import annotations

import base64
import hashlib
import os
import re
from importlib.resources import files
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
import pandas as pd

from gradscope.diagnosis.glossary import DEFINITIONS, TERMS
from gradscope.diagnosis.page.drawings import inline_svg
from gradscope.diagnosis.page.page import Page, Table
from gradscope.diagnosis.page.viewer import viewer_data
from gradscope.runs import write_text

if TYPE_CHECKING:
    from markupsafe import Markup

TONES = {"plain": "", "good": "good", "warn": "caution", "bad": "problem"}
"""What a finding's tone is called, for those who do not see its colour."""

_TERM = re.compile(rf"(?<!\w)({'|'.join(map(re.escape, sorted(TERMS, key=len, reverse=True)))})(?!\w)", re.IGNORECASE)


def write_page(path: str | os.PathLike, page: Page) -> Path:
    """Render and write beside, then rename: a reader never sees half a page. Its folder is made if need be."""
    path = Path(path)
    html = render(page)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, html)
    return path


def render(page: Page) -> str:
    """The page as one HTML file that fetches nothing; the same page gives the same text.

    Whatever text it holds stays text. Only the page's own script may run, by its hash. Raises InputError for a drawing
    or a viewer that cannot be shown.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("gradscope.diagnosis.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    number = count(1)
    # The viewer's first: on paper it puts every response on the page, and then all that is folded unfolds.
    script = "".join(_template(name) for name in (["viewer.js"] if page.viewer is not None else []) + ["page.js"])
    html = environment.get_template("page.html.jinja").render(
        page=page,
        viewer=None if page.viewer is None else (data := viewer_data(page.viewer)),
        viewer_json=None if page.viewer is None else Markup(data.json),
        policy=content_policy(script),
        style=Markup(_template("page.css")),
        script=Markup(script),
        tones=TONES,
        kind=lambda block: type(block).__name__,
        svg=lambda figure: Markup(inline_svg(figure.drawing, f"f{next(number)}")),
        cells=table_cells,
        explain=explain,
        link=lambda figure: quote(figure.csv),
    )
    # Half of a surrogate pair, as broken tokens can hold, has no UTF-8.
    return html.encode("utf-8", "replace").decode("utf-8")


def explain(text: str) -> Markup:
    """The text, escaped; the first place of each term of the glossary shows its meaning when pointed at or focused."""
    from markupsafe import Markup, escape

    seen: set[str] = set()

    def mark(found: re.Match) -> str:
        term = TERMS[found[0].lower()]
        if term in seen:
            return found[0]
        seen.add(term)
        return f'<span class="term" tabindex="0" data-meaning="{escape(DEFINITIONS[term])}">{found[0]}</span>'

    return Markup(_TERM.sub(mark, str(escape(text))))


def content_policy(script: str) -> str:
    """A Content-Security-Policy: nothing is fetched, and no script runs but this one.

    Inline styles are allowed, since an SVG's marks carry them; they could fetch nothing either.
    """
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def table_cells(table: Table) -> tuple[list[str], list[list[str]]]:
    """What each column holds, "number" or "words", and the table's rows as text."""
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
    form = form or ("{:,}" if isinstance(value, int | np.integer) else "{:.3g}")
    return form.format(value).replace("-", "−")


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float | np.number) and not isinstance(value, bool))


def _template(name: str) -> str:
    return files("gradscope.diagnosis.page").joinpath("templates", name).read_text(encoding="utf-8")
