"""Numbers with bounds, one series beside the other: by interval of π, by class, or over training steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from gradscope.errors import InputError, checked
from gradscope.intervals import name_interval
from gradscope.plots.style import (
    BLUE,
    LOOKS,
    NEUTRAL,
    finish,
    interval_colors,
    name_intervals,
    new_axes,
    new_panels,
    paper_style,
    require,
)

SERIES = ["panel", "series", "look", "at", "value", "lower", "upper"]
"""Columns of a drawing's series. panel: the title of its axes; series: the words of the legend; look: its place in
`LOOKS`; at: an interval's label, or a class."""
WHOLE = "all"
_BELOW = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2), "ncols": 2, "columnspacing": 1.0}
"""Where legends are."""
_DOWN = 0.6
"""Inches from the axes to the legend of a panel."""
BELOW = 4.0
"""Bits shown below the lowest point of a trend."""
STEP_TITLES = {
    "token_share": "share of the tokens",
    "logit_grad_share": "share of |w|·‖e − π‖",
    "clipped_share": "clipped tokens",
    "masked_share": "masked tokens",
    "mismatch": "|Δ log π| of the sampler",
    "entropy": "entropy (nats)",
}
"""Column of a step's numbers → its panel's title."""


class Look(TypedDict, total=False):
    """Arguments of `plot_series` beside the series."""

    ylabel: str
    xlabel: str
    rule: float
    size: tuple[float, float]
    lying: bool
    limits: tuple[float | None, float | None]


def make_series(
    rows: pd.DataFrame, places: Sequence[str], series: str, look: int, *, panel: str = "", factor: float = 1.0
) -> pd.DataFrame:
    """Make one series of a drawing, in this order of places.

    rows: with the columns at, value, lower and upper; places that they lack are NaN. factor: on the numbers.
    """
    known = rows.set_index("at")[["value", "lower", "upper"]].reindex(list(places)) * factor
    told = {"panel": panel, "series": series, "look": look}
    return known.rename_axis("at").reset_index().assign(**told)[SERIES]


@checked
@paper_style()
def plot_series(
    series: pd.DataFrame,
    *,
    ylabel: str,
    xlabel: str = "",
    rule: float = 0.0,
    size: tuple[float, float] = (3.4, 2.5),
    lying: bool = False,
    limits: tuple[float | None, float | None] = (None, None),
) -> Figure:
    """Draw series of points with bars side by side, a panel for each value of `panel`.

    Args:
        series: columns SERIES. Bars are its bounds; beside others that have some, points without are hollow, so that
            they do not look the surest. A place that is NaN has no point.
        ylabel, xlabel: of the numbers, and of the places.
        rule: where a line is drawn through the numbers.
        size: of a panel, in inches.
        lying: put the places on the vertical axis.
        limits: how far the numbers' axis reaches at most downwards, and at least upwards.
    """
    require(series, SERIES, what="the series")
    series = series.assign(panel=[name if isinstance(name, str) else "" for name in series["panel"]])  # as read back
    panels = [part for _, part in series.groupby("panel", sort=False)]
    figure, axes = new_panels(len(panels), width=size[0], height=size[1])
    for ax, part in zip(axes, panels, strict=True):
        _draw_panel(ax, part, rule=rule, lying=lying, limits=limits)
        if lying:
            ax.set(xlabel=ylabel, ylabel=xlabel)
        else:
            ax.set(ylabel=ylabel, xlabel=xlabel)
        ax.set_title(part["panel"].iat[0], loc="left")
        finish(ax, (part if len(panels) == 1 else part.drop(columns="panel")).reset_index(drop=True))
    return figure


def _draw_panel(
    ax: Axes, part: pd.DataFrame, *, rule: float, lying: bool, limits: tuple[float | None, float | None]
) -> None:
    places, each = list(dict.fromkeys(part["at"])), list(part.groupby("series", sort=False))
    step, barred, keys = 0.7 / len(each), part["lower"].notna().any(), []
    for number, (words, own) in enumerate(each):
        color, marker = LOOKS[int(own["look"].iat[0])]
        value, bars = measure_bars(own)
        x = np.array([places.index(place) for place in own["at"]]) + step * (number - (len(each) - 1) / 2)
        bare = barred & (own["lower"].isna() & own["value"].notna()).to_numpy()
        points = np.stack((value, x) if lying else (x, value))
        look = {"color": color, "ms": 3.5, "label": words}
        whiskers = {"xerr" if lying else "yerr": bars[:, ~bare], "elinewidth": 0.9}
        known = ax.errorbar(*points[:, ~bare], fmt=marker, **whiskers, **look)
        hollow = ax.plot(*points[:, bare], marker, mfc="white", **look)
        keys.append(hollow[0] if bare.all() else known)
    (ax.axvline if lying else ax.axhline)(rule, color=NEUTRAL, lw=0.6, ls="-" if rule == 0 else ":", zorder=0)
    low, high = ax.get_xlim() if lying else ax.get_ylim()
    low, high = max(low, limits[0] if limits[0] is not None else low), max(high, limits[1] or high)
    if lying:
        ax.set_yticks(range(len(places)), places)
        ax.set_xlim(low, high)
        ax.set_ylim(len(places) - 0.3, -0.7)
    else:
        ax.set_xticks(range(len(places)))
        name_intervals(ax, places)
        ax.set_ylim(low, high)
    if len(each) > 1:  # else the labels say what it is
        down = _DOWN / ax.get_figure().get_figheight()
        ax.legend(handles=keys, **_BELOW | {"bbox_to_anchor": (0.5, -down)})


def measure_bars(rows: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Return (values, [2, n] distances to their bounds); 0 if unknown, or if a percentile is on the other side."""
    middle, low, high = (rows[name].to_numpy(dtype=float) for name in ("value", "lower", "upper"))
    bars = np.stack([middle - low, high - middle])
    return middle, np.where(np.isfinite(bars), np.maximum(bars, 0.0), 0.0)


@checked
@paper_style()
def plot_module_shares(modules: pd.DataFrame) -> Axes:
    """Draw each module's share of the parameters and of the gradient energy."""
    require(modules, ["module", "parameter_share", "squared_share"], what="the table of modules")
    ax, places = new_axes(None, width=4.6, height=0.9 + 0.2 * len(modules)), np.arange(len(modules))
    ax.barh(places, 100 * modules["squared_share"], color=BLUE, height=0.6, label="of the gradient energy")
    ax.plot(100 * modules["parameter_share"], places, "s", color=NEUTRAL, mec="white", ms=6, label="of the parameters")
    ax.set_yticks(places, modules["module"])
    ax.invert_yaxis()
    ax.set(xlabel="share (%)")
    ax.legend(**_BELOW)
    return finish(ax, modules)


@checked
@paper_style()
def plot_trend(followed: pd.DataFrame) -> Figure:
    """Draw numbers over training steps, a panel for each `title`, with 95 % bands.

    followed: columns title, interval, step, value, lower, upper and unit. Titles name the interval of a number that has
    one. Points with other_step are hollow; points without a band, from too few prompts or tokens, are crosses beside
    the line. Bands of bits are cut off BELOW bits below the lowest point, since a share's lower bound may be nearly 0.
    Raises InputError without any number.
    """
    require(followed, ["title", "interval", "step", "value", "lower", "upper", "unit"], what="the trend")
    chosen = [own.sort_values("step") for _, own in followed.groupby("title", sort=False) if own["value"].notna().any()]
    if not chosen:
        raise InputError("the trend holds none of the numbers that are drawn; give that of diagnoses with weights")
    figure, panels = new_panels(len(chosen), width=2.4, height=2.0)
    ink = interval_colors()[0]
    for ax, rows in zip(panels, chosen, strict=True):
        known, unit = rows["lower"].notna().to_numpy(), rows["unit"].iat[0]
        steps, values, *bounds = (rows.loc[known, name] for name in ("step", "value", "lower", "upper"))
        ax.fill_between(steps, *bounds, color=ink, alpha=0.2, lw=0)
        ax.plot(steps, values, "-", color=ink)
        ax.plot(rows["step"][~known], rows["value"][~known], "x", color=ink, alpha=0.6, ms=5)
        foreign = rows["other_step"].to_numpy(dtype=bool) if "other_step" in rows else np.zeros(len(rows), dtype=bool)
        for part, inside in ((known & ~foreign, ink), (known & foreign, "white")):
            ax.plot(rows["step"][part], rows["value"][part], "o", color=ink, mfc=inside, ms=4)
        ax.axhline(rows["rule"].iat[0] if "rule" in rows else 0.0, color=NEUTRAL, lw=0.6, ls=":", zorder=0)
        label = rows["interval"].iat[0]
        tokens = "all tokens" if label == WHOLE else name_interval(label)
        ax.set_title(f"{rows['title'].iat[0]}\n{tokens}", loc="left")
        ax.set_xlabel("training step")
        ax.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        if unit == "bits":
            ax.set_ylim(bottom=max(ax.get_ylim()[0], rows["value"].min() - BELOW))
        if len(rows) == 1:  # a band has no width, an axis no length
            ax.vlines(rows["step"], rows["lower"], rows["upper"], color=ink, alpha=0.4)
            ax.set_xticks(rows["step"])
        finish(ax, rows.reset_index(drop=True))
    return figure


@checked
@paper_style()
def plot_steps(steps: pd.DataFrame) -> Figure:
    """Draw each step's numbers (columns of STEP_TITLES), a panel per known number, a line per interval."""
    known = [name for name in STEP_TITLES if steps[name].notna().any()]
    figure, panels = new_panels(len(known), width=2.4, height=2.0)
    labels = list(dict.fromkeys(steps["interval"]))
    colors = interval_colors(max(4, len(labels)))
    for ax, name in zip(panels, known, strict=True):
        for label, color in zip(labels, colors, strict=False):
            rows = steps[steps["interval"] == label]
            ax.plot(rows["step"], rows[name], "-", color=color, lw=1, label=name_interval(label))
            if len(rows) == 1:
                ax.plot(rows["step"], rows[name], "o", color=color, ms=4)
        ax.set_title(STEP_TITLES[name], loc="left")
        ax.set_xlabel("training step")
        ax.set_ylim(bottom=0)
        ax.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        finish(ax, steps[["step", "interval", name]].reset_index(drop=True))
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(labels))
    return figure
