"""Experiment B: probability on rare tokens at the places of fixed responses, and which puzzles are hard."""

from itertools import combinations

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

from analyses.common.experiments import find_run
from analyses.common.kept_runs import read_tables
from analyses.common.measurements import read_table
from analyses.common.read_runs import read_metrics
from analyses.measure import horizon
from analyses.paper import horizon as figure
from gradscope import load_policy
from gradscope.tasks import draw_questions, get_task


@pytest.mark.all
def test_the_mass_on_rare_tokens_is_that_of_a_loop_over_places_and_vocabulary():
    run = find_run("cpu", "horizon")
    policy = load_policy(run.config.model, dtype="float64")
    contexts = read_table("horizon", "contexts.parquet").groupby("source", sort=False).head(3)
    table = horizon.score(policy, contexts, run).set_index("source")

    task, test = get_task(run.test.task), run.test
    questions = draw_questions(task, test.questions, seed=0, people=test.people)
    for source, own in contexts.groupby("source"):
        mass, entropy, rare = [], [], []
        for row in own.itertuples():
            prompt = policy.encode_prompt(questions[row.group].prompt)
            response = policy.encode_response(row.response) + [policy.tokenizer.eos_token_id] * row.finished
            for at, token in enumerate(response):
                logits = policy.model(torch.tensor([prompt + response[:at]])).logits[0, -1]
                probs = (logits / 0.7).softmax(-1).tolist()
                mass.append(sum(p for p in probs if p < 0.25))
                entropy.append(-sum(p * np.log(p) for p in probs if p > 0))
                rare.append(probs[token] < 0.25)
        assert table.loc[source, "places"] == len(mass)
        # float64; padding and the order of sums differ by rounding.
        assert table.loc[source, ["mass", "entropy", "share"]].tolist() == pytest.approx(
            [np.mean(mass), np.mean(entropy), np.mean(rare)], rel=1e-9
        )


def test_hard_puzzles_are_those_where_four_of_the_sixteen_samples_seldom_hold_a_correct_one():
    questions = pd.DataFrame({"group": range(17), "level": 2, "samples": 16, "correct": range(17)})
    draws = [set(four) for four in combinations(range(16), 4)]
    hard = [correct for correct in range(17) if np.mean([bool(four & set(range(correct))) for four in draws]) < 0.8]
    assert horizon.hard_puzzles(questions)["correct"].tolist() == hard


def test_each_source_has_as_many_responses_to_every_puzzle_and_none_of_a_run_of_the_track():
    contexts = read_table("horizon", "contexts.parquet")
    counts = contexts.groupby(["source", "group"]).size().unstack(0)
    assert counts.shape == (100, 3)
    assert (counts == 4).all(axis=None)


def test_a_runs_numbers_are_means_of_its_tables():
    runs, steps = figure.read_arms(["grpo"])
    run, steps = runs.set_index("seed").loc[40], steps[steps["seed"] == 40].set_index("step")
    scored = read_tables("cpu", "horizon", "grpo", "rare_mass")[40].set_index("step")
    assert run["mass"] == pytest.approx(scored.loc[500:, "mass"].to_numpy().mean())
    on_reweight = scored[scored["source"] == "reweight"]["mass"]
    assert run["mass_on_reweight"] == pytest.approx((on_reweight[500] + on_reweight[550] + on_reweight[600]) / 3)
    metrics = read_metrics(["grpo"], scale="cpu", track="horizon")
    accuracy = metrics[metrics["seed"] == 40].sort_values("step")["accuracy"].to_numpy().reshape(12, 50)
    assert steps.loc[50:600, "training_accuracy"].tolist() == pytest.approx(accuracy.mean(axis=1).tolist())
    assert run["entropy"] == pytest.approx(metrics[metrics["seed"] == 40].nlargest(50, "step")["entropy"].mean())


def plant(accuracy=0.0, **mass):
    """A row per run: its arm's mass, Reweight's accuracy, and as much noise as the decision's runs have."""
    rng = np.random.default_rng(0)
    return pd.concat(
        pd.DataFrame(
            dict.fromkeys(figure.BESIDE + figure.AFTERWARDS, rng.normal(size=12))
            | {
                "variant": arm,
                "mass": 0.19 + own + 0.014 * rng.normal(size=12),
                "accuracy": 0.6 + accuracy * (arm == "reweight") + 0.0255 * rng.normal(size=12),
            }
        )
        for arm, own in mass.items()
    )


def test_named_contrasts_are_those_planted_and_corrected_over_three_whichever_arms_are_whole():
    runs = plant(grpo=0.0, reweight=0.05, **{"permuted-weights": 0.0})
    found = figure.contrast(runs)
    assert found["differs"].tolist() == [True, True] + [False] * (len(found) - 2)
    own, other = (runs.loc[runs["variant"] == arm, "mass"] for arm in ("reweight", "grpo"))
    test = stats.ttest_ind(own, other, equal_var=False)
    corrected = test.confidence_interval(1 - 0.05 / 3)
    two = figure.contrast(runs[runs["variant"] != "permuted-weights"])
    assert two["named"].sum() == 2
    for table in (found, two):
        row = table.iloc[0]
        assert row[["p", "p_holm"]].tolist() == pytest.approx([test.pvalue, 3 * test.pvalue])
        assert row[["corrected_lower", "corrected_upper"]].tolist() == pytest.approx([*corrected])


@pytest.mark.parametrize(("gain", "excluded"), [(-0.02, True), (0.05, False)])
def test_a_gain_in_accuracy_is_excluded_only_if_the_corrected_interval_lies_below_it(gain, excluded):
    found = figure.contrast(plant(accuracy=gain, grpo=0.0, reweight=0.0))
    assert found.set_index("number").loc["accuracy", "gain_excluded"] == excluded


@pytest.mark.parametrize(
    ("grpo", "reweight", "said"),
    [
        (-0.05, 0.0, "preserves"),
        (0.0, 0.05, "adds"),
        (-0.05, 0.05, "adds"),
        (-0.05, -0.03, "neither"),
        (0.0, 0.0, "neither"),
    ],
)
def test_rare_tokens_are_preserved_or_added_to_as_both_arms_were_planted_against_the_start(grpo, reweight, said):
    changes = figure.subtract_start(plant(grpo=grpo, reweight=reweight), 0.19)
    assert figure.judge_change(changes) == said
