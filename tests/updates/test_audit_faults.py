"""What audits say of a small trainer's faults: each planted in a plain loop, which is written here, and named."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise, product

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file
from support.policies import VOCAB, make_policy, make_tokenizer
from support.tiers import every
from support.words import make_merging_tokenizer
from torch import Tensor

from gradscope.cli import main
from gradscope.gradients import TokenJacobian
from gradscope.objective import grpo_advantages
from gradscope.policy import Policy, float_parameters
from gradscope.rollouts import Response, TokenBatch, collate, write_rollouts
from gradscope.updates import Audit, TrainedLoss, audit

BETA, LOW, HIGH = 0.1, 0.2, 0.24
LOSS = TrainedLoss(kl_coef=BETA, clip_ratio_c=None)
MICRO = 4


@cache
def make_step(
    seed: int = 0, temperature: float = 0.7, kind: str = "qwen2", prompts: int = 4, *, ends: bool = False
) -> tuple[Policy, TokenBatch]:
    """An off-policy step of prompts' four responses, some with tool output between, with π_ref and rewards.

    ends: three of four responses end in the end token.
    """
    policy, draw = make_policy(kind), torch.Generator().manual_seed(seed)
    size, rows, rewards = len(make_tokenizer()), [], torch.randn(4 * prompts, generator=draw)
    advantages = grpo_advantages(rewards, torch.arange(len(rewards)) // 4)
    for row in range(len(rewards)):
        length = int(torch.randint(6, 14, (1,), generator=draw))
        ids = torch.randint(4, size, (3 + length,), generator=draw).tolist()
        ids[-1] = min(policy.stop_ids) if ends and row % 4 else ids[-1]
        mask = [True] * length
        if row % 3 == 0:
            mask[2:4] = [False, False]
        told = {"advantage": float(advantages[row]), "reward": float(rewards[row]), "response_mask": mask}
        rows.append(Response(ids[:3], ids[3:], group=row // 4, temperature=temperature, **told))
    batch = collate(rows)
    logprob = TokenJacobian(policy, batch).statistics.logprob
    noise = torch.randn(2, *logprob.shape, generator=draw)
    old, ref = (logprob + size * own for size, own in zip((0.15, 0.5), noise, strict=True))
    old, ref = (torch.where(batch.response_mask, own.clamp(max=0.0), torch.nan) for own in (old, ref))
    return policy, replace(batch, old_logprobs=old, ref_logprobs=ref)


@dataclass
class Trainer:
    """A loop over micro-batches that adds up the gradient of a clipped loss with KL and an entropy bonus."""

    policy: Policy
    batch: TokenBatch
    beta: float = BETA
    bonus: float = 0.0
    temperature: Tensor | None = None
    keep: Tensor | None = None
    """The mask, a number per token."""
    advantages: Tensor | None = None
    old: Tensor | None = None
    ref: Tensor | None = None
    clips: tuple[float, float] = (LOW, HIGH)
    counted: float | None = None
    """What the sum over all tokens is divided by; None: the tokens of the mask."""
    means_over: int | None = None
    """Responses over whose tokens means are taken, to be averaged; None: all."""
    weight: Callable[[int], float] = lambda start: 1.0
    """Of the micro-batch that starts there."""
    surrogate: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda ratio, cut, a: torch.minimum(ratio * a, cut * a)
    """Of π/π_old, that clipped, and Â."""
    log_softmax: Callable[[Tensor], Tensor] = lambda logits: torch.log_softmax(logits, -1)
    clip: tuple[str, float] | None = None
    """The norm that each micro-batch's gradient ("each"), or the sum after each ("sum"), is clipped to."""
    made: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None
    """The policy's part, of log π, π/π_old, Â and the mask, instead of the surrogate."""
    kl_where: Callable[[Tensor, Tensor], Tensor] | None = None
    kl_times: Callable[[Tensor], Tensor] | None = None
    """Of each response's geometric mean of π/π_old."""
    kl: Callable[[Tensor, Tensor], Tensor] = lambda own, ref: torch.expm1(ref - own) - (ref - own)
    keep_kl: Tensor | None = None
    keep_bonus: Tensor | None = None
    """KL's mask and the entropy's, where they have another."""
    round_own: Callable[[Tensor], Tensor] = lambda own: own
    """Of log π."""

    def gradient(self) -> dict[str, Tensor]:
        batch, named = self.batch, dict(float_parameters(self.policy.model))
        mask = batch.response_mask.float() if self.keep is None else self.keep.float()
        advantages = torch.nan_to_num(batch.advantages if self.advantages is None else self.advantages) * (mask != 0)
        old = batch.old_logprobs if self.old is None else self.old
        ref = batch.ref_logprobs if self.ref is None else self.ref
        at = batch.temperature if self.temperature is None else self.temperature
        sums = {name: torch.zeros_like(p) for name, p in named.items()}
        for start in range(0, len(batch), MICRO):
            rows = slice(start, start + MICRO)
            logits = self.policy.model(
                input_ids=batch.input_ids[rows], attention_mask=batch.attention_mask[rows].long(), use_cache=False
            ).logits[:, :-1]
            logprobs = self.log_softmax(logits / at[rows, None, None])
            own = logprobs.gather(2, batch.input_ids[rows, 1:, None])[..., 0]
            own = self.round_own(own)
            entropy = -(logprobs.exp() * logprobs).sum(-1)
            kept, a = mask[rows, 1:], advantages[rows, 1:]
            before, reference = (torch.where(x[rows, 1:].isnan(), own.detach(), x[rows, 1:]) for x in (old, ref))
            ratio = (own - before).exp()
            policy = self.surrogate(ratio, ratio.clamp(1 - self.clips[0], 1 + self.clips[1]), a)
            policy = policy if self.made is None else self.made(own, ratio, a, kept)
            kl = self.kl(own, reference)
            if self.kl_where is not None:
                kl = torch.where(self.kl_where(own.detach(), reference), kl, 0.0)
            if self.kl_times is not None:
                kl = kl * self.kl_times((((own - before) * kept).sum(1) / kept.sum(1)).exp())[:, None]
            kept_kl, kept_bonus = (
                kept if m is None else m[rows, 1:].float() for m in (self.keep_kl, self.keep_bonus)
            )
            terms = torch.where(kept != 0, policy * kept, 0.0)
            terms = terms - torch.where(kept_kl != 0, self.beta * kl * kept_kl, 0.0)
            terms = terms + self.bonus * entropy * kept_bonus
            if self.means_over is None:
                loss = -terms.sum() / (mask.sum() if self.counted is None else self.counted)
            else:
                of = torch.arange(len(batch)) // self.means_over
                sizes = torch.bincount(of, mask.sum(1))[of[rows]]
                loss = -(terms.sum(1) / sizes).sum() / len(of.unique())
            found = torch.autograd.grad(self.weight(start) * loss, [*named.values()], allow_unused=True)
            added = {name: gradient for name, gradient in zip(named, found, strict=True) if gradient is not None}
            how, most = self.clip or ("", 0.0)
            own = min(1.0, most / norm(added)) if how == "each" else 1.0
            for name, gradient in added.items():
                sums[name] += own * gradient
            if how == "sum":
                sums = {name: min(1.0, most / norm(sums)) * gradient for name, gradient in sums.items()}
        return sums


def by_token(batch: TokenBatch, values: Tensor) -> Tensor:
    return values[:, None].expand(batch.input_ids.shape)


def plant(fault: str, policy: Policy, batch: TokenBatch) -> Trainer:
    """The trainer with a fault."""
    rewards, mask = batch.rewards, batch.response_mask
    of_prompt, own = rewards.view(-1, 4), Trainer(policy, batch)
    if fault == "mask-advantages":
        keep = torch.where(mask, batch.advantages, 0.0)
        return replace(own, keep=keep, counted=float(keep.sum()))
    ids, lengths = batch.input_ids, batch.attention_mask.sum(1).tolist()
    no_ends = mask & (ids != min(policy.stop_ids))
    longest, shortest = (sorted(range(len(batch)), key=lambda row: sign * lengths[row]) for sign in (-1, 1))
    shifted = torch.where(mask.roll(1, 1) & mask, batch.ref_logprobs.roll(1, 1), torch.nan)
    rounded = lambda values: values.bfloat16().float()  # noqa: E731
    turns = {which: turn(batch, which) for which in ("first", "last")}
    ended = (mask & (ids == min(policy.stop_ids))).any(1, keepdim=True)
    widths = {"pads": spanned(batch).sum(1), "rows": torch.tensor(lengths)}
    padded = {
        name: lambda start, own=own: 1 / (MICRO * int(own[start : start + MICRO].max())) for name, own in widths.items()
    }
    size = torch.cat([-(-part.max() // 2).expand(len(part)) for part in widths["rows"].split(MICRO)])[:, None]
    place = batch.attention_mask.cumsum(1) - 1
    inside = mask & ~((place > 0) & (place % size == 0))
    return {
        "clips-swapped": lambda: replace(own, clips=(0.4, LOW)),
        "clips-of-log": lambda: replace(own, clips=(1 - math.exp(-LOW), math.exp(HIGH) - 1)),
        "no-dual-clip": lambda: own,
        "kl-reversed": lambda: replace(own, kl=lambda new, ref: torch.expm1(new - ref) - (new - ref)),
        "kl-in-advantages": lambda: replace(
            own, beta=0.0, advantages=batch.advantages - BETA * (batch.old_logprobs - batch.ref_logprobs)
        ),
        "kl-unmasked": lambda: replace(own, keep_kl=spanned(batch), batch=known(batch)),
        "entropy-unmasked": lambda: replace(own, bonus=0.01, keep_bonus=spanned(batch)),
        "old-bfloat16": lambda: replace(own, old=rounded(batch.old_logprobs)),
        "ref-bfloat16": lambda: replace(own, ref=rounded(batch.ref_logprobs)),
        "logprobs-bfloat16": lambda: replace(own, round_own=rounded),
        "first-turn": lambda: replace(own, keep=turns["first"], counted=float(mask.sum())),
        "last-turn-uncounted": lambda: replace(own, keep=turns["last"]),
        "unended": lambda: replace(own, keep=mask & ended, counted=float(mask.sum())),
        "unended-uncounted": lambda: replace(own, keep=mask & ended),
        "unended-first": lambda: replace(own, keep=mask & (ended | (batch.positions() == 0))),
        "pads-counted": lambda: replace(own, counted=len(batch) / MICRO, weight=padded["pads"]),
        "rows-counted": lambda: replace(own, counted=len(batch) / MICRO, weight=padded["rows"]),
        "chunk-means": lambda: replace(own, counted=1.0, keep=chunked(mask, 8)),
        "slice-starts": lambda: replace(own, keep=inside, counted=float(mask.sum())),
        "slice-starts-uncounted": lambda: replace(own, keep=inside),
        "kl-sign": lambda: replace(own, beta=-BETA),
        "no-kl": lambda: replace(own, beta=0.0),
        "kl-scaled": lambda: replace(own, beta=3 * BETA),
        "entropy": lambda: replace(own, bonus=0.01),
        "ref-late": lambda: replace(own, ref=shifted),
        "kl-clamped": lambda: replace(own, kl_where=lambda new, ref: new >= ref),
        "logprob-below": lambda: replace(own, keep=mask & (scores(policy, batch) > -4.0), counted=float(mask.sum())),
        "kl-sequence-ratio": lambda: replace(own, kl_times=lambda ratio: ratio),
        "kl-sequence-ratio-detached": lambda: replace(own, kl_times=torch.Tensor.detach),
        "parts": lambda: replace(own, means_over=8),
        "mask-alone-late": lambda: replace(own, keep=mask.roll(1, 1) & spanned(batch), advantages=filled(batch)),
        "mask-alone-early": lambda: replace(own, keep=mask.roll(-1, 1), advantages=filled(batch), batch=known(batch)),
        "clip-alone": lambda: replace(own, surrogate=lambda ratio, cut, a: cut * a),
        "clip-maximum": lambda: replace(own, surrogate=lambda ratio, cut, a: torch.maximum(ratio * a, cut * a)),
        "clip-ratios": lambda: replace(own, surrogate=lambda ratio, cut, a: torch.minimum(ratio, cut) * a),
        "clip-positive": lambda: replace(
            own, surrogate=lambda ratio, cut, a: torch.where(a > 0, torch.minimum(ratio, cut), ratio) * a
        ),
        "end-token": lambda: replace(own, keep=no_ends, counted=float(mask.sum())),
        "end-token-uncounted": lambda: replace(own, keep=no_ends),
        "old-longest-first": lambda: replace(own, old=reordered(batch, batch.old_logprobs, longest)),
        "ref-shortest-first": lambda: replace(own, ref=reordered(batch, batch.ref_logprobs, shortest)),
        "old-reversed": lambda: replace(own, old=reordered(batch, batch.old_logprobs, [*range(len(batch))][::-1])),
        "advantages-interleaved": lambda: replace(
            own, advantages=filled(batch)[torch.arange(len(batch)).view(-1, 4).T.flatten()]
        ),
        "advantages-longest-first-in-micro-batches": lambda: replace(
            own, advantages=filled(batch)[inner_order(lengths, range(0, len(batch), MICRO))]
        ),
        "old-longest-first-in-micro-batch": lambda: replace(
            own, old=reordered(batch, batch.old_logprobs, inner_order(lengths, [MICRO]))
        ),
        "log-softmax-bfloat16": lambda: replace(
            own, log_softmax=lambda logits: torch.log_softmax(logits.bfloat16(), -1).float()
        ),
        "logits-bfloat16": lambda: replace(
            own, log_softmax=lambda logits: torch.log_softmax(logits.bfloat16().float(), -1)
        ),
        "old-recomputed": lambda: replace(own, old=torch.full_like(batch.old_logprobs, torch.nan)),
        "no-clip": lambda: replace(own, clips=(1.0, 1e9)),
        "advantages-centred": lambda: replace(
            own, advantages=by_token(batch, (of_prompt - of_prompt.mean(1, keepdim=True)).flatten())
        ),
        "advantages-batch": lambda: replace(
            own, advantages=by_token(batch, (rewards - rewards.mean()) / (rewards.std() + 1e-6))
        ),
        "advantages-strided": lambda: replace(
            own, advantages=by_token(batch, grpo_advantages(rewards, torch.arange(len(batch)) % len(of_prompt)))
        ),
        "micro-batch-missing": lambda: replace(own, weight=lambda start: float(start != MICRO)),
        "mask-ignored": lambda: replace(own, keep=spanned(batch), advantages=filled(batch)),
        "ref-old": lambda: replace(own, ref=batch.old_logprobs),
        "advantages-rolled": lambda: replace(own, advantages=filled(batch).roll(4, 0)),
    }[fault]()


def chunked(mask: Tensor, size: int) -> Tensor:
    """Each token's weight in the mean over micro-batches of the mean over chunks of the mean over their tokens."""
    found = mask.double()
    for start in range(0, len(mask), MICRO):
        places = mask[start : start + MICRO].nonzero().tolist()
        chunks = [places[at : at + size] for at in range(0, len(places), size)]
        for chunk in chunks:
            for row, column in chunk:
                found[start + row, column] = MICRO / len(mask) / len(chunks) / len(chunk)
    return found


def turn(batch: TokenBatch, which: str) -> Tensor:
    """The first, or last, run of each response's kept tokens."""
    found = torch.zeros_like(batch.response_mask)
    for row, mask in enumerate(batch.response_mask.tolist()):
        edges = [at for at, (a, b) in enumerate(pairwise([False, *mask, False])) if a != b]
        start, end = edges[:2] if which == "first" else edges[-2:]
        found[row, start:end] = True
    return found


def scores(policy: Policy, batch: TokenBatch) -> Tensor:
    return TokenJacobian(policy, batch).statistics.logprob


def reordered(batch: TokenBatch, values: Tensor, order: list[int]) -> Tensor:
    """Each row with another's numbers from where its response begins, and 0 where that has ended."""
    found = torch.full_like(values, torch.nan)
    for row, other in enumerate(order):
        to, start = (int(batch.response_start[one]) for one in (row, other))
        own, length = (int(spanned(batch)[one].sum()) for one in (row, other))
        taken = torch.zeros(own)
        taken[: min(own, length)] = values[other, start : start + min(own, length)]
        found[row, to : to + own] = taken
    return found


def inner_order(lengths: list[int], starts: Iterable[int]) -> list[int]:
    """Rows of which the micro-batches that start there are sorted by length, the longest first."""
    found = [*range(len(lengths))]
    for start in starts:
        found[start : start + MICRO] = sorted(found[start : start + MICRO], key=lambda row: -lengths[row])
    return found


def known(batch: TokenBatch) -> TokenBatch:
    """The batch with π_old and π_ref of tokens that its mask drops, too."""
    lost, draw = spanned(batch) & ~batch.response_mask, torch.Generator().manual_seed(1)
    old, ref = (
        torch.where(lost, torch.randn(lost.shape, generator=draw) - 4, own)
        for own in (batch.old_logprobs, batch.ref_logprobs)
    )
    return replace(batch, old_logprobs=old, ref_logprobs=ref)


def spanned(batch: TokenBatch) -> Tensor:
    return batch.attention_mask & (batch.positions() >= 0)


def filled(batch: TokenBatch) -> Tensor:
    """Each response's advantage, also where its mask drops tokens."""
    return by_token(batch, torch.where(batch.response_mask, batch.advantages, -torch.inf).amax(1))


def check(trainer: Trainer, **settings: object) -> Audit:
    given = {"loss": LOSS, "micro_batch": MICRO} | settings
    return audit(trainer.policy, trainer.batch, trainer.gradient(), **given)


NAMED = (
    *("kl-sign", "no-kl", "entropy", "mask-advantages", "ref-late", "kl-clamped", "parts", "old-recomputed"),
    *("advantages-centred", "micro-batch-missing", "kl-sequence-ratio"),
    *("clip-alone", "end-token-uncounted", "old-longest-first", "mask-alone-late", "mask-alone-early"),
    *("advantages-longest-first-in-micro-batches", "old-longest-first-in-micro-batch"),
    *("kl-unmasked", "logprobs-bfloat16", "last-turn-uncounted", "unended-first", "pads-counted"),
    *("slice-starts-uncounted", "chunk-means"),
)
OTHERS = (
    "kl-sequence-ratio-detached",
    "kl-scaled",
    "logprob-below",
    "no-clip",
    "advantages-batch",
    "advantages-strided",
    "mask-ignored",
    "ref-old",
    "advantages-rolled",
    *("clip-maximum", "clip-ratios", "clip-positive", "end-token", "ref-shortest-first", "old-reversed"),
    "advantages-interleaved",
    *("clips-swapped", "clips-of-log", "no-dual-clip", "kl-reversed", "kl-in-advantages", "entropy-unmasked"),
    *("old-bfloat16", "ref-bfloat16", "first-turn", "unended", "unended-uncounted", "rows-counted"),
    "slice-starts",
)
"""Further ones."""
MEANT = {
    "no-dual-clip": replace(LOSS, clip_ratio_c=1.05),
    "clips-swapped": replace(LOSS, clip_ratio_high=0.4),
    "entropy-unmasked": replace(LOSS, entropy_coef=0.01),
}
"""What the trainer means to compute, if not LOSS."""


@pytest.mark.parametrize("fault", [*NAMED, *(pytest.param(fault, marks=pytest.mark.all) for fault in OTHERS)])
def test_a_fault_is_named_with_its_remedy(fault):
    prompts = 4 if fault == "parts" else 2  # two parts are no prompts
    policy, batch = make_step(temperature=1.0, prompts=prompts, ends="end" in fault)
    given = {"micro_batch": None if fault == "parts" else MICRO, "loss": MEANT.get(fault, LOSS)}
    found = check(plant(fault, policy, batch), **given)
    assert (found.kind, found.factor) == ("same", pytest.approx(1, abs=1e-3))
    if fault == "parts":  # of ranks that the log does not tell
        assert (found.aggregation, found.value) == ("parts", 2)
        return
    within = fault in ("pads-counted", "rows-counted", "chunk-means")
    assert found.fault == fault and found.remedies
    # With equally many responses in each, the mean over responses has the same padded denominators.
    assert found.aggregation in (("micro-batches", "sequence-mean") if within else ("token-mean",))
    assert found.part == (1 if fault in ("micro-batch-missing", "old-longest-first-in-micro-batch") else None)
    wanted = {"entropy": 0.01, "kl-scaled": 3.0, "advantages-rolled": 4, "chunk-means": 8}.get(fault)
    # Of a fit to eight numbers from float32 sums of the same terms, which agree to TIGHT = 2e-4.
    assert wanted is None or found.value == pytest.approx(wanted, rel=2e-3)


@pytest.mark.parametrize(
    ("fault", "size"),
    every(3, [
        ("ref-reversed-in-processes", 6), ("old-longest-first-in-prompts", 4),
        ("advantages-rolled-in-processes", 6), ("advantages-reversed-in-prompts", 4),
        ("old-shortest-first-in-processes", 6), ("ref-rolled-in-prompts", 4),
    ]),
)  # fmt: skip
def test_a_column_of_rows_in_another_order_within_parts_is_named(fault, size):
    """Of three prompts, or of two processes, which share the second prompt."""
    policy, batch = make_step(temperature=1.0, prompts=3)
    column, order = fault.split("-in-")[0].split("-", 1)
    lengths = batch.attention_mask.sum(1).tolist()
    key = {"reversed": lambda row: -row, "longest-first": lambda row: -lengths[row]}
    key |= {"shortest-first": lambda row: lengths[row], "rolled": lambda row: (row + 1) % size}
    rows = [row for at in range(0, len(batch), size) for row in sorted(range(at, at + size), key=key[order])]
    if column == "advantages":
        moved = filled(batch)[rows]
    else:
        moved = reordered(batch, getattr(batch, f"{column}_logprobs"), rows)
    trainer, processes = replace(Trainer(policy, batch), **{column: moved}), 2 if "processes" in fault else None
    found = check(trainer, micro_batch=None, processes=processes)
    assert (found.kind, found.fault, found.aggregation) == ("same", fault, "token-mean") and found.remedies
    assert found.part is None and found.factor == pytest.approx(1, abs=1e-3)


def test_an_entropy_bonus_without_its_gradient_is_named_and_one_with_it_is_sound():
    policy, batch = make_step(prompts=2)
    loss = replace(LOSS, entropy_coef=0.01)
    assert check(Trainer(policy, batch, bonus=0.01), loss=loss).kind == "same"
    found = check(Trainer(policy, batch), loss=loss)
    assert (found.kind, found.fault) == ("same", "no-entropy")


@pytest.mark.parametrize(
    ("first", "second"),
    every(6, [
        ("old-recomputed", "micro-batch-missing"), ("no-kl", "micro-batch-missing"), ("entropy", "old-recomputed"),
        ("kl-clamped", "advantages-centred"), ("no-kl", "advantages-centred"), ("entropy", "no-kl"),
    ]),
)  # fmt: skip
def test_two_faults_are_named_together(first, second):
    policy, batch = make_step(temperature=1.0, prompts=2)
    trainers, plain = [plant(name, policy, batch) for name in (first, second)], Trainer(policy, batch)
    changes = {
        name: value
        for trainer in trainers
        for name, value in vars(trainer).items()
        if value is not getattr(plain, name)
    }
    found = check(replace(plain, **changes))
    assert found.kind == "same" and {*found.fault.split("+")} == {first, second}


def test_what_a_batch_cannot_show_is_said():
    policy, batch = make_step()
    trainer = Trainer(policy, batch)
    assert check(trainer).unseen == ("retokenised",)  # for want of a tokenizer
    plain = replace(batch, old_logprobs=None, ref_logprobs=None, rewards=None)
    poor = Trainer(policy, plain, beta=0.0, old=torch.full_like(batch.old_logprobs, torch.nan), ref=batch.ref_logprobs)
    found = check(poor, loss=replace(LOSS, kl_coef=0.0))
    assert found.kind == "same"
    assert found.unseen == ("no-clip", "old-recomputed", "no-kl", "advantages-centred", "retokenised")


def norm(gradient: dict[str, Tensor]) -> float:
    return float(torch.cat([own.flatten() for own in gradient.values()]).norm())


def some_tokens(batch: TokenBatch, which: Tensor, count: int, seed: int) -> Tensor:
    """A mask of some tokens among these, at random."""
    places = which.nonzero()
    chosen = torch.zeros_like(which)
    drawn = places[torch.randperm(len(places), generator=torch.Generator().manual_seed(seed))[:count]]
    chosen[drawn[:, 0], drawn[:, 1]] = True
    return chosen


OTHERWISE = [("dropped", np.inf), ("sampled", 0.0), ("sampled", 3.0)]
"""Which tokens, and their weight over the right one."""


@pytest.mark.parametrize(("seed", "kind", "times"), every(30, [(n, *how) for n in range(10) for how in OTHERWISE]))
def test_few_tokens_of_another_weight_are_found_one_by_one(seed, kind, times):
    """Each by a step of matching pursuit; what is left is float32's rounding."""
    policy, batch = make_step()
    mask = batch.response_mask
    chosen = some_tokens(batch, spanned(batch) & ~mask if kind == "dropped" else mask, 5, seed)
    keep = mask + chosen * (1.0 if kind == "dropped" else times - 1)
    found = check(Trainer(policy, batch, keep=keep, advantages=filled(batch), counted=float(mask.sum())))
    assert found.kind == "tokens" and found.aggregation == "token-mean"
    assert bool(found.remedies) == (times == np.inf)  # what has lost some weight at random does not say why
    rows = found.explained
    assert set(rows["kind"]) == {"token"} and "common" not in rows
    starts = mask.int().argmax(1)
    named = {(row.response, row.position + int(starts[row.response])) for row in rows.itertuples()}
    planted = {tuple(place) for place in chosen.nonzero().tolist()}
    assert named <= planted
    # Those left out are, together, within float32's rounding of the gradient.
    left = torch.zeros_like(mask)
    for place in planted - named:
        left[place] = True
    rest = Trainer(policy, batch, keep=keep * left, advantages=filled(batch), counted=float(mask.sum())).gradient()
    assert norm(rest) < 5e-4 * norm(Trainer(policy, batch).gradient())
    assert rows["share"].sum() == pytest.approx(1, abs=1e-3)
    assert (rows["times"] == np.inf).all() if times == np.inf else (rows["times"] - times).abs().max() < 0.02


@pytest.mark.all
def test_tokens_that_gain_and_lose_their_whole_weight_are_told_apart():
    """The mask alone is late by one in three responses, which have KL too; ids stand for tokens without a text."""
    policy, batch = make_step(temperature=1.0, prompts=2)
    mask = batch.response_mask.clone()
    late = mask.roll(1, 1) & spanned(batch)
    mask[[0, 3, 6]] = late[[0, 3, 6]]
    own = Trainer(policy, batch, keep=mask, advantages=filled(batch), counted=float(batch.num_tokens))
    found = check(own, micro_batch=None)
    assert (found.kind, found.aggregation) == ("tokens", "token-mean") and "mask" in " ".join(found.remedies)
    rows = found.explained
    gained = rows[rows["position"] == 2]
    assert len(rows) == 9 and (rows["of"] == "loss").all() and len(gained) == 3 and np.isinf(gained["times"]).all()
    assert rows["times"].drop(gained.index).to_numpy() == pytest.approx(0, abs=0.02)
    assert (rows["token"] == "id " + rows["token_id"].astype(str)).all()
    assert "3 tokens in 3 responses" in found.verdict and "6 tokens in 3 responses" in found.verdict


@pytest.mark.parametrize("counted", every(2, ["without", "with padding"]))
def test_learned_positions_that_are_counted_with_padding_are_told(counted):
    """Rows padded on the left without position_ids, which GPT-2 then counts from the left edge."""
    policy, batch = make_step(temperature=1.0, kind="gpt2")
    batch = batch.select(range(4))
    named, total = dict(float_parameters(policy.model)), 0.0
    for row in range(4):
        ids, kept = batch.sequence(row)
        pads = row if counted == "with padding" else 0
        places = torch.arange(pads, pads + len(ids))
        logits = policy.model(input_ids=ids[None], position_ids=places[None], use_cache=False).logits[0, :-1]
        own = logits.log_softmax(-1).gather(1, ids[1:, None])[kept - 1, 0]
        total = total - (batch.advantages[row][batch.response_mask[row]] * own).sum() / batch.num_tokens
    found = torch.autograd.grad(total, [*named.values()], allow_unused=True)
    gradient = {name: own for name, own in zip(named, found, strict=True) if own is not None}
    log = replace(batch, old_logprobs=None, ref_logprobs=None, rewards=None)
    found = audit(policy, log, gradient, loss=replace(LOSS, kl_coef=0.0))
    if counted == "without":
        assert (found.kind, found.remedies) == ("same", ())
    else:
        assert found.kind == "other" and "position_ids" in " ".join(found.remedies)


@pytest.mark.parametrize("common", every(2, ["above-clip", "first+negative"]))
def test_tokens_that_are_named_are_told_by_what_they_alone_have_in_common(common):
    """Twice the weight where π/π_old is above the clip's range, but not cut, or at first tokens of negative Â."""
    policy, batch = make_step()
    ratio, mask = (scores(policy, batch) - batch.old_logprobs).exp(), batch.response_mask
    chosen = mask & (batch.advantages < 0) & (ratio > 1 + HIGH if common == "above-clip" else mask.cumsum(1) == 1)
    own = Trainer(policy, batch, keep=batch.response_mask + chosen * 1.0, counted=float(batch.response_mask.sum()))
    rows = check(own).explained
    assert set(rows["common"]) == {common} and len(rows) == chosen.sum() > 3
    assert rows["ratio"].to_numpy() == pytest.approx(ratio[chosen][rows["index"].rank().astype(int) - 1], rel=1e-5)
    assert (rows["advantage"] < 0).all()
    assert rows["times"].to_numpy() == pytest.approx(2, abs=0.02)


@pytest.mark.all
def test_a_token_of_a_set_has_its_whole_weight():
    """Last tokens have no weight but for three, and all others 1/.9 times theirs."""
    policy, batch = make_step()
    mask, rows = batch.response_mask, torch.arange(16)
    last = batch.input_ids.shape[1] - 1 - mask.flip(1).int().argmax(1)
    keep = mask.float()
    keep[rows[3:], last[3:]] = 0.0
    found = check(Trainer(policy, batch, keep=keep, counted=0.9 * float(mask.sum())))
    tokens = found.explained[found.explained["kind"] == "token"]
    assert found.kind == "tokens" and "last" in set(found.explained["kind"]) and len(tokens) == 3
    assert {*tokens["response"]} == {0, 1, 2}
    assert tokens["times"].to_numpy() == pytest.approx(1 / 0.9, abs=2e-3)
    assert found.explained.set_index("kind")["times"]["last"] == pytest.approx(0, abs=2e-3)


@pytest.mark.parametrize("how", every(2, ["sum", "each"]))
def test_clipping_inside_the_loop_is_told_with_its_norm(how):
    policy, batch = make_step(temperature=1.0, prompts=3)
    alone = (Trainer(policy, batch, weight=lambda start, own=own: float(start == own)) for own in range(0, 12, MICRO))
    most = 0.9 * sorted(norm(own.gradient()) for own in alone)[1]
    found = check(Trainer(policy, batch, clip=(how, most)))
    assert found.kind == "tokens" and set(found.explained["kind"]) == {"micro-batch"} and found.remedies
    assert found.explained["clip_norm"].to_numpy() == pytest.approx(most, rel=2e-3)


def test_parameters_that_are_wrong_are_told_by_their_kind():
    """Norms that have the sum over one of two ranks, and a layer that is scaled."""
    policy, batch = make_step(temperature=1.0, prompts=2)
    whole = Trainer(policy, batch).gradient()
    half = Trainer(policy, batch, weight=lambda start: float(start < MICRO)).gradient()
    norms = {name: half[name] if whole[name].dim() == 1 and "norm" in name else own for name, own in whole.items()}
    found = audit(policy, batch, norms, loss=LOSS, micro_batch=MICRO)
    assert (found.kind, found.odd_kind) == ("parameters", "norms") and found.remedies
    layer = {name: own * (1.5 if ".layers.1." in name else 1) for name, own in whole.items()}
    found = audit(policy, batch, layer, loss=LOSS, micro_batch=MICRO)
    assert (found.kind, found.odd_kind) == ("parameters", "layer 1")


@pytest.mark.parametrize(
    ("place", "named"),
    [("norm", "below the head"), ("layers.0", "below layer 1"), ("embed_tokens", "embedding")],
)
def test_a_backward_pass_that_breaks_is_told_by_where(place, named):
    """What goes back to a module's output is half of what it should be, as if a rank of two were missing."""
    policy, batch = make_step(temperature=1.0, prompts=2, kind="llama")

    def halve(_: object, __: object, output: Tensor | tuple[Tensor, ...]) -> None:
        hidden = output if isinstance(output, Tensor) else output[0]
        hidden.register_hook(lambda g: g * (torch.arange(g.shape[-1]) % 2))

    hook = policy.model.model.get_submodule(place).register_forward_hook(halve)
    gradient = Trainer(policy, batch).gradient()
    hook.remove()
    found = audit(policy, batch, gradient, loss=LOSS, micro_batch=MICRO)
    assert (found.kind, found.odd_kind, found.aggregation) == ("parameters", named, "token-mean") and found.remedies


@pytest.mark.parametrize("fault", every(2, ["log-softmax-bfloat16", "logits-bfloat16"]))
def test_a_softmax_of_rounded_logits_is_named(fault):
    policy, batch = make_step(temperature=1.0, prompts=2)
    found = check(plant(fault, policy, batch))
    # What is left is the order of rounding, which may be less than what tells float32's sums apart.
    assert found.kind in ("same", "rounding") and found.remedies
    assert (found.fault, found.precision, found.aggregation) == (fault, "bfloat16", "token-mean")


@pytest.mark.all
@pytest.mark.parametrize("seed", range(3))
def test_half_precisions_noise_is_not_explained_by_sets_of_tokens(seed):
    """Every token's weight is off at random, by which the gradient is off by twice what bfloat16 may hide."""
    policy, batch = make_step(prompts=2)
    noise = torch.randn(batch.input_ids.shape, generator=torch.Generator().manual_seed(seed))
    mask, whole = batch.response_mask.float(), Trainer(policy, batch).gradient()

    def shake(size: float) -> tuple[dict[str, Tensor], float]:
        found = Trainer(policy, batch, keep=mask * (1 + size * noise), counted=float(mask.sum())).gradient()
        return found, norm({name: found[name] - whole[name] for name in whole}) / norm(whole)

    gradient, away = shake(0.02 * 0.07 / shake(0.02)[1])
    assert away == pytest.approx(0.07, rel=0.05)
    log = replace(batch, run=replace(batch.run, precision="bfloat16"))
    found = audit(policy, log, gradient, loss=LOSS, micro_batch=MICRO)
    assert found.kind == "other" and found.explained.empty and found.remedies == ()


@pytest.mark.parametrize(
    ("fault", "value", "packs"),
    every(2, [
        ("packed-restarting", 4, [(0, 4)]), ("packed", 2, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        ("packed-bins-restarting", 32, [(0, 2), (2, 5)]), ("packed-restarting", 3, [(0, 3), (3, 4), (4, 7), (7, 8)]),
        ("packed", 2, [(0, 2)]), ("packed-bins", 64, [(0, 5), (5, 8)]),
    ]),
)  # fmt: skip
def test_packed_rows_that_see_each_other_are_named_with_their_number(fault, value, packs):
    """Rows as one, with plain causal attention, and the logged π_old in a clipped loss, whose ratios are others."""
    policy, batch = make_step(1, temperature=1.0, prompts=2)
    batch = batch.select(range(packs[-1][1]))
    named, total, restarting = dict(float_parameters(policy.model)), 0.0, "restarting" in fault
    for first, last in packs:
        rows = [batch.sequence(row)[0] for row in range(first, last)]
        ids, whole = torch.cat(rows)[None], sum(map(len, rows))
        places = torch.cat([torch.arange(len(own)) for own in rows]) if restarting else torch.arange(whole)
        settings = {"attention_mask": torch.ones_like(ids), "position_ids": places[None], "use_cache": False}
        logprobs = policy.model(input_ids=ids, **settings).logits[0].log_softmax(-1)
        before = 0
        for row, own in zip(range(first, last), rows, strict=True):
            kept, mask = batch.sequence(row)[1], batch.response_mask[row]
            new = logprobs[before + kept - 1].gather(1, own[kept, None])[:, 0]
            ratio, a = (new - batch.old_logprobs[row][mask]).exp(), batch.advantages[row][mask]
            total = total - torch.minimum(ratio * a, ratio.clamp(1 - LOW, 1 + HIGH) * a).sum() / batch.num_tokens
            before += len(own)
    gradients = torch.autograd.grad(total, [*named.values()], allow_unused=True)
    gradient = {name: own for name, own in zip(named, gradients, strict=True) if own is not None}
    log = replace(batch, ref_logprobs=None, rewards=None)
    micro_batch = None if "bins" in fault else MICRO
    found = audit(policy, log, gradient, loss=replace(LOSS, kl_coef=0.0), micro_batch=micro_batch)
    assert (found.kind, found.fault, found.value) == ("same", fault, value) and found.remedies
    assert found.aggregation == "token-mean" and found.factor == pytest.approx(1, abs=1e-4)


SAMPLER = -4.7
"""log μ of every token."""


def clipped(own: Tensor, ratio: Tensor, a: Tensor) -> Tensor:
    return torch.minimum(ratio * a, ratio.clamp(1 - LOW, 1 + HIGH) * a)


UNDETACHED = {
    "cispo:eps_high=1.3": (lambda own, ratio, kept: ratio.clamp(max=1.3), lambda own, ratio, a: own * a),
    "reweight:alpha=0.9": (lambda own, ratio, kept: 0.9 * own.exp() + 0.1, clipped),
    "dft": (lambda own, ratio, kept: own.exp(), lambda own, ratio, a: own),
    "tis:high=2": (lambda own, ratio, kept: (own - SAMPLER).exp().clamp(max=2), clipped),
    "sequence-tis:high=3": (
        lambda own, ratio, kept: ((own - SAMPLER) * kept).sum(1, keepdim=True).exp().clamp(max=3),
        clipped,
    ),
    "icepop:low=0.8,high=3": (
        lambda own, ratio, kept: (own - SAMPLER).exp() * ((own - SAMPLER).exp().clamp(0.8, 3) == (own - SAMPLER).exp()),
        lambda own, ratio, a: own * a,
    ),
}
"""A weighting, its weight or factor, of log π, π/π_old and the mask, and what that multiplies."""


@pytest.mark.parametrize(
    ("weighting", "detached"), every(3, [(name, how) for how in (False, True) for name in UNDETACHED])
)
def test_a_weight_that_is_not_detached_is_named(weighting, detached):
    policy, batch = make_step(temperature=5.0, prompts=2)
    weight, value = UNDETACHED[weighting]
    log = replace(batch, ref_logprobs=None, rewards=None)
    trainer = Trainer(policy, log, beta=0.0, ref=batch.ref_logprobs)
    if "cispo" not in weighting:  # on-policy, so that π_old and π are one
        none = torch.full_like(batch.old_logprobs, torch.nan)
        mu = torch.where(batch.response_mask, SAMPLER, torch.nan)
        trainer = replace(trainer, batch=replace(log, old_logprobs=None, sampler_logprobs=mu), old=none)

    def made(own: Tensor, ratio: Tensor, a: Tensor, kept: Tensor) -> Tensor:
        factor = weight(own, ratio, kept)
        return (factor.detach() if detached else factor) * value(own, ratio, a)

    # Reweight as a setting of the loss, too.
    loss = TrainedLoss(weighting=weighting, kl_coef=0.0, clip_ratio_c=None)
    if weighting.startswith("reweight"):
        loss = replace(loss, weighting=None, reweight_alpha=0.9)
    found = check(replace(trainer, made=made), loss=loss)
    assert (found.kind, found.fault) == ("same", None if detached else "not-detached")
    assert found.aggregation == "token-mean" and bool(found.remedies) != detached
    assert found.factor == pytest.approx(1, abs=1e-4)


def test_a_logged_correction_for_the_sampler_that_is_not_detached_is_named():
    """The log's advantages are corrected; some tokens are at the cap of 1, where the correction is constant."""
    policy, batch = make_step(temperature=5.0, prompts=2)
    none, mu = torch.full_like(batch.old_logprobs, torch.nan), torch.where(batch.response_mask, SAMPLER, torch.nan)
    correction = (scores(policy, batch) - SAMPLER).exp().clamp(max=1)
    known = {"ref_logprobs": None, "rewards": None, "old_logprobs": None, "sampler_logprobs": mu}
    log = replace(batch, advantages=batch.advantages * correction, **known)
    assert 0 < (correction[batch.response_mask] == 1).sum() < batch.num_tokens

    def made(own: Tensor, ratio: Tensor, a: Tensor, kept: Tensor) -> Tensor:
        return (own - SAMPLER).exp().clamp(max=1) * clipped(own, ratio, a)

    trainer = Trainer(policy, log, beta=0.0, ref=batch.ref_logprobs, old=none, made=made, advantages=batch.advantages)
    found = check(trainer, loss=TrainedLoss(kl_coef=0.0, clip_ratio_c=None))
    assert (found.kind, found.fault, found.aggregation) == ("same", "not-detached", "token-mean")


@pytest.mark.all
def test_prompts_that_see_the_padding_before_them_are_named():
    """Prompts of 3, 2, 2 and 1 tokens, padded on the left in pairs, and no attention_mask."""
    policy, batch = make_step(temperature=1.0)
    pad, some = policy.model.config.pad_token_id, []
    for row, size in enumerate((3, 2, 2, 1)):
        ids, kept = batch.sequence(row)
        advantage, mask = float(batch.advantages[row][kept[0]]), batch.response_mask[row][spanned(batch)[row]]
        told = {"advantage": advantage, "response_mask": mask.tolist(), "temperature": 1.0}
        some.append(Response(ids[3 - size : 3].tolist(), ids[3:].tolist(), group=0, **told))
    named, total, log = dict(float_parameters(policy.model)), 0.0, collate(some)
    for row, pads in enumerate((0, 1, 0, 1)):
        ids, kept = log.sequence(row)
        seen = torch.cat([torch.full((pads,), pad), ids])
        logits = policy.model(input_ids=seen[None], use_cache=False).logits[0]
        own = logits[pads + kept - 1].log_softmax(-1).gather(1, ids[kept, None])[:, 0]
        total = total - (log.advantages[row][log.response_mask[row]] * own).sum() / log.num_tokens
    gradients = torch.autograd.grad(total, [*named.values()], allow_unused=True)
    gradient = {name: own for name, own in zip(named, gradients, strict=True) if own is not None}
    found = audit(policy, log, gradient, loss=replace(LOSS, kl_coef=0.0), micro_batch=2)
    assert (found.kind, found.fault, found.value) == ("same", "pads-seen", 2) and found.remedies


@cache
def make_mergeable_step(seed: int = 0) -> tuple[Policy, TokenBatch]:
    """A step of responses that end in the end token, half of them as their tokenizer makes them of their text."""
    policy, draw = make_policy("qwen2", sharpness=0.5), torch.Generator().manual_seed(seed)
    policy, rows = replace(policy, tokenizer=make_merging_tokenizer()), []
    for row in range(8):
        prompt, ids = (torch.randint(4, VOCAB, (size,), generator=draw).tolist() for size in (4, 6 + row % 3))
        ids = policy.encode_response(policy.decode(ids)) if row % 2 else ids
        ids.append(min(policy.stop_ids))
        advantage, mask = float(torch.randn(1, generator=draw)), [place != 2 for place in range(len(ids))]
        rows.append(Response(prompt, ids, group=row // 4, advantage=advantage, response_mask=mask, temperature=1.0))
    batch = collate(rows)
    noise = torch.randn(2, *batch.input_ids.shape, generator=draw)
    old, ref = (scores(policy, batch) + size * own for size, own in zip((0.15, 0.5), noise, strict=True))
    old, ref = (torch.where(batch.response_mask, own.clamp(max=0.0), torch.nan) for own in (old, ref))
    return policy, replace(batch, old_logprobs=old, ref_logprobs=ref)


def encoded_again(policy: Policy, batch: TokenBatch, how: str) -> tuple[TokenBatch, int]:
    """The batch of the ids of the text, and how many rows changed. A token at the same letters as
    one before has its numbers; another has the mask of the token that its first letter was in."""
    rows, sources, changed = [], [], 0
    for row, start in enumerate(batch.response_start.tolist()):
        ids, sampled = (own.tolist() for own in batch.sequence(row))
        begin = 0 if how == "retokenised-whole" else start
        text = policy.tokenizer.decode(ids[begin:], skip_special_tokens=how == "retokenised-stripped")
        new = ids[:begin] + policy.tokenizer(text).input_ids
        where = {span: place for place, span in enumerate(letters(policy, ids))}
        inside = [
            next(place for (low, high), place in where.items() if low <= first < high)
            for first, _ in letters(policy, new)
        ]
        mask = [place in sampled for place in inside]
        changed += new != ids
        first = next(place for place, own in enumerate(inside) if own >= start)
        told = {"response_mask": mask[first:], "advantage": float(batch.advantages[row, start])}
        rows.append(Response(new[:first], new[first:], group=row // 4, temperature=1.0, **told))
        sources.append([where.get(span) for span in letters(policy, new)])
    found = collate(rows)
    for name in ("old_logprobs", "ref_logprobs"):
        moved, own = torch.full(found.input_ids.shape, torch.nan), getattr(batch, name)
        for row, source in enumerate(sources):
            for place, other in enumerate(source):
                moved[row, place] = torch.nan if other is None else own[row, other]
        found = replace(found, **{name: moved})
    return found, changed


def letters(policy: Policy, ids: list[int]) -> list[tuple[int, int]]:
    """Where each token begins and ends in the text."""
    ends = np.cumsum([0, *(len(policy.decode([token])) for token in ids)]).tolist()
    return [*pairwise(ends)]


@pytest.mark.parametrize(
    "fault",
    [
        *("retokenised", "retokenised+old-recomputed"),
        *(pytest.param(f"retokenised-{how}", marks=pytest.mark.all) for how in ("whole", "stripped")),
    ],
)
def test_responses_that_are_decoded_and_encoded_again_are_named_with_their_number(fault):
    policy, batch = make_mergeable_step()
    trained, changed = encoded_again(policy, batch, fault.split("+")[0])
    trained = replace(trained, old_logprobs=trained.old_logprobs * (torch.nan if "+" in fault else 1.0))
    found = audit(policy, batch, Trainer(policy, trained).gradient(), loss=LOSS, micro_batch=MICRO)
    assert (found.kind, found.fault, found.value) == ("same", fault, changed) and changed
    assert found.aggregation == "token-mean" and found.factor == pytest.approx(1, abs=1e-4) and found.remedies


@pytest.mark.parametrize("seed", every(20, range(20)))
def test_sampled_ids_are_not_taken_for_encoded_ones(seed):
    policy, batch = make_mergeable_step(seed)
    found = check(Trainer(policy, batch))
    assert (found.kind, found.fault) == ("same", None) and "retokenised" not in found.unseen
    assert "retokenised" in check(Trainer(policy, batch[1::2])).unseen  # which are as their text is encoded


def make_conversations(seed: int = 0, begin: str = "<think>", end: str = "</think>") -> tuple[Policy, TokenBatch]:
    """A step of responses of one to three turns, all but some with thinking, between which the mask drops tokens."""
    tokenizer = make_tokenizer(others=(begin, end, "\n"))
    tokenizer.chat_template = f"{{{{ messages[-1].content.split('{end}')[-1] }}}}"
    policy, draw = replace(make_policy("qwen2"), tokenizer=tokenizer), torch.Generator().manual_seed(seed)
    first, last, blank = (tokenizer.convert_tokens_to_ids(word) for word in (begin, end, "\n"))

    def some(size: int) -> list[int]:
        return torch.randint(4, VOCAB - 3, (size,), generator=draw).tolist()

    rows = []
    for row in range(8):
        ids, mask = [], []
        for turn in range(1 + row % 3):
            said = [first, *some(2), last, *[blank] * (row % 2)] * (row + turn != 4) + some(2)
            other = some(2) * (turn > 0)
            ids, mask = ids + other + said, mask + [False] * len(other) + [True] * len(said)
        advantage = float(torch.randn(1, generator=draw))
        prompt = [*some(1), first, *some(1), last, *some(1)]
        rows.append(Response(prompt, ids, group=row // 4, advantage=advantage, response_mask=mask))
    batch = replace(collate(rows), temperature=torch.ones(8))
    noise = torch.randn(2, *batch.input_ids.shape, generator=draw)
    old, ref = (scores(policy, batch) + size * own for size, own in zip((0.15, 0.5), noise, strict=True))
    old, ref = (torch.where(batch.response_mask, own.clamp(max=0.0), torch.nan) for own in (old, ref))
    return policy, replace(batch, old_logprobs=old, ref_logprobs=ref)


def without_thinking(batch: TokenBatch, fault: str) -> tuple[TokenBatch, int]:
    """The batch without the thinking of turns before the last, token by token, and how many rows changed."""
    first, last, blank, rows, gone = VOCAB - 3, VOCAB - 2, VOCAB - 1, [], 0
    for row, start in enumerate(batch.response_start.tolist()):
        ids, kept = batch.sequence(row)[0].tolist(), batch.response_mask[row][batch.attention_mask[row]].tolist()
        offset = int(batch.attention_mask[row].int().argmax())
        start, begun, stay = start - offset, False, []
        final = max(place for place in range(len(ids)) if not kept[place])  # the last turn comes after it
        for place, one in enumerate(ids):
            begun |= one == first
            ended = "blanks" in fault and one == blank and bool(place) and ids[place - 1] == last
            early = place < final and ("prompts" in fault or place >= start)
            stay += [] if (begun or ended) and early else [place]
            begun &= one != last
        gone += len(stay) < len(ids)
        rows.append((offset, ids, kept, start, stay))
    made = [
        Response(
            *([ids[p] for p in stay if (p < start) is before] for before in (True, False)),
            group=row // 4, temperature=1.0, advantage=float(batch.advantages[row, offset + start]),
            response_mask=[kept[p] for p in stay if p >= start],
        )
        for row, (offset, ids, kept, start, stay) in enumerate(rows)
    ]  # fmt: skip
    found = collate(made)
    for name in ("old_logprobs", "ref_logprobs"):
        moved = torch.full(found.input_ids.shape, torch.nan)
        for row, (offset, *_, stay) in enumerate(rows):
            at = int(found.attention_mask[row].int().argmax())
            moved[row, at : at + len(stay)] = getattr(batch, name)[row, [offset + p for p in stay]]
        found = replace(found, **{name: moved})
    return found, gone


@pytest.mark.parametrize(
    ("fault", "begin", "end"),
    every(2, [
        ("thinking-dropped", "<think>", "</think>"), ("thinking-dropped-blanks", "<think>", "</think>"),
        ("thinking-dropped-prompts+old-recomputed", "[THINK]", "[/THINK]"),
        ("thinking-dropped-prompts-blanks", "<think>", "</think>"),
    ]),
)  # fmt: skip
def test_thinking_that_a_chat_template_drops_is_named_with_its_number(fault, begin, end):
    policy, batch = make_conversations(begin=begin, end=end)
    trained, changed = without_thinking(batch, fault.split("+")[0])
    trained = replace(trained, old_logprobs=trained.old_logprobs * (torch.nan if "+" in fault else 1.0))
    found = audit(policy, batch, Trainer(policy, trained).gradient(), loss=LOSS, micro_batch=MICRO)
    assert (found.kind, found.fault, found.value) == ("same", fault, changed)
    assert len(found.remedies) == 1 and found.aggregation == "token-mean"
    assert found.factor == pytest.approx(1, abs=1e-4)


def test_advantages_of_another_grouping_are_named_with_what_is_added_to_the_deviation():
    """TRL's 1e-4, as the log's advantages show, and .05, which is given."""
    policy, batch = make_step(temperature=1.0, prompts=2)
    groups, rewards = torch.arange(8) // 4, batch.rewards

    def step(eps: float) -> Trainer:
        own = by_token(batch, grpo_advantages(rewards, groups, eps=eps))
        log = replace(batch, advantages=torch.where(batch.response_mask, own, torch.nan))
        return Trainer(policy, log, advantages=by_token(batch, grpo_advantages(rewards, torch.arange(8) % 2, eps=eps)))

    assert check(step(1e-4)).fault == "advantages-strided"
    assert check(step(0.05), loss=replace(LOSS, advantage_eps=0.05)).fault == "advantages-strided"


WHITENINGS = [
    *(("micro-batches", "padded"), ("micro-batches", "tokens"), ("batch", "padded"), ("parts", "tokens")),
    *(("processes", "padded"), ("micro-batches", "credit")),
]
"""Where advantages are whitened again, and over what; credit: over tokens, of advantages by token."""


def whiten(values: Tensor, mask: Tensor, part: Tensor, over: str) -> Tensor:
    """Subtract the mean and divide by the deviation, of each part."""
    found = values.clone()
    for one in part.unique():
        rows = part == one
        own = values[rows].flatten() if over == "padded" else values[rows][mask[rows]]
        found[rows] = (values[rows] - own.mean()) / own.std(correction=int(over != "padded"))
    return found * mask


@pytest.mark.parametrize(("place", "over"), every(6, WHITENINGS))
def test_advantages_that_are_whitened_again_are_named(place, over):
    policy, batch = make_step(temperature=1.0, prompts=4 if place == "processes" else 2)
    noise = torch.randn(batch.input_ids.shape, generator=torch.Generator().manual_seed(0))
    log = replace(batch, rewards=None, advantages=batch.advantages + noise * (over == "credit"))
    size = {"micro-batches": MICRO, "parts": MICRO, "processes": 8, "batch": len(batch)}[place]
    values = torch.where(batch.response_mask, log.advantages, 0.0)
    moved = whiten(values, batch.response_mask, torch.arange(len(batch)) // size, over)
    known = {"micro_batch": MICRO if place == "micro-batches" else None}
    known |= {"processes": 2 if place == "processes" else None}
    found = check(Trainer(policy, log, advantages=moved), **known)
    assert (found.kind, found.fault, found.aggregation) == ("same", f"advantages-whitened-in-{place}", "token-mean")
    assert found.value == (2 if place == "parts" else None) and found.remedies


def test_whitening_that_turns_signs_beside_a_clip_is_named():
    """Other tokens are clipped then, which no line through the log's advantages gives at once."""
    policy, batch = make_step(temperature=1.0, prompts=2)
    values = torch.where(batch.response_mask, batch.advantages + 1.2, 0.0)
    log = replace(batch, rewards=None, advantages=torch.where(batch.response_mask, values, torch.nan))
    moved = whiten(values, batch.response_mask, torch.arange(len(batch)) // MICRO, "tokens")
    assert ((values > 0) & (moved < 0)).sum() > 5
    found = check(Trainer(policy, log, advantages=moved), micro_batch=MICRO)
    assert (found.kind, found.fault) == ("same", "advantages-whitened-in-micro-batches")


@pytest.mark.all
@pytest.mark.parametrize("seed", range(6))
def test_advantages_of_few_values_are_not_said_to_be_whitened(seed):
    """A line through two values in each micro-batch says nothing, and none goes through weights at random."""
    policy, batch = make_step(seed, temperature=1.0, prompts=2)
    few = by_token(batch, torch.tensor([1.0, -1.0, -1.0, 1.0, -0.5, -0.5, 2.0, -0.5]))
    log = replace(batch, rewards=None, advantages=torch.where(batch.response_mask, few, torch.nan))
    moved = whiten(torch.where(batch.response_mask, few, 0.0), batch.response_mask, torch.arange(8) // MICRO, "padded")
    assert "whitened" not in str(check(Trainer(policy, log, advantages=moved)).fault)
    noise = torch.rand(8, generator=torch.Generator().manual_seed(seed))
    found = check(Trainer(policy, replace(batch, rewards=None), advantages=filled(batch) * (0.5 + noise)[:, None]))
    assert found.kind == "tokens" and found.fault is None


def test_a_gradient_that_is_nearly_a_readings_needs_no_explanation():
    """Off by .1 % at random, more than float32's sums and less than any part that is looked for."""
    policy, batch = make_step(temperature=1.0, prompts=2)
    noise = torch.randn(8, generator=torch.Generator().manual_seed(0))
    keep = batch.response_mask * (1 + 1e-3 * noise)[:, None]
    found = check(Trainer(policy, batch, keep=keep, counted=float(batch.response_mask.sum())))
    assert found.kind == "same" and found.explained.empty


@pytest.mark.parametrize(("times", "seed"), every(6, product([2.0, 0.5, -1.0], [1, 3])))
def test_a_response_that_counts_several_times_is_found_by_the_gram(times, seed):
    """Micro-batches of nearly as many tokens each, whose mean of means is nearly the mean over tokens."""
    policy, batch = make_step(seed, prompts=2)
    counts, own = batch.response_mask.view(2, -1).sum(1), torch.arange(8) == 5
    assert 0 < abs(float(counts[0] / counts[1]) - 1) < 0.04
    keep = batch.response_mask * torch.where(own, times, 1.0)[:, None]
    gradient, alone = (
        Trainer(policy, batch, keep=some, counted=float(batch.response_mask.sum())).gradient()
        for some in (keep, batch.response_mask * own[:, None])
    )
    found = audit(policy, batch, gradient, loss=LOSS, micro_batch=MICRO)
    [row] = found.explained.to_dict("records")
    assert (found.kind, found.aggregation, row["kind"], row["index"]) == ("tokens", "token-mean", "response", 5)
    # float32 sums of the same terms agree to TIGHT = 2e-4.
    assert row["times"] == pytest.approx(times, abs=2e-4 * norm(gradient) / norm(alone))
    assert row["share"] == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("average", every(2, ["token-mean", "sequence-mean"]))
def test_rows_that_are_repeated_to_fill_up_ranks_are_told_with_the_denominator(average):
    """The first two of eight count twice, and so do denominators."""
    policy, batch = make_step(prompts=2)
    times, sizes = torch.tensor([2.0, 2.0, *[1.0] * 6]), batch.response_mask.sum(1)
    units = sizes.float() if average == "token-mean" else torch.ones(8)
    own, counted = times * units / sizes, float(times @ units)
    found = check(Trainer(policy, batch, keep=batch.response_mask * own[:, None], counted=counted))
    assert (found.kind, found.aggregation) == ("tokens", average) and "pad_dataproto" in " ".join(found.remedies)
    assert found.factor == pytest.approx(float(units.sum()) / counted, rel=1e-3)
    told = found.explained.set_index(["kind", "index"])["times"] / found.factor
    assert told.to_dict() == pytest.approx({("all", 0): 1, ("response", 0): 2, ("response", 1): 2}, rel=2e-3)
    assert f"({counted:.0f} " in found.verdict and f" {units.sum():.0f})" in found.verdict


@pytest.mark.all
def test_advantages_that_are_clipped_are_found_by_the_policys_part_of_responses():
    """KL keeps its weight, so that only the policy's part is a multiple; no ratio is beyond a clip."""
    policy, batch = make_step(temperature=1.0)
    log = replace(batch, old_logprobs=None, rewards=None)
    own = Trainer(policy, batch, old=torch.full(batch.input_ids.shape, torch.nan))
    found = audit(policy, log, replace(own, advantages=batch.advantages.clamp(-1, 1)).gradient(), loss=LOSS)
    assert found.kind == "tokens" and set(found.explained["of"]) == {"policy"}
    exact = torch.where(batch.response_mask, batch.advantages.abs(), 0.0).amax(1)
    wanted = {row: 1 / float(own) for row, own in enumerate(exact) if own > 1.03}
    assert found.explained.set_index("index")["times"].to_dict() == pytest.approx(wanted, rel=2e-3)


@pytest.mark.all
def test_decay_in_the_loss_is_found_with_its_coefficient():
    policy, batch = make_step(temperature=1.0)
    gradient = Trainer(policy, batch).gradient()
    for name, parameter in float_parameters(policy.model):
        gradient[name] += 0.01 * parameter.detach()
    [row] = audit(policy, batch, gradient, loss=LOSS, micro_batch=MICRO).explained.to_dict("records")
    assert row["kind"] == "decay" and row["times"] == pytest.approx(0.01, rel=1e-3)


@pytest.mark.all
def test_prompts_of_unlike_weights_are_found_where_no_reward_tells_why():
    """Advantages not divided by the standard deviation, which then is their prompt's multiple."""
    policy, batch = make_step()
    trainer = replace(plant("advantages-centred", policy, batch), beta=0.0)
    log = replace(batch, rewards=None)
    found = audit(policy, log, trainer.gradient(), loss=replace(LOSS, kl_coef=0.0), micro_batch=None)
    stds = batch.rewards.view(4, 4).std(1)
    rows = found.explained.set_index("index")["times"]
    assert set(found.explained["kind"]) == {"prompt"} and found.kind == "tokens"
    assert rows.to_dict() == pytest.approx({index: float(stds[index]) for index in rows.index}, rel=1e-3)


def test_what_half_precision_hides_is_said_with_its_size():
    """A token of which so much is dropped that 1 % of the gradient is missing, a third of what bfloat16 may hide."""
    policy, batch = make_step()
    mask, whole = batch.response_mask.float(), Trainer(policy, batch).gradient()

    def drop(share: float) -> tuple[dict[str, Tensor], float]:
        keep = mask.clone()
        keep[1, keep[1].nonzero()[4]] -= share
        gradient = Trainer(policy, batch, keep=keep, counted=float(mask.sum())).gradient()
        return gradient, norm({name: gradient[name] - whole[name] for name in whole}) / norm(whole)

    gradient, away = drop(0.01 / drop(1.0)[1])
    assert away == pytest.approx(0.01, rel=1e-2)
    found = audit(policy, batch, {n: g.bfloat16() for n, g in gradient.items()}, loss=LOSS, micro_batch=MICRO)
    assert found.kind == "rounding" and away < found.hidden < 0.05 and found.explained.empty


CASES = [
    (seed, kind, temperature, means, clips, bonus)
    for seed in range(300)
    for kind in [("qwen2", "llama", "gpt2")[seed % 3]]
    for temperature in [(0.7, 1.0)[seed // 3 % 2]]
    for means in [(None, 1, MICRO)[seed // 6 % 3]]
    for clips in [((LOW, HIGH), (0.1, 0.1))[seed // 18 % 2]]
    for bonus in [(0.0, 0.003)[seed // 36 % 2]]
]


@pytest.mark.parametrize("case", every(100, range(len(CASES))))
def test_a_sound_step_gives_no_alarm(case):
    seed, kind, temperature, means, clips, bonus = CASES[case]
    policy, batch = make_step(seed, temperature, kind)
    low, high = clips
    loss = replace(LOSS, clip_ratio_low=low, clip_ratio_high=high, entropy_coef=bonus)
    trainer = Trainer(policy, batch, bonus=bonus, clips=clips, means_over=means)
    found = check(trainer, loss=loss)
    assert (found.kind, found.fault, found.odd) == ("same", None, ()) and found.explained.empty
    assert found.aggregation == {None: "token-mean", 1: "sequence-mean", MICRO: "micro-batches"}[means]
    assert found.factor == pytest.approx(1, abs=1e-4) and found.remedies == ()


def test_the_command_writes_what_explains_the_rest(tmp_path, capsys):
    policy, batch = make_step(prompts=2)
    policy.model.save_pretrained(tmp_path / "policy")
    make_tokenizer().save_pretrained(tmp_path / "policy")
    write_rollouts(tmp_path / "step.jsonl", [*batch.rows()])
    keep = batch.response_mask * torch.where(torch.arange(8) == 5, 2.0, 1.0)[:, None]
    save_file(
        Trainer(policy, batch, keep=keep, counted=float(batch.response_mask.sum())).gradient(),
        tmp_path / "grad.safetensors",
    )
    command = ["audit", str(tmp_path / "policy"), str(tmp_path / "step.jsonl"), "--kl-coef", str(BETA)]
    command += ["--clip-ratio-c", "none", "--gradient", str(tmp_path / "grad.safetensors")]
    main([*command, "--out", str(tmp_path / "out")])
    rows = pd.read_csv(tmp_path / "out" / "explained.csv")
    assert rows[["kind", "index"]].to_numpy().tolist() == [["response", 5]]
    assert "To do" in (tmp_path / "out" / "verdict.txt").read_text() and "To do" in capsys.readouterr().out


@pytest.mark.parametrize(("by", "name"), every(2, [(1, "teacher-late"), (-1, "teacher-early"), (0, None)]))
def test_a_teacher_that_is_shifted_is_named(by, name):
    """Of a distillation on sampled tokens, w = log ν − log π, whose loss has no advantages."""
    policy, batch = make_step(temperature=1.0)
    own, mask = scores(policy, batch), batch.response_mask
    teacher = torch.where(mask, batch.ref_logprobs, torch.nan)
    log = replace(batch, advantages=None, rewards=None, old_logprobs=None, ref_logprobs=None, teacher_logprobs=teacher)
    moved = teacher.roll(by, 1) if by else teacher
    weights = torch.where(mask & ~moved.isnan() & mask.roll(by, 1), moved - own, 0.0)
    trainer = Trainer(
        *(policy, batch), beta=0.0, advantages=weights, old=torch.full_like(own, torch.nan), clips=(1.0, 1e9)
    )
    loss = TrainedLoss(weighting="opd", kl_coef=0.0)
    found = audit(policy, log, trainer.gradient(), loss=loss, micro_batch=MICRO)
    assert (found.kind, found.fault) == ("same", name)
