"""Which pass trains a token, by a loop over tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradscope.rollouts import TokenBatch

EDGES = (0.0, 0.25, 0.5, 0.75, 1.0)


def selected(name: str, batch: TokenBatch, row: int, column: int, eta: float = 0.5) -> list[str]:
    """Names of the passes that train this token."""
    if not batch.response_mask[row, column]:
        return []
    probability = min(1.0, math.exp(batch.old_logprobs[row, column].item()))
    kind, _, number = name.partition("-")
    if kind in ("only", "without"):
        k = int(number)
        inside = EDGES[k] <= probability < EDGES[k + 1] or (k == 3 and probability == 1.0)
        return [name] if inside == (kind == "only") else []
    if name in ("lopti", "lopti-high-first", "reweight-lopti"):
        return ["low" if probability < eta else "high"]
    if name == "positive":
        return [name] if batch.advantages[row, column] > 0 else []
    return ["all"]


def pass_names(name: str) -> list[str]:
    """In the order in which they are taken."""
    if name.endswith("-lopti") or name == "lopti":
        return ["low", "high"]
    return {"lopti-high-first": ["high", "low"], "reweight": ["all"]}.get(name, [name])


def by_loop(
    name: str, batch: TokenBatch, *, size: int | None = None, eta: float = 0.5
) -> list[tuple[str, list[int], Tensor, int]]:
    """(pass, its rows, its tokens, denominator) of every optimizer step."""
    rows = list(range(len(batch)))
    minis = [rows] if size is None else [rows[start : start + size] for start in range(0, len(rows), size)]
    steps = []
    for wanted in pass_names(name):
        for mini in minis:
            tokens, count = torch.zeros(len(mini), batch.input_ids.shape[1], dtype=torch.bool), 0
            for place, row in enumerate(mini):
                for column in range(batch.input_ids.shape[1]):
                    tokens[place, column] = wanted in selected(name, batch, row, column, eta)
                    count += bool(batch.response_mask[row, column])
            steps.append((wanted, mini, tokens, count))
    return steps
