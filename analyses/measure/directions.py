"""Measure the share of tokens that one step moves the way their advantage asks, for Fig. 3 (analyses/paper/fig3.py).

At each of ten checkpoints of a run, a fresh batch of 32 × 8 responses and one update of each method from the same
weights: GRPO, Reweight (α = 0.3), Lopti (η = 0.5), both, and a control absent from the paper, a random split of Lopti's
sizes. Each is taken with the run's own optimizer (AdamW with its moments, learning rate 2e-4, two mini-batches) and
with SGD (1e-3), where no momentum of earlier steps moves the tokens. Writes

    shares.csv          by checkpoint (`batch`), optimizer, method, yardstick (`against`), interval and sign
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pandas as pd
import torch
from tqdm import tqdm

from analyses.common.in_training import FRESH, Moment, moments
from analyses.common.measurements import keep, part
from analyses.common.net_weights import net_weights
from gradscope.updates import (
    SGD,
    apply_updates,
    make_update,
    movement_table,
    right_direction_shares,
)

METHODS = {
    "GRPO": "all",
    "Reweight": "reweight",
    "Lopti": "lopti",
    "both": "reweight-lopti",
    "random split": "random-split",
}
"""{name in the figure: name of the update}."""
OPTIMIZERS = ("adamw", "sgd")


def measure(out: Path, *, scale: str = "cpu", run: Path | None = None, questions: int = 32) -> None:
    """Take all methods' steps at all checkpoints and keep the shares."""
    frames = []
    for moment in tqdm(moments(scale, run=run), "checkpoints"):
        for optimizer in OPTIMIZERS:
            take = partial(take_steps, moment, optimizer, questions)
            frame = part(out, f"{optimizer}-{moment.step}", take)
            frames.append(frame.assign(batch=moment.step, optimizer=optimizer))
    shares = pd.concat(frames, ignore_index=True).drop(columns=["lower", "upper"])
    keep(out, {"shares.csv": shares}, checkpoints=len(frames) // len(OPTIMIZERS), questions=questions, responses=8)


def take_steps(moment: Moment, optimizer: str, questions: int) -> pd.DataFrame:
    """Take all methods' steps on one batch of one checkpoint."""
    batch = moment.sample(questions, seed=FRESH + 1000 * moment.step)
    own = optimizer == "adamw"
    generator = torch.Generator().manual_seed(moment.step)
    made = {"loss": moment.config.loss, "mini_batch_size": len(batch) // 2, "generator": generator}
    movements = apply_updates(
        moment.policy,
        batch,
        [make_update(name, batch, **made) for name in METHODS.values()],
        loss=moment.config.loss,
        step=moment.step_settings if own else SGD,
        optimizer_state=moment.optimizer_state if own else None,
        resources=moment.resources,
    )
    tokens = movement_table(movements)
    tokens["net_weight"] = net_weights(tokens, batch)
    found = []
    for method, name in METHODS.items():
        for against in ("advantage", "net_weight"):
            shares = right_direction_shares(tokens, name=name, against=against, seed=None)
            found.append(shares.assign(method=method, against=against))
    return pd.concat(found, ignore_index=True)
