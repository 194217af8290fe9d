"""Fig. 3 of the paper on a policy in training: the share of tokens that move the way their advantage asks, by method.

    python -m analyses.paper.fig3 [--out figures]

Drawn from the measurement `directions` (analyses/measure/directions.py): at each of ten checkpoints of a run, one
update of each method from the same weights, by the run's own AdamW and by SGD. Shown are means ± standard deviations
over the ten steps and, with t intervals over them, paired differences from GRPO, from a random split (absent from the
paper), and of the highest interval from each lower one.

A token's direction is judged by log π − log(1−π), against the sign of its advantage and against that of its net weight:
a token that follows the same words in a good and in a bad response of a group would have to move both ways at once, so
part of "wrong" is mechanical.

Differs from the paper: the policy, its puzzles, ten steps of one run; all methods start from GRPO's checkpoints; a
mini-batch has 128 responses, the run's 64. The paper's shares are of positive tokens only. The table of differences has
hundreds of intervals, from checkpoints of one run: some exclude 0 by chance.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats

from analyses.common.colors import COLORS
from analyses.common.measurements import read_table
from analyses.common.places import save_picture
from analyses.common.script import Options, exit_with
from analyses.common.tables import write_csv
from gradscope.intervals import interval_labels
from gradscope.plots import NEUTRAL, drawn_numbers, finish, name_intervals, paper_style

VARIANTS = {
    "GRPO": "grpo",
    "Reweight": "reweight",
    "Lopti": "lopti",
    "both": "both",
    "random split": "random-split",
}
"""{name in the figure: variant whose colour it has}."""
BASELINES = ("GRPO", "random split")
"""The second takes two steps like Lopti, so under AdamW momentum and decay act twice in both."""
OPTIMIZERS = {"adamw": "the run's AdamW", "sgd": "SGD, 1e-3"}
PAPER = {
    "GRPO": (0.530, 0.514, 0.501, 0.497),
    "Reweight": (0.520, 0.525, 0.530, 0.526),
    "Lopti": (0.524, 0.517, 0.512, 0.534),
}
"""Fig. 3 of the paper: shares of the positive tokens in each interval."""


def table(options: Options) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Return means over the checkpoints, and paired differences of methods and of intervals."""
    shares = read_table("directions", "shares.csv", scale=options.scale)
    cells = shares.groupby(["optimizer", "against", "method", "interval", "sign"], sort=False)["share"]
    means = cells.agg(num_batches="count", mean="mean", sd="std").reset_index()
    plain, split = BASELINES
    others = shares[shares["method"] != plain]  # the split has been compared with it, from the other side
    methods = [compare(shares, plain).assign(baseline=plain), compare(others, split).assign(baseline=split)]
    return means, pd.concat(methods), compare_intervals(shares)


def compare(shares: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """Return each method's paired difference from the baseline: mean over the checkpoints, 95 % t interval."""
    wide = shares.pivot(index=["optimizer", "against", "interval", "sign", "batch"], columns="method", values="share")
    others = wide.columns.drop(baseline)
    return pd.concat(_over_checkpoints(wide[method] - wide[baseline]).assign(method=method) for method in others)


def compare_intervals(shares: pd.DataFrame) -> pd.DataFrame:
    """Return the same for the highest interval against each one below it, which is `interval`."""
    wide = shares.pivot(index=["optimizer", "against", "method", "sign", "batch"], columns="interval", values="share")
    *below, highest = wide.columns
    return pd.concat(_over_checkpoints(wide[highest] - wide[one]).assign(interval=one) for one in below)


def _over_checkpoints(differences: pd.Series) -> pd.DataFrame:
    """Return the mean over the index's last level, the checkpoints; the bounds of a single one are NaN."""
    rows = []
    levels = differences.index.names[:-1]
    for key, values in differences.dropna().groupby(levels):
        half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values) if len(values) > 1 else np.nan
        row = dict(zip(levels, key, strict=True)) | {"steps": len(values), "difference": values.mean()}
        rows.append(row | {"lower": values.mean() - half, "upper": values.mean() + half})
    return pd.DataFrame(rows)


@paper_style()
def draw(means: pd.DataFrame) -> Figure:
    """Draw positive tokens (the paper's figure) and negative ones under both optimizers."""
    figure, axes = plt.subplots(2, 2, figsize=(7.3, 5.2), layout="constrained", sharey="row")
    for row, sign in zip(axes, ("positive", "negative"), strict=True):
        for ax, (optimizer, words) in zip(row, OPTIMIZERS.items(), strict=True):
            draw_shares(ax, means[(means["optimizer"] == optimizer) & (means["sign"] == sign)], sign)
            ax.set_title(f"{words}; {'Â > 0' if sign == 'positive' else 'Â < 0'}", loc="left")
            if sign == "positive":
                add_paper(ax)
    handles, names = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=len(names))
    figure.supxlabel(f"mean ± standard deviation over {means['num_batches'].max()} checkpoints", fontsize=8)
    return figure


def draw_shares(ax: Axes, shares: pd.DataFrame, sign: str) -> Axes:
    """Draw each method's share of tokens that moved the right way, with its standard deviation over the steps."""
    methods = [method for method in VARIANTS if method in set(shares["method"])]
    for place, method in enumerate(methods):
        rows, look = shares[shares["method"] == method].sort_values("interval"), {"ms": 3, "lw": 0.8, "elinewidth": 0.8}
        x = rows["interval"] + 0.13 * (place - (len(methods) - 1) / 2)
        ax.errorbar(x, rows["mean"], rows["sd"], color=COLORS[VARIANTS[method]], fmt="o-", label=method, **look)
    ax.axhline(0.5, color=NEUTRAL, lw=0.6, ls=":", zorder=0)
    ax.set_xticks(range(len(interval_labels())))
    name_intervals(ax, interval_labels())
    word = {"positive": "Â > 0 whose probability rose", "negative": "Â < 0 whose probability fell"}[sign]
    ax.set(xlabel="$π_{old}$ before the step", ylabel=f"share of tokens with\n{word}")
    return finish(ax, shares[["method", "interval", "sign", "mean", "sd"]].reset_index(drop=True))


def add_paper(ax: Axes) -> Axes:
    """Mark the paper's shares in the methods' colours."""
    for place, (method, shares) in enumerate(PAPER.items()):
        label = "the paper's" if method == "GRPO" else None
        x = np.arange(len(shares)) + 0.13 * (place - (len(VARIANTS) - 1) / 2)
        ax.plot(x, shares, "D", ms=3.5, mfc="white", mec=COLORS[VARIANTS[method]], mew=0.8, label=label, zorder=5)
    drawn = drawn_numbers(ax)
    keys = zip(drawn["method"], drawn["interval"], strict=True)
    return finish(ax, drawn.assign(paper=[PAPER[m][i] if m in PAPER else np.nan for m, i in keys]))


def main(options: Options) -> None:
    means, differences, intervals = table(options)
    save_picture(draw(means[means["against"] == "advantage"]), options.at("fig3.png"))
    write_csv(means, options.at("fig3_means.csv"), float_format="%.4f")
    write_csv(differences, options.at("fig3_differences.csv"), float_format="%.4f")
    write_csv(intervals, options.at("fig3_intervals.csv"), float_format="%.4f")
    shown = means[means["sign"] == "positive"].pivot(
        index=["optimizer", "against", "method"], columns="interval", values="mean"
    )
    print(shown.to_string(float_format="{:.3f}".format))
    print("paper (positive tokens):", PAPER)


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
