"""Make paper_repro.md from its template and the figures' CSVs: numbers of runs are looked up, not typed.

    python -m analyses.paper_repro [--figures figures] [--out paper_repro.md]

The text is paper_repro.md.jinja beside this file. In it {{ number("fig4_accuracy", "sampled", variant="grpo") }} is one
cell of figures/fig4_accuracy.csv, `interval` a mean with its interval, `contrast` a difference with its interval, its p
and its seeds. A lookup that finds no row, or several, is an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd
import tyro

from analyses.common.contrasts import seeds_to_tell
from analyses.common.script import exit_with
from analyses.common.tables import read_whole
from gradscope.errors import InputError
from gradscope.intervals import interval_labels
from gradscope.runs import write_text

TEMPLATE = Path(__file__).with_name("paper_repro.md.jinja")


@dataclass(frozen=True)
class Options:
    figures: Path = Path("figures")
    """Folder of the CSVs."""
    out: Path = Path("paper_repro.md")


@dataclass(frozen=True)
class Numbers:
    """Functions for the template: cells of the CSVs in a folder, as words."""

    folder: Path

    @cached_property
    def _tables(self) -> dict[str, pd.DataFrame]:
        return {}

    def rows(self, file: str, /, **where: Any) -> pd.DataFrame:
        """Return the rows of file.csv with these values. Raises InputError for an unknown file or column."""
        path = self.folder / f"{file}.csv"
        if file not in self._tables:
            if not path.is_file():
                raise InputError(f"{path} is not there, and the text quotes it; run make figures first")
            self._tables[file] = read_whole(path, "run make figures again")
        table = self._tables[file]
        if unknown := [name for name in where if name not in table]:
            raise InputError(f"{path} has no column {unknown[0]!r}; it has {', '.join(table)}")
        for name, value in where.items():
            table = table[table[name].astype(str) == str(value)]
        return table

    def row(self, file: str, /, **where: Any) -> pd.Series:
        """Return the only such row. Raises InputError for none or several."""
        table = self.rows(file, **where)
        if len(table) != 1:
            raise InputError(f"{self.folder / file}.csv has {len(table)} rows with {where}; the text needs exactly one")
        return table.iloc[0]

    def value(self, file: str, column: str, /, **where: Any) -> float:
        """Return one cell as a number."""
        row = self.row(file, **where)
        if column not in row:
            raise InputError(f"{self.folder / file}.csv has no column {column!r}; it has {', '.join(row.index)}")
        return float(row[column])

    def word(self, file: str, column: str, /, **where: Any) -> str:
        """Return one cell unchanged."""
        return str(self.row(file, **where)[column])

    def number(self, file: str, column: str, /, *, digits: int = 2, **where: Any) -> str:
        """Return one cell to `digits` decimals."""
        return decimal(self.value(file, column, **where), digits)

    def percent(self, file: str, column: str, /, *, digits: int = 1, **where: Any) -> str:
        """Return one cell, a share, in percent."""
        return decimal(100 * self.value(file, column, **where), digits)

    def count(self, file: str, column: str, /, **where: Any) -> str:
        """Return one cell, a whole number, with commas."""
        return f"{round(self.value(file, column, **where)):,}"

    def scientific(self, file: str, column: str, /, **where: Any) -> str:
        """Return one cell to two significant digits: 8.7e-5."""
        digits, power = f"{self.value(file, column, **where):.1e}".split("e")
        return f"{digits}e{int(power)}"

    def each(self, form: Callable[..., str], file: str, column: str, /, **where: Any) -> str:
        """Return one cell per interval of π, from [0, ¼) to [¾, 1], separated by slashes."""
        known = set(self.rows(file)["interval"].astype(str))
        labels = interval_labels() if interval_labels()[0] in known else range(len(interval_labels()))
        return " / ".join(form(file, column, interval=label, **where) for label in labels)

    def extremes(
        self, file: str, column: str, /, *, without: Mapping[str, Any] = MappingProxyType({}), **where: Any
    ) -> str:
        """Return the least and the largest of some cells, except those of the rows `without`."""
        table = self.rows(file, **where)
        for name, value in without.items():
            table = table[table[name].astype(str) != str(value)]
        return f"{decimal(table[column].min(), 2)} to {decimal(table[column].max(), 2)}"

    def interval(
        self,
        file: str,
        columns: tuple[str, str, str] = ("mean", "lower", "upper"),
        /,
        *,
        digits: int = 2,
        signed: bool = False,
        **where: Any,
    ) -> str:
        """Return a mean with its interval, or alone without one (one seed)."""
        mean, lower, upper = (self.value(file, column, **where) for column in columns)
        return with_interval(mean, lower, upper, digits, signed=signed)

    def told(self, file: str, /, **where: Any) -> str:
        """Count the rows whose interval excludes 0; a row without an interval does not count: `50 of 256`."""
        rows = self.rows(file, **where)
        return f"{((rows['lower'] > 0) | (rows['upper'] < 0)).sum()} of {len(rows)}"

    def contrast(self, file: str, variant: str, baseline: str, *, digits: int = 3, **where: Any) -> str:
        """Return a paired difference: `+.031 [−.012, .074], p = .21, 6 seeds`, with Holm's p."""
        row = self.row(file, variant=variant, baseline=baseline, **where)
        seeds = int(row["seeds"])
        if not seeds:
            return "not run"
        words = with_interval(row["difference"], row["lower"], row["upper"], digits, signed=True)
        if math.isnan(row["p_holm"]):
            return f"{words}, " + ("1 seed, which decides nothing" if seeds == 1 else f"{seeds} seeds")
        return f"{words}, {p_words(row['p_holm'])}, {seeds} seeds"

    def seeds_needed(self, file: str, variant: str, baseline: str, /, effect: float, claims: int, **where: Any) -> str:
        """Return the seeds needed to detect a true difference of this size, given the spread of those that exist."""
        seeds = seeds_to_tell(effect, self.row(file, variant=variant, baseline=baseline, **where), claims=claims)
        return "not known" if math.isnan(seeds) else f"{seeds:,.0f}"

    def p(self, file: str, /, **where: Any) -> str:
        """Return a row's p after Holm's correction: `p = .21`."""
        return p_words(self.value(file, "p_holm", **where))

    def verdict(self, file: str, variant: str, baseline: str, **where: Any) -> str:
        """Return the verdict on a difference: higher, lower, no difference shown, or one seed shows nothing."""
        row = self.row(file, variant=variant, baseline=baseline, **where)
        if int(row["seeds"]) < 2:
            return "one seed decides nothing" if int(row["seeds"]) else "not run"
        if not row["differs"]:
            return "no difference shown"
        return "higher" if row["difference"] > 0 else "lower"


def decimal(value: float, digits: int) -> str:
    """Format a number as the text does: no zero before the point, a true minus.

    >>> decimal(0.391, 2), decimal(-0.0312, 3), decimal(12.25, 1), decimal(-0.001, 2)
    ('.39', '−.031', '12.2', '.00')
    """
    text = f"{value:.{digits}f}"
    sign, size = ("−", text[1:]) if text.startswith("-") else ("", text)
    if float(text) == 0:
        sign = ""
    return sign + (size[1:] if size.startswith("0.") else size)


def p_words(p: float) -> str:
    """Format a p-value as the text does; NaN means that no claim was made.

    >>> p_words(0.2134), p_words(0.0421), p_words(0.0004), p_words(float("nan"))
    ('p = .21', 'p = .042', 'p < .001', 'no claim')
    """
    if math.isnan(p):
        return "no claim"
    return "p < .001" if p < 0.001 else f"p = {decimal(p, 3 if p < 0.1 else 2)}"


def with_interval(mean: float, lower: float, upper: float, digits: int, *, signed: bool) -> str:
    """Format `.53 [.47, .58]`; signed: with a plus for positive values.

    >>> with_interval(0.031, -0.012, 0.074, 3, signed=True)
    '+.031 [−.012, .074]'
    """
    words = ("+" if signed and mean > 0 else "") + decimal(mean, digits)
    return words if math.isnan(lower) else f"{words} [{decimal(lower, digits)}, {decimal(upper, digits)}]"


def render(figures: Path, template: Path = TEMPLATE) -> str:
    """Render the page. Raises InputError if the text asks for a missing number."""
    import jinja2

    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False)
    numbers = Numbers(figures)
    names = ("word", "number", "percent", "count", "scientific", "each", "extremes", "interval")
    names += ("told", "contrast", "seeds_needed", "verdict", "value", "p")
    functions = {name: getattr(numbers, name) for name in names}
    return environment.from_string(template.read_text(encoding="utf-8")).render(functions | {"decimal": decimal})


def main(options: Options) -> None:
    write_text(options.out, render(options.figures))


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
