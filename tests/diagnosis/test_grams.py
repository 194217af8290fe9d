"""Shares, signal and noise of summed gradients: against the vectors themselves, and against what was planted."""

from __future__ import annotations

import math

import numpy as np
import pytest
from support.planted import LABELS, make_gram, numbers, plant_vectors

from gradscope.diagnosis import cosine_matrix, gradient_rows
from gradscope.diagnosis.sums import signal_and_noise
from gradscope.gradients import Gram


def test_gradient_rows_are_those_of_the_vectors_themselves():
    rng = np.random.default_rng(0)
    vectors, tokens = plant_vectors(5, [1, 0.2, 0.5, 0.1], [0.5, 1, 0.3, 0.2], rng), rng.integers(1, 9, (5, 4))
    rows = gradient_rows(Gram.exact(make_gram(vectors)), tokens.astype(float), LABELS, metric="raw", seed=rng)
    parts, whole = vectors.sum(0), vectors.sum((0, 1))
    norms, length = [np.linalg.norm(part) for part in parts], np.linalg.norm(whole)
    expected = {
        "gradient_share": [part @ whole / (whole @ whole) for part in parts],
        "norm_ratio": [norm / length for norm in norms],
        "cosine_with_all": [
            part @ whole / norm / np.linalg.norm(whole) for part, norm in zip(parts, norms, strict=True)
        ],
        "gradient_index": [
            math.log2(norm**2 / sum(m**2 for m in norms) / (count / tokens.sum()))
            for norm, count in zip(norms, tokens.sum(0), strict=True)
        ],
        "gradient_norm": [*norms, length],
    }
    for statistic, values in expected.items():
        assert numbers(rows, statistic) == pytest.approx(values, rel=1e-10)
    signals = []
    for part in (*vectors.transpose(1, 0, 2), vectors.sum(1)):
        signals.append(sum(part[p] @ part[q] for p in range(5) for q in range(5) if p != q) * 5 / 4)
    assert numbers(rows, "signal") == pytest.approx(signals, rel=1e-10)
    spread = [5 * part.var(0, ddof=1).sum() for part in (*vectors.transpose(1, 0, 2), vectors.sum(1))]
    assert numbers(rows, "noise") == pytest.approx(spread, rel=1e-10)
    whole_squares = [norm**2 for norm in expected["gradient_norm"]]
    assert np.add(numbers(rows, "signal"), numbers(rows, "noise")) == pytest.approx(whole_squares, rel=1e-10)
    assert numbers(rows, "signal_fraction") == pytest.approx(
        [s / w for s, w in zip(signals, whole_squares, strict=True)], rel=1e-10
    )
    cosines = cosine_matrix(make_gram(vectors))
    assert cosines.loc[0, 2] == pytest.approx(parts[0] @ parts[2] / norms[0] / norms[2], rel=1e-10)


def test_the_bounds_of_gradient_shares_are_redrawn_ones_without_their_bias_or_a_jackknifes_where_those_are_wider():
    from scipy.stats import t

    vectors = plant_vectors(6, [1, 0.2, 0.5, 0.1], [0.5, 1, 0.3, 0.2], np.random.default_rng(1))
    rows = gradient_rows(
        Gram.exact(make_gram(vectors)), np.ones((6, 4)), LABELS, metric="raw", seed=np.random.default_rng(2)
    )
    shares, cosines = [], []
    leave_out = 1 - np.eye(6)
    for times in [*leave_out, *np.random.default_rng(2).multinomial(6, np.full(6, 1 / 6), size=1000)]:
        parts = np.tensordot(times, vectors, 1)
        whole = parts.sum(0)
        shares.append(parts @ whole / (whole @ whole))
        cosines.append(parts @ whole / np.linalg.norm(whole) / np.linalg.norm(parts, axis=1))
    factor = 2.5705818 / 1.9599640 * math.sqrt(6 / 5)  # Student's t with five degrees of freedom, and the normal
    for statistic, found in (("gradient_share", shares), ("cosine_with_all", cosines)):
        left, draws, value = np.array(found[:6]), found[6:], np.array(numbers(rows, statistic))
        squares = np.square(left - left.mean(0))
        freedom = np.clip(squares.sum(0) ** 2 / np.square(squares).sum(0) - 0.5, 1, 5)
        reach = t.ppf(0.975, freedom) * np.sqrt(5 / 6 * squares.sum(0))
        for bound, level, farther in (("lower", 0.025, np.minimum), ("upper", 0.975, np.maximum)):
            away = np.quantile(draws, level, axis=0) - np.mean(draws, axis=0)
            expected = value + farther(factor * away, -reach if bound == "lower" else reach)
            if statistic == "cosine_with_all":
                expected = expected.clip(-1, 1)
            assert numbers(rows, statistic, bound) == pytest.approx(expected.tolist(), rel=1e-6)


def test_the_jackknife_of_signal_is_that_of_leaving_each_prompt_out():
    from scipy.stats import t

    vectors = plant_vectors(7, [0.4], [1.0], np.random.default_rng(0))[:, 0]
    found = signal_and_noise((vectors @ vectors.T)[None])["signal"][:, 0]
    left = []
    for out in range(7):
        rest = np.delete(vectors, out, axis=0)
        pairs = [rest[p] @ rest[q] for p in range(6) for q in range(6) if p != q]
        left.append(49 * np.mean(pairs))
    squares = np.square(vectors).sum(1)
    student = t.ppf(0.975, min(6, (squares.sum() ** 2 / (squares**2).sum() - 1) / 2))
    reach = student * math.sqrt(6 / 7 * np.square(left - np.mean(left)).sum())
    bent = np.arcsinh(np.array(left) / reach)
    bent = student * math.sqrt(6 / 7 * np.square(bent - bent.mean()).sum())
    ends = [reach * math.sinh(math.asinh(found[0] / reach) + side * bent) for side in (-1, 1)]
    expected = [min(found[0] - reach, ends[0]), max(found[0] + reach, ends[1])]
    assert found[1:] == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("mean", [0.0, 0.3, 1.0])
def test_signal_is_unbiased_and_its_interval_covers_in_a_planted_gaussian_model(mean):
    n, repeats, rng = 10, 400, np.random.default_rng(5)
    planted, found, inside, noises = (n * mean) ** 2, [], 0, []
    for _ in range(repeats):
        vectors = plant_vectors(n, [mean], [1.0], rng)[:, 0]
        statistics = signal_and_noise((vectors @ vectors.T)[None])
        value, lower, upper = statistics["signal"][:, 0]
        found.append(value)
        noises.append(statistics["noise"][0, 0])
        inside += lower <= planted <= upper
    # Four standard errors; the noise of a sum of n draws is n times that of one.
    assert abs(np.mean(found) - planted) < 4 * np.std(found) / math.sqrt(repeats)
    assert abs(np.mean(noises) - n) < 4 * np.std(noises) / math.sqrt(repeats)
    assert inside >= 0.9 * repeats


@pytest.mark.all
@pytest.mark.parametrize("scale", ["heavy", "equal"])
def test_intervals_of_gradient_shares_cover_in_a_planted_gaussian_model(scale):
    """The estimand: E⟨G_a, G⟩ / E‖G‖² at this number of prompts, whose noise is of one size or exponential in it."""
    n, means, sds, rng = 10, [0.3, 0.3, 0.6, 0.1], [1.0, 0.5, 0.2, 0.1], np.random.default_rng(6)
    squares = np.square(means) * n**2 + np.square(sds) * n * (2 if scale == "heavy" else 1)
    truth, inside = squares / squares.sum(), np.zeros(4)
    for _ in range(150):
        sizes = rng.exponential(size=(n, 1, 1)) if scale == "heavy" else 1.0
        vectors = sizes * plant_vectors(n, [0.0] * 4, sds, rng) + np.eye(4, 150) * np.array(means)[:, None]
        rows = gradient_rows(
            Gram.exact(make_gram(vectors)), np.ones((n, 4)), LABELS, metric="raw", seed=rng, resamples=200
        )
        rows = rows[rows["statistic"] == "gradient_share"]
        inside += (rows["lower"] <= truth) & (truth <= rows["upper"])
    # A coverage of .93 gives below 126 of 150 once in 10,000.
    assert inside.min() >= 126, inside


def test_an_interval_without_tokens_or_without_a_gradient_is_nan():
    vectors = plant_vectors(5, [0.0, 1.0, 1.0, 1.0], [0.0, 1, 1, 1], np.random.default_rng(0))
    vectors[:, 0] = 0.0
    tokens = np.ones((5, 4))
    tokens[:, 0] = 0
    rows = gradient_rows(Gram.exact(make_gram(vectors)), tokens, LABELS, metric="raw", seed=np.random.default_rng(0))
    assert rows.loc[rows["interval"] == LABELS[0], "value"].isna().all()
    vectors[:] = 0.0
    rows = gradient_rows(
        Gram.exact(make_gram(vectors)), np.ones((5, 4)), LABELS, metric="raw", seed=np.random.default_rng(0)
    )
    assert rows.loc[rows["statistic"].isin(["gradient_share", "signal_fraction"]), "value"].isna().all()
