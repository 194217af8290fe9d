"""Token tables with a planted power of 1 − π."""

from __future__ import annotations

import numpy as np
import pandas as pd


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def make_table(
    power: float = 1.0, *, noise: float = 0.3, prompts: int = 20, each: int = 15, wander: float = 0.0, seed: int = 0
) -> pd.DataFrame:
    """log norm = 1 + (power + wander · a number of the prompt's own) · log(1−π) + noise; 1−π from e^-9 to 1."""
    draw = rng(seed)
    group = np.repeat(np.arange(prompts), each)
    rest = -9 * draw.random(len(group)) ** 2
    own_power = power + wander * draw.standard_normal(prompts)[group]
    table = pd.DataFrame({"group": group, "log_one_minus_prob": rest, "logit_grad_norm": 1.2 * np.exp(rest)})
    for name in ("act_grad_norm.0", "act_grad_norm.1", "param_grad_norm"):
        table[name] = np.exp(1 + own_power * rest + noise * draw.standard_normal(len(group)))
    return table
