"""Quantities of a token's distribution that are differentiated: log π of the sampled token, entropy, divergences.

The network below the logits is the same for every quantity F of π = softmax(z), z = logits / T. Only its slope there is
another. With the pull G_j = ∂F/∂ log π_j,

    ∂F/∂z_j = G_j − π_j Σ_i G_i,          whose sum over j is 0

    log π of o               G_j = 1[j = o]: the slope is e − π
    entropy H                G_j = −π_j log π_j
    reverse KL(π‖ν)          G_j = π_j (log π_j − log ν_j)          Σ_o π(o) (log π/ν)(o) (e_o − π) is its slope
    forward KL(ν‖π)          G_j = −ν_j: the slope is π − ν
    JSD, 0 < β < 1           G_j = (1−β) π_j log(π_j/m_j),  m = βν + (1−β)π          (Eq. 1, arXiv:2306.13649)

For the likeliest token, whose π may round to 1, the slope is G (1−π) − π Σ_{i≠j} G_i, in which nothing cancels.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from gradscope.errors import InputError
from gradscope.objective.logprobs import (
    TokenStatistics,
    gather_logprobs,
    normalise,
    statistics_and_gradient,
    token_statistics,
    widen,
)
from gradscope.objective.spelling import nearest, parse_parameters
from gradscope.policy import Policy

Number = int | float
Given = tuple[Tensor, ...]
"""What a quantity is given of each token beside the logits: nothing; the teacher's logits [k, N]; or the ids of
candidates and their log ν, [k, c] each, with −inf where there is none."""
Rest = Literal["drop", "tail", "renormalise"]
INFINITE = 1e30
"""A divergence beyond this is infinite: log 0 is taken as the least float32, −3e38."""
LEAST_TAIL = math.log(-math.expm1(-1e-7))
"""Lower clamp of the tail's log π and log ν, as in TRL."""


@dataclass(frozen=True)
class Outputs:
    """What a network returns for k sampled tokens."""

    logits: Float[Tensor, "k N"]
    token_ids: Int[Tensor, " k"]
    temperature: Number | Float[Tensor, " k"]
    given: Given = ()

    def __getitem__(self, few: slice) -> Outputs:
        """Return the same for some of the tokens."""
        at = self.temperature[few] if isinstance(self.temperature, Tensor) else self.temperature
        return Outputs(self.logits[few], self.token_ids[few], at, tuple(values[few] for values in self.given))


class Evaluated(NamedTuple):
    """A quantity of k tokens, detached."""

    value: Float[Tensor, " k"]
    """In nats, within its range."""
    slope: Float[Tensor, "k N"]
    """Its derivative by logits / T."""
    clamped: Bool[Tensor, " k"] | None = None
    """Whether a clamp leaves no gradient; None: none does."""


class Quantity(ABC):
    """A function of a token's distribution at its temperature."""

    copies: ClassVar[int] = 10
    """Tensors of the size of the logits that exist at once in a backward pass."""
    asks_teacher: ClassVar[bool] = False
    teacher = None  # a field of those that ask for one

    @abstractmethod
    def evaluate(self, outputs: Outputs) -> Evaluated:
        """Compute the quantity and its slope at logits / T, without a graph."""

    def numbers(self, outputs: Outputs) -> Float[Tensor, " k"]:
        """Compute the quantity, differentiable once, in forward or reverse mode."""
        found, at = self.evaluate(replace(outputs, logits=outputs.logits.detach())), outputs.temperature
        along = (found.slope.div_(at[:, None]) * widen(outputs.logits)).sum(-1)
        return found.value + (along - along.detach())

    def statistics_and_slope(self, outputs: Outputs) -> tuple[TokenStatistics, Float[Tensor, "k N"]]:
        """Compute the tokens' statistics and the quantity's slope."""
        found = token_statistics(outputs.logits, outputs.token_ids, temperature=outputs.temperature)
        return found, self.evaluate(outputs).slope


@dataclass(frozen=True)
class LogProb(Quantity):
    """log π of the sampled token."""

    copies = 4

    def evaluate(self, outputs: Outputs) -> Evaluated:
        statistics, slope = self.statistics_and_slope(outputs)
        return Evaluated(statistics.logprob, slope)

    def numbers(self, outputs: Outputs) -> Float[Tensor, " k"]:
        return gather_logprobs(outputs.logits, outputs.token_ids, temperature=outputs.temperature)

    def statistics_and_slope(self, outputs: Outputs) -> tuple[TokenStatistics, Float[Tensor, "k N"]]:
        return statistics_and_gradient(outputs.logits, outputs.token_ids, temperature=outputs.temperature)


@dataclass(frozen=True)
class Entropy(Quantity):
    """H = −Σ_j π_j log π_j."""

    copies = 6

    @torch.no_grad()
    def evaluate(self, outputs: Outputs) -> Evaluated:
        logprobs, top = _logprobs(outputs.logits, outputs.temperature)
        pulls = logprobs.exp().mul_(_finite(logprobs)).neg_()
        return Evaluated(pulls.sum(-1), _slope(pulls, logprobs, top))


@dataclass(frozen=True)
class Divergence(Quantity):
    """KL or JSD of π and a teacher's ν, over the vocabulary or over candidates S: a loss, whose token weight is −1.

    Both distributions are at the token's temperature, which is therefore the loss's; logged log ν are taken as they
    are. Without a teacher they come from the batch's `teacher_top_ids` and `teacher_top_logprobs`.

    Raises InputError for a field out of range.
    """

    beta: Number = 1.0
    """1: reverse KL, KL(π‖ν); 0: forward KL, KL(ν‖π); between: β KL(ν‖m) + (1−β) KL(π‖m)."""
    teacher: Policy | nn.Module | None = field(default=None, repr=False)
    """A model with the policy's vocabulary, run on the same token ids; None: what was logged."""
    top: int | None = None
    """Number of candidates; None: the whole vocabulary or, without a teacher, all that were logged."""
    top_of: Literal["teacher", "policy"] = "teacher"
    """Whose likeliest tokens are the candidates."""
    rest: Rest = "drop"
    """Tokens outside S: dropped from the sum, which may then be negative (verl); one class more, "tail"; or left out of
    both distributions (TRL without a tail)."""
    least_logprob: Number | None = None
    """Lower clamp of log π and log ν by token (verl's `log_prob_min_clamp`); None: none."""
    least: Number | None = None
    most: Number | None = None
    """Range of the value, outside of which a token has no gradient (verl: 0 to `loss_max_clamp`); None: unlimited."""
    asks_teacher: ClassVar[bool] = True

    @property
    def teacher_model(self) -> nn.Module:
        return self.teacher.model if isinstance(self.teacher, Policy) else self.teacher

    def __post_init__(self) -> None:
        ranges = {"beta": (0, 1), "top": (1, math.inf), "least_logprob": (-math.inf, 0)}
        for name, (low, high) in ranges.items():
            value, kind = getattr(self, name), int if name == "top" else int | float
            if value is not None and not (isinstance(value, kind) and low <= value <= high):
                raise InputError(f"{name} is {value!r}; give a number from {low:g} to {high:g}")
        for name, known in (("rest", get_args(Rest)), ("top_of", ("teacher", "policy"))):
            if (value := getattr(self, name)) not in known:
                raise InputError(f"{name} is {value!r}; give one of {', '.join(known)}")

    @torch.no_grad()
    def evaluate(self, outputs: Outputs) -> Evaluated:
        ids, teacher = self._candidates(outputs)
        classes = _Classes.of(outputs, ids, beside=self.rest != "renormalise")
        value, pulls = self._compare(classes, teacher)
        if not (value.abs() < INFINITE).all():
            raise InputError(
                "the divergence is infinite or NaN: one distribution has probability 0 where the other has not; give a "
                "teacher whose logits are finite"
            )
        inside = value if (self.least, self.most) == (None, None) else value.clamp(self.least, self.most)
        clamped = inside != value
        if self.least_logprob is not None:
            clamped |= (pulls == 0).all(-1)
        slope = classes.pull(pulls).masked_fill_(clamped[:, None], 0.0)
        return Evaluated(inside.to(slope), slope, clamped)

    def _candidates(self, outputs: Outputs) -> tuple[Int[Tensor, "k c"] | None, Float[Tensor, "k d"]]:
        """Return the candidates (None: all tokens), −1 for none, and log ν of the classes that are compared."""
        if self.teacher is None:
            ids, known = outputs.given
            known, order = known.double().topk(min(self.top or known.shape[1], known.shape[1]))
            ids = ids.gather(1, order).masked_fill(known == -torch.inf, -1)
            rest = (-known.logsumexp(-1, keepdim=True).expm1()).clamp_(min=0).log_()  # the digits that were logged
        else:
            if self.top is None:
                return None, _logprobs(outputs.given[0], outputs.temperature)[0].to(widen(outputs.logits))
            shifted, *_, normaliser = normalise(outputs.given[0], outputs.temperature)
            whose = shifted if self.top_of == "teacher" else outputs.logits
            ids = whose.topk(min(self.top, shifted.shape[1])).indices
            known, rest = shifted.gather(1, ids), shifted.scatter_(1, ids, -torch.inf).logsumexp(-1, keepdim=True)
            known, rest = (own.double() - normaliser[:, None] for own in (known, rest))
        if self.rest == "renormalise":
            known = known.log_softmax(-1)
        elif self.rest == "tail":
            known = torch.cat([known, rest], 1)
        return ids, known

    def _compare(
        self, classes: _Classes, teacher: Float[Tensor, "k c"]
    ) -> tuple[Float[Tensor, " k"], Float[Tensor, "k c"]]:
        """Return the divergence over the first c classes, with these log ν, and its slope at their log π."""
        own, low = classes.logprobs[:, : teacher.shape[1]], self.least_logprob
        closed = own.shape == classes.logprobs.shape and low is None  # Σ π over them stays 1, however π changes
        if classes.ids is not None and self.rest == "tail":
            low, closed = own.new_full(own.shape[1:], -torch.inf if low is None else low), False
            low[-1:].clamp_(min=LEAST_TAIL)
        a, b = (_finite(logprobs if low is None else logprobs.clamp(min=low)) for logprobs in (own, teacher))
        if self.beta == 0:
            pulls = b.exp().neg_()
            value = (pulls * (a - b)).sum(-1)
        elif self.beta == 1:
            pulls = (a - b).mul_(a.exp())
            value = pulls.sum(-1)
            if not closed:
                pulls += a.exp()
        else:
            odds = b - a + math.log(self.beta / (1 - self.beta))  # of β ν against (1 − β) π, as a logarithm
            mixed, constant = F.softplus(odds), math.log1p(-self.beta)  # log m/π is their sum
            value = (b.exp() * (odds - mixed - math.log(self.beta))).sum(-1) * self.beta
            pulls, probs = mixed, a.exp().mul_(self.beta - 1)
            pulls.mul_(probs)
            value += pulls.sum(-1) + constant * probs.sum(-1)
            if not closed:  # else a multiple of π pulls nothing, and what is near 0 beside it keeps its digits
                pulls += constant * probs
        return value, pulls if low is None else pulls.mul_(own >= low)


@dataclass(frozen=True)
class _Classes:
    """Classes of tokens under the policy: every token one, or the candidates and, beside them, all other tokens."""

    logprobs: Float[Tensor, "k d"]
    """log π of each class, −inf for candidates that are none."""
    top: Int[Tensor, "k 1"]
    """The likeliest."""
    ids: Int[Tensor, "k c"] | None = None
    """The candidates; None: every token is a class."""
    known: Bool[Tensor, "k c"] | None = None
    """Whether they are any."""
    outside: Float[Tensor, "k N"] | None = None
    """(logits − max) / T, −inf for candidates."""

    @classmethod
    def of(cls, outputs: Outputs, ids: Int[Tensor, "k c"] | None, *, beside: bool) -> _Classes:
        """Sort the tokens into classes. ids: of candidates, −1 for none. beside: whether other tokens have a class."""
        if ids is None:
            return cls(*_logprobs(outputs.logits, outputs.temperature))
        known = ids >= 0
        ids = torch.where(known, ids, ids[:, :1])  # the first again, which changes nothing
        shifted, *_ = normalise(outputs.logits, outputs.temperature)
        classes = shifted.gather(1, ids).masked_fill_(~known, -torch.inf)
        outside = shifted.scatter_(1, ids, -torch.inf)
        if beside:
            classes = torch.cat([classes, outside.logsumexp(-1, keepdim=True)], 1)
        return cls(*_logprobs(classes.double(), 1.0), ids, known, outside)  # so few cost nothing in float64

    def pull(self, pulls: Float[Tensor, "k c"]) -> Float[Tensor, "k N"]:
        """Return the slope at every token's logit / T that these slopes at the first classes' log π make."""
        missing = self.logprobs.shape[1] - pulls.shape[1]
        slope = _slope(F.pad(pulls, (0, missing)) if missing else pulls, self.logprobs, self.top)
        if self.ids is None:
            return slope
        slope = slope.to(self.outside)
        candidates = self.ids.shape[1]
        own = torch.where(self.known, slope[:, :candidates], slope[:, :1])
        if slope.shape[1] == candidates:
            return torch.zeros_like(self.outside).scatter_(1, self.ids, own)
        shares = self.outside.softmax(-1).nan_to_num_(0.0)  # NaN if all tokens are candidates
        return shares.mul_(slope[:, -1:]).scatter_(1, self.ids, own)


def _logprobs(
    logits: Float[Tensor, "k N"], temperature: Number | Float[Tensor, " k"]
) -> tuple[Float[Tensor, "k N"], Int[Tensor, "k 1"]]:
    """Return log π of every token, and the likeliest."""
    shifted, largest, _, normaliser = normalise(logits, temperature)
    return shifted.sub_(normaliser[:, None]), largest[:, None]


def _finite(logprobs: Float[Tensor, "k c"]) -> Float[Tensor, "k c"]:
    """Return log π with a finite floor, by which a term of an impossible token is 0 · finite = 0."""
    return logprobs.clamp(min=torch.finfo(logprobs.dtype).min)


def _slope(
    pulls: Float[Tensor, "k c"], logprobs: Float[Tensor, "k c"], top: Int[Tensor, "k 1"]
) -> Float[Tensor, "k c"]:
    """Return G − π Σ G, without cancellation at the likeliest class; overwrites the pulls."""
    probs = logprobs.exp()
    own, likeliest = pulls.gather(1, top), probs.gather(1, top)
    probs.scatter_(1, top, 0.0)
    others, improbable = pulls.scatter_(1, top, 0.0).sum(-1, keepdim=True), probs.sum(-1, keepdim=True)
    return pulls.sub_(probs.mul_(own + others)).scatter_(1, top, own * improbable - likeliest * others)


QUANTITIES: Mapping[str, Quantity] = {
    "logprob": LogProb(),
    "entropy": Entropy(),
    "reverse-kl": Divergence(1.0),
    "forward-kl": Divergence(0.0),
    "jsd": Divergence(0.5),
}
"""Name → quantity; the divergences are from the logged candidates."""
SORTS = {"top": int, "top_of": str, "rest": str, "least_logprob": float, "least": float, "most": float}
"""A spelled divergence's parameters; `jsd` has beta, too."""
LOGPROB = QUANTITIES["logprob"]


def make_quantity(of: Quantity | str) -> Quantity:
    """Return the quantity spelled `NAME[:key=value,…]`, or the quantity itself.

    Raises InputError for an unknown name or parameter.

    >>> make_quantity("jsd:top=20,rest=tail")
    Divergence(beta=0.5, top=20, top_of='teacher', rest='tail', least_logprob=None, least=None, most=None)
    """
    if isinstance(of, Quantity):
        return of
    name, _, given = of.partition(":")
    if name not in QUANTITIES:
        raise InputError(f"of names {name!r}; {nearest(name, QUANTITIES)}; in Python, or give a Quantity")
    kind, sorts = QUANTITIES[name], SORTS | ({"beta": float} if name == "jsd" else {})
    values = parse_parameters(name, given, sorts if kind.asks_teacher else {})
    return replace(kind, **values) if values else kind
