"""Whose gradient moves whom, on a policy in training: each token's predicted change split by the intervals' gradients.

    python -m analyses.paper.influence [--out figures]

Drawn from the measurement `influence` (analyses/measure/influence.py): first-order effects of one step on each of four
batches of 32 × 8 responses, with SGD (1e-3, as in the paper's Fig. 1) and the run's own AdamW, whose momentum, decay
and KL are separate sources. An entry is the share of the column's tokens' movement caused by the row's gradient, Cov(c,
Δ)/Var(Δ) over the tokens; columns add up to 1. Confidence intervals (in the CSV) resample the prompts of these batches.
The prediction's error against the actual step is given above each map.

Differs from the paper: it has no such table; "low-probability tokens move the others" is its reading of Fig. 1 (e).
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
import tyro
from matplotlib.figure import Figure

from analyses.common.measurements import read_table
from analyses.common.script import Options, exit_with
from analyses.common.tables import write_csv
from gradscope.plots import paper_style, plot_influence, save_figure

OPTIMIZERS = {"sgd": "SGD", "adamw": "the run's AdamW"}


def table(options: Options) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the influence of sources on intervals, and the prediction's errors."""
    shares, errors = (read_table("influence", name, scale=options.scale) for name in ("influence.csv", "errors.csv"))
    return shares.assign(source=shares["source"].map(number), target=shares["target"].map(number)), errors


def number(word: int | str) -> int | str:
    """Return an interval's number as an int, since a CSV with words beside it has strings.

    >>> [number(word) for word in ("0", "kl", 3)]
    [0, 'kl', 3]
    """
    return int(word) if str(word).isdecimal() else word


@paper_style()
def draw(shares: pd.DataFrame, errors: pd.DataFrame) -> Figure:
    """Draw a map per optimizer, with the prediction's error."""
    figure, axes = plt.subplots(1, 2, figsize=(7.3, 3.0), layout="constrained")
    for ax, (name, words) in zip(axes, OPTIMIZERS.items(), strict=True):
        plot_influence(shares[shares["optimizer"] == name], ax=ax)
        off = errors.loc[errors["optimizer"] == name, "relative_error"]
        ax.set_title(
            f"{words}: share of the movement\n(prediction off by {off.min():.0%} to {off.max():.0%})", loc="left"
        )
    return figure


def main(options: Options) -> None:
    shares, errors = table(options)
    save_figure(draw(shares, errors), options.out / "influence.png")
    write_csv(errors, options.out / "influence_errors.csv", float_format="%.5g")
    wide = shares.pivot(index=["optimizer", "source"], columns="target", values="share")
    print(wide.to_string(float_format="{:.3f}".format))
    print(errors.groupby("optimizer")["relative_error"].agg(["mean", "max"]))


if __name__ == "__main__":
    exit_with(lambda: main(tyro.cli(Options, description=__doc__)))
