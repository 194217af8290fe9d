"""Predict what a DPO step does to chosen and rejected answers, and by whose gradient, before TRL takes it.

SmolLM2-135M-Instruct (de-quantised from four bits, `python -m analyses.recipes.pretrained smollm2 --out runs/smollm2`)
is trained by TRL's DPOTrainer for STEPS steps of PAIRS pairs, with TRL's defaults (β = .1, AdamW, learning rate 1e-6
falling linearly, clipped at norm 1) in float32. A pair is a word problem of gradscope's with two worked answers in
varied words: the right one, and one that adds where it should subtract, or is off by a few. Gradscope's `RolloutWriter`
logs every step; checkpoints are saved around the steps that follow those of BEFORE.

Of each such step, from the checkpoint, its optimizer.pt and the step's log alone, `influence` predicts to first order
how much each token's log π changes, and by which source: the gradient of the chosen answers, that of the rejected ones,
momentum, weight decay. The next checkpoint has the actual change. Writes

    tokens.csv      a row per token: step, pair, side, position, the sources' parts, predicted and actual change (nats)
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from analyses.common.experiments import WORK
from analyses.common.measurements import PARTS, keep, part
from analyses.recipes.word_problems_policy import WORDINGS, write_answer
from gradscope import load_policy
from gradscope.gradients import TokenJacobian
from gradscope.objective import LossSettings
from gradscope.policy import Policy
from gradscope.rollouts import TokenBatch, read_dump
from gradscope.tasks.word_problems import LEVELS, Problem, draw_problem, word_problems
from gradscope.updates import BY, SIDES, influence, state_step

STEPS, PAIRS = 20, 4
BEFORE = (5, 10, 19)
"""Steps taken before those that are predicted."""
STATE = "optimizer.pt"
MODEL = "smollm2"


def measure(out: Path) -> None:
    """Train, predict each step that follows those of BEFORE, and keep the table."""
    run = out / PARTS / "run"
    if not (run / f"checkpoint-{BEFORE[-1] + 1}").is_dir():
        train(run)
    tokens = pd.concat([part(out, f"step-{step}", partial(predict, run, step)) for step in BEFORE])
    policy = f"SmolLM2-135M-Instruct, de-quantised from four bits, by DPO on {STEPS * PAIRS} pairs"
    keep(out, {"tokens.csv": tokens}, policy=policy, steps=STEPS, pairs=PAIRS)


def make_pairs(count: int, seed: int = 0) -> Iterator[dict[str, list[dict[str, str]]]]:
    """Yield preference pairs: a problem, its right answer and a wrong one.

    >>> (pair,) = make_pairs(1)
    >>> pair["prompt"][0]["content"].startswith("Emma"), pair["chosen"] != pair["rejected"]
    (True, True)
    """
    draw = random.Random(seed)
    for _ in range(count):
        problem = draw_problem(draw.choice(LEVELS), draw)
        right, wrong = (write_answer(each, draw, WORDINGS["varied"]) for each in (problem, mistaken(problem, draw)))
        sides = {"chosen": right, "rejected": wrong}
        yield {"prompt": word_problems.question(problem).prompt} | {
            side: [{"role": "assistant", "content": text}] for side, text in sides.items()
        }


def mistaken(problem: Problem, draw: random.Random) -> Problem:
    """Return the problem with its last step mistaken: the other sign, or a number that is off by up to three."""
    *steps, (sign, by) = problem.steps
    if draw.random() < 0.5:
        return replace(problem, steps=(*steps, ("+" if sign == "-" else "-", by)))
    return replace(problem, steps=(*steps, (sign, by + draw.choice([-1, 1, 2, 3]))))


class SaveAround(TrainerCallback):
    """Saves before and after the steps that follow those of BEFORE."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_save = state.global_step in {step + ahead for step in BEFORE for ahead in (0, 1)}


def train(run: Path) -> None:
    """Train by TRL's DPOTrainer into a folder with checkpoints and the log of every step."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    from gradscope.integrations.trl import RolloutWriter

    settings = DPOConfig(
        output_dir=str(run),
        per_device_train_batch_size=PAIRS,
        max_steps=STEPS,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        logging_steps=1,
        report_to="none",
    )
    policy, reference = (AutoModelForCausalLM.from_pretrained(WORK / MODEL, dtype=torch.float32) for _ in range(2))
    rows, tokenizer = Dataset.from_list([*make_pairs(STEPS * PAIRS)]), AutoTokenizer.from_pretrained(WORK / MODEL)
    trainer = DPOTrainer(policy, reference, settings, train_dataset=rows, processing_class=tokenizer)
    trainer.add_callback(RolloutWriter(trainer))
    trainer.add_callback(SaveAround())
    trainer.train()
    for step in {step + 1 for step in BEFORE} - {*BEFORE}:
        (run / f"checkpoint-{step}" / STATE).unlink()


def predict(run: Path, step: int) -> pd.DataFrame:
    """Return a row per token of the step after `step`: predicted change of log π by source, and the actual one."""
    before, after = (run / f"checkpoint-{number}" for number in (step, step + 1))
    policy = load_policy(before)
    dump = read_dump(run / "gradscope" / "rollouts" / f"step_{step + 1:06d}.parquet", policy)
    loss, state = LossSettings.from_log(dump.loss), torch.load(before / STATE, weights_only=True, mmap=True)
    found = influence(policy, dump.batch, loss=loss, step=state_step(state), optimizer_state=state).contributions
    response = found["response"].to_numpy()
    parts = found[[name for name in found if name.startswith(BY)]].rename(columns=lambda name: name.removeprefix(BY))
    keys = {
        "step": step + 1,
        "pair": dump.batch.pair_ids.numpy().astype(int)[response],
        "side": np.where(dump.batch.chosen.numpy()[response] > 0, *SIDES),
        "position": found["position"],
    }
    changes = {"predicted": found["predicted"], "actual": actual_changes(policy, after, dump.batch)}
    return pd.DataFrame(keys).assign(**parts, **changes)


def actual_changes(policy: Policy, after: Path, batch: TokenBatch) -> np.ndarray:
    """Return the change of each kept token's log π from the policy to a checkpoint, [K] in nats."""
    both = (TokenJacobian(each, batch).statistics.logprob for each in (policy, load_policy(after)))
    before, later = (logprob[batch.response_mask].double().numpy() for logprob in both)
    return later - before
