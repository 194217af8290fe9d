"""How a time budget is divided between scoring prompts, measuring tokens and summing prompts' gradients.

Three variances determine the width of the confidence intervals. In units of the variance between prompts, a share of
Σ‖w·g‖² has variance 1/m from m scored prompts and APART/k from k measured tokens per interval of π; a share of the
summed gradient has 1/s from s prompts with summed gradients. The total is smallest when each number is proportional to
√(variance of one / price of one), up to the available count.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, sqrt

from gradscope.resampling import FEWEST

APART = 25.0
"""Variance of a share of Σ‖w·g‖² from measuring one token per interval, relative to that from one prompt. Measured for
[0, ¼): 14 for the embedded policy (ten prompts, 300 tokens per interval), 39 to 52 for SmolLM2-135M-Instruct (16
prompts, 76 tokens per interval)."""
ENOUGH = 20
"""Measured tokens per interval of π that usually give a confidence interval: an effective sample of six. SmolLM2 needs
19."""
AFTER = 8.0
"""Seconds for everything else: the self-check, the page."""
HALVINGS = 60


@dataclass(frozen=True)
class Prices:
    """Seconds of wall time per item."""

    scoring: float
    """A forward pass over a prompt's responses, on average."""
    measuring: float
    """Measuring one token of each interval."""
    summing: float
    """Summing a prompt's gradients, on average."""
    joint: float = inf
    """Measuring all tokens of a prompt together, on average; infinity: unknown."""

    def of_verdict(self, prompts: int) -> float:
        """Return the seconds that a verdict takes, if so many prompts must be looked at for it."""
        return prompts * (self.scoring + self.summing) + min(ENOUGH * self.measuring, prompts * self.joint)

    def of_all(self, prompts: int) -> float:
        """Return the seconds of all tokens of so many prompts, and of their sums."""
        return prompts * (self.scoring + self.joint + self.summing)


@dataclass(frozen=True)
class Shares:
    """What fits into the time budget."""

    scored: int
    """Prompts."""
    measured: int
    """Tokens of each interval."""
    summed: int
    """Prompts, among those scored."""


def share_seconds(
    seconds: float,
    prices: Prices,
    *,
    prompts: int,
    tokens: int,
    summable: int | None = None,
    least: int = 1,
    fewest: int = FEWEST,
) -> Shares:
    """Divide the seconds so that the sum of the three variances is smallest.

    The fewest prompts scored, ENOUGH tokens measured and the fewest prompts summed come first. If these exceed the
    time, only one prompt is summed, since a share from fewer has no interval; if they still do, nothing comes first.

    Args:
        prompts: number of prompts.
        tokens: largest possible number of tokens in an interval.
        summable: prompts whose gradients fit into memory; None: all.
        least: prompts that are summed however long it takes; if more than one, sums come before tokens.
        fewest: prompts that a verdict needs: `FEWEST` with a gradient, and those drawn before them without one.

    >>> share_seconds(300.0, Prices(scoring=2.0, measuring=1.5, summing=20.0), prompts=16, tokens=4000)
    Shares(scored=16, measured=98, summed=6)
    """
    fewest, most = min(fewest, prompts), prompts if summable is None else min(summable, prompts)
    least = min(least, most)
    enough = 1 if least > 1 else min(ENOUGH, tokens)
    apart = {
        "scored": _Number(1.0, prices.scoring, fewest, prompts),
        "measured": _Number(APART, prices.measuring, enough, tokens),
        "summed": _Number(1.0, prices.summing, min(fewest, most), most, least),
    }
    if least == 1 and _cost(apart) > seconds:
        apart["summed"] = _Number(1.0, prices.summing, 1, 1)
    found = _divide(seconds, apart)
    if found["summed"] >= found["scored"]:  # summed prompts are a subset of the scored ones
        both = _Number(2.0, prices.scoring + prices.summing, fewest, prompts, least)
        found = _divide(seconds, {"scored": both, "measured": apart["measured"]})
    scored, measured = int(found["scored"]), int(found["measured"])
    return Shares(scored, measured, min(most, int(found.get("summed", scored))))


@dataclass(frozen=True)
class _Number:
    """A number to choose, whose variance is `gain` divided by it."""

    gain: float
    price: float
    """Seconds per item."""
    least: int
    """Least number; not respected if the least numbers together take too long."""
    most: int
    kept: int = 1
    """Least number that is always respected."""

    def at(self, scale: float, *, floor: bool) -> float:
        wanted = scale * sqrt(self.gain / max(self.price, 1e-12))
        return min(self.most, max(self.least if floor else self.kept, wanted))


def _cost(numbers: dict[str, _Number], scale: float = 0.0, *, floor: bool = True) -> float:
    """Return the seconds that the numbers at this scale take; by default, the least ones."""
    return sum(number.price * number.at(scale, floor=floor) for number in numbers.values())


def _divide(seconds: float, numbers: dict[str, _Number]) -> dict[str, float]:
    """Return the numbers with the smallest sum of variances that together take this many seconds."""
    floor = _cost(numbers) <= seconds
    low, high = 0.0, max(number.most * sqrt(max(number.price, 1e-12) / number.gain) for number in numbers.values())
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _cost(numbers, middle, floor=floor) <= seconds else (low, middle)
    # With a tolerance for rounding, so that everything is used if time suffices.
    return {name: number.at(low, floor=floor) + 1e-6 for name, number in numbers.items()}
