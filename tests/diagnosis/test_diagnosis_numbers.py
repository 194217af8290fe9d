"""The diagnosis's statistics on planted numbers: against loops written beside them, and against what was planted."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import binom
from support.policies import make_batch, make_policy
from support.tiers import every

from gradscope.diagnosis import cosine_matrix, gradient_rows, token_shares
from gradscope.diagnosis.gradients import add_rollouts, carriers, prompt_table, signal_and_noise
from gradscope.diagnosis.result import pick_row
from gradscope.diagnosis.steps import (
    direction_rows,
    entropy_rows,
    influence_rows,
    lag_rows,
    mismatch_rows,
    tell_pooled,
    within_budget,
)
from gradscope.diagnosis.tokens import (
    add_estimated_norms,
    add_weighted_norms,
    bound_margins,
    largest_tokens,
    layer_norms,
    module_shares,
    scaled_squares,
    shares_by,
    sum_by_prompt,
)
from gradscope.gradients import Gram, measure
from gradscope.intervals import EDGES, assign_intervals, interval_labels
from gradscope.objective import LossSettings
from gradscope.rollouts import Note, Response, collate

LABELS = interval_labels()
PROMPTS = 12


def plant_table(seed: int = 0, *, prompts: int = PROMPTS, each: int = 40, boost: float = 2.0) -> pd.DataFrame:
    """A token table whose norms are (1−π)·gain; tokens with π < ¼ have a gain `boost` times as large on average."""
    rng = np.random.default_rng(seed)
    size = prompts * each
    prob = rng.beta(0.8, 0.4, size).clip(1e-3, 1 - 1e-4)
    group = np.repeat(np.arange(prompts), each)
    shift = rng.normal(size=prompts)[group]
    gain = np.exp(0.3 * rng.normal(size=size) + 0.2 * shift) * np.where(prob < 0.25, boost, 1.0)
    table = pd.DataFrame({"response": group, "group": group, "position": np.tile(np.arange(each), prompts)})
    table["token"] = rng.choice([" knight", "12", ",", "\n", "</s>"], size)
    table["prob"], table["log_one_minus_prob"] = prob, np.log1p(-prob)
    table["entropy"] = rng.exponential(size=size)
    table["interval"] = assign_intervals(prob)
    table["policy_weight"] = table["weight"] = table["advantage"] = rng.choice([-1.0, 1.0], size) * (1 + 0.3 * shift)
    table["param_grad_norm"] = 10 * gain * (1 - prob)
    table["logit_grad_norm"] = 1.2 * (1 - prob)
    table["act_grad_norm.0"] = 3 * gain * (1 - prob)
    table["act_grad_norm.1"] = gain * (1 - prob)
    return table


def loop_shares(table: pd.DataFrame) -> dict[str, list[float]]:
    """Token by token; an interval that was measured in part is the ratio estimate by (w·‖e − π‖)²."""
    tokens, squares, predicted = ([0.0] * 4 for _ in range(3))
    for a in range(4):
        own, known, proxies = table[table["interval"] == a], [], []
        for row in own.itertuples():
            tokens[a] += 1
            predicted[a] += (row.weight * (1 - row.prob)) ** 2
            if not math.isnan(row.param_grad_norm):
                known.append((row.weight * row.param_grad_norm) ** 2)
                proxies.append((row.weight * row.logit_grad_norm) ** 2)
        whole = sum((row.weight * row.logit_grad_norm) ** 2 for row in own.itertuples())
        squares[a] = whole * sum(known) / sum(proxies)
    shares = [[part / sum(of) for part in of] for of in (tokens, squares, predicted)]
    return {
        "token_share": shares[0],
        "squared_share": shares[1],
        "predicted_share": shares[2],
        "dominance_index": [math.log2(s / t) for s, t in zip(shares[1], shares[0], strict=True)],
        "predicted_index": [math.log2(s / t) for s, t in zip(shares[2], shares[0], strict=True)],
        "added_index": [math.log2(s / p) for s, p in zip(shares[1], shares[2], strict=True)],
    }


def sample_some(table: pd.DataFrame, count: int, seed: int = 0) -> pd.DataFrame:
    """Norms of `count` random tokens of each interval, NaN of the others."""
    rng, table = np.random.default_rng(seed), table.copy()
    for a in range(4):
        own = np.flatnonzero(table["interval"] == a)
        table.loc[rng.permutation(own)[count:], "param_grad_norm"] = np.nan
    return table


def numbers(rows: pd.DataFrame, statistic: str, column: str = "value") -> list[float]:
    return rows.loc[rows["statistic"] == statistic, column].tolist()


@pytest.mark.parametrize("count", [None, 15])
def test_shares_and_indices_are_those_of_a_loop_over_tokens_also_where_a_sample_was_measured(count):
    table = plant_table() if count is None else sample_some(plant_table(), count)
    rows = token_shares(sum_by_prompt(table, 4), LABELS, seed=None)
    for statistic, expected in loop_shares(table).items():
        assert numbers(rows, statistic) == pytest.approx(expected, rel=1e-12)
    measured = [int(table["param_grad_norm"][table["interval"] == a].notna().sum()) for a in range(4)]
    assert numbers(rows, "squared_share", "n") == measured
    assert rows["lower"].isna().all()


@pytest.mark.usefixtures("few_prompts_are_many")
def test_bounds_are_percentiles_over_tables_whose_prompts_are_redrawn():
    table, resamples = plant_table(), 50
    rows = token_shares(sum_by_prompt(table, 4), LABELS, seed=np.random.default_rng(3), resamples=resamples)
    draws = np.random.default_rng(3).multinomial(PROMPTS, np.full(PROMPTS, 1 / PROMPTS), size=resamples)
    redrawn = [
        pd.concat([table[table["group"] == p] for p in range(PROMPTS) for _ in range(times[p])]) for times in draws
    ]
    found = [loop_shares(one) for one in redrawn]
    for statistic in ("token_share", "squared_share", "dominance_index", "added_index"):
        low, high = np.quantile([one[statistic] for one in found], [0.025, 0.975], axis=0)
        assert numbers(rows, statistic, "lower") == pytest.approx(low.tolist(), rel=1e-9)
        assert numbers(rows, statistic, "upper") == pytest.approx(high.tolist(), rel=1e-9)


def test_intervals_cover_the_planted_index_about_as_often_as_they_say():
    # The truth is the same statistic of a table so large that its own error is a tenth of theirs.
    rows = token_shares(sum_by_prompt(plant_table(99, prompts=2000), 4), LABELS, seed=None)
    truth = {name: numbers(rows, name)[0] for name in ("dominance_index", "added_index", "squared_share")}
    inside = dict.fromkeys(truth, 0)
    for seed in range(150):
        table = sample_some(plant_table(seed, prompts=16), 60, seed)
        rows = token_shares(sum_by_prompt(table, 4), LABELS, seed=np.random.default_rng(seed), resamples=300)
        for name, value in truth.items():
            inside[name] += numbers(rows, name, "lower")[0] <= value <= numbers(rows, name, "upper")[0]
    # Percentiles over 16 prompts fall short of .95; a coverage of .93 gives below 127 of 150 once in 10,000.
    assert all(127 <= count <= 150 for count in inside.values()), inside


def test_a_planted_boost_is_what_the_network_adds():
    """All gains equal but for those of low tokens: share and index follow from the boost by algebra."""
    table = plant_table()
    table["param_grad_norm"] = (1 - table["prob"]) * np.where(table["interval"] == 0, 3.0, 1.0)
    rows = token_shares(sum_by_prompt(table, 4), LABELS, seed=np.random.default_rng(0))
    share = numbers(rows, "predicted_share")[0]
    expected = math.log2(9 / (9 * share + 1 - share))
    assert numbers(rows, "added_index")[0] == pytest.approx(expected, rel=1e-12)
    table["param_grad_norm"] = 7 * (1 - table["prob"])
    rows = token_shares(sum_by_prompt(table, 4), LABELS, seed=np.random.default_rng(0))
    assert np.abs(numbers(rows, "added_index")).max() < 1e-12
    assert np.max(numbers(rows, "added_index", "lower")) < 0 < np.min(numbers(rows, "added_index", "upper"))


@pytest.mark.usefixtures("few_prompts_are_many")
def test_shares_by_kind_and_position_are_those_of_a_loop_over_measured_tokens():
    table = sample_some(plant_table(), 25)
    where = shares_by(table, classes=3, special={"</s>"}, seed=np.random.default_rng(0))
    kinds = {" knight": "word", "12": "digit", ",": "punctuation", "\n": "space", "</s>": "special"}
    counts, squares = dict.fromkeys(kinds.values(), 0), dict.fromkeys(kinds.values(), 0.0)
    proxies = (table["weight"] * table["logit_grad_norm"]) ** 2
    tokens = proxies.groupby(table["interval"]).sum()
    measured = proxies[table["param_grad_norm"].notna()].groupby(table["interval"]).sum()
    for row in table.itertuples():
        counts[kinds[row.token]] += 1
        if not math.isnan(row.param_grad_norm):
            each = tokens[row.interval] / measured[row.interval]
            squares[kinds[row.token]] += each * (row.weight * row.param_grad_norm) ** 2
    rows = where[where["driver"] == "token_class"].set_index("value")
    for kind in counts:
        assert rows.loc[kind, "token_share"] == pytest.approx(counts[kind] / len(table))
        assert rows.loc[kind, "squared_share"] == pytest.approx(squares[kind] / sum(squares.values()))
        assert rows.loc[kind, "squared_lower"] < rows.loc[kind, "squared_share"] < rows.loc[kind, "squared_upper"]
    own = table.assign(kind=table["token"].map(kinds), size=0.0)
    known = own["param_grad_norm"].notna()
    each = tokens[own["interval"]].to_numpy() / measured[own["interval"]].to_numpy()
    own["size"] = (each * (own["weight"] * own["param_grad_norm"]) ** 2).where(known, 0.0)
    sums = own.groupby(["group", "kind"])["size"].agg(["size", "sum"]).unstack(fill_value=0)
    prompts, rng = len(sums), np.random.default_rng(0)
    for name, prefix in (("size", "token"), ("sum", "squared")):
        draws = rng.multinomial(prompts, np.full(prompts, 1 / prompts), size=1000)
        redrawn = draws @ sums[name].to_numpy()
        shares = pd.DataFrame(redrawn / redrawn.sum(1, keepdims=True), columns=sums[name].columns)
        for end, tail in (("lower", 0.05 / 10), ("upper", 1 - 0.05 / 10)):  # 5 % for all five kinds, both sides
            assert rows[f"{prefix}_{end}"].to_dict() == pytest.approx(shares.quantile(tail).to_dict())
    positions = where[where["driver"] == "position_class"]
    assert len(positions) == 3 and positions["token_share"].sum() == pytest.approx(1)
    assert set(where["driver"]) == {"token_class", "position_class", "length_class", "entropy_class", "advantage_sign"}


def test_scaled_squares_add_up_to_the_whole_sum_on_average():
    table = plant_table()
    whole = ((table["weight"] * table["param_grad_norm"]) ** 2).sum()
    sums = np.array([np.nansum(scaled_squares(sample_some(table, 20, seed))) for seed in range(200)])
    # Four standard errors of the 200 draws.
    assert abs(sums.mean() - whole) < 4 * sums.std() / math.sqrt(200)
    assert np.nansum(scaled_squares(table)) == pytest.approx(whole)


def test_the_largest_tokens_come_with_their_share_of_the_squares():
    table = sample_some(plant_table(), 30)
    norms = sorted(
        abs(r.weight) * r.param_grad_norm for r in table.itertuples() if r.param_grad_norm == r.param_grad_norm
    )
    top = largest_tokens(table, 5)
    assert top["weighted_norm"].tolist() == pytest.approx(norms[:-6:-1])
    assert top["squared_share"].tolist() == pytest.approx([n**2 / sum(m**2 for m in norms) for n in norms[:-6:-1]])
    one = table[(table["response"] == top["response"][0]) & (table["position"] == top["position"][0])].iloc[0]
    assert (top["token"][0], top["prob"][0]) == (one["token"], one["prob"])


@pytest.mark.parametrize("each", [None, 3])
def test_module_shares_are_sums_over_tokens(each):
    policy = make_policy("qwen2")  # embedding and head share a table
    given = {"tokens_per_interval": each, "self_check": False}
    table = measure(policy, make_batch(policy), per_module=True, module_groups=True, **given)
    found = module_shares(table, policy).set_index("module")
    chances = table.get("sampling_probability", pd.Series(1.0, table.index)).astype(float)
    proxies = (table["weight"] * table["logit_grad_norm"]).astype(float) ** 2
    known = (proxies / chances).where(table["param_grad_norm"].notna(), 0.0)
    counts = table["interval"].map(proxies.groupby(table["interval"]).sum() / known.groupby(table["interval"]).sum())
    counts = (counts / chances).fillna(0.0)
    energy = lambda name, own: np.nansum(own * (table["weight"] * table[name].astype(float)) ** 2)  # noqa: E731
    lowest = counts * (table["interval"] == 0)
    whole = {own: energy("param_grad_norm", weights) for own, weights in (("all", counts), ("low", lowest))}
    assert found["squared_share"].sum() == pytest.approx(1) == found["parameter_share"].sum()
    leaves = {f"attention {part}": [f"{part}_proj"] for part in "qkvo"} | {"embedding and head": ["embed_tokens"]}
    leaves |= {"MLP": ["gate_proj", "up_proj", "down_proj"]}
    leaves |= {"norms": ["input_layernorm", "post_attention_layernorm", "norm"]}
    assert {*found.index} == {*leaves}
    for module, row in found.iterrows():
        single = [name for name, _ in policy.model.named_modules() if name.rpartition(".")[2] in leaves[module]]
        parts = [sum(energy(f"param_grad_norm.{name}", own) for name in single) for own in (counts, lowest)]
        assert row["squared_share"] == pytest.approx(parts[0] / whole["all"], rel=1e-5)
        assert row["low_share"] == pytest.approx(parts[1] / whole["low"], rel=1e-5)
        size = sum(p.numel() for name in single for p in policy.model.get_submodule(name).parameters(recurse=False))
        assert row["parameter_share"] == pytest.approx(size / sum(p.numel() for p in policy.model.parameters()))
    assert module_shares(table[[c for c in table if not c.startswith("param_grad_norm.")]], policy) is None


def test_layer_norms_are_means_over_each_places_tokens():
    table = plant_table()
    layers = layer_norms(table, EDGES, seed=np.random.default_rng(0))
    assert layers["quantity"].unique().tolist() == [
        "logit_grad_norm", "act_grad_norm.0", "act_grad_norm.1", "param_grad_norm",
    ]  # fmt: skip
    for row in layers.itertuples():
        expected = table.loc[table["interval"] == row.interval, row.quantity].mean()
        assert row.value == pytest.approx(expected)
        assert row.lower < expected < row.upper


def test_the_margins_of_the_bounds_are_the_smallest_distances_and_a_broken_bound_is_counted():
    table = plant_table()
    n, rest = 50, 1 - table["prob"]
    found = bound_margins(table, n)
    assert (found.num_tokens, found.violations) == (len(table), 0)
    # float32 columns: 1e-6 relative.
    assert found.lower_margin == pytest.approx(1.2 / math.sqrt(n / (n - 1)) - 1, abs=1e-5)
    assert found.upper_margin == pytest.approx(1 - 1.2 / math.sqrt(2), abs=1e-5)
    table.loc[3, "logit_grad_norm"], table.loc[7, "logit_grad_norm"] = 1.5 * rest[3], 0.9 * rest[7]
    found = bound_margins(table, n)
    assert found.violations == 2
    assert found.upper_margin == pytest.approx(1 - 1.5 / math.sqrt(2), abs=1e-5)
    assert found.lower_margin == pytest.approx(0.9 / math.sqrt(n / (n - 1)) - 1, abs=1e-5)


def plant_vectors(
    n: int, means: list[float], sds: list[float], rng: np.random.Generator, dimensions: int = 150
) -> np.ndarray:
    """g_{p,a} [n, A, P]: a mean along an axis of its own plus Gaussian noise of that total standard deviation."""
    noise = rng.normal(size=(n, len(means), dimensions)) / math.sqrt(dimensions) * np.array(sds)[:, None]
    return noise + np.eye(len(means), dimensions) * np.array(means)[:, None]


def make_gram(vectors: np.ndarray) -> np.ndarray:
    return np.einsum("pai,qbi->paqb", vectors, vectors)


def test_prompts_are_told_by_their_own_vectors():
    rng = np.random.default_rng(1)
    vectors = plant_vectors(7, [1, 0.2, 0.5, 0.1], [0.5, 1, 0.3, 0.2], rng)
    vectors[2] *= -1.5  # opposes the rest
    found, prompts, whole = prompt_table(Gram.exact(make_gram(vectors))), vectors.sum(1), vectors.sum((0, 1))
    assert found["gradient_share"].is_monotonic_decreasing and found["gradient_share"].sum() == pytest.approx(1)
    assert found["group"].iat[-1] == 2 and found["cosine_with_rest"].iat[-1] < 0 and not found["share_error"].any()
    for row in found.itertuples():
        own, rest = prompts[row.group], whole - prompts[row.group]
        assert row.gradient_norm == pytest.approx(np.linalg.norm(own))
        assert row.gradient_share == pytest.approx(own @ whole / (whole @ whole))
        expected = own @ rest / np.linalg.norm(own) / np.linalg.norm(rest)
        assert row.cosine_with_rest == pytest.approx(expected)
    shares = found["gradient_share"]
    assert shares[: carriers(shares)].sum() >= 0.5 > shares[: carriers(shares) - 1].sum()


def test_what_the_rollouts_tell_of_a_prompt():
    rows = [Response([1, 2], [3] * n, group=g, reward=r) for g, n, r in ((0, 2, 1.0), (0, 3, 0.0), (4, 2, 0.25))]
    batch = collate(rows)
    table = pd.DataFrame({"response": [0, 0, 1, 1, 1, 2, 2], "group": [0] * 5 + [4] * 2})
    table["position"] = [0, 1, 0, 1, 2, 0, 1]
    table["weight"], table["log_one_minus_prob"] = [1, -1, 1, -3, 1, 0, 2], np.log([0.5, 0.5, 0.5, 0.4, 0.9, 0.9, 0.1])
    found = add_rollouts(pd.DataFrame({"group": [4, 0]}), table, batch)
    assert found[["group", "responses", "tokens", "response", "position"]].to_numpy().tolist() == [
        [4, 1, 2, 2, 1],
        [0, 2, 5, 1, 1],
    ]
    assert found["reward"].tolist() == [0.25, 0.5]


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
    error = math.sqrt(6 / 7 * np.square(left - np.mean(left)).sum())
    reach = t.ppf(0.975, 6) * error
    assert found[1:] == pytest.approx([found[0] - reach, found[0] + reach], rel=1e-10)


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


@pytest.mark.parametrize("scale", every(2, ["heavy", "equal"]))
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


def test_all_of_one_interval_is_the_largest_share_in_every_redraw():
    table = plant_table()
    table["weight"] = np.where(table["interval"] == 0, table["weight"], 0.0)
    rows = token_shares(sum_by_prompt(table, 4), LABELS)
    assert [pick_row(rows, "largest_share", "raw", label)["value"] for label in LABELS] == [1.0, 0.0, 0.0, 0.0]


def test_lag_and_clipping_are_those_of_a_loop_over_tokens_whose_old_logprob_is_known():
    table, rng = plant_table(), np.random.default_rng(1)
    table["logprob"] = np.log(table["prob"])
    table["old_logprob"] = table["logprob"] + 0.5 * rng.normal(size=len(table))
    table.loc[rng.permutation(len(table))[:60], "old_logprob"] = np.nan
    loss = LossSettings(clip_ratio_low=0.2, clip_ratio_high=0.3, clip_ratio_c=1.5)
    gaps, low, high, dual = [], 0, 0, 0
    for row in table.itertuples():
        if math.isnan(row.old_logprob):
            continue
        ratio = math.exp(row.logprob - row.old_logprob)
        gaps.append(abs(row.logprob - row.old_logprob))
        low += row.advantage < 0 and ratio < 0.8
        high += row.advantage > 0 and ratio > 1.3
        dual += row.advantage < 0 and ratio > 1.5
    rows, n = lag_rows(table, loss, seed=np.random.default_rng(0)), len(gaps)
    expected = {"logprob_difference_mean": sum(gaps) / n, "logprob_difference_max": max(gaps)}
    expected |= {"clip_low": low / n, "clip_high": high / n, "clip_dual": dual / n}
    for statistic, value in expected.items():
        row = pick_row(rows, statistic)
        assert row["value"] == pytest.approx(value) and row["n"] == n
        assert row["lower"] < value < row["upper"] or statistic.endswith("max")
    off = lag_rows(table, replace(loss, clip_ratio_c=None), seed=None)
    assert pick_row(off, "clip_dual")["value"] == 0
    assert lag_rows(table.assign(old_logprob=np.nan), loss, seed=None).empty


def test_influence_rows_are_covariances_with_the_whole_predicted_change():
    rng = np.random.default_rng(0)
    interval = rng.integers(0, 4, 300)
    table = pd.DataFrame({"interval": interval, "group": rng.integers(0, 8, 300), "advantage": rng.normal(size=300)})
    sources = ["0", "1", "2", "3", "kl", "decay"]
    for name in sources:
        table[f"by.{name}"] = rng.normal(size=300) * (3 if name == "0" else 1)
    table["predicted"] = table[[f"by.{name}" for name in sources]].sum(axis=1)
    rows, _ = influence_rows(table, LABELS, seed=np.random.default_rng(0))
    top = table[interval == 3]
    for statistic, source in (("low_to_high_share", "0"), ("high_to_high_share", "3")):
        row = pick_row(rows, statistic, interval=LABELS[3])
        expected = np.cov(top[f"by.{source}"], top["predicted"])[0, 1] / top["predicted"].var()
        assert row["value"] == pytest.approx(expected, rel=1e-10)
        assert row["lower"] < expected < row["upper"] and row["n"] == len(top)
    # A source without a gradient causes nothing that could be told: it is not there.
    rows, _ = influence_rows(table.assign(**{"by.0": 0.0}), LABELS, seed=np.random.default_rng(0))
    assert np.isnan(pick_row(rows, "low_to_high_share", interval=LABELS[3])["value"])
    assert np.isfinite(pick_row(rows, "high_to_high_share", interval=LABELS[3])["value"])


def test_right_directions_are_counted_among_the_tokens_that_moved():
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"interval": rng.integers(0, 3, 400), "group": rng.integers(0, 8, 400)})
    table["advantage"] = rng.choice([-1.0, 0.0, 2.0], 400)
    table["delta_log_odds.all"] = rng.choice([-0.1, 0.0, 0.3], 400)
    rows, frame = direction_rows(table, "actual", LABELS, seed=np.random.default_rng(0))
    for sign, word in ((1, "positive"), (-1, "negative")):
        for interval, label in [*enumerate(LABELS), (None, "all")]:
            right, moved = 0, 0
            for row in table.itertuples(name=None, index=False):
                own = interval is None or row[0] == interval
                if own and np.sign(row[2]) == sign and row[3] != 0:
                    moved, right = moved + 1, right + (np.sign(row[3]) == sign)
            found = pick_row(rows, f"right_direction_{word}_actual", interval=label)
            assert found["n"] == moved
            assert found["value"] == pytest.approx(right / moved if moved else math.nan, nan_ok=True)
    assert set(frame["interval"]) == {*LABELS, "all"} and set(frame["kind"]) == {"actual"}


def test_a_budget_of_tokens_takes_whole_prompts_and_at_least_one():
    responses = [Response([5], [6] * size, group=group) for group in range(6) for size in (3, 4)]
    batch = collate(responses)
    for budget, prompts in ((10**30, 6), (1000, 6), (21, 3), (20, 2), (1, 1)):
        rows = within_budget(batch, budget, generator=torch.Generator().manual_seed(0))
        chosen = batch.group_ids[rows]
        assert len(chosen.unique()) == prompts and len(rows) == 2 * prompts


def test_parts_of_the_change_of_entropy_are_sums_over_tokens_and_hold_what_was_planted():
    """Tokens of [¾, 1] with Â > 0 lower it by .02 nats in the mean of all prompts that there could be."""
    rng, inside, planted = np.random.default_rng(0), 0, -0.02
    for trial in range(100):
        prompts, each = 30, 8
        table = pd.DataFrame({"group": np.repeat(np.arange(prompts), each)})
        table["interval"], table["advantage"] = rng.integers(0, 4, len(table)), rng.choice([-1.0, 0.0, 1.0], len(table))
        table["prob"] = rng.uniform(0.01, 1, len(table))
        chosen = (table["interval"] == 3) & (table["advantage"] > 0)
        effect = 12 * planted * rng.normal(1, 0.5, prompts)[table["group"]]  # one token in twelve
        table["entropy_part"] = (np.where(chosen, effect, 0.0) + rng.normal(0, 0.01, len(table))) / len(table)
        whole = {"0": 0.25, "momentum": -1.0}
        rows, found = entropy_rows(table, whole, LABELS, seed=trial)
        own = found[(found["interval"] == LABELS[3]) & (found["sign"] == "positive")].iloc[0]
        inside += own["lower"] <= planted <= own["upper"]
    assert 88 <= inside <= 100  # 95 of 100, within three standard deviations
    for row in found.itertuples():
        sign = {"positive": 1, "negative": -1, "zero": 0}[row.sign]
        kept = table[(table["interval"] == LABELS.index(row.interval)) & (table["advantage"] == sign)]
        assert (row.num_tokens, row.change) == (len(kept), pytest.approx(kept["entropy_part"].sum()))
    assert found["change"].sum() == pytest.approx(table["entropy_part"].sum())
    assert numbers(rows, "entropy_change_predicted") == [-0.75]


def test_the_covariance_that_stands_for_a_tokens_part_is_ranked_with_it():
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"group": np.arange(200) // 10, "prob": rng.uniform(0.01, 1, 200)})
    table["interval"], table["advantage"] = assign_intervals(table["prob"]), rng.choice([-1.0, 1.0], 200)
    logs = np.log(table["prob"])
    covariance = (logs - logs.mean()) * (table["advantage"] - table["advantage"].mean())
    for part, expected in ((-covariance, 1.0), (covariance**3, -1.0)):
        rows, _ = entropy_rows(table.assign(entropy_part=part), {"0": 0.0}, LABELS, seed=None)
        assert numbers(rows, "entropy_proxy_rank") == [pytest.approx(expected)]


def test_what_sampler_and_trainer_differ_by_is_told_by_interval_with_its_power():
    table, rng = plant_table(prompts=40), np.random.default_rng(1)
    table["logprob"] = table["old_logprob"] = np.log(table["prob"])
    noise = np.exp(0.3 * rng.normal(size=len(table))) * rng.choice([-1, 1], len(table))
    gap = 0.01 * (1 - table["prob"]) ** 0.7 * noise
    table["sampler_logprob"] = table["old_logprob"] - gap
    table.loc[:4, "sampler_logprob"] = np.nan  # unknown
    table.loc[10:13, "advantage"] = 0.0  # masked, in a response where others have an advantage
    rows, found = mismatch_rows(table, LABELS, seed=0)
    known = table["sampler_logprob"].notna()
    for place, label in enumerate([*LABELS, "all"]):
        own, row = known if label == "all" else known & (table["interval"] == place), found.iloc[place]
        assert (row["label"], row["num_tokens"]) == (label, own.sum())
        assert row["value"] == pytest.approx(gap[own].abs().mean())
        assert row["largest"] == pytest.approx(gap[own].abs().max())
        assert row["ratio"] == pytest.approx(np.exp(gap[own]).mean())
        assert row["masked_share"] == pytest.approx((table.loc[own, "advantage"] == 0).mean())
    assert numbers(rows, "mismatch_mean") == pytest.approx(found["value"].tolist())
    power = rows[rows["statistic"] == "mismatch_power"].iloc[0]
    assert power["lower"] < 0.7 < power["upper"] and power["value"] == pytest.approx(0.7, abs=0.1)
    for nothing in (table.drop(columns="sampler_logprob"), table.assign(sampler_logprob=table["old_logprob"])):
        assert mismatch_rows(nothing, LABELS)[1] is None


def test_an_error_of_the_logits_is_seldom_told_from_the_power_1():
    wrong, draws = 0, 80
    for seed in range(draws):
        table, rng = plant_table(seed, prompts=24), np.random.default_rng([seed, 1])
        table["logprob"] = table["old_logprob"] = np.log(table["prob"])
        noise = np.exp(0.5 * rng.normal(size=len(table)) + 0.3 * rng.normal(size=24)[table["group"]])
        gap = 0.01 * (1 - table["prob"]) * noise * rng.choice([-1, 1], len(table))
        table["sampler_logprob"] = table["old_logprob"] - gap
        rows, _ = mismatch_rows(table, LABELS, seed=0, resamples=200)
        power = rows[rows["statistic"] == "mismatch_power"].iloc[0]
        wrong += not power["lower"] <= 1 <= power["upper"]
    assert wrong <= binom.ppf(0.99, draws, 0.05)  # false verdicts of at most 5 %


def test_the_energy_that_a_mask_removes_is_what_the_tokens_had_without_it():
    table = plant_table(prompts=40)
    table["advantage"] = table["weight"] = np.random.default_rng(2).choice([-1.5, 0.5], 40)[table["response"]]
    table["logprob"] = table["old_logprob"] = np.log(table["prob"])
    table["sampler_logprob"] = table["old_logprob"] - np.random.default_rng(3).normal(0, 0.1, len(table))
    apart = (table["old_logprob"] - table["sampler_logprob"]).abs() > 0.15
    scales = np.random.default_rng(4).uniform(0.5, 2.0, 40)[table["response"]]

    def energy_of(chosen):
        energy = (scales * table["advantage"] * table["param_grad_norm"]) ** 2
        return [energy[chosen & (table["interval"] == place)].sum() / energy.sum() for place in range(4)]

    def mask(tokens):
        weight = (scales * table["advantage"]).mask(tokens, 0.0)
        return table.assign(advantage=table["advantage"].mask(tokens, 0.0), weight=weight, policy_weight=weight)

    masked, wanted = mask(apart), energy_of(apart)
    _, found = mismatch_rows(masked, LABELS, seed=None)
    assert found["removed_share"].tolist() == pytest.approx([*wanted, sum(wanted)])
    # Responses that are masked as a whole count where the log has their advantages.
    whole = apart | (table["response"] % 4 == 0)
    _, found = mismatch_rows(mask(whole), LABELS, uncorrected=(scales * table["advantage"]).to_numpy(), seed=None)
    assert found["removed_share"].tolist() == pytest.approx([*energy_of(whole), sum(energy_of(whole))])
    assert found["masked_share"].iat[-1] == pytest.approx(whole.mean())
    _, found = mismatch_rows(mask(whole), LABELS, seed=None)
    assert found["masked_share"].iat[-1] < 0.7 * whole.mean()
    # Where a sample was measured, the others' norms are estimated by those at the logits, up to the planted gain.
    some = masked.assign(param_grad_norm=masked["param_grad_norm"].where(masked.index % 3 == 0))
    _, found = mismatch_rows(some, LABELS, seed=None)
    assert found["removed_share"].iat[-1] == pytest.approx(sum(wanted), rel=0.2)


def test_norms_that_were_not_measured_are_estimated_by_the_cheap_ones_of_their_interval():
    table = add_weighted_norms(sample_some(plant_table(), 20))
    found = add_estimated_norms(table)
    known = table["weighted_norm"].notna()
    assert found.loc[known, "weighted_norm_estimate"].tolist() == table.loc[known, "weighted_norm"].tolist()
    for a in range(4):
        own = table["interval"] == a
        measured, cheap = table[own & known], (table["weight"] * table["logit_grad_norm"]).abs()
        ratio = measured["weighted_norm"].sum() / cheap[measured.index].sum()
        assert found.loc[own & ~known, "weighted_norm_estimate"].tolist() == pytest.approx(
            (ratio * cheap[own & ~known]).tolist()
        )
    whole = add_weighted_norms(plant_table())
    assert add_estimated_norms(whole) is whole


def test_an_index_says_no_more_than_its_share():
    # Prompts differ so much in the norms of their improbable tokens that the share of these is hardly known.
    found = []
    for seed in range(40):
        table, factors = plant_table(seed, prompts=8), np.exp(np.random.default_rng(seed).normal(size=8))
        table["param_grad_norm"] *= np.where(table["interval"] == 0, factors[table["group"]], 1.0)
        rows = token_shares(sum_by_prompt(table, 4), LABELS, seed=np.random.default_rng(seed)).set_index("statistic")
        own = rows[rows["interval"] == LABELS[0]]
        share, tokens, index = (own.loc[name] for name in ("squared_share", "token_share", "dominance_index"))
        assert index["value"] == pytest.approx(math.log2(share["value"] / tokens["value"]))
        assert index["upper"] <= -math.log2(tokens["lower"])
        found.append((index["lower"] > 0, share["lower"] > tokens["value"]))
    said, held = np.array(found).T
    assert not (said & ~held).any() and 0 < said.mean() < 1


def test_sums_from_measured_tokens_without_weight_are_unknown():
    table = plant_table()
    low = table["interval"] == 0
    table.loc[low & (table["group"] == 0), "weight"] = 0.0
    table.loc[low & (table["group"] != 0), "param_grad_norm"] = np.nan
    rows = token_shares(sum_by_prompt(table, 4), LABELS, seed=None)
    assert np.isnan(numbers(rows, "squared_share")).all() and not np.isnan(numbers(rows, "predicted_share")).any()


@pytest.mark.parametrize(("used", "words"), [([0, 1], "All 2 "), ([2], ""), ([0, 2], "1 of the 2 ")])
def test_whose_the_responses_in_use_are_is_counted_where_earlier_steps_were_added(used, words):
    """Of prompts 0 and 1 from step 4 and prompt 2 from the checkpoint's own, step 5."""
    responses = [Response([5, n], [7], group=n, step=step, advantage=1.0) for n, step in enumerate((4, 4, 5))]
    batch = replace(collate(responses), notes=(Note("step 4 is added to step 5", "pooled"),)).of_prompts(used)
    table = pd.DataFrame({"response": used, "logprob": -0.1, "old_logprob": [-0.2] * len(used)})
    said = [note for note in tell_pooled(batch, table).notes if note.kind == "pooled"]
    assert len(said) == bool(words) and all(f"step 5. {words}" in note for note in said)
