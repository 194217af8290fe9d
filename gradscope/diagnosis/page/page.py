"""What a page of results consists of, whatever it is about: text is text (nothing in it is markup), ink is a figure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

import pandas as pd

from gradscope.diagnosis.page.viewer import Viewer
from gradscope.errors import InputError

RESERVED = ("verdict", "evidence", "tokens", "made")
"""Ids of the page's own sections."""


def _check_beside(file: str) -> None:
    strange = not file or file.startswith("/") or {":", "\\"} & {*file}
    if strange or ".." in file.split("/"):
        raise InputError(f"a link is to {file!r}; the name of a file beside the page is wanted")


@dataclass(frozen=True)
class Finding:
    """One sentence that the numbers bear."""

    statement: str
    detail: str = ""
    """What it rests on: numbers, intervals, how many tokens."""
    tone: Literal["plain", "good", "warn", "bad"] = "plain"
    definition: str = ""
    """What the words mean, exactly; folded until it is asked for."""


@dataclass(frozen=True)
class Paragraph:
    text: str


@dataclass(frozen=True)
class Definition:
    """A term and what it means, folded until it is asked for."""

    term: str
    text: str


@dataclass(frozen=True)
class Formula:
    """A formula in Unicode, on lines of its own."""

    text: str


@dataclass(frozen=True)
class Figure:
    drawing: object
    """A matplotlib Figure or Axes, which is left open; or the source of an SVG."""
    caption: str
    csv: str | None = None
    """The file with the numbers that are drawn, relative to the page."""

    def __post_init__(self) -> None:
        if self.csv is not None:
            _check_beside(self.csv)


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

    def __post_init__(self) -> None:
        if self.csv is not None:
            _check_beside(self.csv)
        if self.tokens and len(self.tokens) != len(self.frame):
            raise InputError(f"the table has {len(self.frame)} rows and {len(self.tokens)} tokens; give one each")
        if unknown := [name for name in self.formats if name not in self.frame.columns]:
            columns = ", ".join(map(str, self.frame.columns))
            raise InputError(f"formats names {unknown[0]!r}, which the table has not; it has {columns}")


@dataclass(frozen=True)
class Links:
    """Other pages beside this one."""

    items: tuple[tuple[str, str], ...]
    """(words, file relative to the page)."""

    def __post_init__(self) -> None:
        for _, file in self.items:
            _check_beside(file)


Block = Paragraph | Figure | Table | Definition | Formula | Links


@dataclass(frozen=True)
class Section:
    id: str
    """For links: lower-case letters, digits and hyphens, a letter first."""
    title: str
    blocks: tuple[Block, ...]

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9-]*", self.id) or self.id in RESERVED:
            raise InputError(
                f"a section has the id {self.id!r}; lower-case letters, digits and hyphens are wanted, a letter first, "
                f"and none of {', '.join(RESERVED)}"
            )


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
    """What a reader has to know before believing the findings, such as that only a sample was measured: folded behind a
    line that counts them."""
    warnings: tuple[str, ...] = ()
    """What may change the verdict itself: shown first."""
    decision: tuple[str, ...] = ()
    """What to take away, in three sentences at most; the findings are then the evidence, further down."""
    tiles: tuple[Tile, ...] = ()
    lead: Figure | None = None
    """The one figure of the first screen."""

    def __post_init__(self) -> None:
        ids = [section.id for section in self.sections]
        if twice := [name for name in ids if ids.count(name) > 1]:
            raise InputError(f"two sections have the id {twice[0]!r}; links need one each; rename one")
