"""Measure how the cost of a token's exact gradient norms grows, beside the plan's prediction.

One quantity at a time is varied from one policy (hidden 128, 4 layers, vocabulary 512, four sequences of 128 tokens).
Time of one thread without the self-check, medians of interleaved rounds; predictions are those of `gradscope measure
--plan`, whose pilot runs in the same rounds. Writes

    growth.csv          ms per token, measured and predicted, by the quantity varied
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from analyses.common.measurements import keep
from gradscope.gradients import (
    MeasureSettings,
    TableMeasurement,
    plan_batch,
)
from gradscope.policy import Policy, find_blocks
from gradscope.rollouts import Response, TokenBatch, collate


@dataclass(frozen=True)
class Case:
    """A policy of random weights and its batch."""

    length: int = 128
    hidden: int = 128
    layers: int = 4
    vocab: int = 512
    responses: int = 4


VARIED: dict[str, tuple[int, ...]] = {
    "length": (32, 64, 128, 256),
    "hidden": (64, 128, 256),
    "layers": (2, 4, 8),
    "vocab": (512, 4096, 32768),
    "responses": (1, 4, 16),
}


def measure(out: Path, *, rounds: int = 3) -> None:
    """Measure and keep the table."""
    keep(out, {"growth.csv": growth_table(rounds).round(4)}, rounds=rounds)


def cases() -> dict[tuple[str, int], Case]:
    """Return {(quantity varied, its value): case}."""
    return {(name, value): replace(Case(), **{name: value}) for name, values in VARIED.items() for value in values}


def make_sequences(vocab: int, count: int, length: int) -> TokenBatch:
    """Make random ids; the first quarter of each sequence is its prompt."""
    ids = torch.randint(4, vocab, (count, length), generator=torch.Generator().manual_seed(1)).tolist()
    start = length // 4
    return collate([Response(row[:start], row[start:], group) for group, row in enumerate(ids)])


def make_policy(case: Case) -> Policy:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=case.hidden,
        num_hidden_layers=case.layers,
        num_attention_heads=case.hidden // 32,
        num_key_value_heads=case.hidden // 64,
        intermediate_size=3 * case.hidden,
        vocab_size=case.vocab,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = Qwen2ForCausalLM(config).eval()
    return Policy(model, None, find_blocks(model))


def run(case: Case) -> dict[str, float]:
    """Return predicted and measured ms per token, and the FLOPs of its floor."""
    policy, settings = make_policy(case), MeasureSettings(self_check=False)
    batch = make_sequences(case.vocab, case.responses, case.length)
    plan = plan_batch(policy, batch, settings)
    start = time.perf_counter()
    with TableMeasurement(policy, batch, settings) as measurement:
        for group in measurement.row_norms.groups:
            measurement.measure_responses(group)
    seconds = time.perf_counter() - start
    predicted = sum(plan.seconds.values())
    each = {"measured_ms": 1e3 * seconds / batch.num_tokens, "predicted_ms": 1e3 * predicted / batch.num_tokens}
    return each | {"floor_mflop": plan.floor / batch.num_tokens / 1e6}


def growth_table(rounds: int) -> pd.DataFrame:
    """Return a row per case: medians over interleaved rounds."""
    rows: list[dict[str, Any]] = []
    run(Case(length=32))  # warms up
    for _ in range(rounds):
        for (name, value), case in cases().items():
            rows.append({"varied": name, "value": value, **run(case)})
    table = pd.DataFrame(rows).groupby(["varied", "value"], sort=False, as_index=False).median()
    table["predicted_over_measured"] = table.predicted_ms / table.measured_ms
    return table
