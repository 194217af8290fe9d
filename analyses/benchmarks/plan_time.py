"""The seconds that `measure --plan` predicts against measured ones, on small policies on one CPU core.

    python -m analyses.benchmarks.plan_time --out figures/benchmark_plan_time.csv

Time of one thread, in rounds: every round takes each case in turn, tries the machine as the plan does and then takes
the time, so that both meet the same neighbours on the machine. Reported are medians over the rounds, and the
median of each round's ratio. Measured are exact norms of all tokens of a few responses, self-check included, table and
files left out: S and M of benchmarks.token_gradients, embedded-certain, and a GPT-2 of S's shape, which goes along its
graph.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import tyro

from analyses.benchmarks.token_gradients import make_policy
from gradscope.gradients import MeasureSettings, TableMeasurement, plan_batch
from gradscope.policy import Policy, find_blocks, load_policy
from gradscope.rollouts import Response, TokenBatch, collate


@dataclass(frozen=True)
class Options:
    """Settings of the benchmark."""

    rounds: int = 3
    lengths: tuple[int, ...] = (64, 128, 256)
    """Tokens of a sequence, a quarter of them the prompt."""
    policies: tuple[str, ...] = ("S", "M", "gpt2", "embedded")
    out: Path | None = None
    """CSV to write."""


SEQUENCES = {"S": 4, "M": 1, "gpt2": 4, "embedded": 4}
"""Of 256 tokens; of shorter ones as many more."""


def make_measured(name: str) -> Policy:
    """A policy by its name here."""
    if name == "embedded":
        return load_policy("embedded-certain", device="cpu")
    if name != "gpt2":
        return make_policy(name)
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_embd=128, n_layer=4, n_head=4, vocab_size=512, bos_token_id=None, eos_token_id=None)
    model = GPT2LMHeadModel(config).eval()
    return Policy(model, None, find_blocks(model))


def make_sequences(vocab: int, count: int, length: int) -> TokenBatch:
    """Random ids, the first quarter of each sequence its prompt."""
    ids = torch.randint(4, vocab, (count, length), generator=torch.Generator().manual_seed(1)).tolist()
    start = length // 4
    return collate([Response(row[:start], row[start:], group) for group, row in enumerate(ids)])


def time_measurement(policy: Policy, batch: TokenBatch) -> float:
    """Seconds of the whole measurement."""
    start = time.perf_counter()
    with TableMeasurement(policy, batch, MeasureSettings()) as measurement:
        for group in measurement.groups:
            measurement.measure_responses(group)
    return time.perf_counter() - start


def measure_cases(options: Options) -> pd.DataFrame:
    """A row per policy and length."""
    cases = []
    for name in options.policies:
        policy = make_measured(name)
        for length in options.lengths:
            batch = make_sequences(policy.vocab_size, SEQUENCES[name] * max(1, 256 // length), length)
            cases.append((name, length, policy, batch))
    rounds: list[dict[str, Any]] = []
    for turn in range(options.rounds + 1):
        for name, length, policy, batch in cases:
            if turn == 0 and length > 64:  # one case a policy warms it up
                continue
            predicted = sum(plan_batch(policy, batch, MeasureSettings()).seconds.values())
            seconds = time_measurement(policy, batch)
            if turn:
                row = {"what": "measure", "policy": name, "length": length, "part": "all", "tokens": batch.num_tokens}
                rounds.append(row | {"predicted_s": predicted, "measured_s": seconds})
    return pd.DataFrame(rounds)


def summarize(rounds: pd.DataFrame) -> pd.DataFrame:
    """Medians over the rounds, and of the rounds' ratios."""
    keys = ["what", "policy", "length", "part"]
    rounds["predicted_over_measured"] = rounds.predicted_s / rounds.measured_s
    return rounds.groupby(keys, sort=False, as_index=False).median()


def main(options: Options) -> None:
    torch.set_num_threads(1)
    table = summarize(measure_cases(options)).round({"predicted_s": 3, "measured_s": 3, "predicted_over_measured": 2})
    print(table.to_string(index=False))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        table.to_csv(options.out, index=False)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
