"""The token weightings in the literature, in closed form from the columns of a token table.

A weighting gives the factor on ∇ log π_t in the gradient of its loss: w_t = −N · ∂loss/∂ log π_t, with N kept tokens in
the batch. Notation: π is the policy, π_old the one before the step, r = π/π_old, Â the advantage, s = −log π_old, H the
entropy, sg stop-gradient; `plain` is GRPO's weight, Eq. 2's r·Â·I_trust (arXiv:2505.12929). k = π_old/π_sampler is the
mismatch between trainer and sampler, K = Π_t k_t that of a whole response. Thresholds over a batch (quantiles,
covariances) are over all given tokens. A response's mean or product, as in GSPO and GMPO, is part of the weight; how
losses add up over responses is not (see `aggregation`). All weightings are in one file, to be read side by side.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from gradscope.errors import InputError, checked
from gradscope.objective.equations import kl_slope
from gradscope.objective.rewardless import REWARDLESS
from gradscope.objective.spelling import nearest, parse_parameters
from gradscope.objective.step_rule import StepRule
from gradscope.objective.weighting import Number, Tokens, Weighting, Weights, within
from gradscope.runs import run_file

GITHUB = "https://github.com/"
SOURCES = {
    "TRL": ("1.16", f"{GITHUB}huggingface/trl/blob/v1.16.0/trl/trainer/grpo_trainer.py"),
    "TRL's SFT": ("1.16", f"{GITHUB}huggingface/trl/blob/v1.16.0/trl/trainer/sft_trainer.py"),
    "TRL's DPO": ("1.16", f"{GITHUB}huggingface/trl/blob/v1.16.0/trl/trainer/dpo_trainer.py"),
    "TRL's KTO": ("1.16", f"{GITHUB}huggingface/trl/blob/v1.16.0/trl/trainer/kto_trainer.py"),
    "TRL's CPO": ("1.16", f"{GITHUB}huggingface/trl/blob/v1.16.0/trl/experimental/cpo/cpo_trainer.py"),
    "TRL's ORPO": ("1.16", f"{GITHUB}huggingface/trl/blob/v1.16.0/trl/experimental/orpo/orpo_trainer.py"),
    "TRL's GMPO": ("1.16", f"{GITHUB}huggingface/trl/blob/v1.16.0/trl/experimental/gmpo/gmpo_trainer.py"),
    "verl": ("0.9.1", f"{GITHUB}verl-project/verl/blob/v0.9.1/verl/trainer/ppo/core_algos.py"),
    "verl's distillation": ("0.9.1", f"{GITHUB}verl-project/verl/blob/v0.9.1/verl/trainer/distillation/losses.py"),
    "verl's corrections": ("0.9.1", f"{GITHUB}verl-project/verl/blob/v0.9.1/verl/trainer/ppo/rollout_corr_helper.py"),
    "prime-rl": ("2026-08-21", f"{GITHUB}PrimeIntellect-ai/prime-rl/blob/559b44772/src/prime_rl/trainer/rl/loss.py"),
    "SkyRL": ("2026-08-21", f"{GITHUB}NovaSky-AI/SkyRL/blob/a9564572e/skyrl/backends/skyrl_train/utils/ppo_utils.py"),
    "NeMo-RL": ("2026-08-22", f"{GITHUB}NVIDIA-NeMo/RL/blob/7ea279abf/nemo_rl/algorithms/loss/loss_functions.py"),
    "OpenRLHF": ("2026-08-13", f"{GITHUB}OpenRLHF/OpenRLHF/blob/3c3be6234/openrlhf/models/loss.py"),
    "slime": ("2026-08-21", f"{GITHUB}THUDM/slime/blob/624b824a8/slime/backends/megatron_utils/loss.py"),
    "ms-swift": ("2026-08-22", f"{GITHUB}modelscope/ms-swift/blob/3602360a5/swift/rlhf_trainers/grpo_trainer.py"),
    "ROLL": ("2026-08-19", f"{GITHUB}alibaba/ROLL/blob/8eb27cc2d/roll/pipeline/agentic/agentic_actor_pg_worker.py"),
    "open-instruct": ("2026-08-20", f"{GITHUB}allenai/open-instruct/blob/e6c3044aa/open_instruct/grpo_utils.py"),
    "UniRL": ("at 30899fcf2", f"{GITHUB}Tencent-Hunyuan/UniRL/blob/30899fcf2/unirl/algorithms/cppo.py"),
    "Tinker": ("2026-08", "https://tinker-docs.thinkingmachines.ai/tinker/losses/dro/"),
    "RLVR-Directions": (
        "2026-02-22",
        f"{GITHUB}Hesse73/RLVR-Directions/blob/ca8c6e753/verl/recipe/logprl/logp_ray_trainer.py",
    ),
}
"""Trainer or authors' code → the version or commit date that the formulas were taken from, and its URL."""

ROUNDING = 1e-4
"""Largest difference of log π, in nats, between two float32 forward passes of one policy (sampler and trainer, say)."""


@dataclass(frozen=True)
class GRPO(Weighting):
    """w = r·Â·I_trust: the plain clipped loss (Eq. 1 and 2, arXiv:2505.12929)."""

    NAME = "grpo"
    TRAINERS: ClassVar = {"TRL": "grpo", "verl": "grpo"}
    OWN_LOSSES = ("TRL", "verl")

    def factors(self, tokens: Tokens) -> Weights:
        return tokens.plain


@dataclass(frozen=True)
class Reweight(Weighting):
    """w = [α·π_old + 1 − α]·plain: Advantage Reweighting (Eq. 4, arXiv:2505.12929: α = .3 on puzzles, else .1)."""

    NAME = "reweight"
    alpha: float = within(0.3, 0, 1)

    @property
    def rule(self) -> StepRule:
        return StepRule(reweight_alpha=self.alpha)

    def factors(self, tokens: Tokens) -> Weights:
        return self.rule.weights(tokens)["all"]


@dataclass(frozen=True)
class Lopti(Weighting):
    """Two optimizer steps of w = plain, one on π_old < η, then one on the rest (Alg. 1, arXiv:2505.12929)."""

    NAME = "lopti"
    eta: float = within(0.5, 0, 1)

    @property
    def rule(self) -> StepRule:
        return StepRule(lopti_eta=self.eta)

    def factors(self, tokens: Tokens) -> dict[str, Weights]:
        return self.rule.weights(tokens)


@dataclass(frozen=True)
class RandomSplit(Weighting):
    """Lopti's control: two steps over a random split of the batch, of the same sizes as Lopti's at this η."""

    NAME = "random-split"
    eta: float = within(0.5, 0, 1)
    seed: int = within(0, 0)

    @property
    def rule(self) -> StepRule:
        return StepRule(lopti_eta=self.eta, control="random-split")

    def factors(self, tokens: Tokens) -> dict[str, Weights]:
        steps = self.rule.drawn_groups(*_one_batch(tokens, self.seed))
        return {
            name: np.where(chosen[0].numpy(), tokens.plain, 0.0)
            for name, (_, chosen) in zip(("low", "high"), steps, strict=True)
        }


@dataclass(frozen=True)
class PermutedWeights(Weighting):
    """Reweight's control: its factors α·π_old + 1 − α, randomly permuted over the tokens."""

    NAME = "permuted-weights"
    alpha: float = within(0.3, 0, 1)
    seed: int = within(0, 0)

    @property
    def rule(self) -> StepRule:
        return StepRule(reweight_alpha=self.alpha, control="permuted-weights")

    def factors(self, tokens: Tokens) -> Weights:
        return self.rule.permuted_factors(*_one_batch(tokens, self.seed))[0].numpy() * tokens.plain


@dataclass(frozen=True)
class MatchedNorm(Weighting):
    """Reweight's other control: w = plain, with the whole gradient rescaled to the norm of Reweight's.

    Columns do not determine that norm, so the weights are plain's, as is everything independent of the update's length.
    """

    NAME = "matched-norm"
    alpha: float = within(0.3, 0, 1)

    @property
    def rule(self) -> StepRule:
        return StepRule(reweight_alpha=self.alpha, control="matched-norm")

    def factors(self, tokens: Tokens) -> Weights:
        return tokens.plain


@dataclass(frozen=True)
class IntervalMask(Weighting):
    """w = 0 where π_old lies in [low, high), a high of 1 included; else plain: the ablation of arXiv:2505.12929."""

    NAME = "mask"
    low: float = within(0.0, 0, 1)
    high: float = within(0.25, 0, 1)

    @property
    def rule(self) -> StepRule:
        return StepRule(mask_probs=(self.low, self.high))

    def factors(self, tokens: Tokens) -> Weights:
        return self.rule.weights(tokens)["all"]


@dataclass(frozen=True)
class UpWeight(Weighting):
    """w = [1 + α(1 − π_old)]·plain: more weight on rare tokens, the opposite of Reweight (arXiv:2603.22117).

    The authors' `reshape_reversed`, with α = .2 for Qwen2.5-Math-7B and .1 for Qwen3-8B-Base.
    """

    NAME = "up-weight"
    TRAINERS: ClassVar = {"RLVR-Directions": "up-weight:alpha=0.2"}
    alpha: float = within(0.2, 0)

    def factors(self, tokens: Tokens) -> Weights:
        return (1 - self.alpha * np.expm1(tokens.old)) * tokens.plain


@dataclass(frozen=True)
class TopEntropy(Weighting):
    """w = plain where H is at least its (1 − q) quantile over the batch, else 0: "80/20" (arXiv:2506.01939, TRL)."""

    NAME = "top-entropy"
    TRAINERS: ClassVar = {"TRL": "top-entropy:q=0.2"}
    OWN_LOSSES = ("TRL",)
    q: float = within(0.2, 0, 1)

    def factors(self, tokens: Tokens) -> Weights:
        entropy = tokens.known("entropy")
        return np.where(entropy >= np.quantile(entropy, 1 - self.q), tokens.plain, 0.0)


@dataclass(frozen=True)
class ClipCov(Weighting):
    """w = 0 on a random `share` of all tokens, chosen among unclipped ones with low < c < high; else plain.

    c is a token's part of the covariance of Â and log π (arXiv:2505.22617). At least one token, if the band has any;
    `seed` determines which.
    """

    NAME = "clip-cov"
    TRAINERS: ClassVar = {"verl": "clip-cov"}
    OWN_LOSSES = ("verl",)
    share: float = within(2e-4, 0, 1)
    low: float = within(1.0, -math.inf)
    high: float = within(5.0, -math.inf, above="low")
    seed: int = within(0, 0)

    def factors(self, tokens: Tokens) -> Weights:
        clipped = (tokens.plain == 0) & (tokens.advantage != 0)
        band = np.flatnonzero((tokens.covariance > self.low) & (tokens.covariance < self.high) & ~clipped)
        count = min(max(int(self.share * len(tokens.plain)), 1), len(band))
        drawn = np.random.default_rng(self.seed).choice(band, count, replace=False)
        weights = tokens.plain.copy()
        weights[drawn] = 0.0
        return weights


@dataclass(frozen=True)
class KLCov(Weighting):
    """w = r·Â, never clipped, minus β·sign(log r), the slope of β·|log r|, on the `share` of tokens with the largest c.

    arXiv:2505.22617. On-policy the penalty has no slope: if |log r| is below ROUNDING, its sign is
    the rounding of two forward passes, and counts as 0.
    """

    NAME = "kl-cov"
    TRAINERS: ClassVar = {"verl": "kl-cov:share=0.0002"}
    OWN_LOSSES = ("verl",)
    share: float = within(2e-3, 0, 1)
    beta: float = within(1.0, 0)

    def factors(self, tokens: Tokens) -> Weights:
        weights = tokens.ratio * tokens.advantage
        top = np.argsort(-tokens.covariance, kind="stable")[: max(1, int(self.share * len(weights)))]
        moved = (tokens["logprob"] - tokens.old)[top]
        weights[top] -= self.beta * np.where(np.abs(moved) < ROUNDING, 0.0, np.sign(moved))
        return weights


@dataclass(frozen=True)
class CISPO(Weighting):
    """w = clip(r, eps_low, eps_high)·Â: sg(clipped ratio)·log π, so no token is left out (arXiv:2506.13585).

    Both bound the ratio itself, as eps_high does in TRL; in verl, NeMo-RL and SkyRL they are distances from 1. TRL,
    ms-swift and open-instruct have no lower bound.
    """

    NAME = "cispo"
    TRAINERS: ClassVar = {
        "TRL": "cispo:eps_high=5",
        "ms-swift": "cispo:eps_high=5",
        "open-instruct": "cispo:eps_high=1.272",
        "verl": "cispo:eps_low=0.8,eps_high=1.2",
        "NeMo-RL": "cispo:eps_low=0.8,eps_high=1.2",
        "ROLL": "cispo:eps_low=0.9,eps_high=1.1",
        "SkyRL": "cispo:eps_low=0,eps_high=5",
    }
    OWN_LOSSES = ("TRL", "verl")
    eps_low: float = within(0.0, 0)
    eps_high: float = within(5.0, 0, above="eps_low")

    def factors(self, tokens: Tokens) -> Weights:
        return np.clip(tokens.ratio, self.eps_low, self.eps_high) * tokens.advantage


@dataclass(frozen=True)
class SAPO(Weighting):
    """w = r·4σ(1 − σ)·Â, with σ the logistic function of τ(r − 1): the slope of 4σ/τ·Â, a soft clip.

    τ is tau_pos where Â > 0, else tau_neg (arXiv:2511.20347).
    """

    NAME = "sapo"
    TRAINERS: ClassVar = {"TRL": "sapo", "verl": "sapo"}
    OWN_LOSSES = ("TRL", "verl")
    tau_pos: float = within(1.0, 1e-6)
    tau_neg: float = within(1.05, 1e-6)

    def factors(self, tokens: Tokens) -> Weights:
        tau = np.where(tokens.advantage > 0, self.tau_pos, self.tau_neg)
        half = np.tanh(tau * (tokens.ratio - 1) / 2)  # 4σ(1 − σ) = 1 − tanh²
        with np.errstate(invalid="ignore"):
            return np.where(np.abs(half) < 1, tokens.ratio * (1 - half**2), 0.0) * tokens.advantage


@dataclass(frozen=True)
class GSPO(Weighting):
    """w = s·mean_t(Â·I_trust), with the ratio s = exp(mean_t log r) of the whole response, clipped (arXiv:2507.18071).

    A token is clipped if s > 1 + eps_high and Â > 0, or s < 1 − eps_low and Â < 0.
    """

    NAME = "gspo"
    TRAINERS: ClassVar = {"TRL": "gspo:eps_low=0.2,eps_high=0.2", "verl": "gspo:eps_low=0.2,eps_high=0.2"}
    OWN_LOSSES = ("TRL", "verl")
    eps_low: float = within(3e-4, 0, 1)
    eps_high: float = within(4e-4, 0)

    def factors(self, tokens: Tokens) -> Weights:
        ratio = np.exp(tokens.mean_by_response(tokens["logprob"] - tokens.old))
        up, down = tokens.advantage > 0, tokens.advantage < 0
        clipped = (up & (ratio > 1 + self.eps_high)) | (down & (ratio < 1 - self.eps_low))
        return ratio * tokens.mean_by_response(np.where(clipped, 0.0, tokens.advantage))


@dataclass(frozen=True)
class GMPO(Weighting):
    """w = s·mean_t(Â)·I, with s = exp(mean_t of clipped log r), the response's geometric mean (arXiv:2507.20673).

    I = 0 if log r is clipped: above eps_high and Â > 0, or below −eps_low and Â < 0; these are in nats, not ratios.
    """

    NAME = "gmpo"
    TRAINERS: ClassVar = {"TRL's GMPO": "gmpo", "verl": "gmpo:eps_low=0.2,eps_high=0.2"}
    OWN_LOSSES = ("TRL's GMPO", "verl")
    eps_low: float = within(0.4, 0)
    eps_high: float = within(0.4, 0)

    def factors(self, tokens: Tokens) -> Weights:
        moved = tokens["logprob"] - tokens.old
        high, low = (tokens.advantage > 0) & (moved > self.eps_high), (tokens.advantage <= 0) & (moved < -self.eps_low)
        clipped = np.where(high, self.eps_high, np.where(low, -self.eps_low, moved))
        ratio = np.exp(tokens.mean_by_response(clipped)) * tokens.mean_by_response(tokens.advantage)
        return np.where(high | low, 0.0, ratio)


@dataclass(frozen=True)
class VESPO(Weighting):
    """w = φ(W)·Â, φ = e^λ·W^k·e^(−λW): a soft weight of the response's ratio W = Π_t r_t (arXiv:2602.10693).

    k and λ depend on the sign of Â. With `sampler` 1, W includes Π_t min(k_t, cap), as in TRL under vLLM with
    token_truncate. log W is clamped to [log 1e-8, 20].
    """

    NAME = "vespo"
    TRAINERS: ClassVar = {"TRL": "vespo:sampler=1"}
    OWN_LOSSES = ("TRL",)
    k_pos: float = within(2.0, 0)
    lambda_pos: float = within(3.0, 1e-4)
    k_neg: float = within(3.0, 0)
    lambda_neg: float = within(2.0, 1e-4)
    sampler: int = within(0, 0, 1)
    cap: float = within(3.0, 1e-8)

    def factors(self, tokens: Tokens) -> Weights:
        moved = np.clip(tokens["logprob"] - tokens.old, -20, 20)
        if self.sampler:
            moved += np.clip(np.minimum(tokens.mismatch, math.log(self.cap)), math.log(1e-8), 20)
        log_ratio = np.clip(tokens.sum_by_response(moved), math.log(1e-8), 20)
        power = np.where(tokens.advantage >= 0, self.k_pos, self.k_neg)
        rate = np.where(tokens.advantage >= 0, self.lambda_pos, self.lambda_neg)
        return np.exp(rate + power * log_ratio - rate * np.exp(log_ratio)) * tokens.advantage


@dataclass(frozen=True)
class DPPO(Weighting):
    """w = min(r, cap)·Â − kl_tau·2·log r, without the first term if |π − π_old| > δ, away from π_old in Â's direction.

    Bounds the change of the probability instead of the ratio (arXiv:2602.04879). With `sampler` 1, π_sampler replaces
    π_old. kl_tau·(log r)² is a penalty on all tokens. cap=inf: no cap; verl's function defaults to 20, its
    configuration to 3.
    """

    NAME = "dppo-tv"
    TRAINERS: ClassVar = {
        "verl": "dppo-tv:cap=3",
        "prime-rl": "dppo-tv:cap=inf,kl_tau=0.001,sampler=1",
        "SkyRL": "dppo-tv:cap=inf,sampler=1",
    }
    OWN_LOSSES = ("verl",)
    delta: float = within(0.2, 0, 1)
    cap: float = within(20.0, 0)
    kl_tau: float = within(0.0, 0)
    sampler: int = within(0, 0, 1)

    def divergence(self, logprob: Weights, before: Weights) -> Weights:
        return np.abs(np.exp(logprob) - np.exp(before))

    def factors(self, tokens: Tokens) -> Weights:
        before = tokens.before(self.sampler)
        moved = tokens["logprob"] - before
        away = np.where(tokens.advantage > 0, moved > 0, moved < 0)
        left: Bool[np.ndarray, " K"] = away & (self.divergence(tokens["logprob"], before) > self.delta)
        with np.errstate(over="ignore"):
            ratio = np.minimum(np.exp(moved), self.cap)
        return np.where(left, 0.0, ratio * tokens.advantage) - 2 * self.kl_tau * moved


@dataclass(frozen=True)
class DPPOKL(DPPO):
    """dppo-tv with the binary divergence KL(π_old‖π), in nats, of this token against all others (arXiv:2602.04879)."""

    NAME = "dppo-kl"
    TRAINERS: ClassVar = {"verl": "dppo-kl:delta=0.2,cap=3", "SkyRL": "dppo-kl:cap=inf,sampler=1"}
    delta: float = within(0.05, 0)

    def divergence(self, logprob: Weights, before: Weights) -> Weights:
        others, others_before = (-np.expm1(np.minimum(values, 0)) + 1e-8 for values in (logprob, before))
        return np.exp(before) * (before - logprob) - np.expm1(before) * np.log(others_before / others)


@dataclass(frozen=True)
class CPPO(Weighting):
    """w = r·Â, or 0 if π moves further from π_old and its weighted movement exceeds what is left of a budget.

    A token with D_t = |π − π_old| is dropped if u_t·D_t > min(δ, δ + δ_b·Σ_{s<t} u_s − Σ_{s<t} u_s·D_s), where u_t
    falls from 1 at a response's first token to w_min at its last, and δ_b is the response's .9 quantile of D, clamped
    to [delta_b, 2·delta_b]. Tokens that move back to π_old, Â(r − 1) ≤ 0, are kept (arXiv:2606.10968, binary total
    variation). With `sampler` 1, π_sampler replaces π_old.
    """

    NAME = "cppo"
    TRAINERS: ClassVar = {"UniRL": "cppo:sampler=1"}
    delta: float = within(0.2, 0, 1)
    w_min: float = within(0.8, 1e-6, 1)
    delta_b: float = within(0.02, 0)
    sampler: int = within(0, 0, 1)

    def factors(self, tokens: Tokens) -> Weights:
        before = tokens.before(self.sampler)
        divergence = np.abs(np.exp(tokens["logprob"]) - np.exp(before))
        over = np.zeros(len(divergence), dtype=bool)
        for rows in tokens.responses():
            weight = np.linspace(1, self.w_min, len(rows))
            spent = weight * divergence[rows]
            budget = np.clip(np.quantile(divergence[rows], 0.9), self.delta_b, 2 * self.delta_b)
            left = np.cumsum(budget * weight - spent) - (budget * weight - spent)  # from earlier tokens
            over[rows] = spent > self.delta + np.minimum(left, 0)
        with np.errstate(over="ignore"):
            ratio = np.exp(tokens["logprob"] - before)
        return np.where(over & (tokens.advantage * (ratio - 1) > 0), 0.0, ratio * tokens.advantage)


@dataclass(frozen=True)
class FIPO(Weighting):
    """w = f·plain, f_t = clip(exp Σ_{s≥t} 2^{−(s−t)/decay_rate}·log r_s, 1, 1 + clip_range) (arXiv:2603.19835).

    The gain of later tokens since π_old, with a half-life of `decay_rate` positions; f = 1 where Â < 0, r > threshold.
    """

    NAME = "fipo"
    TRAINERS: ClassVar = {"ms-swift": "fipo"}
    decay_rate: float = within(32.0, 1e-6)
    clip_range: float = within(0.2, 1e-6)
    threshold: float = within(4.0, 0)

    def factors(self, tokens: Tokens) -> Weights:
        moved = tokens["logprob"] - tokens.old
        future = moved.copy()
        for rows in tokens.responses():
            fades = 2 ** (-np.diff(tokens.place[rows]) / self.decay_rate)
            for row, later, fade in zip(rows[-2::-1], rows[:0:-1], fades[::-1], strict=True):
                future[row] += fade * future[later]
        factor = np.exp(np.clip(future, 0, math.log1p(self.clip_range)))
        safe = (tokens.advantage >= 0) | (tokens.ratio <= self.threshold)
        return np.where(safe, factor, 1.0) * tokens.plain


@dataclass(frozen=True)
class TOPR(Weighting):
    """w = Â where Â > 0, else min(r, 1)·Â: imitates good responses, tapers the rest (arXiv:2503.14286).

    ROLL uses the sign of the score, which a token table lacks; the same if Â has the score's sign.
    """

    NAME = "topr"
    TRAINERS: ClassVar = {"ROLL": "topr"}

    def factors(self, tokens: Tokens) -> Weights:
        return np.where(tokens.advantage > 0, 1.0, np.minimum(tokens.ratio, 1)) * tokens.advantage


@dataclass(frozen=True)
class DRO(Weighting):
    """w = Â − β·log r, the slope of log π·Â − β/2·(log r)², without ratio or clip (direct reward optimization).

    With `sampler` 1, π_sampler replaces π_old. verl has no default for β; Tinker's example uses .05.
    """

    NAME = "dro"
    TRAINERS: ClassVar = {"verl": "dro", "Tinker": "dro:beta=0.05,sampler=1"}
    OWN_LOSSES = ("verl",)
    beta: float = within(0.05, 0)
    sampler: int = within(0, 0, 1)

    def factors(self, tokens: Tokens) -> Weights:
        return tokens.advantage - self.beta * (tokens["logprob"] - tokens.before(self.sampler))


@dataclass(frozen=True)
class OPSM(Weighting):
    """w = 0 where Â < 0 and mean_t(log π_old − log π) > δ in the response, else plain: off-policy sequence masking.

    Eq. 9 of arXiv:2512.02556. With `sampler` 1, π_sampler replaces π_old, as in TRL under vLLM.
    """

    NAME = "opsm"
    TRAINERS: ClassVar = {"TRL": "opsm:sampler=1", "slime": "opsm:delta=0.0001"}
    OWN_LOSSES = ("TRL",)
    delta: float = within(0.5, 0)
    sampler: int = within(0, 0, 1)

    def factors(self, tokens: Tokens) -> Weights:
        drift = tokens.mean_by_response(tokens.before(self.sampler) - tokens["logprob"])
        return np.where((tokens.advantage < 0) & (drift > self.delta), 0.0, tokens.plain)


@dataclass(frozen=True)
class TIS(Weighting):
    """w = clip(k, low, high)·plain, k = π_old/π_sampler: token-level truncated importance sampling."""

    NAME = "tis"
    TRAINERS: ClassVar = {
        "TRL": "tis:high=3",
        "verl's corrections": "tis",
        "slime": "tis",
        "SkyRL": "tis",
        "OpenRLHF": "tis:low=0.5,high=5",
    }
    OWN_LOSSES = ("TRL", "verl's corrections")
    low: float = within(0.0, 0)
    high: float = within(2.0, 0, above="low")

    def factors(self, tokens: Tokens) -> Weights:
        return _truncate(tokens.mismatch, self.low, self.high) * tokens.plain


@dataclass(frozen=True)
class SequenceTIS(Weighting):
    """w = clip(K, low, high)·plain, K = Π_t k_t: truncated importance sampling by sequence (TRL: sequence_truncate)."""

    NAME = "sequence-tis"
    TRAINERS: ClassVar = {
        "TRL": "sequence-tis",
        "verl's corrections": "sequence-tis:high=2",
        "SkyRL": "sequence-tis:high=5",
    }
    OWN_LOSSES = ("TRL", "verl's corrections")
    low: float = within(0.0, 0)
    high: float = within(3.0, 0, above="low")

    def factors(self, tokens: Tokens) -> Weights:
        return _truncate(tokens.sum_by_response(tokens.mismatch), self.low, self.high) * tokens.plain


@dataclass(frozen=True)
class SequenceMask(Weighting):
    """w = K·plain where low ≤ K ≤ high, else 0, K = Π_t k_t: TRL's default under vLLM (sequence_mask)."""

    NAME = "sequence-mask"
    TRAINERS: ClassVar = {"TRL": "sequence-mask"}
    OWN_LOSSES = ("TRL", "verl's corrections")
    low: float = within(0.0, 0)
    high: float = within(3.0, 0, above="low")

    def factors(self, tokens: Tokens) -> Weights:
        return _mask(tokens.sum_by_response(tokens.mismatch), self.low, self.high) * tokens.plain


@dataclass(frozen=True)
class SeqMaskTIS(Weighting):
    """w = k·plain where low ≤ exp(mean_t log k) ≤ high in the response, else 0; k itself is not truncated."""

    NAME = "seq-mask-tis"
    TRAINERS: ClassVar = {
        "NeMo-RL": "seq-mask-tis",
        "OpenRLHF": "seq-mask-tis:low=0.5,high=5",
        "ms-swift": "seq-mask-tis:low=0,high=2",
    }
    low: float = within(0.999, 0)
    high: float = within(1.002, 0, above="low")

    def factors(self, tokens: Tokens) -> Weights:
        kept = _mask(tokens.mean_by_response(tokens.mismatch), self.low, self.high) > 0
        return np.where(kept, np.exp(tokens.mismatch), 0.0) * tokens.plain


@dataclass(frozen=True)
class IcePop(Weighting):
    """w = k·plain where low ≤ k ≤ high, else 0, with k = π_old/π_sampler (arXiv:2510.18855)."""

    NAME = "icepop"
    TRAINERS: ClassVar = {
        "TRL": "icepop:low=0,high=3",
        "verl's corrections": "icepop",
        "NeMo-RL": "icepop",
        "OpenRLHF": "icepop",
        "slime": "icepop:low=0,high=2",
    }
    OWN_LOSSES = ("TRL", "verl's corrections")
    low: float = within(0.5, 0)
    high: float = within(5.0, 0, above="low")

    def factors(self, tokens: Tokens) -> Weights:
        return _mask(tokens.mismatch, self.low, self.high) * tokens.plain


@dataclass(frozen=True)
class Delightful(Weighting):
    """w = σ(Â·s/η)·plain, σ the logistic function: favours surprising tokens of good responses (arXiv:2603.14608)."""

    NAME = "delightful"
    eta: float = within(1.0, 1e-6)

    def factors(self, tokens: Tokens) -> Weights:
        return (1 + np.tanh(-tokens.advantage * tokens.old / self.eta / 2)) / 2 * tokens.plain


@dataclass(frozen=True)
class KL(Weighting):
    """w = plain − β·∂KL/∂log π: a penalty towards the reference, where known, estimated by k1, k2 or k3.

    Its slope is 1 of k1, which says nothing of the reference; log(π/π_ref) of k2; 1 − π_ref/π of k3 (TRL's, verl's
    low_var_kl). A grid compares them: kl:k=1/2/3.
    """

    NAME = "kl"
    k: int = within(3, 1, 3)
    beta: float = within(0.001, 0)

    def factors(self, tokens: Tokens) -> Weights:
        logprob, reference = torch.from_numpy(tokens["logprob"]), torch.from_numpy(tokens.reference)
        slope = kl_slope(logprob, reference, f"k{self.k}").numpy()
        return tokens.plain - self.beta * np.where(np.isnan(tokens.reference), 0.0, slope)


def _one_batch(tokens: Tokens, seed: int) -> tuple[Tensor, Tensor, int, torch.Generator]:
    """Return the tokens as a mini-batch of one row, as `StepRule` draws its controls."""
    old = torch.from_numpy(tokens.old)[None]
    return old, torch.ones_like(old, dtype=torch.bool), 1, torch.Generator().manual_seed(seed)


def _truncate(log_ratio: Weights, low: Number, high: Number) -> Weights:
    """Clip the ratio to [low, high]."""
    with np.errstate(over="ignore"):
        return np.clip(np.exp(log_ratio), low, high)


def _mask(log_ratio: Weights, low: Number, high: Number) -> Weights:
    """Return the ratio within [low, high], 0 outside."""
    with np.errstate(over="ignore"):
        ratio = np.exp(log_ratio)
    return np.where((ratio >= low) & (ratio <= high), ratio, 0.0)


_COMPARED = (
    *(GRPO, Reweight, Lopti, RandomSplit, PermutedWeights, MatchedNorm, IntervalMask, UpWeight, TopEntropy),
    *(ClipCov, KLCov, CISPO, SAPO, GSPO, DPPO, IcePop, Delightful),
)
_NAMED = (
    *(GMPO, VESPO, DPPOKL, CPPO, FIPO, TOPR, DRO, OPSM),
    *(TIS, SequenceTIS, SequenceMask, SeqMaskTIS, KL),
)
WEIGHTINGS = {kind.NAME: kind for kind in (*_COMPARED, *_NAMED, *REWARDLESS)}
"""Name → weighting."""
COMPARED = tuple(kind.NAME for kind in _COMPARED)
"""Weightings compared by default; each takes a separate backward pass."""


@checked
def make_weighting(text: str) -> Weighting:
    """Make the weighting spelled `NAME[:key=value,…]`; `FILE.py:NAME[:key=value,…]` takes a Weighting from a file.

    Raises InputError for an unknown name, suggesting the nearest one, and for an unknown parameter.

    >>> make_weighting("top-entropy:q=0.1")
    TopEntropy(q=0.1)
    """
    file, colon, rest = text.rpartition(".py:")
    name, _, given = rest.partition(":")
    known = WEIGHTINGS
    if colon:
        module = run_file(Path(f"{file}.py"), "weighting")
        own = [kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == module.__name__]
        known = {kind.NAME: kind for kind in own if issubclass(kind, Weighting)}
    kind = known.get(name)
    if kind is None:
        raise InputError(f"no weighting is called {name!r}; {nearest(name, known)}")
    values = parse_parameters(name, given, {own.name: type(own.default) for own in fields(kind)})
    weighting = kind(**values)
    object.__setattr__(weighting, "_spelled", text)  # it is frozen
    return weighting


def spell_out(text: str) -> list[str]:
    """Return the spelling of a weighting for every combination of its parameters' values.

    >>> spell_out("icepop:low=.5/0.8,high=5")
    ['icepop:low=.5,high=5', 'icepop:low=0.8,high=5']
    """
    file, colon, rest = text.rpartition(".py:")
    name, _, given = rest.partition(":")
    parts = [part.partition("=") for part in given.split(",") if part]
    values = product(*(value.split("/") for _, _, value in parts))
    keys = [f"{key}{sign}" for key, sign, _ in parts]
    combined = [",".join(map("".join, zip(keys, choice, strict=True))) for choice in values]
    return [f"{file}{colon}{name}" + (f":{choice}" if choice else "") for choice in combined]
