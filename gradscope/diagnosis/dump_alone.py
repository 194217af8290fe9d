"""The cheap mode: what a log alone says about the gradient at the logits, without a policy, in seconds.

A log with log-probabilities and advantages holds π and w_t of every token, and Prop. 4.2 (arXiv:2505.12929) bounds the
norm of the gradient of log π with respect to the logits by π alone: 1−π ≤ ‖e − π‖ ≤ √2·(1−π) for every vocabulary.
Nothing here was measured below the logits: whether gradients of parameters follow (1−π) is assumed, not shown, and so
nothing here says whether low-probability tokens dominate an update. `measure` does, with the policy at hand.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from gradscope.errors import InputError
from gradscope.intervals import EDGES, Column, assign_intervals, interval_labels
from gradscope.objective import PAPER, LossSettings, batch_weights, resolve_advantages
from gradscope.resampling import SHARE, Seed, bootstrap
from gradscope.rollouts import Dump

if TYPE_CHECKING:
    import pandas as pd

WITH_LOGPROBS = "prime_rl, nemo_rl, open_instruct, slime, and native rows with old_logprobs"
WITH_ADVANTAGES = "trl, prime_rl, nemo_rl, open_instruct, slime's train data, ms_swift, and native rows with advantage"

ASSUMES = (
    "from the log alone: the bounds are exact at the logits; that gradients of parameters go as 1 − π is assumed, not "
    "measured, so this says nothing on whether low-probability tokens dominate the update"
)

QUANTITIES = ("tokens", "weight", "squared_weight", "weighted_norm", "squared_weighted_norm")
"""What `logit_shares` shares out: 1, |w|, w², |w|·‖e − π‖ and (w·‖e − π‖)², summed over tokens."""

SIGNS = ("all", "positive", "negative")


def logit_table(
    dump: Dump, *, vocab_size: int | None = None, loss: LossSettings = PAPER, edges: Column = EDGES
) -> pd.DataFrame:
    """A row per kept response token of which the log knows π, from the log alone.

    π is the trainer's own where the log has it (`dump.logprobs`), else that of `old_logprobs`, at the sampler's
    temperature. vocab_size: N of Prop. 4.2, the number of logits; None takes the bounds that hold for every N.
    loss: the objective behind the weights (Eq. 2); where the log says which tokens its trainer clipped, these are
    clipped and no others. Reference log-probabilities that are unknown make no KL part.

    Columns of the token table: `response`, `group`, `position`, `token_id`, `logprob`, `prob`, `log_one_minus_prob`
    (−inf for a stored log-probability of exactly 0), `entropy` (the log's, NaN if unknown), `old_logprob`,
    `ref_logprob`, `advantage`, `policy_weight`, `kl_weight`, `weight`, `clipped`, `interval`; and `logit_grad_lower`,
    `logit_grad_upper`: bounds of Prop. 4.2 on the norm of the gradient of log π with respect to logits / T
    (float64).

    Raises InputError without log-probabilities or advantages, and for an id outside a given vocabulary.
    """
    import pandas as pd

    logprobs = _logprobs(dump)
    kept = dump.batch.response_mask & ~logprobs.isnan()
    if not kept.any():
        raise InputError(f"no log-probability of the {dump.batch.num_tokens} tokens is known; measure with the policy")
    advantages = _advantages(dump)
    dump = replace(dump, batch=replace(dump.batch, response_mask=kept))
    batch = dump.batch
    if vocab_size is not None:
        _check_vocabulary(batch.input_ids[kept], vocab_size)
    logprob = logprobs[kept].double().numpy()
    one_minus_prob = -np.expm1(logprob)
    prob = np.exp(logprob)
    with np.errstate(divide="ignore"):  # a stored log-probability of 0 is counted by `logit_notes`
        log_one_minus_prob = np.log(one_minus_prob)
    rows, columns = kept.nonzero(as_tuple=True)
    unknown = torch.full(kept.shape, float("nan"))
    old, ref = batch.old_logprobs, batch.ref_logprobs
    lower, upper = _bounds(one_minus_prob, vocab_size)
    return pd.DataFrame(
        {
            "response": rows.numpy().astype(np.int32),
            "group": batch.group_ids[rows].numpy(),
            "position": (columns - batch.response_start[rows]).numpy().astype(np.int32),
            "token_id": batch.input_ids[kept].numpy().astype(np.int32),
            "logprob": logprob.astype(np.float32),
            "prob": prob.astype(np.float32),
            "log_one_minus_prob": log_one_minus_prob.astype(np.float32),
            "entropy": (unknown if dump.entropy is None else dump.entropy)[kept].numpy(),
            "old_logprob": (unknown if old is None else old)[kept].numpy(),
            "ref_logprob": (unknown if ref is None else ref)[kept].numpy(),
            "advantage": advantages[kept].numpy(),
            **_weights(dump, logprobs, advantages, loss),
            "interval": assign_intervals(prob.astype(np.float32), edges).astype(np.int16),
            "logit_grad_lower": lower,
            "logit_grad_upper": upper,
        }
    )


def logit_notes(table: pd.DataFrame, dump: Dump | None = None) -> tuple[str, ...]:
    """What a reader of the shares must know, a sentence each; `dump.notes` come besides. dump: of which it was made."""
    notes = [ASSUMES]
    if dump is not None and (unknown := dump.batch.num_tokens - len(table)):
        notes.append(f"{unknown:,} of {dump.batch.num_tokens:,} tokens left out: the log does not know their π")
    if certain := int(np.isneginf(table["log_one_minus_prob"]).sum()):
        notes.append(
            f"{certain:,} of {len(table):,} tokens have a stored log-probability of exactly 0, so that 1 − π is 0 and "
            "they count nothing in the weighted norms: at the precision of the log that is all that is known of them"
        )
    if clipped := int(table["clipped"].sum()):
        notes.append(f"{clipped:,} of {len(table):,} tokens are clipped: their policy weight is 0")
    return tuple(notes)


def logit_shares(
    table: pd.DataFrame,
    edges: Column = EDGES,
    *,
    seed: Seed = 0,
    confidence: float = 0.95,
    resamples: int = 1000,
) -> pd.DataFrame:
    """Each probability interval's share of QUANTITIES, over all tokens and over those of each sign of the advantage.

    A row per sign, quantity and interval: `sign` ("all", or "positive" and "negative": shares among the tokens with
    such an advantage), `quantity`, `interval`, `label`, `num_tokens`, `least` and `most`, `lower` and `upper`.
    The norms are known by their bounds alone, so a share of a weighted norm lies in [least, most]: exactly these two if
    every token's norm may lie anywhere within its own bounds (this interval's lower bounds over the others' upper ones,
    and the reverse). For the other quantities both are the share itself. `lower` is the lower percentile of `least`
    and `upper` the upper one of `most`, over redrawn prompt groups; NaN for one group, and with seed None.

    These are sums of token norms at the logits: neither the norm of a summed gradient nor anything of parameters. It is
    assumed, not measured, that gradients below the logits follow 1 − π: no share here is a verdict on dominance.
    """
    import pandas as pd

    intervals = assign_intervals(table["prob"].to_numpy(), edges)
    labels, size = interval_labels(edges), len(interval_labels(edges))
    frames = []
    for sign, chosen in _signs(table):
        least, most = _range_of_shares(table[chosen], intervals[chosen], size, seed, confidence, resamples)
        for index, quantity in enumerate(QUANTITIES):
            columns = {"sign": sign, "quantity": quantity, "interval": np.arange(size), "label": labels}
            columns["num_tokens"] = np.bincount(intervals[chosen], minlength=size)
            ends = {"least": least[0, index], "most": most[0, index]}
            frames.append(pd.DataFrame(columns | ends | {"lower": least[1, index], "upper": most[2, index]}))
    return pd.concat(frames, ignore_index=True)


def _range_of_shares(
    table: pd.DataFrame,
    intervals: np.ndarray,
    size: int,
    seed: Seed,
    confidence: float,
    resamples: int,
) -> np.ndarray:
    """[2, 3, quantities, intervals]: least and most share, each with its percentiles over redrawn prompt groups."""
    groups, group = np.unique(table["group"].to_numpy(), return_inverse=True)
    shape = (len(groups), size)

    def total(values: np.ndarray) -> np.ndarray:
        return np.bincount(group * size + intervals, values, minlength=len(groups) * size).reshape(shape)

    # [quantities, groups, intervals]
    low, high = (np.stack(sums) for sums in zip(*((total(a), total(b)) for a, b in _amounts(table)), strict=True))

    def evaluate(draws: np.ndarray) -> np.ndarray:
        least, most = draws @ low, draws @ high  # [quantities, draws, intervals]
        with np.errstate(invalid="ignore"):  # 0/0 where there is nothing to share
            shares = [own / (own + rest.sum(-1, keepdims=True) - rest) for own, rest in ((least, most), (most, least))]
        return np.stack(shares).transpose(2, 0, 1, 3).reshape(len(draws), -1)

    found = bootstrap(evaluate, len(groups), seed=seed, confidence=confidence, resamples=resamples, scale=SHARE)
    half = np.isnan(found[1].reshape(2, -1)).any(0)  # an interval reaches from the least's to the most's
    found[1:, np.tile(half, 2)] = np.nan
    return found.reshape(3, 2, len(QUANTITIES), size).swapaxes(0, 1)


def _amounts(table: pd.DataFrame) -> list[tuple[np.ndarray, np.ndarray]]:
    """The least and the most that each token adds to each of QUANTITIES."""
    weight = table["weight"].abs().to_numpy(np.float64)
    lower, upper = (weight * table[f"logit_grad_{end}"].to_numpy(np.float64) for end in ("lower", "upper"))
    ones = np.ones(len(table))
    return [(ones, ones), (weight, weight), (weight**2, weight**2), (lower, upper), (lower**2, upper**2)]


def _signs(table: pd.DataFrame) -> Iterator[tuple[str, np.ndarray]]:
    advantage = table["advantage"].to_numpy()
    yield from zip(SIGNS, (np.ones(len(table), dtype=bool), advantage > 0, advantage < 0), strict=True)


def _bounds(one_minus_prob: np.ndarray, vocab_size: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Prop. 4.2; for an unknown N the infimum of √(N/(N−1)), which is 1."""
    factor = 1.0 if vocab_size is None else math.sqrt(vocab_size / (vocab_size - 1))
    return factor * one_minus_prob, math.sqrt(2) * one_minus_prob


def _logprobs(dump: Dump) -> Tensor:
    logprobs = dump.batch.old_logprobs if dump.logprobs is None else dump.logprobs
    if logprobs is None:
        raise InputError(
            f"a log of format {dump.format} without log-probabilities says nothing of gradients by itself; formats "
            f"that carry them: {WITH_LOGPROBS}; or measure it with the policy"
        )
    old = dump.batch.old_logprobs
    return logprobs if old is None else torch.where(logprobs.isnan(), old, logprobs)


def _advantages(dump: Dump) -> Tensor:
    if dump.batch.advantages is None and dump.batch.rewards is None:
        raise InputError(
            f"the log of format {dump.format} has neither advantages nor rewards, so its tokens have no weights; "
            f"formats that carry advantages: {WITH_ADVANTAGES}"
        )
    return resolve_advantages(dump.batch).float()


def _weights(dump: Dump, logprobs: Tensor, advantages: Tensor, loss: LossSettings) -> dict[str, np.ndarray]:
    """Eq. 2's weights of the kept tokens, clipped as the trainer says, where it does."""
    loss.check()
    kept, batch = dump.batch.response_mask, replace(dump.batch, advantages=advantages)
    if dump.clipped is not None:
        loss = replace(loss, clip_ratio_low=1.0, clip_ratio_high=math.inf, clip_ratio_c=None)
    parts = batch_weights(logprobs, batch, loss, num_tokens=batch.num_tokens)
    clipped = parts.clipped if dump.clipped is None else dump.clipped
    policy = parts.policy.masked_fill(clipped, 0.0)
    columns = {"policy_weight": policy, "kl_weight": parts.kl, "weight": policy + parts.kl, "clipped": clipped}
    return {name: values[kept].numpy() for name, values in columns.items()}


def _check_vocabulary(ids: Tensor, vocab_size: int) -> None:
    if vocab_size < 2:
        raise InputError(f"vocab_size is {vocab_size}; the bounds need at least 2 tokens; pass the number of logits")
    if len(ids) and int(ids.max()) >= vocab_size:
        raise InputError(
            f"the log holds the id {int(ids.max())}, outside a vocabulary of {vocab_size}; pass the number of logits"
        )
