"""The interface of a token weighting: columns of a token table in, w_t out; with parameters and a name.

w_t = −N · ∂loss/∂ log π_t, with N the number of kept tokens, is the factor on ∇ log π_t in the gradient of the
weighting's loss. The weightings are in `weightings`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
import pandas as pd
from jaxtyping import Float

from gradscope.errors import InputError
from gradscope.objective.step_rule import StepRule

Number = int | float
Weights = Float[np.ndarray, " K"]
AGGREGATIONS = ("token-mean", "sequence")
"""How a loss averages: over all tokens, or over responses after averaging each response's tokens."""


class Tokens(Mapping[str, Weights]):
    """Columns of a token table that weightings read, [K] in float64. Raises InputError for missing columns."""

    def __init__(self, columns: Mapping[str, Any] | pd.DataFrame):
        self._columns = columns

    def __getitem__(self, name: str) -> Weights:
        if name not in self._columns:
            raise InputError(f"the tokens have no {name!r}, which this weighting needs; give a log that has it")
        return np.array(self._columns[name], dtype=np.float64)

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def known(self, name: str) -> Weights:
        """Return a column. Raises InputError if it has NaN."""
        values = self[name]
        if unknown := int(np.isnan(values).sum()):
            raise InputError(f"{unknown} tokens have no {name!r}, which this weighting needs; give a log that has it")
        return values

    @cached_property
    def old(self) -> Weights:
        """log π_old; the policy's own log π where unknown."""
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

    @cached_property
    def sampler(self) -> Weights:
        """log π_sampler; log π_old where unknown, so that k = 1. Raises InputError if unknown everywhere."""
        unknown = np.isnan(self["sampler_logprob"])
        return self.known("sampler_logprob") if unknown.all() else np.where(unknown, self.old, self["sampler_logprob"])

    @cached_property
    def mismatch(self) -> Weights:
        """log k = log π_old − log π_sampler."""
        return self.old - self.sampler

    @cached_property
    def reference(self) -> Weights:
        """log π_ref, NaN where unknown. Raises InputError if it is unknown everywhere."""
        return self.known("ref_logprob") if np.isnan(self["ref_logprob"]).all() else self["ref_logprob"]

    def before(self, sampler: int) -> Weights:
        """Return log π at the trust region's centre: log π_old or, with `sampler` 1, log π_sampler."""
        return self.sampler if sampler else self.old

    def sum_by_response(self, values: Weights) -> Weights:
        """Sum over each response; return each token's sum [K]."""
        _, response = np.unique(self["response"], return_inverse=True)
        return np.bincount(response, values)[response]

    def mean_by_response(self, values: Weights) -> Weights:
        """Average over each response; return each token's mean [K]."""
        return self.sum_by_response(values) / self.lengths

    @cached_property
    def teacher(self) -> Weights:
        """log ν of the teacher, NaN where unknown. Raises InputError if it is unknown everywhere."""
        return self.known("teacher_logprob") if np.isnan(self["teacher_logprob"]).all() else self["teacher_logprob"]

    @cached_property
    def lengths(self) -> Weights:
        """|y|, the number of tokens in each token's response."""
        return self.sum_by_response(np.ones(len(self["response"])))

    @cached_property
    def signs(self) -> Weights:
        """1 in chosen responses, −1 in rejected ones."""
        return np.where(self.known("chosen") > 0, 1.0, -1.0)

    def margin(self, by_response: Weights) -> Weights:
        """Return chosen minus rejected of each token's pair [K], from a number per response [K].

        Raises InputError unless each pair has one chosen and one rejected response.
        """
        _, first, pair = np.unique(
            np.stack([self.known("pair"), self["response"]]), axis=1, return_index=True, return_inverse=True
        )
        names, of_pair = np.unique(self["pair"][first], return_inverse=True)
        signs = self.signs[first]
        for sign, word in ((1, "chosen"), (-1, "rejected")):
            counts = np.bincount(of_pair, signs == sign, len(names))
            if len(wrong := np.flatnonzero(counts != 1)):
                raise InputError(
                    f"{len(wrong)} of {len(names)} pairs do not have one {word} response (pair {names[wrong[0]]:g} has "
                    f"{int(counts[wrong[0]])}); give both sides of each pair"
                )
        return np.bincount(of_pair, signs * by_response[first])[of_pair][pair]

    @cached_property
    def place(self) -> Weights:
        """A token's position in its response, up to a constant (in a trainer's batch, its column)."""
        return self["place" if "place" in self._columns else "position"]

    def responses(self) -> list[np.ndarray]:
        """Yield each response's rows in token order."""
        response = self["response"]
        order = np.lexsort((self.place, response))
        return np.split(order, np.flatnonzero(np.diff(response[order])) + 1)


def within(default: Number, low: Number, high: Number = math.inf, *, above: str | None = None) -> Any:
    """Declare a parameter with its inclusive range; above: another parameter that must not exceed it."""
    return field(default=default, metadata={"range": (low, high), "above": above})


def one_of(default: str, *others: str) -> Any:
    """Declare a parameter that is one of several words."""
    return field(default=default, metadata={"words": (default, *others)})


@dataclass(frozen=True)
class Weighting(ABC):
    """A token weighting and its parameters. Raises InputError for a parameter out of range."""

    NAME: ClassVar[str]
    """Name on the command line."""
    TRAINERS: ClassVar[Mapping[str, str]] = {}
    """Trainer (a name of SOURCES) → the spelling of its loss here, with that trainer's defaults."""
    OWN_LOSSES: ClassVar[tuple[str, ...]] = ()
    """Trainers whose own loss the tests differentiate; for others, they use the published formula."""
    IS_SAMPLED: ClassVar[bool] = True
    """Whether the policy sampled the tokens; False for losses on given text."""
    DENOMINATOR: ClassVar[Literal["tokens", "responses", "pairs"]] = "tokens"
    """What the loss is a mean over."""
    OTHERS: ClassVar[tuple[str, ...]] = ()
    """Log-probabilities of other policies that it needs: ref_logprobs, teacher_logprobs."""
    _spelled: ClassVar[str] = ""
    """The user's spelling; "" for name and parameters."""

    def __post_init__(self) -> None:
        for parameter in fields(self):
            value, known = getattr(self, parameter.name), parameter.metadata
            self._check_value(parameter.name, value, parameter.default, known)
            if (above := known.get("above")) and value < (least := getattr(self, above)):
                raise InputError(f"{self.NAME}: {parameter.name} is {value:g}, below {above}, {least:g}; swap them")

    def _check_value(self, name: str, value: Any, default: Any, known: Mapping[str, Any]) -> None:
        if (words := known.get("words")) is not None:
            if value not in words:
                raise InputError(f"{self.NAME}: {name} is {value!r}; give one of {', '.join(words)}")
            return
        low, high = known.get("range", (-math.inf, math.inf))
        number, sort = ("whole number", int) if isinstance(default, int) else ("number", int | float)
        if isinstance(value, bool) or not isinstance(value, sort) or not low <= value <= high:
            upper = f" to {high:g}" if high < math.inf else " or more"
            raise InputError(f"{self.NAME}: {name} is {value!r}; give a {number} of {low:g}{upper}")

    @property
    def rule(self) -> StepRule:
        """Return the equivalent step rule if masks and advantage factors express this weighting, else plain."""
        return StepRule()

    @property
    def is_whole(self) -> bool:
        """Whether this is a loss of its own, without advantages and without a KL part beside it."""
        return False

    @property
    def doubts(self) -> tuple[str, ...]:
        """What this loss cannot do, whatever the rollouts: sentences for who may not have meant it."""
        return ()

    @property
    def alpha_and_eta(self) -> tuple[Number | None, Number | None] | None:
        """Return Reweight's α and Lopti's η (None: off) if these two express the weighting, else None.

        >>> from gradscope.objective import make_weighting
        >>> [make_weighting(name).alpha_and_eta for name in ("grpo", "lopti", "cispo")]
        [(None, None), (None, 0.5), None]
        """
        pair = self.rule.reweight_alpha, self.rule.lopti_eta
        known = self.rule == StepRule(*pair) and (pair != (None, None) or self.NAME == "grpo")
        return pair if known else None

    @abstractmethod
    def factors(self, tokens: Tokens) -> Weights | dict[str, Weights]:
        """Return w_t of each token for the mean over tokens; a row per optimizer step if there are several."""

    def weights(
        self, columns: Mapping[str, Any] | pd.DataFrame, *, aggregation: str = "token-mean"
    ) -> dict[str, Weights]:
        """Return w_t [K] in each optimizer step; 0 in steps that leave the token out.

        columns: of a token table: `response`, `logprob`, `old_logprob` (NaN: on-policy), `advantage`, `policy_weight`
        of the plain loss, and others that the weighting needs (`entropy`, `sampler_logprob`, `ref_logprob`,
        `teacher_logprob`, `pair`, `chosen`). `loss_scale`, if present, is included in `policy_weight` and, with
        "token-mean", in the result. aggregation: one of AGGREGATIONS. Raises InputError for a missing column.
        """
        if aggregation not in AGGREGATIONS:
            raise InputError(f"aggregation is {aggregation!r}; give one of {', '.join(AGGREGATIONS)}")
        scale = np.asarray(columns["loss_scale"], dtype=np.float64) if "loss_scale" in columns else 1.0
        if "loss_scale" in columns:  # part of the plain loss's weights, but not of a weighting's
            columns = {**columns, "policy_weight": np.asarray(columns["policy_weight"], dtype=np.float64) / scale}
        tokens = Tokens(columns)
        found = self.factors(tokens)
        found = found if isinstance(found, dict) else {"all": found}
        if aggregation == "token-mean":
            return {name: weights * scale for name, weights in found.items()}
        _, response = np.unique(tokens["response"], return_inverse=True)
        lengths = np.bincount(response)
        scale = len(response) / len(lengths) / lengths[response]
        return {name: weights * scale for name, weights in found.items()}

    def __str__(self) -> str:
        """Return the user's spelling, or else the name and all parameters that differ from their published values.

        >>> from gradscope.objective import WEIGHTINGS, make_weighting
        >>> str(make_weighting("cispo:eps_high=5.0")), str(WEIGHTINGS["cispo"](eps_high=5.0))
        ('cispo:eps_high=5.0', 'cispo')
        """
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not f.default}
        values = {name: own for name, own in given.items() if own != getattr(type(self), name)}
        changed = ",".join(f"{name}={value}".removesuffix(".0") for name, value in values.items())
        return self._spelled or self.NAME + (f":{changed}" if changed else "")
