"""The token weightings of the literature, in closed form from the columns of a token table.

A weighting says what stands before ∇ log π_t in the gradient of its loss: w_t = −N · ∂loss/∂ log π_t, N the kept tokens
of the batch. Notation: π is the policy, π_old the one before the step, r = π/π_old, Â the advantage, s = −log π_old, H
the entropy, sg what no gradient flows through; `plain` is Eq. 2's r·Â·I_trust (arXiv:2505.12929), what GRPO has there.
Thresholds over a batch (quantiles, covariances) are those of all the tokens that are given. One file, for who compares
weightings reads them side by side.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float

from gradscope.errors import InputError, checked
from gradscope.objective.equations import lopti_split
from gradscope.objective.methods import Method
from gradscope.runs import run_file

Number = int | float
Weights = Float[np.ndarray, " K"]
AGGREGATIONS = ("token-mean", "sequence")
"""How a loss adds up: over all tokens alike, or the mean over responses of the mean over their tokens."""

ROUNDING = 1e-4
"""Nats by which two forward passes of one policy in float32 may differ, as those of a sampler and of a trainer do."""


class Tokens(Mapping[str, Weights]):
    """The columns of a token table that weightings read, [K] in float64; InputError for one that is not there."""

    def __init__(self, columns: Mapping[str, Any] | pd.DataFrame):
        self._columns = columns

    def __getitem__(self, name: str) -> Weights:
        if name not in self._columns:
            raise InputError(f"the tokens have no {name!r}, which this weighting is made of; give a log that has it")
        return np.array(self._columns[name], dtype=np.float64)

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def known(self, name: str) -> Weights:
        """A column without NaN. Raises InputError for a token that has none."""
        values = self[name]
        if unknown := int(np.isnan(values).sum()):
            raise InputError(
                f"{unknown} tokens have no {name!r}, which this weighting is made of; give a log that has it"
            )
        return values

    @cached_property
    def old(self) -> Weights:
        """log π_old; where it is unknown, the policy's own."""
        return np.where(np.isnan(self["old_logprob"]), self["logprob"], self["old_logprob"])

    @cached_property
    def ratio(self) -> Weights:
        """r = π/π_old."""
        with np.errstate(over="ignore"):
            return np.exp(self["logprob"] - self.old)

    @cached_property
    def plain(self) -> Weights:
        """GRPO's weight, r·Â·I_trust."""
        return self["policy_weight"]

    @cached_property
    def advantage(self) -> Weights:
        return self["advantage"]

    @cached_property
    def covariance(self) -> Weights:
        """c = (Â − mean Â)(log π − mean log π), over all tokens."""
        logprob = self["logprob"]
        return (self.advantage - self.advantage.mean()) * (logprob - logprob.mean())

    def mean_by_response(self, values: Weights) -> Weights:
        """Each token's response's mean."""
        _, response = np.unique(self["response"], return_inverse=True)
        return (np.bincount(response, values) / np.bincount(response))[response]


def within(default: Number, low: Number, high: Number = math.inf) -> Any:
    """A parameter and the range of its values, ends included."""
    return field(default=default, metadata={"range": (low, high)})


@dataclass(frozen=True)
class Weighting(ABC):
    """A weighting and its parameters. Raises InputError for a parameter out of its range."""

    NAME: ClassVar[str]
    """What it is called on the command line."""

    def __post_init__(self) -> None:
        for parameter in fields(self):
            value, (low, high) = getattr(self, parameter.name), parameter.metadata.get("range", (-math.inf, math.inf))
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                upper = f" to {high:g}" if high < math.inf else " or more"
                raise InputError(f"{self.NAME}: {parameter.name} is {value!r}; give a number of {low:g}{upper}")

    @property
    def passes(self) -> Method:
        """The passes and advantages of a trainer that these are weights of, where masks and factors say all of it."""
        return Method()

    @property
    def alpha_and_eta(self) -> tuple[Number | None, Number | None] | None:
        """α of Reweight and η of Lopti (None: off), where these two say all of it; None where they do not.

        >>> GRPO().alpha_and_eta, Lopti().alpha_and_eta, CISPO().alpha_and_eta
        ((None, None), (None, 0.5), None)
        """
        pair = self.passes.reweight_alpha, self.passes.lopti_eta
        known = self.passes == Method(*pair) and (pair != (None, None) or isinstance(self, GRPO))
        return pair if known else None

    @abstractmethod
    def factors(self, tokens: Tokens) -> Weights | dict[str, Weights]:
        """w_t of each token, under the mean over tokens; by optimizer step, where there are several."""

    def weights(
        self, columns: Mapping[str, Any] | pd.DataFrame, *, aggregation: str = "token-mean"
    ) -> dict[str, Weights]:
        """w_t of each token in each optimizer step, [K]; 0 in a step that leaves it out.

        columns: those of a token table: `response`, `logprob`, `old_logprob` (NaN: on-policy), `advantage`,
        `policy_weight` of the plain loss, and what else the weighting is made of (`entropy`, `sampler_logprob`).
        aggregation: one of AGGREGATIONS. Raises InputError for a column that is not there.
        """
        if aggregation not in AGGREGATIONS:
            raise InputError(f"aggregation is {aggregation!r}; give one of {', '.join(AGGREGATIONS)}")
        tokens = Tokens(columns)
        found = self.factors(tokens)
        found = found if isinstance(found, dict) else {"all": found}
        if aggregation == "token-mean":
            return found
        _, response = np.unique(tokens["response"], return_inverse=True)
        lengths = np.bincount(response)
        scale = len(response) / len(lengths) / lengths[response]
        return {name: weights * scale for name, weights in found.items()}

    def __str__(self) -> str:
        """As the command line takes it: the name, and each parameter that has not its published value.

        >>> str(CISPO()), str(CISPO(eps_high=4.0))
        ('cispo', 'cispo:eps_high=4')
        """
        changed = [f"{f.name}={getattr(self, f.name):g}" for f in fields(self) if getattr(self, f.name) != f.default]
        return self.NAME + (":" + ",".join(changed) if changed else "")


@dataclass(frozen=True)
class GRPO(Weighting):
    """w = r·Â·I_trust: the plain clipped loss (Eq. 1 and 2, arXiv:2505.12929)."""

    NAME = "grpo"

    def factors(self, tokens: Tokens) -> Weights:
        return tokens.plain


@dataclass(frozen=True)
class Reweight(Weighting):
    """w = [α·π_old + 1 − α]·plain: Advantage Reweighting (Eq. 4, arXiv:2505.12929: α = .3 on puzzles, else .1)."""

    NAME = "reweight"
    alpha: float = within(0.3, 0, 1)

    @property
    def passes(self) -> Method:
        return Method(reweight_alpha=self.alpha)

    def factors(self, tokens: Tokens) -> Weights:
        return self.passes.weights(tokens)["all"]


@dataclass(frozen=True)
class Lopti(Weighting):
    """Two optimizer steps of w = plain, one on π_old < η, then one on the rest (Alg. 1, arXiv:2505.12929)."""

    NAME = "lopti"
    eta: float = within(0.5, 0, 1)

    @property
    def passes(self) -> Method:
        return Method(lopti_eta=self.eta)

    def factors(self, tokens: Tokens) -> dict[str, Weights]:
        return self.passes.weights(tokens)


@dataclass(frozen=True)
class RandomSplit(Weighting):
    """Lopti's control: two steps over a random split of the batch into as many tokens as Lopti has at this η."""

    NAME = "random-split"
    eta: float = within(0.5, 0, 1)
    seed: int = within(0, 0)

    @property
    def passes(self) -> Method:
        return Method(lopti_eta=self.eta, control="random-split")

    def factors(self, tokens: Tokens) -> dict[str, Weights]:
        old = torch.from_numpy(tokens.old)[None]
        low = lopti_split(old, torch.ones_like(old, dtype=torch.bool), eta=self.eta)[0][0].numpy()
        low = np.random.default_rng(self.seed).permutation(low)
        return {name: np.where(chosen, tokens.plain, 0.0) for name, chosen in (("low", low), ("high", ~low))}


@dataclass(frozen=True)
class PermutedWeights(Weighting):
    """Reweight's control: its factors α·π_old + 1 − α, dealt out to the tokens at random."""

    NAME = "permuted-weights"
    alpha: float = within(0.3, 0, 1)
    seed: int = within(0, 0)

    @property
    def passes(self) -> Method:
        return Method(reweight_alpha=self.alpha, control="permuted-weights")

    def factors(self, tokens: Tokens) -> Weights:
        old = torch.from_numpy(tokens.old)[None]
        factors = Method(reweight_alpha=self.alpha).advantages(torch.ones_like(old), old)[0].numpy()
        return np.random.default_rng(self.seed).permutation(factors) * tokens.plain


@dataclass(frozen=True)
class MatchedNorm(Weighting):
    """Reweight's other control: w = plain, the whole gradient rescaled to the norm that Reweight's has.

    No column tells that norm, so that the weights are plain's: whatever does not go by the update's length is plain's.
    """

    NAME = "matched-norm"
    alpha: float = within(0.3, 0, 1)

    @property
    def passes(self) -> Method:
        return Method(reweight_alpha=self.alpha, control="matched-norm")

    def factors(self, tokens: Tokens) -> Weights:
        return tokens.plain


@dataclass(frozen=True)
class IntervalMask(Weighting):
    """w = 0 where π_old lies in [low, high), a high of 1 included; else plain: the ablation of arXiv:2505.12929."""

    NAME = "mask"
    low: float = within(0.0, 0, 1)
    high: float = within(0.25, 0, 1)

    @property
    def passes(self) -> Method:
        return Method(mask_probs=(self.low, self.high))

    def factors(self, tokens: Tokens) -> Weights:
        return self.passes.weights(tokens)["all"]


@dataclass(frozen=True)
class UpWeight(Weighting):
    """w = [1 + α(1 − π_old)]·plain: more for rare tokens, Reweight's opposite (arXiv:2603.22117; not read, nor α)."""

    NAME = "up-weight"
    alpha: float = within(1.0, 0)

    def factors(self, tokens: Tokens) -> Weights:
        return (1 - self.alpha * np.expm1(tokens.old)) * tokens.plain


@dataclass(frozen=True)
class TopEntropy(Weighting):
    """w = plain where H is at least its (1 − q) quantile over the batch, else 0: "80/20" (arXiv:2506.01939, as TRL)."""

    NAME = "top-entropy"
    q: float = within(0.2, 0, 1)

    def factors(self, tokens: Tokens) -> Weights:
        entropy = tokens.known("entropy")
        return np.where(entropy >= np.quantile(entropy, 1 - self.q), tokens.plain, 0.0)


@dataclass(frozen=True)
class ClipCov(Weighting):
    """w = 0 on a random `share` of all tokens, among those with low < c < high that no clip leaves out; else plain.

    c is their part of the covariance of Â and log π (arXiv:2505.22617, as verl's clip_cov, read in its source): at
    least one token, where the band has any. Which ones is drawn by `seed`.
    """

    NAME = "clip-cov"
    share: float = within(2e-4, 0, 1)
    low: float = within(1.0, -math.inf)
    high: float = within(5.0, -math.inf)
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
    """w = r·Â, never clipped; less β·sign(log r), the slope of β·|log r|, on the `share` of tokens with the largest c.

    arXiv:2505.22617, as verl's kl_cov (read in its source; its default share is 2e-4). On-policy the penalty has no
    slope: where |log r| is below ROUNDING, its sign is that of the rounding of two forward passes, and counts as 0.
    """

    NAME = "kl-cov"
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
    """w = min(r, eps_high)·Â: sg of the truncated ratio before log π; no token is left out (arXiv:2506.13585)."""

    NAME = "cispo"
    eps_high: float = within(5.0, 0)

    def factors(self, tokens: Tokens) -> Weights:
        return np.minimum(tokens.ratio, self.eps_high) * tokens.advantage


@dataclass(frozen=True)
class SAPO(Weighting):
    """w = r·4σ(1 − σ)·Â, σ the logistic function of τ(r − 1): the slope of 4σ/τ·Â, a clip with a soft edge.

    τ is tau_pos where Â > 0, else tau_neg (arXiv:2511.20347).
    """

    NAME = "sapo"
    tau_pos: float = within(1.0, 1e-6)
    tau_neg: float = within(1.05, 1e-6)

    def factors(self, tokens: Tokens) -> Weights:
        tau = np.where(tokens.advantage > 0, self.tau_pos, self.tau_neg)
        half = np.tanh(tau * (tokens.ratio - 1) / 2)  # 4σ(1 − σ) = 1 − tanh²
        with np.errstate(invalid="ignore"):
            return np.where(np.abs(half) < 1, tokens.ratio * (1 - half**2), 0.0) * tokens.advantage


@dataclass(frozen=True)
class GSPO(Weighting):
    """w = s·mean_t(Â·I_trust): the ratio s = exp(mean_t log r) of a whole response, clipped as such (arXiv:2507.18071).

    A token's part is clipped where s > 1 + eps_high and Â > 0, or s < 1 − eps_low and Â < 0.
    """

    NAME = "gspo"
    eps_low: float = within(3e-4, 0, 1)
    eps_high: float = within(4e-4, 0)

    def factors(self, tokens: Tokens) -> Weights:
        ratio = np.exp(tokens.mean_by_response(tokens["logprob"] - tokens.old))
        up, down = tokens.advantage > 0, tokens.advantage < 0
        clipped = (up & (ratio > 1 + self.eps_high)) | (down & (ratio < 1 - self.eps_low))
        return ratio * tokens.mean_by_response(np.where(clipped, 0.0, tokens.advantage))


@dataclass(frozen=True)
class DPPO(Weighting):
    """w = min(r, cap)·Â; 0 where π is more than δ above π_old and Â > 0, or more than δ below and Â ≤ 0.

    The probability's own movement in place of the ratio's (arXiv:2602.04879, as verl's dppo_tv, read in its source).
    """

    NAME = "dppo-tv"
    delta: float = within(0.2, 0, 1)
    cap: float = within(20.0, 0)

    def factors(self, tokens: Tokens) -> Weights:
        moved = np.exp(tokens["logprob"]) - np.exp(tokens.old)
        trusted: Bool[np.ndarray, " K"] = np.where(tokens.advantage > 0, moved <= self.delta, moved >= -self.delta)
        return np.where(trusted, np.minimum(tokens.ratio, self.cap), 0.0) * tokens.advantage


@dataclass(frozen=True)
class IcePop(Weighting):
    """w = k·plain where low ≤ k ≤ high, else 0; k = π_old/π_sampler, trainer against sampler (arXiv:2510.18855)."""

    NAME = "icepop"
    low: float = within(0.5, 0)
    high: float = within(5.0, 0)

    def factors(self, tokens: Tokens) -> Weights:
        with np.errstate(over="ignore"):
            ratio = np.exp(tokens.old - tokens.known("sampler_logprob"))
        return np.where((ratio >= self.low) & (ratio <= self.high), ratio, 0.0) * tokens.plain


@dataclass(frozen=True)
class Delightful(Weighting):
    """w = σ(Â·s/η)·plain, σ the logistic function: surprising tokens count where they did well (arXiv:2603.14608)."""

    NAME = "delightful"
    eta: float = within(1.0, 1e-6)

    def factors(self, tokens: Tokens) -> Weights:
        return (1 + np.tanh(-tokens.advantage * tokens.old / self.eta / 2)) / 2 * tokens.plain


WEIGHTINGS = {
    kind.NAME: kind
    for kind in (
        *(GRPO, Reweight, Lopti, RandomSplit, PermutedWeights, MatchedNorm, IntervalMask, UpWeight, TopEntropy),
        *(ClipCov, KLCov, CISPO, SAPO, GSPO, DPPO, IcePop, Delightful),
    )
}
"""Name → weighting."""


@checked
def make_weighting(text: str) -> Weighting:
    """The weighting that `NAME[:key=value,…]` names; of `FILE.py:NAME[:key=value,…]`, a Weighting of that file's own.

    Raises InputError, with the nearest name, for one that is not known, and for a parameter that it does not take.

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
        raise InputError(f"no weighting is called {name!r}; {_nearest(name, known)}")
    parameters = {parameter.name: parameter for parameter in fields(kind)}
    values = {}
    for part in filter(None, given.split(",")):
        key, _, value = part.partition("=")
        if key not in parameters:
            raise InputError(f"{name} takes no {key!r}; {_nearest(key, parameters)}")
        if key in values:
            raise InputError(f"{name}: {key} is given twice; give it once")
        try:
            values[key] = type(parameters[key].default)(value)
        except ValueError as error:
            raise InputError(f"{name}: {key} is {value!r}; give a number") from error
    return kind(**values)


def _nearest(word: str, known: Mapping[str, object]) -> str:
    """What may have been meant, and all there is."""
    near = get_close_matches(word, known, n=1)
    return (f"did you mean {near[0]}? " if near else "") + f"known: {', '.join(known) or 'none'}"
