"""Samples of tokens: their chances, what statistics make of them, and how often intervals hold what was planted."""

import math
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from support.policies import make_batch, make_policy
from support.tiers import every

from gradscope import measure
from gradscope.diagnosis import sampling_error, token_shares
from gradscope.diagnosis.parts.layers import layer_norms
from gradscope.diagnosis.parts.where import shares_by
from gradscope.diagnosis.precision import FEWEST, design_variances
from gradscope.diagnosis.shares import sum_by_prompt
from gradscope.diagnosis.terms import scaled_squares
from gradscope.gradients.sample import EQUAL_PART, SAMPLING_PROBABILITY, TokenSample, token_sizes
from gradscope.intervals import EDGES, assign_intervals, interval_labels, summarize
from gradscope.resampling import Resampling
from gradscope.theory import gains, regress_norms

LABELS = interval_labels()
NORMS = ["act_grad_norm.0", "act_grad_norm.1", "param_grad_norm"]


def plant_table(seed: int = 0, *, prompts: int = 12, each: int = 60) -> pd.DataFrame:
    """A token table known in full: norms are (1−π)·gain, weights differ by prompt and are 0 for a fifth of them."""
    rng = np.random.default_rng(seed)
    size = prompts * each
    prob = rng.beta(0.8, 0.4, size).clip(1e-3, 1 - 1e-4)
    group = np.repeat(np.arange(prompts), each)
    shift = rng.normal(size=prompts)[group]
    gain = np.exp(0.3 * rng.normal(size=size) + 0.2 * shift) * np.where(prob < 0.25, 2.0, 1.0)
    table = pd.DataFrame({"response": group, "group": group, "position": np.tile(np.arange(each), prompts)})
    table["prob"], table["log_one_minus_prob"], table["interval"] = prob, np.log1p(-prob), assign_intervals(prob)
    table["entropy"], table["token"] = rng.exponential(size=size), rng.choice([" knight", "12", ","], size)
    served = (rng.random(prompts) < 0.8)[group]
    table["weight"] = table["advantage"] = rng.choice([-1.0, 1.0], size) * (1 + 0.3 * shift) * served
    table["logit_grad_norm"] = 1.2 * (1 - prob)
    for scale, name in zip((3.0, 1.0, 10.0), NORMS, strict=True):
        table[name] = scale * gain * (1 - prob)
    return table


def make_sample(table: pd.DataFrame, seed: int, design: str = "proportional") -> TokenSample:
    interval, columns = table["interval"].to_numpy(), (table["logit_grad_norm"], table["weight"])
    sizes = token_sizes(design, interval, *(column.to_numpy() for column in columns))
    return TokenSample(interval, 4, sizes, np.random.default_rng(seed))


def sample_some(table: pd.DataFrame, each: int, seed: int = 0, design: str = "proportional") -> pd.DataFrame:
    """The table as it is where so many tokens of each interval were measured."""
    sample = make_sample(table, seed, design)
    measured = {name: table[name].where(sample.take(each)) for name in NORMS}
    return table.assign(**measured, **{SAMPLING_PROBABILITY: sample.probabilities(each)})


# Probabilities.


@pytest.mark.parametrize("design", ["proportional", "stratified"])
@pytest.mark.parametrize("each", every(2, [3, 25]))
def test_every_token_counts_for_one_on_average(design, each):
    # 1 / p where it was drawn, 0 where not: that this has mean 1 for each token is what p is the probability of. Tokens
    # of like size together, so that the means over draws are nearly normal.
    table, draws = plant_table(), 1000
    sizes = token_sizes(design, *(table[name].to_numpy() for name in ("interval", "logit_grad_norm", "weight")))
    order = np.lexsort((sizes, table["interval"]))
    found = np.empty((draws, 30))
    for seed in range(draws):
        sample = make_sample(table, seed, design)
        counts = (sample.take(each) / sample.probabilities(each))[order]
        found[seed] = [part.mean() for part in np.array_split(counts, 30)]
    errors = (found.mean(0) - 1) / (found.std(0) / math.sqrt(draws))
    assert np.abs(errors).max() < 4.5  # one of 30 normal errors is, once in 5,000


def test_chances_follow_the_sizes_and_none_is_less_than_its_part_of_equal_ones():
    table, draws, each = plant_table(), 2000, 20
    frequency = np.mean([make_sample(table, seed).take(each) for seed in range(draws)], axis=0)
    for interval in range(4):
        own = (table["interval"] == interval).to_numpy()
        norm, weighted = table["logit_grad_norm"][own], (table["weight"].abs() * table["logit_grad_norm"])[own]
        sizes = 0.25 + 0.375 * norm / norm.mean() + 0.375 * weighted / weighted.mean()
        expected = each * sizes / own.sum()
        # Sequential Poisson sampling hits its target but for terms of order 1 / each; 5 standard errors beside them.
        slack = 5 * np.sqrt(expected / draws) + 0.1 * expected
        assert (np.abs(frequency[own] - expected) < slack)[expected < 0.7].all()
        assert sizes.min() >= EQUAL_PART


def test_as_many_of_each_interval_are_drawn_as_were_asked_for_or_all():
    table = plant_table()
    counts = np.bincount(table["interval"])
    for each in (1, 17, int(counts.min()), 10**6):
        for design in ("proportional", "stratified"):
            sample = make_sample(table, 0, design)
            assert np.bincount(table["interval"], sample.take(each)).tolist() == np.minimum(each, counts).tolist()
            probabilities = sample.probabilities(each)
            whole = counts[table["interval"]] <= each
            assert (probabilities[whole] == 1).all() and ((probabilities > 0) & (probabilities <= 1)).all()
            if design == "stratified":
                np.testing.assert_allclose(probabilities, np.minimum(1, each / counts)[table["interval"]])


def test_a_sample_depends_on_the_seed_alone_and_holds_every_smaller_one():
    table = plant_table()
    taken = [make_sample(table, 3).take(each) for each in range(0, 200, 7)]
    assert all((larger >= smaller).all() for smaller, larger in pairwise(taken))
    assert (make_sample(table, 3).take(30) == make_sample(table, 3).take(30)).all()
    assert (make_sample(table, 4).take(30) != make_sample(table, 3).take(30)).any()


def test_without_weights_chances_follow_the_norm_at_the_logits_alone():
    table = plant_table()
    interval, norms = table["interval"].to_numpy(), table["logit_grad_norm"].to_numpy()
    means = np.bincount(interval, norms) / np.bincount(interval)
    expected = 0.25 + 0.75 * norms / means[interval]
    some = np.where(np.arange(len(table)) == 0, np.nan, table["weight"].to_numpy())
    for weight, own in ((np.nan * norms, norms > 0), (0.0 * norms, norms > 0), (some, interval == interval[0])):
        found = token_sizes("proportional", interval, norms, weight)
        np.testing.assert_allclose(found[own], expected[own])
    certain = token_sizes("proportional", interval, np.zeros(len(table)), table["weight"].to_numpy())
    assert (certain == 1).all()


# Statistics.


def loop_totals(table: pd.DataFrame, values: pd.Series, proxies: pd.Series) -> list[float]:
    """Token by token: Σ values/p over each interval's measured tokens · Σ proxies / (Σ proxies/p of the measured)."""
    out = []
    for interval in range(4):
        total = whole = measured = 0.0
        for value, proxy, p, own in zip(values, proxies, table[SAMPLING_PROBABILITY], table["interval"], strict=True):
            if own == interval:
                whole += proxy
                if not math.isnan(value):
                    total, measured = total + value / p, measured + proxy / p
        out.append(total * whole / measured)
    return out


def square_by(table: pd.DataFrame, name: str) -> pd.Series:
    return (table["weight"] * table[name]) ** 2


def test_statistics_are_those_of_a_loop_that_counts_each_token_for_one_over_its_chance():
    table = sample_some(plant_table(), 15)
    counts = np.bincount(table["interval"])
    squares, proxies = square_by(table, "param_grad_norm"), square_by(table, "logit_grad_norm")
    totals = np.array(loop_totals(table, squares, proxies))
    norms = np.array(loop_totals(table, table["param_grad_norm"], table["logit_grad_norm"]))
    shares = token_shares(sum_by_prompt(table, 4), LABELS, seed=None)
    shares = shares[shares["statistic"] == "squared_share"]
    assert shares["value"].tolist() == pytest.approx((totals / totals.sum()).tolist())
    assert shares["n"].tolist() == [15] * 4
    layers = layer_norms(table, EDGES, seed=np.random.default_rng(0), resamples=2).set_index("quantity")["value"]
    assert layers["param_grad_norm"].tolist() == pytest.approx((norms / counts).tolist())
    # At the logits every token is known.
    assert layers["logit_grad_norm"].tolist() == pytest.approx(
        table.groupby("interval")["logit_grad_norm"].mean().tolist()
    )
    args = (table["interval"], table["group"])
    settings = {"resampling": Resampling(resamples=2), "probabilities": table[SAMPLING_PROBABILITY]}
    weight = table["weight"]
    rms = summarize(
        weight * table["param_grad_norm"], *args, statistic="rms", sizes=weight * table["logit_grad_norm"], **settings
    )
    assert (rms["value"] ** 2 * counts).tolist() == pytest.approx(totals.tolist())
    sums = summarize(squares, *args, statistic="sum", sizes=proxies, **settings)
    assert sums["value"].tolist() == pytest.approx(totals.tolist())
    assert np.bincount(table["interval"], np.nan_to_num(scaled_squares(table))).tolist() == pytest.approx(
        totals.tolist()
    )
    where = shares_by(table, seed=np.random.default_rng(0), resamples=2)
    where = where[where["driver"] == "token_class"].set_index("value")["squared_share"]
    words = np.nansum(scaled_squares(table)[table["token"] == " knight"])
    assert where["word"] == pytest.approx(words / totals.sum())


def test_bounds_are_those_of_a_jackknife_that_leaves_out_each_prompt_with_its_chances():
    table = sample_some(plant_table(), 20)
    rows = token_shares(sum_by_prompt(table, 4), LABELS, seed=np.random.default_rng(3))
    own = rows[rows["statistic"] == "squared_share"]
    left, error = [], []
    for prompt in range(12):
        rest = table[table["group"] != prompt]
        totals = np.array(loop_totals(rest, square_by(rest, "param_grad_norm"), square_by(rest, "logit_grad_norm")))
        left.append(np.log(totals / (totals.sum() - totals)))
    away = np.array(left) - np.mean(left, axis=0)
    worth = []  # by (w·(1−π))²: in tokens of equal amounts
    for a in range(4):
        inside = table[table["interval"] == a]
        amounts, p = (inside["weight"] * (1 - inside["prob"])) ** 2, inside[SAMPLING_PROBABILITY]
        worth.append(min(20, amounts.sum() ** 2 / (amounts**2 * (1 / p - 1)).sum()))
    error = np.sqrt(11 / 12 * (away**2).sum(0) + 1 / np.array(worth) ** 2)
    freedom = np.clip((away**2).sum(0) ** 2 / (away**4).sum(0) - 0.5, 1, 11)
    odds = own["value"] / (1 - own["value"])
    for name, sign in (("lower", -1), ("upper", 1)):
        end = odds * np.exp(sign * np.hypot(scipy.stats.t.ppf(0.975, freedom) * error, 1 / 12))
        assert own[name].tolist() == pytest.approx((end / (1 + end)).tolist())


def token_totals(table: pd.DataFrame) -> np.ndarray:
    return np.bincount(table["interval"], np.nan_to_num(scaled_squares(table)), minlength=4)


def test_fits_and_quantiles_of_a_sample_are_those_of_its_tokens_repeated():
    # Chances of 1, ½ and ¼: a token that counts for four is as good as four.
    rng = np.random.default_rng(0)
    table = plant_table(prompts=5, each=30)
    table[SAMPLING_PROBABILITY] = rng.choice([1.0, 0.5, 0.25], len(table))
    repeated = (
        table.loc[table.index.repeat((1 / table[SAMPLING_PROBABILITY]).astype(int))]
        .drop(columns=SAMPLING_PROBABILITY)
        .reset_index(drop=True)
    )
    for make in (
        lambda t: gains.fit_powers(t, seed=np.random.default_rng(0))[["slope", "slope_lower", "slope_upper", "r2"]],
        lambda t: gains.decompose_variance(t, seed=np.random.default_rng(0))[["variance", "carried", "carried_upper"]],
        lambda t: gains.layer_gains(t)[["slope", "min", "max"]],
        lambda t: regress_norms(t, seed=np.random.default_rng(0))[["coefficient", "lower", "upper", "r2", "vif"]],
    ):
        pd.testing.assert_frame_equal(make(table), make(repeated), rtol=1e-7)
    # Quantiles are read between the middles of what values weigh: nearly those of the repeated.
    median = [gains.layer_gains(t)["median"].to_numpy() for t in (table, repeated)]
    np.testing.assert_allclose(*median, rtol=0.05)


# Errors.


@pytest.mark.all
def test_intervals_of_a_sample_hold_the_planted_truth_as_often_as_those_of_the_whole_table():
    # Prompts and tokens are drawn each time. Proportional sampling of 200 of each interval; 95 % of 60 are 57, and a
    # coverage of .93 gives below 48 once in 5,000.
    world = plant_table(99, prompts=3000)
    truth = headline(world, None)
    inside, wrong = dict.fromkeys(truth, 0), 0
    for seed in range(60):
        table = sample_some(plant_table(seed, prompts=100), 200, 10**6 + seed)
        found = headline(table, np.random.default_rng(seed))
        for name, (value, _, _) in truth.items():
            inside[name] += found[name][1] <= value <= found[name][2]
        _, lower, upper = headline(table.drop(columns=SAMPLING_PROBABILITY), np.random.default_rng(seed))[
            "mean_norm", 3
        ]
        wrong += lower <= truth["mean_norm", 3][0] <= upper
    assert all(count >= 48 for count in inside.values()), inside
    assert wrong < 30  # without the chances, the mean is of what was drawn


def headline(table: pd.DataFrame, rng: np.random.Generator | None) -> dict[tuple[str, int], list[float]]:
    """(value, lower, upper) of some numbers by interval."""
    shares = token_shares(sum_by_prompt(table, 4), LABELS, seed=rng, resamples=300)
    out = {}
    for name in ("squared_share", "dominance_index"):
        own = shares[shares["statistic"] == name][["value", "lower", "upper"]].to_numpy(float)
        out[name, 0] = own[0].tolist()
    rng = np.random.default_rng(0) if rng is None else rng
    settings = {"resampling": Resampling(rng, resamples=300), "probabilities": table.get(SAMPLING_PROBABILITY)}
    means = summarize(table["param_grad_norm"], table["interval"], table["group"], **settings)
    for a in (0, 3):
        out["mean_norm", a] = means[["value", "lower", "upper"]].to_numpy(float)[a].tolist()
    return out


@pytest.mark.all
def test_the_error_of_the_sample_alone_is_the_spread_over_samples_of_the_same_tokens():
    table, labels = plant_table(prompts=20), LABELS
    squares = (table["weight"] * table["param_grad_norm"]) ** 2
    draws = [sample_some(table, 40, seed) for seed in range(300)]
    totals = np.array([token_totals(one) for one in draws])
    interval = table["interval"].to_numpy()
    found = [
        design_variances(
            squares.where(one["param_grad_norm"].notna()).to_numpy(),
            square_by(one, "logit_grad_norm").to_numpy(),
            one[SAMPLING_PROBABILITY].to_numpy(),
            interval,
            4,
        )
        for one in draws
    ]
    np.testing.assert_allclose(
        np.mean(found, axis=0), totals.var(0), rtol=0.25
    )  # 8 % is the error of 300 draws' variance
    errors = [sampling_error(one, labels, seed=np.random.default_rng(0), resamples=50) for one in draws[:60]]
    shares = totals[:, 0] / totals.sum(1)
    assert np.mean([error.standard_error for error in errors]) == pytest.approx(shares.std(), rel=0.15)
    assert all(0 < error.part <= 1 for error in errors)
    error = errors[0]
    assert error.width(1.0) == pytest.approx(1) and error.width(np.inf) == pytest.approx(math.sqrt(1 - error.part))
    assert 1 > error.width(2.0) > error.width(4.0) > error.width(np.inf)


def test_no_error_is_told_of_a_whole_table_and_no_part_of_few_tokens():
    table, rng = plant_table(), np.random.default_rng(0)
    assert sampling_error(table, LABELS, seed=rng) is None
    few = sampling_error(sample_some(table, FEWEST - 1), LABELS, seed=rng)
    assert math.isnan(few.part) and "too few" in few.in_words().lower()
    unweighted = sample_some(table.assign(weight=np.nan, advantage=np.nan), 20)
    error = sampling_error(unweighted, LABELS, seed=rng)
    means = [sample_some(table.assign(weight=np.nan), 20, seed) for seed in range(200)]
    sums = [loop_totals(one, one["param_grad_norm"], one["logit_grad_norm"])[0] for one in means]
    spread = np.std(sums) / (table["interval"] == 0).sum()
    assert error.quantity.startswith("mean") and error.standard_error == pytest.approx(spread, rel=0.4)
    one = sampling_error(sample_some(table.assign(group=0), 20), LABELS, seed=rng)
    assert math.isnan(one.lower) and one.standard_error > 0 and "±" in one.in_words()


# Of a real policy.


def test_a_measured_sample_tells_its_chances_and_has_the_full_tables_norms():
    policy = make_policy("qwen2")
    batch = make_batch(policy)
    full = measure(policy, batch, self_check=False)
    for design in ("proportional", "stratified"):
        part = measure(policy, batch, tokens_per_interval=3, self_check=False, sample=design)
        weight, norms = full["weight"].to_numpy(), full["logit_grad_norm"].to_numpy()
        sizes = token_sizes(design, full["interval"].to_numpy(), norms, weight)
        sample = TokenSample(full["interval"].to_numpy(), 4, sizes, np.random.default_rng(0))
        measured = part["param_grad_norm"].notna()
        assert (measured == sample.take(3)).all()
        np.testing.assert_allclose(part[SAMPLING_PROBABILITY], sample.probabilities(3), rtol=1e-6)
        np.testing.assert_allclose(part["param_grad_norm"][measured], full["param_grad_norm"][measured], rtol=1e-5)
    assert SAMPLING_PROBABILITY not in full
