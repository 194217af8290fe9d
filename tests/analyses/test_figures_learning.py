"""Figures of learning from kept runs: their numbers against loops on made-up runs, and what they do where runs lack."""

import math

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from scipy import stats

from analyses.common import read_runs
from analyses.common.accuracy import (
    accuracy_by_people,
    average,
    baseline_means,
    beside_paper,
    compare_by_people,
    lay_out,
    slopes,
)
from analyses.common.contrasts import differences
from analyses.common.curves import draw_curves, smooth
from analyses.common.experiments import labels
from analyses.paper import fig4, sharpening, table6
from gradscope.errors import InputError

LEVELS = ("2", "3", "4", "5")
SEEDS = {"grpo": (0, 1, 2), "reweight": (0, 1, 2), "lopti": (0, 1), "rpp": (0, 1), "rpp-lopti": (0, 1)}


def make_run(folder, seed, shift, lopti):
    """A run of 60 steps whose every number follows from seed and shift."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng([seed, round(1000 * shift)])
    step = np.arange(1, 61)
    metrics = {"step": step, "reward_mean": shift + step / 60 + rng.normal(0, 0.1, 60), "kl": 0.001 * step}
    metrics |= {name: rng.random(60) for name in ("accuracy", "response_length", "grad_norm", "entropy")}
    metrics |= {
        "seconds_sampling": 2.0,
        "seconds_training": (2 if lopti else 1) * (1 + seed) + 0.1 * seed * lopti,
        "seconds_other": 0.5,
    }
    pd.DataFrame(metrics).to_csv(folder / "metrics.csv", index=False)
    tests = []
    for judged in (20, 40, 60):
        for level in (*LEVELS, "all"):
            accuracy = 0.5 + shift + 0.01 * rng.random() - (0.0 if level == "all" else 0.05 * int(level))
            tests.append({"level": level, "avg@2": accuracy, "greedy_accuracy": accuracy + 0.1, "step": judged})
    pd.DataFrame(tests).to_csv(folder / "test.csv", index=False)
    number = np.arange(120)
    answers = {
        "group": number // 3,
        "level": number // 30 + 2,
        "greedy": number % 3 == 0,
        "response": "",
        "reward": 0.0,
    }
    answers |= {"correct": rng.random(120) < 0.8, "tokens": rng.integers(5, 50, 120)}
    answers["logprob"] = -rng.uniform(0.01, 0.05, 120) * answers["tokens"]
    pd.DataFrame(answers).to_parquet(folder / "responses.parquet")


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Kept runs of five variants, of which both has none; and the policy before training."""
    root = tmp_path / "runs"
    monkeypatch.setattr(read_runs, "RUNS", root)
    for place, (variant, seeds) in enumerate(SEEDS.items()):
        for seed in seeds:
            lopti = "lopti" in variant
            make_run(root / "cpu" / "puzzles" / variant / f"seed{seed}", seed, 0.05 * place + 0.01 * seed, lopti)
    rows = [
        {"temperature": t, "level": level, "entropy": 0.1 * t, "sampled": 0.6 - 0.4 * t, "greedy": 0.62}
        for t in (0.1, 0.4, 0.7)
        for level in (*LEVELS, "all")
    ]
    (root / "cpu" / "measured" / "untrained").mkdir(parents=True)
    pd.DataFrame(rows).to_csv(root / "cpu" / "measured" / "untrained" / "untrained.csv", index=False)
    return root


def kept(runs, variant, seed, name):
    return pd.read_csv(runs / "cpu" / "puzzles" / variant / f"seed{seed}" / name)


# --- curves, colours, tables --------------------------------------------------------------------------------------


def test_a_curve_is_the_normalised_exponential_mean_of_each_run_averaged_over_seeds():
    rng = np.random.default_rng(0)
    values = {0: rng.normal(size=12), 1: rng.normal(size=12)}
    rows = [
        {"variant": "grpo", "label": "GRPO", "seed": seed, "step": step, "x": x}
        for seed, own in values.items()
        for step, x in enumerate(own, start=1)
    ]
    found = smooth(pd.DataFrame(rows).sample(frac=1, random_state=1), "x")
    for row in found.itertuples():
        means = []
        for own in values.values():
            weights = [0.95 ** (row.step - past) for past in range(1, row.step + 1)]
            means.append(sum(w * x for w, x in zip(weights, own, strict=False)) / sum(weights))
        assert row.seeds == 2
        assert row.mean == pytest.approx(np.mean(means), abs=1e-12)
        assert row.sd == pytest.approx(np.std(means, ddof=1), abs=1e-12)


def test_steps_that_are_missing_at_the_end_are_refused_unless_the_run_diverged(runs):
    folder = runs / "cpu/puzzles/grpo/seed1"
    (folder / "config.json").write_text('{"steps": 60}')
    assert len(read_runs.read_metrics(["grpo"])) == 180
    (folder / "config.json").write_text('{"steps": 90}')
    with pytest.raises(InputError, match=r"seed1/metrics\.csv ends at step 60 of 90; restore .*seed1, or remove it"):
        read_runs.read_metrics(["grpo"])
    (folder / "manifest.json").write_text('{"ended": "no finite gradient in three steps in a row"}')
    assert len(read_runs.read_metrics(["grpo"])) == 180


def test_a_run_that_ended_early_is_not_carried_on():
    rows = [
        {"variant": "grpo", "label": "GRPO", "seed": seed, "step": step, "x": float(10 * seed)}
        for seed, last in ((0, 2), (1, 3))
        for step in range(1, last + 1)
    ]
    found = smooth(pd.DataFrame(rows), "x")
    assert found["seeds"].tolist() == [2, 2, 1]
    assert found["mean"].tolist() == pytest.approx([5.0, 5.0, 10.0])
    assert math.isnan(found["sd"].iloc[2])
    other = found.assign(variant="lopti", label="Lopti", seeds=2)
    diverged = found.iloc[:2].assign(variant="reweight", label="Reweight")
    figure, ax = plt.subplots()
    draw_curves(ax, pd.concat([found, other, diverged]), ylabel="x")
    plt.close(figure)
    names = ["GRPO (2 seeds, 1 to the end)", "Lopti (2 seeds)", "Reweight (2 seeds, 0 to the end)"]
    assert [line.get_label() for line in ax.lines] == names
    assert [line.get_linewidth() for line in ax.lines] == [2.4, 1.7, 1.0]


# --- Fig. 4, Table 7 ----------------------------------------------------------------------------------------------


def test_an_accuracy_is_the_mean_over_the_judged_checkpoints_then_over_seeds(runs):
    variants = ["grpo", "lopti"]
    found = average(accuracy_by_people(read_runs.read_tests(variants))).set_index(["variant", "level"])
    for variant in variants:
        for level in (*LEVELS, "all"):
            finals = []
            for seed in SEEDS[variant]:
                tests = kept(runs, variant, seed, "test.csv")
                finals.append(tests.loc[tests["level"].astype(str) == level, "avg@2"].mean())
            row = found.loc[(variant, level)]
            half = stats.t.ppf(0.975, len(finals) - 1) * np.std(finals, ddof=1) / math.sqrt(len(finals))
            assert (row["seeds"], row["sampled"]) == (len(finals), pytest.approx(np.mean(finals)))
            assert row["sampled_upper"] - row["sampled"] == pytest.approx(half)
            assert row["greedy"] == pytest.approx(row["sampled"] + 0.1)


def accuracies():
    """Two methods and their baseline: differences from it grow by .02 and .0 a person, with noise by seed."""
    rows = []
    for variant, gain, slope in (("grpo", 0.0, 0.0), ("reweight", 0.05, 0.02), ("lopti", 0.01, 0.0)):
        for seed in range(4):
            noise = 0.003 * (-1) ** seed * (1 + len(variant))
            for level in ("2", "3", "4", "all"):
                people = 3 if level == "all" else int(level)
                sampled = 0.5 - 0.1 * people + gain + slope * (people - 3) + noise * people
                row = {"variant": variant, "label": labels()[variant], "seed": seed, "level": level}
                rows.append(row | {"sampled": sampled, "greedy": sampled + 0.3})
    return pd.DataFrame(rows)


def test_a_slope_is_the_line_through_the_accuracies_by_people():
    found = slopes(accuracies()).set_index(["variant", "seed"])["slope"]
    for variant, slope in (("grpo", 0.0), ("reweight", 0.02), ("lopti", 0.0)):
        for seed in range(4):
            assert found[variant, seed] == pytest.approx(-0.1 + slope + 0.003 * (-1) ** seed * (1 + len(variant)))


def test_contrasts_pair_by_seed_and_correct_the_claims_together():
    table = accuracies()
    found = compare_by_people(table, ["reweight", "lopti", "both"], "grpo")
    assert found.groupby("family", sort=False)["of"].unique().map(list).to_dict() == {
        "claims": ["all", "slope per person"],
        "by people": ["2 people", "3 people", "4 people"],
        "greedy": ["all"],
    }
    wide = table.pivot(index=["level", "seed"], columns="variant", values="sampled")
    for row in found[found["family"] != "greedy"].itertuples():
        if row.variant == "both":
            assert row.seeds == 0 and math.isnan(row.difference) and not row.differs
        elif row.of != "slope per person":
            own = wide.loc[row.of.removesuffix(" people")]
            assert row.difference == pytest.approx((own[row.variant] - own["grpo"]).mean())
            assert row.p == pytest.approx(stats.ttest_rel(own[row.variant], own["grpo"]).pvalue)
            assert row.relative == pytest.approx(row.difference / own["grpo"].mean())
    for _, family in found.groupby("family"):
        known = family.dropna(subset="p").sort_values("p")
        assert known["p_holm"].iloc[0] == pytest.approx(min(1.0, len(known) * known["p"].iloc[0]))
    claims = found[found["family"] == "claims"].set_index(["of", "variant"])
    assert claims.loc[("slope per person", "reweight"), "difference"] == pytest.approx(0.02)
    assert claims["p"].notna().sum() == 4


@pytest.mark.parametrize(("baseline", "means"), [([2.0, 3.0, 7.0], [2.5, 4.0, None]), ([0.0, 0.0, 0.0], [None] * 3)])
def test_a_baselines_mean_is_that_of_the_compared_seeds_and_none_where_it_is_0(baseline, means):
    values = {"grpo": baseline, "lopti": [1.0, 2.0], "reweight": [1.0, 2.0, 3.0]}
    rows = [{"variant": name, "seed": seed, "x": x} for name, own in values.items() for seed, x in enumerate(own)]
    table = pd.DataFrame(rows)
    found = differences(table, "x", [("lopti", "grpo"), ("reweight", "grpo"), ("both", "grpo")])
    expected = [math.nan if mean is None else mean for mean in means]
    assert baseline_means(found, table, "x") == pytest.approx(expected, nan_ok=True)


def test_the_papers_numbers_stand_beside_ours_and_both_keep_levels_of_their_own():
    table = accuracies()
    beside = beside_paper(average(table), fig4.PAPER)
    rows = beside.set_index(["variant", "level"])
    assert rows.loc[("both", "7"), "paper Qwen2.5-3B-Instruct"] == 0.40
    assert rows.loc[("grpo", "all"), "paper Qwen2.5-7B-Instruct-1M"] == 0.77
    assert rows.loc[("untrained", "all"), "paper Qwen2.5-7B-Instruct-1M"] == 0.11
    assert rows["paper Qwen2.5-3B-Instruct"].isna()["grpo", "2"] and rows["sampled"].isna()["grpo", "7"]
    assert rows.loc[("grpo", "2"), "sampled"] == pytest.approx(0.3)
    assert beside["variant"].drop_duplicates().tolist() == ["untrained", "grpo", "reweight", "lopti", "both"]
    shown = lay_out(beside, compare_by_people(table, ["reweight", "lopti", "both"], "grpo"), fig4.PAPER)
    assert shown.columns.tolist() == ["policy", "method", "seeds", "2", "3", "4", "5", "6", "7", "average", "gain"]
    cells = shown.set_index(["policy", "method"])
    assert cells.loc[("here", "Reweight"), "gain"] == "+25.0 %"  # .05 over .2, at the same seeds
    assert cells.loc[("here", "GRPO"), ["seeds", "5", "gain"]].tolist() == ["4", "", ""]
    assert cells.loc[("Qwen2.5-7B-Instruct-1M", "Lopti"), "gain"] == "+9.1 %"  # as printed
    assert cells.loc[("Qwen2.5-3B-Instruct", "both"), ["3", "average"]].tolist() == [".72", ".57"]
    half = stats.t.ppf(0.975, 3) * np.std([0.33, 0.27] * 2, ddof=1) / math.sqrt(4)  # ± .003 · 5 · 2 people
    assert cells.loc[("here", "GRPO"), "2"] == f".30±{half:.2f}".replace("±0", "±")


# --- records, seconds ---------------------------------------------------------------------------------------------


def test_seconds_are_medians_and_ratios_geometric_means_over_seeds(runs):
    found = table6.table(read_runs.read_metrics(["grpo", "lopti"]), ["grpo", "reweight", "lopti", "both"])
    rows = found.set_index(["procedure", "variant"])
    assert rows.loc[("training", "grpo"), ["seeds", "seconds"]].tolist() == [3, 2.0]  # 1, 2, 3 by seed
    assert rows.loc[("training", "lopti"), "ratio"] == pytest.approx(math.sqrt(2.0 * 2.05))
    logs = np.log([4.5 / 3.5, 6.6 / 4.5])  # by seed
    half = stats.t.ppf(0.975, 1) * logs.std(ddof=1) / math.sqrt(2)
    expected = [math.exp(x) for x in (logs.mean(), logs.mean() - half, logs.mean() + half)]
    assert rows.loc[("total", "lopti"), ["ratio", "ratio_lower", "ratio_upper"]].tolist() == pytest.approx(expected)
    assert rows.loc[("training / sampling", "grpo"), "seconds"] == 1.0
    assert rows.loc[("training / sampling", "lopti"), "paper 3B"] == pytest.approx(35.3 / 27.8)
    for paper in table6.PAPER.values():
        for times in paper.values():
            assert sum(times[:3]) == pytest.approx(times[3], abs=0.101)  # four roundings


# --- sharpening ---------------------------------------------------------------------------------------------------


def test_the_untrained_policy_is_matched_at_equal_entropy():
    untrained = pd.DataFrame({"temperature": [0.7, 0.1, 0.4], "entropy": [0.07, 0.01, 0.04]})
    untrained = untrained.assign(sampled=[0.3, 0.6, 0.5], greedy=0.65)
    at = lambda entropy: sharpening.match(entropy, untrained, 0.4)  # noqa: E731
    assert at(0.04)["untrained_matched"] == pytest.approx(0.5)
    assert (at(0.02)["matched_temperature"], at(0.02)["untrained_matched"]) == pytest.approx((0.2, 0.6 - 0.1 / 3))
    assert at(0.005)["untrained_matched"] == pytest.approx(0.625)  # halfway to greedy
    assert at(0.07)["untrained_matched"] == pytest.approx(0.3)
    assert (at(0.07)["untrained_sampled"], at(0.07)["untrained_entropy"]) == (0.5, 0.04)
    with pytest.raises(InputError, match=r"0\.5, is above .* temperature, 0\.7; add higher ones"):
        at(0.5)
    with pytest.raises(InputError, match="do not rise"):
        sharpening.match(0.04, untrained.assign(entropy=[0.04, 0.01, 0.04]), 0.4)


def test_sharpening_judges_the_last_checkpoint_on_the_whole_test_whatever_answers_are_kept(runs):
    questions = {"2": 9, "3": 14, "4": 1, "5": 30}  # of the answers, ten questions of each level are kept
    for file in (runs / "cpu" / "puzzles").glob("*/*/test.csv"):
        tests = pd.read_csv(file, dtype={"level": str})
        tests.assign(questions=tests["level"].map(questions | {"all": 54})).to_csv(file, index=False)
    table = sharpening.table("cpu").set_index(["variant", "seed", "level"])
    assert set(table.index.get_level_values("variant")) == {"grpo", "reweight", "lopti", "rpp"}
    tests = kept(runs, "reweight", 1, "test.csv").set_index(["step", "level"])
    answers = pd.read_parquet(runs / "cpu" / "puzzles" / "reweight" / "seed1" / "responses.parquet")
    nats, tokens = 0.0, 0.0
    for level, times in questions.items():
        own = [row for row in answers.itertuples() if not row.greedy and str(row.level) == level]
        entropy = -sum(row.logprob for row in own) / sum(row.tokens for row in own)
        assert table.loc[("reweight", 1, level), "entropy"] == pytest.approx(entropy)
        for _ in range(times):
            nats, tokens = nats - sum(row.logprob for row in own), tokens + sum(row.tokens for row in own)
    found = table.loc[("reweight", 1, "all")]
    assert found["entropy"] == pytest.approx(nats / tokens)
    assert (found["sampled"], found["greedy"]) == tuple(tests.loc[(60, "all"), ["avg@2", "greedy_accuracy"]])
    assert (found["untrained_sampled"], found["untrained_greedy"]) == pytest.approx((0.32, 0.62))


# --- pages --------------------------------------------------------------------------------------------------------


# --- damaged runs -------------------------------------------------------------------------------------------------

READERS = {
    "metrics.csv": read_runs.read_metrics,
    "test.csv": read_runs.read_tests,
    "responses.parquet": read_runs.read_responses,
}


# A metrics.csv that ends with a whole line may be that of a run that diverged.
@pytest.mark.parametrize(
    ("name", "left"), [("metrics.csv", 0), ("test.csv", 0), ("test.csv", 0.5), ("responses.parquet", 0.5)]
)
def test_a_file_of_a_run_that_is_cut_short_is_named_with_what_to_do(runs, name, left):
    file = runs / "cpu" / "puzzles" / "grpo" / "seed1" / name
    file.write_bytes(file.read_bytes()[: int(left * file.stat().st_size)])
    with pytest.raises(
        InputError, match=rf"^[^\n]*seed1/{name} .*; restore .*seed1, or remove it and make the run again"
    ):
        READERS[name](["grpo"])
