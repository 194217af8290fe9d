"""Figures of token-gradient norms by layer: Fig. 2's cones, the heat map by interval, the power of 1 − π."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from gradscope.errors import InputError, checked
from gradscope.gradients import sampling_probabilities, sampling_weights, weighted_quantiles
from gradscope.intervals import EDGES, interval_labels
from gradscope.plots.style import (
    NEUTRAL,
    ORANGE,
    describe_drawn,
    draw_heatmap,
    draw_tokens,
    edge_names,
    finish,
    name_intervals,
    new_axes,
    new_panels,
    norm_column,
    norm_words,
    paper_style,
    require,
    require_intervals,
    short_count,
    short_number,
)
from gradscope.runs import counted
from gradscope.theory import logit_grad_bounds

_CERTAIN = 0.01
"""Norms of tokens closer to π = 1 than this may lie below a panel of Fig. 2."""
_ROUNDING = 1e-5
"""Relative slack before a float32 norm counts as outside the cone."""


@paper_style()
@checked
def plot_figure_2(table: pd.DataFrame, cones: pd.DataFrame, *, vocab_size: int) -> Figure:
    """Draw Fig. 2 with measured points: a panel for the logits (the theorem), and one per layer of `cones`.

    The feasible cone of Eq. 3, without weights, is lower_gain · √(N/(N−1)) · (1−π) ≤ ‖δ_ℓ‖ ≤ upper_gain · √2 · (1−π).
    `cones` has columns `layer` (a block's number ℓ), `lower_gain`, `upper_gain` and `kind`, where the gains come from
    ("measured" or "certified"); cones of one layer share its panel, whose norms are on a log scale. Tokens outside a
    cone are counted, drawn or not. Raises InputError for a missing column, gains out of order, or a layer without
    measured tokens.
    """
    require(cones, ["layer", "lower_gain", "upper_gain", "kind"], what="the table of cones")
    theorem = pd.DataFrame({"layer": ["logits"], "lower_gain": 1.0, "upper_gain": 1.0, "kind": "theorem"})
    names = cones["layer"].astype(str)
    layers = [theorem, *(cones[names == name] for name in names.unique() if name != "logits")]
    figure, panels = new_panels(len(layers), width=3.3, height=2.9)
    for ax, cone in zip(panels, layers, strict=True):
        words = _draw_cones(table, cone, vocab_size, ax)
        ax.set_title("\n".join([norm_words(str(cone["layer"].iat[0]))[0], *words]), loc="left")
    return figure


def _draw_cones(table: pd.DataFrame, cones: pd.DataFrame, vocab_size: int, ax: Axes) -> list[str]:
    """Draw the cones of one layer, the widest at the back, and the tokens' norms in front; return words on both."""
    layer = str(cones["layer"].iat[0])
    column, symbol = norm_column(layer), norm_words(layer)[1]
    require(table, ["prob", "log_one_minus_prob", "interval", column])
    require_intervals(table)
    measured = table[np.isfinite(table[column])]
    if measured.empty:
        raise InputError(f"{column} is NaN for all {len(table)} tokens; a cone needs measured points; measure some")
    ordered = cones.sort_values("upper_gain", ascending=False, kind="stable")
    shades = 0.12 + 0.08 * np.arange(len(ordered))
    parts, words = zip(
        *(
            _draw_cone(ax, measured, cone, vocab_size, shade)
            for cone, shade in zip(ordered.assign(layer=layer).itertuples(index=False), shades, strict=True)
        ),
        strict=True,
    )
    points = draw_tokens(ax, "prob", column, measured)
    ax.set(xlim=(-0.01, 1.01), xticks=EDGES, xticklabels=edge_names())
    if layer == "logits":
        ax.set_ylim(0)
    else:  # A linear axis would press all tokens but a few onto its foot; towards π = 1 the cone has no foot.
        apex = float(parts[-1]["upper"].iat[0])
        uncertain = measured.loc[(measured["prob"] < 1 - _CERTAIN) & (measured[column] > 0), column].to_numpy(float)
        floor = max(float(parts[-1]["lower"].iat[0]) * _CERTAIN, float(uncertain.min(initial=apex)) / 3)
        ax.set(yscale="log", ylim=(floor, 1.6 * max(apex, float(measured[column].max()))))
    ax.set(xlabel="token probability π", ylabel=f"{symbol} of token gradient, unweighted")
    count = f"{counted(len(measured), 'token')}{describe_drawn(points, len(measured))}"
    points = points[["prob", "interval", column]].rename(columns={column: "norm"}).assign(layer=layer)
    finish(ax, pd.concat([*parts, points], ignore_index=True))
    return [*words, count]


def _draw_cone(ax: Axes, measured: pd.DataFrame, cone, vocab_size: int, shade: float) -> tuple[pd.DataFrame, str]:
    """Fill one cone; return its outline, and words on its gains and the tokens outside it."""
    low, high = cone.lower_gain, cone.upper_gain
    if not 0 <= low <= high < np.inf:
        raise InputError(f"gains of layer {cone.layer} are {low} and {high}; give 0 <= lower <= upper < inf")
    prob = np.linspace(0, 1, 101)
    lower, upper = _bounds(np.log(np.maximum(1 - prob, 1e-300)), vocab_size)
    least, most = _bounds(measured["log_one_minus_prob"].to_numpy(), vocab_size)
    norm = measured[norm_column(cone.layer)].to_numpy(dtype=float)
    outside = int(((norm < low * least * (1 - _ROUNDING)) | (norm > high * most * (1 + _ROUNDING))).sum())
    gains = f"{short_number(low)} to {short_number(high)}"
    # Gains measured on these tokens span them by construction: nothing is outside, which proves nothing.
    words = "theorem" if cone.layer == "logits" else f"{cone.kind or 'given'} gains {gains}"
    words = f"grey: span of gains, {gains}" if cone.kind == "measured" else f"grey: {words}: {outside:,} outside"
    ax.fill_between(prob, low * lower, high * upper, fc=(NEUTRAL, shade), ec=NEUTRAL, lw=0.8)
    outline = pd.DataFrame({"prob": prob, "lower": low * lower, "upper": high * upper})
    return outline.assign(layer=cone.layer, kind=cone.kind, outside=outside), words


def _bounds(log_one_minus_prob: np.ndarray, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    lower, upper = logit_grad_bounds(torch.tensor(log_one_minus_prob, dtype=torch.float64), vocab_size)
    return lower.numpy(), upper.numpy()


def _legend(ax: Axes, title: str | None, **settings) -> None:
    """Draw a legend on a translucent white ground, so that no line crosses its words."""
    ax.legend(
        title=title, title_fontsize="medium", borderpad=0.1, frameon=True, framealpha=0.8, edgecolor="none", **settings
    )


@paper_style()
@checked
def plot_layers_by_interval(
    table: pd.DataFrame,
    *,
    edges: Sequence[float] = EDGES,
    parameters: str = "all parameters",
    ax: Axes | None = None,
) -> Axes:
    """Draw a heat map of the median norm of the unweighted token gradients (log colours) by layer and interval.

    Rows run from the logits down to the first block's input, then ‖g‖ over `parameters`. All use the same tokens, those
    measured everywhere (weighted by 1 / p if sampled), whose number is under each interval. A layer without measured
    tokens stays empty.
    """
    layers = sorted(int(c.rpartition(".")[2]) for c in table.columns if c.startswith("act_grad_norm."))
    rows = ["logits", *reversed(layers), "parameters"]
    columns = [norm_column(row) for row in rows]
    require(table, ["interval", *columns])
    require_intervals(table, len(edges) - 1)
    used = [column for column in columns if table[column].notna().any()]
    measured = table.dropna(subset=used) if used else table.iloc[:0]
    if measured.empty:
        raise InputError(
            f"no token of {len(table)} has all norms measured; the heat map compares layers on the same tokens"
        )
    numbers = range(len(edges) - 1)
    medians = _medians(measured, columns).reindex(numbers).T.to_numpy(dtype=float)
    counts = measured["interval"].value_counts().reindex(numbers, fill_value=0)
    names = [norm_words(row, parameters)[0] for row in rows]
    ax = new_axes(ax, width=2.2 + 0.6 * len(counts), height=1.1 + 0.24 * len(rows))
    _draw_log_heatmap(ax, pd.DataFrame(medians, names))
    name_intervals(ax, interval_labels(edges), map(short_count, counts))
    ax.set(xlabel="π interval, number of measured tokens", ylabel="")
    drawn = pd.DataFrame(medians, columns=interval_labels(edges)).assign(layer=names)
    drawn = drawn.melt("layer", var_name="interval", value_name="median_norm")
    return finish(ax, drawn.assign(tokens=np.repeat(counts.to_numpy(), len(rows))))


def _medians(measured: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """Return a row per interval; sampled tokens count for 1 / p."""
    if sampling_probabilities(measured) is None:
        return measured.groupby("interval")[columns].median()
    parts = {}
    for interval, part in measured.groupby("interval"):
        weights = sampling_weights(part)
        parts[interval] = [weighted_quantiles(part[c].to_numpy(float), weights, np.array([0.5]))[0] for c in columns]
    return pd.DataFrame.from_dict(parts, orient="index", columns=list(columns))


def _draw_log_heatmap(ax: Axes, medians: pd.DataFrame) -> None:
    positive = medians.to_numpy()[medians.to_numpy() > 0]
    low, high = (positive.min(), positive.max()) if len(positive) else (0.1, 1.0)
    words = medians.map(lambda value: "–" if np.isnan(value) else short_number(value))
    colors = {"norm": LogNorm(low, max(high, 1.01 * low)), "cmap": "viridis"}
    bar = {"label": "median norm of token gradient\n(unweighted)"}
    draw_heatmap(ax, medians.clip(lower=low), words, colors, bar)


@paper_style()
@checked
def plot_norm_against_one_minus_prob(
    table: pd.DataFrame, fits: pd.DataFrame, *, floor: float = 1e-3, parameters: str = "all parameters"
) -> Figure:
    """Draw ‖δ_ℓ‖ and ‖g‖ against 1 − π, log-log, with the fitted power, the theory's 1 and the √ law's ½.

    `fits` has a row per panel: `quantity` ("logits", a block number, "parameters" or a column of the table), `slope`,
    `slope_lower`, `slope_upper`, and `intercept`: log norm = intercept + slope · log(1−π), natural logarithms;
    optionally `floor`, the smallest 1−π fitted. parameters: what ‖g‖ is over. The reference lines cross the fit in the
    middle of its range, which the panel shows; all tokens are in its inset. At most 10,000 points per interval are
    drawn; tokens of norm 0 have no logarithm and are counted in the panel.
    """
    require(fits, ["quantity", "slope", "slope_lower", "slope_upper", "intercept"], what="the table of fits")
    fits = fits if "floor" in fits else fits.assign(floor=floor)
    figure, panels = new_panels(len(fits), width=2.4, height=2.6)
    for ax, fit in zip(panels, fits.itertuples(index=False), strict=True):
        _draw_power(table, fit, norm_words(str(fit.quantity), parameters), ax)
    return figure


def _draw_power(table: pd.DataFrame, fit, words: tuple[str, str], ax: Axes) -> None:
    column, (place, symbol) = norm_column(str(fit.quantity)), words
    require(table, ["log_one_minus_prob", "interval", column])
    require_intervals(table)
    measured = table[np.isfinite(table[column])]
    positive = measured[(measured[column] > 0) & np.isfinite(measured["log_one_minus_prob"])]
    if positive.empty:
        raise InputError(f"{column} is nowhere positive and finite, as a log-log figure needs; measure some tokens")
    positive = positive.assign(one_minus_prob=np.exp(positive["log_one_minus_prob"].astype(float)))
    points = draw_tokens(ax, "one_minus_prob", column, positive)
    left, lost = fit.floor / 1.5, len(measured) - len(positive)
    _draw_slopes(ax, fit, left)
    fitted = points[points["one_minus_prob"] >= left] if (points["one_minus_prob"] >= left).any() else points
    low, high = float(fitted[column].min()), float(fitted[column].max())
    span = high / low  # Room for the legend above, for the inset below.
    ax.set(xscale="log", yscale="log", xlim=(left, 1.4), ylim=(low / span**0.6 / 2, 2 * high * span**0.2))
    words = counted(len(measured), "token") + (f",\n{lost:,} of norm 0" if lost else "")
    words += describe_drawn(points, len(positive))
    if beyond := int((positive["one_minus_prob"] < left).sum()):
        words += f",\n{beyond:,} further\nleft, inset"
        _draw_whole(ax.inset_axes((0.5, 0.09, 0.46, 0.25)), points, column, left)
    ax.text(0.03, 0.03, words, transform=ax.transAxes, ha="left", va="bottom")
    ax.set(xlabel="1 − π", ylabel=f"{symbol} of token gradient, unweighted")
    if np.isfinite(fit.slope):
        _legend(ax, None, loc="upper left")
    between = f" [{fit.slope_lower:.2f}, {fit.slope_upper:.2f}]" if np.isfinite(fit.slope_lower) else ""
    slope = f"slope {fit.slope:.2f}{between}" if np.isfinite(fit.slope) else "too few tokens to fit"
    ax.set_title(f"{place}\n{slope}", loc="left")
    drawn = points[["one_minus_prob", "interval", column]].rename(columns={column: "norm"})
    finish(ax, pd.concat([pd.DataFrame([fit]), drawn.assign(quantity=fit.quantity)], ignore_index=True))


def _draw_whole(inset: Axes, points: pd.DataFrame, column: str, left: float) -> None:
    """Draw all tokens, however certain; grey is what the panel leaves out."""
    draw_tokens(inset, "one_minus_prob", column, points)
    least = float(points["one_minus_prob"].min()) / 1.5
    inset.axvspan(least, left, color=NEUTRAL, alpha=0.15, lw=0)
    inset.set(xscale="log", yscale="log", xlim=(least, 1.4))
    inset.minorticks_off()
    inset.set_xticks([10.0 ** np.ceil(np.log10(least)), 1.0])
    inset.set_yticks([])
    inset.tick_params(labelsize=7, pad=1, length=2)


def _draw_slopes(ax: Axes, fit, left: float) -> None:
    """Draw the fit over its range, and both laws through its middle over the whole panel; nothing if it is NaN."""
    if not np.isfinite(fit.slope):
        return
    fitted, whole = np.array([fit.floor, 1.0]), np.array([left, 1.0])
    middle = np.sqrt(fit.floor)
    # In logs, and clipped: a line through a few tokens can be arbitrarily steep.
    level = np.exp(np.clip(fit.intercept + fit.slope * np.log(middle), -300, 300))
    line = np.exp(np.clip(fit.intercept + fit.slope * np.log(fitted), -300, 300))
    ax.plot(fitted, line, color=ORANGE, lw=2, label="fit")
    for slope, style, words in ((1.0, "--", "1: theory"), (0.5, ":", "½: √ law")):
        ax.plot(whole, level * (whole / middle) ** slope, color="black", ls=style, lw=1, label=words)
