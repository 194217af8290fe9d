"""Training curves of several seeds: smoothed as in the paper, averaged over seeds, drawn in the variants' colours."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from analyses.common.colors import COLORS, LINES
from gradscope.plots import finish

EMA = 0.95
"""Decay of the exponential moving average, as in the paper's Fig. 4."""
BAND = f"exponential means ({EMA}); line: mean over seeds, band: ± 1 standard deviation over seeds"
"""Required caption of such curves."""


def smooth(metrics: pd.DataFrame, value: str, *, ema: float = EMA) -> pd.DataFrame:
    """Return the exponential moving average of each run's `value`, as mean and standard deviation over seeds.

    metrics: as from `read_metrics`, with columns variant, label, seed and step. Returns a row per variant and step:
    variant, label, step, seeds (that reached it), mean, sd (NaN for one seed). Weights are normalised, so that the
    first steps are not pulled towards 0.
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
    """Return the runs at the seeds that every variant has, since means over different seeds differ by chance."""
    variants = metrics.groupby("seed")["variant"].transform("nunique")
    return metrics[variants == metrics["variant"].nunique()]


def draw_curves(ax: Axes, curves: pd.DataFrame, *, ylabel: str) -> Axes:
    """Draw a line with its band per variant of `smooth`'s table, named with its seeds; the axes keep the numbers.

    The first lines are the broadest, so that one below another still shows. If runs diverged, the name says how many
    reached the last step.
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
