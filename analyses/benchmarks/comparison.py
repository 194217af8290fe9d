"""Time of `compare` and of norms in AdamW's metric, beside one plain gradient and beside `measure`, in one process.

    python -m analyses.benchmarks.comparison demo-out/rollouts_seed0.jsonl

CPU time of one thread on the policy embedded-certain with rollouts of yours; ratios are medians of the rounds' own.
compare: of all weightings that the rollouts have columns for, the table given; under AdamW with a state one step old.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import process_time
from typing import Annotated

import numpy as np
import pandas as pd
import torch
import tyro

from gradscope import compare, load_policy, measure, read_rollouts
from gradscope.gradients import weighted_gradients
from gradscope.policy import AdamWState


@dataclass(frozen=True)
class Options:
    """Settings of the benchmark."""

    rollouts: Annotated[Path, tyro.conf.Positional]
    """Rollouts of the policy embedded-certain, such as the demo's."""
    rounds: int = 3


def time_all(options: Options) -> pd.DataFrame:
    """Seconds of each part in each round."""
    policy = load_policy("embedded-certain")
    batch = read_rollouts(options.rollouts, policy)
    table = measure(policy, batch)
    state = _state(policy.model)
    metric = AdamWState.from_state_dict(policy.model, state, max_grad_norm=1.0)
    weights = torch.zeros(1, *batch.input_ids.shape)
    weights[0, batch.response_mask] = torch.tensor(table["weight"].to_numpy())
    parts: dict[str, Callable[[], object]] = {
        "one gradient": lambda: weighted_gradients(policy.model, batch, weights, micro_batch_size=4),
        "measure": lambda: measure(policy, batch),
        "measure, AdamW too": lambda: measure(policy, batch, metric="adamw", optimizer_state=metric),
        "compare": lambda: compare(policy, batch, table=table),
        "compare, AdamW too": lambda: compare(policy, batch, table=table, optimizer_state=state),
    }
    rows = []
    for _ in range(options.rounds):
        for name, run in parts.items():
            start = process_time()
            run()
            rows.append({"part": name, "seconds": process_time() - start})
    return pd.DataFrame(rows).assign(round=np.repeat(np.arange(options.rounds), len(parts)))


def _state(model: torch.nn.Module) -> dict:
    """An AdamW's, one step old."""
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-5)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = 1e-3 * torch.randn(parameter.shape, generator=generator)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer.step()
    model.load_state_dict(before)
    optimizer.zero_grad()
    return optimizer.state_dict()


def main(options: Options) -> None:
    """Print seconds, and ratios to one gradient and to `measure`."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    seconds = time_all(options).pivot(index="round", columns="part", values="seconds")
    names = ["one gradient", "measure", "measure, AdamW too", "compare", "compare, AdamW too"]
    found = pd.DataFrame({"seconds": seconds.median()}).loc[names]
    for base in names[:2]:
        found[f"× {base}"] = seconds.div(seconds[base], axis=0).median()
    print(found.round(2).to_string())


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
