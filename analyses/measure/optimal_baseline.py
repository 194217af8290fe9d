"""Measure how verl's optimal token baseline approximates a response's squared gradient norm, and what it saves.

With s = Σ_t g_t the gradient of a response's log likelihood, the baseline that minimises the policy gradient's variance
is E[R‖s‖²]/E[‖s‖²]. verl replaces ‖s‖² by W = Σ_t ‖e − π‖², which needs no backward pass: over the whole response
(`variance_proxy`), or up to token t (`optimal_token_baseline`). Every baseline here is computed from the other
responses to the same prompt, since a baseline looks better on its own data. Measured are the untrained embedded policy,
24 × 8 responses at temperature 0.7, and, without per-token baselines, all responses of the pretrained policy of
analyses/measure/real_language.py. Writes

    responses.parquet   a row per response: squared norms, including that of its estimator term under each baseline;
                        `signal`: mean product of two responses' terms in its prompt; `loss_gradient_squared`:
                        ‖Σ_i A_i·s_i‖²
    tokens.parquet      a row per token of the embedded policy: its norms over all parameters and at the logits
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from analyses.common.experiments import configure
from analyses.common.in_training import FRESH, PLACE
from analyses.common.measurements import keep, part, read_table
from analyses.measure import real_language
from analyses.measure.base_policy import sample_batch
from gradscope import load_policy
from gradscope.gradients import LOGITS, PARAMETERS, TokenJacobian, measure as measure_tokens
from gradscope.objective import grpo_advantages
from gradscope.policy import Policy
from gradscope.rollouts import TokenBatch

Values = Float[np.ndarray, " n"]

SUM, ENERGY, LENGTH = "sum_norm_squared", "sum_of_norms_squared", "length"
PROXY = "logit_norms_squared"
"""verl's W."""
WHOLE = {"mean": None, "by length": LENGTH, "by Σ‖e − π‖²": PROXY, "by Σ‖g‖²": ENERGY, "by ‖Σg‖²": SUM}
"""Baselines by response: {name: column that weights the others' rewards; None: equal weights}."""
TOKENWISE = {"by token, mean": None, "by token, Σ‖e − π‖²": LOGITS, "by token, Σ‖g‖²": PARAMETERS}
"""Baselines by token: {name: column whose squares up to t weight the rewards of the others that reach t}."""
POWER = "power: "
"""Prefix of a baseline's column ‖Σ_t (R − b_t)·g_t‖²."""


def weigh_others(rewards: Values, weights: Values, groups: np.ndarray) -> Values:
    """Return, for each response, the weighted mean reward of the others in its group; 0 if it is alone."""
    found = np.zeros(len(rewards))
    for group in np.unique(groups):
        own = groups == group
        products, sizes = weights[own] * rewards[own], weights[own]
        left = sizes.sum() - sizes
        found[own] = np.divide(products.sum() - products, left, out=np.zeros(own.sum()), where=left > 0)
    return found


def weigh_others_by_token(tokens: pd.DataFrame, rewards: Values, column: str | None) -> Values:
    """Return, for each token, the weighted mean reward of the others in its group that reach its position.

    Each counts by its sum of squares up to there. If no other reaches it the baseline is 0, as in verl at the tail of
    the longest response. Tokens are in the table's order, by response and position.
    """
    place = tokens.groupby("response").cumcount()
    sizes = tokens[column].astype(float) ** 2 if column else pd.Series(1.0, tokens.index)
    upto = sizes.groupby(tokens["response"]).cumsum() if column else sizes
    products = upto * rewards[tokens["response"]]
    keys = [tokens["group"], place]
    left = upto.groupby(keys).transform("sum") - upto
    others = products.groupby(keys).transform("sum") - products
    alone = upto.groupby(keys).transform("size") == 1
    return np.where(alone, 0.0, others / left.where(~alone, 1.0))


def tabulate(
    policy: Policy, batch: TokenBatch, tokens: pd.DataFrame, *, by_token: bool = True
) -> tuple[pd.DataFrame, Float[np.ndarray, " k"]]:
    """Return a row per response to one prompt, and a sketch of Σ_i A_i·s_i, A being GRPO's advantages.

    Args:
        tokens: the batch's token table, in its order, with every token measured.
        by_token: try TOKENWISE too, which takes a backward pass each.
    """
    rows = tokens.groupby("response").agg(group=("group", "first"), length=("position", "size"))
    rows[PROXY] = (tokens[LOGITS].astype(float) ** 2).groupby(tokens["response"]).sum()
    rows[ENERGY] = (tokens[PARAMETERS].astype(float) ** 2).groupby(tokens["response"]).sum()
    rewards, groups = batch.rewards.double().numpy(), rows["group"].to_numpy()
    tokenwise = TOKENWISE if by_token else {}
    each = rewards[tokens["response"]]
    left = [each - weigh_others_by_token(tokens, rewards, column) for column in tokenwise.values()]
    weights = torch.from_numpy(np.stack([np.ones(len(tokens)), *left]))
    gram = TokenJacobian(policy, batch).gram(
        weights.to(next(policy.model.parameters()).dtype),
        groups=torch.arange(len(batch)),
        pairs="within",
        sketch=True,
        way="whole",
    )
    own = np.einsum("nrr->nr", gram.products)
    rows[SUM], rows["reward"] = own[:, 0], rewards
    for name, column in WHOLE.items():
        sizes = rows[column].to_numpy(float) if column else np.ones(len(rows))
        rows[POWER + name] = (rewards - weigh_others(rewards, sizes, groups)) ** 2 * own[:, 0]
    for place, name in enumerate(tokenwise, 1):
        rows[POWER + name] = own[:, place]
    sums = gram.sketches[:, 0].double()
    centred = torch.from_numpy(rewards - weigh_others(rewards, np.ones(len(rows)), groups))
    rows["signal"] = mean_product(sums * centred[:, None])
    advantages = grpo_advantages(batch.rewards, batch.group_ids).double()
    rows["advantage"] = advantages.numpy()
    return rows.reset_index(), (advantages @ sums).numpy()


def mean_product(parts: Float[Tensor, "n k"]) -> float:
    """Return the mean of ⟨a, b⟩ over all pairs of different vectors."""
    count = len(parts)
    return float((parts.sum(0).square().sum() - parts.square().sum()) / (count * (count - 1)))


def measure(out: Path, *, questions: int = 24, responses: int = 8) -> None:
    """Measure the responses of both policies, and keep the tables."""
    policy = load_policy(configure("cpu", *PLACE).model)
    batch = sample_batch(policy, questions, responses, FRESH)
    tokens = part(out, "tokens", lambda: measure_tokens(policy, batch))
    frames = [by_prompt(out, "embedded", policy, batch, tokens)]
    policy, batch = real_language.inputs("smollm2")
    of_pretrained = read_table("real_language", "tokens.parquet")
    frames.append(by_prompt(out, "smollm2", policy, batch, of_pretrained, by_token=False))
    slim = tokens[["group", "response", "position", "prob", LOGITS, PARAMETERS]]
    tables = {
        "responses.parquet": pd.concat(frames, ignore_index=True),
        "tokens.parquet": slim.astype({"group": np.int16, "response": np.int16}),
    }
    keep(out, tables, questions=questions, responses=responses)


def by_prompt(
    out: Path, name: str, policy: Policy, batch: TokenBatch, tokens: pd.DataFrame, *, by_token: bool = True
) -> pd.DataFrame:
    """Tabulate prompt by prompt, each a part of the measurement in `out`."""
    frames, sketches = [], []
    for prompt in tqdm(batch.group_ids.unique().tolist(), name):
        (rows,) = torch.nonzero(batch.group_ids == prompt, as_tuple=True)
        own = tokens[tokens["group"] == prompt].reset_index(drop=True)
        own = own.assign(response=own["response"].rank(method="dense").astype(int) - 1)
        made = partial(tabulate, policy, batch.select(rows), own, by_token=by_token)
        found = part(out, f"{name}-{prompt}", lambda made=made: join_sketch(*made()))
        sketches.append(found.pop("sketch").iloc[0])
        frames.append(found)
    whole = float(np.square(np.sum(sketches, 0)).sum())
    return pd.concat(frames, ignore_index=True).assign(policy=name, loss_gradient_squared=whole)


def join_sketch(rows: pd.DataFrame, sketch: Float[np.ndarray, " k"]) -> pd.DataFrame:
    """Put the sketch beside each row, since a file holds one table."""
    return rows.assign(sketch=[sketch] * len(rows))
