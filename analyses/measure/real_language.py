"""Measure pretrained policies on real language at temperature 1, with weights de-quantised from four bits.

MODELS lists them; `python -m analyses.recipes.pretrained` makes each in a folder of its name below WORK.
SmolLM2-135M-Instruct answered 16 word problems ("think step by step") 8 times each with at most 160 tokens; these
responses are kept beside the tables, so that others measure the same tokens. Gemma 3 270M, a base model, is given 8
problems of word-problems-examples, and 4 responses to each, of at most 18 tokens, are sampled here. For both, a right
answer earns 1 and the requested form 0.1 more. Writes

    rollouts.parquet    the problems and responses
    tokens.parquet      the token table, with every token measured (SmolLM2) or as many per interval as runs.toml says
    statistics.csv      the batch's statistics from the diagnosis
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from analyses.common.experiments import WORK
from analyses.common.measurements import PARTS, folder, keep, part
from gradscope import diagnose, load_policy, measure as measure_tokens
from gradscope.gradients import LAYER, LOGITS, PARAMETERS, SAMPLING_PROBABILITY, TokenJacobian, check_engine
from gradscope.policy import Policy
from gradscope.rollouts import TokenBatch, read_rollouts
from gradscope.sampling import HFSampler, rollout_rows
from gradscope.tasks import get_task


@dataclass(frozen=True)
class Model:
    """A pretrained policy, and where its tables are."""

    measurement: str
    """Name in analyses/runs.toml."""
    title: str


MODELS = {
    "smollm2": Model("real_language", "SmolLM2-135M-Instruct, de-quantised from four bits"),
    "gemma3": Model("real_language_gemma3", "Gemma 3 270M, de-quantised from four bits"),
}
ROLLOUTS = "rollouts.parquet"
EMBEDDING = "embedding_grad_norm"
"""‖g‖ of the tied embedding; absent from SmolLM2's table."""
KEPT = [
    *("response", "group", "position", "token", "prob", "logprob", "log_one_minus_prob", "entropy", "advantage"),
    *("weight", "interval", LOGITS, PARAMETERS, EMBEDDING),
]
"""Columns of the token table, besides the layers' norms."""
SMALL = {"response": np.int16, "group": np.int16, "position": np.int16, "interval": np.int8}
CHECKED = 4
"""Tokens per interval compared with plain autograd."""
MEMORY = 3 << 30
"""Bytes for summed gradients; a vector of Gemma's parameters takes a third."""


def measure(
    out: Path,
    *,
    model: str = "smollm2",
    questions: int = 8,
    responses: int = 4,
    limit: int = 18,
    tokens_per_interval: int | None = None,
) -> None:
    """Measure the batch's tokens, sum its gradients, and keep the tables.

    Args:
        questions, responses, limit: problems, responses to each, and their maximum length, if they are sampled here.
        tokens_per_interval: None measures every token.
    """
    policy, rollouts = load_policy(WORK / model), out / ROLLOUTS
    if not rollouts.is_file():
        part(out, "rollouts", partial(sample, policy, questions, responses, limit))
        rollouts = out / PARTS / ROLLOUTS
    batch = read_rollouts(rollouts, policy)
    # Equal probabilities within an interval: figures and fits of this table do not weight the measured tokens.
    settings = {"tokens_per_interval": tokens_per_interval, "sample": "stratified", "per_module": True}
    # Checked below, on more tokens.
    tokens = part(out, "tokens", partial(measure_tokens, policy, batch, self_check=False, **settings))
    left_out = {"influence_tokens": None, "actual_step": False, "compare": False, "gradient_memory": MEMORY}
    statistics = part(out, "statistics", lambda: diagnose(policy, batch, tokens, **left_out).statistics)
    check = part(out, "check", lambda: pd.DataFrame([check_some(policy, batch, tokens["interval"])]))
    tables = {
        "tokens.parquet": slim(policy, tokens),
        "statistics.csv": statistics,
        ROLLOUTS: pd.read_parquet(rollouts),
    }
    facts = {"policy": MODELS[model].title, "vocab_size": policy.vocab_size}
    keep(out, tables, **facts, temperature=1.0, self_check=check.to_dict("records")[0])


def inputs(model: str) -> tuple[Policy, TokenBatch]:
    """Return the checkpoint and the kept responses."""
    policy = load_policy(WORK / model)
    return policy, read_rollouts(folder(MODELS[model].measurement) / ROLLOUTS, policy)


def sample(policy: Policy, questions: int, responses: int, limit: int) -> pd.DataFrame:
    """Sample responses to problems with one sum or difference, a row each, rewarded like SmolLM2's."""
    task = get_task("word-problems-examples")
    asked = task.questions(questions, seed=0, levels=(1,))
    settings = {"n": responses, "temperature": 1.0, "max_new_tokens": limit, "seed": 0}
    return pd.DataFrame(rollout_rows(policy, asked, task=task, sampler=HFSampler(policy, batch_size=64), **settings))


def check_some(policy: Policy, batch: TokenBatch, intervals: pd.Series) -> dict[str, object]:
    """Compare CHECKED random tokens of each interval with plain autograd; intervals are those of all kept tokens."""
    J = TokenJacobian(policy, batch)
    chosen = intervals.groupby(intervals).sample(CHECKED, random_state=0).index
    rows = J.row_norms(torch.isin(torch.arange(len(intervals)), torch.tensor(list(chosen))))
    with rows.engine() as meter:
        return asdict(check_engine(meter, [sequence for sequence in rows.sequences if sequence.lengths]))


def slim(policy: Policy, tokens: pd.DataFrame) -> pd.DataFrame:
    """Keep the columns that figures are drawn from."""
    layers = [column for column in tokens if column.startswith(LAYER)]
    modules = {module: name for name, module in policy.model.named_modules()}
    embedding = f"{PARAMETERS}.{modules[policy.model.get_input_embeddings()]}"
    drawn = [column for column in (SAMPLING_PROBABILITY,) if column in tokens]
    return tokens.rename(columns={embedding: EMBEDDING})[[*KEPT, *drawn, *layers]].astype(SMALL)
