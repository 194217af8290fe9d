"""Measures how the cost of a token's exact gradient norms grows: on one core, by the model, and for large policies.

Starting from one policy (hidden 128, 4 layers, vocabulary 512, sequences of 128 tokens, 4 of them) one quantity at a
time is varied. Time of one thread, self-check left out, medians of interleaved rounds; predicted is what `gradscope
measure --plan` says, whose pilot runs in the same rounds. Leaves

    growth.csv          ms of a token, measured and predicted, by what is varied
    gpu.csv             the same model for Qwen2.5 on one GPU that was not at hand: its datasheet, with the shares of it
                        that are assumed (gradscope.gradients.cost.machine), stands in every row
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from analyses.benchmarks.plan_time import make_sequences
from analyses.common.measurements import keep
from gradscope.gradients import (
    MeasureSettings,
    ModelShape,
    Response,
    TableMeasurement,
    floor_flops,
    gpu_rates,
    measure_flops,
    plan_batch,
)
from gradscope.policy import Policy, find_blocks

QWEN = {
    "0.5B": {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "intermediate_size": 4864},
    "3B": {"hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16, "intermediate_size": 11008},
    "7B": {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "intermediate_size": 18944},
}
KEY_HEADS = {"0.5B": 2, "3B": 2, "7B": 4}
UNTIED = "7B"
GPU, LENGTHS, CHUNK_ROWS = "h200", (512, 2048), 8192


@dataclass(frozen=True)
class Case:
    """A policy of random weights and a batch for it."""

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
    """Measure and keep both tables."""
    keep(out, {"growth.csv": growth_table(rounds).round(4), "gpu.csv": gpu_table().round(3)}, rounds=rounds)


def cases() -> dict[tuple[str, int], Case]:
    """(what is varied, its value) → case."""
    return {(name, value): replace(Case(), **{name: value}) for name, values in VARIED.items() for value in values}


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
    """Predicted and measured ms of a token, FLOPs of its floor."""
    policy, settings = make_policy(case), MeasureSettings(self_check=False)
    batch = make_sequences(case.vocab, case.responses, case.length)
    plan = plan_batch(policy, batch, settings)
    start = time.perf_counter()
    with TableMeasurement(policy, batch, settings) as measurement:
        for group in measurement.groups:
            measurement.measure_responses(group)
    seconds = time.perf_counter() - start
    predicted = sum(plan.seconds.values())
    each = {"measured_ms": 1e3 * seconds / batch.num_tokens, "predicted_ms": 1e3 * predicted / batch.num_tokens}
    return each | {"floor_mflop": plan.floor / plan.measured / 1e6}


def growth_table(rounds: int) -> pd.DataFrame:
    """A row per case: medians over interleaved rounds."""
    rows: list[dict[str, Any]] = []
    run(Case(length=32))  # warms up
    for _ in range(rounds):
        for (name, value), case in cases().items():
            rows.append({"varied": name, "value": value, **run(case)})
    table = pd.DataFrame(rows).groupby(["varied", "value"], sort=False, as_index=False).median()
    table["predicted_over_measured"] = table.predicted_ms / table.measured_ms
    return table


def gpu_table() -> pd.DataFrame:
    """Qwen2.5 on one GPU, by the model alone: three quarters of each sequence are response, all tokens measured."""
    rows = []
    for name in QWEN:
        shape = qwen_shape(name)
        for length in LENGTHS:
            prefixes = tuple(range(length // 4, length))
            response = Response(len(prefixes), prefixes, length - 1)
            floor = sum(floor_flops(shape, prefixes).values()) / len(prefixes)
            for precision in ("float32", "tf32", "bfloat16"):
                cut = {"rules": True, "device": "cuda", "rows": CHUNK_ROWS}
                flops = measure_flops(shape, [response], self_check=False, **cut)
                rates = gpu_rates(GPU, precision, dict.fromkeys(flops))
                seconds = sum(rates.seconds(flops).values()) / len(prefixes)
                row = {"policy": f"Qwen2.5-{name}", "length": length, "products_in": precision}
                row |= {"floor_gflop_per_token": floor / 1e9, "ms_per_token": 1e3 * seconds}
                row |= {"tokens_per_second": 1 / seconds, "assumed": f"{rates.machine}; --chunk-rows {CHUNK_ROWS}"}
                rows.append(row)
    return pd.DataFrame(rows)


def qwen_shape(name: str) -> ModelShape:
    """Of Qwen2.5, from its published configuration."""
    from transformers import Qwen2Config

    return ModelShape.from_config(
        Qwen2Config(
            **QWEN[name],
            num_key_value_heads=KEY_HEADS[name],
            vocab_size=152064 if name == UNTIED else 151936,
            tie_word_embeddings=name != UNTIED,
        )
    )
