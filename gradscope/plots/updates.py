"""Pictures of what an update does: Fig. 1 (c, e, f), who moves whom, and what drives the norm.

They draw the tables of `updates` and `theory` in the manner of the other `plots`.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from gradscope.errors import InputError, checked
from gradscope.intervals import EDGES, interval_labels
from gradscope.plots.style import (
    NEGATIVE,
    NEUTRAL,
    POSITIVE,
    finish,
    interval_colors,
    name_intervals,
    new_axes,
    norm_words,
    paper_style,
    require,
    short_number,
)

SIGNS = {"positive": (POSITIVE, 1), "negative": (NEGATIVE, -1)}
"""{sign of the advantage: (colour, side)}."""
_FEW_TOKENS = 10
_MANY = 12
"""Places side by side, beyond which a figure is wider than a page."""
_GRID = 400
_LEFT_OUT = 0.01
"""Share of an interval's tokens that moved most, which is not drawn."""
_WORDS = {
    "delta_prob": "Δπ",
    "delta_logprob": "Δ log π (nats)",
    "delta_log_odds": "Δ [log π − log(1−π)]",
}


@paper_style()
@checked
def plot_movement(
    table: pd.DataFrame,
    name: str = "all",
    *,
    value: str = "delta_prob",
    edges: Sequence[float] = EDGES,
    ax: Axes | None = None,
) -> Axes:
    """Draw Fig. 1 (c, e, f): how far each interval's tokens moved, for negative (left) and positive advantages (right).

    table: `updates.movement_table` with the movement `name`. In each interval the 1 % of tokens with the
    largest |movement| is not drawn; the paper's 1 % of all tokens would hit almost only uncertain ones if most are
    certain. Half violins are as wide as the root of the density, scaled to one width, with the median; fewer than 10
    tokens are points. Under each interval is the mean |movement| of all its tokens, drawn or not.
    """
    column = f"{value}.{name}"
    require(table, ["interval", "advantage", column], what="the movement table")
    if value not in _WORDS:
        raise InputError(f"value is {value!r}; give one of {', '.join(_WORDS)}")
    ax = new_axes(ax)
    labels = interval_labels(edges)
    rows = []
    for interval, label in enumerate(labels):
        own = table[table["interval"] == interval]
        nearest = np.argsort(own[column].abs().to_numpy(), kind="stable")[: len(own) - round(_LEFT_OUT * len(own))]
        shown = own.iloc[np.sort(nearest)]
        for word, (ink, sign) in SIGNS.items():
            moved = shown.loc[np.sign(shown["advantage"]) == sign, column]
            rows.append(_half_violin(ax, interval, moved.to_numpy(np.float64), ink, sign) | {"sign": word})
            rows[-1] |= {"interval": label, "mean_abs_of_all": own[column].abs().mean()}
    ax.axhline(0, color=NEUTRAL, lw=0.6, zorder=0)
    ax.set_xticks(range(len(labels)))
    means = [row["mean_abs_of_all"] for row in rows[:: len(SIGNS)]]
    name_intervals(ax, labels, ["–" if np.isnan(mean) else short_number(mean) for mean in means])
    ax.set_xlabel(f"$π_{{old}}$ before the step; beneath: mean |{_WORDS[value].split(' (')[0]}|")
    ax.set_ylabel(f"{_WORDS[value]}; top {100 * _LEFT_OUT:g} % of each left out")
    ax.ticklabel_format(axis="y", scilimits=(-2, 3))
    ax.legend(handles=[Patch(color=ink, alpha=0.75, label=f"Â {'<>'[sign > 0]} 0") for ink, sign in SIGNS.values()])
    return finish(ax, pd.DataFrame(rows))


def _half_violin(ax: Axes, place: int, moved: np.ndarray, ink: str, sign: int) -> dict[str, int | float]:
    """Draw one half of a violin on the side given by the sign; return the numbers shown."""
    if len(moved) < _FEW_TOKENS:
        ax.plot(np.full(len(moved), place + 0.12 * sign), moved, ".", color=ink, ms=3)
    else:
        grid = np.linspace(moved.min(), moved.max(), _GRID)
        density = _density(moved, grid)
        ax.fill_betweenx(grid, place, place + 0.44 * sign * density / density.max(), color=ink, lw=0, alpha=0.75)
        ax.plot([place, place + 0.2 * sign], [np.median(moved)] * 2, color="white", lw=1)
        ax.plot([place, place + 0.2 * sign], [np.median(moved)] * 2, color="black", lw=0.5)
    quantiles = np.quantile(moved, [0.05, 0.25, 0.5, 0.75, 0.95]) if len(moved) else np.full(5, np.nan)
    return {"num_drawn": len(moved), **dict(zip(("q05", "q25", "median", "q75", "q95"), quantiles, strict=True))}


def _density(values: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Return the root of a smoothed histogram: movements peak so sharply at 0 that the density hides the rest."""
    counts = np.histogram(values, bins=len(grid), range=(grid[0], max(grid[-1], grid[0] + 1e-12)))[0]
    width = max(1, round(0.12 * len(grid) * len(values) ** -0.2))
    kernel = np.exp(-0.5 * (np.arange(-4 * width, 4 * width + 1) / width) ** 2)
    return np.sqrt(np.convolve(counts, kernel, mode="same"))


@paper_style()
@checked
def plot_influence(
    table: pd.DataFrame, *, statistic: str = "share", edges: Sequence[float] = EDGES, ax: Axes | None = None
) -> Axes:
    """Draw whose gradient moves whom: sources in rows, moved tokens' intervals in columns (`updates.influence_table`).

    statistic: "share", Cov(c, Δ)/Var(Δ), whose columns add up to 1; "mean_abs" or "mean", in nats.
    """
    require(table, ["source", "target", statistic], what="the influence table")
    ax = new_axes(ax, width=3.6, height=2.9)
    labels = dict(enumerate(interval_labels(edges)))
    labels |= {str(place): label for place, label in labels.items()}  # as a CSV has them
    wide = table.pivot(index="source", columns="target", values=statistic)
    sources = list(dict.fromkeys(table["source"]))
    wide = wide.loc[
        [source for source in sources if wide.loc[source].abs().max() > 0], list(dict.fromkeys(table["target"]))
    ]
    numbers = wide.to_numpy(np.float64)
    limit = np.nanmax(np.abs(numbers))
    ax.imshow(numbers, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto")
    for (row, column), number in np.ndenumerate(numbers):
        ink = "white" if abs(number) > 0.6 * limit else "black"
        words = f"{round(number, 2) + 0.0:.2f}" if statistic == "share" else short_number(number)  # no −0.00
        ax.text(column, row, words.replace("-", "−"), ha="center", va="center", color=ink)
    ax.set_xticks(range(wide.shape[1]), [labels.get(name, str(name)).replace(", ", ",") for name in wide.columns])
    ax.set_yticks(range(wide.shape[0]), [labels.get(name, str(name)).replace(", ", ",") for name in wide.index])
    ax.set(xlabel="tokens that are moved, by $π_{old}$", ylabel="whose gradient moves them")
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    return finish(ax, table)


@paper_style()
@checked
def plot_norm_drivers(fits: pd.DataFrame, *, parameters: str = "all parameters", ax: Axes | None = None) -> Axes:
    """Draw the standardised coefficients of the log norm on probability and entropy, by layer, with their intervals:
    side by side or, if they are many, below one another.

    Reads quantity, driver, coefficient, lower and upper, as from `theory.regress_norms`. parameters: what ‖g‖ is over.
    """
    require(fits, ["quantity", "driver", "coefficient", "lower", "upper"], what="the table of fits")
    quantities = [name for name in dict.fromkeys(fits["quantity"]) if name != "layers"]
    many = len(quantities) > _MANY
    size = {"height": 0.8 + 0.16 * len(quantities)} if many else {"width": max(3.4, 0.78 * len(quantities))}
    ax = new_axes(ax, **size)
    inks = {"log_one_minus_prob": (interval_colors()[0], "log(1−π)"), "entropy": (interval_colors()[2], "entropy")}
    for shift, (driver, (ink, label)) in zip((-0.1, 0.1), inks.items(), strict=True):
        rows = (
            fits[(fits["driver"] == driver) & fits["quantity"].isin(quantities)].set_index("quantity").loc[quantities]
        )
        bounds = np.abs(rows[["lower", "upper"]].to_numpy().T - rows["coefficient"].to_numpy())
        places = np.arange(len(rows)) + shift
        look = {"color": ink, "fmt": "o", "ms": 3.5, "elinewidth": 0.9, "label": label}
        ends = (rows["coefficient"], places, None, bounds) if many else (places, rows["coefficient"], bounds)
        ax.errorbar(*ends, **look)
    (ax.axvline if many else ax.axhline)(0, color=NEUTRAL, lw=0.6, zorder=0)
    names = [norm_words(name, parameters)[0] for name in quantities]
    if many:
        ax.set_yticks(range(len(quantities)), names)
        ax.set(xlabel="standardised coefficient of log norm", ylim=(len(quantities) - 0.5, -0.5))
    else:
        names = [name.replace(" of block ", "\nof block ").replace(" parameters", "\nparameters") for name in names]
        ax.set_xticks(range(len(quantities)), names)
        ax.set_ylabel("standardised coefficient of log norm")
    ax.legend()
    return finish(ax, fits)
