"""What a token weighting is: columns of a token table in, w_t out; its parameters and its name.

It says what stands before ∇ log π_t in the gradient of its loss: w_t = −N · ∂loss/∂ log π_t, N the kept tokens of the
batch. Which there are is in `weightings`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from jaxtyping import Float

from gradscope.errors import InputError
from gradscope.objective.methods import Method

Number = int | float
Weights = Float[np.ndarray, " K"]
AGGREGATIONS = ("token-mean", "sequence")
"""How a loss adds up: over all tokens alike, or the mean over responses of the mean over their tokens."""


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

    @cached_property
    def sampler(self) -> Weights:
        """log π_sampler; where some are unknown, log π_old, so that k = 1. Raises InputError where all are unknown."""
        unknown = np.isnan(self["sampler_logprob"])
        return self.known("sampler_logprob") if unknown.all() else np.where(unknown, self.old, self["sampler_logprob"])

    @cached_property
    def mismatch(self) -> Weights:
        """log k = log π_old − log π_sampler."""
        return self.old - self.sampler

    def before(self, sampler: int) -> Weights:
        """The log-probabilities that a trust region is around: log π_old, or with `sampler` 1 log π_sampler."""
        return self.sampler if sampler else self.old

    def sum_by_response(self, values: Weights) -> Weights:
        """Each token's response's sum."""
        _, response = np.unique(self["response"], return_inverse=True)
        return np.bincount(response, values)[response]

    def mean_by_response(self, values: Weights) -> Weights:
        """Each token's response's mean."""
        return self.sum_by_response(values) / self.sum_by_response(np.ones_like(values))

    @cached_property
    def place(self) -> Weights:
        """Where a token stands in its response, up to a constant: its position, or its column in a trainer's batch."""
        return self["place" if "place" in self._columns else "position"]

    def responses(self) -> list[np.ndarray]:
        """Each response's rows, in the order of its tokens."""
        response = self["response"]
        order = np.lexsort((self.place, response))
        return np.split(order, np.flatnonzero(np.diff(response[order])) + 1)


def within(default: Number, low: Number, high: Number = math.inf, *, above: str | None = None) -> Any:
    """A parameter and the range of its values, ends included; above: a parameter that it is not below."""
    return field(default=default, metadata={"range": (low, high), "above": above})


@dataclass(frozen=True)
class Weighting(ABC):
    """A weighting and its parameters. Raises InputError for a parameter out of its range."""

    NAME: ClassVar[str]
    """What it is called on the command line."""
    TRAINERS: ClassVar[Mapping[str, str]] = {}
    """How that of a trainer, a name of SOURCES, is written here, with the trainer's own defaults."""
    OWN_LOSSES: ClassVar[tuple[str, ...]] = ()
    """Trainers whose own loss is differentiated for comparison (tests/integrations); of others it is a printed one."""
    _spelled: ClassVar[str] = ""
    """As the user called it; "": by its name and parameters."""

    def __post_init__(self) -> None:
        for parameter in fields(self):
            value, (low, high) = getattr(self, parameter.name), parameter.metadata.get("range", (-math.inf, math.inf))
            number, sort = ("whole number", int) if isinstance(parameter.default, int) else ("number", int | float)
            if isinstance(value, bool) or not isinstance(value, sort) or not low <= value <= high:
                upper = f" to {high:g}" if high < math.inf else " or more"
                raise InputError(f"{self.NAME}: {parameter.name} is {value!r}; give a {number} of {low:g}{upper}")
            if (above := parameter.metadata.get("above")) and value < (least := getattr(self, above)):
                raise InputError(f"{self.NAME}: {parameter.name} is {value:g}, below {above}, {least:g}; swap them")

    @property
    def passes(self) -> Method:
        """The passes and advantages of a trainer that these are weights of, where masks and factors say all of it."""
        return Method()

    @property
    def alpha_and_eta(self) -> tuple[Number | None, Number | None] | None:
        """α of Reweight and η of Lopti (None: off), where these two say all of it; None where they do not.

        >>> from gradscope.objective import make_weighting
        >>> [make_weighting(name).alpha_and_eta for name in ("grpo", "lopti", "cispo")]
        [(None, None), (None, 0.5), None]
        """
        pair = self.passes.reweight_alpha, self.passes.lopti_eta
        known = self.passes == Method(*pair) and (pair != (None, None) or self.NAME == "grpo")
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
        """As the user called it; else as the command line takes it: the name, and what has not its published value.

        >>> from gradscope.objective import WEIGHTINGS, make_weighting
        >>> str(make_weighting("cispo:eps_high=5.0")), str(WEIGHTINGS["cispo"](eps_high=5.0))
        ('cispo:eps_high=5.0', 'cispo')
        """
        values = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        changed = ",".join(f"{name}={value!r}".removesuffix(".0") for name, value in values.items())
        return self._spelled or self.NAME + (f":{changed}" if changed else "")
