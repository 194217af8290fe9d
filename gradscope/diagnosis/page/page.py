"""Parts of a page of results; their text is never markup."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import pandas as pd

from gradscope.diagnosis.page.viewer import Viewer

KEYS = ["response", "position"]
"""Columns that identify a token."""


@dataclass(frozen=True)
class Finding:
    """A sentence that the numbers support."""

    statement: str
    detail: str = ""
    """Its basis: numbers, intervals, token counts."""
    tone: Literal["plain", "good", "warn", "bad"] = "plain"


@dataclass(frozen=True)
class Paragraph:
    text: str


@dataclass(frozen=True)
class Definition:
    """A term and its definition, folded."""

    term: str
    text: str


@dataclass(frozen=True)
class Figure:
    drawing: object
    """A matplotlib Figure or Axes, which is left open."""
    caption: str
    csv: str | None = None
    """The file with the numbers that are drawn, relative to the page."""
    code: str = ""
    """Python that draws it again from the files beside the page; "": none."""


@dataclass(frozen=True)
class Tile:
    """A number of the first screen."""

    label: str
    value: str
    note: str = ""
    """Its interval, and what it is of."""


@dataclass(frozen=True)
class Table:
    frame: pd.DataFrame
    """Shown without its index; the first column names the rows."""
    caption: str
    formats: dict[str, str] = field(default_factory=dict)
    """Column → how `str.format` writes its numbers, as "{:.1%}"; other floats are written with three digits."""
    folded: bool = False
    """Shown only when its caption is opened."""
    csv: str | None = None
    """The file with the whole table, relative to the page."""
    tokens: tuple[tuple[int, int], ...] = ()
    """(response, position) of the token that each row is about: it links into the viewer; empty: of none."""


@dataclass(frozen=True)
class Links:
    """Other pages beside this one."""

    items: tuple[tuple[str, str], ...]
    """(words, file relative to the page)."""


Block = Paragraph | Figure | Table | Definition | Links


@dataclass(frozen=True)
class Section:
    id: str
    """For links; "verdict", "evidence", "tokens", "what-next" and "made" are the page's own."""
    title: str
    blocks: tuple[Block, ...]
    folded: bool = False
    """Only its title shows until it is opened."""


@dataclass(frozen=True)
class Page:
    title: str
    subtitle: str = ""
    findings: tuple[Finding, ...] = ()
    sections: tuple[Section, ...] = ()
    viewer: Viewer | None = None
    facts: dict[str, str] = field(default_factory=dict)
    """How the results were made: versions, model, hashes, settings; shown at the end."""
    notes: tuple[str, ...] = ()
    """Caveats that a reader must know before believing the findings, folded behind a line with their count."""
    warnings: tuple[str, ...] = ()
    """Notes that may change the verdict itself, shown first."""
    decision: tuple[str, ...] = ()
    """The conclusion, in three sentences at most; the findings then follow as its evidence."""
    tiles: tuple[Tile, ...] = ()
    lead: Figure | None = None
    """The one figure of the first screen."""
    next: tuple[str, ...] = ()
    """What to do now, at the page's end."""
    words: Mapping[str, str] = field(default_factory=dict)
    """Words that are replaced in all text (`wording.words_for`)."""
