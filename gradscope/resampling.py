"""Confidence intervals over clusters (prompts), since tokens of one prompt are not independent.

**Whether an interval is given** depends only on what is known before measuring: there must be `FEWEST` clusters, and a
sample of tokens must be worth `FEWEST_TOKENS` (`short_of`). It must not depend on the measured values: samples that
miss rare large values look the most stable, so such a rule would select the wrong intervals.

**Method.** With `MANY` clusters and every token measured: percentiles of a bootstrap over clusters. With fewer clusters
or a sample of tokens: a jackknife over clusters on an unbounded scale (log odds of a share, log of a size), whose error
includes the variation between clusters and between measured tokens, with Student's t and as many degrees of freedom as
clusters effectively contribute. It also allows for prompts and tokens that a small sample does not show: one more of
either, twice as large as the mean, would change the statistic by 1/n, which widens the error (a token) or the bounds (a
prompt). analyses/verdicts/coverage.py tests the coverage.

Other intervals are Student's t over independent rows, a jackknife over parts that add up, or a jackknife over folds of
clusters, for statistics of pairs of clusters; shares of such a statistic have Fieller's bounds, which may be infinite.
A sample without a large cluster makes both such a statistic and its error too small, which `bound_products_by_folds`
allows for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from gradscope.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

Evaluate = Callable[[np.ndarray], np.ndarray]
"""Maps the counts of each cluster [draws, clusters] to statistics [draws, n]; NaN where undefined."""
Number = int | float | np.number
Seed = int | np.random.Generator | None
"""Seed of a bootstrap, as for `numpy.random.default_rng`; None: no intervals."""


@dataclass(frozen=True)
class Resampling:
    """Settings of a table's confidence intervals."""

    seed: Seed = 0
    confidence: float = 0.95
    resamples: int = 1000


@dataclass(frozen=True)
class Scale:
    """Range of a statistic, and how much an additional, unusual cluster may change it."""

    least: float = -np.inf
    greatest: float = np.inf
    unit: float = 0.0
    """Size of a relative change on the unbounded scale; 0: none."""


ANY, SHARE, SIZE = Scale(), Scale(0.0, 1.0, 1.0), Scale(0.0, np.inf, 1.0)

FEWEST = 6
"""Fewest clusters for an interval: n draws all lie on one side of the median with probability 2·2⁻ⁿ, which exceeds 5 %
for n < 6."""
MANY = 50
"""Clusters from which bootstrap percentiles suffice."""
TOO_FEW = "Too few prompts to say"
"""How every headline begins where fewer than `FEWEST` prompts have a gradient."""
FEWEST_DRAWN = 4
"""Fewest clusters for an interval about a finite population from which they were drawn."""
FEWEST_TOKENS = 6
"""Least worth of a sample for an interval (`effective_sample_size`), in tokens of equal amounts."""
CHUNK = 256
"""Clusters processed at a time in a jackknife."""


@dataclass(frozen=True)
class Shortage:
    """Why a number has no interval."""

    of: Literal["prompts", "tokens"]
    have: int
    wanted: int
    """Number that would suffice."""


def short_of(
    prompts: Number, tokens: Number = np.inf, measured: Number = 0, reached: Number = np.inf
) -> Shortage | None:
    """Return what is lacking for an interval; None if nothing.

    prompts: number of prompts that contribute. tokens: worth of the sample (infinity: every token is measured).
    measured: number of measured tokens. reached: number of prompts with a measured token.

    >>> short_of(3), short_of(6), short_of(30, 2.0, 16)
    (Shortage(of='prompts', have=3, wanted=6), None, Shortage(of='tokens', have=16, wanted=48))
    >>> short_of(30, 7.0, 16, 4)
    Shortage(of='tokens', have=16, wanted=32)
    """
    if prompts < FEWEST:
        return Shortage("prompts", int(prompts), FEWEST)
    if not tokens < FEWEST_TOKENS and reached >= FEWEST:
        return None
    # To reach six prompts by chance takes about twice as many tokens, and more than those that did not.
    wanted = max(measured * FEWEST_TOKENS / max(tokens, 1e-2), 2 * FEWEST, 2 * measured * (reached < FEWEST))
    return Shortage("tokens", measured, int(np.ceil(wanted)))


@dataclass(frozen=True)
class Supply:
    """The prompts on which statements about gradients rest, and those that there are."""

    informative: int
    """Prompts with a gradient among those that were looked at."""
    prompts: int
    """Prompts that were looked at."""
    responses: int = 0
    """Responses to these; 0: unknown."""
    of_informative: int | None = None
    """Prompts with a gradient in the whole batch; None: all were looked at."""
    of_prompts: int | None = None
    """Prompts in the whole batch; None: all were looked at."""
    minutes: float | None = None
    """Time limit that gives a verdict, where one has left prompts out."""

    @property
    def too_few(self) -> str:
        """The headline where fewer than `FEWEST` prompts have a gradient, with what a verdict takes; "" if enough do.

        >>> Supply(3, 8, 64, of_informative=9, of_prompts=16, minutes=24.2).too_few
        'Too few prompts to say: 3 of 8 prompts have a gradient, and a verdict needs 6. Give 25 minutes or more.'
        >>> Supply(3, 8, 64).too_few
        'Too few prompts to say: 3 of 8 prompts have a gradient, and a verdict needs 6. Sample about 8 more prompts \
(64 responses).'
        """
        if not short_of(self.informative):
            return ""
        have = (
            f"{self.informative:,} of {_prompts(self.prompts)} {'has' if self.informative == 1 else 'have'} a gradient"
        )
        if self.informative == self.prompts:
            have = f"{_prompts(self.prompts)} {'has' if self.prompts == 1 else 'have'} a gradient"
        return f"{TOO_FEW}: {have}, and a verdict needs {FEWEST}. {self.wanted}"

    @property
    def wanted(self) -> str:
        """What would give a verdict: more minutes, or more prompts."""
        prompts = self.prompts if self.of_prompts is None else self.of_prompts
        informative = self.informative if self.of_informative is None else self.of_informative
        if prompts > self.prompts and not short_of(informative):
            return (
                "Give more minutes." if self.minutes is None else f"Give {np.ceil(self.minutes):.0f} minutes or more."
            )
        if not informative:
            return "Sample prompts whose responses earn unequal rewards."
        more = int(np.ceil(FEWEST * prompts / informative)) - prompts
        responses = f" ({round(more * self.responses / self.prompts):,} responses)" if self.responses else ""
        return f"Sample about {more:,} more {'prompt' if more == 1 else 'prompts'}{responses}."


def _prompts(count: int) -> str:
    return f"{count:,} prompt{'' if count == 1 else 's'}"


def draw_clusters(num_clusters: int, resamples: int, seed: Seed) -> np.ndarray:
    """Draw clusters with replacement; return the counts [resamples, num_clusters]."""
    shares = np.full(num_clusters, 1 / num_clusters)
    return np.random.default_rng(seed).multinomial(num_clusters, shares, size=resamples)


def percentiles(draws: np.ndarray, confidence: float) -> np.ndarray:
    """Return lower and upper percentiles [2, n] of each column of [draws, n], ignoring NaN.

    >>> percentiles(np.array([[1.0, np.nan], [2.0, np.nan], [3.0, np.nan]]), 0.5).tolist()
    [[1.5, nan], [2.5, nan]]
    """
    tail = (1 - confidence) / 2
    bounds = np.full((2, draws.shape[1]), np.nan)
    for number, column in enumerate(draws.T):
        drawn = column[~np.isnan(column)]
        if drawn.size:
            bounds[:, number] = np.quantile(drawn, [tail, 1 - tail])
    return bounds


def bootstrap(
    evaluate: Evaluate,
    num_clusters: int,
    *,
    seed: Seed = 0,
    confidence: float = 0.95,
    resamples: int = 1000,
    scale: Scale = ANY,
    measured: np.ndarray | None = None,
) -> np.ndarray:
    """Return [3, n]: n statistics of the sample and their lower and upper bounds over clusters, as the module
    describes.

    scale: of all statistics. measured: where tokens were sampled, the `effective_tokens` of each statistic, [n]; None:
    no number rests on a sample. The bounds are NaN with fewer than `FEWEST` clusters, where both are the same, for then
    nothing was seen to vary, and with seed None. Raises InputError for no confidence level and for no resample.

    >>> heights = np.array([1.0, 2.0, 6.0])
    >>> bootstrap(lambda weights: weights @ heights[:, None] / 3, 3).tolist()
    [[3.0], [nan], [nan]]
    """
    check_levels(confidence, resamples)
    draws = redraw(evaluate, num_clusters, seed, resamples)
    return bound(evaluate, num_clusters, draws, confidence=confidence, scale=scale, measured=measured)


def check_levels(confidence: float, resamples: int) -> None:
    """Raise InputError for a confidence level outside (0, 1) or fewer than one resample."""
    if not 0 < confidence < 1 or resamples < 1:
        raise InputError(f"confidence {confidence}, {resamples} resamples; give a level inside (0, 1) and at least one")


def bound(
    evaluate: Evaluate,
    num_clusters: int,
    draws: np.ndarray,
    *,
    confidence: float = 0.95,
    scale: Scale = ANY,
    measured: np.ndarray | None = None,
) -> np.ndarray:
    """`bootstrap` where what `redraw` gave is there."""
    value = evaluate(np.ones((1, num_clusters)))[0]
    if not len(draws):
        bounds = np.full((2, len(value)), np.nan)
    elif num_clusters >= MANY and measured is None:
        bounds = percentiles(draws, confidence)
    else:
        bounds = jackknife(evaluate, num_clusters, confidence=confidence, scale=scale, measured=measured)
    return np.vstack([value, np.where(bounds[0] < bounds[1], bounds, np.nan)])


def bound_bits(
    evaluate: Evaluate,
    num_clusters: int,
    draws: np.ndarray,
    pair: Sequence[np.ndarray],
    *,
    confidence: float = 0.95,
    measured: np.ndarray | None = None,
) -> np.ndarray:
    """Return [3, n]: log₂ of shares over reference shares, and bounds that agree with those of the shares.

    evaluate: maps the counts of each cluster to shares and references, [draws, 2, n]. draws: what `redraw` gave. pair:
    what `bound` gave for the shares and the references, [3, n] each. A jackknife's bounds reach at least as far as the
    share's, over the given reference: on a log scale alone, 70 % [10, 98] could be said to exceed 19 %. Since no share
    exceeds 1, no bound exceeds −log₂ of the reference's lower bound.
    """

    def bits(pairs: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore", divide="ignore"):  # a share of 0, a cell without tokens
            found = np.log2(pairs[:, 0] / pairs[:, 1])
        return np.where(np.isfinite(found), found, np.nan)

    found = bound(
        lambda counts: bits(evaluate(counts)),
        num_clusters,
        bits(draws),
        confidence=confidence,
        scale=Scale(unit=1 / np.log(2)),
        measured=measured,
    )
    shares, references = pair
    if num_clusters < MANY or measured is not None:
        found[1] = np.fmin(found[1], np.log2(shares[1] / references[0]))
        found[2] = np.fmax(found[2], np.log2(shares[2] / references[0]))
    greatest = -np.log2(references[1])
    found[2] = np.where(found[2] > greatest, greatest, found[2])
    return found


def jackknife(
    evaluate: Evaluate,
    num_clusters: int,
    *,
    confidence: float = 0.95,
    scale: Scale = ANY,
    measured: np.ndarray | None = None,
    population: Number = np.inf,
) -> np.ndarray:
    """Return bounds [2, n] from leaving out one cluster at a time, by Student's t on an unbounded scale.

    The degrees of freedom are the effective number of clusters, (Σd²)²/Σd⁴ − ½ with d the effect of leaving each out,
    at most n − 1. NaN if a value is at the end of its range, or would be without one of the clusters.
    measured: as in `bootstrap`. population: size of the finite population from which the clusters were drawn without
    replacement, and which the bounds are about.
    """
    from scipy.stats import t

    value, error, freedom = _leave_out(evaluate, num_clusters, scale)
    token = 0.0 if measured is None else scale.unit / np.maximum(measured, 1.0)
    reach = t.ppf((1 + confidence) / 2, freedom) * np.sqrt(error**2 + token**2)
    reach = np.where(error > 0, np.sqrt(reach**2 + (scale.unit / num_clusters) ** 2), 0.0 * error)
    reach = reach * np.sqrt(1 - num_clusters / population)
    return np.stack([_bind(value - reach, scale), _bind(value + reach, scale)])


def ratio_of_sample(
    parts: np.ndarray,
    wholes: np.ndarray,
    population: int,
    *,
    scale: Scale = ANY,
    confidence: float = 0.95,
) -> np.ndarray:
    """Estimate Σ parts / Σ wholes over a population of clusters from a sample without replacement.

    parts: [clusters, n]; wholes: [clusters, n or 1]. Returns [3, n]: values with lower and upper bounds by `jackknife`,
    which are NaN with fewer than `FEWEST_DRAWN` clusters or no variation, and equal the value if all were drawn. Both
    sums are unbiased; their ratio has a bias of order 1 / clusters drawn.

    >>> ratio_of_sample(np.array([[1.0], [3.0]]), np.array([[2.0], [6.0]]), 2).tolist()
    [[0.5], [0.5], [0.5]]
    """

    def evaluate(draws: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore", divide="ignore"):  # 0/0
            return (draws @ parts) / (draws @ wholes)

    drawn = len(parts)
    value = evaluate(np.ones((1, drawn)))[0]
    if drawn == population:
        return np.stack([value] * 3)
    bounds = np.full((2, len(value)), np.nan)
    if drawn >= FEWEST_DRAWN:
        bounds = jackknife(evaluate, drawn, confidence=confidence, scale=scale, population=population)
    return np.vstack([value, np.where(bounds[0] < bounds[1], bounds, np.nan)])


def _leave_out(evaluate: Evaluate, num_clusters: int, scale: Scale) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return values, jackknife errors and degrees of freedom, on an unbounded scale."""
    left = []
    for start in range(0, num_clusters, CHUNK):
        rows = np.arange(start, min(start + CHUNK, num_clusters))
        weights = np.ones((len(rows), num_clusters))
        weights[np.arange(len(rows)), rows] = 0.0
        left.append(_unbind(evaluate(weights), scale))
    left = np.concatenate(left)
    away = left - left.mean(0)
    squares = (away**2).sum(0)
    with np.errstate(invalid="ignore", divide="ignore"):  # nothing varies
        freedom = np.clip(squares**2 / (away**4).sum(0) - 0.5, 1.0, num_clusters - 1)
    value = _unbind(evaluate(np.ones((1, num_clusters)))[0], scale)
    return value, np.sqrt((num_clusters - 1) / num_clusters * squares), freedom


def _unbind(values: np.ndarray, scale: Scale) -> np.ndarray:
    """Map to an unbounded scale: unchanged, log distance from the minimum, or log odds; NaN at an end."""
    least, greatest = scale.least, scale.greatest
    if np.isinf(least):
        return values
    with np.errstate(invalid="ignore", divide="ignore"):
        out = np.log(values - least)
        out = out if np.isinf(greatest) else out - np.log(greatest - values)
    return np.where(np.isfinite(out), out, np.nan)


def _bind(values: np.ndarray, scale: Scale) -> np.ndarray:
    """Map back from the unbounded scale."""
    least, greatest = scale.least, scale.greatest
    if np.isinf(least):
        return values
    with np.errstate(over="ignore"):
        return least + (np.exp(values) if np.isinf(greatest) else (greatest - least) / (1 + np.exp(-values)))


def redraw(evaluate: Evaluate, num_clusters: int, seed: Seed, resamples: int = 1000) -> np.ndarray:
    """Return the statistics of resampled clusters [resamples, n]; no rows with too few clusters or seed None."""
    if short_of(num_clusters) or seed is None:
        return evaluate(np.ones((1, num_clusters)))[:0]
    return evaluate(draw_clusters(num_clusters, resamples, seed))


def widen(evaluate: Evaluate, num_clusters: int, draws: np.ndarray, *, sampled: bool) -> np.ndarray:
    """Widen the draws around the sample's values as much as the intervals exceed percentiles, for odds.

    Uses Student's t with the jackknife's degrees of freedom; no change with many clusters and every token measured.
    """
    from scipy.stats import norm, t

    if not len(draws) or (num_clusters >= MANY and not sampled):
        return draws
    value, _, freedom = _leave_out(evaluate, num_clusters, ANY)
    factor = np.sqrt(num_clusters / (num_clusters - 1)) * t.ppf(0.975, freedom) / norm.ppf(0.975)
    # Without variation between clusters, there are no degrees of freedom.
    return np.where(draws == value, value, value + factor * (draws - value))


def odds_of_largest(draws: np.ndarray) -> np.ndarray:
    """Return the fraction of draws [draws, n] in which each column is the largest, [n]; NaN without any values.

    >>> odds_of_largest(np.array([[1.0, 2.0], [3.0, 2.0], [np.nan, 2.0], [np.nan, np.nan]])).round(2).tolist()
    [0.33, 0.67]
    """
    drawn = draws[~np.isnan(draws).all(1)]
    if not len(drawn):
        return np.full(draws.shape[1], np.nan)
    return np.bincount(np.nanargmax(drawn, axis=1), minlength=draws.shape[1]) / len(drawn)


def centred_bootstrap(
    evaluate: Evaluate,
    num_clusters: int,
    *,
    seed: Seed = 0,
    confidence: float = 0.95,
    resamples: int = 1000,
) -> np.ndarray:
    """Do the same as `bootstrap` for statistics that are biased by resampling.

    The bounds are value + (percentile − mean of the draws) · t/z · √(n/(n−1)), with the quantiles t of Student's
    distribution with n − 1 degrees of freedom and z of the normal distribution, or those of `jackknife` if wider: for
    clusters of unequal size each alone has too low coverage, percentiles for small shares and a jackknife for large
    ones. NaN with too few clusters or seed None.
    """
    from scipy.stats import norm, t

    value = evaluate(np.ones((1, num_clusters)))[0]
    bounds = np.full((2, len(value)), np.nan)
    if not short_of(num_clusters) and seed is not None:
        draws = evaluate(draw_clusters(num_clusters, resamples, seed))
        known, tail = ~np.isnan(draws).all(0), (1 - confidence) / 2
        factor = t.ppf(1 - tail, num_clusters - 1) / norm.ppf(1 - tail) * np.sqrt(num_clusters / (num_clusters - 1))
        away = percentiles(draws[:, known], confidence) - np.nanmean(draws[:, known], axis=0)
        bounds[:, known] = value[known] + factor * away
        left = jackknife(evaluate, num_clusters, confidence=confidence)
        bounds = np.stack([np.fmin(bounds[0], left[0]), np.fmax(bounds[1], left[1])])
    return np.vstack([value, bounds])


def effective_sample_size(
    amounts: np.ndarray, probabilities: np.ndarray, cells: np.ndarray, num_cells: int
) -> np.ndarray:
    """Return the number of equal tokens worth as much as each cell's sample, [num_cells]; infinity if all are measured.

    This is 1 / the relative variance of the Horvitz–Thompson estimate Σ amount/p over samples that include each token
    with probability p, which is known without measuring: Σ amount² (1/p − 1) / (Σ amount)². amounts: of all tokens,
    proportional to the quantity to be summed.

    >>> amounts, quarter = np.array([1.0, 1.0, 1.0, 1.0]), np.full(4, 0.25)
    >>> effective_sample_size(amounts, quarter, np.zeros(4, int), 1).round(2).tolist()  # less the others' 3/4
    [1.33]
    """
    whole = np.bincount(cells, amounts, minlength=num_cells) ** 2
    with np.errstate(invalid="ignore", divide="ignore"):  # cells without tokens, or with probabilities of 0
        each = np.where(amounts > 0, amounts**2 * (1 / probabilities - 1), 0.0)
        spread = np.bincount(cells, each, minlength=num_cells)
        return np.where(spread > 0, whole / spread, np.inf)


def effective_tokens(worth: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """Return the effective number of measured tokens of samples; infinity where all tokens are measured."""
    return np.where(np.isinf(worth), np.inf, np.minimum(worth, measured))


def effective_size_of_shares(amounts: np.ndarray, worth: np.ndarray) -> np.ndarray:
    """Return the worth of samples for each cell's share, whose odds have errors in numerator and denominator.

    amounts: sums by cell, up to a factor; worth: `effective_sample_size` of each.
    """
    variances, others = 1 / worth, amounts.sum() - amounts
    spread = (amounts**2 * variances).sum() - amounts**2 * variances
    with np.errstate(invalid="ignore", divide="ignore"):  # one cell is all
        return 1 / (variances + np.where(others > 0, spread / others**2, 0.0))


def jackknife_error(statistic: Callable[[np.ndarray], np.ndarray], blocks: Sequence[np.ndarray]) -> np.ndarray:
    """Return the jackknife standard error of `statistic(sum of the blocks)`, leaving out one block at a time; NaN if
    undefined.

    blocks: parts that add up, such as blocks of a sketch's coordinates.
    """
    whole, count = sum(blocks), len(blocks)
    left = np.stack([statistic((whole - block) * (count / (count - 1))) for block in blocks])
    return np.sqrt((count - 1) / count * ((left - left.mean(0)) ** 2).sum(0))


def bound_by_folds(values: np.ndarray, left: np.ndarray, *, confidence: float = 0.95) -> np.ndarray:
    """Return [3, n]: values with lower and upper bounds by a delete-a-fold jackknife.

    left: the same statistics without each of F folds of clusters of equal size, [F, n]. Student's t has F − 1 degrees
    of freedom. Raises InputError for no confidence level.

    >>> folds = np.array([[1.0], [2.0], [6.0]])
    >>> bound_by_folds(folds.mean(0), (folds.sum(0) - folds) / 2).round(2).ravel().tolist()  # of a mean: Student's
    [3.0, -3.57, 9.57]
    """
    reach = _student(len(left) - 1, confidence) * fold_errors(left)
    return np.stack([values, values - reach, values + reach])


def bound_products_by_folds(
    values: np.ndarray, left: np.ndarray, sizes: np.ndarray, *, confidence: float = 0.95
) -> np.ndarray:
    """Return [3, n]: `bound_by_folds` for sums of products of different clusters, whose sizes differ.

    Where a sample lacks a large cluster, both such a sum and its error are too small. So Student's t has (e − 1)/2
    degrees of freedom with e the effective number of clusters, at most F − 1; and the bounds reach at least as far as
    those on the scale of asinh(value/reach), which is linear where the value is not told from 0, and else a logarithm.
    analyses/verdicts/groups.py tests the coverage.

    sizes: squared sizes of the clusters, [clusters].

    >>> values, left = np.array([0.0, 10.0]), np.array([[-0.1, 9.0], [0.0, 10.0], [0.1, 11.0]])
    >>> bound_products_by_folds(values, left, np.ones(9)).round(2).tolist()
    [[0.0, 10.0], [-0.58, 5.03], [0.58, 16.16]]
    """
    with np.errstate(invalid="ignore", divide="ignore"):  # no size, nothing varies
        freedom = min(len(left) - 1, (effective_number(sizes) - 1) / 2)
        reach = _student(freedom, confidence) * fold_errors(left)
        bent = _student(freedom, confidence) * fold_errors(np.arcsinh(left / reach))
        middle = np.arcsinh(values / reach)
        lower, upper = reach * np.sinh(middle - bent), reach * np.sinh(middle + bent)
    return np.stack([values, np.fmin(values - reach, lower), np.fmax(values + reach, upper)])


def effective_number(sizes: np.ndarray) -> float:
    """Return the effective number of clusters, (Σx)²/Σx² with x their sizes; NaN if all are 0.

    >>> effective_number(np.array([1.0, 1.0, 0.0])), effective_number(np.array([3.0, 1.0]))
    (2.0, 1.6)
    """
    return float(sizes.sum() ** 2 / np.square(sizes).sum()) if sizes.any() else float("nan")


def bound_shares_by_folds(
    parts: np.ndarray, left: np.ndarray, whole: float, left_whole: np.ndarray, *, confidence: float = 0.95
) -> np.ndarray:
    """Return [3, n]: parts/whole with the ends of Fieller's confidence set, from a delete-a-fold jackknife.

    The set holds every θ for which part − θ·whole is not told from 0, (part − θ·whole)² ≤ t²·Var(part − θ·whole). Where
    the whole itself is told from 0, it is an interval, with the whole's error in it. Where it is not, or not positive,
    the ends are −inf and inf: any share is then possible. The share is NaN if the whole is not positive.

    parts: [n]; left, left_whole: the same without each of F folds, [F, n] and [F]. Whole and parts are unbiased
    estimates of numbers of which the whole's is not negative, such as a squared norm.

    >>> exact, whole = np.full((3, 1), 6.0), np.array([10.0, 12.0, 14.0])
    >>> bound_shares_by_folds(np.array([6.0]), exact, 12.0, whole, confidence=0.5).round(3).ravel().tolist()
    [0.5, 0.432, 0.593]
    >>> bound_shares_by_folds(np.array([6.0]), exact, 12.0, whole, confidence=0.99).ravel().tolist()
    [0.5, -inf, inf]
    """
    covariance, reach = _fold_covariance(np.column_stack([left, left_whole])), _student(len(left) - 1, confidence)
    variances, along, of_whole = np.diag(covariance)[:-1], covariance[:-1, -1], covariance[-1, -1]
    # (part − θ·whole)² − t²·Var ≤ 0 is a·θ² − 2b·θ + c ≤ 0.
    a, b, c = whole**2 - reach**2 * of_whole, parts * whole - reach**2 * along, parts**2 - reach**2 * variances
    shares = parts / whole if whole > 0 else np.full_like(parts, np.nan)
    if not (whole > 0 and a > 0):
        return np.stack([shares, np.full_like(parts, -np.inf), np.full_like(parts, np.inf)])
    root = np.sqrt(np.maximum(b**2 - a * c, 0.0))
    return np.stack([shares, (b - root) / a, (b + root) / a])


def fold_errors(left: np.ndarray) -> np.ndarray:
    """Return the standard errors [n] of statistics by a delete-a-fold jackknife; left: without each fold, [F, n]."""
    return np.sqrt(np.diag(_fold_covariance(left)))


def _fold_covariance(left: np.ndarray) -> np.ndarray:
    away = left - left.mean(0)
    return (len(left) - 1) / len(left) * away.T @ away


def _student(freedom: Number, confidence: float) -> float:
    """Return the end of Student's interval with these degrees of freedom, in standard errors."""
    from scipy.stats import t

    check_levels(confidence, 1)
    return float(t.ppf((1 + confidence) / 2, freedom))


def in_brackets(lower: float, upper: float, write: Callable[[float], str]) -> str:
    """Format bounds in brackets, each by `write`; empty if there are none or both look the same.

    >>> in_brackets(0.25, 0.5, "{:.1f}".format)
    ' [0.2, 0.5]'
    """
    return "" if np.isnan(lower) or lower == upper else f" [{write(lower)}, {write(upper)}]"


def prompt_clusters(table: pd.DataFrame) -> np.ndarray:
    """Number each row's prompt from 0: by `group`, or by (`batch`, `group`) if there is a column batch."""
    if "group" not in table:
        raise InputError("the table has no column group, the number of each token's prompt; give a table that has it")
    keys = ["batch", "group"] if "batch" in table else ["group"]
    if table.empty or table[keys].isna().any(axis=None):
        raise InputError(f"the table has no rows, or rows without {' and '.join(keys)}; give each token a prompt")
    return table.groupby(keys, observed=True).ngroup().to_numpy()
