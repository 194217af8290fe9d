"""Measure what one step does to every token of a policy in training, for Fig. 1 of the paper (analyses/paper/fig1.py).

On each of four batches of 64 × 8 responses, one SGD step (learning rate 1e-3, gradient clipped to norm 1, as in the
paper) is taken from the same policy on all tokens, on those of [0, ¼) alone, and on those of [¾, 1] alone. Similarities
are also measured under the run's own AdamW, momentum included. Writes

    tokens.parquet      a row per token of the four batches: how far each update moved π
    similarity.csv      how similar a selective update and the whole one are outside its interval, by batch
    movements.csv       movements by interval and sign of the advantage
    gradients.csv       the intervals' summed gradients, means over the batches
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from tqdm import tqdm

from analyses.common.in_training import FRESH, moments, pool
from analyses.common.measurements import keep, part
from analyses.common.several_batches import mean_gradients
from gradscope.gradients import Resources
from gradscope.updates import SGD, SIGNS, apply_updates, movement_table, similarity

OUTSIDE = {"only-0": 0, "only-3": 3}
"""{selective update: its interval}."""
UPDATES = ("all", *OUTSIDE)
QUANTILES = {"q05": 0.05, "q25": 0.25, "median": 0.5, "q75": 0.75, "q95": 0.95}
MOVED = [f"delta_{of}.{name}" for of in ("prob", "log_odds") for name in UPDATES]
KEPT = ["batch", "interval", "prob", "advantage", *MOVED]


def measure(out: Path, *, scale: str = "cpu", run: Path | None = None, batches: int = 4, questions: int = 64) -> None:
    """Take the steps and keep the tables."""
    [moment] = moments(scale, run=run, last=1)
    samples = [moment.sample(questions, seed=FRESH + i) for i in range(batches)]
    size = moment.config.micro_batch_size
    optimizers = {
        "sgd": (SGD, None),
        "adamw": (moment.step_settings, moment.optimizer_state),
    }
    moved = {name: [] for name in optimizers}
    for number, batch in enumerate(tqdm(samples, "batches")):
        for name, (step, state) in optimizers.items():
            keywords = {"loss": moment.config.loss, "step": step, "optimizer_state": state}
            keywords["resources"] = moment.resources
            move = partial(apply_updates, moment.policy, batch, list(UPDATES), **keywords)
            moved[name].append(part(out, f"{name}-{number}", lambda move=move: movement_table(move())))
    resources = Resources(micro_batch=size)
    gradients, _ = mean_gradients(moment.policy, samples, loss=moment.config.loss, resources=resources)
    tokens = pool(moved["sgd"])
    tables = {
        "tokens.parquet": slim(tokens),
        "similarity.csv": pd.concat([compare(pool(own)).assign(optimizer=name) for name, own in moved.items()]),
        "movements.csv": summarize(tokens),
        "gradients.csv": gradients,
    }
    keep(out, tables, step=moment.step, batches=batches, questions=questions, responses=8)


def slim(tokens: pd.DataFrame) -> pd.DataFrame:
    """Keep the columns that are drawn, in the order of the tokens."""
    return tokens[KEPT].astype({"batch": np.int8, "interval": np.int8, "prob": np.float32, "advantage": np.float32})


def compare(tokens: pd.DataFrame) -> pd.DataFrame:
    """Return how similar each selective update and the whole one are outside its interval, by batch.

    There is no interval over a batch's prompts: all of them share its one step.
    """
    rows = []
    for name, interval in OUTSIDE.items():
        for batch, chosen in tokens.groupby("batch"):
            found = similarity(chosen, "all", name, outside=[interval], seed=None)
            row = {"update": name, "batch": batch, "num_tokens": found.num_tokens}
            rows.append(row | {"correlation": found.correlation})
    return pd.DataFrame(rows)


def summarize(tokens: pd.DataFrame) -> pd.DataFrame:
    """Return every update's movements, of π and of log π, by interval and sign of the advantage."""
    signs = np.select([tokens["advantage"] > 0, tokens["advantage"] < 0], [0, 1], -1)  # places in SIGNS; −1: none
    sign = pd.Series(pd.Categorical.from_codes(signs, SIGNS), tokens.index, name="sign")
    parts = []
    for name in UPDATES:
        for value in ("delta_prob", "delta_logprob"):
            moved = tokens[f"{value}.{name}"].astype(np.float64).groupby([tokens["interval"], sign], observed=False)
            rows = moved.agg(num_tokens="count", mean="mean", mean_abs=lambda own: own.abs().mean(), sd="std")
            rows = rows.assign(**{label: moved.quantile(q) for label, q in QUANTILES.items()})
            parts.append(rows.reset_index().assign(update=name, of=value))
    return pd.concat(parts)
