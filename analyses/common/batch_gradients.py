"""One batch's gradient by interval of π and prompt, raw and in AdamW's metric: shares, cosines, signal and noise.

The parts are those of a diagnosis (`gradients` and `tokens` of `gradscope.diagnosis` define each number), but without
exact norms of single tokens: Σ‖w·g‖² of each prompt and interval is estimated by ‖Σ z·w·g‖² with random signs z = ±1,
the same in both metrics, whose expectation it is. So all of it takes two backward passes per interval.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradscope.diagnosis import Pairs, PromptSums, cosine_matrix, gradient_rows, token_shares
from gradscope.gradients import Gram, Resources, TokenJacobian, block_products
from gradscope.intervals import EDGES, interval_labels
from gradscope.objective import LossSettings, batch_statistics, batch_weights
from gradscope.policy import AdamWState, Policy
from gradscope.rollouts import TokenBatch
from gradscope.updates import old_intervals

LABELS = interval_labels(EDGES)
Tables = dict[str, pd.DataFrame]
HELD = 1 << 62
"""Bytes for vectors; all those of a small policy fit."""


def measure_batch(
    policy: Policy,
    batch: TokenBatch,
    loss: LossSettings,
    metric: AdamWState | None,
    *,
    generator: torch.Generator,
    micro_batch_size: int = 8,
) -> Tables:
    """Return four tables of one batch with known old_logprobs and advantages.

    metric: AdamW's; None: raw gradients only. generator: draws the signs. The policy is left unchanged.

    gradients, by metric (raw, adamw) and interval (0, …, "all"): see `gradient_table`;
    cosines, by metric and pair of intervals: see `cosine_table`;
    tokens, by interval: tokens, token_share, predicted_share (of Σ(w·(1−π))²), entropy (mean, nats);
    batches: prompts, served (with an advantage other than 0), responses, tokens, entropy.
    """
    passes = {"micro_batch_size": micro_batch_size}
    found = batch_statistics(policy.model, batch, device=policy.device, **passes)
    weight = batch_weights(found.logprob, batch, loss, num_tokens=batch.num_tokens).total.double()
    inside = old_intervals(batch) == torch.arange(len(LABELS))[:, None, None]
    J = TokenJacobian(policy, batch, Resources(HELD, micro_batch=micro_batch_size))
    blocks = [(batch.group_ids == prompt).nonzero()[:, 0] for prompt in J.prompts]
    counts, certainty = _sum_blocks(inside, blocks), found.log_one_minus_prob.double().exp()
    predicted = _sum_blocks(inside * (weight * certainty).square(), blocks)
    weights = J.kept(-weight / batch.num_tokens * inside)
    signs = J.kept(2.0 * torch.randint(2, weight.shape, generator=generator) - 1)
    vectors = by_prompt(J, torch.cat([weights, weights * signs]))
    gradients, cosines = [], []
    for name in ("raw",) if metric is None else ("raw", "adamw"):
        summed, signed = vectors.split(len(LABELS), dim=1)
        if name == "adamw":
            vectors *= metric.scale(policy.model, summed.sum((0, 1)))
        gram = Gram.exact(block_products(summed))
        squares = signed.norm(dim=2, dtype=torch.float64).square().numpy()
        sums = PromptSums(counts, counts, squares, predicted)
        gradients.append(gradient_table(gram, sums).assign(metric=name))
        cosines.append(cosine_table(gram.products).assign(metric=name))
    return {
        "gradients": pd.concat(gradients, ignore_index=True),
        "cosines": pd.concat(cosines, ignore_index=True),
        "tokens": _token_table(sums, (found.entropy.double() * inside).sum((1, 2)).numpy()),
        "batches": _describe(batch, found.entropy, len(blocks)),
    }


def gradient_table(gram: Gram, sums: PromptSums) -> pd.DataFrame:
    """Return a row per interval (0, …) and for "all", in one metric; NaN where undefined.

    gradient_norm, ‖G_a‖; gradient_share, ⟨G_a, G⟩/‖G‖²; norm_ratio; cosine_with_all; gradient_index; signal and noise,
    which add up to ‖G_a‖²; signal_fraction, signal/‖G_a‖²; signal_to_noise of ONE prompt (signal/noise of the sum over
    the number of prompts); squared_share, of Σ‖w·g‖², and dominance_index.
    """
    rows = _widen(gradient_rows(gram, sums.tokens, LABELS, metric="raw", seed=None))
    shares = _widen(token_shares(sums, LABELS, seed=None))[["squared_share", "dominance_index"]]
    table = rows.join(shares)
    table["signal_to_noise"] = table["signal"] / table["noise"] / len(gram.products)
    return table.rename_axis("interval").reset_index()


def cosine_table(pairs: Pairs) -> pd.DataFrame:
    """Return a row per pair of intervals (interval ≤ other): their cosine and its signal part.

    cosine: of G_a and G_b. signal_product: the unbiased estimate n/(n−1)·Σ_{p≠q} ⟨g_{p,a}, g_{q,b}⟩ of ⟨E G_a, E G_b⟩;
    for a = b it is `gradient_table`'s signal. signal_product over the root of both signals estimates the cosine of the
    signals, a property of the policy; `cosine`, which noise pulls towards 0, is a property of the batch.
    """
    n, size = pairs.shape[:2]
    apart = pairs.sum((0, 2)) - np.einsum("papb->ab", pairs)
    cosines, scale = cosine_matrix(pairs).to_numpy(), n / (n - 1) if n > 1 else np.nan
    rows = [
        {"interval": a, "other": b, "cosine": cosines[a, b], "signal_product": scale * apart[a, b]}
        for a in range(size)
        for b in range(a, size)
    ]
    return pd.DataFrame(rows)


def by_prompt(J: TokenJacobian, weights: Float[Tensor, "R K"]) -> Float[Tensor, "n R P"]:
    """Return each prompt's sum of weighted token gradients."""
    prompt = J.kept(J.batch.group_ids[:, None].expand_as(J.batch.input_ids))
    rows = weights * (prompt == J.prompts[:, None])[:, None]
    return J.vjp(rows.flatten(0, 1)).rows.unflatten(0, rows.shape[:2])


def _token_table(sums: PromptSums, entropy: Float[np.ndarray, " A"]) -> pd.DataFrame:
    shares = _widen(token_shares(sums, LABELS, seed=None))[["token_share", "predicted_share"]]
    counts = sums.tokens.sum(0)
    with np.errstate(invalid="ignore"):  # an interval without tokens
        table = shares.assign(tokens=counts.astype(int), entropy=entropy / counts)
    return table.rename_axis("interval").reset_index()


def _describe(batch: TokenBatch, entropy: Float[Tensor, "B S"], prompts: int) -> pd.DataFrame:
    served = batch.group_ids[((batch.advantages != 0) & batch.response_mask).any(1)].unique()
    facts = {"prompts": prompts, "served": len(served), "responses": len(batch), "tokens": batch.num_tokens}
    return pd.DataFrame([facts | {"entropy": entropy.double().sum().item() / batch.num_tokens}])


def _sum_blocks(values: Tensor, blocks: Sequence[Int[Tensor, " b"]]) -> Float[np.ndarray, "n A"]:
    """Sum [A, B, S] over each block's rows and all columns."""
    return np.stack([values[:, rows].double().sum((1, 2)).numpy() for rows in blocks])


def _widen(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a row per interval ("all", if present, last) and a column per statistic."""
    wide = rows.pivot(index="interval", columns="statistic", values="value")
    wide = wide.reindex([name for name in (*LABELS, "all") if name in wide.index])
    wide.index = pd.Index([LABELS.index(name) if name in LABELS else name for name in wide.index])
    return wide.rename_axis(columns=None)
