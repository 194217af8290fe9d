"""Time the norms of entropies' and divergences' gradients against those of log π, for the same tokens, interleaved.

    python -m analyses.benchmarks.vocabulary_sums --out figures/cost/data/benchmark_vocabulary_sums.csv

CPU time of one thread per response token, by `TokenJacobian.row_norms`; medians over rounds in which the quantities
take turns in one process, and ratios to log π the medians of each round's. Policies as in `token_gradients` (S, M), and
V: Qwen2 with hidden 256, 4 layers, a vocabulary of 50,000, tied. The teacher has the policy's shape and other random
weights; its forward pass is counted. `logged`: 20 candidates and their log ν are in the batch, and no teacher is run.
Peak memory is the most that is allocated beyond policy and teacher on one response, according to the profiler.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import tyro

from analyses.benchmarks.peers import allocated_peak
from analyses.benchmarks.token_gradients import HEADS, SIZES
from gradscope.gradients import TokenJacobian
from gradscope.objective import Divergence, Quantity, make_quantity
from gradscope.policy import Policy, find_blocks
from gradscope.rollouts import Response, TokenBatch, collate

WIDE = {"hidden_size": 256, "num_hidden_layers": 4, "vocab_size": 50_000, "intermediate_size": 768}
TOP = 20


@dataclass(frozen=True)
class Options:
    sizes: tuple[str, ...] = ("S", "M", "V")
    lengths: tuple[int, ...] = (128,)
    rounds: int = 3
    responses: int = 2
    out: Path | None = None
    """CSV to write."""


def make_policy(size: str, seed: int) -> Policy:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    settings = (WIDE | HEADS["S"]) if size == "V" else (SIZES[size] | HEADS[size])
    config = Qwen2Config(**settings, tie_word_embeddings=True, attn_implementation="eager")
    model = Qwen2ForCausalLM(config).eval()
    return Policy(model, None, find_blocks(model))


def make_quantities(teacher: Policy) -> dict[str, Quantity]:
    return {
        "log π": make_quantity("logprob"),
        "entropy": make_quantity("entropy"),
        "reverse KL": Divergence(1, teacher),
        "forward KL": Divergence(0, teacher),
        "JSD": Divergence(0.5, teacher),
        "reverse KL, top": Divergence(1, teacher, TOP, rest="tail"),
        "forward KL, logged": Divergence(0),
    }


def draw_batch(vocabulary: int, length: int, responses: int) -> TokenBatch:
    """Draw random tokens, of which the first quarter is the prompt, with random candidates."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(vocabulary, (responses, length), generator=generator).tolist()
    batch = collate([Response(row[: length // 4], row[length // 4 :], group=number) for number, row in enumerate(ids)])
    order = torch.rand(responses, length, min(vocabulary, 10 * TOP), generator=generator).argsort(-1)[..., :TOP]
    logprobs = torch.randn(order.shape, generator=generator).log_softmax(-1) - 0.1
    return TokenBatch(**vars(batch) | {"teacher_top_ids": order, "teacher_top_logprobs": logprobs})


def measure(J: TokenJacobian, of: Quantity) -> None:
    for _ in J.row_norms(of=of):
        pass


def benchmark(size: str, length: int, options: Options) -> pd.DataFrame:
    """Return a row per quantity: ms per token (median), its spread, ratio to log π, and peak MB."""
    policy, teacher = make_policy(size, 0), make_policy(size, 1)
    quantities, times = make_quantities(teacher), {}
    batch = draw_batch(policy.vocab_size, length, options.responses)
    J, one = TokenJacobian(policy, batch), TokenJacobian(policy, batch[:1])
    measure(J, quantities["log π"])  # finds the rules
    for _ in range(options.rounds):
        for name, of in quantities.items():
            start = time.process_time()
            measure(J, of)
            times.setdefault(name, []).append(1e3 * (time.process_time() - start) / J.num_tokens)
    measure(one, quantities["log π"])
    return pd.DataFrame(describe(name, own, times["log π"]) for name, own in times.items()).assign(
        size=size,
        length=length,
        peak_mb=[allocated_peak(lambda of=of: measure(one, of)) / 2**20 for of in quantities.values()],
    )


def describe(name: str, own: list[float], plain: list[float]) -> Mapping[str, object]:
    ratios = np.array(own) / np.array(plain)
    return {
        "quantity": name,
        "ms_per_token": np.median(own),
        "ratio": np.median(ratios),
        "ratio_min": ratios.min(),
        "ratio_max": ratios.max(),
    }


def main(options: Options) -> None:
    torch.set_num_threads(1)
    tables = []
    for size in options.sizes:
        for length in options.lengths:
            tables.append(benchmark(size, length, options))
            print(tables[-1].round(3).to_string(index=False), flush=True)
            if options.out:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                pd.concat(tables).to_csv(options.out, index=False)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
