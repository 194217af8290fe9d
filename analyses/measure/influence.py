"""Measure whose gradient moves whom: each token's predicted change, split by the intervals' gradients.

First-order effects of one step on each of four batches of 32 × 8 responses at a run's last checkpoint, with SGD (1e-3,
as in the paper's Fig. 1) and the run's own AdamW, whose momentum, decay and KL are separate sources. The actual step is
also taken, to measure the prediction's error. Writes

    influence.csv       a row per optimizer, source and target: shares and sizes of the movement, with intervals
    errors.csv          relative error of the prediction, by batch
    against.csv         the tokens moved farthest in the wrong direction
    tokens.parquet      every token's predicted change, by source
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from tqdm import tqdm

from analyses.common.in_training import FRESH, moments, pool
from analyses.common.measurements import keep, part
from gradscope.policy import Policy
from gradscope.rollouts import TokenBatch
from gradscope.updates import SGD, apply_update, influence, influence_table, moved_against, movement_table

MOST_MOVED = 40


def measure(out: Path, *, scale: str = "cpu", run: Path | None = None, batches: int = 4, questions: int = 32) -> None:
    """Split the steps by source, take them, and keep the tables."""
    [moment] = moments(scale, run=run, last=1)
    samples = [moment.sample(questions, seed=FRESH + i) for i in range(batches)]
    steps = {"sgd": (SGD, None), "adamw": (moment.step_settings, moment.optimizer_state)}
    tables, errors, against, everything = [], [], [], []
    for name, (step, state) in steps.items():
        keywords = {"loss": moment.config.loss, "step": step, "optimizer_state": state, "resources": moment.resources}
        parts = []
        for number, batch in enumerate(tqdm(samples, f"batches, {name}")):
            found = part(out, f"{name}-{number}", partial(split_step, moment.policy, batch, **keywords))
            errors.append({"optimizer": name, "batch": number} | judge_prediction(found))
            parts.append(found.drop(columns=["actual", "method"]))
        tokens = pool(parts)
        everything.append(tokens.assign(optimizer=name))
        tables.append(influence_table(tokens, seed=np.random.default_rng(0)).assign(optimizer=name))
        worst = moved_against(tokens, MOST_MOVED).assign(optimizer=name)
        worst.insert(0, "token", [moment.policy.decode([i]) for i in worst["token_id"]])
        against.append(worst)
    kept = {"influence.csv": tables, "against.csv": against, "tokens.parquet": everything}
    kept = {name: pd.concat(parts) for name, parts in kept.items()} | {"errors.csv": pd.DataFrame(errors)}
    keep(out, kept, step=moment.step, batches=batches, questions=questions, responses=8)


def split_step(policy: Policy, batch: TokenBatch, **keywords: Any) -> pd.DataFrame:
    """Return a row per token: each source's contribution to its change, their sum, and the actual change."""
    found = influence(policy, batch, **keywords)
    moved = movement_table([apply_update(policy, batch, **keywords)])
    return found.contributions.assign(actual=moved["delta_logprob.all"], method=found.method)


def judge_prediction(tokens: pd.DataFrame) -> dict[str, float | str]:
    """Return the first-order error: root mean square of predicted minus actual change, relative to the actual."""
    error = ((tokens["predicted"] - tokens["actual"]) ** 2).mean() / (tokens["actual"] ** 2).mean()
    return {"relative_error": float(np.sqrt(error)), "method": tokens["method"].iat[0]}
