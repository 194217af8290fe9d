"""How the cost of a token's exact gradient norms grows: measured on one core, the model's curve, and large policies.

    python -m analyses.cost_growth [--out figures]

Starting from one policy (hidden 128, 4 layers, vocabulary 512, sequences of 128 tokens, 4 of them) one quantity at a
time is varied. CPU time of one thread, self-check left out, medians of interleaved rounds; the curve is what
`gradscope measure --plan` predicts from this machine's speeds, measured in the same rounds. figures/cost_growth.csv has
the points, figures/cost_growth_gpu.csv the same model for Qwen2.5 on one GPU that was not at hand: its datasheet, with
the shares of it that are assumed (gradscope.machine_speed), stands in every row.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import tyro
from matplotlib.figure import Figure

from analyses.benchmarks.plan_time import make_sequences
from gradscope.cost import ModelShape
from gradscope.cost_measure import RULES, Response, floor_flops, measure_work
from gradscope.machine_speed import gpu_speeds
from gradscope.measure_plan import plan_batch
from gradscope.measure_settings import MeasureSettings
from gradscope.models import Policy, find_blocks
from gradscope.plot_style import NEUTRAL, finish, new_panels, paper_style, save_figure
from gradscope.token_table import TableMeasurement

QWEN = {
    "0.5B": {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "intermediate_size": 4864},
    "3B": {"hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16, "intermediate_size": 11008},
    "7B": {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "intermediate_size": 18944},
}
KEY_HEADS = {"0.5B": 2, "3B": 2, "7B": 4}
UNTIED = "7B"
GPU, LENGTHS, CHUNK_ROWS = "h200", (512, 2048), 8192


@dataclass(frozen=True)
class Options:
    """Settings of the script."""

    out: Path = Path("figures")
    rounds: int = 3


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
NAMES = {
    "length": "tokens of a sequence",
    "hidden": "hidden size",
    "layers": "layers",
    "vocab": "vocabulary",
    "responses": "responses",
}


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
    start = time.process_time()
    with TableMeasurement(policy, batch, settings) as measurement:
        for row in range(len(batch)):
            measurement.measure_response(row)
    seconds = time.process_time() - start
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
                speeds = gpu_speeds(GPU, precision)
                work = measure_work(shape, [response], engine=RULES, device="cuda", rows=CHUNK_ROWS, self_check=False)
                seconds = sum(speeds.seconds(part) for part in work.values()) / len(prefixes)
                row = {"policy": f"Qwen2.5-{name}", "length": length, "products_in": precision}
                row |= {"floor_gflop_per_token": floor / 1e9, "ms_per_token": 1e3 * seconds}
                row |= {"tokens_per_second": 1 / seconds, "assumed": f"{speeds.device}; --chunk-rows {CHUNK_ROWS}"}
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


@paper_style()
def draw(table: pd.DataFrame) -> Figure:
    """A panel for each quantity, all of one scale: points measured, the line predicted."""
    every = pd.concat([table.measured_ms, table.predicted_ms])
    ticks = [t for t in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if every.min() / 1.5 <= t <= 1.5 * every.max()]
    figure, axes = new_panels(len(VARIED), width=2.4, height=2.1)
    for ax, name in zip(axes, VARIED, strict=True):
        rows = table[table.varied == name]
        ax.plot(rows.value, rows.predicted_ms, color=NEUTRAL, label="predicted")
        ax.plot(rows.value, rows.measured_ms, "o", color="black", ms=4, label="measured")
        ax.set(xscale="log", yscale="log", xlabel=NAMES[name], ylabel="CPU ms per token")
        ax.set(ylim=(every.min() / 1.5, 1.5 * every.max()))
        ax.set_xticks(rows.value, [f"{value:,}" for value in rows.value])
        ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        ax.minorticks_off()
        ax.set_title(f"against {NAMES[name]}", loc="left")
        finish(ax, rows)
    axes[0].legend()
    return figure


def main(options: Options) -> None:
    torch.set_num_threads(1)
    table, gpu = growth_table(options.rounds).round(4), gpu_table().round(3)
    save_figure(draw(table), options.out / "cost_growth.png", table)
    gpu.to_csv(options.out / "cost_growth_gpu.csv", index=False, lineterminator="\n")
    print(table.to_string(index=False))
    print(gpu.to_string(index=False))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
