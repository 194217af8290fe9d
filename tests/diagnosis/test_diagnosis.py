"""The diagnosis of a tiny policy, against one autograd call per token; what is missing is said and does no harm."""

import copy
import math
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import pytest
import torch
from support.gradients import token_gradients
from support.policies import make_batch, make_policy
from support.refusals import refused
from support.steps import warm_state
from support.tiers import every
from torch import Tensor

from gradscope.diagnosis import Diagnosis, DiagnosisSettings, diagnose
from gradscope.diagnosis.rows import COLUMNS, SHORTAGE
from gradscope.gradients import measure
from gradscope.intervals import interval_labels
from gradscope.objective import LossSettings
from gradscope.objective.equations import grpo_advantages
from gradscope.policy import AdamWState, Policy
from gradscope.rollouts import Note, TokenBatch
from gradscope.updates import (
    SGD,
    ComparisonSettings,
    StepSettings,
    apply_update,
    compare,
    influence,
    movement_table,
    state_step,
)

pytestmark = pytest.mark.usefixtures("undrawn")

LABELS = interval_labels()
# Old log-probabilities of the batch drift by about 0.1: narrow clips are active on both sides, and so is the KL.
NARROW = LossSettings(clip_ratio_low=0.05, clip_ratio_high=0.04, clip_ratio_c=1.1, kl_coef=0.2)
QUICK = DiagnosisSettings(loss=NARROW, influence_tokens=None, actual_step=False, resamples=50, compare=False)
# The table is float32, weights and norms among it.
TABLE = 2e-6


@dataclass(frozen=True)
class Brute:
    """Token by token, in float64."""

    jacobian: Tensor
    """∇ log π_t, [tokens, P]."""
    weight: np.ndarray
    prob: np.ndarray
    interval: np.ndarray
    prompt: np.ndarray

    def sums(self, scale: Tensor | None = None) -> np.ndarray:
        """g_{p,a}: [3, 4, P]."""
        out = np.zeros((3, 4, self.jacobian.shape[1]))
        for gradient, w, a, p in zip(self.jacobian.numpy(), self.weight, self.interval, self.prompt, strict=True):
            out[p, a] -= w / len(self.weight) * gradient
        return out if scale is None else out * scale.numpy()


@pytest.fixture(scope="module")
def policy() -> Policy:
    """GPT-2 alone computes everything in float64."""
    return make_policy("gpt2", torch.float64, tokenizer=True)


@pytest.fixture(scope="module")
def batch(policy) -> TokenBatch:
    """Three prompts, two responses each, with holes and a single-token response: every interval occurs."""
    return make_batch(policy, temperature=0.7)


@pytest.fixture(scope="module")
def table(policy, batch) -> pd.DataFrame:
    return measure(policy, batch, loss=NARROW)


@pytest.fixture(scope="module")
def brute(policy, batch) -> Brute:
    advantages = grpo_advantages(batch.rewards, batch.group_ids)
    weights, probs, prompts = [], [], []
    for row in range(len(batch)):
        ids, kept = batch.sequence(row)
        first = int(batch.attention_mask[row].nonzero()[0])
        logits = policy.model(input_ids=ids[None], use_cache=False).logits[0].detach() / batch.temperature[row]
        for t in kept.tolist():
            own = torch.log_softmax(logits[t - 1], -1)[ids[t]].item()
            old, ref = (values[row, first + t].item() for values in (batch.old_logprobs, batch.ref_logprobs))
            ratio, advantage = math.exp(own - old), advantages[row].item()
            clipped = (advantage > 0 and ratio > 1.04) or (advantage < 0 and (ratio < 0.95 or ratio > 1.1))
            weights.append((0.0 if clipped else ratio * advantage) + 0.2 * (math.exp(ref - own) - 1))
            probs.append(math.exp(own))
            prompts.append(int(batch.group_ids[row]))
    interval = np.minimum((4 * np.array(probs)).astype(int), 3)
    return Brute(token_gradients(policy, batch), np.array(weights), np.array(probs), interval, np.array(prompts))


@pytest.fixture(scope="module")
def whole(policy, batch) -> Diagnosis:
    """Everything there is, and the table measured on the way."""
    settings = DiagnosisSettings(loss=NARROW, resamples=50, top=4)
    step = StepSettings("adamw", 1e-3, 0.1, betas=(0.8, 0.95), eps=1e-6)
    state = warm_state(policy)
    for held in state["state"].values():
        held["step"] = torch.tensor(7.0)
    with_table = replace(settings, step=step)
    return diagnose(policy, batch, settings=with_table, optimizer_state=state)


def kinds(diagnosis: Diagnosis) -> list[str]:
    return [note.kind for note in diagnosis.notes]


def value(diagnosis: Diagnosis, *key: str) -> float:
    return float(diagnosis.pick(*key)["value"])


def test_shares_of_squares_and_what_one_minus_pi_predicts_are_those_of_single_token_gradients(
    policy, batch, table, brute
):
    diagnosis = diagnose(policy, batch, table, settings=QUICK)
    squares = brute.weight**2 * brute.jacobian.square().sum(1).numpy()
    predicted = (brute.weight * (1 - brute.prob)) ** 2
    for a, label in enumerate(LABELS):
        own = brute.interval == a
        assert own.any()
        shares = [part[own].sum() / part.sum() for part in (squares, predicted, np.ones(len(own)))]
        keys = [("squared_share", "raw"), ("predicted_share", "none"), ("token_share", "none")]
        assert [value(diagnosis, *key, label) for key in keys] == pytest.approx(shares, rel=TABLE)
        index = [math.log2(share / shares[2]) for share in shares[:2]]
        keys = [("dominance_index", "raw"), ("predicted_index", "none")]
        assert [value(diagnosis, *key, label) for key in keys] == pytest.approx(index, abs=1e-5)
        assert value(diagnosis, "added_index", "raw", label) == pytest.approx(index[0] - index[1], abs=1e-5)


def assert_summed(diagnosis: Diagnosis, sums: np.ndarray, metric: str, rel: float) -> None:
    parts, total = sums.sum(0), sums.sum((0, 1))
    for a, label in enumerate(LABELS):
        part = parts[a]
        cosine = part @ total / np.linalg.norm(part) / np.linalg.norm(total)
        assert value(diagnosis, "gradient_norm", metric, label) == pytest.approx(np.linalg.norm(part), rel=rel)
        assert value(diagnosis, "gradient_share", metric, label) == pytest.approx(
            part @ total / (total @ total), rel, rel
        )
        assert value(diagnosis, "cosine_with_all", metric, label) == pytest.approx(cosine, rel, rel)
        pairs = [sums[p, a] @ sums[q, a] for p in range(3) for q in range(3) if p != q]
        size = part @ part
        assert value(diagnosis, "signal", metric, label) == pytest.approx(1.5 * sum(pairs), abs=rel * size)
        assert value(diagnosis, "noise", metric, label) == pytest.approx(size - 1.5 * sum(pairs), rel=rel)
    assert value(diagnosis, "gradient_norm", metric, "all") == pytest.approx(np.linalg.norm(total), rel=rel)


def test_summed_gradients_signal_and_noise_are_those_of_single_token_gradients(policy, batch, table, brute):
    diagnosis = diagnose(policy, batch, table, settings=QUICK)
    assert_summed(diagnosis, brute.sums(), "raw", 1e-5)
    parts = brute.sums().sum(0)
    expected = parts[0] @ parts[3] / np.linalg.norm(parts[0]) / np.linalg.norm(parts[3])
    assert diagnosis.frames["cosines"].loc[0, 3] == pytest.approx(expected, rel=1e-5)
    assert "adamw_cosines" not in diagnosis.frames
    assert "no-optimizer" in kinds(diagnosis)


@pytest.mark.parametrize("given", every(2, ["state_dict", "AdamWState"]))
def test_in_adamws_metric_each_gradient_is_divided_by_the_root_of_the_second_moment(policy, batch, table, brute, given):
    saved = warm_state(policy)
    names = saved["param_groups"][0]["param_names"]
    v = torch.cat([saved["state"][i]["exp_avg_sq"].flatten() for i in range(len(names))])
    n = torch.cat(
        [saved["state"][i]["step"].expand(saved["state"][i]["exp_avg_sq"].numel()) for i in range(len(names))]
    )
    gradient = torch.tensor(brute.sums().sum((0, 1)))
    clip = min(1.0, 1.0 / (gradient.norm().item() + 1e-6))
    new = (0.95 * v + 0.05 * (clip * gradient) ** 2) / (1 - 0.95 ** (n.double() + 1))
    scale = clip / (new.sqrt() + 1e-6)
    state = saved if given == "state_dict" else AdamWState.from_state_dict(policy.model, saved, max_grad_norm=1.0)
    diagnosis = diagnose(policy, batch, table, settings=QUICK, optimizer_state=state)
    assert_summed(diagnosis, brute.sums(scale), "adamw", 1e-5)
    assert_summed(diagnosis, brute.sums(), "raw", 1e-5)
    assert diagnosis.scope.step.optimizer == ("adamw" if given == "state_dict" else "sgd")


@pytest.mark.all
def test_a_small_memory_keeps_every_prompt_apart_and_the_page_says_how(policy, batch, table, whole):
    state = warm_state(policy)
    for held in state["state"].values():
        held["step"] = torch.tensor(7.0)
    settings = replace(whole.scope.settings, gradient_way="sketches", gradient_memory=1 << 20)
    settings = replace(settings, influence_tokens=None, actual_step=False)
    diagnosis = diagnose(policy, batch, table, settings=settings, optimizer_state=state)
    (note,) = [note for note in diagnosis.notes if note.kind == "inexact"]
    assert "sketches" in note
    for metric in ("raw", "adamw"):
        for interval in (*LABELS, "all"):
            expected = value(whole, "gradient_norm", metric, interval)
            assert value(diagnosis, "gradient_norm", metric, interval) == pytest.approx(expected, rel=0.2)


@pytest.mark.all
def test_a_real_step_is_told_by_scores_of_one_kind_in_float32_too():
    """A table's log π is rounded otherwise for some tokens: a step that moves them by no more would be lost in that."""
    policy = make_policy("mixtral")
    batch, step = make_batch(policy), StepSettings(learning_rate=1e-9)
    table = measure(policy, batch, loss=NARROW, self_check=False)
    found = diagnose(policy, batch, table, settings=replace(QUICK, actual_step=True, step=step))
    expected = movement_table([apply_update(policy, batch, loss=QUICK.loss, step=step)])
    pd.testing.assert_series_equal(found.frames["movement"]["delta_logprob.all"], expected["delta_logprob.all"])
    assert (expected["delta_logprob.all"] == 0).mean() > 0.5


def test_what_does_not_fit_into_the_minutes_is_left_out_and_the_rest_is_the_same(policy, batch, table, whole):
    state = warm_state(policy)
    for held in state["state"].values():
        held["step"] = torch.tensor(7.0)
    settings = replace(whole.scope.settings, minutes=1e-9)
    short = diagnose(policy, batch, table, settings=settings, optimizer_state=state)
    for frame in ("cosines", "influence", "movement", "adamw_cosines"):
        assert frame not in short.frames and frame in whole.frames
    left = {"contributions", "sums", "predicted_step", "real_step", "comparison"}
    assert set(short.left_out) == left | {"adamw_energy"} and kinds(short).count("minutes") == len(left)
    of_tokens = "metric == 'raw' and statistic in ['squared_share', 'dominance_index', 'largest_share']"
    ours, theirs = (d.statistics.query(of_tokens) for d in (short, whole))
    pd.testing.assert_frame_equal(ours.reset_index(drop=True), theirs.reset_index(drop=True))
    long = diagnose(policy, batch, whole.table, settings=replace(settings, minutes=1e9), optimizer_state=state)
    pd.testing.assert_frame_equal(long.statistics, whole.statistics)


def test_who_moves_whom_and_both_kinds_of_directions_are_those_of_the_parts_themselves(policy, batch, whole):
    state = warm_state(policy)
    for held in state["state"].values():
        held["step"] = torch.tensor(7.0)
    keywords = {"loss": NARROW, "step": whole.scope.step, "optimizer_state": state}
    contributions = influence(policy, batch, **keywords).contributions
    top = contributions[contributions["interval"] == 3]
    share = np.cov(top["by.0"], top["predicted"])[0, 1] / top["predicted"].var()
    assert value(whole, "low_to_high_share", "none", LABELS[3]) == pytest.approx(share, rel=1e-8)
    movement = apply_update(policy, batch, **keywords)
    keep = movement.batch.response_mask
    advantages = movement.batch.advantages[keep].numpy()
    risen = (movement.after.logprob - movement.before.logprob)[keep].numpy()
    for sign, word in ((1, "positive"), (-1, "negative")):
        chosen = np.sign(advantages) == sign
        actual = (np.sign(risen[chosen]) == sign).mean()
        assert value(whole, f"right_direction_{word}_actual", "none", "all") == pytest.approx(actual)
        predicted = (np.sign(contributions["predicted"][chosen]) == sign).mean()
        assert value(whole, f"right_direction_{word}_predicted", "none", "all") == pytest.approx(predicted)
    assert set(whole.frames["directions"]["kind"]) == {"actual", "predicted"}
    assert whole.frames["movement"]["delta_logprob.all"].to_numpy() == pytest.approx(risen, abs=1e-12)
    assert len(whole.frames["movement"]) == len(whole.table) and 0 < len(whole.frames["against"]) <= 4


def test_steps_are_of_the_advantages_that_the_table_was_measured_with(policy, batch):
    table = measure(policy, batch, loss=NARROW, advantage_eps=1.0)
    settings = replace(QUICK, influence_tokens=1000, actual_step=True)
    found = diagnose(policy, batch, table, settings=settings)
    # (r − mean) / (sd + 1) in the place of (r − mean) / (sd + 1e-6), by hand.
    advantages = torch.zeros(6)
    for group in range(3):
        own = batch.rewards[batch.group_ids == group]
        advantages[batch.group_ids == group] = (own - own.mean()) / (own.std() + 1.0)
    given = replace(batch, advantages=advantages[:, None].expand(batch.input_ids.shape))
    expected = movement_table([apply_update(policy, given, loss=NARROW, step=SGD)])
    np.testing.assert_allclose(found.frames["movement"]["delta_logprob.all"], expected["delta_logprob.all"], rtol=1e-6)
    plain = movement_table([apply_update(policy, batch, loss=NARROW, step=SGD)])
    assert not np.allclose(found.frames["movement"]["delta_logprob.all"], plain["delta_logprob.all"], rtol=0.01)
    by_hand = influence(policy, given, loss=NARROW, step=SGD).contributions
    share = np.cov(*by_hand.loc[by_hand["interval"] == 3, ["by.0", "predicted"]].to_numpy().T)
    assert value(found, "low_to_high_share", "none", LABELS[3]) == pytest.approx(share[0, 1] / share[1, 1], rel=1e-6)


def test_a_budget_splits_the_step_of_whole_prompts_and_says_so(policy, batch, table):
    settings = replace(QUICK, influence_tokens=1)
    diagnosis = diagnose(policy, batch, table, settings=settings)
    (note,) = [note for note in diagnosis.notes if note.kind == "influence-sample"]
    rows = diagnosis.frames["against"]["response"].unique()
    assert len({int(batch.group_ids[row]) for row in rows}) == 1
    kept = [int(batch.response_mask[batch.group_ids == g].sum()) for g in range(3)]
    assert any(f" {count:,} of {len(table):,} tokens" in note for count in kept)


def test_every_part_is_there_and_every_number_has_one_row(whole):
    statistics = whole.statistics
    assert statistics.columns.tolist() == [*COLUMNS, *SHORTAGE]
    assert not statistics.duplicated(["statistic", "metric", "interval"]).any()
    assert set(statistics["metric"]) == {"raw", "adamw", "none"}
    assert {"layers", "where", "spikes", "cosines", "adamw_cosines", "influence", "movement"} <= {*whole.frames}
    assert value(whole, "bound_violations") == 0 and whole.pick("bound_violations")["n"] == len(whole.table)
    index = whole.pick("dominance_index", "adamw", LABELS[0])
    assert np.isfinite(index["value"]) and np.isnan(index["lower"])
    assert (index["lacks"], index["wanted"]) == ("prompts", 6)


def test_equal_rewards_and_no_reference_give_no_gradient_and_a_note(policy, batch):
    equal = replace(batch, rewards=torch.ones(6), ref_logprobs=None)
    diagnosis = diagnose(policy, equal, settings=QUICK)
    assert "no-gradient" in kinds(diagnosis)
    assert diagnosis.pick("gradient_share", "raw", LABELS[0]) is None


@pytest.mark.all
def test_unknown_old_logprobs_are_a_caveat_unless_the_log_has_the_loss_that_used_none(policy, batch):
    equal = replace(batch, rewards=torch.ones(6), ref_logprobs=None, old_logprobs=None)
    for notes, assumed in (((), True), ((Note("the log records the training loss", "loss"),), False)):
        diagnosis = diagnose(policy, replace(equal, notes=notes), settings=QUICK)
        assert ("on-policy" in kinds(diagnosis)) == assumed


def test_a_single_prompt_has_no_intervals_and_a_note(policy, batch):
    one = batch.select([0, 1])
    diagnosis = diagnose(policy, one, settings=replace(QUICK, influence_tokens=100))
    assert "one-prompt" in kinds(diagnosis)
    rows = diagnosis.statistics
    assert rows["lower"].isna().all()
    assert rows.loc[rows["statistic"] == "signal", "value"].isna().all()
    assert np.isfinite(value(diagnosis, "gradient_norm", "raw", "all"))


def test_an_empty_interval_is_named_and_is_nan(policy, batch, table):
    keep = batch.response_mask.clone()
    keep[batch.response_mask] = torch.tensor((table["interval"] != 0).to_numpy())
    diagnosis = diagnose(policy, replace(batch, response_mask=keep), settings=QUICK)
    assert "empty-interval" in kinds(diagnosis)
    for key in (("dominance_index", "raw"), ("gradient_share", "raw"), ("signal", "raw"), ("token_share", "none")):
        assert math.isnan(value(diagnosis, *key, LABELS[0]))
        assert np.isfinite(value(diagnosis, *key, LABELS[3]))


@pytest.mark.parametrize("sample", every(2, ["stratified", "proportional"]))
def test_sums_of_a_sample_are_ratio_estimates(policy, batch, sample):
    table = measure(policy, batch, loss=NARROW, tokens_per_interval=3, sample=sample)
    diagnosis = diagnose(policy, batch, table, settings=QUICK)
    squares = []
    for a in range(4):
        own = table[table["interval"] == a]
        proxies = (own["weight"] * own["logit_grad_norm"]).astype(float) ** 2
        terms = (own["weight"] * own["param_grad_norm"]).astype(float) ** 2
        chances = 1.0 if sample == "stratified" else own["sampling_probability"].astype(float)
        known = terms.notna()
        squares.append((terms / chances).sum() * proxies.sum() / (proxies / chances)[known].sum())
    for a, label in enumerate(LABELS):
        assert value(diagnosis, "squared_share", "raw", label) == pytest.approx(squares[a] / sum(squares), rel=TABLE)
        assert diagnosis.pick("squared_share", "raw", label)["n"] == min(3, (table["interval"] == a).sum())
    assert "sampled-norms" in kinds(diagnosis)


@pytest.mark.parametrize(
    "change",
    [
        {"classes": 0},
        {"seed": -1},
        {"seed": 2**57},
        {"edges": (0.0,)},
        {"step": StepSettings("adamw", -1)},
    ],
)
def test_settings_that_make_no_diagnosis_are_refused(policy, batch, table, change):
    with refused():
        diagnose(policy, batch, table, settings=replace(QUICK, **change))


def nearby(policy: Policy) -> Policy:
    """The same model after a small step."""
    model, generator = copy.deepcopy(policy.model), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += (
                1e-2 * parameter.std() * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            )
    return replace(policy, model=model)


@pytest.mark.parametrize("of", ["another policy", "another temperature", "another loss", "another reference"])
def test_a_table_of_another_policy_temperature_or_loss_is_refused(policy, batch, table, of):
    own, loss, ref = policy, NARROW, batch.ref_logprobs
    if of == "another policy":
        own = nearby(policy)
    if of == "another temperature":
        batch = replace(batch, old_logprobs=None)
        table = measure(policy, batch, loss=NARROW, temperature=0.8)
    if of == "another loss":
        loss = replace(NARROW, clip_ratio_high=0.03)
    if of == "another reference":
        ref = ref - 0.1
    batch = replace(batch, ref_logprobs=ref)
    with refused():
        diagnose(own, batch, table, settings=replace(QUICK, loss=loss))
    with refused():
        compare(own, batch, ["reweight"], table=table, settings=ComparisonSettings(loss=loss, resamples=5))


def test_the_step_goes_on_as_the_saved_optimizer_would(policy):
    state = warm_state(policy)
    state["param_groups"][0] |= {"lr": 3e-4, "weight_decay": 0.02}
    assert state_step(state) == StepSettings("adamw", 3e-4, 0.02, (0.8, 0.95), 1e-6)
    # At the end of its schedule, at the rate that it began with, where that is known.
    for began, rate in ((2e-4, 2e-4), (0.0, SGD.learning_rate), (float("inf"), SGD.learning_rate)):
        state["param_groups"][0] |= {"lr": 0.0, "initial_lr": began}
        assert state_step(state).learning_rate == rate


def test_other_edges_are_followed_throughout(policy, batch):
    settings = replace(QUICK, edges=(0.0, 0.5, 1.0), influence_tokens=1000, actual_step=True)
    diagnosis = diagnose(policy, batch, settings=settings)
    assert diagnosis.labels == ("[0, ½)", "[½, 1]")
    shares = [value(diagnosis, "gradient_share", "raw", label) for label in diagnosis.labels]
    assert sum(shares) == pytest.approx(1)
    assert np.isfinite(value(diagnosis, "low_to_high_share", "none", "[½, 1]"))


def test_a_weight_without_bound_is_refused_by_its_token(policy, batch, table):
    endless = table.copy()
    endless.loc[3, "weight"] = -np.inf
    with refused(f"position {endless.at[3, 'position']} of response {endless.at[3, 'response']}"):
        diagnose(policy, batch, endless)


def test_a_table_of_some_prompts_is_diagnosed_as_the_batch_of_these(policy, batch):
    """What minutes leave unlooked at: the same numbers as of a batch without it, and the page says how much it is."""
    prompts = batch.group_ids.unique()[:-1]
    some = batch.select(torch.isin(batch.group_ids, prompts).nonzero()[:, 0])
    table = measure(policy, batch.of_prompts(prompts), loss=QUICK.loss, self_check=False)
    settings = replace(QUICK, compare=False)
    found, alone = diagnose(policy, batch, table, settings=settings), diagnose(policy, some, settings=settings)
    pd.testing.assert_frame_equal(found.statistics, alone.statistics, rtol=1e-4)
    scope = found.scope
    assert (scope.supply.prompts, scope.of_prompts) == (len(prompts), len(batch.group_ids.unique()))
    assert scope.of_tokens == batch.num_tokens > len(table)
    told = found.report().page.subtitle
    assert f"looked at {len(prompts)} of {scope.of_prompts} prompts" in told
    assert "looked at" not in alone.report().page.subtitle
