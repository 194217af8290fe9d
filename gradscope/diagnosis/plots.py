"""Pictures of a diagnosis, drawn from its tidy statistics (of several checkpoints: with their step)."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from gradscope.diagnosis.format import name_interval
from gradscope.diagnosis.result import COLUMNS
from gradscope.errors import InputError
from gradscope.plots import NEUTRAL, finish, interval_colors, name_intervals, new_axes, new_panels, paper_style, require

SHARES = {
    ("token_share", "none"): ("of the tokens", NEUTRAL, "s"),
    ("predicted_share", "none"): ("predicted by (1−π)² alone", "#999999", "D"),
    ("squared_share", "raw"): ("of the gradient energy", "#0072b2", "o"),
    ("gradient_share", "raw"): ("of the summed gradient", "#d55e00", "o"),
    ("squared_share", "adamw"): ("of the energy, AdamW", "#56b4e9", "^"),
    ("gradient_share", "adamw"): ("of the summed gradient, AdamW", "#e69f00", "^"),
}
"""Statistic and metric → words, colour and marker; missing ones are not drawn."""
INDICES = {
    ("predicted_index", "none"): ("(1−π)² alone", "#999999", "D"),
    ("dominance_index", "raw"): ("gradient energy", "#0072b2", "o"),
    ("dominance_index", "adamw"): ("gradient energy, AdamW", "#56b4e9", "^"),
    ("gradient_index", "raw"): ("summed gradients", "#d55e00", "o"),
}
FRACTIONS = {
    ("signal_fraction", "raw"): ("raw", "#0072b2", "o"),
    ("signal_fraction", "adamw"): ("AdamW", "#56b4e9", "^"),
}
TREND = (
    ("token_share", "none", 0), ("squared_share", "raw", 0), ("gradient_share", "raw", 0),
    ("dominance_index", "raw", 0), ("added_index", "raw", 0), ("signal_fraction", "raw", 0),
    ("low_to_high_share", "none", -1), ("right_direction_positive_actual", "none", "all"),
    ("right_direction_negative_actual", "none", "all"),
)  # fmt: skip
"""Statistic, metric and interval (by place, or "all") of `plot_trend`'s panels; missing ones are skipped."""
BELOW = 4.0
"""Bits shown below the lowest point of a trend."""
_TITLES = {
    "token_share": "share of the tokens",
    "squared_share": "share of the gradient energy",
    "gradient_share": "share of summed gradient",
    "dominance_index": "dominance index (bits)",
    "added_index": "measured over predicted (bits)",
    "signal_fraction": "signal fraction",
    "low_to_high_share": "movement caused by the lowest",
    "right_direction_positive_actual": "Â > 0: share that rose",
    "right_direction_negative_actual": "Â < 0: share that fell",
}
STEP_TITLES = {
    "token_share": "share of the tokens",
    "logit_grad_share": "share of |w|·‖e − π‖",
    "clipped_share": "clipped tokens",
    "masked_share": "masked tokens",
    "mismatch": "|Δ log π| of the sampler",
    "entropy": "entropy (nats)",
}
"""Column of a step's numbers → its panel's title."""
_KINDS = {"predicted": ("#999999", "D"), "actual": ("#0072b2", "o")}
_SIGNS = {"positive": "Â > 0: share that rose", "negative": "Â < 0: share that fell"}
_DRIVERS = {
    "token_class": "kind of token",
    "position_class": "position in the response",
    "length_class": "tokens of the response",
    "entropy_class": "entropy (nats)",
    "advantage_sign": "sign of Â",
}


@paper_style()
def plot_shares(statistics: pd.DataFrame, labels: Sequence[str], *, ax: Axes | None = None) -> Axes:
    """Draw the first screen's figure: each interval's share of tokens, of gradient energy and of the summed gradient.

    statistics, labels: a `Diagnosis`'s. Bars are 95 % intervals. Raises InputError without shares.
    """
    ax, shown = new_axes(ax, width=4.6, height=2.5), ("token_share", "squared_share", "gradient_share")
    series = {key: look for key, look in SHARES.items() if key[0] in shown and key[1] != "adamw"}
    _draw_series(ax, statistics, labels, series, factor=100.0, name="share (%)")
    ax.set_xticks(range(len(labels)), [name_interval(label) for label in labels])
    ax.set_ylim(top=max(100.0, ax.get_ylim()[1]))
    ax.set_xlabel("")
    ax.legend(loc="upper center", bbox_to_anchor=(0.45, -0.12), ncols=3, columnspacing=1.0, handletextpad=0.3)
    return ax


@paper_style()
def plot_dominance(statistics: pd.DataFrame, labels: Sequence[str]) -> Figure:
    """Draw each interval's share of the tokens beside its shares of the gradients, and the dominance indices.

    statistics, labels: a `Diagnosis`'s. Bars are 95 % intervals. Raises InputError without shares.
    """
    figure, (left, right) = new_panels(2, width=3.6, height=3.0)
    _draw_series(left, statistics, labels, SHARES, factor=100.0, name="share (%)")
    left.set_title("shares", loc="left")
    _draw_series(right, statistics, labels, INDICES, factor=1.0, name="log₂(share / share of the tokens)")
    right.set_title("bits above proportional", loc="left")
    return figure


@paper_style()
def plot_signal(statistics: pd.DataFrame, labels: Sequence[str], *, ax: Axes | None = None) -> Axes:
    """Draw the signal fraction (1: no noise) of the summed gradient, total and by interval, with 95 % bars."""
    ax = new_axes(ax)
    _draw_series(ax, statistics, [*labels, "all"], FRACTIONS, factor=1.0, name="signal / ‖$G_a$‖²")
    low, _ = ax.get_ylim()
    ax.set_ylim(max(low, -1.2), 1.08)  # far below 0 says no more than below 0
    return ax


@paper_style()
def plot_where(where: pd.DataFrame, driver: str = "token_class", *, ax: Axes | None = None) -> Axes:
    """Draw the shares of tokens and energy by the values of one driver (`Diagnosis.where`), with 95 % bars."""
    require(where, ["driver", "value", "token_share", "squared_share"], what="the table of shares")
    rows = where[where["driver"] == driver]
    if rows.empty:
        known = ", ".join(dict.fromkeys(where["driver"]))
        raise InputError(f"driver is {driver!r}, which the table of shares does not have; give one of {known}")
    ax, places = new_axes(ax), np.arange(len(rows))
    drawn = (
        ("token", "of the tokens", NEUTRAL, "s", 0.12),
        ("squared", "of the gradient energy", "#0072b2", "o", -0.12),
    )
    for name, words, ink, marker, shift in drawn:
        value, bars = _bars(rows, f"{name}_share", f"{name}_lower", f"{name}_upper")
        ax.errorbar(100 * value, places + shift, xerr=100 * bars, fmt=marker, color=ink, ms=4, lw=0.9, label=words)
    ax.set_yticks(
        places, [f"{value} ({count:,})" for value, count in zip(rows["value"], rows["num_tokens"], strict=True)]
    )
    ax.invert_yaxis()
    ax.margins(y=0.2)
    ax.set(xlabel="share (%)", ylabel=_DRIVERS.get(driver, driver))
    _put_legend_below(ax)
    return finish(ax, rows.reset_index(drop=True))


@paper_style()
def plot_module_shares(modules: pd.DataFrame) -> Axes:
    """Draw each module's share of the parameters and of the gradient energy (`Diagnosis.modules`)."""
    require(modules, ["module", "parameter_share", "squared_share"], what="the table of modules")
    ax, places = new_axes(None, width=4.6, height=0.9 + 0.2 * len(modules)), np.arange(len(modules))
    ax.barh(places, 100 * modules["squared_share"], color="#0072b2", height=0.6, label="of the gradient energy")
    ax.plot(100 * modules["parameter_share"], places, "s", color=NEUTRAL, mec="white", ms=6, label="of the parameters")
    ax.set_yticks(places, modules["module"])
    ax.invert_yaxis()
    ax.set(xlabel="share (%)")
    _put_legend_below(ax)
    return finish(ax, modules)


@paper_style()
def plot_entropy(entropy: pd.DataFrame, labels: Sequence[str], *, ax: Axes | None = None) -> Axes:
    """Draw whose gradients change the mean entropy (`Diagnosis.entropy`), with 95 % bars."""
    require(entropy, ["interval", "sign", "change", "lower", "upper"], what="the table of entropy")
    ax = new_axes(ax, width=4.6, height=2.5)
    looks = {"positive": ("Â > 0", "#0072b2", "o"), "negative": ("Â < 0", "#d55e00", "s")}
    looks["zero"] = ("Â = 0", NEUTRAL, "D")
    for number, (sign, (words, ink, marker)) in enumerate(looks.items()):
        rows = entropy[entropy["sign"] == sign]
        if rows.empty:
            continue
        value, bars = _bars(rows, "change", "lower", "upper")
        places = np.array([list(labels).index(label) for label in rows["interval"]]) + 0.15 * (number - 1)
        ax.errorbar(places, value, yerr=bars, fmt=marker, color=ink, ms=4, lw=0.9, label=words)
    ax.axhline(0, color=NEUTRAL, lw=0.6)
    ax.set_xticks(range(len(labels)), [name_interval(label) for label in labels])
    ax.set(ylabel="change of mean entropy (nats)")
    _put_legend_below(ax)
    return finish(ax, entropy)


@paper_style()
def plot_trend(trend: pd.DataFrame, labels: Sequence[str]) -> Figure:
    """Draw headline numbers over training steps (statistics with a column step), a panel each, with 95 % bands.

    Titles name the interval of a number that has one. Points with other_step are hollow; points without a band, from
    too few prompts or tokens, are crosses beside the line. Bands of bits are cut off BELOW bits below the lowest point,
    since a share's lower bound may be nearly 0. Raises InputError without any headline number.
    """
    require(trend, ["step", *COLUMNS], what="the trend")
    chosen = []
    for statistic, metric, place in TREND:
        interval = labels[place] if isinstance(place, int) else place
        same = (trend["statistic"] == statistic) & (trend["metric"] == metric) & (trend["interval"] == interval)
        if trend.loc[same, "value"].notna().any():
            chosen.append((statistic, interval, trend[same].sort_values("step")))
    if not chosen:
        raise InputError("the trend holds none of the numbers that are drawn; give that of diagnoses with weights")
    figure, panels = new_panels(len(chosen), width=2.4, height=2.0)
    ink = interval_colors(max(4, len(labels)))[0]
    for ax, (statistic, interval, rows) in zip(panels, chosen, strict=True):
        known = rows["lower"].notna().to_numpy()
        steps, values, *bounds = (rows.loc[known, name] for name in ("step", "value", "lower", "upper"))
        ax.fill_between(steps, *bounds, color=ink, alpha=0.2, lw=0)
        ax.plot(steps, values, "-", color=ink)
        ax.plot(rows["step"][~known], rows["value"][~known], "x", color=ink, alpha=0.6, ms=5)
        foreign = rows["other_step"].to_numpy(dtype=bool) if "other_step" in rows else np.zeros(len(rows), dtype=bool)
        for part, inside in ((known & ~foreign, ink), (known & foreign, "white")):
            ax.plot(rows["step"][part], rows["value"][part], "o", color=ink, mfc=inside, ms=4)
        for level in {"bits": (0.0,), "share": (0.5,) if statistic.startswith("right") else (0.0,)}[
            rows["unit"].iat[0]
        ]:
            ax.axhline(level, color=NEUTRAL, lw=0.6, ls=":", zorder=0)
        tokens = "all tokens" if interval == "all" else name_interval(interval)
        ax.set_title(f"{_TITLES[statistic]}\n{tokens}", loc="left")
        ax.set_xlabel("training step")
        ax.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        if rows["unit"].iat[0] == "bits":
            ax.set_ylim(bottom=max(ax.get_ylim()[0], rows["value"].min() - BELOW))
        if len(rows) == 1:  # a band has no width, an axis no length
            ax.vlines(rows["step"], rows["lower"], rows["upper"], color=ink, alpha=0.4)
            ax.set_xticks(rows["step"])
        finish(ax, rows.reset_index(drop=True))
    return figure


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


@paper_style()
def plot_right_directions(directions: pd.DataFrame, labels: Sequence[str]) -> Figure:
    """Draw Fig. 3 for one step: the share of each interval's tokens that moved the right way, a panel per sign of Â.

    directions: `Diagnosis.directions`; draws the predicted and the actual step, if known, with 95 % bars.
    """
    require(directions, ["kind", "interval", "sign", "share", "lower", "upper"], what="the table of directions")
    figure, panels = new_panels(2, width=3.2, height=2.6)
    kinds = [kind for kind in _KINDS if (directions["kind"] == kind).any()]
    for ax, (sign, words) in zip(panels, _SIGNS.items(), strict=True):
        for place, kind in enumerate(kinds):
            ink, marker = _KINDS[kind]
            own = directions[(directions["kind"] == kind) & (directions["sign"] == sign)].set_index("interval")
            rows = own.reindex(list(labels))
            value, bars = _bars(rows, "share")
            x = np.arange(len(labels)) + 0.2 * (place - (len(kinds) - 1) / 2)
            ax.errorbar(x, 100 * value, 100 * bars, fmt=marker, color=ink, ms=3.5, elinewidth=0.9, label=f"{kind} step")
        ax.axhline(50, color=NEUTRAL, lw=0.6, ls=":", zorder=0)
        ax.set_xticks(range(len(labels)))
        name_intervals(ax, labels)
        ax.set_title(words, loc="left")
        ax.set(xlabel="$π_{old}$ before the step", ylabel="share of the tokens (%)")
        _put_legend_below(ax)
        finish(ax, directions[directions["sign"] == sign].reset_index(drop=True))
    return figure


def _draw_series(
    ax: Axes,
    statistics: pd.DataFrame,
    labels: Sequence[str],
    series: dict[tuple[str, str], tuple[str, str, str]],
    *,
    factor: float,
    name: str,
) -> None:
    """Draw one series of points with bars for each statistic present, side by side in each interval."""
    require(statistics, COLUMNS, what="the statistics")
    keys = list(zip(statistics["statistic"], statistics["metric"], strict=True))
    here = {key: look for key, look in series.items() if key in keys}
    if not here:
        wanted = ", ".join(dict.fromkeys(statistic for statistic, _ in series))
        raise InputError(f"the statistics hold none of {wanted}; diagnose rollouts with advantages or rewards")
    drawn, width = [], 0.7 / len(here)
    for place, ((statistic, metric), (words, ink, marker)) in enumerate(here.items()):
        own = statistics[(statistics["statistic"] == statistic) & (statistics["metric"] == metric)]
        rows = own.set_index("interval").reindex(list(labels))
        value, bars = _bars(rows, "value")
        x = np.arange(len(labels)) + width * (place - (len(here) - 1) / 2)
        ax.errorbar(x, factor * value, factor * bars, fmt=marker, color=ink, ms=3.5, elinewidth=0.9, label=words)
        drawn.append(rows.reset_index())
    ax.axhline(0, color=NEUTRAL, lw=0.6, zorder=0)
    ax.set_xticks(range(len(labels)))
    name_intervals(ax, labels)
    ax.set(xlabel="π of the tokens", ylabel=name)
    _put_legend_below(ax)
    finish(ax, pd.concat(drawn, ignore_index=True))


def _put_legend_below(ax: Axes) -> None:
    """Put the legend below the axes, where it hides no bar."""
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, columnspacing=1.0)


def _bars(rows: pd.DataFrame, value: str, lower: str = "lower", upper: str = "upper") -> tuple[np.ndarray, np.ndarray]:
    """Return (values, [2, n] distances to their bounds); 0 if unknown, or if a percentile is on the other side."""
    middle, low, high = (rows[name].to_numpy(dtype=float) for name in (value, lower, upper))
    bars = np.stack([middle - low, high - middle])
    return middle, np.where(np.isfinite(bars), np.maximum(bars, 0.0), 0.0)
