"""Time the trainer: a step against TRL's GRPOTrainer, Lopti's optimizer steps against plain ones, and parts of a step.

    python -m analyses.benchmarks.trainer --out figures/cost/data/benchmark_trainer.csv

CPU time of one thread and wall time; medians over rounds in which each contender takes one step in turn in one process;
the first step does not count. Ratios are medians of each round's ratio. Policies: "embedded" has the shape of
embedded-certain; "large" hidden 256, 4 layers, vocabulary 32,000; both Qwen2, tied, float32.

    trl      gradscope's whole step, logging included, over that of TRL (transformers' generate, no gradient
             checkpointing, no bfloat16), per response token, each at the best of the micro-batch sizes: the same
             prompts, reward, temperature, KL and optimizer steps per batch. "puzzles" is the preset kk-embedded with
             that policy, whose responses end where they end; "embedded" and "large" have random weights and an EOS
             outside their vocabulary, so that all responses are equally long and nothing is to be gained from those
             that end early. Where a batch makes one optimizer step, both use the current policy's
             log-probabilities as π_old.
    lopti    All optimizer steps on one batch that the policy sampled, in two mini-batches. "large" has random weights,
             so η is set at the quantile of π_old below which the wanted share of tokens lies, spread over all responses
             (the paper's policies: 19 % below ¼, 29 % below ½); "embedded" is the real one at η = ½. Lopti computes the
             blocks twice and the head once for each token.
    parts    Steps of that preset with and without Lopti (Table 6, in small); the ratio is that of training.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import importlib.util
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
import tyro

from analyses.benchmarks.trainer_loops import (
    SIZES,
    finishing,
    our_loop,
    our_parts,
    puzzle_workload,
    random_workload,
    telling_steps,
    trl_loop,
    trl_parts,
)
from analyses.benchmarks.turns import REST, Seconds, Turns, parts_of, read_clocks
from gradscope.cli.flags import quiet_transformers
from gradscope.objective import Updater, batch_statistics
from gradscope.policy import load_policy
from gradscope.sampling import sample
from gradscope.trainer import TrainConfig, get_preset
from gradscope.trainer.step import compute_advantages, plan_update

INSTALL_TRL = "trl is not installed, so the comparison with it is left out; to have it: pip install -e '.[trl]'"
OURS, TRL = "gradscope", "TRL"
SETTINGS = ((0.0, 1), (0.001, 2))
"""KL coefficient and optimizer steps per batch; the second is the preset's."""
LOW_SHARES = (0.2, 0.3, 0.4)
"""Shares of low-probability tokens, at which η is set."""
PARTS = ("sampling", "old", "reference", "training", REST)
DIGITS = 3


@dataclass(frozen=True)
class Options:
    comparisons: tuple[Literal["trl", "lopti", "parts"], ...] = ("trl", "lopti", "parts")
    policies: tuple[Literal["embedded", "large", "puzzles"], ...] = ("puzzles", "embedded", "large")
    micro_batches: tuple[int, ...] = (4, 8, 16)
    """Micro-batch sizes that both trainers try."""
    lopti_micro_batch: int = 8
    """Micro-batch size for Lopti and plain."""
    rounds: int = 5
    out: Path | None = None
    """CSV to write."""


def compare_trainers(
    workload: TrainConfig, folder: Path, *, rounds: int, micro_batches: tuple[int, ...], names: tuple[str, ...]
) -> pd.DataFrame:
    """Return a row per trainer and micro-batch size."""
    config = replace(workload, steps=rounds + 1, trackers=(), device="cpu")
    make = {OURS: our_loop, TRL: trl_loop}
    loops, lengths = {}, {(name, micro): [] for micro in micro_batches for name in names}
    for (name, micro), counted in lengths.items():
        sized = replace(config, micro_batch_size=micro)
        loops[name, micro] = make[name](sized, folder / f"{name}-{micro}", counted)
    turns = Turns(loops)
    methods = our_parts() | (trl_parts() if TRL in names else {})
    with parts_of(turns, methods), finishing(), telling_steps():
        steps = turns.run()
    table = pd.DataFrame(
        {"method": name, "micro_batch": micro, "tokens": np.mean(lengths[name, micro])} | summarise(of_loop)
        for (name, micro), of_loop in steps.items()
    )
    return add_ratio(table, steps) if TRL in names else table


def summarise(steps: list[dict[str, Seconds]]) -> dict[str, float]:
    """Return medians over the counted steps, the range of the CPU time, and CPU seconds by part."""
    cpu, wall = np.array([sum(step.values()) for step in steps]).T
    row = {"cpu_s": np.median(cpu), "cpu_min": cpu.min(), "cpu_max": cpu.max(), "wall_s": np.median(wall)}
    return row | {f"cpu_{p}": np.median([step[p][0] for step in steps]) for p in PARTS if p in steps[0]}


def add_ratio(table: pd.DataFrame, steps: dict[Any, list[dict[str, Seconds]]]) -> pd.DataFrame:
    """Add `cpu_ratio` and `wall_ratio` per response token: gradscope's best micro-batch size over TRL's best."""
    best = table.loc[table.groupby("method").cpu_s.idxmin()].set_index("method")
    rounds = zip(*(steps[name, best.micro_batch[name]] for name in (OURS, TRL)), strict=True)
    over = np.median([sum(ours.values()) / sum(theirs.values()) for ours, theirs in rounds], axis=0)
    row = (table.method == OURS) & (table.micro_batch == best.micro_batch[OURS])
    table.loc[row, ["cpu_ratio", "wall_ratio"]] = over * best.tokens[TRL] / best.tokens[OURS]
    return table


def time_parts(preset: TrainConfig, folder: Path, *, rounds: int) -> pd.DataFrame:
    """Time whole training steps by part, a row for plain and for Lopti."""
    plain = replace(preset, steps=rounds + 1, trackers=(), device="cpu")
    configs = {"plain": plain, "Lopti": replace(plain, lopti_eta=0.5)}
    lengths: dict[str, list[int]] = {name: [] for name in configs}
    turns = Turns({name: our_loop(config, folder / name, lengths[name]) for name, config in configs.items()})
    with parts_of(turns, our_parts()), telling_steps():
        steps = turns.run()
    given = {"micro_batch": plain.micro_batch_size}
    table = pd.DataFrame(
        {"method": name, **given, "tokens": np.mean(lengths[name])} | summarise(steps[name]) for name in configs
    )
    training = [[step["training"] for step in steps[name]] for name in configs]
    cpu, wall = np.median(np.divide(*training[::-1]), axis=0)
    return table.assign(cpu_ratio=[1.0, cpu], wall_ratio=[1.0, wall])


def compare_lopti(config: TrainConfig, shares: Sequence[float], *, rounds: int) -> pd.DataFrame:
    """Time plain training and Lopti at each share of low tokens, a row each; without shares, at η = ½."""
    policy = load_policy(config.model, dtype="float32", device="cpu")
    drawn = {name: getattr(config, name) for name in ("task", "temperature", "max_new_tokens")}
    with finishing():
        batch = sample(policy, questions=config.questions_per_step, n=config.group_size, seed=0, **drawn)
    size = {"micro_batch_size": config.micro_batch_size}
    old = batch_statistics(policy.model, batch, device=policy.device, **size).logprob
    batch = replace(batch, old_logprobs=old, ref_logprobs=old)
    batch = replace(batch, advantages=compute_advantages(batch, config))
    etas = [float(old[batch.response_mask].exp().quantile(share)) for share in shares] or [0.5]
    configs = [replace(config, lopti_eta=eta, mini_batch_size=config.num_responses // 2) for eta in (None, *etas)]
    updates = [plan_update(batch, own, torch.Generator().manual_seed(0)) for own in configs]
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=config.learning_rate)
    updater = Updater(policy.model, optimizer, policy.device, config.micro_batch_size, config.max_grad_norm)
    seconds = np.zeros((rounds + 1, len(updates), 2))
    for place in np.ndindex(seconds.shape[:2]):
        start, update = read_clocks(), updates[place[1]]
        for part in update.steps:
            updater.step(part, update.settings)
        seconds[place] = read_clocks() - start
    seconds, rows = seconds[1:], []
    ratios = np.median(seconds / seconds[:, :1], axis=0)
    for update, (cpu, wall), (cpu_ratio, wall_ratio) in zip(updates, seconds.transpose(1, 2, 0), ratios, strict=True):
        low = sum(part.batch.num_tokens for part in update.steps if part.name == "low")
        rows.append(
            {"method": "Lopti" if rows else "plain", "micro_batch": config.micro_batch_size, "tokens": batch.num_tokens}
            | {"cpu_s": np.median(cpu), "cpu_min": cpu.min(), "cpu_max": cpu.max(), "wall_s": np.median(wall)}
            | {"cpu_ratio": cpu_ratio, "wall_ratio": wall_ratio, "low_share": low / batch.num_tokens}
        )
    return pd.DataFrame(rows)


def all_tables(options: Options, folder: Path) -> Iterator[pd.DataFrame]:
    """Run all comparisons."""
    sizes = [size for size in SIZES if size.name in options.policies]
    if "trl" in options.comparisons and importlib.util.find_spec("trl") is None:
        print(INSTALL_TRL)
    elif "trl" in options.comparisons:
        workloads = {"puzzles": puzzle_workload()} if "puzzles" in options.policies else {}
        workloads |= {size.name: random_workload(size, folder) for size in sizes}
        tried = {"rounds": options.rounds, "micro_batches": options.micro_batches, "names": (OURS, TRL)}
        for policy, workload in workloads.items():
            for kl_coef, steps in SETTINGS:
                config = replace(workload, kl_coef=kl_coef, mini_batch_size=workload.num_responses // steps)
                table = compare_trainers(config, folder / f"{policy}-{kl_coef}-{steps}", **tried)
                yield _labelled(table, "trl", policy, f"KL {kl_coef:g}, optimizer steps {steps}")
    if "lopti" in options.comparisons:
        for size in sizes:
            real = size.name == "embedded"
            config = puzzle_workload() if real else random_workload(size, folder)
            config = replace(config, micro_batch_size=options.lopti_micro_batch)
            table = compare_lopti(config, () if real else LOW_SHARES, rounds=options.rounds)
            yield _labelled(table, "lopti", size.name, "two mini-batches")
    if "parts" in options.comparisons:
        table = time_parts(
            replace(get_preset("kk-embedded"), model="embedded-certain"), folder / "parts", rounds=options.rounds
        )
        yield _labelled(table, "parts", "puzzles", "kk-embedded")


def _labelled(table: pd.DataFrame, comparison: str, policy: str, setting: str) -> pd.DataFrame:
    labels = {"comparison": comparison, "policy": policy, "setting": setting}
    return table.assign(**labels)[[*labels, *table.columns]].round(DIGITS)


def main(options: Options) -> None:
    torch.set_num_threads(1)
    quiet_transformers()
    tables = []
    with tempfile.TemporaryDirectory() as folder:
        for table in all_tables(options, Path(folder)):
            print(table.to_string(index=False), flush=True)
            tables.append(table)
            if options.out:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                pd.concat(tables, ignore_index=True).to_csv(options.out, index=False)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
