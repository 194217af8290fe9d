"""What a precision costs and saves on one CPU core: time of a token, memory of the weights, error of the norms.

    python -m analyses.benchmarks.precisions --out figures/benchmark_precisions.csv

Two checkpoints in bfloat16: the policy embedded-certain, rounded, on its own responses; and four blocks of
Qwen2.5-0.5B's shape with random weights (`real_size_policy`, vocabulary 32,000) on a sequence of 228 tokens, of which
32 are measured. Each is measured in these ways, which take turns:

    float32           the weights widened as a whole: the reference
    float32, fast     the same, with the factors of the backward pass's products rounded to bfloat16
    upcast            the weights in bfloat16, each matrix upcast where it is used
    upcast, fast      the same, with the rounded factors
    bfloat16          forward pass and head in bfloat16 too, as the model was trained

Reported: CPU milliseconds of a measured token (median of the rounds; forward pass and head of its response included,
finding the structure and the self-check not), bytes of the weights, and relative differences from the reference, median
and largest, of ‖g‖ over all tokens and of ‖δ‖ over all tokens and layers.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
import tyro

from analyses.benchmarks.real_size import processor
from analyses.benchmarks.real_size_policy import write_checkpoint
from gradscope.gradients import MeasureSettings, TableMeasurement, join_responses
from gradscope.policy import Policy, load_policy
from gradscope.rollouts import Response, TokenBatch, collate
from gradscope.sampling import HFSampler, batch_rows, rollout_rows
from gradscope.tasks import draw_questions, get_task

WAYS = {
    "float32": ("float32", False),
    "float32, fast": ("float32", True),
    "upcast": ("upcast", False),
    "upcast, fast": ("upcast", True),
    "bfloat16": ("bfloat16", False),
}
"""Name → dtype, whether fast."""
SMALLER = {"num_hidden_layers": 4, "vocab_size": 32_000}
"""Than Qwen2.5-0.5B, in the second case."""
CHUNK_MEMORY = 256 << 20


@dataclass(frozen=True)
class Options:
    """Settings of the benchmark."""

    rounds: int = 3
    questions: int = 4
    """That the policy embedded-certain answers, once each."""
    tokens: int = 32
    """Measured ones of the larger policy."""
    out: Path | None = None
    """CSV to write."""


def sample_responses(policy: Policy, questions: int) -> TokenBatch:
    """A response to each of some puzzles."""
    task = get_task("knights-knaves-compact")
    rows = rollout_rows(
        policy,
        draw_questions(task, questions, seed=0),
        sampler=HFSampler(policy, progress=False),
        n=1,
        temperature=0.7,
        max_new_tokens=256,
        seed=0,
        task=task,
    )
    return batch_rows(rows, on_policy=True)


def embedded_case(folder: Path, options: Options) -> tuple[TokenBatch, None]:
    """The checkpoint of embedded-certain in bfloat16, and its own responses."""
    policy = load_policy("embedded-certain", device="cpu")
    batch = sample_responses(policy, options.questions)
    policy.model.bfloat16().save_pretrained(folder)
    return batch, None


def blocks_case(folder: Path, options: Options) -> tuple[TokenBatch, torch.Tensor]:
    """A checkpoint of four blocks, one response, and which of its tokens are measured: neighbours near both ends."""
    write_checkpoint(folder, "0.5b", torch.bfloat16, **SMALLER)
    ids = torch.randint(10, SMALLER["vocab_size"], (228,), generator=torch.Generator().manual_seed(1)).tolist()
    batch, half = collate([Response(ids[:100], ids[100:], 0)]), options.tokens // 2
    near = torch.cat([torch.arange(half), torch.arange(128 - half, 128)]).unique()
    return batch, near


CASES = {"embedded": embedded_case, "4 blocks of 0.5B": blocks_case}


def compare(name: str, options: Options) -> pd.DataFrame:
    """A row for each way to measure one of the cases."""
    seconds, tables = {way: [] for way in WAYS}, {}
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        batch, tokens = CASES[name](Path(scratch), options)
        policies = {way: load_policy(scratch, dtype=dtype, device="cpu") for way, (dtype, _) in WAYS.items()}
        weights = {way: sum(p.nbytes for p in policy.model.parameters()) for way, policy in policies.items()}
        measurements = {}
        for way, (_, fast) in WAYS.items():
            settings = MeasureSettings(fast=fast, self_check=False)
            measurement = TableMeasurement(policies[way], batch, settings, tokens=tokens, chunk_memory=CHUNK_MEMORY)
            measurements[way] = stack.enter_context(measurement)
        for turn in range(options.rounds + 1):
            for way, measurement in measurements.items():
                start = time.process_time()
                parts = [frame for group in measurement.groups for frame in measurement.measure_responses(group)]
                if turn:  # the first warms up
                    seconds[way].append(time.process_time() - start)
                tables[way] = join_responses(parts)
    measured = int(tables["float32"]["param_grad_norm"].notna().sum())
    rows = []
    for way, table in tables.items():
        row = {"policy": name, "way": way, "tokens": measured, "weights_mb": weights[way] / 1e6}
        row["ms_per_token"] = 1e3 * pd.Series(seconds[way]).median() / measured
        for kind, columns in (("norm", "^param_grad_norm$"), ("layers", r"^act_grad_norm\.")):
            ours, exact = (t.filter(regex=columns).stack() for t in (table, tables["float32"]))
            error = (ours / exact - 1).abs()
            row |= {f"{kind}_median": error.median(), f"{kind}_largest": error.max()}
        rows.append(row | {"machine": processor(), "torch": torch.__version__})
    return pd.DataFrame(rows)


def main(options: Options) -> None:
    torch.set_num_threads(1)
    table = pd.concat([compare(name, options) for name in CASES], ignore_index=True)
    print(table.drop(columns=["machine", "torch"]).to_string(index=False, float_format="{:.3g}".format))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        table.to_csv(options.out, index=False, float_format="{:.4g}".format)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
