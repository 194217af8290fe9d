"""How minutes are shared: prompts that are scored, tokens that are measured, prompts whose gradients are summed.

Three variances decide how wide a page's confidence intervals are. In units of the variance between prompts, a share of
Σ‖w·g‖² has 1/m from m scored prompts and APART/k from k tokens measured in each interval of π; a share of the summed
gradient has 1/s from the s prompts whose gradients are summed. The sum of the three is smallest where each number is in
proportion to √(variance of one / price of one), as far as there are that many.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

APART = 25.0
"""Variance that one token of each interval gives a share of Σ‖w·g‖², over that which one prompt gives it.
Found for [0, ¼), from every token of the batch: 14 of the embedded policy's ten prompts, 39 to 52 of 16 of
SmolLM2-135M-Instruct, with 300 and 76 tokens drawn in each interval."""
FEWEST = 6
"""Prompts below which there is no confidence interval (`resampling.short_of`)."""
AFTER = 8.0
"""Seconds of what is neither scored, measured nor summed: the self-check, a page."""
HALVINGS = 60


@dataclass(frozen=True)
class Prices:
    """Seconds that each takes, by the wall clock."""

    scoring: float
    """A prompt's responses in a forward pass, on average."""
    measuring: float
    """One token of each interval."""
    summing: float
    """A prompt's summed gradients, on average."""


@dataclass(frozen=True)
class Shares:
    """What fits into some seconds."""

    scored: int
    """Prompts."""
    measured: int
    """Tokens of each interval."""
    summed: int
    """Prompts, of those that are scored."""


def share_seconds(
    seconds: float, prices: Prices, *, prompts: int, tokens: int, summable: int | None = None, least: int = 1
) -> Shares:
    """Divide seconds so that the three variances are smallest together.

    Fewer than FEWEST prompts are scored or summed only where those alone take longer.

    Args:
        prompts: how many there are.
        tokens: how many the largest interval may have.
        summable: prompts whose gradients the memory holds; None: of all.
        least: prompts that are summed however long they take.

    >>> share_seconds(300.0, Prices(scoring=2.0, measuring=1.5, summing=20.0), prompts=16, tokens=4000)
    Shares(scored=16, measured=98, summed=6)
    """
    fewest, most = min(FEWEST, prompts), prompts if summable is None else min(summable, prompts)
    least = min(least, most)
    apart = {
        "scored": _Number(1.0, prices.scoring, fewest, prompts),
        "measured": _Number(APART, prices.measuring, 1, tokens),
        "summed": _Number(1.0, prices.summing, fewest, most, least),
    }
    found = _divide(seconds, apart)
    if found["summed"] >= found["scored"]:  # summed prompts are among the scored: both become one number
        both = _Number(2.0, prices.scoring + prices.summing, fewest, prompts, least)
        found = _divide(seconds, {"scored": both, "measured": apart["measured"]})
    scored, measured = int(found["scored"]), int(found["measured"])
    return Shares(scored, measured, min(most, int(found.get("summed", scored))))


@dataclass(frozen=True)
class _Number:
    """How many of something, whose variance is `gain` over it."""

    gain: float
    price: float
    """Seconds of one."""
    least: int
    """Given up where the least of all numbers together take longer than there is."""
    most: int
    kept: int = 1
    """Is not given up."""

    def at(self, scale: float, *, floor: bool) -> float:
        wanted = scale * sqrt(self.gain / max(self.price, 1e-12))
        return min(self.most, max(self.least if floor else self.kept, wanted))


def _divide(seconds: float, numbers: dict[str, _Number]) -> dict[str, float]:
    """Return the numbers with the smallest sum of variances among those that together take this many seconds."""

    def cost(scale: float, floor: bool) -> float:
        return sum(number.price * number.at(scale, floor=floor) for number in numbers.values())

    floor = cost(0.0, True) <= seconds
    low, high = 0.0, max(number.most * sqrt(max(number.price, 1e-12) / number.gain) for number in numbers.values())
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if cost(middle, floor) <= seconds else (low, middle)
    # Up to rounding, so that nothing is lost where there is enough of all.
    return {name: number.at(low, floor=floor) + 1e-6 for name, number in numbers.items()}
