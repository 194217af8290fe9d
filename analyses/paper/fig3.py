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
from gradscope.plots import NEGATIVE, NEUTRAL, PAGE_WIDTH, POSITIVE, headline, name_intervals, paper_style

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
def draw(means: pd.DataFrame, differences: pd.DataFrame) -> Figure:
    """Draw how many of GRPO's tokens moved as their advantage asks, and what each method changes, by optimizer."""
    figure, axes = plt.subplots(2, 3, figsize=(PAGE_WIDTH, 5.0), layout="constrained", width_ratios=[1.3, 1, 1])
    changes = differences[(differences["baseline"] == BASELINES[0]) & (differences["against"] == "advantage")]
    for row, (optimizer, words) in zip(axes, OPTIMIZERS.items(), strict=True):
        row[2].sharey(row[1])
        row[2].tick_params(labelleft=False)
        draw_shares(row[0], means[means["optimizer"] == optimizer], words)
        own = changes[changes["optimizer"] == optimizer]
        for ax, (sign, moved) in zip(row[1:], SIGNS.items(), strict=True):
            draw_changes(ax, own[own["sign"] == sign])
            ax.set_title(f"minus GRPO's,\n{moved}", loc="left")
    handles, names = (a + b for a, b in zip(*(ax.get_legend_handles_labels() for ax in axes[0, :2]), strict=True))
    figure.legend(handles, names, loc="outside upper center", ncols=len(names), columnspacing=1)
    count = means["num_batches"].max()
    words = f"Means over {count} checkpoints of one run. Bars, left: standard deviation over these; else 95 % t "
    return headline(figure, "", f"{words}intervals of paired differences.")


SIGNS = {"positive": "Â > 0 that rise", "negative": "Â < 0 that fall"}
LOOKS = {"positive": (POSITIVE, "o"), "negative": (NEGATIVE, "s")}


def draw_shares(ax: Axes, means: pd.DataFrame, words: str) -> Axes:
    """Draw GRPO's share of tokens that moved the right way, by sign of the advantage, and the paper's."""
    plain = means[means["method"] == BASELINES[0]]
    for shift, (sign, moved) in zip((-0.12, 0.12), SIGNS.items(), strict=True):
        rows, (color, marker) = plain[plain["sign"] == sign].sort_values("interval"), LOOKS[sign]
        look = {"ms": 4, "elinewidth": 0.9, "color": color, "fmt": marker, "label": moved}
        ax.errorbar(rows["interval"] + shift, rows["mean"], rows["sd"], **look)
    ax.plot(np.arange(4) - 0.28, PAPER[BASELINES[0]], "D", ms=4, mfc="white", mec="black", label="the paper's")
    ax.axhline(0.5, color=NEUTRAL, lw=0.6, ls=":", zorder=0)
    ax.set_xticks(range(len(interval_labels())))
    name_intervals(ax, interval_labels())
    ax.set(xlabel="$π_{old}$ before the step", ylabel="share of GRPO's tokens")
    ax.set_title(f"{words}: GRPO's tokens\nthat move as Â asks", loc="left")
    return ax


def draw_changes(ax: Axes, differences: pd.DataFrame) -> Axes:
    """Draw each method's difference from GRPO by interval, with its interval over the checkpoints."""
    methods = [method for method in VARIANTS if method in set(differences["method"])]
    for place, method in enumerate(methods):
        rows = differences[differences["method"] == method].sort_values("interval")
        errors = np.nan_to_num(np.abs(rows[["lower", "upper"]].to_numpy().T - rows["difference"].to_numpy()))
        x = rows["interval"] + 0.17 * (place - (len(methods) - 1) / 2)
        look = {"ms": 3.5, "elinewidth": 0.9, "fmt": "o", "color": COLORS[VARIANTS[method]], "label": method}
        ax.errorbar(x, rows["difference"], errors, **look)
    ax.axhline(0, color=NEUTRAL, lw=0.6, zorder=0)
    ax.set_xticks(range(len(interval_labels())))
    name_intervals(ax, interval_labels())
    ax.set_xlabel("$π_{old}$ before the step")
    return ax


def by_panel(means: pd.DataFrame) -> pd.DataFrame:
    """Return the means of all methods beside the paper's, a block per optimizer and sign."""
    parts = []
    for sign, mark in (("positive", "Â > 0"), ("negative", "Â < 0")):
        for optimizer, words in OPTIMIZERS.items():
            own = means[(means["optimizer"] == optimizer) & (means["sign"] == sign)]
            own = own[["method", "interval", "sign", "mean", "sd"]].assign(panel=f"{words}; {mark}")
            paper = [PAPER[m][i] if m in PAPER else np.nan for m, i in zip(own["method"], own["interval"], strict=True)]
            parts.append(own.assign(paper=paper) if sign == "positive" else own)
    found = pd.concat(parts, ignore_index=True)
    return found[["panel", *found.columns.drop("panel")]]


def main(options: Options) -> None:
    means, differences, intervals = table(options)
    shown = means[means["against"] == "advantage"]
    save_picture(draw(shown, differences), options.at("fig3.png"), by_panel(shown))
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
