"""Pictures of a token table: the paper's Fig. 1 (a, b, d) and the cosines between the intervals.

Functions take a DataFrame, draw, and return Axes or a Figure, which `save_figure` writes with the numbers drawn. Norms
are L2 norms. A "token gradient" is that of one token's own log π, unweighted; a "summed gradient" is that of the
objective over a group of tokens.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from gradscope.errors import InputError, checked
from gradscope.intervals import EDGES, interval_labels
from gradscope.plots.style import (
    NEUTRAL,
    draw_heatmap,
    edge_names,
    finish,
    interval_colors,
    name_intervals,
    new_axes,
    new_panels,
    paper_style,
    require,
    require_intervals,
    short_count,
    short_number,
)

_DENSITY_BINS = 40
_FEW_VALUES = 24
"""At most this many distinct advantages are drawn value by value; a violin would invent values between them."""
_FEW_TOKENS = 10
"""Fewer tokens than this are drawn as points; a violin would invent a distribution."""


@paper_style()
@checked
def plot_token_shares(table: pd.DataFrame, *, edges: Sequence[float] = EDGES, ax: Axes | None = None) -> Axes:
    """Draw Fig. 1 (a): the share of tokens in each probability interval (%), and the density of π above it (log scale).

    Reads `interval` and `prob`. Bars are equally wide whatever the edges. Raises InputError for a missing column.
    """
    require(table, ["interval", "prob"])
    require_intervals(table, len(edges) - 1)
    if not table["prob"].between(0, 1).all():
        raise InputError(
            "prob is NaN or outside 0…1 for some tokens; a share needs every token's probability; measure again"
        )
    ax = new_axes(ax)
    counts = table["interval"].value_counts().reindex(range(len(edges) - 1), fill_value=0).to_numpy()
    shares = 100 * counts / len(table)
    places, top = 0.5 + np.arange(len(counts)), 1.15 * shares.max()
    ax.bar(places, shares, 0.88, color=interval_colors(len(counts)))
    for place, share in zip(places, shares, strict=True):
        words = f"{share:.0f}%" if share >= 10 else f"{share:.2g}%"
        ax.annotate(words, (place, share), (0, 2), textcoords="offset points", ha="center")
    # The upper two fifths belong to the density.
    ax.set_ylim(0, top / 0.62)
    ax.set_yticks([tick for tick in MaxNLocator(3).tick_values(0, top) if tick <= top])
    ax.set(xlim=(0, len(counts)), xticks=range(len(edges)), xticklabels=edge_names(edges))
    ax.set_xlabel("token probability π")
    ax.set_ylabel(f"share of {short_count(len(table))} tokens (%)", y=0.33)
    density = _draw_density(ax.inset_axes((0, 0.7, 1, 0.3)), table["prob"].to_numpy(dtype=float))
    bars = pd.DataFrame({"interval": interval_labels(edges), "tokens": counts, "share_percent": shares})
    return finish(ax, pd.concat([bars, density], ignore_index=True))


def _draw_density(strip: Axes, probs: np.ndarray) -> pd.DataFrame:
    """Draw a histogram instead of a smoothed curve: a kernel would halve the mass at the boundary π = 1."""
    density, bins = np.histogram(probs, bins=_DENSITY_BINS, range=(0, 1), density=True)
    shown = np.where(density > 0, density, np.nan)
    strip.stairs(shown, bins, color=NEUTRAL, lw=1, baseline=None)
    low, high = np.nanmin(shown), np.nanmax(shown)
    strip.set_yscale("log")
    strip.set(xlim=(0, 1), xticks=[], ylim=(low / 2, high * 2))
    powers = 10.0 ** np.arange(np.ceil(np.log10(low / 2)), np.floor(np.log10(high * 2)) + 1)
    strip.set(yticks=powers[[0, -1]] if len(powers) > 1 else powers)
    strip.set_yticklabels([f"{power:g}" for power in strip.get_yticks()])
    strip.set_yticks([], minor=True)
    strip.tick_params(labelsize=8, width=0.7)
    strip.text(0.03, 0.94, "density of π from 0 to 1", transform=strip.transAxes, va="top", color=NEUTRAL)
    return pd.DataFrame({"prob_low": bins[:-1], "prob_high": bins[1:], "density": density})


@paper_style()
@checked
def plot_advantages(table: pd.DataFrame, *, edges: Sequence[float] = EDGES, ax: Axes | None = None) -> Axes:
    """Draw Fig. 1 (b): the advantages of each interval's tokens, with their median (white mark) and number.

    Reads `interval` and `advantage`. Few distinct advantages (GRPO with a rule-based reward) are drawn as bars as wide
    as their shares, others as a violin that ends at the extremes, and fewer than 10 tokens as points, all scaled to the
    same largest width. Raises InputError if an advantage is NaN (rollouts without rewards).
    """
    require(table, ["interval", "advantage"])
    require_intervals(table, len(edges) - 1)
    if unknown := int((~np.isfinite(table["advantage"])).sum()):
        raise InputError(
            f"advantage is NaN or infinite for {unknown} of {len(table)} tokens; advantage violins need all; "
            "measure rollouts that carry `reward` or `advantage`"
        )
    ax, drawn, counts = new_axes(ax, width=max(3.4, 0.35 * len(edges))), [], []
    values = table["advantage"].to_numpy(dtype=float).round(6)
    # At least as tall as a hundredth of the axis, at most two thirds of the way to the next value.
    distinct = np.unique(values)
    span = max(np.ptp(distinct), 1e-3)
    bar = min(0.05 * span, max(0.012 * span, 0.66 * np.diff(distinct).min(initial=span)))
    for number, (label, color) in enumerate(zip(interval_labels(edges), interval_colors(len(edges) - 1), strict=True)):
        here = values[(table["interval"] == number).to_numpy()]
        counts.append(len(here))
        if not len(here):
            continue
        profile = _profile(here, discrete=len(distinct) <= _FEW_VALUES)
        center, width, drawing = profile["advantage"], profile["half_width"], profile["drawn_as"].iat[0]
        if drawing == "bar":
            ax.barh(center, 2 * width, bar, number - width, color=color)
        elif drawing == "violin":
            ax.fill_betweenx(center, number - width, number + width, color=color, lw=0)
        else:
            ax.plot(number + width, center, "o", ms=3, color=color)
        ax.plot(number, np.median(here), "D", ms=4, mfc="white", mec="black", mew=0.7)
        drawn.append(profile.assign(interval=label, tokens=len(here), median=np.median(here)))
    ax.axhline(0, color=NEUTRAL, lw=0.6, ls=":", zorder=0)
    ax.set(xlim=(-0.6, len(edges) - 1.4), xticks=range(len(edges) - 1))
    name_intervals(ax, interval_labels(edges), map(short_count, counts))
    ax.margins(y=0.08)
    ax.set(xlabel="π interval, number of tokens", ylabel="advantage $Â$ (◇ median)")
    return finish(ax, pd.concat(drawn, ignore_index=True))


def _profile(values: np.ndarray, *, discrete: bool) -> pd.DataFrame:
    """Return half-widths (at most 0.42) of a violin's outline, of a bar per distinct value, or of a point per value."""
    from scipy.stats import gaussian_kde

    distinct, counts = np.unique(values, return_counts=True)
    if len(values) < _FEW_TOKENS:
        height, width, drawing = values, np.zeros(len(values)), "point"
    elif discrete or len(distinct) == 1:
        height, width, drawing = distinct, counts / counts.max(), "bar"
    else:
        height = np.linspace(distinct[0], distinct[-1], 128)
        width, drawing = gaussian_kde(values, bw_method=lambda kde: 0.5 * kde.scotts_factor())(height), "violin"
        width /= width.max()
    return pd.DataFrame({"advantage": height, "half_width": 0.42 * width, "drawn_as": drawing})


@paper_style()
@checked
def plot_interval_gradient_norms(norms: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Draw Fig. 1 (d): the norm of the summed gradient of each interval's tokens alone, and of all tokens.

    `norms` has a row per bar: `interval` (0, 1, … or "all"), `label`, `norm`; optionally `norm_sd` (over `batches`,
    drawn as ± one standard deviation) and `paper` (the paper's norms, drawn as markers and scaled so that "all"
    coincide).
    """
    require(norms, ["interval", "label", "norm"], what="the table of norms")
    everything = (norms["interval"].astype(str) == "all").to_numpy()
    if not np.isfinite(norms["norm"]).any():
        raise InputError(
            "every norm in the table of norms is NaN; there is nothing to draw; measure at least one interval"
        )
    ax, colors = new_axes(ax), interval_colors(max(1, int((~everything).sum())))
    heights = norms["norm"].to_numpy(dtype=float)
    spread = norms["norm_sd"].fillna(0).to_numpy(dtype=float) if "norm_sd" in norms else np.zeros(len(norms))
    places, turn = np.arange(len(norms)), iter(colors)
    ax.bar(places, np.nan_to_num(heights), 0.8, color=[NEUTRAL if whole else next(turn) for whole in everything])
    if spread.any():
        ax.errorbar(places, heights, spread, fmt="none", ecolor="black", elinewidth=0.9, capsize=2.5)
    tops, drawn = heights + spread, norms.reset_index(drop=True)
    if "paper" in norms and everything.sum() == 1 and np.isfinite(norms["paper"][everything].iat[0]):
        scaled = (norms["paper"] / norms["paper"][everything].iat[0] * heights[everything][0]).to_numpy(dtype=float)
        ax.plot(places + 0.22, scaled, "D", ms=4, mfc="white", mec="black", mew=0.8, label="paper (ratio to “all”)")
        ax.legend(loc="upper center", borderpad=0, handletextpad=0.2)
        tops, drawn = np.fmax(tops, scaled + 0.02 * np.nanmax(scaled)), drawn.assign(paper_scaled=scaled)
    for place, top, height in zip(places, tops, heights, strict=True):
        words = short_number(height) if np.isfinite(height) else "no\ntokens"
        ax.annotate(words, (place, np.nan_to_num(top)), (0, 4), textcoords="offset points", ha="center")
    ax.set(xticks=places, xlabel="π of the tokens in the loss")
    name_intervals(ax, norms["label"].astype(str).tolist())
    ax.set_ylim(0, (1.3 if "paper_scaled" in drawn else 1.15) * np.nanmax(tops) or 1)
    batches = f" of {int(norms['batches'].max())} batches" if "batches" in norms else ""
    ax.set_ylabel("norm of summed gradient" + (f"\n(± sd{batches})" if spread.any() else ""))
    return finish(ax, drawn)


@paper_style()
@checked
def plot_cosines(cosines: pd.DataFrame, *, edges: Sequence[float] = EDGES, ax: Axes | None = None) -> Axes:
    """Draw a heat map of the cosines between the intervals' summed gradients.

    `cosines` is a square matrix over intervals, NaN for an interval without gradient. Rows named 0, 1, … are labelled
    by their interval's edges. Raises InputError unless it is square and within [−1, 1].
    """
    values = cosines.to_numpy(dtype=float)
    if values.ndim != 2 or values.shape[0] != values.shape[1] or not values.size:
        raise InputError(
            f"cosines have shape {values.shape}; a square matrix is wanted; pass a row and a column per interval"
        )
    if np.nanmax(np.abs(values), initial=0) > 1 + 1e-4:
        raise InputError(
            f"a cosine is {np.nanmax(np.abs(values)):.3g} in size; at most 1 is possible; pass cosines, not products"
        )
    numbered = list(cosines.index) == list(range(len(edges) - 1))
    labels = interval_labels(edges) if numbered else [str(name) for name in cosines.index]
    ax = new_axes(ax, height=2.7)
    words = np.vectorize(lambda value: "" if np.isnan(value) else f"{value:.2f}".replace("-", "−"))(values)
    colors = {"vmin": -1, "vmax": 1, "cmap": "RdBu_r", "square": True}
    bar = {"label": "cosine of summed gradients", "shrink": 0.8, "ticks": [-1, -0.5, 0, 0.5, 1]}
    draw_heatmap(ax, pd.DataFrame(values, labels, labels), words, colors, bar)
    name_intervals(ax, labels)
    ax.set(xlabel="tokens with π in", ylabel="")
    return finish(ax, pd.DataFrame(values, columns=labels).assign(interval=labels).set_index("interval").reset_index())


@paper_style()
@checked
def plot_figure_1(table: pd.DataFrame, norms: pd.DataFrame, *, edges: Sequence[float] = EDGES) -> Figure:
    """Draw Fig. 1 (a), (b) and (d) side by side: token shares, advantages, and norms of the summed gradients."""
    figure, (shares, advantages, gradients) = new_panels(3, width=2.4, height=2.5, ratios=(1.0, 1.05, 1.3))
    plot_token_shares(table, edges=edges, ax=shares).set_title("(a) token shares", loc="left")
    plot_advantages(table, edges=edges, ax=advantages).set_title("(b) advantages", loc="left")
    plot_interval_gradient_norms(norms, ax=gradients).set_title("(d) gradient norms", loc="left")
    return figure
