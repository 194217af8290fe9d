"""The decision, on planted accuracies whose truth is known."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from analyses.common import read_runs
from analyses.paper import decision

GAINS = {"grpo": 0.0, "reweight": 0.1, "lopti": 0.01, "random-split": 0.06, "both": 0.3}


def plant(sd, *, gains=GAINS, seeds=12):
    """A row per variant and seed: what the seed is worth, the gain, and as much noise."""
    rng = np.random.default_rng(1)
    base = 0.5 + 0.1 * rng.normal(size=seeds)
    frames = [
        pd.DataFrame({"variant": name, "seed": range(seeds), "sampled": base + gain + sd * rng.normal(size=seeds)})
        for name, gain in gains.items()
    ]
    return pd.concat(frames, ignore_index=True)


def test_a_gain_is_told_excluded_or_left_open_as_it_was_planted():
    runs = plant(0.02)
    found = decision.contrast(runs).set_index(["variant", "baseline"])
    assert found.loc[decision.NAMED, "differs"].tolist() == [True, False, True]
    assert found.loc[decision.NAMED, "gain_excluded"].tolist() == [False, True, True]
    assert not found.loc[decision.BESIDE, ["differs", "gain_excluded", "named"]].any(axis=None)
    assert found["seeds"].tolist() == [12, 12, 12, 12, 12, 0, 0, 0]
    wide = runs.pivot(index="seed", columns="variant", values="sampled")
    values = wide["lopti"] - wide["random-split"]
    interval = stats.ttest_1samp(values, 0).confidence_interval(1 - 0.05 / 3)
    row = found.loc[("lopti", "random-split")]
    assert (row["corrected_lower"], row["corrected_upper"]) == pytest.approx(tuple(interval))
    wider = decision.contrast(plant(0.2)).set_index(["variant", "baseline"])
    assert not wider.loc[[("reweight", "grpo")], ["differs", "gain_excluded"]].any(axis=None)


def test_the_smallest_difference_told_is_told_four_times_in_five():
    found = decision.contrast(plant(0.02)).iloc[0]
    sd = (found["upper"] - found["lower"]) / 2 * np.sqrt(12) / stats.t.ppf(0.975, 11)
    draws = np.random.default_rng(0).normal(found["smallest_told"], sd, (20_000, 12))
    assert (stats.ttest_1samp(draws, 0, axis=1).pvalue < 0.05 / 3).mean() == pytest.approx(0.8, abs=0.015)


@pytest.mark.parametrize("sd", [0.02, 0.06, 0.3])
def test_more_seeds_are_asked_for_by_the_pooled_spread_alone(sd):
    runs = plant(sd)
    wide = runs.pivot(index="seed", columns="variant", values="sampled")
    pooled = np.sqrt(np.mean([(wide[a] - wide[b]).var(ddof=1) for a, b in decision.NAMED]))
    asked = decision.count_seeds(decision.contrast(runs))
    half = {n: stats.t.ppf(0.975, n - 1) * pooled / n**0.5 for n in (asked, asked - 1)}
    assert asked == {0.02: 12, 0.3: 24}.get(sd, asked) and (sd == 0.3 or half[asked] <= 0.05)
    assert asked == 12 or half[asked - 1] > 0.05
    shifted = plant(sd, gains={name: 3 * gain - 1 for name, gain in GAINS.items()})
    assert decision.count_seeds(decision.contrast(shifted)) == asked


def test_its_table_is_that_of_the_kept_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(read_runs, "RUNS", tmp_path / "runs")
    runs = plant(0.02)
    for row in runs.itertuples():
        folder = tmp_path / "runs" / "cpu" / "puzzles" / row.variant / f"seed{row.seed}"
        folder.mkdir(parents=True)
        tests = pd.DataFrame({"step": [100, 150], "avg@4": row.sampled + np.array([-0.1, 0.1]), "greedy_accuracy": 0.9})
        levels = pd.concat([tests.assign(level=level) for level in ("all", "2")])
        levels.to_csv(folder / "test.csv", index=False)
        pd.DataFrame({"step": [1], "reward_mean": [0.0]}).to_csv(folder / "metrics.csv", index=False)
    decision.main(decision.Options(out=tmp_path / "out", scale="cpu"))
    table = pd.read_csv(tmp_path / "out" / "decision.csv")
    expected = decision.contrast(runs)
    assert table["difference"].tolist() == pytest.approx(expected["difference"].tolist(), rel=1e-4, nan_ok=True)
    assert (tmp_path / "out" / "decision.png").is_file()
