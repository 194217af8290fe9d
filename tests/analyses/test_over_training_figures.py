"""What is measured along runs, and not again; the figures drawn of it, against numbers planted in their tables."""

from __future__ import annotations

import math

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from scipy import stats

from analyses.common import measurements
from analyses.measure import over_training as measure_over_training
from analyses.paper import over_training
from gradscope.intervals import interval_labels

pytestmark = pytest.mark.usefixtures("undrawn")

LABELS = interval_labels()
SEEDS, STEPS = (0, 1, 2), (0, 25, 50)


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    plt.close("all")


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A folder for runs, in which checkpoints are measured by writing down who they are; and the list of those."""
    done = []

    def pretend(run, step, checkpoint):
        done.append((run.variant, run.seed, step))
        table = pd.DataFrame({"interval": [0, "all"], "number": [run.seed + step / 100] * 2})
        return {name: table for name in measure_over_training.TABLES}

    monkeypatch.setattr(measure_over_training, "WORK", tmp_path / "runs")
    monkeypatch.setattr(measure_over_training, "measure_checkpoint", pretend)
    return tmp_path, done


def add_checkpoints(tmp_path, run, steps):
    for step in steps:
        (tmp_path / "runs" / run.place / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)


def runs_of(*variants):
    return [run for run in measure_over_training.runs_to_measure("cpu") if not variants or run.variant in variants]


def test_only_new_checkpoints_are_measured_and_all_are_in_the_tables(work):
    tmp_path, done = work
    [first, *_] = runs_of("grpo")
    add_checkpoints(tmp_path, first, [100])
    measure_over_training.measure(tmp_path / "out")
    seed = first.seed
    assert done == [("grpo", seed, 0), ("grpo", seed, 100)]
    # A folder that was being written when the process died is none.
    (tmp_path / f"runs/cpu/measured/over_training/grpo/seed{seed}/.step-000150").mkdir()
    add_checkpoints(tmp_path, first, [125, 150])
    measure_over_training.measure(tmp_path / "out")
    assert done == [("grpo", seed, 0), ("grpo", seed, 100), ("grpo", seed, 150)]
    table = pd.read_csv(tmp_path / "out/cosines.csv")
    assert table["step"].tolist() == [0, 0, 100, 100, 150, 150]
    assert table["interval"].tolist() == ["0", "all"] * 3
    assert table["number"].tolist() == [seed, seed, seed + 1, seed + 1, seed + 1.5, seed + 1.5]


def test_variants_meet_the_same_questions_each_under_its_own_loss(monkeypatch):
    monkeypatch.setattr(measure_over_training, "QUESTIONS", 2)
    monkeypatch.setattr(measure_over_training, "RESPONSES", 3)
    [grpo], [reweight] = (runs_of(variant)[:1] for variant in ("grpo", "reweight"))
    plain, weighted = (measure_over_training.measure_checkpoint(run, 0, None) for run in (grpo, reweight))
    pd.testing.assert_frame_equal(plain["batches"], weighted["batches"])
    assert plain["batches"]["responses"].tolist() == [6] and set(plain["gradients"]["metric"]) == {"raw"}
    # Eq. 4 leaves of a token's advantage α·π + 1 − α: at π < ¼ less than .775, at π ≥ ¾ at least .925.
    norms = [tables["gradients"].set_index("interval")["squared_share"] for tables in (plain, weighted)]
    assert norms[1][0] < norms[0][0]


def planted(seed, step, a, metric):
    """A share of interval a that all can be computed from."""
    shares = {"raw": (0.6, 0.2, 0.1, 0.1), "adamw": (0.4, 0.3, 0.1, 0.2)}[metric]
    return shares[a] + (0.01 * seed * (1 if metric == "raw" else 3) + 0.0001 * step) * (1, -1, 2, -2)[a]


def cosine_of(seed, step, a, b):
    return 0.1 * (a + b) + 0.01 * seed - 0.001 * step


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Tables of three seeds of GRPO; the numbers follow `planted` and `cosine_of`."""
    gradients, cosines, tokens = [], [], []
    for seed in SEEDS:
        for step in STEPS:
            keys = {"variant": "grpo", "seed": seed, "step": step}
            for metric in ("raw", "adamw") if step else ("raw",):
                for a in [*range(4), "all"]:
                    number = 0 if a == "all" else a
                    share = math.nan if a == "all" else planted(seed, step, a, metric)
                    row = keys | {"metric": metric, "interval": a, "squared_share": share, "gradient_share": share / 2}
                    row |= {"gradient_norm": 2.0 + number}
                    gradients.append(row | {"signal_to_noise": 0.1 - 0.02 * number + 0.001 * seed * (1 + number)})
                    for b in range(number, 4) if a != "all" else ():
                        row = keys | {"metric": metric, "interval": a, "other": b}
                        row |= {"cosine": cosine_of(seed, step, a, b)}
                        cosines.append(row | {"signal_product": (0.05 + 0.01 * seed) * (2.0 + a) * (2.0 + b)})
            shares = np.array([0.1, 0.1, 0.1, 0.7]) + seed**2 * np.array([0.01, 0.01, 0.01, -0.03])
            tokens += [keys | {"interval": a, "token_share": share} for a, share in enumerate(shares)]
    folder = tmp_path / "cpu/measured/over_training"
    folder.mkdir(parents=True)
    for name, rows in (("gradients", gradients), ("cosines", cosines), ("tokens", tokens)):
        pd.DataFrame(rows).to_csv(folder / f"{name}.csv", index=False)
    monkeypatch.setattr(measurements, "RUNS", tmp_path)
    return folder


def pick(drawn, quantity, of, step):
    [row] = drawn.query("quantity == @quantity and of == @of and step == @step").to_dict("records")
    return row


def test_cosines_and_signal_to_noise_are_means_over_seeds_with_t_intervals(measured):
    drawn, _ = over_training.table("cpu")
    pair = over_training.pair_name(1, 2)
    found, values = pick(drawn, "cosine", pair, 25), [cosine_of(seed, 25, 1, 2) for seed in SEEDS]
    half = stats.t.ppf(0.975, 2) * np.std(values, ddof=1) / math.sqrt(3)
    mean = np.mean(values)
    assert [found["mean"], found["lower"], found["upper"]] == pytest.approx([mean, mean - half, mean + half])
    assert found["seeds"] == 3
    pooled = pick(drawn, "cosine", pair, "after 0")
    assert pooled["mean"] == pytest.approx(np.mean([cosine_of(seed, s, 1, 2) for seed in SEEDS for s in (25, 50)]))
    assert pick(drawn, "signal-to-noise", LABELS[2], 0)["mean"] == pytest.approx(0.06 + 0.003)


def test_the_signal_part_of_a_cosine_is_the_signals_product_over_both_norms(measured):
    drawn, _ = over_training.table("cpu")
    # Planted: .05, .06, .07 of both norms, which are 2 + a.
    for a, b in over_training.PAIRS:
        assert pick(drawn, "signal part", over_training.pair_name(a, b), "after 0")["mean"] == pytest.approx(0.06)
    table = pd.read_csv(measured / "gradients.csv")
    table.loc[table["interval"] == "3", "gradient_norm"] = 10.0
    table.to_csv(measured / "gradients.csv", index=False)
    drawn, _ = over_training.table("cpu")
    assert pick(drawn, "signal part", over_training.pair_name(0, 3), 25)["mean"] == pytest.approx(0.06 * 5 / 10)
    assert pick(drawn, "signal part", over_training.pair_name(0, 2), 25)["mean"] == pytest.approx(0.06)


def test_eight_claims_of_cosines_and_signal_are_paired_over_seeds(measured):
    _, claims = over_training.table("cpu")
    assert len(claims) == 8 and claims["seeds"].tolist() == [3] * 8
    values = [np.mean([cosine_of(seed, step, 0, 1) for step in (25, 50)]) for seed in SEEDS]
    assert claims["difference"][0] == pytest.approx(np.mean(values))
    assert claims["p"][0] == pytest.approx(stats.ttest_1samp(values, 0.0).pvalue)
    assert claims["difference"][[6, 7]].tolist() == pytest.approx([0.101, 0.06 - 0.003])
    assert claims["p"][6] == pytest.approx(stats.ttest_1samp([0.1, 0.101, 0.102], 0.0).pvalue)
