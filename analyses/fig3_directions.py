"""Fig. 3 of the paper on a policy in training: which share of tokens moves the way its advantage asks, by method.

    python -m analyses.fig3_directions [--out figures] [--run runs/in_training]

At each of ten checkpoints of the run, a fresh batch of 32 × 8 responses and one update of each method from the same
weights: GRPO, Reweight (α = 0.3), Lopti (η = 0.5), both, and the control that the paper lacks, a random split of
Lopti's sizes. Twice: with the run's own optimizer (AdamW with its moments, learning rate 2e-4, two mini-batches), and
with SGD (1e-3), where no momentum of earlier steps moves the tokens too. Means ± standard deviations over the ten
steps; paired differences to GRPO with t-intervals over them.

A token's direction is judged by log π − log(1−π). Beside the advantage's sign stands that of the net weight: a token
that occurs after the same words in a good and in a bad response of a group must move both ways at once, so part of
"wrong" is mechanical.

Differs from the paper: the policy, its puzzles, ten steps of one run; all methods start from GRPO's checkpoints, and a
mini-batch is 128 responses, the run's 64. The table of differences has hundreds of intervals, from checkpoints of one
run: some exclude 0 by chance.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
import tyro
from matplotlib.figure import Figure
from scipy import stats
from tqdm import tqdm

from analyses.in_training import FRESH, RUN, Moment, moments
from gradscope.directions import net_weights, over_batches, right_direction_shares
from gradscope.plot_style import paper_style, save_figure
from gradscope.plot_updates import plot_directions
from gradscope.step_settings import StepSettings
from gradscope.updates import apply_updates, movement_table

METHODS = {
    "GRPO": "all",
    "Reweight": "reweight",
    "Lopti": "lopti",
    "both": "reweight-lopti",
    "random split": "random-split",
}
"""Words of the figure → names of the variants."""
BASELINES = ("GRPO", "random split")
"""The second takes two steps, as Lopti does: under AdamW momentum and decay act twice in both."""
OPTIMIZERS = {"adamw": "the run's AdamW", "sgd": "SGD, 1e-3"}
PAPER = {
    "GRPO": (0.530, 0.514, 0.501, 0.497),
    "Reweight": (0.520, 0.525, 0.530, 0.526),
    "Lopti": (0.524, 0.517, 0.512, 0.534),
}


@dataclass(frozen=True)
class Options:
    """Settings of the script."""

    out: Path = Path("figures")
    run: Path = RUN
    questions: int = 32


def table(options: Options) -> pd.DataFrame:
    """Shares by checkpoint (`batch`), optimizer, method, yardstick (`against`), interval and sign."""
    frames = []
    for moment in tqdm(moments(options.run), "checkpoints"):
        for optimizer in OPTIMIZERS:
            frames.append(measure(moment, optimizer, options).assign(batch=moment.step, optimizer=optimizer))
    return pd.concat(frames, ignore_index=True)


def measure(moment: Moment, optimizer: str, options: Options) -> pd.DataFrame:
    """All methods on one batch of one checkpoint."""
    batch = moment.sample(options.questions, seed=FRESH + 1000 * moment.step)
    own = optimizer == "adamw"
    movements = apply_updates(
        moment.policy,
        batch,
        list(METHODS.values()),
        settings=moment.config.loss,
        step=moment.step_settings if own else StepSettings(micro_batch_size=moment.config.micro_batch_size),
        optimizer_state=moment.optimizer_state if own else None,
        mini_batch_size=len(batch) // 2,
        generator=torch.Generator().manual_seed(moment.step),
    )
    tokens = movement_table(movements)
    tokens["net_weight"] = net_weights(tokens, batch)
    found = []
    for method, name in METHODS.items():
        for against in ("advantage", "net_weight"):
            shares = right_direction_shares(tokens, name=name, against=against, rng=None)
            found.append(shares.assign(method=method, against=against))
    return pd.concat(found, ignore_index=True)


def compare(shares: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """Each method's paired difference to the baseline, mean over the checkpoints with a 95 % t-interval."""
    keys = ["optimizer", "against", "interval", "sign"]
    wide = shares.pivot(index=[*keys, "batch"], columns="method", values="share")
    rows = []
    for method in wide.columns.drop(baseline):
        for key, values in (wide[method] - wide[baseline]).groupby(keys):
            values = values.dropna()
            half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values) if len(values) > 1 else np.nan
            row = dict(zip(keys, key, strict=True)) | {
                "method": method,
                "steps": len(values),
                "difference": values.mean(),
            }
            rows.append(row | {"lower": values.mean() - half, "upper": values.mean() + half})
    return pd.DataFrame(rows)


@paper_style()
def draw(means: pd.DataFrame) -> Figure:
    """Positive tokens (the paper's figure) and negative ones; both optimizers."""
    figure, axes = plt.subplots(2, 2, figsize=(7.3, 5.2), layout="constrained", sharey="row")
    for row, sign in zip(axes, ("positive", "negative"), strict=True):
        for ax, (optimizer, words) in zip(row, OPTIMIZERS.items(), strict=True):
            plot_directions(means[means["optimizer"] == optimizer], sign=sign, ax=ax)
            ax.set_title(f"{words}; {'Â > 0' if sign == 'positive' else 'Â < 0'}", loc="left")
    axes[0, 0].legend(ncols=2)
    figure.supxlabel(f"mean ± standard deviation over {means['num_batches'].max()} checkpoints", fontsize=8)
    return figure


def main(options: Options) -> None:
    torch.set_num_threads(1)
    shares = table(options)
    keys = ("optimizer", "against", "method", "interval", "sign")
    means = over_batches(shares, keys=keys)
    save_figure(draw(means[means["against"] == "advantage"]), options.out / "fig3_directions.png")
    means.to_csv(options.out / "fig3_means.csv", index=False, float_format="%.4f")
    differences = pd.concat(compare(shares, baseline).assign(baseline=baseline) for baseline in BASELINES)
    differences.to_csv(options.out / "fig3_differences.csv", index=False, float_format="%.4f")
    shares.to_csv(options.out / "fig3_steps.csv", index=False, float_format="%.4f")
    shown = means[means["sign"] == "positive"].pivot(
        index=["optimizer", "against", "method"], columns="interval", values="mean"
    )
    print(shown.to_string(float_format="{:.3f}".format))
    print("paper (positive tokens):", PAPER)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
