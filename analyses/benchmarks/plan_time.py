"""The seconds that `--plan` of measure and of train predicts against measured ones, on small policies on one CPU core.

    python -m analyses.benchmarks.plan_time --out figures/benchmark_plan_time.csv

Time of one thread, in rounds: every round takes each case in turn, tries the machine as the plan does and then takes
the time, so that both meet the same neighbours on the machine. Reported are medians over the rounds, and the
median of each round's ratio. Cases:

    measure   exact norms of all tokens of a few responses, self-check included, table and files left out: S and M of
              benchmarks.token_gradients, embedded-certain, and a GPT-2 of S's shape, which goes along its graph
    train     the parts of one step with plain GRPO: embedded-certain's preset on sampled puzzles, and a policy of
              hidden 256 and vocabulary 32,000 with random weights, whose responses are all of one length
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pandas as pd
import torch
import tyro

from analyses.benchmarks.token_gradients import make_policy
from analyses.benchmarks.trainer_loops import SIZES, finishing, our_parts, puzzle_workload, random_workload
from analyses.benchmarks.turns import Turns, parts_of
from gradscope.gradients import MeasureSettings, ModelShape, TableMeasurement, plan_batch, shape_of
from gradscope.policy import Policy, find_blocks, load_policy
from gradscope.rollouts import Response, TokenBatch, collate
from gradscope.trainer import TrainConfig, find_lengths, plan_training, step_rates, train
from gradscope.trainer.files import Journal


@dataclass(frozen=True)
class Options:
    """Settings of the benchmark."""

    rounds: int = 3
    lengths: tuple[int, ...] = (64, 128, 256)
    """Tokens of a sequence, a quarter of them the prompt."""
    policies: tuple[str, ...] = ("S", "M", "gpt2", "embedded")
    steps: int = 3
    """Training steps that are counted; one more warms up. 0: no training."""
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


def train_cases(options: Options, folder: Path) -> pd.DataFrame:
    """A row per policy, step and part."""
    rounds: list[dict[str, Any]] = []
    with finishing():
        for name in ("embedded", "large"):
            config = puzzle_workload() if name == "embedded" else _large(folder)
            config = replace(config, steps=options.steps + 1, trackers=(), save_every=1000)
            rounds += time_training(name, config, folder / "runs" / name)
    return pd.DataFrame(rounds)


def _large(folder: Path) -> TrainConfig:
    size = next(size for size in SIZES if size.name == "large")
    return replace(random_workload(size, folder), mini_batch_size=16, micro_batch_size=8)


def time_training(name: str, config: TrainConfig, folder: Path) -> Iterator[dict[str, Any]]:
    """Seconds of the parts of each step beside those predicted for the batch that it had; the first warms up."""
    batches: list[TokenBatch] = []
    predictions: list[dict[str, float]] = []
    shape, keep, log = shape_of(config.model), Journal.keep_rollout, Journal.log

    # A callback of the trainer would hold it up before its update; what it writes down comes after.
    def kept(journal: Journal, step: int, rollout: Any, batch: TokenBatch) -> None:
        batches.append(batch)
        keep(journal, step, rollout, batch)

    def loop(pass_on: Callable[[], None]) -> None:
        def logged(journal: Journal, record: dict[str, Any]) -> None:
            log(journal, record)
            predictions.append(predict_step(config, shape, batches[-1]))
            pass_on()

        with mock.patch.object(Journal, "log", logged), mock.patch.object(Journal, "keep_rollout", kept):
            train(config, folder, progress=False)

    turns = Turns({name: loop})
    with parts_of(turns, our_parts()):
        steps = turns.run()[name]
    for step, batch, predicted in zip(steps, batches[1:], predictions[1:], strict=True):
        found = dict.fromkeys(predicted, 0.0)
        for part, seconds in step.items():
            if part in PARTS:
                found[PARTS[part]] += float(seconds[0])
        for part in predicted:
            row = {"what": "train", "policy": name, "length": 0, "part": part, "tokens": batch.num_tokens}
            yield row | {"predicted_s": predicted[part], "measured_s": found[part]}


PARTS = {"sampling": "sampling", "old": "scoring", "reference": "scoring", "training": "training"}
"""The benchmark's names of the trainer's parts, and the plan's."""


def predict_step(config: TrainConfig, shape: ModelShape, batch: TokenBatch) -> dict[str, float]:
    """Seconds of a step whose prompts and responses are as long as the batch's."""
    responses = batch.response_mask.sum(1)
    prompt = round(float((batch.attention_mask.sum(1) - responses).float().mean()))
    config = replace(config, max_new_tokens=int(responses.max()))
    given = {"prompt_tokens": prompt, "mean_response": round(float(responses.float().mean()))}
    rates = step_rates(config, shape, find_lengths(config, shape, *given.values()))
    seconds = plan_training(config, shape, rates=rates, **given).seconds
    parts = {"sampling": ("reading prompts", "sampling", "compacting the cache"), "scoring": ("scoring",)}
    parts["training"] = ("training, forward", "training, backward", "optimizer")
    return {name: sum(seconds[part] for part in own) for name, own in parts.items()}


def summarize(rounds: pd.DataFrame) -> pd.DataFrame:
    """Medians over the rounds, and of the rounds' ratios; a row for each step as a whole, too."""
    keys = ["what", "policy", "length", "part"]
    step = ["what", "policy", "length", "round"]
    rounds = rounds.assign(round=rounds.groupby(keys).cumcount())
    whole = (
        rounds[rounds.what == "train"]
        .groupby(step, as_index=False)
        .agg({"tokens": "first", "predicted_s": "sum", "measured_s": "sum"})
    )
    rounds = pd.concat([rounds, whole.assign(part="all")], ignore_index=True)
    rounds["predicted_over_measured"] = rounds.predicted_s / rounds.measured_s
    return rounds.drop(columns="round").groupby(keys, sort=False, as_index=False).median()


def main(options: Options) -> None:
    torch.set_num_threads(1)
    parts = [measure_cases(options)]
    if options.steps:
        with tempfile.TemporaryDirectory() as folder:
            parts.append(train_cases(options, Path(folder)))
    table = summarize(pd.concat(parts, ignore_index=True)).round(
        {"predicted_s": 3, "measured_s": 3, "predicted_over_measured": 2}
    )
    print(table.to_string(index=False))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        table.to_csv(options.out, index=False)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
