"""Predictions for α and η, against direct backward passes, optimizer steps by hand and real ones; the screening."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch
from support.policies import make_batch, make_policy
from support.steps import Brute, brute_force
from support.tuning import BETAS, EPS, STEPS_TAKEN, make_state
from torch import Tensor

from gradscope.errors import InputError
from gradscope.gradients import weighted_gradients
from gradscope.objective import LossSettings, batch_loss, make_weighting
from gradscope.objective.equations import grpo_advantages
from gradscope.policy import Policy
from gradscope.rollouts import TokenBatch
from gradscope.updates import (
    Screening,
    Setting,
    StepSettings,
    apply_update,
    count_tokens,
    make_grid,
    report,
    screen,
    tune_batch,
)
from gradscope.updates.tuning.counts import take_step
from gradscope.updates.tuning.linear import PLAIN, Linearisation, cell_cotangents, linearise, make_cells
from gradscope.updates.tuning.screen import CELLS

# torch itself calls torch.jit.script the first time that forward mode is used.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")

# Old log-probabilities of the batches drift by about 0.1: narrow clips are active on both sides, and so is the KL.
NARROW = LossSettings(clip_ratio_low=0.05, clip_ratio_high=0.04, clip_ratio_c=1.1, kl_coef=0.2)
METHODS = tuple(map(make_weighting, ("top-entropy:q=0.4", "cispo:eps_high=1.02", "mask:high=0.3", "gspo:eps_low=0.02")))
OTHERS = [Setting(weighting=weighting) for weighting in METHODS]
GRID = [PLAIN, Setting(0.3), Setting(1.0), Setting(None, 0.5), Setting(0.7, 0.4), Setting(0.2, 0.75)]
ETAS = [0.5, 0.4, 0.75]
ADAMW = {"optimizer": "adamw", "betas": BETAS, "eps": EPS}
STEPS = [
    StepSettings("sgd", 1e-2, 0.1, max_grad_norm=0.01),
    StepSettings("sgd", 1e-2, max_grad_norm=None),
    StepSettings(learning_rate=1e-3, weight_decay=0.2, max_grad_norm=0.01, **ADAMW),
    StepSettings(learning_rate=1e-3, max_grad_norm=None, **ADAMW),
]


@pytest.fixture(scope="module")
def policy() -> Policy:
    """GPT-2 alone computes everything in float64."""
    return make_policy("gpt2", torch.float64)


@pytest.fixture(scope="module")
def batch(policy) -> TokenBatch:
    batch = make_batch(policy, temperature=0.7)
    double = {name: getattr(batch, name).double() for name in ("old_logprobs", "ref_logprobs")}
    advantages = grpo_advantages(batch.rewards.double(), batch.group_ids)
    return replace(batch, **double, advantages=batch.token_weighted(advantages))


@pytest.fixture(scope="module")
def brute(policy, batch) -> Brute:
    return brute_force(policy, batch, NARROW)


@pytest.fixture(scope="module")
def state(policy) -> dict:
    return make_state(policy, BETAS, STEPS_TAKEN)


def state_for(step: StepSettings, state: dict) -> dict | None:
    return state if step.optimizer == "adamw" else None


def masks_of(batch: TokenBatch, setting: Setting) -> list[Tensor]:
    """The tokens of each pass."""
    if setting.eta is None:
        low, high = (0.0, 0.0) if setting.weighting is None else setting.weighting.passes.mask_probs or (0.0, 0.0)
        probs = batch.old_logprobs.exp()
        return [batch.response_mask & ~((probs >= low) & (probs < high))]
    low = batch.response_mask & (batch.old_logprobs < math.log(setting.eta))
    return [low, batch.response_mask & ~low]


# The gradient of a setting.


def direct_gradient(policy: Policy, batch: TokenBatch, settings: LossSettings, num_tokens: int) -> Tensor:
    """One backward pass of the loss over the whole padded batch."""
    logits = policy.model(input_ids=batch.input_ids, attention_mask=batch.attention_mask.long(), use_cache=False).logits
    logprobs = torch.log_softmax(logits / batch.temperature[:, None, None], -1).roll(1, dims=1)
    own = logprobs.gather(2, batch.input_ids[..., None])[..., 0]
    loss = batch_loss(own, batch, settings, num_tokens=num_tokens)
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(policy.model.parameters()))])


@pytest.mark.parametrize("setting", GRID)
def test_combined_gradients_are_those_of_a_direct_backward_pass_with_that_alpha(policy, batch, setting):
    with torch.no_grad():
        logits = policy.model(input_ids=batch.input_ids, attention_mask=batch.attention_mask.long()).logits
    own = torch.log_softmax(logits / batch.temperature[:, None, None], -1).roll(1, dims=1)
    own = own.gather(2, batch.input_ids[..., None])[..., 0]
    cells = make_cells(batch, ETAS)
    gradients = weighted_gradients(policy.model, batch, cell_cotangents(cells, batch, own, NARROW), micro_batch_size=4)
    none = np.zeros((len(gradients) + 2, 0))
    linear = Linearisation(batch, batch, cells, np.eye(len(gradients)), none, STEPS[0], 0, "forward mode")
    passes = linear.passes(setting)
    assert len(passes) == (1 if setting.eta is None else 2)
    for coefficients, mask in zip(passes, masks_of(batch, setting), strict=True):
        settings = replace(NARROW, reweight_alpha=setting.alpha)
        wanted = direct_gradient(policy, replace(batch, response_mask=mask), settings, batch.num_tokens)
        found = torch.from_numpy(coefficients) @ gradients
        assert (found - wanted).norm() < 1e-10 * wanted.norm()


def test_cells_are_cut_at_the_trainers_own_comparisons(batch):
    # A float32 logarithm lies above or below the true one, and its exponential may fall on η's other side.
    old = batch.old_logprobs.float()
    first = batch.response_mask.nonzero()[0]
    for value in (math.log(0.5), math.log(0.25), math.log(0.3), 0.0):
        old[first[0], first[1]] = value
        edge = replace(batch, old_logprobs=old)
        cells = make_cells(edge, [0.5, 0.3])
        cell = int(cells.of[first[0], first[1]])
        for eta in (0.5, 0.3):
            low = masks_of(edge, Setting(None, eta))[0]
            assert cells.below[eta][cell] == low[first[0], first[1]]
    kept = cells.of[batch.response_mask]
    assert set(kept.tolist()) == set(range(len(cells.interval))) and (cells.of[~batch.response_mask] == -1).all()


# The simulated step.


def columns_of(batch: TokenBatch, brute: Brute) -> dict[str, np.ndarray]:
    """What weightings read, of the kept tokens."""
    keep = batch.response_mask
    columns = {"response": keep.nonzero()[:, 0], "old_logprob": batch.old_logprobs[keep]}
    columns |= {"advantage": batch.advantages[keep]}
    return {name: values.numpy() for name, values in columns.items()} | {
        "logprob": np.array(brute.logprob),
        "entropy": np.array(brute.entropy),
        "policy_weight": np.array(brute.policy),
    }


def step_by_hand(
    policy: Policy, batch: TokenBatch, brute: Brute, setting: Setting, step: StepSettings, state: dict | None
) -> tuple[Tensor, Tensor]:
    """(Δθ, sum of clipped gradients) of the setting's passes, all linearised before the first; the denominator too."""
    jacobian, n = brute.jacobian, len(brute.kl)
    policy_weight, kl_weight = (torch.tensor(w, dtype=torch.float64) for w in (brute.policy, brute.kl))
    plain_weight = policy_weight
    if setting.weighting is not None:
        policy_weight = torch.from_numpy(next(iter(setting.weighting.weights(columns_of(batch, brute)).values())))
    old = batch.old_logprobs[batch.response_mask].exp()

    def clipped_gradient(chosen: Tensor, alpha: float, policy_weight: Tensor = policy_weight) -> Tensor:
        weight = policy_weight * (alpha * old + 1 - alpha) + kl_weight
        gradient = -(chosen * weight / n) @ jacobian
        limit = math.inf if step.max_grad_norm is None else step.max_grad_norm
        return gradient * min(1.0, limit / (gradient.norm().item() + 1e-6))

    theta = start = torch.cat([p.detach().flatten() for p in policy.model.parameters()])
    m = torch.zeros_like(theta)
    if state is not None:
        m, v = (torch.cat([s[key].flatten() for s in state["state"].values()]) for key in ("exp_avg", "exp_avg_sq"))
        plain = clipped_gradient(torch.ones_like(old), 0.0, plain_weight)
        v = (BETAS[1] * v + (1 - BETAS[1]) * plain**2) / (1 - BETAS[1] ** (STEPS_TAKEN + 1))
    total = torch.zeros_like(theta)
    for count, mask in enumerate(masks_of(batch, setting), start=STEPS_TAKEN + 1):
        gradient = clipped_gradient(mask[batch.response_mask].double(), setting.alpha or 0.0)
        total = total + gradient
        theta = theta - step.learning_rate * step.weight_decay * theta
        if state is None:
            theta = theta - step.learning_rate * gradient
        else:
            m = BETAS[0] * m + (1 - BETAS[0]) * gradient
            theta = theta - step.learning_rate * m / (1 - BETAS[0] ** count) / (v.sqrt() + EPS)
    return theta - start, total


@pytest.mark.parametrize("step", STEPS)
def test_the_step_in_coefficients_is_the_linearised_step_in_explicit_vectors(policy, batch, brute, state, step):
    state = state_for(step, state)
    keywords = {"loss": NARROW, "step": step, "optimizer_state": state}
    linear = linearise(policy, batch, etas=ETAS, weightings=METHODS, **keywords)
    assert linear.method == "forward mode"
    _, plain = step_by_hand(policy, batch, brute, PLAIN, step, state)
    for setting in GRID + OTHERS:
        moved, total = step_by_hand(policy, batch, brute, setting, step, state)
        prediction, wanted = linear.predict(setting), (brute.jacobian @ moved).numpy()
        # The advantages are the float32 ones in brute_force.
        np.testing.assert_allclose(prediction.delta_logprob, wanted, rtol=0, atol=1e-7 * np.abs(wanted).max())
        assert prediction.cosine == pytest.approx(torch.cosine_similarity(total, plain, 0).item(), rel=1e-7)
        assert prediction.num_steps == (1 if setting.eta is None else 2)


def test_gradient_shares_are_those_of_each_intervals_own_gradient(policy, batch, brute):
    step = StepSettings("sgd", max_grad_norm=None)
    linear = linearise(policy, batch, loss=NARROW, step=step, weightings=METHODS)
    old, n = batch.old_logprobs[batch.response_mask].exp(), len(brute.kl)
    weights = {Setting(0.3): torch.tensor(brute.policy, dtype=torch.float64) * (0.3 * old + 0.7)}
    for setting in OTHERS:
        weights[setting] = torch.from_numpy(next(iter(setting.weighting.weights(columns_of(batch, brute)).values())))
    for setting, weight in weights.items():
        shares = linear.predict(setting).gradient_shares
        trained = masks_of(batch, setting)[0][batch.response_mask]
        terms = -((weight + torch.tensor(brute.kl)) * trained / n)[:, None] * brute.jacobian
        whole = terms.sum(0)
        wanted = [terms[torch.tensor(brute.interval) == a].sum(0) @ whole / (whole @ whole) for a in range(4)]
        assert shares == pytest.approx(np.array(wanted), rel=1e-5, abs=1e-7)
        assert shares.sum() == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_of_a_tiny_step_the_prediction_is_what_happens(policy, batch, optimizer):
    # The frozen denominator differs by about g²/v, and by 1 − β₂ at Lopti's second pass.
    betas, rate = (0.8, 0.9999), {"sgd": 1e-6, "adamw": 1e-9}[optimizer]
    state = make_state(policy, betas, 10**6) if optimizer == "adamw" else None
    step = StepSettings(optimizer, rate, 0.1, betas=betas, eps=EPS)
    keywords = {"loss": NARROW, "step": step, "optimizer_state": state}
    linear = linearise(policy, batch, etas=ETAS, weightings=METHODS, **keywords)
    for setting in GRID + OTHERS:
        movement = take_step(policy, linear, setting, **keywords)
        actual = (movement.after.logprob - movement.before.logprob)[batch.response_mask].numpy()
        predicted = linear.predict(setting).delta_logprob
        assert np.linalg.norm(actual - predicted) < 2e-4 * np.linalg.norm(predicted), setting


def test_a_pass_without_tokens_takes_no_step(policy, batch, state):
    keywords = {"step": STEPS[2], "optimizer_state": state}
    linear = linearise(policy, batch, etas=[0, 1.0], **keywords)
    none, plain = linear.predict(Setting(None, 0)), linear.predict(PLAIN)
    assert none.num_steps == 1
    np.testing.assert_array_equal(none.delta_logprob, plain.delta_logprob)
    assert len(take_step(policy, linear, Setting(None, 0), **keywords).results) == 2


def test_two_steps_add_up_to_one_only_without_momentum_decay_and_clipped_gradients(policy, batch, state):
    plain_sgd, decayed = STEPS[1], replace(STEPS[1], weight_decay=0.1)
    for step, wanted in ((plain_sgd, True), (decayed, False), (STEPS[0], False), (STEPS[3], False)):
        linear = linearise(policy, batch, etas=[*ETAS, 0], step=step, optimizer_state=state_for(step, state))
        for setting in GRID:
            prediction = linear.predict(setting)
            assert prediction.adds_up == (wanted and setting.eta is not None)
            if prediction.adds_up:
                one = linear.predict(replace(setting, eta=None)).delta_logprob
                np.testing.assert_array_equal(prediction.delta_logprob, one)
        assert not linear.predict(Setting(None, 0)).adds_up


def test_responses_without_an_advantage_are_left_out_and_change_nothing_but_the_denominator(policy, batch, brute):
    rows = [2, 3]
    advantages = batch.advantages.clone()
    advantages[rows] = 0.0
    some, step = replace(batch, advantages=advantages), StepSettings("sgd", 0.1, max_grad_norm=None)
    for kl, settings in ((False, replace(NARROW, kl_coef=0)), (True, NARROW)):
        linear = linearise(policy, some, etas=ETAS, loss=settings, step=step)
        assert len(linear.judged) == 4
        kept = linear.judged.response_mask
        inside = torch.ones(batch.input_ids.shape, dtype=torch.bool)
        inside[rows] = False
        inside = inside[batch.response_mask]
        weights = replace(brute, policy=(torch.tensor(brute.policy) * inside).tolist())
        weights = replace(weights, kl=(torch.tensor(brute.kl) * kl).tolist())
        for setting in GRID:
            moved, _ = step_by_hand(policy, some, weights, setting, step, None)
            wanted = (brute.jacobian @ moved)[inside].numpy()
            found = linear.predict(setting).delta_logprob
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6 * np.abs(wanted).max())
            movement = take_step(policy, linear, setting, loss=settings, step=step)
            whole = apply_update(
                policy, some, setting.variant, loss=settings, step=step,
                **{n: v for n, v in (("alpha", setting.alpha), ("eta", setting.eta)) if v is not None},
            )  # fmt: skip
            here = (movement.after.logprob - movement.before.logprob)[kept]
            there = (whole.after.logprob - whole.before.logprob)[[0, 1, 4, 5]][kept]
            torch.testing.assert_close(here, there, rtol=1e-9, atol=1e-12)


# Counts.


def naive_counts(batch: TokenBatch, change: Tensor) -> dict[tuple, list[int]]:
    """(prompt, interval, sign) → tokens, tied, right, in a loop over tokens."""
    out = {key: [0, 0, 0] for key in product(range(3), range(4), ("positive", "negative"))}
    prompts = batch.group_ids.unique().tolist()
    for row, column in batch.response_mask.nonzero().tolist():
        advantage, moved = batch.advantages[row, column].item(), change[row, column].item()
        old = batch.old_logprobs[row, column].exp().item()
        if advantage != 0:
            sign = "positive" if advantage > 0 else "negative"
            entry = out[prompts.index(int(batch.group_ids[row])), min(int(4 * old), 3), sign]
            entry[0] += 1
            entry[1] += moved == 0
            entry[2] += moved * advantage > 0
    return out


def test_counts_are_those_of_loops_over_predictions_and_over_direct_updates(policy, batch):
    step = StepSettings("sgd", 0.3)
    keywords = {"loss": NARROW, "step": step}
    part = tune_batch(policy, batch, GRID, **keywords)
    linear = linearise(policy, batch, etas=ETAS, **keywords)
    for place, setting in enumerate(GRID):
        rows = part[part["setting"] == place].set_index(["prompt", "interval", "sign"])
        choices = {n: v for n, v in (("alpha", setting.alpha), ("eta", setting.eta)) if v is not None}
        movement = apply_update(policy, batch, setting.variant, **keywords, **choices)
        rise = movement.after.logprob - movement.before.logprob
        actual = rise - (movement.after.log_one_minus_prob - movement.before.log_one_minus_prob)
        prediction = linear.predict(setting)
        predicted = torch.zeros(batch.input_ids.shape, dtype=torch.float64)
        predicted[batch.response_mask] = torch.from_numpy(prediction.delta_logprob)
        for kind, change in (("predicted", predicted), ("actual", actual)):
            wanted = naive_counts(batch, change)
            assert set(rows.index) == set(wanted)
            for key, numbers in wanted.items():
                assert rows.loc[key, ["num_tokens", f"{kind}_tied", f"{kind}_right"]].tolist() == numbers
        assert (rows["cosine"] == prediction.cosine).all() and (rows["steps"] == prediction.num_steps).all()
        assert (rows["adds_up"] == prediction.adds_up).all()
        assert rows["gradient_share.1"].iloc[0] == prediction.gradient_shares[1]
    tokens = naive_counts(batch, torch.zeros(batch.input_ids.shape))
    wanted = [[sum(tokens[p, a, s][0] for p in range(3)) for s in ("positive", "negative")] for a in range(4)]
    assert count_tokens(batch).tolist() == wanted
    without = tune_batch(policy, batch, GRID[:2], **keywords, actual=False)
    assert without[["actual_tied", "actual_right"]].isna().all(axis=None)
    assert without["predicted_right"].tolist() == part["predicted_right"][: len(without)].tolist()


# Planted effects, on a policy's own batches.


def sampled(policy: Policy, number: int) -> TokenBatch:
    sizes = {"lengths": (20,) * 16, "prompt_lengths": (5,) * 16}
    return replace(
        make_batch(policy, **sizes, holes=False, surprise=0.2, seed=100 + number, temperature=1.0), ref_logprobs=None
    )


def signs(batch: TokenBatch, seed: int) -> Tensor:
    return torch.randint(0, 2, batch.input_ids.shape, generator=torch.Generator().manual_seed(seed)) * 2.0 - 1


def screened(batches: list[TokenBatch], policy: Policy) -> Screening:
    grid, step = make_grid([0, 0.3, 1.0], [None]), StepSettings("sgd", 1e-3, micro_batch_size=16)
    parts = [tune_batch(policy, batch, grid, step=step, actual=i % 2 == 0) for i, batch in enumerate(batches)]
    return screen(parts, grid, seed=np.random.default_rng(0))


@pytest.fixture(scope="module")
def sharp() -> Policy:
    return make_policy("gpt2", sharpness=5.0)


def test_where_unlikely_tokens_drown_a_signal_in_the_others_the_largest_alpha_is_found_and_confirmed(sharp):
    batches = []
    for number in range(10):
        batch = sampled(sharp, number)
        signal = 0.2 * (batch.input_ids % 2 * 2 - 1)
        unlikely = batch.old_logprobs.exp() < 0.25
        batches.append(replace(batch, advantages=torch.where(unlikely, signs(batch, number), signal)))
    found = screened(batches, sharp)
    assert found.candidate["setting"] == "α=1" and found.worth_a_run and found.candidate["lower"] > 0.02
    assert found.rankings["held-out"].value > 0.5 and found.rankings["selection"].value > 0.5
    assert len(found.cells) == 8
    assert "α=1" in report(found, step="SGD") and "better; it is worth a run" in report(found, step="SGD")


def test_where_advantages_are_noise_nothing_is_worth_a_run(sharp):
    batches = [sampled(sharp, number) for number in range(6)]
    batches = [replace(batch, advantages=signs(batch, 50 + i)) for i, batch in enumerate(batches)]
    found = screened(batches, sharp)
    assert not found.worth_a_run and found.candidate["verdict"] == "no difference"


# The screening, on counts made up.


def made_up(
    num_settings: int, prompts: int, *, seed: int, effect: float = 0.0, spread: float = 0.0, tokens: int = 12
) -> pd.DataFrame:
    """Counts of independent tokens, half of them right; of setting 1 a share `effect` more.

    spread: standard deviation of what each setting but the first has in this batch alone, in all its tokens.
    """
    rng, rows = np.random.default_rng(seed), []
    rates = 0.5 + spread * rng.standard_normal(num_settings)
    rates[0] = 0.5
    rates[1] += effect
    for setting, prompt, cell in product(range(num_settings), range(prompts), range(8)):
        rate = rates[setting]
        row = {"setting": setting, "prompt": prompt, "interval": cell // 2, "num_tokens": tokens + cell}
        row["sign"] = ("positive", "negative")[cell % 2]
        for kind in ("predicted", "actual"):
            row[f"{kind}_tied"] = int(rng.integers(0, 3))
            row[f"{kind}_right"] = float(rng.binomial(row["num_tokens"] - row[f"{kind}_tied"], rate))
        rows.append(row | {"steps": 1, "adds_up": False, "cosine": 1.0, "method": "forward mode"})
    return pd.DataFrame(rows).assign(**{f"gradient_share.{a}": 0.25 for a in range(4)})


def score(part: pd.DataFrame, kind: str, setting: int, drawn: np.ndarray, cells: list[int]) -> float:
    """The mean of the cells' shares, token counts added prompt by prompt."""
    rows = part[part["setting"] == setting].to_dict("records")
    shares = []
    for cell in cells:
        right = moved = 0.0
        for row in rows:
            if 2 * row["interval"] + (row["sign"] == "negative") == cell:
                right += drawn[row["prompt"]] * row[f"{kind}_right"]
                moved += drawn[row["prompt"]] * (row["num_tokens"] - row[f"{kind}_tied"])
        if moved:
            shares.append(right / moved)
    return sum(shares) / len(shares)


def settings_of(count: int) -> list[Setting]:
    return [PLAIN, *(Setting(k / 10) for k in range(1, count))]


@pytest.mark.usefixtures("few_prompts_are_many")
def test_scores_differences_rankings_and_their_bounds_are_those_of_an_explicit_loop():
    sizes, cells, resamples = (4, 3, 5, 4), [2, 3, 4, 5, 6, 7], 40
    parts = [made_up(4, n, seed=9 + n, effect=0.1, tokens=3) for n in sizes]
    for part in parts:
        part.loc[part["interval"] == 0, ["num_tokens", "predicted_right", "actual_right"]] = 2
    found = screen(parts, settings_of(4), seed=np.random.default_rng(3), min_tokens=7, resamples=resamples)
    assert found.cells == CELLS[2:] and found.held_out == [True, False, True, False]
    rng = np.random.default_rng(3)
    draws = [rng.multinomial(n, np.full(n, 1 / n), size=resamples) for n in sizes]

    def scores(kind: str, batches: tuple, weights: list) -> np.ndarray:
        return np.array(
            [np.mean([score(parts[b], kind, s, weights[b], cells) for b in batches]) for s in range(4)], dtype=float
        )

    once = [np.ones(n) for n in sizes]
    table = found.settings
    for kind, batches, names in (
        ("predicted", (1, 3), ("predicted_score", "predicted_difference", "predicted_lower", "predicted_upper")),
        ("actual", (0, 2), ("actual_score", "difference", "lower", "upper")),
    ):
        value = scores(kind, batches, once)
        redrawn = np.array([scores(kind, batches, [d[k] for d in draws]) for k in range(resamples)])
        wanted = [value, value - value[0], *np.quantile(redrawn - redrawn[:, :1], [0.025, 0.975], axis=0)]
        for name, numbers in zip(names, wanted, strict=True):
            assert table[name].tolist() == pytest.approx(numbers.tolist(), abs=1e-12)
    assert table["candidate"].tolist() == (np.arange(4) == np.argmax(scores("predicted", (1, 3), once))).tolist()
    for name, batches in (("selection", (1, 3)), ("held-out", (0, 2))):
        pairs = [
            (scores("predicted", batches, w), scores("actual", (0, 2), w))
            for w in (once, *([d[k] for d in draws] for k in range(resamples)))
        ]
        value, *redrawn = [scipy.stats.spearmanr(*pair).statistic for pair in pairs]
        wanted = [value, *np.quantile(redrawn, [0.025, 0.975])]
        ranking = found.rankings[name]
        assert [ranking.value, ranking.lower, ranking.upper] == pytest.approx(wanted, abs=1e-12)


def test_what_varies_between_updates_gives_verdicts_at_the_nominal_rate_and_none_on_too_few_batches():
    told, starred, trials, others = 0, 0, 15, 39
    for trial in range(trials):
        parts = [made_up(others + 1, 6, seed=100 * trial + b, spread=0.1, tokens=40) for b in range(6)]
        keywords = {"seed": np.random.default_rng(0), "resamples": 200}
        verdicts = screen(parts, settings_of(others + 1), **keywords).settings["verdict"]
        told += verdicts.isin(["better", "worse"]).sum()
        few = screen(parts[:4], settings_of(others + 1), **keywords)
        assert (few.settings["verdict"] == "undecided").all() and not few.worth_a_run
        starred += ((few.settings["lower"] > 0) | (few.settings["upper"] < 0)).sum()
    # Three standard deviations of a binomial on each side of 5 %.
    assert 0.023 < told / (trials * others) < 0.077
    # What prompts within two batches would have told.
    assert starred > 0.4 * trials * others


def test_a_real_effect_is_confirmed():
    parts = [made_up(8, 8, seed=b, effect=0.2) for b in range(6)]
    found = screen(parts, settings_of(8), seed=np.random.default_rng(0))
    assert found.candidate.name == 1 and found.worth_a_run
    assert found.settings["verdict"].iloc[1] == "better" and found.settings["verdict"].iloc[0] == "no difference"


def test_two_held_out_batches_decide_nothing_however_large_the_effect():
    parts = [made_up(8, 8, seed=b, effect=0.3) for b in range(4)]
    found = screen(parts, settings_of(8), seed=np.random.default_rng(0))
    assert found.candidate.name == 1 and found.candidate["lower"] > 0.1
    assert found.candidate["verdict"] == "undecided" and not found.worth_a_run
    text = report(found, step="SGD")
    assert "undecided; a verdict takes 3 held-out batches, so give 5 batches or more." in text
    assert "95% interval: a bootstrap over prompts within the 2 held-out batches, too few to tell" in text
    assert "[bootstrap over prompts within these batches; pulled towards 0]" in text
    assert "by chance" not in text and "no difference" not in text


# What is refused.


def test_what_no_grid_can_be_made_of_is_refused():
    for alphas, etas, words in (
        ([1.2], [None], "alpha is 1.2"),
        ([math.nan], [None], "alpha is nan"),
        ([0.1], [-0.1], "eta is -0.1"),
        ([0.1], [1.5], "eta is 1.5"),
        ([], [], "nothing to compare"),
        ([0, None], [None], "nothing to compare"),
    ):
        with pytest.raises(InputError, match=words):
            make_grid(alphas, etas)
    assert make_grid([0.3, 0.3, 0], [0.5]) == [PLAIN, Setting(None, 0.5), Setting(0.3, 0.5)]


def test_what_cannot_be_predicted_is_refused(policy, batch, state):
    with pytest.raises(InputError, match="reweight_alpha is"):
        linearise(policy, batch, loss=LossSettings(reweight_alpha=0.3))
    with pytest.raises(InputError, match="bfloat16"):
        linearise(make_policy("gpt2", torch.bfloat16), batch)
    with pytest.raises(InputError, match="neither"):
        linearise(policy, replace(batch, advantages=None, rewards=None))
    with pytest.raises(InputError, match="advantages is NaN"):
        linearise(policy, replace(batch, advantages=torch.full_like(batch.advantages, math.nan)))
    with pytest.raises(InputError, match="every advantage is 0"):
        linearise(policy, replace(batch, advantages=torch.zeros_like(batch.advantages)))
    with pytest.raises(InputError, match="optimizer_state is AdamW's"):
        linearise(policy, batch, optimizer_state=state)
    state["state"][3]["step"] += 2
    with pytest.raises(InputError, match="have taken 6 to 8 steps"):
        linearise(policy, batch, step=STEPS[2], optimizer_state=state)
    state["state"][3]["step"] -= 2
    with pytest.raises(InputError, match="1 batch"):
        screen([made_up(2, 3, seed=0)], settings_of(2), seed=np.random.default_rng(0))
    with pytest.raises(InputError, match="has 1000 tokens that move"):
        screen([made_up(2, 3, seed=0)] * 2, settings_of(2), seed=np.random.default_rng(0), min_tokens=1000)
