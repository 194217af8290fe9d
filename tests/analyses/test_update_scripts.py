"""The scripts about updates: their statistics against loops, and the run they share against its own next step."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

from analyses.common import in_training, measurements
from analyses.common.experiments import configure
from analyses.measure import (
    directions as measure_directions,
    drivers as measure_drivers,
    influence as measure_influence,
    updates as measure_updates,
)
from analyses.paper import fig1, fig3, influence
from gradscope import read_rollouts
from gradscope.objective import batch_statistics
from gradscope.policy import AdamWState
from gradscope.updates import apply_update

pytestmark = pytest.mark.usefixtures("undrawn")

TINY = {"questions_per_step": 2, "group_size": 4, "mini_batch_size": 8, "max_new_tokens": 150, "save_rollouts": True}
TINY["save_every"], TINY["weight_decay"] = 1, 5.0  # large enough to be seen in one step


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run of two steps, made in two starts: its folder, its moments, and what was logged by the first start."""
    run = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_training, "configure", lambda *place: replace(configure(*place), **TINY, steps=1))
        in_training.moments(run=run)
        first = (run / "metrics.jsonl").read_text()
        patch.setattr(in_training, "configure", lambda *place: replace(configure(*place), **TINY, steps=2))
        yield SimpleNamespace(run=run, moments=in_training.moments(run=run), first=first)


@pytest.fixture(scope="module")
def batch(made):
    return made.moments[1].sample(3, seed=in_training.FRESH, responses=4)


def weights(policy):
    return {name: p.detach().double() for name, p in policy.model.named_parameters()}


def test_each_checkpoint_has_the_optimizer_state_of_its_policy(made, batch):
    for moment in made.moments:
        state = AdamWState.from_state_dict(moment.policy.model, moment.optimizer_state)
        assert set(state.step.values()) == {moment.step}
        kept = weights(moment.policy)
        settings, step = moment.config.loss, moment.step_settings
        movement = apply_update(moment.policy, batch, loss=settings, step=step, optimizer_state=moment.optimizer_state)
        assert [result.outcome for result in movement.results] == ["taken"]
        assert all(torch.equal(weight, kept[name]) for name, weight in weights(moment.policy).items())


def test_a_step_from_a_checkpoint_is_the_step_that_the_run_took(made):
    one, two = made.moments
    trained_on = read_rollouts(made.run / "rollouts" / "step-000002.parquet", one.policy)
    keywords = {"loss": one.config.loss, "step": one.step_settings, "optimizer_state": one.optimizer_state}
    movement = apply_update(one.policy, trained_on, **keywords)
    theirs = batch_statistics(two.policy.model, trained_on, micro_batch_size=8, device=two.policy.device).logprob
    keep = trained_on.response_mask
    # The trainer pads its batch otherwise: float32 sums differ, and AdamW's quotient with them where gradients vanish.
    torch.testing.assert_close(movement.after.logprob[keep], theirs[keep], rtol=0, atol=1e-3)
    assert (movement.before.logprob[keep] - theirs[keep]).abs().max() > 0.05
    after = weights(two.policy)
    norm = math.sqrt(sum((after[name] - weight).square().sum() for name, weight in weights(one.policy).items()))
    assert movement.update_norm == pytest.approx(norm, rel=1e-3)


def test_a_sample_has_both_policies_probabilities_and_grpo_advantages(made, batch):
    moment = made.moments[1]
    assert batch.group_ids.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    for row in range(len(batch)):
        real = batch.attention_mask[row]
        ids, keep = batch.input_ids[row][real], batch.response_mask[row]
        for policy, found in ((moment.policy, batch.old_logprobs), (moment.reference, batch.ref_logprobs)):
            with torch.no_grad():
                logits = policy.model(ids[None]).logits[0, :-1].double() / moment.config.temperature
            expected = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            # float32's log softmax, of logits of size 20
            torch.testing.assert_close(found[row][keep].double(), expected[keep[real][1:]], rtol=0, atol=1e-4)
        group = batch.rewards[batch.group_ids == batch.group_ids[row]].tolist()
        spread = np.std(group, ddof=1)
        advantage = (float(batch.rewards[row]) - np.mean(group)) / spread if spread else 0.0
        assert batch.advantages[row][keep].tolist() == pytest.approx([advantage] * int(keep.sum()), abs=1e-5)
    assert batch.advantages[batch.response_mask].unique().numel() > 2
    assert (batch.old_logprobs - batch.ref_logprobs)[batch.response_mask].abs().max() > 0.05


# torch itself calls torch.jit.script the first time that forward mode is used.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.all
def test_what_is_measured_at_the_run_is_kept_and_drawn(made, tmp_path, monkeypatch):
    monkeypatch.setattr(measurements, "RUNS", tmp_path)
    sizes = {"run": made.run, "questions": 1}
    measure_directions.measure(measurements.folder("directions"), **sizes)
    measure_updates.measure(measurements.folder("updates"), batches=2, **sizes)
    measure_influence.measure(measurements.folder("influence"), batches=1, **sizes)
    for script in (fig1, fig3, influence):
        script.main(script.Options(out=tmp_path / "figures"))
    tokens = measurements.read_table("updates", "tokens.parquet")
    samples = [made.moments[1].sample(1, seed=in_training.FRESH + i) for i in (0, 1)]
    assert tokens["batch"].value_counts(sort=False).tolist() == [sample.num_tokens for sample in samples]
    own = np.concatenate([sample.old_logprobs[sample.response_mask].exp().numpy() for sample in samples])
    np.testing.assert_allclose(tokens["prob"], own, rtol=0, atol=1e-5)  # padded otherwise, float32
    found = pd.read_csv(tmp_path / "figures" / "fig1_movements.csv")
    found = found[(found["of"] == "delta_prob") & (found["update"] == "only-3") & (found["sign"] == "positive")]
    for row in found[found["num_tokens"] > 0].itertuples():
        chosen = tokens[(tokens["interval"] == row.interval) & (tokens["advantage"] > 0)]
        assert row.mean_abs == pytest.approx(chosen["delta_prob.only-3"].abs().mean(), rel=1e-3)  # four digits
    shares = measurements.read_table("directions", "shares.csv")
    assert sorted(shares["batch"].unique()) == [1, 2] and len(shares) == 2 * 2 * 5 * 2 * 4 * 2
    columns = pd.read_csv(tmp_path / "figures" / "influence.csv").groupby(["optimizer", "target"])["share"]
    columns = columns.sum(min_count=1)
    np.testing.assert_allclose(columns.dropna(), 1, atol=1e-6)
    errors = measurements.read_table("influence", "errors.csv").groupby("optimizer")["relative_error"].max()
    assert 0 < errors["sgd"] < 0.1  # a step of 1e-3 is nearly its first order


@pytest.fixture
def moved():
    """Three batches of tokens with the movements of three updates."""
    rng = np.random.default_rng(0)
    prob = rng.random(600)
    table = pd.DataFrame({"prob": prob, "interval": np.minimum((4 * prob).astype(int), 3)})
    table["advantage"], table["group"], table["batch"] = (
        rng.normal(size=600),
        rng.integers(0, 6, 600),
        np.arange(600) % 3,
    )
    for name, likeness in (("all", 0.0), ("only-0", 1.0), ("only-3", 0.3)):
        noise = rng.normal(size=600) * (1 + table["batch"])
        table[f"delta_log_odds.{name}"] = likeness * table.get("delta_log_odds.all", 0.0) + noise
        table[f"delta_prob.{name}"] = 1e-3 * table[f"delta_log_odds.{name}"]
    return table


def test_likeness_is_the_correlation_outside_the_updated_interval(moved):
    found = measure_updates.compare(moved)
    assert list(zip(found["update"], found["batch"], strict=True)) == [
        (name, batch) for name in ("only-0", "only-3") for batch in (0, 1, 2, "all")
    ]
    for row in found.itertuples():
        inside = {"only-0": 0, "only-3": 3}[row.update]
        own = moved[(moved["interval"] != inside) & ((moved["batch"] == row.batch) | (row.batch == "all"))]
        expected = np.corrcoef(own["delta_log_odds.all"], own[f"delta_log_odds.{row.update}"])[0, 1]
        assert row.num_tokens == len(own)
        assert row.correlation == pytest.approx(expected, rel=1e-10)
        if row.batch == "all":
            assert row.lower < row.correlation < row.upper
        else:
            assert math.isnan(row.lower) and math.isnan(row.upper)


@pytest.fixture
def shares():
    """Every method's share at six steps; one is unknown, one known only once for a method."""
    rng = np.random.default_rng(1)
    keys = ("optimizer", "against", "method", "interval", "sign", "batch")
    values = (
        ("adamw", "sgd"),
        ("advantage", "net_weight"),
        measure_directions.METHODS,
        range(4),
        ("positive", "negative"),
    )
    frame = pd.MultiIndex.from_product([*values, range(4, 28, 4)], names=keys).to_frame(index=False)
    frame["share"] = rng.random(len(frame))
    cell = (frame["method"] == "Lopti") & (frame["interval"] == 2) & (frame["optimizer"] == "sgd")
    frame.loc[cell & (frame["sign"] == "positive") & (frame["batch"] == 8), "share"] = np.nan
    frame.loc[cell & (frame["sign"] == "negative") & (frame["batch"] > 4), "share"] = np.nan
    return frame.sample(frac=1, random_state=0)


@pytest.mark.parametrize("baseline", ["GRPO", "random split"])
def test_differences_of_methods_are_paired_by_step(shares, baseline):
    found = fig3.compare(shares, baseline)
    assert sorted(found["method"].unique()) == sorted(set(measure_directions.METHODS) - {baseline})
    assert len(found) == 4 * 2 * 2 * 4 * 2
    seen = {}
    for row in found.itertuples():
        own = shares[
            (shares["optimizer"] == row.optimizer)
            & (shares["against"] == row.against)
            & (shares["interval"] == row.interval)
            & (shares["sign"] == row.sign)
        ]
        pairs = []
        for batch in sorted(own["batch"].unique()):
            by_method = own[own["batch"] == batch].set_index("method")["share"]
            if not math.isnan(by_method[row.method]):
                pairs.append((by_method[row.method], by_method[baseline]))
        ours, theirs = zip(*pairs, strict=True)
        assert row.steps == len(pairs)
        assert row.difference == pytest.approx(np.mean(ours) - np.mean(theirs))
        seen[len(pairs)] = True
        if len(pairs) == 1:
            assert math.isnan(row.lower) and math.isnan(row.upper)
            continue
        bounds = stats.ttest_rel(ours, theirs).confidence_interval(0.95)
        assert (row.lower, row.upper) == pytest.approx((bounds.low, bounds.high))
    assert set(seen) == {1, 5, 6}


def test_drivers_share_out_tokens_and_weighted_norms():
    rng = np.random.default_rng(3)
    columns = {name: rng.random(200) for name in ("param_grad_norm", "prob")}
    tokens = pd.DataFrame(columns | {"weight": rng.normal(size=200)}, index=rng.permutation(200) + 50)
    for driver in measure_drivers.BY:
        tokens[driver] = pd.Categorical(rng.choice(["a", "b", "c"], 200), ["c", "unused", "a", "b"])
    found = measure_drivers.by_driver(tokens)
    expected = [(driver, value) for driver in measure_drivers.BY for value in "cab"]
    assert [tuple(row) for row in found[["driver", "value"]].to_numpy()] == expected
    whole = sum(abs(token.weight) * token.param_grad_norm for token in tokens.itertuples())
    for row in found.itertuples():
        own = [token for token in tokens.itertuples() if getattr(token, row.driver) == row.value]
        assert (row.tokens, row.share_of_tokens) == (len(own), pytest.approx(len(own) / 200))
        assert row.mean_norm == pytest.approx(sum(token.param_grad_norm for token in own) / len(own))
        assert row.mean_prob == pytest.approx(sum(token.prob for token in own) / len(own))
        weighted = sum(abs(token.weight) * token.param_grad_norm for token in own)
        assert row.share_of_weighted_norms == pytest.approx(weighted / whole)
    sums = found.groupby("driver")[["share_of_tokens", "share_of_weighted_norms"]].sum()
    np.testing.assert_allclose(sums, 1)
