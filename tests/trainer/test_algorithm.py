"""What each method and control trains on, against loops over tokens in Python floats.

They are written from Eq. 1, 2, 4, 20, 21 and Alg. 1 of arXiv:2505.12929; nothing of them is gradscope.objective's.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from support.losses import grpo_by_loop, reinforce_pp_by_loop, term_by_loop, weight_by_loop
from support.refusals import refused
from torch import Tensor

from gradscope.objective import StepTokens, Update, batch_loss, batch_weights, split_steps
from gradscope.objective.step_rule import random_split
from gradscope.rollouts import TokenBatch
from gradscope.trainer import TrainConfig
from gradscope.trainer.step import compute_advantages, plan_update

ROWS, WIDTH = 12, 14
EMPTY_ROW, ONE_TOKEN_ROW = 4, 7
Places = list[tuple[int, int]]

METHODS = {
    "grpo": {},
    "grpo, strong KL": {"kl_coef": 0.3},
    "grpo, no KL, no dual clip": {"kl_coef": 0.0, "clip_ratio_c": None},
    "reweight": {"reweight_alpha": 0.3},
    "lopti": {"lopti_eta": 0.5},
    "lopti, high first": {"lopti_eta": 0.5, "lopti_order": "high-first"},
    "lopti, interleaved": {"lopti_eta": 0.3, "lopti_schedule": "interleaved"},
    "lopti, high first, interleaved": {"lopti_eta": 0.5, "lopti_order": "high-first", "lopti_schedule": "interleaved"},
    "both": {"lopti_eta": 0.5, "reweight_alpha": 0.3, "kl_coef": 0.1},
    "masked": {"mask_probs": (0.25, 0.75)},
    "lopti, high masked": {"lopti_eta": 0.5, "mask_probs": (0.75, 1.0)},
    "reinforce++": {"algorithm": "reinforce++", "kl_coef": 0.1},
    "reinforce++ and reweight": {"algorithm": "reinforce++", "kl_coef": 0.1, "reweight_alpha": 0.1},
    "reinforce++ and both": {"algorithm": "reinforce++", "kl_coef": 0.1, "reweight_alpha": 0.1, "lopti_eta": 0.5},
    "reinforce++, no KL": {"algorithm": "reinforce++", "kl_coef": 0.0},
}


def make_config(mini_batch_size: int = 5, **settings) -> TrainConfig:
    """Mini-batches of 5, 5 and 2 of the twelve responses, unless said otherwise; β as the paper's."""
    return TrainConfig(mini_batch_size=mini_batch_size, **settings)


def make_batch() -> tuple[TokenBatch, Tensor]:
    """Twelve responses in four groups, in float64, and log π after some drift: tokens on every side of every clip.

    Masks have holes, one response keeps nothing, one has a single token; padding is on the left.
    """
    generator = torch.Generator().manual_seed(0)
    start = torch.randint(0, 4, (ROWS,), generator=generator)
    response_start = start + torch.randint(1, 4, (ROWS,), generator=generator)
    response_start[ONE_TOKEN_ROW] = WIDTH - 1
    columns = torch.arange(WIDTH)
    mask = (columns >= response_start[:, None]) & (torch.rand(ROWS, WIDTH, generator=generator) < 0.8)
    mask[EMPTY_ROW], mask[ONE_TOKEN_ROW, -1] = False, True
    normal = torch.randn(3, ROWS, WIDTH, generator=generator, dtype=torch.float64)
    old = torch.rand(ROWS, WIDTH, generator=generator, dtype=torch.float64).log()
    logprobs = old + 0.3 * normal[0]
    far = torch.rand(ROWS, WIDTH, generator=generator) < 0.1
    logprobs = torch.where(far, old + 2.7, logprobs)  # a ratio of 15, beyond the dual clip of 10
    batch = TokenBatch(
        input_ids=torch.zeros(ROWS, WIDTH, dtype=torch.long),
        attention_mask=columns >= start[:, None],
        response_mask=mask,
        response_start=response_start,
        group_ids=torch.arange(ROWS) // 3,
        temperature=torch.full((ROWS,), 0.7),
        rewards=torch.tensor([3, -1, -0.5, 3, 3, -3, -1, -1, -1, 3, -0.5, 0.1], dtype=torch.float64),
        old_logprobs=old,
        ref_logprobs=old + 0.5 * normal[1],
    )
    return batch, logprobs


@pytest.fixture
def batch() -> TokenBatch:
    return make_batch()[0]


@pytest.fixture
def logprobs() -> Tensor:
    return make_batch()[1]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- the paper's formulas, one token at a time


def advantages_by_loop(batch: TokenBatch, config: TrainConfig) -> dict[tuple[int, int], float]:
    rewards, kept = batch.rewards.tolist(), [(row, s) for row, s in batch.response_mask.nonzero().tolist()]
    if config.algorithm == "grpo":
        each = grpo_by_loop(rewards, batch.group_ids.tolist())
        plain = {at: each[at[0]] for at in kept}
    else:
        known = (values.tolist() for values in (batch.old_logprobs, batch.ref_logprobs, batch.response_mask))
        plain = reinforce_pp_by_loop(rewards, *known, config.kl_coef)
    alpha = config.reweight_alpha or 0.0
    return {at: (alpha * math.exp(batch.old_logprobs[at]) + (1 - alpha)) * value for at, value in plain.items()}


def passes_by_loop(batch: TokenBatch, config: TrainConfig) -> list[tuple[str, list[int], Places, int]]:
    """(name, rows, tokens, denominator) of every optimizer step, in order."""
    rows = list(range(ROWS))
    minis = [rows[i : i + config.mini_batch_size] for i in range(0, ROWS, config.mini_batch_size)]
    names = ["all"] if config.lopti_eta is None else ["low", "high"]
    if config.lopti_order == "high-first":
        names.reverse()
    steps = [(name, mini) for name in names for mini in minis]
    if config.lopti_schedule == "interleaved":
        steps = [(name, mini) for mini in minis for name in names]
    out = []
    for name, mini in steps:
        kept = [(row, s) for row in mini for s in range(WIDTH) if batch.response_mask[row, s]]
        mine = []
        for at in kept:
            old = math.exp(batch.old_logprobs[at])
            group = "all" if config.lopti_eta is None else "low" if old < config.lopti_eta else "high"
            low, high = config.mask_probs or (2, 2)
            masked = low <= old and (old < high or high == 1)
            if group == name and not masked:
                mine.append(at)
        out.append((name, mini, mine, len(kept)))
    return out


# ---- advantages


def test_reinforce_pp_with_a_kl_and_no_reference_is_refused(batch):
    with refused("ref_logprobs"):
        compute_advantages(replace(batch, ref_logprobs=None), make_config(algorithm="reinforce++", kl_coef=0.1))


# ---- passes, losses and weights of every method


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("mini_batch_size", [5, 12])
def test_tokens_loss_and_gradient_of_every_pass_are_those_of_the_papers_formulas(
    batch, logprobs, method, mini_batch_size
):
    config = make_config(mini_batch_size, **METHODS[method])
    batch = replace(batch, advantages=compute_advantages(batch, config))
    advantages = advantages_by_loop(batch, config)
    update, expected = plan_update(batch, config, generator()), passes_by_loop(batch, config)
    assert update.match is None
    assert [part.name for part in update.steps] == [name for name, *_ in expected]
    clips: Counter[str] = Counter()
    # REINFORCE++ has its KL in the reward.
    loss = config if config.algorithm == "grpo" else replace(config, kl_coef=0.0)
    for part, (_, rows, tokens, denominator) in zip(update.steps, expected, strict=True):
        assert part.num_tokens == denominator
        assert [(rows[row], s) for row, s in part.batch.response_mask.nonzero().tolist()] == tokens
        total, slopes = 0.0, torch.zeros(len(rows), WIDTH, dtype=torch.float64)
        for row, s in tokens:
            token = [values[row, s].item() for values in (logprobs, batch.old_logprobs, batch.ref_logprobs)]
            total += term_by_loop(*token, advantages[row, s], loss)
            weight, clip = weight_by_loop(*token, advantages[row, s], loss)
            slopes[rows.index(row), s] = -weight / denominator
            clips[clip] += 1
        leaf = logprobs[rows].clone().requires_grad_(True)
        ours = batch_loss(leaf, part.batch, update.settings, num_tokens=part.num_tokens)
        assert ours.item() == pytest.approx(-total / denominator, rel=1e-12)
        torch.testing.assert_close(torch.autograd.grad(ours, leaf)[0], slopes, rtol=1e-11, atol=1e-16)
        weights = batch_weights(leaf, part.batch, update.settings, num_tokens=part.num_tokens)
        torch.testing.assert_close(-weights.total / denominator, slopes, rtol=1e-11, atol=1e-16)
    assert min(clips["low"], clips["high"]) >= 1
    assert clips["dual"] >= 1 or config.clip_ratio_c is None


@pytest.mark.parametrize("size", [1, 3, 5, 6, 12, 50])
@pytest.mark.parametrize("schedule", ["sweep", "interleaved"])
def test_passes_cover_every_token_exactly_once(batch, size, schedule):
    marked = replace(batch, input_ids=torch.arange(ROWS * WIDTH).reshape(ROWS, WIDTH))  # so that a token has a name
    kept = sorted(marked.input_ids[marked.response_mask].tolist())
    low = marked.old_logprobs.exp() < 0.4
    groups = [("low", low), ("high", ~low)]
    for steps in (
        split_steps(marked, size, [("all", marked.response_mask)]),
        split_steps(marked, size, groups, schedule=schedule),
    ):
        seen = [t for part in steps for t in part.batch.input_ids[part.batch.response_mask].tolist()]
        assert sorted(seen) == kept
        assert len(steps) in (-(-ROWS // size), 2 * -(-ROWS // size))


def rows_of(part: StepTokens, batch: TokenBatch) -> slice:
    """Where in the batch the responses of a pass stand."""
    first = int((batch.old_logprobs == part.batch.old_logprobs[0]).all(1).nonzero()[0])
    return slice(first, first + len(part.batch))


# ---- masks


def test_the_masked_interval_is_half_open_and_an_end_at_one_closed(batch):
    probs = torch.tensor([0.2, 0.25, 0.3, 0.5, 0.75, 1.0], dtype=torch.float64)
    batch = batch.select([0]).narrow(7)
    mask = torch.tensor([[False] + [True] * 6])
    old = torch.cat([torch.zeros(1, dtype=torch.float64), probs.log()])[None]
    batch = replace(batch, attention_mask=torch.ones(1, 7).bool(), response_mask=mask, old_logprobs=old)
    edges = old.exp()[0, 1:].tolist()  # the very numbers that are compared
    batch = replace(batch, advantages=torch.ones(1, 7))
    for low, high, left in [
        (edges[1], edges[3], [0, 3, 4, 5]),
        (edges[4], 1.0, [0, 1, 2, 3]),
        (0.0, edges[1], [1, 2, 3, 4, 5]),
    ]:
        (part,) = plan_update(batch, make_config(mask_probs=(low, high)), generator()).steps
        assert (part.batch.response_mask[0, 1:].nonzero()[:, 0]).tolist() == left
        assert part.num_tokens == 6


# ---- matched controls


def test_a_random_split_has_loptis_sizes_in_each_mini_batch_and_is_disjoint_and_complete(batch):
    low = batch.response_mask & (batch.old_logprobs.exp() < 0.4)
    for size in (1, 5, 12):
        first, second = random_split(low, batch.response_mask, size, generator())
        assert torch.equal(first | second, batch.response_mask)
        assert not (first & second).any()
        for rows in torch.arange(ROWS).split(size):
            assert first[rows].sum() == low[rows].sum()


def test_a_random_split_draws_every_token_equally_often():
    mask = torch.tensor([[False, True, True, True, False, True], [False, True, True, False, True, True]])
    low = mask & torch.tensor([[True, True, False, False, True, False], [True, False, True, False, False, True]])
    draws, stream = 1000, generator(7)
    counts = sum(random_split(low, mask, 2, stream)[0].int() for _ in range(draws))
    assert not counts[~mask].any()
    expected = draws * 3 / 8
    # Binomial: a standard deviation of √(1000 · 3/8 · 5/8) = 15; eight counts within five of them.
    assert (counts[mask] - expected).abs().max() < 5 * math.sqrt(expected * 5 / 8)


@pytest.mark.parametrize("order", ["low-first", "high-first"])
@pytest.mark.parametrize("schedule", ["sweep", "interleaved"])
def test_the_random_split_takes_as_many_steps_of_the_same_sizes_as_lopti(batch, order, schedule):
    batch = replace(batch, advantages=torch.ones(ROWS, WIDTH))
    lopti = make_config(lopti_eta=0.4, lopti_order=order, lopti_schedule=schedule)
    control = replace(lopti, control="random-split")
    real, first, again, other = (
        plan_update(batch, config, generator(seed)).steps
        for config, seed in [(lopti, 0), (control, 0), (control, 0), (control, 1)]
    )
    assert [part.name for part in first] == [f"random-{part.name}" for part in real]
    sizes = [[(part.batch.num_tokens, part.num_tokens) for part in steps] for steps in (real, first)]
    assert sizes[0] == sizes[1]
    masks = [[part.batch.response_mask for part in steps] for steps in (real, first, again, other)]
    same = [[torch.equal(a, b) for a, b in zip(masks[1], theirs, strict=True)] for theirs in masks]
    assert not all(same[0])
    assert all(same[2])
    assert not all(same[3])


def factors_of(update: Update, batch: TokenBatch) -> list[float]:
    """What each response token's advantage was multiplied by, in the order of rows."""
    out = []
    for part in update.steps:
        ratio = part.batch.advantages / batch.advantages[rows_of(part, batch)]
        out += ratio[part.batch.response_mask].tolist()
    return out


def test_permuted_weights_are_reweights_factors_in_another_order(batch):
    batch = replace(batch, advantages=torch.linspace(-2, 2, ROWS * WIDTH, dtype=torch.float64).reshape(ROWS, WIDTH))
    before = batch.advantages.clone()
    config = make_config(reweight_alpha=0.3, control="permuted-weights")
    expected = [0.3 * math.exp(batch.old_logprobs[at]) + 0.7 for at in map(tuple, batch.response_mask.nonzero())]
    first, again, other = (plan_update(batch, config, generator(seed)) for seed in (0, 0, 1))
    found = factors_of(first, batch)
    ends = [0]
    for part in first.steps:  # each mini-batch keeps its own
        ends.append(ends[-1] + part.num_tokens)
        own = slice(*ends[-2:])
        assert sorted(found[own]) == pytest.approx(sorted(expected[own]), rel=1e-12)
    assert ends[-1] == len(expected)
    moved = sum(abs(a - b) > 1e-6 for a, b in zip(found, expected, strict=True))
    assert moved > 0.9 * len(expected)
    assert factors_of(again, batch) == found
    assert factors_of(other, batch) != found
    assert first.match is None
    assert first.settings == replace(config.loss, reweight_alpha=None)  # or the factors would come in twice
    assert torch.equal(batch.advantages, before)


def test_matched_norm_trains_plain_advantages_and_is_matched_to_reweight(batch):
    batch = replace(batch, advantages=torch.ones(ROWS, WIDTH))
    config = make_config(reweight_alpha=0.3, control="matched-norm")
    update = plan_update(batch, config, generator())
    assert update.settings == make_config().loss
    assert update.match == make_config(reweight_alpha=0.3).loss
    assert [part.name for part in update.steps] == ["all"] * 3
    for part, plain in zip(update.steps, split_steps(batch, 5, [("all", batch.response_mask)]), strict=True):
        assert torch.equal(part.batch.response_mask, plain.batch.response_mask)
        assert torch.equal(part.batch.advantages, plain.batch.advantages)


@pytest.mark.parametrize("control", ["random-split", "permuted-weights", "matched-norm"])
def test_a_control_of_both_methods_keeps_loptis_passes(batch, control):
    batch = replace(batch, advantages=torch.ones(ROWS, WIDTH, dtype=torch.float64))
    config = make_config(reweight_alpha=0.3, lopti_eta=0.4, control=control)
    real = plan_update(batch, replace(config, control=None), generator())
    update = plan_update(batch, config, generator())
    assert [part.batch.num_tokens for part in update.steps] == [part.batch.num_tokens for part in real.steps]
    assert (update.settings.reweight_alpha is None) == (control != "random-split")
    assert (update.match is None) == (control != "matched-norm")
