"""Fig. 1 of the paper, all six panels, on a policy in training: where tokens are, and what one step does to them.

    python -m analyses.fig1_updates [--out figures] [--run runs/in_training]

One SGD step (learning rate 1e-3, gradient clipped to norm 1, as in the paper) on all tokens, on those of [0, ¼) alone
and on those of [¾, 1] alone, from the same policy, on each of four batches of 64 × 8 responses. "(e) closely matches
(c) while (f) does not" as a number: the correlation of the tokens' changes of log odds, log π − log(1−π), over the
tokens outside the updated interval. The same under the run's own AdamW, momentum and all, goes into the CSV.

Differs from the paper: the policy (0.8 M parameters, after 40 GRPO steps), its puzzles, four batches in place of one
step; violins are split by the sign of the advantage, and the top 1 % of |Δπ| is left out of each interval, not of all.
Intervals of r redraw the prompts of these four batches and do not speak of other updates; the CSV has r one by one. A
step is on the whole batch, where the run takes two on 64 responses each.
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
from gradscope.directions import movement_summary, similarity
from gradscope.group_gradients import IntervalGradients, interval_gradients_over
from gradscope.plot_style import paper_style, save_figure
from gradscope.plot_updates import plot_movement
from gradscope.plots import plot_advantages, plot_interval_gradient_norms, plot_token_shares
from gradscope.step_settings import StepSettings
from gradscope.updates import apply_updates, movement_table

PANELS = {"all": "(c) all tokens updated", "only-0": "(e) only [0, ¼) updated", "only-3": "(f) only [¾, 1] updated"}
OUTSIDE = {"only-0": 0, "only-3": 3}
"""The interval that each selective update is made of."""


@dataclass(frozen=True)
class Options:
    """Settings of the script."""

    out: Path = Path("figures")
    run: Path = RUN
    batches: int = 4
    questions: int = 64


def table(options: Options) -> tuple[pd.DataFrame, IntervalGradients, pd.DataFrame]:
    """Movements of all batches' tokens under SGD; the intervals' gradients; similarities by optimizer and batch."""
    [moment] = moments(options.run, last=1)
    batches = [moment.sample(options.questions, seed=FRESH + i) for i in range(options.batches)]
    size = moment.config.micro_batch_size
    optimizers = {
        "sgd": (StepSettings(micro_batch_size=size), None),
        "adamw": (moment.step_settings, moment.optimizer_state),
    }
    moved = {name: [] for name in optimizers}
    for batch in tqdm(batches, "batches"):
        for name, (step, state) in optimizers.items():
            keywords = {"settings": moment.config.loss, "step": step, "optimizer_state": state}
            moved[name].append(movement_table(apply_updates(moment.policy, batch, list(PANELS), **keywords)))
    gradients = interval_gradients_over(moment.policy, batches, settings=moment.config.loss, micro_batch_size=size)
    similar = pd.concat([compare(pool(tables)).assign(optimizer=name) for name, tables in moved.items()])
    return pool(moved["sgd"]), gradients, similar


def compare(tokens: pd.DataFrame) -> pd.DataFrame:
    """How alike each selective update and the whole one are outside its interval: by batch, and over all batches."""
    rows = []
    for name, interval in OUTSIDE.items():
        for batch, chosen in [*tokens.groupby("batch"), ("all", tokens)]:
            rng = np.random.default_rng(0) if batch == "all" else None
            found = similarity(chosen, "all", name, outside=[interval], rng=rng)
            row = {"update": name, "batch": batch, "num_tokens": found.num_tokens, "correlation": found.correlation}
            rows.append(row | {"lower": found.lower, "upper": found.upper})
    return pd.DataFrame(rows)


@paper_style()
def draw(tokens: pd.DataFrame, gradients: IntervalGradients, similar: pd.DataFrame) -> Figure:
    """The six panels in the paper's arrangement."""
    figure, axes = plt.subplots(2, 3, figsize=(10.2, 5.4), layout="constrained")
    axes = dict(zip("abcdef", axes.flat, strict=True))
    plot_token_shares(tokens, ax=axes["a"]).set_title("(a) token shares", loc="left")
    plot_advantages(tokens, ax=axes["b"]).set_title("(b) advantages", loc="left")
    plot_interval_gradient_norms(gradients.table, ax=axes["d"]).set_title("(d) gradient norms", loc="left")
    of_all = similar[(similar["optimizer"] == "sgd") & (similar["batch"] == "all")].set_index("update")
    for panel, (name, title) in zip("cef", PANELS.items(), strict=True):
        plot_movement(tokens, name, ax=axes[panel])
        if name in of_all.index:
            found = of_all.loc[name]
            title += f"; r = {found.correlation:.2f} [{found.lower:.2f}, {found.upper:.2f}]"
        axes[panel].set_title(title, loc="left")
    bottoms, tops = zip(*(axes[panel].get_ylim() for panel in "cef"), strict=True)
    for panel in "cef":
        axes[panel].set_ylim(min(bottoms), max(tops))
    return figure


def main(options: Options) -> None:
    torch.set_num_threads(1)
    tokens, gradients, similar = table(options)
    save_figure(draw(tokens, gradients, similar), options.out / "fig1_updates.png")
    similar.to_csv(options.out / "fig1_similarity.csv", index=False)
    parts = [
        movement_summary(tokens, name, value=value, rng=None).assign(update=name, of=value)
        for name in PANELS
        for value in ("delta_prob", "delta_logprob")
    ]
    pd.concat(parts).to_csv(options.out / "fig1_movements.csv", index=False, float_format="%.4g")
    gradients.table.to_csv(options.out / "fig1_gradients.csv", index=False)
    print(similar.to_string(index=False, float_format="{:.3f}".format))
    print(gradients.table.to_string(index=False, float_format="{:.3g}".format))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
