"""Speed of exact token gradients on one GPU, by model size, length and precision, against its own bfloat16 peak.

    python -m analyses.benchmarks.gpu_token_gradients --out figures/benchmark_gpu.csv

Policies have the shapes of Qwen2.5 0.5B, 1.5B and 3B with random weights: nothing is downloaded. Sequences of T tokens,
the first quarter the prompt. In every sequence, runs of neighbouring tokens are measured at several depths (all of them
would take hours at 3B); a token's time depends on its prefix alone, so the runs' middle stands for a sequence. Per row:
response tokens per second, measured and as planned from a GPU's datasheet (`gradscope measure --plan --machine`), the
floor's FLOPs (`gradscope.gradients.cost.measuring.floor_flops`) per second as a fraction of the bfloat16 matrix
product's, measured in the same run, and the peak of allocated memory.

    graph       along the model's own graph, float32: what any architecture costs (the first length only)
    exact       backward rules, float32
    tf32        backward rules, factors rounded to tf32
    bfloat16    backward rules, factors rounded to bfloat16

A case that does not fit the memory is a row without numbers; the run ends after `minutes`, whatever is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pandas as pd
import torch
import tyro
from torch import Tensor

from gradscope.gradients import (
    ModelShape,
    Response,
    TokenGradientMeter,
    floor_flops,
    gpu_rates,
    measure_flops,
    measuring,
)
from gradscope.policy import Policy, find_blocks

Mode = Literal["graph", "exact", "tf32", "bfloat16"]
SHAPES = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "num_attention_heads": 4},
    "0.5B": {"hidden_size": 896, "num_hidden_layers": 24, "intermediate_size": 4864, "num_attention_heads": 14},
    "1.5B": {"hidden_size": 1536, "num_hidden_layers": 28, "intermediate_size": 8960, "num_attention_heads": 12},
    "3B": {"hidden_size": 2048, "num_hidden_layers": 36, "intermediate_size": 11008, "num_attention_heads": 16},
}
"""Qwen2.5's; all with two heads of keys and values, tied embeddings and a vocabulary of 151,936 (tiny: 512)."""

CHUNK_MEMORY = 8 << 30
"""Bytes of a chunk, at most."""


@dataclass(frozen=True)
class Options:
    """Settings of the benchmark."""

    shapes: tuple[Literal["tiny", "0.5B", "1.5B", "3B"], ...] = ("0.5B", "1.5B", "3B")
    lengths: tuple[int, ...] = (512, 2048)
    modes: tuple[Mode, ...] = ("graph", "exact", "tf32", "bfloat16")
    depths: int = 3
    """Runs of tokens in a sequence."""
    run: int = 32
    """Tokens of each."""
    rows: int = 16384
    """Positions × tokens of a chunk, at most."""
    minutes: int | float = 9
    device: str = "cuda"
    machine: str = "h200"
    """Whose datasheet the planned speed goes by; a name of `GPUS`."""
    out: Path | None = None
    """CSV to write."""


def make_policy(name: str, device: torch.device) -> Policy:
    """Random weights, float32."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        **SHAPES[name],
        num_key_value_heads=2,
        vocab_size=512 if name == "tiny" else 151_936,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen2ForCausalLM(config).eval()
    return Policy(model, None, find_blocks(model))


def chosen_tokens(length: int, depths: int, run: int) -> Tensor:
    """Indices of the measured tokens: runs whose middles stand at equal distances in the response."""
    start, response = length // 4, length - length // 4
    middles = [start + response * (2 * depth + 1) // (2 * depths) for depth in range(depths)]
    runs = [torch.arange(middle - run // 2, middle - run // 2 + run) for middle in middles]
    return torch.cat(runs).clamp(start, length - 1).unique()


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Wall time of a call, the device's work included."""
    _wait(device)
    start = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_speed(device: torch.device, size: int) -> float:
    """FLOPs per second of a large bfloat16 matrix product, the best of five."""
    a, b = torch.randn(2, size, size, device=device, dtype=torch.bfloat16).unbind()
    return 2 * size**3 / min(seconds_of(lambda: a @ b, device) for _ in range(5))


def measure_case(policy: Policy, mode: Mode, length: int, options: Options) -> dict[str, float]:
    """Speed and memory of one row."""
    device, shape = policy.device, ModelShape.from_config(policy.config)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, policy.vocab_size, (length,), generator=generator).to(device)
    targets = chosen_tokens(length, options.depths, options.run).to(device)
    everything = torch.arange(len(targets), device=device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with measuring(policy.model):
        precision = "exact" if mode == "graph" else mode
        meter = TokenGradientMeter(
            policy, ids, rows=options.rows, memory=CHUNK_MEMORY, rules=mode != "graph", precision=precision
        )
        few = everything[:2]
        meter.measure(ids, targets[:2], few, temperature=1.0)  # warms up
        seconds = seconds_of(lambda: meter.measure(ids, targets, everything, temperature=1.0), device)
    flops = sum(floor_flops(shape, targets.tolist()).values())
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else float("nan")
    return {"tokens": len(targets), "seconds": seconds, "tflops": flops / seconds / 1e12, "peak_gib": peak}


def planned_speed(shape: ModelShape, mode: Mode, length: int, options: Options) -> float:
    """Tokens per second of the row by the plan, what is done once left out."""
    prefixes = tuple(chosen_tokens(length, options.depths, options.run).tolist())
    cut = {"rules": mode != "graph", "rows": options.rows, "memory": CHUNK_MEMORY, "device": "cuda"}
    flops = measure_flops(shape, [Response(len(prefixes), prefixes, length - 1)], self_check=False, **cut)
    fast = mode in ("tf32", "bfloat16")
    rates = gpu_rates(options.machine, mode if fast else "float32", dict.fromkeys(flops), fast=fast)
    return len(prefixes) / sum(seconds for part, seconds in rates.seconds(flops).items() if part != "preparation")


def all_rows(options: Options, device: torch.device) -> Iterator[dict[str, object]]:
    """One case after the other, until the time is up."""
    ends = time.perf_counter() + 60 * options.minutes
    peak = peak_speed(device, 8192 if device.type == "cuda" else 512)
    for name in options.shapes:
        policy = make_policy(name, device)
        for length in options.lengths:
            for mode in options.modes:
                if time.perf_counter() > ends or (mode == "graph" and length != options.lengths[0]):
                    continue
                row = {"policy": name, "length": length, "mode": mode}
                row["planned_tokens_per_s"] = planned_speed(
                    ModelShape.from_config(policy.config), mode, length, options
                )
                try:
                    found = measure_case(policy, mode, length, options)
                except torch.OutOfMemoryError:
                    found = {}
                    torch.cuda.empty_cache()
                if found:
                    found |= {"tokens_per_s": found["tokens"] / found["seconds"]}
                    found |= {"fraction_of_bf16_peak": 1e12 * found["tflops"] / peak, "peak_tflops": peak / 1e12}
                yield row | found
        del policy
        if device.type == "cuda":
            torch.cuda.empty_cache()


def main(options: Options) -> None:
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device is there; --device cpu --shapes tiny shows that the benchmark runs")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    rows = []
    for row in all_rows(options, device):
        rows.append(row | {"device": name, "torch": torch.__version__})
        print(pd.DataFrame([row]).round(3).to_string(index=False, header=len(rows) == 1), flush=True)
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            pd.DataFrame(rows).to_csv(options.out, index=False)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
