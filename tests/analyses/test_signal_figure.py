"""What experiment A says of a signal, on prompts whose signal, noise and gradients are planted."""

import numpy as np
import pandas as pd
import pytest

from analyses.measure.signal import WHOLE
from analyses.paper import signal
from gradscope.intervals import EDGES, interval_labels

LABELS = interval_labels(EDGES)
FOLDS, DIMENSIONS = 8, 40


def plant(means, noise, *, prompts, seed=0):
    """G_pa of every prompt and interval [n, 4, d]: a mean along one axis, and Gaussian noise of every axis."""
    rng = np.random.default_rng(seed)
    parts = rng.normal(size=(prompts, 4, DIMENSIONS)) * np.sqrt(np.array(noise) / DIMENSIONS)[None, :, None]
    parts[:, :, 0] += np.array(means)
    return parts


def pair_sums(parts):
    """s_a and C_a of these prompts, and of all tokens, by a double loop over prompts."""
    whole, n = parts.sum(1), len(parts)
    signal_of = sum(parts[p] @ whole[q] for p in range(n) for q in range(n) if p != q) / (n * (n - 1))
    own = sum(parts[p] @ whole[p] for p in range(n)) / n
    return np.append(signal_of, signal_of.sum()), np.append(own, own.sum())


def tabulated(parts):
    fold = np.arange(len(parts)) % FOLDS
    frames = []
    for left_out in range(-1, FOLDS):
        found, own = pair_sums(parts[fold != left_out])
        rows = {
            "group": [*LABELS, WHOLE],
            "signal": found,
            "own": own,
            "tokens": [100] * 4 + [400],
            "prompts": len(parts),
        }
        frames.append(pd.DataFrame(rows).assign(grouping="interval", left_out=left_out))
    return pd.concat(frames, ignore_index=True)


@pytest.mark.parametrize(
    ("means", "sign"),
    [([0.2, 0.5, 0.5, 0.8], -1), ([1.7, 0.1, 0.1, 0.1], 1)],
)
def test_the_share_of_the_signal_is_told_from_that_of_the_gradient_as_it_was_planted(means, sign):
    noise = [8.0, 4.0, 2.0, 2.0]  # half of it in rare tokens
    table = tabulated(plant(means, noise, prompts=160))
    found = signal.compare_rare(table)
    s, s_rare = sum(means) ** 2, means[0] * sum(means)
    own, own_rare = s + sum(noise), s_rare + noise[0]
    true = s_rare / s - (7 * s_rare + own_rare) / (7 * s + own)
    assert np.sign(true) == sign
    assert found["lower"] <= true <= found["upper"]
    assert np.sign(found["difference"]) == sign and found["p"] < 0.05

    [row] = signal.tabulate(table).query("group == @LABELS[0]").to_dict("records")
    assert row["signal_share_lower"] <= s_rare / s <= row["signal_share_upper"]
    assert row["noise_scale_lower"] <= sum(noise) / s <= row["noise_scale_upper"]
    crossing = 1 + (own_rare - own / 2) / (s / 2 - s_rare)
    assert (row["half_at"] is None) == (crossing < 1) or row["half_at"] == pytest.approx(crossing, rel=0.5)


def test_without_a_signal_there_is_no_share_of_it_but_a_lower_bound_of_the_noise_scale():
    table = signal.tabulate(tabulated(plant([0.0] * 4, [8.0, 4.0, 2.0, 2.0], prompts=64)))
    assert table[["signal_share", "signal_share_lower", "share_64"]].isna().all(axis=None)
    assert table["noise_scale_lower"].gt(0).all() and np.isinf(table["noise_scale_upper"]).all()


def test_the_cosine_of_expected_gradients_leaves_out_a_prompt_at_a_time():
    rng = np.random.default_rng(3)
    G = plant([0.2, 0.5, 0.5, 0.8], [2.0] * 4, prompts=40).sum(1)
    H = 0.5 * G + 0.3 * rng.normal(size=G.shape) + 0.4
    prompts = pd.DataFrame({
        "gg": G @ G.sum(0), "gg_own": (G * G).sum(1), "hg": H @ G.sum(0), "hg_own": (H * G).sum(1),
        "gh": G @ H.sum(0), "hh": H @ H.sum(0), "hh_own": (H * H).sum(1),
    })  # fmt: skip
    energies = pd.DataFrame({"tokens": [3, 1], "e": [2.0, 1.0], "e_pi": [0.2, 0.9], "e_pi2": [0.02, 0.81]})
    found = signal.cosines(prompts, energies)

    def cosine(alpha, kept):
        mixed = (1 - alpha) * G + alpha * H
        u = lambda x, y: sum(x[p] @ y[q] for p in kept for q in kept if p != q)  # noqa: E731
        return u(mixed, G) / np.sqrt(u(mixed, mixed) * u(G, G))

    everyone = list(range(len(G)))
    for place in (0, 6, 20):
        alpha = found.loc[place, "alpha"]
        assert found.loc[place, "cosine"] == pytest.approx(cosine(alpha, everyone), rel=1e-9)
        left = np.array([cosine(alpha, [p for p in everyone if p != out]) for out in everyone])
        error = np.sqrt((len(G) - 1) / len(G) * ((left - left.mean()) ** 2).sum())
        half = (found.loc[place, "upper"] - found.loc[place, "lower"]) / 2
        assert half == pytest.approx(2.0227 * error, rel=1e-3, abs=1e-9)  # Student's t with 39 degrees of freedom
    # Orthogonal tokens: three with π = .1 and energy 2, one with π = .9 and energy 1, at α = .3.
    ratios, e = np.array([0.73, 0.73, 0.73, 0.97]), np.array([2.0, 2.0, 2.0, 1.0])
    predicted = (ratios * e).sum() / np.sqrt(e.sum() * (ratios**2 * e).sum())
    assert found.loc[6, "from_energies"] == pytest.approx(predicted)
