"""Probability or entropy: what goes with the size of a token's gradient, at every place in the network.

    python -m analyses.drivers [--out figures] [--run runs/in_training]

The token table of a policy in training (24 × 8 responses, every token), its log norms regressed on log(1−π) and entropy
at once, on tokens with 1−π > 1e-3; coefficients are standardised, intervals redraw prompts. Beside it, by token class,
position, entropy and sign of the advantage: mean norms, and shares of the tokens and of Σ‖w·g‖.

Differs from the paper: it has no such figure; the 80/20 rule (arXiv:2506.01939) picks tokens by entropy instead.
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

from analyses.in_training import FRESH, RUN, moments
from gradscope.drivers import add_drivers, regress_norms
from gradscope.plot_style import paper_style, save_figure
from gradscope.plot_updates import plot_norm_drivers
from gradscope.token_table import measure

BY = ("token_class", "position_bin", "entropy_bin", "advantage_sign")


@dataclass(frozen=True)
class Options:
    """Settings of the script."""

    out: Path = Path("figures")
    run: Path = RUN
    questions: int = 24


def table(options: Options) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The fits; the measured tokens with their drivers."""
    [moment] = moments(options.run, last=1)
    batch = moment.sample(options.questions, seed=FRESH)
    tokens = measure(moment.policy, batch)
    special = set(moment.policy.tokenizer.all_special_tokens)
    return regress_norms(tokens, rng=np.random.default_rng(0)), add_drivers(tokens, special=special)


def by_driver(tokens: pd.DataFrame) -> pd.DataFrame:
    """Mean norm (unit weight), and shares of the tokens and of Σ‖w·g‖, for each value of each driver."""
    size = tokens["weight"].abs() * tokens["param_grad_norm"]
    rows = []
    for driver in BY:
        for value, own in tokens.groupby(driver, observed=True):
            row = {"driver": driver, "value": value, "tokens": len(own), "share_of_tokens": len(own) / len(tokens)}
            row |= {"mean_norm": own["param_grad_norm"].mean(), "mean_prob": own["prob"].mean()}
            rows.append(row | {"share_of_weighted_norms": size[own.index].sum() / size.sum()})
    return pd.DataFrame(rows)


@paper_style()
def draw(fits: pd.DataFrame) -> Figure:
    """Both coefficients at every place."""
    figure, ax = plt.subplots(figsize=(6.0, 2.8), layout="constrained")
    plot_norm_drivers(fits, ax=ax)
    return figure


def main(options: Options) -> None:
    torch.set_num_threads(1)
    fits, tokens = table(options)
    save_figure(draw(fits), options.out / "drivers.png")
    shares = by_driver(tokens)
    shares.to_csv(options.out / "drivers_by_value.csv", index=False, float_format="%.4g")
    print(fits.to_string(index=False, float_format="{:.3f}".format))
    print(shares.to_string(index=False, float_format="{:.3g}".format))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
