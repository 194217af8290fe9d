"""Fig. 1 (a, b, d) and Fig. 2 of the paper on the embedded policy, with several batches: means, deviations, intervals.

    python -m analyses.figures_1_2 [--out figures]

The same pictures as `gradscope demo`, from more prompts: each batch is 64 Knights & Knaves questions (2–5 people), 8
responses each at temperature 0.7, as in the paper; norms of summed gradients are means ± standard deviations over
batches, and the token table is a stratified sample of each batch. About eight minutes on one core.

Differs from the paper: the policy (0.8 M parameters instead of 3 B), its puzzles (2–5 people, compact wording), and the
reference: the policy itself, so that the KL term is 0, as at the first step of a run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import tyro
from tqdm import tqdm

from gradscope import load_policy, measure
from gradscope.batch import TokenBatch
from gradscope.bounds import theory_report
from gradscope.group_gradients import interval_gradients_over
from gradscope.models import Policy
from gradscope.sampling.hf import HFSampler
from gradscope.sampling.rollouts import batch_rows, rollout_rows
from gradscope.summary import Summary, interval_summary, write_figures
from gradscope.tasks import get_task

TEMPERATURE = 0.7


@dataclass(frozen=True)
class Options:
    """Settings of the script."""

    out: Path = Path("figures")
    batches: int = 4
    questions: int = 64
    responses: int = 8
    tokens_per_interval: int = 400
    """Measured in each batch."""
    seed: int = 0


def sample_batch(policy: Policy, options: Options, seed: int) -> TokenBatch:
    """One GRPO batch, sampled from the policy."""
    task = get_task("knights-knaves-compact")
    questions = task.questions(options.questions, seed=seed)
    sampler = HFSampler(policy, batch_size=128)
    settings = {"n": options.responses, "temperature": TEMPERATURE, "max_new_tokens": 400, "seed": seed}
    return batch_rows(rollout_rows(policy, questions, task=task, sampler=sampler, **settings))


def table(options: Options) -> tuple[Policy, pd.DataFrame, Summary]:
    """The token tables of all batches, one below the other, and their summary."""
    policy = load_policy("embedded")
    batches = [sample_batch(policy, options, options.seed + i) for i in range(options.batches)]
    frames = []
    for i, batch in enumerate(tqdm(batches, "batches")):
        frame = measure(policy, batch, tokens_per_interval=options.tokens_per_interval, seed=options.seed + i)
        frames.append(frame.assign(group=frame["group"] + i * options.questions, batch=i))
    tokens = pd.concat(frames, ignore_index=True)
    gradients = interval_gradients_over(policy, batches, generator=torch.Generator().manual_seed(options.seed))
    rng = np.random.default_rng(options.seed)
    theory = theory_report(tokens, vocab_size=policy.vocab_size, rng=rng)
    return policy, tokens, Summary(interval_summary(tokens, gradients, rng=rng), gradients, theory)


def main(options: Options) -> None:
    torch.set_num_threads(1)
    policy, tokens, summary = table(options)
    write_figures(options.out, policy, tokens, summary)
    summary.gradients.table.to_csv(options.out / "interval_gradients.csv", index=False)
    print(summary)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
