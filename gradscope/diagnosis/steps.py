"""Effects of a step: influence between intervals, right directions, entropy, and off-policyness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradscope.diagnosis.format import as_sentence
from gradscope.diagnosis.result import join_rows, make_rows, one_row
from gradscope.diagnosis.tokens import add_estimated_norms, add_weighted_norms
from gradscope.gradients import LOGITS, PARAMETERS
from gradscope.intervals import summarize_cells
from gradscope.objective import LossSettings, off_policyness
from gradscope.resampling import Resampling, Seed, bootstrap, prompt_clusters, short_of
from gradscope.rollouts import Note, TokenBatch, own_responses, served_prompts
from gradscope.runs import digits
from gradscope.theory import fit_powers
from gradscope.updates import BY, SIGNS, influence_table, right_direction_shares

EACH_STEP = 4
"""Number of training steps up to which each one's distance is listed; beyond, the latest, nearest and farthest."""


def with_advantages(batch: TokenBatch, table: pd.DataFrame) -> TokenBatch:
    """Add the table's advantages to a batch with rewards only, so that steps use the table's weights."""
    if batch.advantages is not None or batch.rewards is None:
        return batch
    advantages = torch.full(batch.input_ids.shape, float("nan"))
    advantages[batch.response_mask] = torch.tensor(table["advantage"].to_numpy(np.float32))
    return replace(batch, advantages=advantages)


def tell_pooled(batch: TokenBatch, table: pd.DataFrame) -> TokenBatch:
    """If a log's several training steps were taken, add a note on whose the responses are and how far from this policy.

    Only the responses in use count: under a time limit they may all be the checkpoint's own, or none.
    """
    taken = [] if batch.steps is None else batch.steps.unique().tolist()
    if len(taken) < 2:
        return batch
    used, own = batch.response_mask.any(1), own_responses(batch)
    count, here = int(used.sum()), None if own is None else int((own & used).sum())
    if here == count:
        return batch.without_notes("pooled")
    whose = "Some of them were sampled by other checkpoints"
    if here is not None:
        whose = f"{here:,} of the {count:,} responses here were sampled by this checkpoint, the others by earlier ones"
    if here == 0:
        whose = f"All {count:,} responses here were sampled by other checkpoints"
    first = next((note for note in batch.notes if note.kind == "pooled"), f"responses of {len(taken)} training steps")
    gap = (table["logprob"] - table["old_logprob"]).abs().groupby(batch.steps.numpy()[table["response"]]).mean()
    gap = gap.dropna().sort_index(ascending=False)
    if len(gap) > EACH_STEP:
        gap = gap.loc[[gap.index[0], gap.idxmin(), gap.idxmax()]].pipe(lambda own: own[~own.index.duplicated()])
    told = ", ".join(f"{digits(value)} at step {step}" for step, value in gap.items())
    told = f"mean |Δ log π| to it, in nats, is {told}" if told else "the log does not say how far they are from it"
    words = f"{as_sentence(first)} {whose}: {told}."
    others = batch.without_notes("pooled")
    return replace(others, notes=(Note(words, "pooled"), *others.notes))


def within_budget(batch: TokenBatch, tokens: int, *, generator: torch.Generator) -> Int[Tensor, " b"]:
    """Return the rows of whole prompts in random order, up to this many tokens; at least one prompt.

    Prompts with an advantage come first: a step on the others would show only momentum and decay.
    """
    prompts = batch.group_ids[batch.response_mask.any(1)].unique()
    prompts = prompts[torch.randperm(len(prompts), generator=generator)]
    served = served_prompts(batch)
    prompts = torch.cat([prompts[torch.isin(prompts, served)], prompts[~torch.isin(prompts, served)]])
    counts = torch.stack([batch.response_mask[batch.group_ids == prompt].sum() for prompt in prompts])
    taken = max(1, int((counts.cumsum(0) <= min(tokens, int(counts.sum()))).sum()))  # allow numbers beyond 64 bits
    return torch.isin(batch.group_ids, prompts[:taken]).nonzero()[:, 0]


def influence_rows(
    contributions: pd.DataFrame, labels: Sequence[str], *, seed: Seed = 0, resamples: int = 1000
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Compute low_to_high_share and high_to_high_share, and the influence table that they come from.

    low_to_high_share: how much of the predicted movement of the highest interval's tokens is due to the lowest
    interval's gradient, Cov(c, Δ)/Var(Δ); negative if it counteracts the rest. high_to_high_share: how much is due to
    the highest interval's own gradient. NaN if the interval has no gradient. The shares of all sources, including KL,
    momentum and decay, add up to 1.
    """
    table = influence_table(contributions, seed=seed, resamples=resamples)
    top = len(labels) - 1
    parts = []
    for name, source in (("low_to_high_share", 0), ("high_to_high_share", top)):
        row = table[(table["source"] == source) & (table["target"] == top)].iloc[0]
        found = row[["share", "share_lower", "share_upper"]].to_numpy(np.float64)[:, None]
        if not contributions[f"{BY}{source}"].any():
            found = np.full((3, 1), np.nan)
        parts.append(make_rows(name, found, row["num_tokens"], unit="share", intervals=[labels[top]]))
    return join_rows(parts), table


def direction_rows(
    table: pd.DataFrame, kind: str, labels: Sequence[str], *, seed: Seed = 0, resamples: int = 1000
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Compute the share of moved tokens with Â > 0 that rose, and with Â < 0 that fell, by interval of π_old.

    table: with delta_log_odds.all, interval, advantage and group. kind: "predicted" or "actual", for the names
    right_direction_positive_KIND and right_direction_negative_KIND. The interval "all" has all tokens.
    """
    parts, frames = [], []
    settings = {"seed": seed, "resamples": resamples}
    for by, values, names in (("interval", range(len(labels)), list(labels)), ("every", [0], ["all"])):
        shares = right_direction_shares(table.assign(every=0), by=by, values=values, **settings)
        for sign in SIGNS:
            own = shares[shares["sign"] == sign]
            found = own[["share", "lower", "upper"]]
            moved = (own["num_tokens"] - own["tied"]).to_numpy()
            name = f"right_direction_{sign}_{kind}"
            parts.append(make_rows(name, found.to_numpy(np.float64).T, moved, unit="share", intervals=names))
        frames.append(shares.drop(columns=[by]).assign(interval=np.repeat(names, len(SIGNS)), kind=kind))
    return join_rows(parts), pd.concat(frames, ignore_index=True)


def entropy_rows(
    contributions: pd.DataFrame,
    whole: Mapping[str, float],
    labels: Sequence[str],
    *,
    seed: Seed = 0,
    resamples: int = 1000,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Compute the step's first-order effect on the mean entropy, and a table of the contributions.

    contributions, whole: from an `Influence`. entropy_change_predicted: the change from all sources, in nats.
    entropy_proxy_rank: rank correlation, over tokens with an advantage, of their contributions with the proxy
    −(log π − mean)·(Â − mean) that Clip-Cov and similar methods use. The table has a row per interval of π_old and
    sign of Â: interval, sign (positive, negative, zero), num_tokens, change, lower, upper (95 % over prompts). These
    changes and those of momentum and decay add up to the total.
    """
    from scipy.stats import spearmanr

    advantage, part = (contributions[name].to_numpy(np.float64) for name in ("advantage", "entropy_part"))
    sign = np.sign(advantage).astype(int)
    prompts = prompt_clusters(contributions)
    cell = 3 * contributions["interval"].to_numpy(np.int64) + np.array([2, 0, 1])[sign]
    size = 3 * len(labels)
    sums = np.bincount(prompts * size + cell, part, minlength=size * (prompts.max() + 1)).reshape(-1, size)
    tokens = np.bincount(prompts)

    def evaluate(draws: np.ndarray) -> np.ndarray:  # per token of the drawn prompts
        return draws @ sums * (len(part) / (draws @ tokens))[:, None]

    found = bootstrap(evaluate, len(sums), seed=seed, resamples=resamples)
    counts = np.bincount(cell, minlength=size)
    if short_of(len(sums)):
        found[1:] = np.nan
    signs = ["positive", "negative", "zero"]
    table = pd.DataFrame({"interval": np.repeat(labels, 3), "sign": signs * len(labels), "num_tokens": counts})
    table = table.assign(**dict(zip(("change", "lower", "upper"), found, strict=True)))[counts > 0]
    served = sign != 0
    logprob = np.log(contributions["prob"].to_numpy(np.float64).clip(np.finfo(np.float64).tiny))
    proxy = -(logprob - logprob.mean()) * (advantage - advantage.mean())
    varies = served.any() and np.ptp(proxy[served]) > 0 and np.ptp(part[served]) > 0
    rank = spearmanr(proxy[served], part[served]).statistic if varies else np.nan
    rows = [
        one_row("entropy_change_predicted", sum(whole.values()), len(part), unit="nats"),
        one_row("entropy_proxy_rank", rank, int(served.sum()), unit="correlation"),
    ]
    return join_rows(rows), table.reset_index(drop=True)


def mismatch_rows(
    table: pd.DataFrame,
    labels: Sequence[str],
    *,
    uncorrected: np.ndarray | None = None,
    seed: Seed = 0,
    resamples: int = 1000,
) -> tuple[pd.DataFrame, pd.DataFrame | None]:
    """Compare the sampler's log π with the trainer's for the same weights, if the log has both.

    d = old_logprob − sampler_logprob, over tokens that have both. Rows: mismatch_mean, the mean |d| in nats for each
    interval and for "all"; mismatch_power, the power of 1 − π that |d| follows (`theory.fit_powers`; an error of the
    logits gives 1). The table has a row per interval and one for all: label, num_tokens, value (mean |d|), lower,
    upper, largest (|d|), ratio (mean e^d); masked_share, the share of tokens that a trainer's masking rule leaves
    without an advantage; removed_share, the gradient energy that the interval's masked tokens would have without the
    rule, as a share of that of all these tokens (norms that were not measured are estimated).

    uncorrected: the tokens' advantages before the rule (`TokenBatch.uncorrected_advantages`), times the loss's scale of
    their response. Without it, masked tokens are those without an advantage in a response where others have one, and
    would have the mean weight of these, relative to the ratio; responses masked as a whole are then not counted.
    Returns no rows and None if no token has both.
    """
    if "sampler_logprob" not in table:
        return join_rows([]), None
    before = np.nan if uncorrected is None else np.where(uncorrected != 0, uncorrected, np.nan)
    table = table.assign(before=before)
    both = table[table["sampler_logprob"].notna() & table["old_logprob"].notna()]
    gap = (both["old_logprob"] - both["sampler_logprob"]).to_numpy(np.float64)
    if not gap.any():  # no token, or one column is the other
        return join_rows([]), None
    if uncorrected is None:
        own = both["policy_weight"].where(both["advantage"] != 0) / np.exp(both["logprob"] - both["old_logprob"])
        both = both.assign(before=own.groupby(both["response"]).transform("mean"))
    masked = (both["before"].notna() & (both["advantage"] == 0)).to_numpy()
    energy = _energy_unmasked(both, masked)
    clusters, parts, resampling = prompt_clusters(both), [], Resampling(seed, resamples=resamples)
    for cells, names in ((both["interval"].to_numpy(np.int64), labels), (np.zeros(len(both), np.int64), ["all"])):
        found = summarize_cells(np.abs(gap), cells, clusters, len(names), resampling=resampling)
        each = {"largest": np.abs(gap), "ratio": np.exp(gap), "masked_share": masked, "removed_share": energy * masked}
        how = {"largest": "max", "ratio": "mean", "masked_share": "mean", "removed_share": "sum"}
        known = pd.DataFrame(each).groupby(cells).agg(how).reindex(range(len(names)))
        parts.append(pd.concat([found.drop(columns="num_measured"), known], axis=1).assign(label=names))
    found = pd.concat(parts, ignore_index=True)
    numbers = found[["value", "lower", "upper"]].to_numpy(np.float64).T
    rows = [make_rows("mismatch_mean", numbers, found["num_tokens"], unit="nats", intervals=[*labels, "all"])]
    seen = np.where(gap != 0, np.abs(gap), np.nan)
    columns = both[["group", "log_one_minus_prob", LOGITS]].assign(**{PARAMETERS: seen})
    if np.isfinite(seen).sum() >= 3:
        fit = fit_powers(columns, seed=seed, resamples=resamples).iloc[-1]
        power = fit[["slope", "slope_lower", "slope_upper"]].to_numpy(np.float64)[:, None]
        rows.append(make_rows("mismatch_power", power, fit["tokens"], unit="ratio"))
    return join_rows(rows), found[["label", *found.columns.drop("label")]]


def _energy_unmasked(table: pd.DataFrame, masked: np.ndarray) -> Float[np.ndarray, " n"]:
    """Return each token's share of the gradient energy, with masked tokens' weights, relative to the ratio, from
    the column `before`."""
    weight = table["weight"].where(~masked, table["before"] * np.exp(table["logprob"] - table["old_logprob"]))
    whole = add_estimated_norms(add_weighted_norms(table.assign(weight=weight)))
    norms = whole["weighted_norm_estimate" if "weighted_norm_estimate" in whole else "weighted_norm"]
    energy = norms.fillna(0.0).to_numpy(np.float64) ** 2
    return energy / energy.sum() if energy.any() else np.full(len(energy), np.nan)


def lag_rows(table: pd.DataFrame, loss: LossSettings, *, seed: Seed = 0, resamples: int = 1000) -> pd.DataFrame:
    """Compare the policy with the one that sampled, over tokens with a known old_logprob.

    logprob_difference_mean, _max: of |log π − log π_old| in nats, as trainers log it for the mismatch between trainer
    and sampler; ratio_mean, ratio_max: of π/π_old; clip_low, clip_high, clip_dual: shares of tokens cut by the trust
    region of Eq. 2 (`off_policyness`), if Â is known.
    """
    known = table["old_logprob"].notna().to_numpy()
    if not known.any():
        return join_rows([])
    own = table[known]
    found = off_policyness(own, loss)
    gap, ratio = found.pop("logprob_difference"), found.pop("ratio")
    values = {"logprob_difference_mean": (gap, "nats"), "ratio_mean": (ratio, "ratio")}
    values |= {name: (inside, "share") for name, inside in found.items()}
    clusters, parts, resampling = prompt_clusters(own), [], Resampling(seed, resamples=resamples)
    for name, (numbers, unit) in values.items():
        row = summarize_cells(numbers, np.zeros(len(own), dtype=np.int64), clusters, 1, resampling=resampling).iloc[0]
        found = row[["value", "lower", "upper"]].to_numpy(np.float64)[:, None]
        parts.append(make_rows(name, found, int(row["num_measured"]), unit=unit))
    worst = (("logprob_difference_max", gap.max(), "nats"), ("ratio_max", ratio.max(), "ratio"))
    return join_rows([*parts, *(one_row(name, value, len(own), unit=unit) for name, value, unit in worst)])


def predicted_movement(contributions: pd.DataFrame) -> pd.DataFrame:
    """Return the contributions, with their sum as the movement for `directions`."""
    return contributions.assign(**{"delta_log_odds.all": contributions["predicted"].astype(np.float64)})


def seeds_of(table: pd.DataFrame, batch: TokenBatch, num_intervals: int) -> Float[Tensor, "A B S"]:
    """Return −w_t / num_tokens for each interval's tokens, 0 elsewhere: the seeds of its gradient of the loss."""
    weights = torch.zeros(batch.input_ids.shape, dtype=torch.float64)
    intervals = torch.full(batch.input_ids.shape, -1)
    weights[batch.response_mask] = torch.tensor(table["weight"].to_numpy(np.float64)) / -batch.num_tokens
    intervals[batch.response_mask] = torch.tensor(table["interval"].to_numpy(np.int64))
    return weights * (intervals == torch.arange(num_intervals)[:, None, None])
