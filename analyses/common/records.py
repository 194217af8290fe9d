"""Training records on one page: what the trainer logged, and accuracy at the judged checkpoints (Fig. 7–12)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from analyses.common.accuracy import baseline_means, levels_of, sampled_name, within_shares
from analyses.common.colors import COLORS, LINES
from analyses.common.contrasts import differences, holm, summarize
from analyses.common.curves import BAND, draw_curves, smooth
from gradscope.plots import finish, headline, paper_style

RECORDS = {
    "reward_mean": ("Reward", "mean reward"),
    "response_length": ("Response length", "tokens"),
    "grad_norm": ("Gradient norm", "norm before clipping"),
    "accuracy": ("Accuracy in training", "share of right answers"),
    "entropy": ("Entropy", "nats per token"),
    "kl": ("KL to the untrained policy", "nats per token"),
}
"""{column of the metrics: (title, unit)}."""
LATE = 50
"""Number of last steps averaged to compare a record."""


def smooth_records(metrics: pd.DataFrame) -> pd.DataFrame:
    """Return `smooth`'s rows of each logged record, identified by the column `record`."""
    found = [name for name in RECORDS if name in metrics and metrics[name].notna().any()]
    return pd.concat([smooth(metrics, name).assign(record=name) for name in found], ignore_index=True)


def accuracy_by_step(tests: pd.DataFrame) -> pd.DataFrame:
    """Return a row per variant, level and judged step: seeds, and mean and bounds of sampled accuracy over seeds."""
    return summarize(tests, sampled_name(tests), ("variant", "label", "level", "step"))


def late_means(metrics: pd.DataFrame, names: Sequence[str], steps: int = LATE) -> pd.DataFrame:
    """Return a row per run: variant, label, seed and its records' means over its last `steps` steps."""
    last = metrics.groupby(["variant", "seed"])["step"].transform("max")
    late = metrics[metrics["step"] > last - steps]
    return late.groupby(["variant", "label", "seed"], sort=False)[list(names)].mean().reset_index()


def compare_late(
    metrics: pd.DataFrame, names: Mapping[str, str], variants: Sequence[str], baseline: str
) -> pd.DataFrame:
    """Compare each record of `names` (column → the paper's claim about it) at the end of training with the baseline's.

    Columns: record, claim, those of `differences` with Holm's correction over all rows, and relative (to the baseline).
    """
    late, rows = late_means(metrics, list(names)), []
    for name, claim in names.items():
        found = differences(late, name, [(variant, baseline) for variant in variants])
        share = found["difference"] / baseline_means(found, late, name)
        rows.append(found.assign(record=name, claim=claim, relative=share))
    table = holm(pd.concat(rows, ignore_index=True))
    return table[["record", "claim", *table.columns.drop(["record", "claim"])]]


@paper_style()
def draw_records(curves: pd.DataFrame, accuracy: pd.DataFrame) -> Figure:
    """Draw a panel per record, then one per number of people with the accuracies of the judged checkpoints."""
    records, levels = list(curves["record"].unique()), levels_of(accuracy)
    columns = 3
    rows = -(-len(records) // columns) + -(-len(levels) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(7.3, 1.75 * rows + 0.5), layout="constrained")
    panels = list(axes.flat)
    for panel, record in zip(panels, records, strict=False):
        title, unit = RECORDS[record]
        own = curves[curves["record"] == record]
        draw_curves(panel, own, ylabel=unit).set_title(title, loc="left")
        if record == "grad_norm":  # one step can be a hundred times the others
            panel.set_yscale("log", subs=[])
            panel.set_ylim(own["mean"].min() / 1.5, 1.5 * (own["mean"] + own["sd"].fillna(0)).max())
            panel.yaxis.set(major_locator=LogLocator(subs=(1, 2, 5)), major_formatter="{x:g}")
    below = panels[-(-len(records) // columns) * columns :]
    for panel, level in zip(below, levels, strict=False):
        draw_checkpoints(panel, accuracy[accuracy["level"] == level])
        people = "all puzzles" if level == "all" else f"{level} people"
        panel.set_title(f"Test accuracy, {people}", loc="left")
    bottoms, tops = zip(*(panel.get_ylim() for panel in below[: len(levels)]), strict=True)
    for panel in below[: len(levels)]:  # one scale, lest a point of accuracy look like a swing
        panel.set_ylim(min(bottoms) - 0.02, max(tops) + 0.02)
    for unused in [*panels[len(records) : len(panels) - len(below)], *below[len(levels) :]]:
        unused.axis("off")
    handles, names = panels[0].get_legend_handles_labels()
    fits = sum(map(len, names)) < 80
    figure.legend(handles, names, loc="outside upper center", ncols=len(names) if fits else 2)
    headline(figure, "", f"Training: {BAND}.\nTest: sampled answers; mean, 95 % interval over several seeds.")
    return figure


def draw_checkpoints(ax: Axes, accuracy: pd.DataFrame) -> Axes:
    """Draw accuracy at the judged checkpoints of one level, a mean with its interval per variant."""
    steps = np.sort(accuracy["step"].unique())
    gap = np.diff(steps).min() if len(steps) > 1 else 1.0
    variants = list(accuracy["variant"].unique())
    for place, variant in enumerate(variants):
        own = accuracy[accuracy["variant"] == variant].sort_values("step")
        x = own["step"] + (place - (len(variants) - 1) / 2) * 0.1 * gap
        errors = [own["mean"] - own["lower"], own["upper"] - own["mean"]]
        style = {"color": COLORS[variant], "linestyle": LINES[variant], "linewidth": 0.8, "elinewidth": 0.8}
        ax.errorbar(x, own["mean"], errors, marker="o", markersize=2.5, **style)
    ax.set_xticks(steps)
    ax.set(xlabel="step", ylabel="accuracy")
    within_shares(ax)
    return finish(ax, accuracy)
