"""Measure how well cheap proxies stand for a token's exact gradient norm, on policies of two architectures.

Measured is every token of 12 × 8 responses of the scale's policy in training (with its run's AdamW metric) and of a
small GPT-2 that learns the same puzzles here in some minutes. A further proxy is the gradient at a token's position,
which others call a per-token gradient: ‖Σ over linear modules of g ⊗ a‖, where g is the summed log-likelihood's
gradient at the module's output where the token is predicted, and a the module's input there. Writes

    proxies.csv     judge_proxies (analyses/parts/proxies.py) for both, by `policy`
    tokens.parquet  the tokens that were judged
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from analyses.common.in_training import FRESH, moments
from analyses.common.measurements import keep, part
from analyses.parts.proxies import judge_proxies
from analyses.recipes.certain_policy import NOISE
from analyses.recipes.supervised import Stage, batches, build_tokenizer, examples, train
from gradscope.gradients import measure as measure_tokens
from gradscope.policy import AdamWState, Policy
from gradscope.rollouts import TokenBatch
from gradscope.sampling import HFSampler, batch_rows, rollout_rows
from gradscope.tasks import draw_questions, get_task

POSITION = "position_grad_norm"
STAGES = (
    Stage("large batches", steps=300, batch=32, lr=(2e-3, 1.5e-3)),
    Stage("small batches", steps=1500, batch=10, lr=(1.5e-3, 1e-4)),
    Stage("noise", steps=400, batch=10, lr=(8e-4, 5e-5), write=NOISE),
)
"""Shortened stages of embedded-certain."""


def measure(
    out: Path, *, scale: str = "cpu", run: Path | None = None, questions: int = 12, stages: tuple[Stage, ...] = STAGES
) -> None:
    """Measure both policies, judge the proxies, and keep the table."""
    [moment] = moments(scale, run=run, last=1)
    state = AdamWState.from_state_dict(
        moment.policy.model, moment.optimizer_state, max_grad_norm=moment.config.max_grad_norm
    )
    batch = moment.sample(questions, seed=FRESH)
    name = type(moment.policy.model).__name__.removesuffix("ForCausalLM")
    found = {name: part(out, "in-training", lambda: tabulate(moment.policy, batch, state))}
    policy = train_gpt2(stages)
    found["GPT-2"] = part(out, "gpt2", lambda: tabulate(policy, sample(policy, questions), None))
    more = {"position's ‖g‖": POSITION}
    tables = [judge_proxies(table, more=more, seed=np.random.default_rng(0)) for table in found.values()]
    judged = pd.concat([table.assign(policy=name) for name, table in zip(found, tables, strict=True)])
    tokens = pd.concat([table.assign(policy=name) for name, table in found.items()])
    keep(
        out,
        {"proxies.csv": judged, "tokens.parquet": tokens},
        step=moment.step,
        questions=questions,
        responses=8,
        stages=len(stages),
    )


def train_gpt2(stages: tuple[Stage, ...]) -> Policy:
    """Train a GPT-2 as large as the embedded policies."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    special = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    sizes = {"n_positions": 1024, "n_embd": 128, "n_layer": 4, "n_head": 4}
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **sizes, **special, **dropouts))
    for stage in stages:
        rng = random.Random(f"gpt2 {stage.name}")
        stream = examples(tokenizer, stage, rng, lambda _: False)
        train(model, stage, batches(stream, stage.batch, rng), lambda **told: print(told, flush=True))
    return Policy(model.eval(), tokenizer, "transformer.h")


def sample(policy: Policy, questions: int) -> TokenBatch:
    """Sample eight responses to each question at the runs' temperature."""
    task = get_task("knights-knaves-compact")
    return batch_rows(
        rollout_rows(
            policy,
            draw_questions(task, questions, seed=FRESH, people=(2, 3)),
            task=task,
            sampler=HFSampler(policy, batch_size=48, progress=False),
            n=8,
            temperature=0.7,
            max_new_tokens=300,
            seed=FRESH,
        )
    )


def tabulate(policy: Policy, batch: TokenBatch, state: AdamWState | None) -> pd.DataFrame:
    """Return every token's table, with POSITION."""
    metric = {} if state is None else {"metric": "adamw", "optimizer_state": state}
    table = measure_tokens(policy, batch, **metric)
    table[POSITION] = np.concatenate([position_norms(policy.model, batch, row) for row in range(len(batch))])
    return table


def position_norms(model: nn.Module, batch: TokenBatch, row: int) -> np.ndarray:
    """Return √Σ_modules ‖g_{s−1}‖²‖a_{s−1}‖² of each kept token s of one response, with g of its summed log π."""
    ids, kept = batch.sequence(row)
    seen: list[tuple[Tensor, Tensor]] = []

    def note(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        output.retain_grad()
        seen.append((inputs[0].detach(), output))

    linear = [module for module in model.modules() if isinstance(module, nn.Linear | Conv1D)]
    handles = [module.register_forward_hook(note) for module in linear]
    try:
        with torch.enable_grad():
            logits = model(input_ids=ids[None], use_cache=False).logits[0, kept - 1].float()
            logprobs = torch.log_softmax(logits / batch.temperature[row], -1).gather(1, ids[kept][:, None])
            logprobs.sum().backward()
    finally:
        for handle in handles:
            handle.remove()
    model.zero_grad()
    squares = sum(a[0].square().sum(-1) * z.grad[0].square().sum(-1) for a, z in seen)
    return squares[kept - 1].sqrt().numpy()
