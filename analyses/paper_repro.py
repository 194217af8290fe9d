"""Make the pages on what is reproduced from templates and the figures' CSVs: numbers of runs are looked up, not typed.

    python -m analyses.paper_repro [--figures figures] [--out .]

The texts are in pages/, macros that they share in pages/macros.jinja. In them {{ number("fig4_accuracy", "sampled",
variant="grpo") }} is one cell of fig4_accuracy.csv, wherever below figures/, `interval` a mean with its interval,
`contrast` a difference with its interval, its p and its seeds. A lookup that finds no row, or several, is an error.
`analyses.recompute` computes every cell that is looked up again, from what is kept of runs and measurements.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import tyro

from analyses.common.contrasts import seeds_to_tell
from analyses.common.places import findings, place
from analyses.common.script import exit_with
from analyses.common.tables import read_whole
from gradscope.errors import InputError
from gradscope.intervals import interval_labels
from gradscope.runs import write_text

if TYPE_CHECKING:
    import jinja2

TEMPLATES = Path(__file__).with_name("pages")
QUOTED = TEMPLATES / "quoted.toml"
"""What pages that are written by hand quote."""
PAGES = {
    page: f"{Path(page).name}.jinja"
    for page in ("paper_repro.md", "docs/preregistrations.md", "docs/other-figures.md", "docs/embedded-certain.md")
} | {"figures/README.md": "figures.md.jinja"}
"""Page → its template."""
FOLDERS = {
    "paper/embedded": "the paper's figures and tables, on `embedded`, a policy of 0.8 M parameters, and on sums",
    "paper/certain": "the same and the controls on `embedded-certain`, which is sure of nine tokens in ten",
    "paper/words": "the same on SmolLM2-135M-Instruct, warm-started on word problems",
    "pretrained": "SmolLM2-135M-Instruct and Gemma 3 270M as they come",
    "controls": "what the paper lacks: controls, signal and noise, size of batch, rates, predictions",
    "theory": "Prop. 4.2, its constants, what norms go with, proxies and baselines",
    "cost": "time, memory, and the error of sampling tokens",
}
"""Folders of figures/ with pictures, and of what they are."""


@dataclass(frozen=True)
class Options:
    figures: Path = Path("figures")
    """Folder of pictures, tables and their CSVs."""
    out: Path = Path()
    """Folder of the pages."""


@dataclass(frozen=True)
class Cell:
    """A cell that a page quotes."""

    page: str
    file: str
    column: str
    where: tuple[tuple[str, str], ...]
    value: float | str
    digits: int
    """Decimals that are printed."""


@dataclass(frozen=True)
class Numbers:
    """Functions for the templates: cells of the CSVs in a folder, as words."""

    folder: Path
    page: str = ""
    quoted: list[Cell] = field(default_factory=list)
    """The cells looked up so far."""

    @cached_property
    def _tables(self) -> dict[str, pd.DataFrame]:
        return {}

    def rows(self, file: str, /, **where: Any) -> pd.DataFrame:
        """Return the rows of file.csv with these values. Raises InputError for an unknown file or column."""
        path = place(self.folder, f"{file}.csv")
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
            raise InputError(f"{file}.csv has {len(table)} rows with {where}; the text needs exactly one")
        return table.iloc[0]

    def value(self, file: str, column: str, /, *, digits: int = 4, **where: Any) -> float:
        """Return one cell as a number; digits: decimals that the text prints."""
        row = self.row(file, **where)
        if column not in row:
            raise InputError(f"{file}.csv has no column {column!r}; it has {', '.join(row.index)}")
        self._quote(file, column, where, float(row[column]), digits)
        return float(row[column])

    def word(self, file: str, column: str, /, **where: Any) -> str:
        """Return one cell unchanged."""
        return str(self.row(file, **where)[column])

    def number(self, file: str, column: str, /, *, digits: int = 2, signed: bool = False, **where: Any) -> str:
        """Return one cell to `digits` decimals; signed: with a plus if it is positive."""
        value = self.value(file, column, digits=digits, **where)
        return ("+" if signed and value > 0 else "") + decimal(value, digits)

    def percent(self, file: str, column: str, /, *, digits: int = 0, **where: Any) -> str:
        """Return one cell, a share, in percent."""
        return decimal(100 * self.value(file, column, digits=digits + 2, **where), digits)

    def count(self, file: str, column: str, /, **where: Any) -> str:
        """Return one cell, a whole number, with commas."""
        return f"{round(self.value(file, column, digits=0, **where)):,}"

    def each(self, form: Callable[..., str], file: str, column: str, /, **where: Any) -> str:
        """Return one cell per interval of π, from [0, ¼) to [¾, 1], separated by slashes."""
        known = set(self.rows(file)["interval"].astype(str))
        labels = interval_labels() if interval_labels()[0] in known else range(len(interval_labels()))
        return " / ".join(form(file, column, interval=label, **where) for label in labels)

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
        mean, lower, upper = (self.value(file, column, digits=digits, **where) for column in columns)
        return with_interval(mean, lower, upper, digits, signed=signed)

    def difference(self, file: str, /, *, digits: int = 3, **where: Any) -> str:
        """Return a signed difference with its interval: `+.031 [−.012, .074]`."""
        return self.interval(file, ("difference", "lower", "upper"), digits=digits, signed=True, **where)

    def contrast(self, file: str, variant: str, baseline: str, *, digits: int = 3, **where: Any) -> str:
        """Return a paired difference: `+.031 [−.012, .074], p = .21, 6 seeds`, with Holm's p."""
        where |= {"variant": variant, "baseline": baseline}
        seeds = round(self.value(file, "seeds", digits=0, **where))
        if not seeds:
            return "not run"
        words = self.difference(file, digits=digits, **where)
        if math.isnan(self.row(file, **where)["p_holm"]):
            return f"{words}, " + ("1 seed, which decides nothing" if seeds == 1 else f"{seeds} seeds")
        return f"{words}, {self.p(file, **where)}, {seeds} seeds"

    def seeds_needed(self, file: str, variant: str, baseline: str, /, effect: float, claims: int, **where: Any) -> str:
        """Return the seeds needed to detect a true difference of this size, given the spread of those that exist."""
        where |= {"variant": variant, "baseline": baseline}
        seeds = seeds_to_tell(effect, self.row(file, **where), claims=claims)
        self._quote(file, "seeds_needed", where | {"effect": effect, "claims": claims}, seeds, 0)
        return "not known" if math.isnan(seeds) else f"{seeds:,.0f}"

    def p(self, file: str, column: str = "p_holm", /, **where: Any) -> str:
        """Return a row's p after Holm's correction, or another column's: `p = .21`."""
        return p_words(self.value(file, column, digits=3, **where))

    def verdict(self, file: str, variant: str, baseline: str, **where: Any) -> str:
        """Return the verdict on a difference: higher, lower, no difference found, or one seed shows nothing."""
        row = self.row(file, variant=variant, baseline=baseline, **where)
        if int(row["seeds"]) < 2:
            return "one seed decides nothing" if int(row["seeds"]) else "not run"
        if not row["differs"]:
            return "no difference found"
        return "higher" if row["difference"] > 0 else "lower"

    def _quote(self, file: str, column: str, where: Mapping[str, Any], value: float, digits: int) -> None:
        keys = tuple((name, str(own)) for name, own in where.items())
        self.quoted.append(Cell(self.page, file, column, keys, value, digits))


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


def render(figures: Path, page: str) -> str:
    """Render a page. Raises InputError if the text asks for a missing number."""
    return _environment(Numbers(figures, page)).get_template(PAGES[page]).render()


def _environment(numbers: Numbers) -> jinja2.Environment:
    import jinja2

    loader = jinja2.FileSystemLoader(TEMPLATES)
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, loader=loader)
    names = ("word", "number", "percent", "count", "each", "interval", "difference", "contrast", "seeds_needed")
    environment.globals |= {name: getattr(numbers, name) for name in (*names, "verdict", "value", "p")}
    environment.globals |= {"decimal": decimal, "place": lambda name: place(Path("figures"), name).as_posix()}
    environment.globals |= {"findings": findings(), "folders": FOLDERS, "command": command}
    return environment


def command(folder: str, module: str) -> str:
    """Return what draws a picture, in Markdown."""
    scale = folder.partition("paper/")[2]
    scale = f" --scale {scale}" if scale == "certain" else ""  # the words' scripts have their own by default
    return f"`python -m analyses.{module}{scale}`" if module else "–"


def quoted_cells(figures: Path, pages: Path = Path()) -> list[Cell]:
    """Return every cell that the pages quote, once for each page.

    pages: folder of those that are written by hand. Raises InputError if one of them does not say what QUOTED has.
    """
    cells: dict[Cell, None] = {}
    for page in PAGES:
        numbers = Numbers(figures, page)
        _environment(numbers).get_template(PAGES[page]).render()
        cells |= dict.fromkeys(numbers.quoted)
    for page, quotes in tomllib.loads(QUOTED.read_text(encoding="utf-8")).items():
        numbers, text = Numbers(figures, page), (pages / page).read_text(encoding="utf-8")
        environment = _environment(numbers)
        environment.globals |= vars(environment.get_template("macros.jinja").module)
        for quote in quotes:
            words = environment.from_string(quote).render()
            if " ".join(words.split()) not in " ".join(text.split()):
                raise InputError(f"{page} does not say {words!r}, as the CSVs do; mend it, or {QUOTED.name}")
        cells |= dict.fromkeys(numbers.quoted)
    return [cell for cell in cells if not math.isnan(cell.value)]


def main(options: Options) -> None:
    for page in PAGES:
        write_text(options.out / page, render(options.figures, page))


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
