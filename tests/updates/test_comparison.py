"""Weightings compared: every number against token gradients by one autograd call each, and bounds on planted noise."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import t as student
from support.gradients import snapshot, token_gradients
from support.policies import make_batch, make_policy
from support.refusals import refused
from support.steps import BETAS, EPS, NARROW, flat_state, warm_state
from support.tiers import every

from gradscope.gradients import Resources, interval_gradients, measure, vector_bytes
from gradscope.objective import Weighting, make_weighting, resolve_advantages
from gradscope.resampling import TOO_FEW, Supply
from gradscope.rollouts import TokenBatch
from gradscope.updates import (
    SGD,
    Comparison,
    ComparisonSettings,
    StepSettings,
    apply_update,
    compare,
    describe,
    distinct_rows,
    weighting_sentences,
)
from gradscope.updates.comparison import noise
from gradscope.updates.comparison.noise import Products
from gradscope.updates.comparison.statistics import Judge

WEIGHTINGS = ("grpo", "reweight:alpha=0.5", "lopti", "random-split", "mask:low=0.5,high=1", "gspo", "up-weight")
STEP = StepSettings("adamw", 1e-3, 0.1, BETAS, EPS, max_grad_norm=0.05)
SETTINGS = replace(NARROW, kl_coef=0.0)


class Case:
    """A policy, a batch, its table, and all token gradients."""

    def __init__(self, name: str) -> None:
        self.policy = make_policy(name, torch.float64)
        self.batch = make_batch(self.policy, temperature=0.7, seed=3)
        self.table = measure(self.policy, self.batch, loss=SETTINGS, self_check=False)
        self.jacobian = token_gradients(self.policy, self.batch).numpy()
        self.group = self.table["group"].to_numpy()
        self.state = warm_state(self.policy)

    def parts(self, weights: np.ndarray) -> np.ndarray:
        """u_p of each prompt, [n, P]."""
        each = weights[:, None] * self.jacobian / len(weights)
        return np.stack([each[self.group == g].sum(0) for g in np.unique(self.group)])


@pytest.fixture(scope="module")
def case() -> Case:
    return Case("qwen2")


@pytest.fixture(scope="module")
def found(case):
    return compare_all(case)


def compare_all(case: Case) -> Comparison:
    return compare(
        case.policy, case.batch, WEIGHTINGS, table=case.table, optimizer_state=case.state, settings=settle(resamples=50)
    )


def settle(**changes: object) -> ComparisonSettings:
    return ComparisonSettings(**{"loss": SETTINGS, "step": STEP, "resamples": 5} | changes)


def rows_of(table: pd.DataFrame, weights: dict[str, dict[str, np.ndarray]]):
    for method, steps in weights.items():
        for step, values in steps.items():
            yield table[(table["method"] == method) & (table["step"] == step)].iloc[0], values


def weights_of(case: Case) -> dict[str, dict[str, np.ndarray]]:
    return {name: make_weighting(name).weights(case.table) for name in WEIGHTINGS}


def snr(parts: np.ndarray) -> float:
    """Of n draws n·u_p: the squared norm of their mean without bias, over their variance."""
    draws = len(parts) * parts
    noise = draws.var(0, ddof=1).sum()
    return float(((draws.mean(0) ** 2).sum() - noise / len(draws)) / noise)


def jackknife(statistic, *groups: np.ndarray) -> float:
    n = len(groups[0])
    left = np.array([statistic(*(np.delete(g, i, axis=0) for g in groups)) for i in range(n)])
    return float(np.sqrt((n - 1) / n * ((left - left.mean()) ** 2).sum()))


def norm_ratio(own: np.ndarray, plain: np.ndarray) -> float:
    return float(np.linalg.norm(own.sum(0)) / np.linalg.norm(plain.sum(0)))


def cosine(own: np.ndarray, plain: np.ndarray) -> float:
    a, b = own.sum(0), plain.sum(0)
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def check(case: Case, table: pd.DataFrame, *, rel: float, adamw: bool = True) -> None:
    """Norm, cosine, signal to noise and directions of every row, from the vectors themselves."""
    reach, advantage = student.ppf(0.975, 2), case.table["advantage"].to_numpy()
    plain = case.parts(case.table["policy_weight"].to_numpy(np.float64))
    scale = metric(case, plain.sum(0))
    for row, weights in rows_of(table, weights_of(case)):
        own = case.parts(weights)
        for name, statistic in (("norm_ratio", norm_ratio), ("cosine", cosine)):
            value = statistic(own, plain)
            assert row[name] == pytest.approx(value, rel=rel), name
            away = reach * jackknife(statistic, own, plain)
            low = 0.0 if name == "norm_ratio" else -1.0
            assert row[f"{name}_lower"] == pytest.approx(max(low, value - away), rel=20 * rel, abs=1e-9), name
        assert row["signal_to_noise"] == pytest.approx(snr(own), abs=1e-6)
        assert row["signal_to_noise_difference"] == pytest.approx(snr(own) - snr(plain), abs=1e-6)
        for name, direction in (("right_sgd", own.sum(0)), ("right_adamw", scale * own.sum(0))):
            if adamw or name == "right_sgd":
                moved = np.sign(case.jacobian @ direction)
                judged = (advantage != 0) & (moved != 0)
                assert row[name] == pytest.approx((moved == np.sign(advantage))[judged].mean()), name


def metric(case: Case, total: np.ndarray) -> np.ndarray:
    """1 ⊘ (√v̂ + ε) after the plain step's clipped gradient."""
    clipped = torch.from_numpy(total * min(1.0, STEP.max_grad_norm / np.linalg.norm(total)))
    second, steps = (flat_state(case.policy, case.state, key, 0.0) for key in ("exp_avg_sq", "step"))
    corrected = (BETAS[1] * second + (1 - BETAS[1]) * clipped**2) / (1 - BETAS[1] ** (steps + 1))
    return (1 / (corrected.sqrt() + EPS)).numpy()


@pytest.mark.usefixtures("few_prompts_are_many")
def test_norms_cosines_signals_and_directions_are_those_of_the_vectors(case):
    check(case, compare_all(case).table, rel=1e-5)


@pytest.mark.usefixtures("few_prompts_are_many")
@pytest.mark.parametrize("name", every(2, ["gpt2", "mixtral"]))
def test_the_same_on_other_architectures(name):
    case = Case(name)
    found = compare(
        case.policy, case.batch, WEIGHTINGS, table=case.table, optimizer_state=case.state, settings=settle()
    )
    check(case, found.table, rel=1e-5)


@pytest.mark.all
@pytest.mark.usefixtures("few_prompts_are_many")
@pytest.mark.parametrize(("vectors", "way", "at_once"), every(2, [(12, "whole", 4), (5, "whole", 1)]))
def test_with_little_memory_the_same_comes_a_few_at_a_time(case, vectors, way, at_once):
    before = snapshot(case.policy.model)["model"]
    resources = Resources(vectors * vector_bytes(case.policy.model), micro_batch=4)
    given = {"table": case.table, "optimizer_state": case.state, "resources": resources}
    few = compare(case.policy, case.batch, WEIGHTINGS, settings=settle(), **given)
    assert (few.passes.plan.way, few.passes.at_once) == (way, at_once)
    check(case, few.table, rel=1e-5)
    assert snapshot(case.policy.model)["model"] == before


@pytest.mark.all
def test_weightings_that_would_end_after_the_deadline_are_named_and_left_out(case, found):
    size = vector_bytes(case.policy.model)
    resources = Resources(5 * size, micro_batch=4, deadline=0.0)  # long past: plain and another one, one at a time
    given = {"table": case.table, "optimizer_state": case.state, "resources": resources}
    few = compare(case.policy, case.batch, WEIGHTINGS, settings=settle(resamples=50), **given)
    kept = [*few.table["method"].unique()]
    assert len(kept) >= 2 and kept[0] == "grpo" and set(kept) < set(found.table["method"])
    expected = found.table[found.table["method"].isin(kept)].reset_index(drop=True)
    kinds = ("norm_ratio", "cosine", "signal", "right_sgd", "right_adamw", "effective")
    columns = [name for name in expected if name.startswith(kinds)]
    pd.testing.assert_frame_equal(few.table[columns], expected[columns], rtol=1e-4, atol=1e-6)
    late = [note for note in few.notes if note.kind == "late"]
    assert all(name in late[0] for name in set(found.table["method"]) - set(kept))
    # What nobody named is not made instead: entropy, real steps, gains.
    names = ("entropy_change", "step_cosine")
    assert all(name in found.table for name in names) and not any(name in few.table for name in (*names, "gain"))
    assert "entropy" in late[1] and "gains" in late[-1]
    later = replace(resources, deadline=float("inf"))
    everything = compare(case.policy, case.batch, WEIGHTINGS, settings=settle(), **given | {"resources": later})
    assert not everything.passes.missing and len(everything.table) == len(found.table)


def test_sketches_are_near(case):
    size = vector_bytes(case.policy.model)
    resources = Resources(2 * size, micro_batch=4)
    few = compare(case.policy, case.batch, ["up-weight"], table=case.table, settings=settle(), resources=resources)
    assert few.passes.plan.way == "sketches"
    plain = case.parts(case.table["policy_weight"].to_numpy(np.float64))
    assert few.table.loc[0, "signal_to_noise"] == pytest.approx(snr(plain), abs=0.2)


def test_plains_signal_to_noise_is_that_of_the_interval_gradients(case, found):
    everything = interval_gradients(case.policy, case.batch, loss=SETTINGS).table.iloc[-1]
    assert found.table.loc[0, "signal_to_noise"] == pytest.approx(everything["signal_to_noise"], rel=1e-5)


def test_energies_and_shares_by_interval_are_sums_over_tokens(case, found):
    norms, interval = case.table["param_grad_norm"].to_numpy(), case.table["interval"].to_numpy()
    for name, steps in weights_of(case).items():
        for step, weights in steps.items():
            own = found.by_interval[(found.by_interval["method"] == name) & (found.by_interval["step"] == step)]
            force = np.abs(weights) * norms
            energy = [(force[interval == a] ** 2).sum() for a in range(4)]
            np.testing.assert_allclose(own["energy_share"], np.array(energy) / sum(energy), rtol=1e-5)
            total = weights @ case.jacobian
            along = weights * (case.jacobian @ total)
            shares = [along[interval == a].sum() / (total @ total) for a in range(4)]
            np.testing.assert_allclose(own["gradient_share"], shares, rtol=1e-5, atol=1e-7)
            row = found.table[(found.table["method"] == name) & (found.table["step"] == step)].iloc[0]
            carried = force.sum() ** 2 / (force**2).sum() / len(force)
            assert row["effective_share"] == pytest.approx(carried, rel=1e-5)
            assert row["zero_share"] == (weights == 0).mean()


def from_energies(own: np.ndarray, plain: np.ndarray, norms: np.ndarray) -> float:
    """The cosine of two sums of orthogonal vectors of these norms, written out in as many dimensions as tokens."""
    one, other = np.diag(own * norms).sum(0), np.diag(plain * norms).sum(0)
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


@pytest.mark.usefixtures("few_prompts_are_many")
def test_the_cosine_from_energies_is_that_of_orthogonal_token_gradients(case):
    norms, plain = case.table["param_grad_norm"].to_numpy(np.float64), case.table["policy_weight"].to_numpy(np.float64)
    table = compare_all(case).table
    for row, weights in rows_of(table, weights_of(case)):
        expected = from_energies(weights, plain, norms)
        assert row["cosine_from_energies"] == pytest.approx(expected, rel=1e-5)  # norms are float32
        if row["cosine_from_energies"] < 0.999:
            assert row["cosine_from_energies_lower"] < expected < row["cosine_from_energies_upper"]
    # In the form with the ratio of weights: plain has no token of weight 0 that Reweight gives one.
    used, own = plain != 0, make_weighting("reweight:alpha=0.5").weights(case.table)["all"]
    energy, ratio = (plain[used] * norms[used]) ** 2, own[used] / plain[used]
    by_ratio = (ratio * energy).sum() / np.sqrt(energy.sum() * (ratio**2 * energy).sum())
    assert from_energies(own, plain, norms) == pytest.approx(by_ratio)
    assert by_ratio >= 2 * np.sqrt(0.5) / 1.5  # weights in [½, 1]: 2√(1 − α)/(2 − α)
    two = table[(table["method"] == "lopti") & (table["step"] == "both")]
    assert (
        two["cosine_from_energies"].isna().all() and two["step_cosine"].notna().all()
    )  # of both steps there is no sum


@pytest.mark.all
def test_the_cosine_from_energies_of_a_sample_of_norms_is_near_that_of_all(case):
    rng, own = np.random.default_rng(0), make_weighting("reweight:alpha=0.5").weights(case.table)["all"]
    weights, found = np.stack([case.table["policy_weight"].to_numpy(np.float64), own]), []
    for _ in range(300):
        sampled = case.table.copy()
        sampled.loc[rng.permutation(len(sampled))[: len(sampled) // 3], "param_grad_norm"] = np.nan
        found.append(Judge(sampled, ["a", "b", "c", "d"], 0, 0.95, 1).cosines_from_energies(weights)[0])
    exact = from_energies(own, weights[0], case.table["param_grad_norm"].to_numpy(np.float64))
    found = np.array(found)
    known = ~np.isnan(found).any(1)  # else of an interval only tokens without weight were measured
    assert known.mean() > 0.8 and found[known, 0] == pytest.approx(1.0)
    assert abs(found[known, 1].mean() - exact) < 0.1 * (1 - exact) + 4 * found[known, 1].std() / np.sqrt(known.sum())


@pytest.mark.usefixtures("few_prompts_are_many")
@pytest.mark.parametrize(("served", "bounded"), [(1, False), (2, True)])
def test_bounds_need_as_many_prompts_with_an_advantage_as_an_interval_does(case, served, bounded):
    """Here two suffice."""
    batch = replace(case.batch, advantages=resolve_advantages(case.batch).clone())
    batch.advantages[~torch.isin(batch.group_ids, batch.group_ids.unique()[:served])] = 0.0
    batch.advantages[batch.group_ids == batch.group_ids.unique()[0]] += 0.5
    if served == 2:
        batch.advantages[batch.group_ids == batch.group_ids.unique()[1]] += 0.5
    table = measure(case.policy, batch, loss=SETTINGS, self_check=False)
    found = compare(case.policy, batch, ["up-weight"], table=table, settings=settle())
    assert found.num_informative_prompts == served < found.num_prompts
    for rows in (found.table, found.by_interval):
        bounds = rows.filter(regex="_(lower|upper)$")
        assert bounds.notna().any(axis=None) == bounded
    assert found.table["cosine"].notna().all()


def test_a_sentence_says_of_each_weighting_what_it_does_to_the_update_and_none_of_too_few_prompts(found):
    names = ["grpo", "halved", "turned", "same"]
    numbers = {"norm_ratio": [1.0, 0.5, 1.2, 0.5], "cosine": [1.0, 0.997, 0.6, 0.997]}
    table = pd.DataFrame({"method": names, "step": "all", "same_as": ["", "", "", "halved"]} | numbers)
    table = table.assign(cosine_from_energies=[1.0, 0.996, 0.8, 0.996])
    for name in ("norm_ratio", "cosine", "cosine_from_energies"):
        table = table.assign(**{f"{name}_lower": table[name] - 0.01, f"{name}_upper": table[name] + 0.002})
    enough = replace(found, table=table, num_prompts=8, num_informative_prompts=6)
    halved, turned, _ = weighting_sentences(enough)
    assert "halved" in halved and "0.5 [0.49, 0.502]" in halved.replace(" .", " 0.")
    assert "GRPO with" in halved and "0.997" in halved and "0.996" in halved
    assert "turned" in turned and "GRPO with" not in turned and "0.6 [" in turned and "0.8 [" in turned
    for few in (replace(enough, num_informative_prompts=5), replace(enough, supply=Supply(2, 3, 6, 9, 20, 24.2))):
        assert not weighting_sentences(few) and few.too_few.startswith(TOO_FEW)
        assert few.too_few in describe(few) and few.too_few in repr(few) and "0.997" not in describe(few)
    assert "25 minutes" in few.too_few


def test_two_steps_are_judged_by_real_ones(case, found):
    keywords = {"loss": SETTINGS, "step": STEP, "optimizer_state": case.state}
    moved = {
        name: apply_update(case.policy, case.batch, name, displacement=True, **keywords) for name in ("all", "lopti")
    }
    row = found.table[(found.table["method"] == "lopti") & (found.table["step"] == "both")].iloc[0]
    one, two = (moved[name].displacement for name in ("all", "lopti"))
    assert row["step_cosine"] == pytest.approx(float(one @ two / one.norm() / two.norm()), rel=1e-5)
    after, before = moved["lopti"].after, moved["lopti"].before
    rise = (after.logprob - before.logprob)[case.batch.response_mask].numpy()
    judged = (case.table["advantage"].to_numpy() != 0) & (rise != 0)
    right = (np.sign(rise) == np.sign(case.table["advantage"].to_numpy()))[judged].mean()
    assert row["right_step"] == pytest.approx(right) and np.isnan(row["signal_to_noise"])
    assert found.table.loc[0, "step_cosine"] == 1.0
    assert [note.kind for note in found.notes] == ["off-policy", "two-steps"]


def score(model: torch.nn.Module, batch: TokenBatch) -> torch.Tensor:
    """log π of each kept token, [K]."""
    found = []
    for row in range(len(batch)):
        ids, kept = batch.sequence(row)
        logits = model(input_ids=ids[None], use_cache=False).logits[0] / batch.temperature[row]
        found += [torch.log_softmax(logits[t - 1], -1)[ids[t]] for t in kept.tolist()]
    return torch.stack(found)


def step_by_torch(case: Case, step: StepSettings, steps: dict[str, np.ndarray]) -> tuple[np.ndarray, torch.Tensor]:
    """Change of each token's log π, and Δθ, by torch's optimizer on a copy: a step of Σ_t w_t log π_t / N for each."""
    model, groups = copy.deepcopy(case.policy.model), {"lr": step.learning_rate, "weight_decay": step.weight_decay}
    parameters, before = list(model.parameters()), torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    if step.optimizer == "adamw":
        optimizer = torch.optim.AdamW(parameters, betas=step.betas, eps=step.eps, **groups)
        state = optimizer.state_dict()
        optimizer.load_state_dict(state | {"state": copy.deepcopy(case.state["state"])})
    else:
        optimizer = torch.optim.SGD(parameters, **groups)
    start = score(model, case.batch).detach()
    for weights in steps.values():
        optimizer.zero_grad()
        (-(torch.from_numpy(weights) * score(model, case.batch)).sum() / len(weights)).backward()
        torch.nn.utils.clip_grad_norm_(parameters, step.max_grad_norm)
        optimizer.step()
    rise = score(model, case.batch).detach() - start
    return rise.numpy(), torch.nn.utils.parameters_to_vector(parameters).detach() - before


@pytest.mark.parametrize("step", every(2, [STEP, StepSettings("sgd", 1e-2, max_grad_norm=0.01)]))
def test_with_real_steps_each_weighting_moves_tokens_as_torch_moves_a_copy(case, step):
    weightings = ["reweight:alpha=.1/.5", "mask:low=0.5,high=1", "top-entropy:q=.5", "up-weight"]
    before = snapshot(case.policy.model)["model"]
    given = {"table": case.table, "optimizer_state": case.state if step.optimizer == "adamw" else None}
    settings = settle(step=step, take_steps=True)
    table = compare(case.policy, case.batch, weightings, settings=settings, **given).table.set_index("method")
    names = ["grpo", "reweight:alpha=.1", "reweight:alpha=.5", *weightings[1:]]
    assert list(table.index) == names and (table["step"] == "all").all()
    assert snapshot(case.policy.model)["model"] == before
    advantage = case.table["advantage"].to_numpy()
    _, plain = step_by_torch(case, step, make_weighting("grpo").weights(case.table))
    for name in names:
        rise, moved = step_by_torch(case, step, make_weighting(name).weights(case.table))
        judged = (advantage != 0) & (rise != 0)
        right = (np.sign(rise) == np.sign(advantage))[judged].mean()
        assert table.loc[name, "right_step"] == pytest.approx(right)
        assert table.loc[name, "step_cosine"] == pytest.approx(float(moved @ plain / moved.norm() / plain.norm()), 1e-5)


@pytest.mark.parametrize("step", every(2, [STEP, StepSettings("sgd", max_grad_norm=0.01)]))
def test_the_change_of_entropy_of_each_weighting_is_that_of_a_real_small_step(case, step):
    # Each moves the weights by about 1e-3 in all: far more than log π is rounded by.
    small = replace(step, learning_rate=1e-5 if step.optimizer == "adamw" else 0.05, weight_decay=0.0)
    state, names = (case.state if step.optimizer == "adamw" else None), ("grpo", "reweight:alpha=0.5", "gspo")
    given = {"table": case.table, "optimizer_state": state, "settings": settle(step=small, resamples=20)}
    found = compare(case.policy, case.batch, names, **given).table.set_index("method")
    kept, taken = case.batch.response_mask, {"loss": SETTINGS, "step": small, "optimizer_state": state}
    none = resolve_advantages(case.batch) * 0.0  # momentum alone
    changes = {}
    for name, batch in [(name, case.batch) for name in names] + [("none", replace(case.batch, advantages=none))]:
        moved = apply_update(case.policy, batch, "all" if name in ("grpo", "none") else make_weighting(name), **taken)
        changes[name] = float((moved.after.entropy - moved.before.entropy)[kept].double().mean())
    # Under SGD the error is linear in the step. Of AdamW v̂ is plain's in the prediction, each weighting's own in truth:
    # of β₂ = .95 a twentieth of it is the step's own.
    rest, rel = (changes["none"], 5e-2) if step.optimizer == "adamw" else (0.0, 2e-2)
    for name in names:
        own, difference = changes[name] - rest, changes[name] - changes["grpo"]
        assert found.loc[name, "entropy_change"] == pytest.approx(own, rel=rel), name
        assert found.loc[name, "entropy_change_difference"] == pytest.approx(difference, abs=rel * abs(own)), name


def test_real_steps_of_two_passes_and_of_weights_that_a_trainer_has_not(case):
    given = {"table": case.table, "settings": settle(step=None, take_steps=True)}
    found = compare(case.policy, case.batch, ["lopti:eta=.3/.6", ByPosition(), "matched-norm"], **given)
    table = found.table.set_index(["method", "step"])
    taken = table.index[table["right_step"].notna()]
    assert list(taken) == [("grpo", "all"), ("lopti:eta=.3", "both"), ("lopti:eta=.6", "both")]
    assert table.loc[("matched-norm", "all"), "same_as"] == "grpo"
    assert {"two-steps", "no-step"} <= {note.kind for note in found.notes}
    assert found.step == SGD and "real SGD steps" in describe(replace(found, supply=Supply(6, 6)))


@pytest.mark.usefixtures("few_prompts_are_many")
def test_the_gain_is_that_of_each_weightings_step_on_the_prompts_it_has_not_seen(case):
    batch = make_batch(case.policy, lengths=(5, 4, 6) * 5, prompt_lengths=(3, 4) * 8, temperature=0.7, seed=1)
    batch = replace(batch, group_ids=torch.arange(15) // 3, rewards=torch.tensor([0.0, 1.0, 3.0, 1.0, 1.0] * 3))
    weightings = ["reweight", "lopti", "mask", "gspo", Two()]
    keywords = {"loss": SETTINGS, "step": STEP, "optimizer_state": case.state}
    settings = settle(seed=5, resamples=50)
    found = compare(case.policy, batch, weightings, settings=settings, optimizer_state=case.state)
    halves = batch.deal(torch.arange(5), 2, torch.Generator().manual_seed(5))
    by_hand = {"grpo": "all", "lopti": "lopti", "reweight": "reweight", "mask": "without-0"}
    gains = {name: {} for name in by_hand}
    for own, other in (halves, halves[::-1]):
        jacobian, row = token_gradients(case.policy, other), other.response_mask.nonzero()[:, 0]
        for name, variant in by_hand.items():
            step = apply_update(case.policy, own, variant, displacement=True, **keywords).displacement
            rise = torch.zeros(len(other), dtype=torch.float64).index_add(0, row, jacobian.double() @ step.double())
            for group in other.group_ids.unique().tolist():
                one, two, three = (other.group_ids == group).nonzero()[:, 0].tolist()
                left_out = [(one, two, three), (two, one, three), (three, one, two)]
                terms = [
                    rise[a] * (other.rewards[a] - (other.rewards[b] + other.rewards[c]) / 2) for a, b, c in left_out
                ]
                gains[name][group] = float(sum(terms) / 3)
    whole = found.table[found.table["step"].isin(["all", "both"])].set_index("method")
    plain = np.array([gains["grpo"][group] for group in range(5)])
    for name, own in gains.items():
        values = np.array([own[group] for group in range(5)])
        assert whole.loc[name, "gain"] == pytest.approx(values.mean(), rel=1e-4)
        difference = whole.loc[name, ["gain_difference_lower", "gain_difference", "gain_difference_upper"]].to_list()
        assert difference[1] == pytest.approx((values - plain).mean(), rel=1e-3, abs=1e-9)
        if name == "grpo":  # from itself it does not differ, which has no bounds
            assert np.isnan(difference[0]) and np.isnan(difference[2])
            continue
        assert difference == sorted(difference) and min(values - plain) - 1e-9 <= difference[0]
    assert np.isnan(found.table.set_index("step").loc[["low", "high", "one", "other"], "gain"]).all()
    assert "preregistered" in describe(found)
    for less in (batch.select(torch.arange(9)), replace(batch, rewards=None, advantages=resolve_advantages(batch))):
        short = compare(case.policy, less, ["reweight"], settings=settle(), optimizer_state=case.state)
        assert "gain" not in short.table


def test_equal_weights_are_one_row_and_cost_nothing(case):
    on_policy = replace(case.batch, old_logprobs=None)
    table = measure(case.policy, on_policy, self_check=False)
    found = compare(case.policy, on_policy, table=table, settings=ComparisonSettings(resamples=5))
    same = found.table.set_index("method")["same_as"]
    assert set(same[same == "grpo"].index) == {"matched-norm", "kl-cov", "cispo", "sapo", "gspo", "dppo-tv"}
    numbers = found.table.drop(columns=["method", "step", "same_as"])
    pd.testing.assert_series_equal(
        numbers[found.table["method"] == "cispo"].iloc[0], numbers.iloc[0], check_names=False
    )
    assert [note.kind for note in found.notes] == ["off-policy", "left-out", "two-steps", "matched-norm"]  # icepop
    assert len(found.passes.changes) == (found.table["same_as"] == "").sum()
    assert "matched-norm, kl-cov, cispo, sapo, gspo, dppo-tv: the same as grpo" in describe(found)


def test_tokens_that_the_sampler_did_not_score_are_counted_in_a_note(case):
    table = case.table.assign(sampler_logprob=case.table["logprob"])
    table.loc[table.index[:3], "sampler_logprob"] = np.nan
    found = compare(case.policy, case.batch, ["tis"], table=table, settings=settle())
    (said,) = [note for note in found.notes if note.kind == "sampler-unknown"]
    assert said.startswith(f"3 of {len(table)} tokens")


def test_each_distinct_row_costs_a_backward_pass_and_a_derivative(case, monkeypatch):
    counts = {"forward": 0, "backward": 0}

    def counted(name: str, make):
        def call(*arguments, **keywords):
            counts[name] += 1
            return make(*arguments, **keywords)

        return call

    monkeypatch.setattr("gradscope.gradients.operator.forward_mode.TANGENTS", 0)  # each derivative by itself
    monkeypatch.setattr(torch.autograd, "grad", counted("backward", torch.autograd.grad))
    handle = case.policy.model.register_forward_hook(lambda *_: counts.update(forward=counts["forward"] + 1))
    weightings = ["reweight", "up-weight", "cispo:eps_high=100", "cispo:eps_high=200"]
    compare(case.policy, case.batch, weightings, table=case.table, settings=settle(), resources=Resources())
    handle.remove()
    prompts, rows = 3, 3  # grpo, reweight, of which with grpo up-weight is made, and the two of cispo that are one
    looks = len(case.batch)  # at log π_old, which are planted at some distance from log π
    # A derivative is a forward pass; all prompts go together where they are not needed apart; of entropy one each.
    rescored = 4  # responses, to see whether the table is this policy's
    assert counts == {"forward": looks + rescored + prompts + rows + 2, "backward": prompts * rows + 1}
    assert distinct_rows(case.table, weightings, settings=settle()) == rows


class Nearly(Weighting):
    """Plain but for a thousandth, and what is left of it: the difference of two rows of nearly the same size."""

    NAME = "nearly"

    def factors(self, tokens):
        return {"most": tokens.plain * (1 - 1e-3 * tokens["entropy"]), "rest": tokens.plain * 1e-3 * tokens["entropy"]}


class Rest(Weighting):
    NAME = "rest"

    def factors(self, tokens):
        return Nearly().factors(tokens)["rest"]


def test_rows_whose_combination_would_cancel_are_taken_by_themselves(case):
    keywords = {"table": case.table, "settings": settle()}
    both, alone = (compare(case.policy, case.batch, [kind()], **keywords).table.iloc[-1] for kind in (Nearly, Rest))
    names = ["norm_ratio", "cosine", "signal_to_noise", "signal_to_noise_lower", "right_sgd"]
    # A signal over its noise is a difference of terms of order 1, so rounding is relative to 1, not to what they leave.
    np.testing.assert_allclose(both[names].to_numpy(float), alone[names].to_numpy(float), rtol=1e-6, atol=1e-6)


class Two(Weighting):
    """Two optimizer steps that do not add up to plain."""

    NAME = "two"

    def factors(self, tokens):
        return {"one": tokens.plain, "other": tokens.plain * tokens["entropy"]}


def test_a_users_weighting_of_two_steps_is_compared_by_step_alone(case):
    given = {"table": case.table, "optimizer_state": case.state}
    found = compare(case.policy, case.batch, [Two()], settings=settle(step=None), **given)
    assert list(found.table["step"]) == ["all", "one", "other"] and [note.kind for note in found.notes] == [
        "off-policy"
    ]
    assert list(found.table["same_as"]) == ["", "grpo", ""]


class ByPosition(Weighting):
    """Made of a column that the table has and a trainer has not."""

    NAME = "by-position"

    def factors(self, tokens):
        return tokens.plain / (1 + tokens["position"])


@pytest.mark.all
def test_a_weighting_that_no_step_can_be_taken_under_has_no_gain(case):
    batch = make_batch(case.policy, lengths=(5, 4) * 4, prompt_lengths=(3, 4) * 4, temperature=0.7)
    found = compare(case.policy, batch, [ByPosition()], settings=settle(step=None), optimizer_state=case.state)
    gains = found.table.set_index("method")["gain"]
    assert np.isfinite(gains["grpo"]) and np.isnan(gains["by-position"]) and "minus GRPO's" not in describe(found)


@pytest.mark.all
def test_a_sample_of_norms_stands_for_all(case):
    known = case.table.copy()
    found = compare(case.policy, case.batch, ["reweight"], table=known, settings=settle())
    rng, draws = np.random.default_rng(0), []
    for _ in range(300):
        sampled = known.copy()
        for a in range(4):
            rows = np.flatnonzero(known["interval"] == a)
            sampled.loc[rng.permutation(rows)[: -(-2 * len(rows) // 3) :], "param_grad_norm"] = np.nan
        judge = Judge(sampled, ["a", "b", "c", "d"], 0, 0.95, 1)
        _, energy = judge.energies(known["policy_weight"].to_numpy(np.float64)[None])
        draws.append(energy["energy_share"][0, 0])
    exact = found.by_interval.loc[:3, "energy_share"].to_numpy()
    unknown = np.isnan(draws).any(1)  # of an interval only tokens without weight were measured
    assert unknown.mean() < 0.2 and np.abs(np.nanmean(draws, axis=0) - exact).max() < 0.1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"weightings": ["lopty"]}, "lopti"),
        ({"weightings": ["reweight:alpah=1"]}, "alpha"),
        ({"weightings": ["reweight:alpha=2"]}, "alpha"),
        ({"weightings": ["icepop"]}, "sampler_logprob"),
        ({"weightings": ["reweight", "reweight"]}, "reweight"),
        ({"settings": settle(aggregation="mean")}, "aggregation"),
        ({"settings": settle(aggregation="sequence", take_steps=True)}, "aggregation"),
        ({"settings": settle(loss=replace(SETTINGS, reweight_alpha=0.1))}, "reweight_alpha"),
        ({"batch": "advantages"}, "advantage"),
        ({"table": 3}, "3"),
    ],
)
def test_what_cannot_be_compared_is_refused(case, change, named):
    batch, keywords = case.batch, {"weightings": ["reweight"], "table": case.table, "settings": settle()} | change
    if keywords.pop("batch", None):
        advantages = resolve_advantages(batch).clone()
        advantages[1] = torch.nan
        batch = replace(batch, advantages=advantages)
    if change.get("table"):
        keywords["table"] = case.table[:3]
    with refused(named):
        compare(case.policy, batch, **keywords)


# ---- signal to noise


def plant(kind: str, signal: float, n: int, rng: np.random.Generator, draws: int, width: int = 40) -> np.ndarray:
    """[draws, n, width]: prompts' gradients with noise of variance 1 and a mean of this squared norm."""
    out = rng.standard_normal((draws, n, width)) / np.sqrt(width)
    mean = np.full(width, np.sqrt(signal / width))
    if kind == "one direction":
        out[..., 1:] = 0.0
        out[..., 0] *= np.sqrt(width)
        mean = np.eye(width)[0] * np.sqrt(signal)
    elif kind == "heavy tails":
        out *= (rng.standard_t(5, (draws, n)) / np.sqrt(5 / 3))[..., None]
    return out + mean


def products_of(parts: np.ndarray) -> Products:
    kernel = parts @ parts.transpose(0, 2, 1)
    own, along = np.einsum("dnn->dn", kernel), kernel.sum(2)
    return Products(own, along, kernel, own, along, along)


@pytest.mark.all
@pytest.mark.parametrize("n", [16, 32, 64])
@pytest.mark.parametrize("signal", [0.0, 0.05, 1.0], ids=["no", "weak", "strong"])
@pytest.mark.parametrize("kind", every(2, ["heavy tails", "one direction", "isotropic"]))
def test_bounds_of_signal_to_noise_hold_the_truth(kind, signal, n):
    rng = np.random.default_rng(n)
    lowers, uppers = [], []
    for _ in range(10):
        _, lower, upper = noise.signal_to_noise(products_of(plant(kind, signal, n, rng, 200)))
        lowers.append(lower)
        uppers.append(upper)
    lower, upper = np.concatenate(lowers), np.concatenate(uppers)
    covered = ((lower <= signal) & (signal <= upper)).mean()
    width = np.median(upper - lower)
    apart = (lower > 0).mean()
    print(f"\n{kind}, {signal}, {n} prompts: coverage {covered:.3f}, median width {width:.3f}, above 0 {apart:.3f}")
    assert covered >= 0.93
    if signal == 1.0 and n == 64:
        assert apart >= 0.8


def test_differences_of_signal_to_noise_hold_the_truth():
    rng, n, signal = np.random.default_rng(0), 32, np.array([0.2, 0.5])
    covered = []
    for _ in range(300):
        shared = plant("isotropic", 0.0, n, rng, 1)[0]
        parts = np.stack([shared + np.sqrt(s / shared.shape[1]) for s in signal])
        _, lower, upper = noise.signal_to_noise_difference(products_of(parts))
        covered.append(lower[1] <= 0.3 <= upper[1])
        assert lower[0] == upper[0] == 0.0
    assert np.mean(covered) >= 0.93


def test_with_two_prompts_there_are_no_bounds():
    found = noise.signal_to_noise(products_of(plant("isotropic", 1.0, 2, np.random.default_rng(0), 3)))
    assert np.isfinite(found[0]).all() and np.isnan(found[1:]).all()
