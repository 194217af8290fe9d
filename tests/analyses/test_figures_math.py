"""Table 1 and Fig. 9, 10 on made-up runs whose numbers are known."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from analyses.common import math_tracks, read_runs
from analyses.paper import fig9_10, table1

LEVELS = ("2", "3", "4", "5", "6")
VARIANTS = {"grpo": 0.0, "reweight": 0.02, "lopti": 0.01, "both": 0.03}
"""Variant → what it adds to every accuracy."""
SEEDS = (0, 1, 2)


def accuracy(variant: str, seed: int, place: int, step: int, score: str) -> float:
    """A number of its own for every cell; the mean over the steps 50, 75, 100 is that of step 75."""
    shift = {"greedy_accuracy": 0.3, "avg@16": 0.2, "pass@16": 0.4}[score]
    spread = 0.01 * (seed * (1 + list(VARIANTS).index(variant)) % 5)  # no two variants differ alike at all seeds
    return 0.1 + 0.05 * place + shift + VARIANTS[variant] + spread + (step - 75) / 1000


def write_run(folder, variant: str, seed: int, levels=LEVELS) -> None:
    folder = folder / variant / f"seed{seed}"
    folder.mkdir(parents=True)
    scores = ("greedy_accuracy", "avg@16", "pass@16")
    rows = [
        {"level": level, "questions": 40, "step": step}
        | {score: accuracy(variant, seed, place, step, score) for score in scores}
        for step in (50, 75, 100)
        for place, level in enumerate(levels)
    ]
    pd.DataFrame(rows).to_csv(folder / "test.csv", index=False)
    steps, own = np.arange(1, 101), (seed - 1) * list(VARIANTS).index(variant) / 100  # whose mean over the seeds is 0
    metrics = {
        "step": steps,
        "reward_mean": 0.3 + own + VARIANTS[variant] * (steps > 50),
        "response_length": 20.0 + own + 100 * VARIANTS[variant],
        "grad_norm": 1.0 - own - 10 * VARIANTS[variant],
        "entropy": (1.0 + own) / steps,
    }
    pd.DataFrame(metrics).to_csv(folder / "metrics.csv", index=False)


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """The folder of made-up runs in place of the repository's."""
    root = tmp_path / "runs"
    for module in (read_runs, math_tracks):
        monkeypatch.setattr(module, "RUNS", root)
    return root


@pytest.fixture
def sums(runs):
    for variant in VARIANTS:
        for seed in SEEDS:
            write_run(runs / "cpu" / "math", variant, seed)
    return runs


def by_hand(variant: str, seed: int) -> list[float]:
    """A run's six columns in percent, and their average."""
    picks = [(0, "greedy_accuracy"), (1, "greedy_accuracy"), (2, "greedy_accuracy")]
    picks += [(3, "avg@16"), (4, "pass@16"), (4, "avg@16")]
    values = [100 * accuracy(variant, seed, place, 75, score) for place, score in picks]
    return [*values, sum(values) / 6]


def test_the_table_averages_checkpoints_then_seeds_and_its_columns_are_the_papers_measures(sums):
    means, _ = table1.table("cpu")
    assert list(means["variant"].unique()) == list(VARIANTS)
    for variant in VARIANTS:
        own = means[means["variant"] == variant]
        seeds = np.array([by_hand(variant, seed) for seed in SEEDS])
        assert own["mean"].to_numpy() == pytest.approx(seeds.mean(0))
        half = stats.t.ppf(0.975, 2) * seeds.std(0, ddof=1) / np.sqrt(3)
        assert (own["upper"] - own["mean"]).to_numpy() == pytest.approx(half)
        assert set(own["seeds"]) == {3}
    assert list(own["column"]) == [title for title, _, _ in table1.SUMS] + ["average"]


def test_the_claims_are_about_the_average_and_corrected_together(sums):
    _, contrasts = table1.table("cpu")
    claims = contrasts[contrasts["family"] == "claims"]
    pairs = [("reweight", "grpo"), ("lopti", "grpo"), ("both", "grpo"), ("both", "reweight"), ("both", "lopti")]
    assert list(zip(claims["variant"], claims["baseline"], strict=True)) == pairs
    for row in claims.itertuples():
        paired = [by_hand(row.variant, seed)[-1] - by_hand(row.baseline, seed)[-1] for seed in SEEDS]
        assert row.difference == pytest.approx(np.mean(paired))
        assert row.p == pytest.approx(stats.ttest_1samp(paired, 0).pvalue)
    ordered = claims.sort_values("p")  # Holm: the k-th smallest of m times m - k + 1, never below an earlier one
    steps = [p * (len(ordered) - place) for place, p in enumerate(ordered["p"])]
    assert ordered["p_holm"].to_numpy() == pytest.approx(np.minimum(np.maximum.accumulate(steps), 1))
    rest = contrasts[contrasts["family"] == "by column"]
    assert len(rest) == 6 * 3
    assert set(rest["baseline"]) == {"grpo"}


def test_the_papers_averages_are_those_of_its_columns():
    for (_, variant), (*values, average) in table1.PAPER.items():
        assert np.mean(values) == pytest.approx(average, abs=0.006), variant  # rounded to two digits


def test_files_hold_what_was_computed(sums, tmp_path):
    for script in (table1, fig9_10):
        script.main(script.Options(out=tmp_path / "out"))
    names = sorted(file.name for file in (tmp_path / "out").iterdir())
    assert names == [
        "fig9_10.csv", "fig9_10.png", "fig9_10_contrasts.csv", "fig9_10_contrasts.md",
        "table1.csv", "table1.md", "table1_contrasts.csv", "table1_contrasts.md",
    ]  # fmt: skip
    saved = pd.read_csv(tmp_path / "out" / "table1.csv")
    assert saved["mean"].to_numpy() == pytest.approx(table1.table("cpu")[0]["mean"].to_numpy(), rel=1e-5)
    text = (tmp_path / "out" / "table1.md").read_text()
    assert "| paper | ORZ | Reweight |  | 40.81 |" in text
    assert "2 steps, greedy (paper: OlympiadBench, greedy)" in text
