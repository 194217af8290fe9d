"""Losses without a reward whose gradient is a weight on ∇ log π: supervised, distilled on sampled tokens, preferences.

The weights are w_t = −N · ∂loss/∂ log π_t times the loss's own denominator over N: `Weighting.DENOMINATOR` names it,
and `settle_loss` puts N over it into the batch's `loss_scales`. ν is the teacher, h a pair's margin: the sum over the
chosen response of log π − log π_ref, minus that over the rejected one; h̄ is the same of means per token, and without a
reference where the loss has none. |y| counts a response's kept tokens, σ is the logistic function; + is for chosen, −
for rejected.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from gradscope.errors import InputError
from gradscope.objective.equations import kl_slope
from gradscope.objective.weighting import Tokens, Weighting, Weights, one_of, within

NO_TEACHER = (
    "k1 as a loss has the weight −1 at every token: its gradient lowers the log π of whatever was sampled, and no "
    "teacher is in it; take k2 or k3 as a loss, or k1 as a policy gradient"
)
NEVER_PRAISED = (
    "{} as a policy gradient gives no token an advantage above 0: each step lowers the log π of what was sampled, most "
    "where policy and teacher differ, whichever gives the token more; k1's advantage is log ν/π"
)


class WholeLoss(Weighting):
    """A weighting that is a loss of its own."""

    @property
    def is_whole(self) -> bool:
        return True


class OfText(WholeLoss):
    """A loss on given text, which the policy did not sample."""

    IS_SAMPLED = False


@dataclass(frozen=True)
class SFT(OfText):
    """w = 1: the mean of −log π over tokens (TRL's nll)."""

    NAME = "sft"
    TRAINERS: ClassVar = {"TRL's SFT": "sft", "ms-swift": "sft"}
    OWN_LOSSES = ("TRL's SFT",)

    def factors(self, tokens: Tokens) -> Weights:
        return np.ones_like(tokens["logprob"])


@dataclass(frozen=True)
class DFT(OfText):
    """w = sg(π): dynamic fine-tuning, which scales each token's −log π by its probability (arXiv:2508.05629)."""

    NAME = "dft"
    TRAINERS: ClassVar = {"TRL's SFT": "dft", "ms-swift": "dft"}
    OWN_LOSSES = ("TRL's SFT",)

    def factors(self, tokens: Tokens) -> Weights:
        return np.exp(tokens["logprob"])


@dataclass(frozen=True)
class OPD(WholeLoss):
    """w = coef·r·A·I_trust with A = −k(π, ν), or w = −coef·∂k/∂ log π: on-policy distillation on sampled tokens.

    k is an estimate of KL(π‖ν) at the sampled token: k1 = log π/ν; k2 = k1²/2; k3 = ν/π − 1 + k1; abs = |k1|. With
    `policy_gradient` 1, −k is an advantage, clipped at [1 − eps_low, 1 + eps_high], and at `dual` where it is negative:
    for k1, w = log ν/π, whose mean gradient is that of KL(π‖ν). With 0, k is the loss: w is −1 for k1, in which there
    is no teacher; log ν/π for k2, whose mean gradient is again KL(π‖ν)'s; ν/π − 1 for k3, whose mean gradient is that
    of KL(ν‖π); the sign of log ν/π for abs. Where |k| exceeds `clamp`, k is constant. With `at_old` 1, k is at π_old.
    As an advantage it is dropped where π is more than `fall` below π_old.
    reward: none; sum: Â is added to A, under one clip (Tinker); term: GRPO's own weight is added to w (verl).
    Tokens that the teacher did not score have no distillation.
    """

    NAME = "opd"
    TRAINERS: ClassVar = {
        "verl's distillation": "opd:eps_low=0.2,eps_high=0.2,dual=3,clamp=10",
        "Tinker": "opd:at_old=1,reward=sum",
        "prime-rl": "opd:fall=0.2",
    }
    OWN_LOSSES = ("verl's distillation",)
    OTHERS = ("teacher_logprobs",)
    estimator: str = one_of("k1", "k2", "k3", "abs")
    policy_gradient: int = within(1, 0, 1)
    coef: float = within(1.0, 0)
    clamp: float = within(math.inf, 0)
    eps_low: float = within(1.0, 0, 1)
    eps_high: float = within(math.inf, 0)
    dual: float = within(math.inf, 0)
    at_old: int = within(0, 0, 1)
    fall: float = within(1.0, 0, 1)
    reward: str = one_of("none", "sum", "term")

    @property
    def is_whole(self) -> bool:
        return self.reward == "none"

    @property
    def doubts(self) -> tuple[str, ...]:
        if not self.policy_gradient:
            return () if self.estimator != "k1" else (NO_TEACHER,)
        return () if self.estimator == "k1" or self.reward == "sum" else (NEVER_PRAISED.format(self.estimator),)

    def factors(self, tokens: Tokens) -> Weights:
        teacher = tokens.teacher
        unknown = np.isnan(teacher)
        own = tokens.old if self.at_old else tokens["logprob"]
        apart = np.where(unknown, 0.0, own - teacher)  # k1
        value, slope = self._estimate(apart)
        added = tokens.plain if self.reward == "term" else 0.0
        if not self.policy_gradient:
            if self.reward == "sum":
                raise InputError(f"{self}: reward=sum adds to an advantage; give policy_gradient=1, or reward=term")
            return added - self.coef * np.where(unknown | (np.abs(value) > self.clamp), 0.0, slope)
        advantage = -self.coef * np.clip(value, -self.clamp, self.clamp)
        advantage = advantage + (tokens.advantage if self.reward == "sum" else 0.0)
        low, high = 1 - self.eps_low, np.where(advantage < 0, self.dual, 1 + self.eps_high)
        clipped = (tokens.ratio > high) | ((advantage < 0) & (tokens.ratio < low))
        clipped |= np.exp(tokens.old) - np.exp(tokens["logprob"]) > self.fall
        return added + np.where(clipped | (advantage == 0), 0.0, tokens.ratio * advantage)

    def _estimate(self, apart: Weights) -> tuple[Weights, Weights]:
        """Return the estimate of KL from log π/ν, and its slope in log π."""
        with np.errstate(over="ignore"):
            values = {"k1": apart, "k2": apart**2 / 2, "k3": np.expm1(-apart) + apart, "abs": np.abs(apart)}
            if self.estimator == "abs":
                return values["abs"], np.sign(apart)
            zero = torch.zeros(len(apart), dtype=torch.float64)
            return values[self.estimator], kl_slope(torch.from_numpy(apart), zero, self.estimator).numpy()


class Preference(OfText):
    """A loss on pairs of a chosen and a rejected response."""

    DENOMINATOR = "pairs"
    MEAN: ClassVar[bool] = False
    """Whether a response's log π is its mean per token, not the sum."""

    @abstractmethod
    def slope(self, margin: Weights) -> Weights:
        """Return −∂loss/∂margin."""

    def of_response(self, tokens: Tokens) -> Weights:
        """Return log π of each token's response, relative to the reference if there is one."""
        own = tokens["logprob"] - (tokens.known("ref_logprob") if self.OTHERS else 0.0)
        return tokens.mean_by_response(own) if self.MEAN else tokens.sum_by_response(own)

    def inner(self, tokens: Tokens, of_response: Weights) -> Weights:
        """Return the response's term of the margin, and its derivative by the token's log π."""
        return of_response, (1 / tokens.lengths if self.MEAN else np.ones_like(of_response))

    def factors(self, tokens: Tokens) -> Weights:
        term, derivative = self.inner(tokens, self.of_response(tokens))
        return tokens.signs * self.slope(tokens.margin(term)) * derivative


@dataclass(frozen=True)
class DPO(Preference):
    """w = ±βσ(−βh): −log σ(βh) over pairs, with a reference (arXiv:2305.18290; TRL's sigmoid)."""

    NAME = "dpo"
    TRAINERS: ClassVar = {"TRL's DPO": "dpo"}
    OWN_LOSSES = ("TRL's DPO",)
    OTHERS = ("ref_logprobs",)
    beta: float = within(0.1, 0)

    def slope(self, margin: Weights) -> Weights:
        return self.beta * _logistic(-self.beta * margin)


@dataclass(frozen=True)
class IPO(Preference):
    """w = ±2(1/(2β) − h̄)/|y|: (h̄ − 1/(2β))² over pairs, with a reference (arXiv:2310.12036; TRL's, of means)."""

    NAME = "ipo"
    TRAINERS: ClassVar = {"TRL's DPO": "ipo"}
    OWN_LOSSES = ("TRL's DPO",)
    OTHERS = ("ref_logprobs",)
    MEAN = True
    beta: float = within(0.1, 1e-9)

    def slope(self, margin: Weights) -> Weights:
        return 2 * (1 / (2 * self.beta) - margin)


@dataclass(frozen=True)
class SimPO(Preference):
    """w = ±βσ(γ − βh̄)/|y|: −log σ(βh̄ − γ) over pairs, without a reference (arXiv:2405.14734)."""

    NAME = "simpo"
    TRAINERS: ClassVar = {"TRL's CPO": "simpo:beta=0.1"}
    OWN_LOSSES = ("TRL's CPO",)
    MEAN = True
    beta: float = within(2.0, 0)
    gamma: float = within(0.5, 0)

    def slope(self, margin: Weights) -> Weights:
        return self.beta * _logistic(self.gamma - self.beta * margin)


@dataclass(frozen=True)
class ORPO(Preference):
    """w = ±βσ(−o)/((1 − p̄)|y|): −β·log σ(o) over pairs, o the log odds ratio of p̄ = exp(mean log π) (arXiv:2403.07691).

    The odds part of ORPO: its likelihood part, which TRL takes over the prompt, too, is not included.
    """

    NAME = "orpo"
    TRAINERS: ClassVar = {"TRL's ORPO": "orpo"}
    OWN_LOSSES = ("TRL's ORPO",)
    MEAN = True
    beta: float = within(0.1, 0)

    def slope(self, margin: Weights) -> Weights:
        return self.beta * _logistic(-margin)

    def inner(self, tokens: Tokens, of_response: Weights) -> Weights:
        others = -np.expm1(of_response)  # 1 − p̄
        with np.errstate(divide="ignore"):
            return of_response - np.log(others), 1 / (others * tokens.lengths)


@dataclass(frozen=True)
class KTO(OfText):
    """w = ±λβσ(u)σ(−u), u = ±β(h − z₀): λ(1 − σ(u)) over responses, h of a response alone (arXiv:2402.01306).

    λ is `desirable` for chosen and `undesirable` for rejected responses. z₀, the batch's estimate of the KL divergence
    from the reference, is a mean over mismatched pairs that no log of responses determines: give the trainer's (−1:
    that of each response's column `z0`).
    """

    NAME = "kto"
    TRAINERS: ClassVar = {"TRL's KTO": "kto"}
    OWN_LOSSES = ("TRL's KTO",)
    OTHERS = ("ref_logprobs",)
    DENOMINATOR = "responses"
    beta: float = within(0.1, 0)
    z0: float = within(-1.0, -1)
    desirable: float = within(1.0, 0)
    undesirable: float = within(1.0, 0)

    def factors(self, tokens: Tokens) -> Weights:
        if self.z0 < 0 and "z0" not in [*tokens]:
            raise InputError("kto: z0 is unknown; give the KL estimate that the trainer logged for this step: kto:z0=…")
        z0 = tokens.known("z0") if self.z0 < 0 else self.z0
        ratio = tokens.sum_by_response(tokens["logprob"] - tokens.known("ref_logprob"))
        inside = tokens.signs * self.beta * (ratio - z0)
        weight = np.where(tokens.signs > 0, self.desirable, self.undesirable)
        return tokens.signs * weight * self.beta * _logistic(inside) * _logistic(-inside)


def _logistic(values: Weights) -> Weights:
    return (1 + np.tanh(values / 2)) / 2


REWARDLESS = (SFT, DFT, OPD, DPO, IPO, SimPO, ORPO, KTO)
