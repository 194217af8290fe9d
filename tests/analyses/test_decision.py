"""The decision, on planted accuracies whose truth is known."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from analyses.common.experiments import list_runs, needs
from analyses.paper import decision
from analyses.paper.decision import contrast, count_seeds

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
    found = contrast(runs).set_index(["variant", "baseline"])
    assert found.loc[decision.NAMED, "differs"].tolist() == [True, False, True]
    assert found.loc[decision.NAMED, "gain_excluded"].tolist() == [False, True, True]
    assert not found.loc[decision.BESIDE, ["differs", "gain_excluded", "named"]].any(axis=None)
    assert found["seeds"].tolist() == [12, 12, 12, 12, 12, 0, 0, 0]
    wide = runs.pivot(index="seed", columns="variant", values="sampled")
    values = wide["lopti"] - wide["random-split"]
    interval = stats.ttest_1samp(values, 0).confidence_interval(1 - 0.05 / 3)
    row = found.loc[("lopti", "random-split")]
    assert (row["corrected_lower"], row["corrected_upper"]) == pytest.approx(tuple(interval))
    wider = contrast(plant(0.2)).set_index(["variant", "baseline"])
    assert not wider.loc[[("reweight", "grpo")], ["differs", "gain_excluded"]].any(axis=None)


@pytest.mark.parametrize("sd", [0.02, 0.06, 0.3])
def test_more_seeds_are_asked_for_by_the_pooled_spread_alone(sd):
    runs = plant(sd)
    wide = runs.pivot(index="seed", columns="variant", values="sampled")
    pooled = np.sqrt(np.mean([(wide[a] - wide[b]).var(ddof=1) for a, b in decision.NAMED]))
    asked = count_seeds(runs)
    half = {n: stats.t.ppf(0.975, n - 1) * pooled / n**0.5 for n in (asked, asked - 1)}
    assert asked == {0.02: 12, 0.3: 24}.get(sd, asked) and (sd == 0.3 or half[asked] <= 0.05)
    assert asked == 12 or half[asked - 1] > 0.05
    shifted = plant(sd, gains={name: 3 * gain - 1 for name, gain in GAINS.items()})
    assert count_seeds(shifted) == asked
    later = plant(5 * sd).assign(seed=lambda table: table["seed"] + 12)
    assert count_seeds(pd.concat([runs, later])) == asked  # asked once, with 12
    assert count_seeds(runs[runs["seed"] > 0]) is None


@pytest.mark.parametrize("left_out", [("random-split",), ("random-split", 11)])
def test_nothing_is_decided_before_all_that_was_named_has_its_seeds(left_out):
    runs = plant(0.02)
    missing = (runs["variant"] == left_out[0]) & (runs["seed"] >= (left_out[1] if len(left_out) > 1 else 0))
    found = contrast(runs[~missing])
    assert not found[["differs", "gain_excluded"]].any(axis=None) and found["seeds"].iloc[0] == 12
    assert found.loc[found["named"], "verdict"].tolist() == [decision.NOT_YET] * 3
    assert count_seeds(runs[~missing]) is None


def test_where_the_rule_asks_for_more_seeds_twelve_decide_nothing():
    runs = plant(0.08, gains=GAINS | {"reweight": 0.3})
    assert count_seeds(runs) > 12 and not contrast(runs)["differs"].any()
    assert contrast(plant(0.08, gains=GAINS | {"reweight": 0.3}, seeds=24))["differs"].any()


@pytest.mark.parametrize(
    ("gain", "sd", "verdict"),
    [
        (0.2, 0.02, "higher, by more than .07"),
        (0.04, 0.01, "higher, by less than .07"),
        (0.08, 0.02, "higher"),
        (-0.05, 0.01, "lower"),
        (0.0, 0.02, "no difference shown, a gain of .07 or more excluded"),
        (0.03, 0.05, "no difference shown, none excluded"),
    ],
)
def test_a_verdict_says_what_was_planted_and_no_more(gain, sd, verdict):
    runs = plant(sd, gains=dict.fromkeys(GAINS, 0.0) | {"reweight": gain}, seeds=12)
    wide = runs.pivot(index="seed", columns="variant", values="sampled")
    off = (wide["reweight"] - wide["grpo"]).mean() - gain  # Without what chance added to the mean.
    runs.loc[runs["variant"] == "reweight", "sampled"] -= off
    assert contrast(runs)["verdict"].iloc[0] == verdict


def test_its_variants_are_those_of_the_runs_that_are_planned():
    planned = {run.variant for run in list_runs("cpu") if run.track == "puzzles"}
    assert {name for pair in (*decision.NAMED, *decision.BESIDE) for name in pair} <= planned
    assert {variant for _, variant in needs("decision", "cpu")} <= planned
