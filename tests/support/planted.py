"""Planted token tables and gradients, whose truth is known."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from gradscope.intervals import assign_intervals, interval_labels

LABELS = interval_labels()
PROMPTS = 12


def plant_table(seed: int = 0, *, prompts: int = PROMPTS, each: int = 40, boost: float = 2.0) -> pd.DataFrame:
    """A token table whose norms are (1−π)·gain; tokens with π < ¼ have a gain `boost` times as large on average."""
    rng = np.random.default_rng(seed)
    size = prompts * each
    prob = rng.beta(0.8, 0.4, size).clip(1e-3, 1 - 1e-4)
    group = np.repeat(np.arange(prompts), each)
    shift = rng.normal(size=prompts)[group]
    gain = np.exp(0.3 * rng.normal(size=size) + 0.2 * shift) * np.where(prob < 0.25, boost, 1.0)
    table = pd.DataFrame({"response": group, "group": group, "position": np.tile(np.arange(each), prompts)})
    table["token"] = rng.choice([" knight", "12", ",", "\n", "</s>"], size)
    table["prob"], table["log_one_minus_prob"] = prob, np.log1p(-prob)
    table["entropy"] = rng.exponential(size=size)
    table["interval"] = assign_intervals(prob)
    table["policy_weight"] = table["weight"] = table["advantage"] = rng.choice([-1.0, 1.0], size) * (1 + 0.3 * shift)
    table["param_grad_norm"] = 10 * gain * (1 - prob)
    table["logit_grad_norm"] = 1.2 * (1 - prob)
    table["act_grad_norm.0"] = 3 * gain * (1 - prob)
    table["act_grad_norm.1"] = gain * (1 - prob)
    return table


def sample_some(table: pd.DataFrame, count: int, seed: int = 0) -> pd.DataFrame:
    """Norms of `count` random tokens of each interval, NaN of the others."""
    rng, table = np.random.default_rng(seed), table.copy()
    for a in range(4):
        own = np.flatnonzero(table["interval"] == a)
        table.loc[rng.permutation(own)[count:], "param_grad_norm"] = np.nan
    return table


def numbers(rows: pd.DataFrame, statistic: str, column: str = "value") -> list[float]:
    return rows.loc[rows["statistic"] == statistic, column].tolist()


def plant_vectors(
    n: int, means: list[float], sds: list[float], rng: np.random.Generator, dimensions: int = 150
) -> np.ndarray:
    """g_{p,a} [n, A, P]: a mean along an axis of its own plus Gaussian noise of that total standard deviation."""
    noise = rng.normal(size=(n, len(means), dimensions)) / math.sqrt(dimensions) * np.array(sds)[:, None]
    return noise + np.eye(len(means), dimensions) * np.array(means)[:, None]


def make_gram(vectors: np.ndarray) -> np.ndarray:
    return np.einsum("pai,qbi->paqb", vectors, vectors)
