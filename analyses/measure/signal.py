"""Measure what each group of tokens holds of what prompts agree on (experiment A of docs/named-beforehand.md).

    python -m analyses.common.measurements signal_start [signal_trained …]

A large GRPO batch is sampled, and each token's w_t⟨g_t, G⟩ and w_t⟨g_t, G_p⟩ with its own prompt's sum give the signal
s_a and the own part C_a of any group of tokens (`TokenJacobian.contributions`); w is GRPO's policy part on-policy, the
advantage. For Reweight's expected gradient, (1 − α)·G + α·H with H = Σ w_t·π_t·g_t, the same is done along H. Writes

    signals.csv     metric, grouping, group, left_out (a fold; −1: none), signal, own (s_a and C_a of one prompt),
                    tokens, prompts (with a gradient there)
    prompts.parquet metric, prompt, and of each prompt gg ⟨G_p, G⟩, gg_own ⟨G_p, G_p⟩, hg ⟨H_p, G⟩, hg_own ⟨H_p, G_p⟩,
                    gh ⟨G_p, H⟩, hh ⟨H_p, H⟩, hh_own ⟨H_p, H_p⟩
    energies.csv    by interval: tokens, and means of e = (w_t‖g_t‖)², e·π and e·π² over tokens measured there
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

import analyses.common.dealt_problems
import analyses.common.puzzles  # noqa: F401  (both register their tasks)
from analyses.common.experiments import find_run
from analyses.common.measurements import keep, part
from analyses.recipes.hasty_analysis import KINDS, kinds_of
from gradscope import load_policy, measure as measure_tokens
from gradscope.gradients import Resources, TokenJacobian
from gradscope.intervals import EDGES, assign_intervals, interval_labels
from gradscope.objective import resolve_advantages
from gradscope.policy import AdamWState, Policy
from gradscope.rollouts import TokenBatch
from gradscope.sampling import HFSampler, batch_rows, rollout_rows
from gradscope.tasks import draw_questions, get_task
from gradscope.trainer import OPTIMIZER, TrainConfig, list_checkpoints, train

FOLDS, RESPONSES, SEED = 8, 8, 4242
HELD = 1 << 62
"""Bytes for vectors; all those of a policy measured here fit."""
POSITIONS = (16, 64)
"""Where the classes of position in a response end, the last one open."""
TOP, HIGHEST = 0.2, "highest fifth"
"""Share of the tokens that count as of high entropy, and their class's name."""
MEASURED = 64
"""Prompts of which tokens' norms are measured."""
WHOLE = "all"


@dataclass(frozen=True)
class Labels:
    """A grouping of tokens."""

    names: tuple[str, ...]
    of: np.ndarray
    """Index of each kept token's group."""


def measure(out: Path, *, track: str, prompts: int, trained: bool = False, folds: int | None = FOLDS) -> None:
    """Sample a batch of so many prompts, and keep what each group of tokens holds of its signal.

    track: of whose runs the policy is the start or, if trained, the end of the first run, which is made if it is not
    there; its optimizer's state then gives a second metric. folds: None gives totals by prompt alone.
    """
    run = find_run("words" if track.startswith(("words", "varied")) else "cpu", track)
    config, state = run.config, None
    model = config.model
    if trained:
        train(config, Path("runs") / run.place, resume=True, progress=False)
        [*_, model] = list_checkpoints(Path("runs") / run.place)
        state = torch.load(model / OPTIMIZER, weights_only=True)
    policy = load_policy(str(model))
    batch = sample_prompts(policy, config, prompts)
    metrics = {"plain": None}
    if state is not None:
        adamw = AdamWState.from_state_dict(policy.model, state)
        metrics["adamw"] = adamw.scale(policy.model, torch.zeros(sum(p.numel() for p in policy.model.parameters())))
    J = TokenJacobian(policy, batch, Resources(HELD, micro_batch=RESPONSES))
    found = {name: partial(sum_signals, J, policy, scale, folds) for name, scale in metrics.items()}
    tables = {name: part(out, name, make) for name, make in found.items()}
    signals = pd.concat([table.assign(metric=name) for name, table in tables.items()], ignore_index=True)
    by_prompt = signals[signals["grouping"] == "prompt"].dropna(axis=1, how="all")
    groups = signals[signals["grouping"] != "prompt"][
        ["metric", "grouping", "group", "left_out", "signal", "own", "tokens", "prompts"]
    ]
    kept = {
        "signals.csv": groups,
        "prompts.parquet": by_prompt.drop(columns=["grouping", "left_out"]).rename(columns={"group": "prompt"}),
        "energies.csv": part(out, "energies", partial(measure_energies, policy, batch)),
    }
    keep(out, kept, track=track, num_prompts=prompts, responses=RESPONSES, trained=trained, folds=folds, seed=SEED)


def sample_prompts(policy: Policy, config: TrainConfig, prompts: int) -> TokenBatch:
    """Sample responses to so many prompts, drawn as training draws them, step by step; one drawn twice counts twice.

    Returns a batch with advantages; π_old is the policy's own.
    """
    task, each = get_task(config.task), config.questions_per_step
    sampler = HFSampler(policy, batch_size=config.sampling_batch_size, progress=False)
    rows = []
    for step in range(-(-prompts // each)):
        seed = SEED + step
        settings = {"n": RESPONSES, "temperature": config.temperature, "max_new_tokens": config.max_new_tokens}
        questions = draw_questions(task, each, seed=seed, people=config.people)
        found = rollout_rows(policy, questions, task=task, sampler=sampler, seed=seed, **settings)
        rows += [row | {"group": row["group"] + each * step} for row in found]
    batch = batch_rows([row for row in rows if row["group"] < prompts])
    return replace(batch, advantages=resolve_advantages(batch))


def sum_signals(J: TokenJacobian, policy: Policy, scale: Float[Tensor, " P"] | None, folds: int | None) -> pd.DataFrame:
    """Return signals.csv's and prompts.parquet's rows (grouping "prompt") of one metric."""
    weights = J.kept(J.batch.advantages).double()
    probs = J.kept(J.statistics.logprob).double().exp()
    generator = torch.Generator().manual_seed(SEED)
    along = J.contributions(weights, scale=scale, folds=folds, generator=generator)
    across = J.contributions(weights * probs, scale=scale)

    def by_prompt(values: Float[Tensor, " K"]) -> np.ndarray:
        return np.bincount(along.prompts.numpy(), values.numpy(), minlength=along.num_prompts)

    names = ("gg", "gg_own", "hg", "hg_own", "hh", "hh_own")
    # Σ_t w_t·π_t⟨g_t, G⟩ = ⟨H, G⟩: the products with G serve H's tokens, too.
    columns = (along.along, along.own, along.along * probs, along.own * probs, across.along, across.own)
    prompts = pd.DataFrame({name: by_prompt(values) for name, values in zip(names, columns, strict=True)})
    # Σ_t w_t⟨g_t, H⟩ = ⟨G, H⟩, from what H's own tokens, of weight w_t·π_t, have along H.
    prompts["gh"] = by_prompt(torch.where(probs > 0, across.along / probs, 0.0))
    prompts = prompts.assign(grouping="prompt", group=prompts.index.astype(str), left_out=-1)
    frames = [prompts]
    for grouping, labels in group_tokens(J, policy).items():
        found = along.grouped(torch.from_numpy(labels.of), len(labels.names))
        counts = np.bincount(labels.of, minlength=len(labels.names))
        names = [*labels.names, WHOLE]
        rows = {"group": names, "tokens": [*counts, counts.sum()], "prompts": found.touched}
        parts = [(-1, found.signal, found.own)]
        if folds is not None:
            parts += list(zip(range(folds), found.left_signal, found.left_own, strict=True))
        frames += [
            pd.DataFrame(rows | {"left_out": k, "signal": s, "own": c}).assign(grouping=grouping) for k, s, c in parts
        ]
    return pd.concat(frames, ignore_index=True)


def group_tokens(J: TokenJacobian, policy: Policy) -> dict[str, Labels]:
    """Return each kept token's interval of π, class of position, class of entropy and kind of word."""
    statistics = J.statistics
    probs = J.kept(statistics.logprob).double().exp().clamp(max=1.0).numpy()
    entropy, positions = J.kept(statistics.entropy).numpy(), J.kept(J.batch.positions()).numpy()
    ends = (0, *POSITIONS)
    names = [f"{low} to {high - 1}" for low, high in pairwise(ends)] + [f"{ends[-1]} and later"]
    groups = {
        "interval": Labels(tuple(interval_labels(EDGES)), assign_intervals(probs)),
        "position": Labels(tuple(names), np.searchsorted(POSITIONS, positions, side="right")),
        "entropy": Labels(("lower", HIGHEST), (entropy > np.quantile(entropy, 1 - TOP)).astype(int)),
    }
    if policy.vocab_size < 1000:  # the puzzles' policies, whose every token is a word with a kind
        groups["kind"] = Labels(KINDS, np.array(list(_kinds(J.batch, policy))))
    return groups


def _kinds(batch: TokenBatch, policy: Policy) -> Iterator[int]:
    for ids, mask in zip(batch.input_ids, batch.response_mask, strict=True):
        for kind in kinds_of([policy.decode([token]) for token in ids[mask].tolist()]):
            yield KINDS.index(kind)


def measure_energies(policy: Policy, batch: TokenBatch, *, tokens_per_interval: int = 200) -> pd.DataFrame:
    """Return a row per interval: tokens of the first MEASURED prompts, and means over those measured of e, eπ, eπ²."""
    first = batch.select((batch.group_ids < MEASURED).nonzero()[:, 0])
    table = measure_tokens(policy, first, tokens_per_interval=tokens_per_interval, sample="stratified", seed=SEED)
    energy, prob = (table["weight"] * table["param_grad_norm"]) ** 2, table["prob"]
    numbers = table.assign(e=energy, e_pi=energy * prob, e_pi2=energy * prob**2)
    found = numbers.groupby("interval")[["e", "e_pi", "e_pi2"]].mean()
    counts = table.groupby("interval").size().rename("tokens")
    return found.join(counts).reset_index()
