"""Fig. 5, Fig. 6 and the matched controls on small run folders with known numbers."""

import json
import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from analyses.common import read_runs
from analyses.common.experiments import read
from analyses.paper import controls, fig5, fig6
from gradscope.errors import InputError

LEVELS = ("2", "3", "all")
STEPS = (100, 125, 150)


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """An empty folder in which figures look for runs."""
    monkeypatch.setattr(read_runs, "RUNS", tmp_path / "runs")
    return tmp_path / "runs"


def write_run(runs, variant, seed, *, sampled=0.5, greedy=0.6, rewards=(0.0, 1.0), responses=None, scale="cpu"):
    """A run whose last three checkpoints have the accuracy `sampled` on average over all puzzles, with two people .1
    more and with three .1 less."""
    folder = runs / scale / "puzzles" / variant / f"seed{seed}"
    folder.mkdir(parents=True)
    metrics = pd.DataFrame({"step": range(1, len(rewards) + 1), "reward_mean": rewards})
    metrics.to_csv(folder / "metrics.csv", index=False)
    rows = [
        {"step": step, "level": level, "avg@2": sampled + shift + more, "greedy_accuracy": greedy + shift + more}
        for step, more in zip(STEPS, (-0.02, 0.0, 0.02), strict=True)
        for level, shift in zip(LEVELS, (0.1, -0.1, 0.0), strict=True)
    ]
    pd.DataFrame(rows).to_csv(folder / "test.csv", index=False)
    if responses is not None:
        responses.astype({"level": "Int64"}).to_parquet(folder / "responses.parquet", index=False)
    (folder / "config.json").write_text(json.dumps({}))


def write_runs(runs, accuracies, **settings):
    for variant, values in accuracies.items():
        for seed, value in enumerate(values):
            write_run(runs, variant, seed, sampled=value, **settings)


def paired(values, others):
    """Mean, t interval and p of the paired differences, by the textbook."""
    found = np.array(values)[: len(others)] - np.array(others)[: len(values)]
    mean, error = found.mean(), found.std(ddof=1) / math.sqrt(len(found))
    half = stats.t.ppf(0.975, len(found) - 1) * error
    return mean, mean - half, mean + half, 2 * stats.t.sf(abs(mean / error), len(found) - 1)


# Fig. 6


def test_variants_take_their_panels_by_their_settings_whatever_their_names():
    variants = read()["figures"]["fig6"]["puzzles"]
    roles = fig6.assign_roles("cpu", "puzzles", variants)
    assert roles.masked == ["masked"] and roles.reversed == {"reversed": 0.5} and roles.forward == ["lopti"]
    assert list(roles.alpha.items()) == [("alpha-0.1", 0.1), ("reweight", 0.3), ("alpha-0.5", 0.5), ("alpha-0.9", 0.9)]
    assert list(roles.eta.items()) == [("eta-0.3", 0.3), ("lopti", 0.5), ("eta-0.7", 0.7), ("eta-0.9", 0.9)]


def test_fig_6_has_eleven_claims_paired_by_seed_and_corrected_together(runs, tmp_path):
    variants = read()["figures"]["fig6"]["puzzles"]
    accuracies = {"grpo": [0.5, 0.52, 0.55, 0.49]}
    for place, variant in enumerate(variants):
        if variant != "grpo":
            gain = 0.01 * place
            accuracies[variant] = [0.5 + gain, 0.52 + gain + 0.01 * (place % 3), 0.55 + gain - 0.002 * place]
    write_runs(runs, accuracies)
    fig6.main(fig6.Options(out=tmp_path))
    found = pd.read_csv(tmp_path / "fig6_contrasts.csv")
    pairs = [("masked", "grpo"), ("reversed", "grpo"), ("reversed", "lopti")]
    pairs += [(v, "grpo") for v in ("alpha-0.1", "reweight", "alpha-0.5", "alpha-0.9")]
    pairs += [(v, "grpo") for v in ("eta-0.3", "lopti", "eta-0.7", "eta-0.9")]
    assert list(zip(found["variant"], found["baseline"], strict=True)) == pairs
    expected = np.array([paired(accuracies[variant], accuracies[baseline][:3]) for variant, baseline in pairs])
    # The CSV keeps six digits.
    np.testing.assert_allclose(found[["difference", "lower", "upper", "p"]], expected, rtol=2e-5, atol=1e-8)
    ascending = np.sort(found["p"])
    corrected = np.minimum(np.maximum.accumulate(ascending * np.arange(11, 0, -1)), 1)
    np.testing.assert_allclose(np.sort(found["p_holm"]), corrected, rtol=2e-5)
    assert found["seeds"].tolist() == [3] * 11


def test_the_sweeps_are_drawn_as_differences_to_grpo_at_the_same_seeds(runs, tmp_path):
    write_runs(runs, {"grpo": [0.5, 0.6, 0.9], "reweight": [0.6, 0.8], "alpha-0.1": [0.4], "eta-0.3": [0.3, 0.5]})
    fig6.main(fig6.Options(out=tmp_path))
    drawn = pd.read_csv(tmp_path / "fig6.csv")
    alpha = drawn[drawn["panel"].str.startswith("(c)")].set_index("setting")
    assert alpha.index.tolist() == [0.1, 0.3]
    assert alpha["seeds"].tolist() == [1, 2]
    assert alpha["difference"].tolist() == pytest.approx([-0.1, 0.15])
    assert math.isnan(alpha.loc[0.1, "lower"])
    expected = paired([0.6, 0.8], [0.5, 0.6])[1:3]
    assert alpha.loc[0.3, ["lower", "upper"]].tolist() == pytest.approx(expected)
    eta = drawn[drawn["panel"].str.startswith("(d)")]
    assert (eta["setting"].tolist(), eta["difference"].tolist()) == ([0.3], pytest.approx([-0.15]))


def test_curves_of_a_panel_are_means_over_the_same_seeds(runs, tmp_path):
    for seed, reward in enumerate((1.0, 2.0, 6.0)):
        write_run(runs, "grpo", seed, sampled=0.5, rewards=(reward, reward))
        if seed < 2:
            write_run(runs, "masked", seed, sampled=0.5, rewards=(reward + 1, reward + 1))
    write_run(runs, "reversed", 2, sampled=0.5, rewards=(0.0, 0.0))
    fig6.main(fig6.Options(out=tmp_path))
    drawn = pd.read_csv(tmp_path / "fig6.csv")
    last = drawn[drawn["step"] == 2].set_index([drawn.loc[drawn["step"] == 2, "panel"].str[:3], "variant"])
    assert last.loc[[("(a)", "grpo"), ("(a)", "masked")], "mean"].tolist() == pytest.approx([1.5, 2.5])
    assert last.loc[[("(b)", "grpo"), ("(b)", "reversed")], "mean"].tolist() == pytest.approx([6.0, 0.0])


# Controls


def named(table, variant, baseline, kind="sampled", level="all"):
    rows = table[(table["variant"] == variant) & (table["baseline"] == baseline)]
    [row] = rows[(rows["kind"] == kind) & (rows["level"] == level)].to_dict("records")
    return row


@pytest.mark.parametrize("scale", ["certain", "cpu"])
def test_the_contrasts_named_beforehand_are_corrected_over_these_alone(runs, tmp_path, scale):
    accuracies = {
        "grpo": [0.50, 0.52, 0.55, 0.49],
        "reweight": [0.53, 0.56, 0.57, 0.51],
        "lopti": [0.51, 0.50, 0.56, 0.53],
        "random-split": [0.50, 0.49, 0.57, 0.50],
        "matched-norm": [0.48, 0.53, 0.52],
    }
    write_runs(runs, accuracies, scale=scale)
    controls.main(controls.Options(out=tmp_path, scale=scale))
    found = pd.read_csv(tmp_path / "controls_contrasts.csv", dtype={"level": str})
    deciding = found[found["decides"]]
    assert not deciding.duplicated(["variant", "baseline"]).any()
    pairs = {
        "certain": [("reweight", "grpo"), ("lopti", "random-split")],
        "cpu": [("reweight", "grpo"), ("lopti", "grpo"), ("lopti", "random-split")],
    }[scale]
    rows = [named(found, *pair) for pair in pairs]
    for row, (variant, baseline) in zip(rows, pairs, strict=True):
        expected = paired(accuracies[variant], accuracies[baseline])
        assert [row[name] for name in ("difference", "lower", "upper", "p")] == pytest.approx(expected, rel=2e-5)
    of_the_family = deciding.loc[deciding["family"] == "named beforehand", ["variant", "baseline"]]
    assert of_the_family.to_records(index=False).tolist() == pairs
    ordered = sorted(rows, key=lambda row: row["p"])
    corrected = np.minimum(np.maximum.accumulate([(len(rows) - k) * row["p"] for k, row in enumerate(ordered)]), 1)
    assert [row["p_holm"] for row in ordered] == pytest.approx(corrected, rel=2e-5)


# Fig. 5


def responses(texts, rewards, groups, levels, greedy=False, tokens=10):
    columns = {"group": groups, "level": levels, "response": texts, "reward": rewards, "greedy": greedy}
    return pd.DataFrame(columns | {"tokens": tokens, "correct": False, "logprob": -1.0})


def correlate_by_loops(x, y, strata):
    """Pearson's correlation of what is left when every stratum's mean is taken away, summed up entry by entry."""
    top = left = right = 0.0
    for stratum in set(strata):
        own = [place for place, other in enumerate(strata) if other == stratum]
        mean_x, mean_y = (sum(values[place] for place in own) / len(own) for values in (x, y))
        for place in own:
            top += (x[place] - mean_x) * (y[place] - mean_y)
            left += (x[place] - mean_x) ** 2
            right += (y[place] - mean_y) ** 2
    return top / math.sqrt(left * right)


@pytest.fixture
def sample():
    """Counts, rewards, puzzles and levels of 60 responses, five to each of twelve puzzles of three levels."""
    rng = np.random.default_rng(3)
    puzzle = np.repeat(np.arange(12), 5)
    level = puzzle % 3
    words = rng.poisson(2 + level)
    rewards = np.where(rng.random(60) < 0.3 + 0.1 * words - 0.15 * level, 3.0, -0.5)
    return words.astype(float), rewards, puzzle, level


@pytest.mark.parametrize("scope", ["all", "levels", "puzzles"])
def test_a_correlation_is_that_of_what_is_left_in_each_stratum(sample, scope):
    x, y, puzzle, level = sample
    strata = {"all": 0 * puzzle, "levels": level, "puzzles": puzzle}[scope]
    value, lower, upper = fig5.correlate(x, y, puzzle, strata, rng=np.random.default_rng(0))
    assert value == pytest.approx(correlate_by_loops(x.tolist(), y.tolist(), strata.tolist()), abs=1e-12)
    if scope == "all":
        assert value == pytest.approx(np.corrcoef(x, y)[0, 1], abs=1e-12)
    assert lower < value < upper


@pytest.mark.usefixtures("few_prompts_are_many")
@pytest.mark.parametrize("scope", ["levels", "puzzles"])
def test_the_bootstrap_redraws_whole_puzzles(sample, scope):
    x, y, puzzle, level = sample
    strata = level if scope == "levels" else puzzle
    # The same draws, each response written out as often as its puzzle was drawn. Copies of a puzzle stay one stratum.
    draws = np.random.default_rng(5).multinomial(12, np.full(12, 1 / 12), size=1000)
    found = []
    for times in draws:
        rows = np.repeat(np.arange(60), times[puzzle])
        mean = [pd.Series(values[rows]).groupby(strata[rows]).transform("mean").to_numpy() for values in (x, y)]
        found.append(np.corrcoef(x[rows] - mean[0], y[rows] - mean[1])[0, 1])
    _, lower, upper = fig5.correlate(x, y, puzzle, strata, rng=np.random.default_rng(5))
    assert (lower, upper) == pytest.approx(tuple(np.quantile(found, [0.025, 0.975])), abs=1e-10)


def test_the_p_of_a_correlation_is_that_of_fishers_z():
    value, half = np.tanh(0.5), 1.96 * 0.2
    bounds = np.tanh(0.5 - half), np.tanh(0.5 + half)
    [found] = fig5.fisher_p(pd.Series([value]), pd.Series([bounds[0]]), pd.Series([bounds[1]]))
    # z = .5 / .2 = 2.5; 1.96 is the quantile to two decimals.
    assert found == pytest.approx(2 * stats.norm.sf(2.5), rel=1e-3)


def say(conclusions, checks, seed):
    """Twelve responses to four puzzles of two levels: so many conclusions, and checks in every second one."""
    texts = [f"{'so ' * (conclusions + place % 3)}{'check ' * (checks * (place % 2))}end" for place in range(12)]
    rewards = [3.0 if (place + seed) % 3 else -0.5 for place in range(12)]
    return responses(texts, rewards, [place % 4 for place in range(12)], [2 + place % 2 for place in range(12)])


@pytest.mark.usefixtures("few_prompts_are_many")
def test_fig_5_tells_words_over_grpos_seed_by_seed(runs, tmp_path, capsys):
    for variant, conclusions in {"grpo": [1, 2, 4], "reweight": [2, 3, 6], "lopti": [1, 1]}.items():
        for seed, count in enumerate(conclusions):
            write_run(runs, variant, seed, responses=say(count, 2, seed))
    fig5.main(fig5.Options(out=tmp_path))
    # A response says "so" `conclusions` + 0, 1 or 2 times, one more on average.
    found = pd.read_csv(tmp_path / "fig5_contrasts.csv").set_index(["variant", "category"])
    grpo, others = np.array([2.0, 3.0, 5.0]), {"reweight": np.array([3.0, 4.0, 7.0]), "lopti": np.array([2.0, 2.0])}
    for variant, values in others.items():
        same = grpo[: len(values)]
        expected = paired(values / same.mean(), same / same.mean())
        row = found.loc[(variant, "Conclusion Indicator")]
        assert row[["difference", "lower", "upper", "p"]].tolist() == pytest.approx(expected, rel=2e-5)
        assert row["seeds"] == len(values)
    assert found.loc[("both", "Conclusion Indicator"), "seeds"] == 0
    assert found.loc[("reweight", "Analysis"), "difference"] == pytest.approx(0.0, abs=1e-9)
    frequencies = pd.read_csv(tmp_path / "fig5_frequencies.csv").set_index(["measure", "variant", "category"])
    assert frequencies.loc[("words per response", "grpo", "Conclusion Indicator"), "mean"] == pytest.approx(
        10 / 3, rel=1e-5
    )
    assert frequencies.loc[("words per 100 tokens", "grpo", "Conclusion Indicator"), "mean"] == pytest.approx(
        100 / 3, rel=1e-5
    )
    assert math.isnan(frequencies.loc[("words per response", "grpo", "Statement"), "mean"])
    correlations = pd.read_csv(tmp_path / "fig5_correlations.csv")
    absent = correlations[correlations["category"].isin(["Statement", "Causal Indicator", "Assertion"])]
    assert absent["correlation"].isna().all()
    assert correlations["responses"].max() == 36 and correlations["seeds"].unique().tolist() == [3]
    assert "3 people" in set(correlations["scope"])
    claimed = correlations["p"].notna()
    assert claimed.any() and set(correlations.loc[claimed, "scope"]) <= set(fig5.SCOPES)
    together = pd.concat([correlations[["p", "p_holm"]], found[["p", "p_holm"]]]).dropna()
    assert together["p_holm"].min() == pytest.approx(min(1, len(together) * together["p"].min()), rel=2e-5)


# All of them


@pytest.mark.parametrize("figure", [fig5, fig6, controls])
def test_a_figure_without_any_run_says_in_one_line_what_to_do(runs, tmp_path, figure):
    with pytest.raises(InputError, match=r"^[^\n]*python -m analyses\.reproduce --scale cpu --only \w+$"):
        figure.main(figure.Options(out=tmp_path))
    with pytest.raises(InputError, match=r"^[^\n]*$"):
        figure.main(figure.Options(out=tmp_path, scale="moon"))
