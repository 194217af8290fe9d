"""Draw what each weighting would do with one batch, a row per weighting."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from gradscope.errors import checked
from gradscope.plots.style import (
    NEGATIVE,
    NEUTRAL,
    PAGE_WIDTH,
    POSITIVE,
    finish,
    headline,
    interval_colors,
    paper_style,
    require,
)

_PANELS = {
    "norm_ratio": "norm of the update\n(× plain's)",
    "cosine": "cosine with\nplain's update",
    "signal_to_noise": "signal to noise\nof one prompt",
    "right_sgd": "tokens moved in their\nadvantage's direction (%)",
    "effective_share": "tokens that carry\nthe update (%)",
}
_KINDS = {
    "cosine": {"cosine": ("measured", "o"), "cosine_from_energies": ("from energies alone", "x")},
    "right_sgd": {"right_sgd": ("SGD", "o"), "right_adamw": ("AdamW", "s"), "right_step": ("real steps", "D")},
}
"""Statistics drawn in one panel, with their names and markers."""
_PERCENT = ("right_sgd", "effective_share")
_ROW = 0.24
_BELOW = {"loc": "upper center", "bbox_to_anchor": (0.5, 0.0), "borderaxespad": 2.2, "handlelength": 0.8}
"""Where legends are: below the tick labels, however many rows there are."""


@paper_style()
@checked
def plot_comparison(table: pd.DataFrame, by_interval: pd.DataFrame, labels: Sequence[str]) -> Figure:
    """Draw each weighting's energy by interval of π, norm, cosine, signal to noise, directions, carrying tokens.

    table, by_interval, labels: a `Comparison`'s. Weightings equal to another are named below. Bars are 95 % intervals
    over prompts; the grey line is plain GRPO's value, or 0. Raises InputError for a missing column.
    """
    require(table, ["method", "step", "same_as", *_PANELS], what="the comparison")
    rows = table[table["same_as"] == ""].reset_index(drop=True)
    names, told = _names(rows), _tell_same(table[table["same_as"] != ""])
    size = (PAGE_WIDTH, 2 * (0.95 + _ROW * len(rows)))
    figure, grid = plt.subplots(2, 3, figsize=size, layout="constrained", sharey=True, width_ratios=[1.25, 1.0, 1.0])
    plt.close(figure)
    axes = grid.flat
    _draw_energy(axes[0], rows, by_interval, labels, names)
    for ax, (column, title) in zip(axes[1:], _PANELS.items(), strict=True):
        _draw_points(ax, rows, column)
        ax.set_title(title, loc="left")
    axes[0].invert_yaxis()
    return headline(figure, "", f"Bars: 95 % intervals over prompts; the grey line is plain GRPO's value, or 0. {told}")


def _names(rows: pd.DataFrame) -> list[str]:
    """Return the row labels: the weighting and, if it takes several steps, the step."""
    steps = {"all": "", "both": ", real steps"}
    return [f"{row.method}{steps.get(row.step, f', step “{row.step}”')}" for row in rows.itertuples()]


def _tell_same(same: pd.DataFrame) -> str:
    """Return a sentence on weightings left out because their weights equal another's."""
    groups = same.groupby("same_as", sort=False)["method"]
    return " ".join(f"The same as {name} on this batch: {', '.join(own)}." for name, own in groups)


def _draw_energy(
    ax: Axes, rows: pd.DataFrame, by_interval: pd.DataFrame, labels: Sequence[str], names: Sequence[str]
) -> None:
    keys = ["method", "step"]
    shares = by_interval.pivot_table(index=keys, columns="interval", values="energy_share", sort=False)
    shares = 100 * shares.reindex(pd.MultiIndex.from_frame(rows[keys])).to_numpy()
    left, colors = np.zeros(len(rows)), interval_colors(max(4, len(labels)))
    for place, label in enumerate(labels):
        ax.barh(range(len(rows)), shares[:, place], left=left, color=colors[place], label=label, height=0.75, lw=0)
        left = left + np.nan_to_num(shares[:, place])
    ax.set_yticks(range(len(rows)), names)
    ax.set_xlim(0, 100)
    ax.set_title("energy Σ(w‖g‖)²\nby interval of π (%)", loc="left")
    ax.legend(**_BELOW, ncols=-(-len(labels) // 2), columnspacing=0.8)
    drawn = pd.DataFrame({f"energy_share {label}": shares[:, place] for place, label in enumerate(labels)})
    finish(ax, pd.concat([rows[keys], drawn], axis=1))


def _draw_points(ax: Axes, rows: pd.DataFrame, column: str) -> None:
    kinds = {k: v for k, v in _KINDS.get(column, {column: ("", "o")}).items() if k in rows}
    factor = 100.0 if column in _PERCENT else 1.0
    parts, places = [rows[["method", "step"]]], np.arange(len(rows))
    for number, (name, (word, marker)) in enumerate(kinds.items()):
        found = factor * rows[[name, f"{name}_lower", f"{name}_upper"]].to_numpy(np.float64)
        height = places + 0.22 * (number - (len(kinds) - 1) / 2)
        color = ("black", POSITIVE, NEGATIVE)[number]
        ax.hlines(height, found[:, 1], found[:, 2], color=color, lw=0.9)
        ax.plot(found[:, 0], height, marker, color=color, ms=3.2, label=word)
        parts.append(pd.DataFrame(found, columns=[name, f"{name}_lower", f"{name}_upper"]))
    reference = 0.0 if column == "signal_to_noise" else factor * rows[column].iloc[0]
    ax.axvline(reference, color=NEUTRAL, lw=0.6, zorder=0)
    ax.tick_params(axis="y", length=0, labelleft=ax.get_subplotspec().is_first_col())
    ax.xaxis.set_major_locator(MaxNLocator(3))  # labels of adjacent panels must not touch
    if len(kinds) > 1:
        ax.legend(**_BELOW)
    finish(ax, pd.concat(parts, axis=1))
