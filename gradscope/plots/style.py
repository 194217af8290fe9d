"""The one sheet of style: a page's width, a colour per meaning, headlines; names of intervals; reproducible files."""

import os
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gradscope.errors import InputError
from gradscope.intervals import EDGES, interval_labels
from gradscope.plots.labels import LAYER, label_of
from gradscope.runs import replacing

NEUTRAL = "#555555"
"""Colour of everything that belongs to no interval: all tokens, fits, reference lines."""
POSITIVE, NEGATIVE = "#2a7f62", "#b5483a"
"""Colours of positive and negative advantages, or of a second and a third kind of number."""
BLUE, ORANGE = "#0072b2", "#d55e00"
LOOKS = (
    *((NEUTRAL, "s"), ("#999999", "D"), (BLUE, "o"), (ORANGE, "o"), ("#56b4e9", "^"), ("#e69f00", "^")),
    *((ORANGE, "s"), (NEUTRAL, "D"), ("#2a9d8f", "^")),
)
"""Colour and marker of a series of points, by its number."""

POLICIES = {"paper": "black", "embedded": "#737373", "smollm2": "#d95f02", "gemma3": "#1b9e77"}
"""Colours of policies; the paper's own numbers are white diamonds with a black edge."""
TIMES = {"before": "#9aa5b1", "after": "#b5548a"}
"""Colours of before and after training, or of shares of the tokens and of the gradient."""
PAGE_WIDTH = 7.3
"""Inches, of a page's column: at 800 pixels 8 pt are 12 pixels. No figure is wider."""

_FONT_SIZE = 8
_LINE = 0.17
"""Height of a line, in inches."""
_NARROW, _WIDE = 12.5, 17.0
"""Characters to an inch of a headline, and of a note beneath a figure."""
_POINTS_PER_INTERVAL = 10_000
_STYLE = {
    "font.size": _FONT_SIZE,
    "axes.titlesize": _FONT_SIZE + 1,
    "axes.labelsize": _FONT_SIZE,
    "legend.fontsize": _FONT_SIZE,
    "legend.frameon": False,
    "legend.handlelength": 1.4,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "lines.linewidth": 1.2,
    "figure.dpi": 150,
    "savefig.dpi": 300,
    "pdf.fonttype": 42,
    "svg.hashsalt": "gradscope",
}
# Whatever would carry a date or a version into the file, switched off.
_METADATA = {
    ".png": {"Software": None},
    ".pdf": {"Creator": None, "Producer": None, "CreationDate": None},
    ".svg": {"Creator": None, "Date": None},
}
_drawn: WeakKeyDictionary[Axes, pd.DataFrame] = WeakKeyDictionary()


@contextmanager
def paper_style() -> Iterator[None]:
    """Apply matplotlib's defaults and the figures' settings inside the block; restore the user's rcParams afterwards.

    Also a decorator: ``@paper_style()``. Fonts are 8 pt and larger at the size the figure is drawn.
    """
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_STYLE)
        yield


def new_axes(ax: Axes | None, *, width: float = 3.4, height: float = 2.5) -> Axes:
    """Return the given axes, or new ones (size in inches) in a pyplot figure, so that a notebook shows it."""
    return ax if ax is not None else plt.subplots(figsize=(width, height), layout="constrained")[1]


def new_panels(
    count: int, *, width: float, height: float, ratios: Sequence[float] | None = None
) -> tuple[Figure, list[Axes]]:
    """Return a figure of `count` axes of `width` × `height` inches, in as few rows as fit a page (7.3 inches wide).

    pyplot does not keep it, so a notebook shows it once, as a cell's value, and it is freed with its last reference.
    """
    rows = -(-count // int(PAGE_WIDTH // width))
    columns = -(-count // rows)
    size = (width * columns, height * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False, width_ratios=ratios)
    plt.close(figure)
    for unused in axes.flat[count:]:
        unused.remove()
    return figure, list(axes.flat[:count])


def headline(figure: Figure, finding: str, note: str = "") -> Figure:
    """Write what a figure shows above it, and what its marks and bars are, and of how many, beneath; it grows by that.

    A headline or a note that is there already is replaced, unless it would be by nothing.
    """
    width, height = figure.get_size_inches()
    told = {text.get_gid(): text for text in figure.texts}
    bold = {"fontweight": "bold", "fontsize": _FONT_SIZE + 1, "va": "top"}
    plain = {"color": NEUTRAL, "fontsize": _FONT_SIZE, "va": "bottom"}
    for key, words, per_inch, look in (("finding", finding, _NARROW, bold), ("note", note, _WIDE, plain)):
        if not words:
            continue
        if key in told:
            height -= _LINE * len(told[key].get_text().splitlines())
            told[key].remove()
        room = int(per_inch * width)
        lines = [line for part in words.splitlines() for line in textwrap.wrap(part, room, break_long_words=False)]
        told[key] = figure.text(0.005, 0.0, "\n".join(lines), gid=key, **look)
        height += _LINE * len(lines)
    figure.set_size_inches(width, height)
    heights = dict.fromkeys(("finding", "note"), 0.0)
    for key, y in (("finding", 1 - 0.03 / height), ("note", 0.03 / height)):
        if key in told:
            told[key].set_y(y)
            heights[key] = _LINE * len(told[key].get_text().splitlines())
    # Axes, and the figure's legends, which matplotlib would put over a title.
    left, bottom, right, top = 0.0, heights["note"] / height, 1.0, 1 - heights["finding"] / height
    inside = (left, bottom, right - left, top - bottom)
    for legend in figure.legends:  # With an anchor of their own, room for them is no longer made.
        box = legend.get_window_extent().transformed(figure.transFigure.inverted())
        legend.set_bbox_to_anchor(inside, figure.transFigure)
        wide, tall = box.width + 0.08 / width, box.height + 0.08 / height
        match legend._outside_loc:
            case "upper":
                top -= tall
            case "lower":
                bottom += tall
            case "right":
                right -= wide
            case "left":
                left += wide
    if (engine := figure.get_layout_engine()) is not None:
        engine.set(rect=(left, bottom, right - left, top - bottom))
    return figure


def finish(ax: Axes, drawn: pd.DataFrame) -> Axes:
    """Attach the drawn numbers to `ax` for `save_figure`, and fix what later draws would take from rcParams."""
    _drawn[ax] = drawn
    ax.tick_params(which="both", labelsize=_FONT_SIZE, width=0.7)
    return ax


def drawn_numbers(figure: Figure | Axes) -> pd.DataFrame:
    """Return the numbers behind a figure, a block of rows per panel; a column `panel` names several."""
    axes = figure.axes if isinstance(figure, Figure) else [figure]
    parts = [((ax.get_title(loc="left") or ax.get_title()).split("\n")[0], _drawn[ax]) for ax in axes if ax in _drawn]
    if not parts:
        raise InputError(
            "the figure holds no numbers that gradscope drew; a figure travels with its CSV; pass data=DataFrame"
        )
    if len(parts) == 1:
        return parts[0][1]
    named = {title or f"panel {number}": part for number, (title, part) in enumerate(parts, start=1)}
    if len(named) < len(parts):
        raise InputError(
            "panels of one figure bear the same title, so their numbers could not be told apart; rename one"
        )
    return pd.concat(named, names=["panel", None]).reset_index(level="panel").reset_index(drop=True)


def save_figure(figure: Figure | Axes, path: str | os.PathLike, data: pd.DataFrame | None = None) -> Path:
    """Write the picture (.png, .pdf or .svg) and, beside it, a CSV of what it shows, both atomically; close the figure.

    `data` are the numbers for the CSV (with the index, unless it is 0, 1, …), by default those that this package's
    functions drew. The same figure gives the same bytes in the same environment. Raises InputError for another suffix.
    """
    path = Path(path)
    while not isinstance(figure, Figure):  # an Axes, perhaps inside a SubFigure
        figure = figure.figure
    if path.suffix not in _METADATA:
        raise InputError(
            f"cannot save a figure as {path.name!r}; the suffix must be one of {', '.join(_METADATA)}; rename it"
        )
    data = drawn_numbers(figure) if data is None else data
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with replacing(path.with_suffix(".csv")) as numbers, replacing(path) as picture:
            with paper_style():
                figure.savefig(picture, format=path.suffix[1:], metadata=_METADATA[path.suffix])
            data.to_csv(numbers, index=not isinstance(data.index, pd.RangeIndex), lineterminator="\n")
    finally:
        plt.close(figure)
    return path


def name_intervals(ax: Axes, labels: Sequence[str], beneath: Iterable[str] | None = None) -> None:
    """Label the x ticks with intervals, and with other words beneath, upright if they are long or many."""
    words = [label.replace(", ", ",") for label in labels]
    upright = len(words) > 5 or max(map(len, words)) > 9
    if beneath is not None:
        words = [f"{word}\n{other}" for word, other in zip(words, beneath, strict=True)]
    ax.set_xticklabels(words, rotation=90 if upright else 0, linespacing=1.3)


def draw_heatmap(
    ax: Axes, numbers: pd.DataFrame, words: np.ndarray | pd.DataFrame, colors: dict[str, Any], bar: dict[str, Any]
) -> None:
    """Draw a heat map with words in its cells, a dash where a number is NaN.

    colors, bar: seaborn's arguments for the colours, and for the bar that explains them.
    """
    import seaborn as sns

    settings = {"annot_kws": {"size": _FONT_SIZE}, "linewidths": 0.5, "cbar_kws": {"pad": 0.02, **bar}, **colors}
    sns.heatmap(numbers, ax=ax, annot=words, fmt="", **settings)
    for row, column in np.argwhere(numbers.isna().to_numpy()):
        ax.text(column + 0.5, row + 0.5, "–", ha="center", va="center")
    ax.tick_params(length=0)
    ax.set_yticklabels([label.replace(", ", ",") for label in numbers.index], rotation=0)


def edge_names(edges: Sequence[float] = EDGES) -> list[str]:
    """Return the intervals' edges as tick labels.

    >>> edge_names()
    ['0', '¼', '½', '¾', '1']
    """
    pairs = [label[1:-1].split(", ") for label in interval_labels(edges)]
    return [low for low, _ in pairs] + [pairs[-1][1]]


def interval_colors(count: int = 4) -> list[tuple[float, float, float]]:
    """Return a colour per interval, from dark (low probability) to light, distinct in grey and for the colour-blind."""
    import seaborn as sns

    return list(sns.color_palette("viridis", count))


def norm_column(layer: int | str) -> str:
    """Return the column of "logits", "parameters", a block number ℓ (0: input of the first) or a column name.

    >>> norm_column("logits"), norm_column(3), norm_column("param_grad_norm")
    ('logit_grad_norm', 'act_grad_norm.3', 'param_grad_norm')
    """
    named, word = {"logits": "logit_grad_norm", "parameters": "param_grad_norm"}, str(layer)
    return named.get(word, f"{LAYER}{word}" if word.isdecimal() else word)


def norm_words(layer: int | str, parameters: str = "all parameters") -> tuple[str, str]:
    """Return a layer's place in words and the symbol of its token gradient's norm; parameters: what ‖g‖ runs over.

    >>> norm_words("logits")[0], norm_words("act_grad_norm.0")[0], norm_words(3)
    ('logits', 'input of block 1', ('output of block 3', '‖$δ_{3}$‖'))
    """
    column = norm_column(layer)
    if column == "logit_grad_norm":
        return "logits", r"‖$δ_{\mathrm{logits}}$‖"
    if column == "param_grad_norm":
        return parameters, "‖$g$‖"
    return label_of(column), f"‖$δ_{{{column.removeprefix(LAYER)}}}$‖"


def describe_drawn(points: pd.DataFrame, tokens: int) -> str:
    """Return a remark if `draw_tokens` would draw only some of these tokens, else ""."""
    if len(points) == tokens:
        return ""
    return f",\n≤ {_POINTS_PER_INTERVAL:,} drawn an interval"


def draw_tokens(ax: Axes, x: str, y: str, tokens: pd.DataFrame) -> pd.DataFrame:
    """Draw a scatter of at most 10,000 tokens per interval in its colour; return the rows drawn.

    They are always the same ones, in random order, so that no interval hides another, and rasterized to keep PDFs
    small.
    """
    shuffled = tokens.iloc[np.random.default_rng(0).permutation(len(tokens))]
    points = shuffled[shuffled.groupby("interval").cumcount() < _POINTS_PER_INTERVAL]
    colors = np.asarray(interval_colors(max(4, 1 + int(tokens["interval"].max()))))
    ax.scatter(
        points[x], points[y], s=4, c=colors[points["interval"].to_numpy(dtype=int)], alpha=0.5, lw=0, rasterized=True
    )
    return points


def require(table: pd.DataFrame, columns: Sequence[str], *, what: str = "the token table") -> None:
    """Raise InputError unless `table` has rows and all `columns`."""
    missing = [column for column in columns if column not in table.columns]
    if missing:
        present = ", ".join(map(str, table.columns))
        raise InputError(f"{what} has no column {', '.join(missing)}, which this figure draws; it has {present}")
    if table.empty:
        raise InputError(f"{what} has no rows; a figure needs at least one; measure a response first")


def require_intervals(table: pd.DataFrame, count: int | None = None) -> None:
    """Raise InputError unless `interval` is one of `count` intervals in every row (None: as many as occur)."""
    count = max(4, 1 + int(np.nan_to_num(table["interval"].max()))) if count is None else count
    strange = table.loc[~table["interval"].isin(range(count)), "interval"]
    if len(strange):
        raise InputError(
            f"the token table has interval {strange.iloc[0]!r}; 0…{count - 1} are wanted; pass its own edges"
        )


def short_count(count: int | np.integer) -> str:
    """Write a count in at most five characters.

    >>> short_count(9999), short_count(12345), short_count(2_500_000)
    ('9,999', '12.3k', '2.5M')
    """
    if count < 10_000:
        return f"{count:,}"
    return f"{count / 1e3:.3g}k" if count < 999_500 else f"{count / 1e6:.3g}M"


def short_number(value: float) -> str:
    """Write a number in two or three digits, as `0.041`, `12.3` or `4.1e-7`.

    >>> [short_number(value) for value in (0.0, 4.12e-7, 0.0412, 1.0, 12.34, 1234.5, 5e7)]
    ['0', '4.1e-7', '0.041', '1.00', '12.3', '1234', '5.0e7']
    """
    if value != 0 and not 1e-3 <= abs(value) < 1e4:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    if value == 0 or abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:#.3g}" if abs(value) >= 0.1 else f"{value:#.2g}"
