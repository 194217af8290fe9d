"""The callback within a budget: prompts drawn at random speak for the step, and measuring keeps to its time."""

from __future__ import annotations

import json
import math
import warnings
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import t
from support.processes import launch
from support.tiers import every
from support.trl_runs import Recorder, import_trl, make_trainer, needs_trl, save_policy, train

from gradscope.errors import InputError
from gradscope.integrations.trl.callback import GradScopeCallback
from gradscope.policy import without_packing
from gradscope.resampling import SHARE, ratio_of_sample

pytestmark = needs_trl

SAME = 1e-4
"""Two programs' products of gradients in float32, relatively."""
INTERVALS = ["p0-25", "p25-50", "p50-75", "p75-100"]
SHARES = ["token_share", "grad_share", "right_direction_positive", "right_direction_negative"]
MANY = [f"w{i} w{i + 1}" for i in range(4, 36)]
SIXTEEN = {"prompts": MANY, "num_generations": 2, "per_device_train_batch_size": 32}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


# ---- what a sample says


def planted_sums(prompts: int = 48):
    """Of each prompt its part of each interval's ⟨G_a, G⟩: sizes a few times unlike, two in five without advantages."""
    rng = np.random.default_rng(7)
    sizes = rng.gamma(2.0, size=prompts) * (rng.random(prompts) > 0.4)
    shares = rng.dirichlet([3, 2, 1.5, 1], prompts) + 0.2 * rng.normal(size=(prompts, 4))
    return sizes[:, None] * shares


@pytest.mark.parametrize("drawn", [4, 8, 16, 40])
def test_intervals_from_samples_of_prompts_hold_the_shares_of_the_whole_step(drawn):
    sums, rng, draws = planted_sums(), np.random.default_rng(drawn), 500
    truth, hits, estimates = sums.sum(0) / sums.sum(), [], []
    for _ in range(draws):
        chosen = sums[rng.permutation(len(sums))[:drawn]]
        value, lower, upper = ratio_of_sample(chosen, chosen.sum(1, keepdims=True), len(sums))
        if np.isfinite(lower).all():
            hits.append((lower <= truth) & (truth <= upper))
            np.testing.assert_allclose(value.sum(), 1)
        estimates.append(len(sums) / drawn * chosen.sum(0))
    assert len(hits) > 0.75 * draws  # four prompts may be without advantages, all but one
    # Student's t with the few degrees of freedom of prompts of unlike size may hold the truth more often than .95.
    assert 0.93 <= np.mean(hits) <= 0.985
    error = np.std(estimates, axis=0) / math.sqrt(draws)
    assert (np.abs(np.mean(estimates, 0) - sums.sum(0)) < 4 * error).all()  # sums are unbiased


def test_bounds_of_a_mean_are_students_with_what_was_not_drawn():
    values = np.array([1.0, 3.0, 4.0, 8.0, 9.0])
    away = values - values.mean()
    freedom = min(4, (away**2).sum() ** 2 / (away**4).sum() - 0.5)
    reach = t.ppf(0.975, freedom) * values.std(ddof=1) / math.sqrt(5) * math.sqrt(1 - 5 / 12)
    found = ratio_of_sample(values[:, None], np.ones((5, 1)), 12)[:, 0]
    np.testing.assert_allclose(found, [5, 5 - reach, 5 + reach], rtol=1e-12)


def test_too_few_prompts_have_no_bounds_and_all_of_them_no_error():
    parts, wholes = np.array([[1.0], [2.0], [0.0]]), np.array([[2.0], [3.0], [1.0]])
    assert np.isnan(ratio_of_sample(parts, wholes, 9, scale=SHARE)[1:]).all()
    assert ratio_of_sample(parts, wholes, 3, scale=SHARE)[:, 0].tolist() == [0.5, 0.5, 0.5]


# ---- what the callback logs of one


class Clock:
    """Seconds by work done: so many for each of a trainer's steps, and for each position of another forward pass."""

    def __init__(self, trainer, step: float, position: float) -> None:
        self.now, self.inside, own = 0.0, False, trainer.training_step

        def training_step(*args, **keywords):
            self.inside, self.now = True, self.now + step
            try:
                return own(*args, **keywords)
            finally:
                self.inside = False

        def look(module, args) -> None:
            self.now += 0 if self.inside else position * args[0].numel()

        trainer.training_step = training_step
        trainer.model.get_input_embeddings().register_forward_pre_hook(look)

    def perf_counter(self) -> float:
        self.now += 1e-6
        return self.now


def watch(trainer, monkeypatch, *, budget, step, position=1.0, every=1):
    """The callback of a training whose steps take that long; and the clock."""
    clock = Clock(trainer, step, position)
    monkeypatch.setattr("gradscope.integrations.trl.callback.time", clock)
    callback = GradScopeCallback(trainer, every=every, budget=budget, micro_batch_size=3, progress=False)
    trainer.add_callback(callback)
    return callback, clock


def make(checkpoint, folder, kind, **settings):
    trl = import_trl()
    if kind == "rloo":
        return make_trainer(checkpoint, folder, kind=trl.RLOOTrainer, config=trl.RLOOConfig, **settings)
    if kind == "stock":
        return make_trainer(checkpoint, folder, **settings)
    from gradscope.integrations.trl import GradScopeGRPOTrainer

    return make_trainer(checkpoint, folder, kind=GradScopeGRPOTrainer, methods={"weighting": kind}, **settings)


def sums_by_prompt(trainer, step):
    """Of each prompt and interval: tokens [n, 4], and ⟨u_{p,a}, G⟩ [n, 4], by a backward pass each."""
    trainer.model.load_state_dict(step["weights"], strict=False)
    own, found = type(trainer)._get_per_token_logps_and_entropies, {}
    for inputs in step["window"]:
        kept = []

        def leaf(*args, kept=kept, **keywords):
            logprobs, *rest = own(trainer, *args, **keywords)
            kept.append((logprobs, logprobs.detach().requires_grad_(True)))
            return kept[0][1], *rest

        trainer._get_per_token_logps_and_entropies = leaf
        loss = trainer._compute_loss(trainer.model, inputs)
        if type(trainer).__name__ == "RLOOTrainer":  # whose loss leaves the mean over micro-batches to the Trainer
            loss = loss / len(step["window"])
        del trainer._get_per_token_logps_and_entropies
        (logprobs, detached), mask = kept[0], inputs["completion_mask"].bool()
        (slopes,) = torch.autograd.grad(loss, detached)
        place = (4 * logprobs.detach().exp()).long().clamp(max=3)
        for row, ids in enumerate(inputs["prompt_ids"].tolist()):
            counts, products = found.setdefault(tuple(ids), (np.zeros(4), np.zeros(4)))
            for a in range(4):
                chosen = mask[row] & (place[row] == a)
                counts[a] += int(chosen.sum())
                objective = (logprobs[row] * slopes[row] * chosen).sum()
                parts = torch.autograd.grad(objective, list(trainer.model.parameters()), retain_graph=True)
                trained = step["gradient"].values()
                products[a] += sum(float((p * g).sum()) for p, g in zip(parts, trained, strict=True))
    counts, products = zip(*found.values(), strict=True)
    return np.stack(counts), np.stack(products)


@pytest.mark.parametrize("kind", every(2, ["stock", "rloo", "top-entropy:q=0.3"]))
def test_a_samples_shares_are_those_of_some_of_the_prompts(checkpoint, tmp_path, monkeypatch, kind):
    """Of eight prompts at least four: the numbers are those of one of the choices of as many, by plain autograd."""
    beta = {} if kind.startswith("top") else {"beta": 0.1}
    sizes = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "num_generations": 2, "max_steps": 1}
    trainer = make(checkpoint, tmp_path, kind, move=0.02, prompts=MANY, **sizes, **beta)
    recorder = Recorder(trainer)
    # A prompt costs some 3 · 2 · 12 seconds.
    callback, _ = watch(trainer, monkeypatch, budget=0.5, step=162.0)
    with without_packing():  # whose passes have fewer positions
        train(trainer)
    (row,) = callback.rows
    count = row["measured_prompts"]
    assert 4 <= count < row["num_prompts"] == 8
    assert row["num_tokens"] == sum(int(part["completion_mask"].sum()) for part in recorder.steps[0]["window"])
    assert not any(row[f"grad_share_lower/{a}"] > row[f"grad_share/{a}"] for a in INTERVALS)
    counts, products = sums_by_prompt(trainer, recorder.steps[0])
    norm = trainer.state.log_history[0]["grad_norm"]
    assert products.sum() == pytest.approx(norm**2, rel=SAME)
    fits = []
    for drawn in map(list, combinations(range(8), count)):
        token_share = counts[drawn].sum(0) / counts[drawn].sum()
        with np.errstate(invalid="ignore"):  # prompts without advantages
            grad_share = np.where(counts[drawn].sum(0) > 0, products[drawn].sum(0), np.nan) / products[drawn].sum()
        wanted = [*token_share, *grad_share, 8 / count * products[drawn].sum() / norm**2, counts[drawn].sum()]
        logged = [row[f"{name}/{a}"] for name in SHARES[:2] for a in INTERVALS]
        logged += [row["grad_projection"], row["measured_tokens"]]
        fits.append(np.allclose(logged, wanted, rtol=10 * SAME, atol=10 * SAME, equal_nan=True))
    assert sum(fits) == 1


@pytest.mark.parametrize("loss", every(2, [{}, {"loss_type": "cispo", "epsilon_high": 1.1}]))
def test_all_prompts_say_what_is_measured_without_a_budget(checkpoint, tmp_path, monkeypatch, loss):
    settings = {"num_iterations": 2, "beta": 0.1, "move": 0.02, "max_steps": 2} | SIXTEEN | loss
    plain = make_trainer(checkpoint, tmp_path / "plain", **settings)
    plain.add_callback(whole := GradScopeCallback(plain, every=1, progress=False))
    train(plain)
    trainer = make_trainer(checkpoint, tmp_path / "budget", **settings)
    callback, _ = watch(trainer, monkeypatch, budget=0.15, step=1e9)
    train(trainer)
    assert all(torch.equal(a, b) for a, b in zip(plain.model.parameters(), trainer.model.parameters(), strict=True))
    for row, wanted in zip(callback.rows, whole.rows, strict=True):
        for name in SHARES:
            for a in INTERVALS:
                close = pytest.approx(wanted[f"{name}/{a}"], rel=1e-3, abs=SAME, nan_ok=True)
                assert [row[f"{name}{end}/{a}"] for end in ("", "_lower", "_upper")] == [close] * 3
        assert row["grad_projection"] == pytest.approx(1, abs=SAME)
        assert (row["measured_prompts"], row["measured_tokens"]) == (row["num_prompts"], wanted["num_tokens"])


def test_training_within_a_budget_is_training_without_the_callback_bit_for_bit(checkpoint, tmp_path, monkeypatch):
    plain, trainer = (make_trainer(checkpoint, tmp_path / name, **SIXTEEN) for name in ("plain", "budget"))
    recorders = Recorder(plain), Recorder(trainer)
    callback, _ = watch(trainer, monkeypatch, budget=0.5, step=700.0)
    train(plain)
    train(trainer)
    assert 0 < callback.rows[0]["measured_prompts"] < callback.rows[0]["num_prompts"]
    for a, b in zip(*(recorder.steps for recorder in recorders), strict=True):
        assert all(torch.equal(a["gradient"][name], b["gradient"][name]) for name in a["gradient"])
        assert torch.equal(a["random"], b["random"]) and a["training"] == b["training"]


@pytest.mark.all
def test_weights_in_bfloat16_are_measured_by_sums(checkpoint, tmp_path, monkeypatch):
    trainer = make_trainer(checkpoint, tmp_path, max_steps=1, **SIXTEEN)
    trainer.model.to(torch.bfloat16)
    callback, _ = watch(trainer, monkeypatch, budget=0.15, step=1e9)
    train(trainer)
    (row,) = callback.rows
    assert row["grad_projection"] == pytest.approx(1, abs=0.05)  # of 160 sums in eight bits
    assert sum(row[f"grad_share/{a}"] for a in INTERVALS) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("checkpointing", every(2, [False, True]))
def test_with_adapters_it_is_the_adapters_gradient(checkpoint, tmp_path, monkeypatch, checkpointing):
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    settings = {"beta": 0.1, "move": 0.02, "max_steps": 1, "gradient_checkpointing": checkpointing}
    trainer = make_trainer(checkpoint, tmp_path, peft=lora, **settings, **SIXTEEN)
    callback, _ = watch(trainer, monkeypatch, budget=0.15, step=1e9)
    train(trainer)
    (row,) = callback.rows
    assert row["measured_prompts"] == row["num_prompts"]
    assert row["grad_projection"] == pytest.approx(1, abs=SAME)


@pytest.mark.all
def test_another_gradient_than_the_measured_one_is_warned_of_where_all_prompts_were(checkpoint, tmp_path, monkeypatch):
    base = import_trl().GRPOTrainer

    def training_step(self, *args, **keywords):
        loss = base.training_step(self, *args, **keywords)
        for parameter in self.model.parameters():
            parameter.grad *= 1.05
        return loss

    for step, warned in ((1e9, 1), (1500.0, 0)):
        kind = type("Mine", (base,), {"training_step": training_step})
        trainer = make_trainer(checkpoint, tmp_path / str(warned), kind=kind, max_steps=1, **SIXTEEN)
        callback, _ = watch(trainer, monkeypatch, budget=0.3, step=step)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(trainer)
        assert sum("grad_projection" in str(w.message) for w in caught) == warned
        assert callback.rows[0]["grad_projection"] == pytest.approx(1 / 1.05, rel=SAME) or not warned


# ---- how much is measured


@pytest.mark.parametrize(("every", "position"), [(1, 1.0), (4, 1.0), pytest.param(1, 3.0, marks=pytest.mark.all)])
def test_measuring_keeps_to_its_share_of_the_time(checkpoint, tmp_path, monkeypatch, every, position):
    """Each step takes 1,000 seconds; a prompt some 2 · 12 · 3 (its positions, and passes), or three times as many."""
    trainer = make_trainer(checkpoint, tmp_path, max_steps=16, learning_rate=1e-4, **SIXTEEN)
    callback, clock = watch(trainer, monkeypatch, budget=0.15, step=1000.0, position=position, every=every)
    with without_packing():  # whose passes have fewer positions
        words, prompt = train(trainer), 3 * 2 * 12 * position
    assert callback.seconds < 0.15 * clock.now + prompt
    if every == 1:
        assert callback.seconds > 0.15 * clock.now - 5 * prompt
    table = pd.read_parquet(callback.path)
    assert table["seconds"].sum() <= callback.seconds
    steps, measured = table["step"].tolist(), table["measured_prompts"].tolist()
    assert steps[0] > 1 and min(measured) >= 4  # the first step's one prompt, measured for its cost, is no row
    assert not table["grad_share/p0-25"].isna().any()
    if every == 4:
        # The first four prompts wait for the second or third step; later 706 seconds are free at each, and a prompt
        # without advantages costs a pass less.
        assert steps[-3:] == [5, 9, 13] and 2 <= steps[0] <= 3 and min(measured[2:]) >= 8 and max(measured) <= 13
    elif position == 1:  # 176 seconds are free at each step, which is two or three prompts
        assert max(np.diff(steps)) <= 2 and len(steps) >= 8 and max(measured) <= 6
    else:  # four prompts take five steps' time
        assert set(measured) == {4} and 2 <= len(steps) <= 3 and min(np.diff(steps)) >= 4
    assert "(budget 15 %)" in words


@pytest.mark.all
def test_the_pilot_alone_may_exceed_the_budget_and_later_steps_make_up_for_it(checkpoint, tmp_path, monkeypatch):
    trainer = make_trainer(checkpoint, tmp_path, max_steps=12, **SIXTEEN)
    callback, clock = watch(trainer, monkeypatch, budget=0.1, step=100.0, position=10.0, every=1)
    train(trainer)
    assert callback.rows == [] and not callback.path.exists()  # one prompt says nothing of the step
    assert callback.seconds > 0.1 * clock.now
    logged = {name for record in trainer.state.log_history for name in record}
    assert not any(name.startswith("gradscope/") for name in logged)


def test_a_budget_is_refused_beside_what_needs_all_prompts(checkpoint, tmp_path):
    from gradscope.integrations.trl import GradScopeGRPOTrainer

    trainer = make_trainer(checkpoint, tmp_path)
    for budget in (0, 1, -0.5):
        with pytest.raises(InputError):
            GradScopeCallback(trainer, budget=budget)
    with pytest.raises(InputError):
        GradScopeCallback(trainer, budget=0.15, cosines=True)
    lopti = make_trainer(checkpoint, tmp_path, kind=GradScopeGRPOTrainer, methods={"lopti_eta": 0.5})
    with pytest.raises(InputError):
        GradScopeCallback(lopti, budget=0.15)


TOGETHER = """
import json, os, sys, warnings
warnings.simplefilter("ignore")
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from support.trl_runs import make_trainer
from gradscope.integrations.trl import callback as callback_module
out, rank = Path(sys.argv[2]), int(os.environ["RANK"])
prompts = [f"w{i} w{i + 1}" for i in range(4, 36)]
sizes = {"per_device_train_batch_size": 8, "num_generations": 2, "ddp_backend": "gloo", "move": 0.02}
trainer = make_trainer(out / "policy", out / "run", prompts=prompts, max_steps=2, **sizes)
class Clock:
    now = 0.0
    def perf_counter(self):  # each look is a second; another process's clock goes its own way
        self.now += 1 + 5 * rank
        return self.now
callback_module.time = Clock()
own = trainer.training_step
def training_step(*args, **keywords):
    callback_module.time.now += 60 if trainer.state.global_step == 0 else 1e6
    return own(*args, **keywords)
trainer.training_step = training_step
callback = callback_module.GradScopeCallback(trainer, every=1, budget=0.3, micro_batch_size=3)
trainer.add_callback(callback)
trainer.train()
(out / f"{rank}.json").write_text(json.dumps(callback.rows))
"""


@pytest.mark.all
def test_several_processes_draw_and_measure_one_sample(tmp_path):
    save_policy(tmp_path / "policy")
    (code := tmp_path / "together.py").write_text(TOGETHER)
    for ended in launch(code, Path(__file__).parents[2], tmp_path):
        assert ended.status == 0, ended.stderr
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    for a, b in zip(first, second, strict=True):
        assert {n: v for n, v in a.items() if n != "seconds"} == pytest.approx(
            {n: v for n, v in b.items() if n != "seconds"}, rel=1e-12, nan_ok=True
        )
    some, whole = first
    assert some["num_prompts"] == whole["num_prompts"] == 8
    assert 4 <= some["measured_prompts"] < 8 and some["measured_tokens"] < some["num_tokens"]
    assert whole["measured_prompts"] == 8 and whole["measured_tokens"] == whole["num_tokens"]
    assert whole["grad_projection"] == pytest.approx(1, abs=SAME)
