"""Training curves of several seeds: smoothed as in the paper, averaged over seeds, drawn in the variants' colours."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from analyses.common.colors import COLORS, LINES
from gradscope.plots import finish

EMA = 0.95
"""The paper's (Fig. 4): an exponential mean keeps so much of what was at each step."""
BAND = f"exponential means ({EMA}); line: mean over seeds, band: ± 1 standard deviation over seeds"
"""What a figure of such curves must say."""


def smooth(metrics: pd.DataFrame, value: str, *, ema: float = EMA) -> pd.DataFrame:
    """The exponential mean of each run's `value` over its steps, then mean and standard deviation over seeds.

    metrics: of `read_metrics`, or any with the columns variant, label, seed, step. Returns a row per variant and step:
    variant, label, step, seeds (that reached it), mean, sd (NaN for one seed). The weights of a step and those before
    it are normalised: the first steps are not drawn towards 0.
    """
    frames = []
    for (variant, label), runs in metrics.groupby(["variant", "label"], sort=False):
        logged = runs.pivot(index="step", columns="seed", values=value)
        # Beyond the last step of a run that ended early, ewm repeats its last mean.
        wide = logged.ewm(alpha=1 - ema, adjust=True).mean().where(logged.notna())
        columns = {"seeds": wide.notna().sum(axis=1), "mean": wide.mean(axis=1), "sd": wide.std(axis=1)}
        frames.append(pd.DataFrame(columns).reset_index().assign(variant=variant, label=label))
    return pd.concat(frames, ignore_index=True)[["variant", "label", "step", "seeds", "mean", "sd"]]


def on_common_seeds(metrics: pd.DataFrame) -> pd.DataFrame:
    """The runs of the seeds that every variant has: means over unlike seeds would differ by the seeds' luck alone."""
    variants = metrics.groupby("seed")["variant"].transform("nunique")
    return metrics[variants == metrics["variant"].nunique()]


def draw_curves(ax: Axes, curves: pd.DataFrame, *, ylabel: str) -> Axes:
    """A line with its band per variant of `smooth`'s table, named with its seeds; the axes keep the numbers.

    A line that lies under another one shows at its edges: the first is the broadest. Where runs diverged, the name says
    how many reached the last step.
    """
    widths = np.linspace(2.4, 1.0, curves["variant"].nunique())
    for (variant, own), width in zip(curves.groupby("variant", sort=False), widths, strict=True):
        color, seeds, ended = COLORS[variant], own["seeds"].max(), own["seeds"].iloc[-1]
        if own["step"].iloc[-1] < curves["step"].max():
            ended = 0
        to_the_end = "" if ended == seeds else f", {ended} to the end"
        name = f"{own['label'].iloc[0]} ({seeds} seed{'s' if seeds > 1 else ''}{to_the_end})"
        ax.plot(own["step"], own["mean"], color=color, linestyle=LINES[variant], linewidth=width, label=name)
        low, high = own["mean"] - own["sd"], own["mean"] + own["sd"]
        ax.fill_between(own["step"], low, high, color=color, alpha=0.12, linewidth=0)
    ax.set(xlabel="step", ylabel=ylabel)
    return finish(ax, curves)
