"""A picture of what every setting does: score differences to the plain loss, predicted beside actual."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from gradscope.errors import checked
from gradscope.plots.style import NEUTRAL, finish, paper_style, require

PANELS = {"predicted, selection batches": "predicted_", "actual, held-out batches": ""}
"""Title of each heat map, and the prefix of the columns that it draws."""

LEGEND = "frame: candidate; *: interval excludes 0"
UNDECIDED = "frame: candidate; *: interval over prompts excludes 0"
"""Where the held-out batches are too few for a verdict."""


@paper_style()
@checked
def plot_tuning(settings: pd.DataFrame) -> Figure:
    """Heat maps α × η of the score minus the plain loss's, in percentage points; below them other methods' intervals.

    `settings` is `Screening.settings`. A star marks where the interval excludes 0; the candidate is framed, among
    methods filled. Without actual updates there is one column. Raises InputError for a missing column.
    """
    names = ("difference", "lower", "upper")
    require(
        settings,
        ["alpha", "eta", "method", "candidate", "verdict", *(f"{p}{n}" for p in PANELS.values() for n in names)],
    )
    drawn = {title: prefix for title, prefix in PANELS.items() if settings[f"{prefix}difference"].notna().any()}
    limit = 100 * np.nanmax(np.abs(settings[[f"{prefix}difference" for prefix in drawn.values()]])) or 1.0
    legend = UNDECIDED if (settings["verdict"] == "undecided").any() else LEGEND
    paired = settings["method"] == settings["method"].iloc[0]  # as the plain loss is, which comes first
    pairs, others = settings[paired], settings[~paired]
    rows = [(pairs, 2.9)] * (len(pairs) > 1) + [(others, 0.9 + 0.24 * len(others))] * (len(others) > 0)
    size = pairs["eta"].nunique(dropna=False)
    width = max(4.2 if len(others) else 2.6, 0.5 * size + 0.6)
    heights = [height for _, height in rows]
    shape = {"figsize": (width * len(drawn), sum(heights)), "height_ratios": heights, "layout": "constrained"}
    figure, axes = plt.subplots(len(rows), len(drawn), squeeze=False, **shape)
    plt.close(figure)
    for (part, _), line in zip(rows, axes, strict=True):
        for ax, (title, prefix) in zip(line, drawn.items(), strict=True):
            columns = {f"{prefix}{name}": name for name in names}
            numbers = part[["alpha", "eta", "method", "candidate", *columns]].rename(columns=columns)
            if part is pairs:
                _draw_map(ax, numbers, limit).set_title(f"{title}\n{legend}", loc="left")
            else:
                _draw_intervals(ax, numbers).set_title(f"{title}: other methods", loc="left")
    return figure


def _draw_intervals(ax: Axes, numbers: pd.DataFrame) -> Axes:
    """A line per method, the first on top; the candidate's dot is filled."""
    points, places = 100 * numbers[["difference", "lower", "upper"]].to_numpy(), np.arange(len(numbers))
    ax.axvline(0, color=NEUTRAL, linewidth=0.8)
    ax.hlines(places, points[:, 1], points[:, 2], color=NEUTRAL, linewidth=1.6)
    faces = np.where(numbers["candidate"], NEUTRAL, "white")
    ax.scatter(points[:, 0], places, s=22, facecolors=faces, edgecolors=NEUTRAL, zorder=3)
    ax.set_yticks(places, numbers["method"])
    ax.set(ylim=(len(numbers) - 0.5, -0.5), xlabel="score − plain's (points)")
    return finish(ax, numbers.reset_index(drop=True))


def _draw_map(ax: Axes, numbers: pd.DataFrame, limit: float) -> Axes:
    # Off comes first.
    import seaborn as sns

    place = {name: numbers[name].fillna(-1.0).rank(method="dense").astype(int) - 1 for name in ("alpha", "eta")}
    shape = [places.max() + 1 for places in place.values()]
    values, words = np.full(shape, np.nan), np.full(shape, "", dtype=object)
    cells = (place["alpha"], place["eta"])
    points = 100 * numbers["difference"].to_numpy()
    apart = (numbers["lower"] > 0) | (numbers["upper"] < 0)
    values[cells] = points
    words[cells] = [f"{v:+.1f}{'*' if star else ''}".replace("-", "−") for v, star in zip(points, apart, strict=True)]
    sns.heatmap(
        values, ax=ax, annot=words, fmt="", vmin=-limit, vmax=limit, cmap="RdBu_r", linewidths=0.5,
        annot_kws={"size": 8}, cbar_kws={"label": "score − plain's (points)", "pad": 0.02, "shrink": 0.8},
    )  # fmt: skip
    for row, column in zip(*(places[numbers["candidate"]] for places in cells), strict=True):
        ax.add_patch(Rectangle((column, row), 1, 1, fill=False, ec="black", lw=1.8, clip_on=False))
    ax.set_xticklabels(_names(numbers["eta"]), rotation=0)
    ax.set_yticklabels(_names(numbers["alpha"]), rotation=0)
    ax.tick_params(length=0)
    ax.set(xlabel="η (Lopti)", ylabel="α (Reweight)")
    return finish(ax, numbers.reset_index(drop=True))


def _names(column: pd.Series) -> list[str]:
    """Names of an axis's values, in order."""
    return [f"{value:g}" if value >= 0 else "off" for value in sorted(column.fillna(-1.0).unique())]
