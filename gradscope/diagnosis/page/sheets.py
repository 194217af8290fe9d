"""Blocks of a page that show numbers, and the CSV files beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Unpack

import matplotlib.pyplot as plt
import pandas as pd
from pandas.api.types import is_numeric_dtype

from gradscope.diagnosis.format import drop_vacuous, number_words, share_words
from gradscope.diagnosis.page.page import KEYS, Block, Definition, Figure, Paragraph, Table
from gradscope.errors import InputError
from gradscope.intervals import EDGES, name_interval
from gradscope.plots import Look, drawn_numbers, label_of, make_series, plot_series

DATA = "data"
"""Folder, beside the page, of the CSV files."""
PERCENT = "{:.1%}"
OVER_PROMPTS = "95 % over prompts"
BASES = ("value", "share", "coefficient", "difference")
"""Columns that `lower` and `upper` may belong to; the first one present counts."""
TOKENS = 'pd.read_parquet("tokens.parquet")'


def redraw(plot: Callable[..., object], *arguments: str, edges: Sequence[int | float] = EDGES) -> str:
    """Return two lines of Python that draw a figure from the files beside the page; edges: given if not default."""
    given = [*arguments, *([] if tuple(edges) == tuple(EDGES) else [f"edges={tuple(edges)}"])]
    return f"import pandas as pd; from gradscope.plots import {plot.__name__}\n{plot.__name__}({', '.join(given)})"


def csv(name: str) -> str:
    """Return Python that reads a file beside the page."""
    return f'pd.read_csv("{DATA}/{name}.csv")'


class Sheets:
    """Make blocks that show numbers, and collect their tables by CSV file name."""

    def __init__(self, labels: Mapping[str, str] | None = None) -> None:
        self.tables: dict[str, pd.DataFrame] = {}
        self._labels = labels or {}

    def label_of(self, name: str) -> str:
        """Return the words for a column or statistic: its part's or, if it has none, everybody's."""
        return self._labels.get(name) or label_of(name)

    def figure(
        self,
        name: str,
        draw: Callable[[], object],
        caption: str,
        *,
        again: str,
        bars: str = "",
        token_column: str | None = None,
    ) -> Block:
        """Return `draw`'s figure, or a paragraph with its error if these tokens do not suffice.

        again: `redraw`'s code, from the files beside the page. bars: what they show. token_column: known only for
        single tokens, which are in tokens.parquet, and left out of the CSV.
        """
        before = {*plt.get_fignums()}
        try:
            drawing = draw()
        except InputError as error:
            return Paragraph(f"Not drawn: {caption.split('.')[0]} ({error}).")
        finally:  # pyplot forgets it: a page has many, and they are freed with it
            for number in {*plt.get_fignums()} - before:
                plt.close(number)
        numbers = drawn_numbers(drawing)
        if bars and any(numbers[name].notna().any() for name in numbers if str(name).endswith("lower")):
            caption += f" Bars: {bars}."
        if token_column is not None:
            numbers = numbers[numbers[token_column].isna()].dropna(axis=1, how="all")
            caption += " Single tokens are in tokens.parquet."
        self.tables[f"{DATA}/{name}.csv"] = numbers
        return Figure(drawing, caption, f"{DATA}/{name}.csv", again)

    def series(self, name: str, series: pd.DataFrame, caption: str, *, bars: str = "", **look: Unpack[Look]) -> Block:
        """Return the figure of these series. look: arguments of `plot_series`."""
        again = redraw(plot_series, csv(name), *(f"{key}={value!r}" for key, value in look.items()))
        bars = f"{bars}; hollow: none, or they allow almost everything" if bars else ""  # `drop_vacuous`
        return self.figure(name, lambda: plot_series(series, **look), caption, again=again, bars=bars)

    def keep(self, name: str, frame: pd.DataFrame) -> None:
        """Save a frame next to the page, to redraw a figure from."""
        self.tables[f"{DATA}/{name}.csv"] = frame

    def table(
        self,
        name: str,
        frame: pd.DataFrame,
        caption: str,
        columns: Sequence[str] | None = None,
        *,
        folded: bool = False,
        links: bool = False,
    ) -> Table:
        """Add a table with these columns (None: all); its file has all. links: each row links to its token."""
        self.tables[f"{DATA}/{name}.csv"] = frame
        shown = merge_bounds(frame)
        if columns is not None:
            shown = shown[[column for column in columns if column in shown]]
        tokens: tuple[tuple[int, int], ...] = ()
        if links and {*KEYS} <= {*frame}:
            tokens = tuple((int(one), int(other)) for one, other in frame[KEYS].itertuples(index=False))
        shares = [column for column in shown if is_share(str(column)) and is_numeric_dtype(shown[column])]
        names = {column: self.label_of(str(column)) for column in shown}
        formats = {names[c]: PERCENT for c in shares}
        return Table(shown.rename(columns=names), caption, formats, folded, f"{DATA}/{name}.csv", tokens)


def is_share(column: str) -> bool:
    """Return whether a column holds shares, which are shown in percent."""
    stem = column.removesuffix("_difference")
    return stem.endswith("share") or stem.startswith("right_") or "_score" in stem or stem == "predicted_held_out"


def merge_bounds(frame: pd.DataFrame) -> pd.DataFrame:
    """Merge each number and its bounds into one column of text."""
    base = next((name for name in BASES if name in frame), None)
    bounds = {name: (f"{name}_lower", f"{name}_upper") for name in frame if f"{name}_lower" in frame}
    if base is not None and "lower" in frame and base not in bounds:
        bounds[base] = ("lower", "upper")
    told = {}
    for name, ends in bounds.items():
        write = share_words if is_share(name) else partial(number_words, significant=3)
        cells = frame[[name, *ends]].set_axis(["value", "lower", "upper"], axis=1)
        told[name] = [write(row) for _, row in cells.iterrows()]
    frame = frame.assign(**told).drop(columns=[end for ends in bounds.values() for end in ends])
    if "quantity" in frame:
        frame = frame.assign(quantity=frame["quantity"].map(label_of))
    if "label" in frame:  # the interval's number is for code
        names = [name_interval(label) if "," in label else label for label in frame["label"]]  # or "all"
        frame = frame.assign(label=names).drop(columns="interval", errors="ignore")
    return frame


def readable(tokens: pd.DataFrame) -> pd.DataFrame:
    """Quote tokens so that blanks and line breaks are visible."""
    return tokens.assign(token=[repr(str(token)) for token in tokens["token"]]) if "token" in tokens else tokens


def define(terms: Mapping[str, str], *names: str) -> list[Block]:
    """Return the definitions of these terms, or of all."""
    return [Definition(name, terms[name]) for name in names or terms]


def series_of(
    statistics: pd.DataFrame,
    places: Sequence[str],
    wanted: Sequence[tuple[str, str, str, int]],
    *,
    panel: str = "",
    factor: float = 1.0,
) -> pd.DataFrame:
    """Make the series of those of these statistics that were computed. wanted: statistic, metric, words and look."""
    rows, parts = statistics.rename(columns={"interval": "at"}), []
    for statistic, metric, words, look in wanted:
        own = rows[(rows["statistic"] == statistic) & (rows["metric"] == metric)]
        if len(own):
            parts.append(make_series(drop_vacuous(own), places, words, look, panel=panel, factor=factor))
    return pd.concat(parts, ignore_index=True)
