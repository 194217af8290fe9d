"""Bounds over folds of prompts, on planted signal: Gaussian noise, heavy tails, idle or unequal prompts, none."""

import numpy as np
import pytest
import torch
from scipy.stats import binom

from gradscope.gradients import Contributions, GroupSignals

REPLICATES, FOLDS = 300, 8
UNLUCKY = 1e-3
"""Probability that a right test fails."""
MEANS = np.array([[0.4, 0.3], [0.6, -0.3]])
"""μ_a of two groups of tokens along two directions: the mean of all is (1, 0), so s = 1 and both s_a are shares."""


def draw(rng: np.random.Generator, kind: str, prompts: int, scale: float, rank: int) -> np.ndarray:
    """Gradients [n, 2, rank + 2] of both groups' tokens of each prompt; E‖noise‖² = scale, ¾ of it the first's."""
    size = np.ones(prompts)
    if kind == "lognormal":
        size = np.exp(rng.normal(size=prompts) - 1)  # E size² = 1
    if kind == "t":
        size = np.abs(rng.standard_t(2.5, size=prompts)) / np.sqrt(5)  # E t² = 5
    if kind == "idle":
        size = (rng.random(prompts) < 0.3) / np.sqrt(0.3)
    if kind == "unequal":
        size = np.exp(rng.normal(size=prompts) / 2 - 1 / 8)  # E size = 1: it is the signal's, too
    means = np.zeros((2, rank + 2))
    means[:, :2] = MEANS * (kind != "no signal")
    spread = np.sqrt(scale / (rank + 2) * np.array([0.75, 0.25]))[:, None]
    noise = spread * size[:, None, None] * rng.normal(size=(prompts, 2, rank + 2))
    scales = {"idle": (size > 0) / 0.3, "unequal": size}.get(kind, np.ones(prompts))
    return means * scales[:, None, None] + noise


def contribute(terms: np.ndarray, rng: np.random.Generator) -> GroupSignals:
    """What `TokenJacobian.contributions` gives for prompts of two tokens with these weighted gradients, by group."""
    n, whole = len(terms), terms.sum(1)
    folds = rng.permutation(n) % FOLDS
    sums = np.stack([whole[folds == k].sum(0) for k in range(FOLDS)])
    by_fold = torch.from_numpy(np.einsum("pad,kd->kpa", terms, sums).reshape(FOLDS, -1))
    own, prompts = np.einsum("pad,pd->pa", terms, whole).ravel(), np.repeat(np.arange(n), 2)
    found = (torch.from_numpy(each) for each in (own, prompts))
    made = Contributions(by_fold.sum(0), *found, n, 0.0, by_fold, torch.from_numpy(folds))
    return made.grouped(torch.arange(2).repeat(n))


CASES = [
    ("gaussian", 50, 10, 50, 0.95, 0.99),
    ("gaussian", 100, 50, 3, 0.95, 0.05),
    ("lognormal", 100, 10, 50, 0.95, 0.99),
    ("t", 100, 10, 50, 0.95, 0.99),
    ("idle", 120, 10, 50, 0.95, 0.9),
    ("unequal", 12, 1, 50, 0.93, 0.5),
    ("unequal", 32, 1, 50, 0.93, 0.9),
]
"""Kind, prompts, noise scale and rank; how often bounds of a signal hold, and those of shares are finite."""


@pytest.mark.all
@pytest.mark.parametrize(("kind", "prompts", "scale", "rank", "covered", "told"), CASES)
def test_bounds_cover_the_planted_signal_and_its_shares(kind, prompts, scale, rank, covered, told):
    rng, truth = np.random.default_rng(0), np.array([0.4, 0.6, 1.0])
    signals, shares, finite = np.zeros(3, dtype=int), np.zeros(2, dtype=int), 0
    for _ in range(REPLICATES):
        found = contribute(draw(rng, kind, prompts, scale, rank), rng)
        signal, share = found.signal_bounds(), found.share_bounds()
        signals += (signal[1] <= truth) & (truth <= signal[2])
        shares += (share[1] <= truth[:2]) & (truth[:2] <= share[2])
        finite += np.isfinite(share).all()
    assert (signals >= binom.ppf(UNLUCKY / 5, REPLICATES, covered)).all()
    assert (shares >= binom.ppf(UNLUCKY / 5, REPLICATES, 0.95)).all()
    assert finite >= binom.ppf(UNLUCKY, REPLICATES, told)


def test_without_signal_shares_have_no_bounds():
    rng, told = np.random.default_rng(1), 0
    for _ in range(REPLICATES):
        share = contribute(draw(rng, "no signal", 50, 10, 50), rng).share_bounds()
        infinite = np.isinf(share[1:])
        assert infinite.all() or not infinite.any()
        told += not infinite.any()
    assert told <= binom.ppf(1 - UNLUCKY, REPLICATES, 0.025)  # the total is told from 0, on the right side
