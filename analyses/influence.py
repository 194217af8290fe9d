"""Whose gradient moves whom, on a policy in training: each token's predicted change split by the intervals' gradients.

    python -m analyses.influence [--out figures] [--run runs/in_training]

Four batches of 32 × 8 responses at the run's last checkpoint, one step each, to first order: SGD (1e-3, as in the
paper's Fig. 1) and the run's own AdamW, whose momentum, decay and KL are sources of their own. An entry is the share of
the movement of the column's tokens that the row's gradient causes, Cov(c, Δ)/Var(Δ) over the tokens; a column adds up
to 1. Intervals of confidence (in the CSV) redraw the prompts of these batches. The actual step is taken
beside it: how far the prediction errs.

Differs from the paper: it has no such table; "low-probability tokens move the others" is its reading of Fig. 1 (e).
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
from tqdm import tqdm

from analyses.in_training import FRESH, RUN, moments, pool
from gradscope.influence import influence, influence_table, moved_against
from gradscope.plot_style import paper_style, save_figure
from gradscope.plot_updates import plot_influence
from gradscope.step_settings import StepSettings
from gradscope.updates import apply_update, movement_table

OPTIMIZERS = {"sgd": "SGD", "adamw": "the run's AdamW"}
MOST_MOVED = 40


@dataclass(frozen=True)
class Options:
    """Settings of the script."""

    out: Path = Path("figures")
    run: Path = RUN
    batches: int = 4
    questions: int = 32


def table(options: Options) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """The influence of sources on intervals; errors of the prediction; the tokens moved farthest the wrong way."""
    [moment] = moments(options.run, last=1)
    batches = [moment.sample(options.questions, seed=FRESH + i) for i in range(options.batches)]
    sgd = StepSettings(micro_batch_size=moment.config.micro_batch_size)
    steps = {"sgd": (sgd, None), "adamw": (moment.step_settings, moment.optimizer_state)}
    tables, errors, against = [], [], []
    for name, (step, state) in steps.items():
        keywords = {"settings": moment.config.loss, "step": step, "optimizer_state": state}
        parts = []
        for number, batch in enumerate(tqdm(batches, f"batches, {name}")):
            found = influence(moment.policy, batch, **keywords)
            actual = movement_table([apply_update(moment.policy, batch, **keywords)])["delta_logprob.all"]
            predicted = found.contributions["predicted"]
            error = float(np.sqrt(((predicted - actual) ** 2).mean() / (actual**2).mean()))
            errors.append({"optimizer": name, "batch": number, "relative_error": error, "method": found.method})
            parts.append(found.contributions)
        tokens = pool(parts)
        tables.append(influence_table(tokens, rng=np.random.default_rng(0)).assign(optimizer=name))
        worst = moved_against(tokens, MOST_MOVED).assign(optimizer=name)
        worst.insert(0, "token", [moment.policy.decode([i]) for i in worst["token_id"]])
        against.append(worst)
    return pd.concat(tables), pd.DataFrame(errors), pd.concat(against)


@paper_style()
def draw(shares: pd.DataFrame, errors: pd.DataFrame) -> Figure:
    """A map for each optimizer, with how far the prediction is off."""
    figure, axes = plt.subplots(1, 2, figsize=(7.3, 3.0), layout="constrained")
    for ax, (name, words) in zip(axes, OPTIMIZERS.items(), strict=True):
        plot_influence(shares[shares["optimizer"] == name], ax=ax)
        off = errors.loc[errors["optimizer"] == name, "relative_error"]
        ax.set_title(
            f"{words}: share of the movement\n(prediction off by {off.min():.0%} to {off.max():.0%})", loc="left"
        )
    return figure


def main(options: Options) -> None:
    torch.set_num_threads(1)
    shares, errors, against = table(options)
    save_figure(draw(shares, errors), options.out / "influence.png")
    errors.to_csv(options.out / "influence_errors.csv", index=False, float_format="%.5g")
    against.to_csv(options.out / "influence_against.csv", index=False, float_format="%.5g")
    wide = shares.pivot(index=["optimizer", "source"], columns="target", values="share")
    print(wide.to_string(float_format="{:.3f}".format))
    print(errors.groupby("optimizer")["relative_error"].agg(["mean", "max"]))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
