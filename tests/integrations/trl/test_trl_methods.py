"""Reweight and Lopti in TRL, against stock GRPOTrainer where they are off and gradscope's trainer where they are on."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from support.cli import complaint
from support.exact import FLOAT32_GRADIENT, sum_rounding
from support.policies import distance
from support.tiers import every
from support.trl_runs import TEMPERATURE, Recorder, gradients, make_trainer, needs_trl, save_policy, train, weights
from torch import Tensor

from gradscope.errors import InputError
from gradscope.integrations.trl.batch import batch_from_trl, trl_settings
from gradscope.integrations.trl.mixin import _refuse_unsupported
from gradscope.objective import StepTokens, Updater, batch_statistics, make_weighting, weigh_step
from gradscope.trainer import TrainConfig
from gradscope.trainer.step import plan_update

pytestmark = needs_trl

CPU = torch.device("cpu")
SUMS = 2 * FLOAT32_GRADIENT
"""Of the gradient's norm: the same sums in float32 by two programs, one of which shares prompts and drops padding."""
REUSE = {"num_iterations": 2, "beta": 0.1, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def ours():
    from gradscope.integrations.trl import GradScopeGRPOTrainer

    return GradScopeGRPOTrainer


def trained(trainer) -> dict[str, Tensor]:
    train(trainer)
    return weights(trainer.model)


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("settings", every(2, [REUSE, {}]), ids=["reused, accumulated, with KL", "plain"])
def test_with_both_methods_off_every_update_is_that_of_grpo_trainer_bit_for_bit(checkpoint, tmp_path, ours, settings):
    settings = settings | {"max_steps": 4, "max_grad_norm": 1.0}
    stock = make_trainer(checkpoint, tmp_path, **settings)
    start = weights(stock.model)
    off = make_trainer(checkpoint, tmp_path, kind=ours, methods={"reweight_alpha": None, "lopti_eta": None}, **settings)
    assert equal(trained(stock), trained(off))
    assert distance(weights(stock.model), start) > 1e-3


@pytest.mark.parametrize("order", every(2, ["low-first", "high-first"]))
@pytest.mark.parametrize(
    "settings",
    every(
        2,
        [
            {"loss_type": "bnpo"},
            {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
            REUSE | {"use_bias_correction_kl": False, "epsilon": 0.02, "epsilon_high": 0.01, "delta": 1.05},
        ],
    ),
    ids=["on-policy", "accumulated", "off-policy with KL and active clips"],
)
def test_the_gradient_of_each_pass_is_that_of_gradscopes_trainer(checkpoint, tmp_path, ours, settings, order):
    alpha, eta = 0.3, 0.5
    methods = {"reweight_alpha": alpha, "lopti_eta": eta, "lopti_order": order}
    trainer = make_trainer(checkpoint, tmp_path, kind=ours, methods=methods, move=0.02, **settings)
    recorder = Recorder(trainer)
    train(trainer)
    assert len(recorder.steps) == 6
    model = copy.deepcopy(trainer.model)
    del model.forward  # TRL's, which is bound to the model that it trained
    loss = trl_settings(trainer.args).loss
    config = TrainConfig(
        model="embedded", steps=1, mini_batch_size=8, questions_per_step=2, group_size=4,
        reweight_alpha=alpha, lopti_eta=eta, lopti_order=order, clip_ratio_low=loss.clip_ratio_low,
        clip_ratio_high=loss.clip_ratio_high, clip_ratio_c=loss.clip_ratio_c, kl_coef=loss.kl_coef,
    )  # fmt: skip
    clipped = 0
    for first, second in zip(recorder.steps[::2], recorder.steps[1::2], strict=True):
        batch = batch_from_trl(first["window"], TEMPERATURE)
        model.load_state_dict(first["weights"], strict=False)
        if batch.old_logprobs is None:
            old = batch_statistics(model, batch, micro_batch_size=8, device=CPU).logprob
            batch = replace(batch, old_logprobs=old)
        update = plan_update(batch, config, torch.Generator())
        assert [part.name for part in update.steps] == (["low", "high"] if order == "low-first" else ["high", "low"])
        for recorded, part in zip((first, second), update.steps, strict=True):
            model.load_state_dict(recorded["weights"], strict=False)
            model.zero_grad()
            updater = Updater(model, None, CPU, micro_batch_size=3)
            clipped += sum(updater.accumulate(part, update.settings)[1:4])
            assert part.batch.num_tokens > 5
            assert distance(recorded["gradient"], gradients(model)) < SUMS
    # The later steps of the last setting are off-policy: there clipping is part of what was compared.
    assert "epsilon" not in settings or clipped > 0


@pytest.mark.parametrize(
    "name", every(2, ["cispo:eps_high=1.02", "top-entropy:q=0.3", "gspo:eps_low=0.01,eps_high=0.02"])
)
def test_under_a_weighting_the_gradient_is_that_of_gradscopes_trainer(checkpoint, tmp_path, ours, name):
    settings = {"num_iterations": 3, "beta": 0.1, "use_bias_correction_kl": False, "loss_type": "bnpo"}
    settings |= {"learning_rate": 1e-3, "move": 0.02}
    trainer = make_trainer(checkpoint, tmp_path, kind=ours, methods={"weighting": name}, **settings)
    recorder = Recorder(trainer)
    train(trainer)
    model = copy.deepcopy(trainer.model)
    del model.forward  # TRL's, which is bound to the model that it trained
    loss, different = trl_settings(trainer.args).loss, 0
    for step in recorder.steps:
        batch = batch_from_trl(step["window"], TEMPERATURE)
        model.load_state_dict(step["weights"], strict=False)
        now = batch_statistics(model, batch, micro_batch_size=8, device=CPU)
        old = now.logprob if batch.old_logprobs is None else batch.old_logprobs
        tokens = (now.logprob, old, batch.advantages, batch.response_mask, loss)
        weighed = replace(batch, advantages=weigh_step(make_weighting(name), *tokens, entropy=now.entropy))
        found = []
        for weighted, part in ((True, weighed), (False, replace(batch, old_logprobs=old))):
            model.zero_grad()
            updater = Updater(model, None, CPU, micro_batch_size=3)
            updater.accumulate(StepTokens("all", part, batch.num_tokens), loss, weighted=weighted)
            found.append(distance(step["gradient"], gradients(model)))
        assert found[0] < SUMS
        different += found[1] > 1e-3
    assert different > 0


@pytest.mark.parametrize("loss_type", every(2, ["dapo", "bnpo", "grpo", "dr_grpo", "luspo", "cispo", "sapo"]))
def test_the_passes_add_up_to_the_whole_loss_of_every_type_with_everything_in_it(checkpoint, tmp_path, ours, loss_type):
    methods = {"reweight_alpha": 0.4, "lopti_eta": 0.5}
    settings = {"loss_type": loss_type, "beta": 0.2, "use_bias_correction_kl": True, "num_iterations": 2}
    trainer = make_trainer(checkpoint, tmp_path, kind=ours, methods=methods, move=0.02, max_steps=1, **settings)
    recorder = Recorder(trainer)
    train(trainer)
    inputs = with_extras(recorder.steps[0]["window"][0])
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = True  # its loss path; nothing is sampled here

    def gradient(name):
        trainer._lopti_pass = name
        trainer.model.zero_grad()
        trainer._compute_loss(trainer.model, inputs).backward()
        return gradients(trainer.model)

    low, high, reweighted = gradient("low"), gradient("high"), gradient(None)
    assert distance({name: low[name] + high[name] for name in low}, reweighted) < sum_rounding(reweighted, low, high)
    assert all(distance(part, reweighted) > 0.05 for part in (low, high))
    trainer.reweight_alpha = None
    factor = 0.4 * inputs["old_per_token_logps"].exp() + 0.6
    inputs["advantages"] = inputs["advantages"][:, None] * factor
    assert distance(reweighted, gradient(None)) < SUMS


def with_extras(inputs):
    """The inputs off-policy, with a tool's tokens in the responses and vLLM's importance weights."""
    generator = torch.Generator().manual_seed(1)
    old = inputs["old_per_token_logps"]
    noise = 0.2 * torch.randn(old.shape, generator=generator)
    return inputs | {
        "old_per_token_logps": (old + noise).clamp(max=0.0),
        "tool_mask": (torch.rand(old.shape, generator=generator) > 0.2).long(),
        "importance_sampling_ratio": 0.5 + torch.rand(old.shape, generator=generator),
    }


@pytest.mark.parametrize("eta", [0, 1])
def test_a_pass_without_tokens_takes_no_step_so_the_update_is_the_plain_one(checkpoint, tmp_path, ours, eta):
    settings = REUSE | {"weight_decay": 0.5, "max_steps": 4}
    stock = trained(make_trainer(checkpoint, tmp_path, **settings))
    trainer = make_trainer(checkpoint, tmp_path, kind=ours, methods={"lopti_eta": eta}, **settings)
    assert equal(trained(trainer), stock)
    assert {int(state["step"]) for state in trainer.optimizer.state.values()} == {4}


@pytest.mark.all
def test_the_log_says_of_all_tokens_what_it_says_without_lopti(checkpoint, tmp_path, ours):
    settings = REUSE | {"learning_rate": 0.0, "epsilon": 0.0, "epsilon_high": 0.0, "move": 0.02, "max_steps": 2}
    records = []
    for methods in ({}, {"lopti_eta": 0.5}, {"lopti_eta": 0.0}, {"lopti_eta": 1.0}):
        trainer = make_trainer(checkpoint, tmp_path, kind=ours, methods=methods, **settings)
        train(trainer)
        records.append(trainer.state.log_history[0])
    plain, *split = records
    assert plain["kl"] > 1e-3
    for record in split:
        for name in ("kl", "entropy", "clip_ratio/low_mean", "clip_ratio/high_mean", "loss"):
            assert record[name] == pytest.approx(plain[name], rel=1e-4, abs=1e-6)
    tokens = split[0]["lopti/tokens_low"], split[0]["lopti/tokens_high"]
    assert min(tokens) > 0 and split[1]["lopti/tokens_low"] == 0
    assert sum(tokens) == split[1]["lopti/tokens_high"] == split[2]["lopti/tokens_low"]


@pytest.mark.parametrize(
    ("methods", "settings", "words"),
    [
        ({"reweight_alpha": 1.5}, {}, "reweight_alpha is 1.5"),
        ({"lopti_eta": -0.1}, {}, "eta is -0.1"),
        ({"lopti_eta": 0.5, "lopti_order": "up"}, {}, "lopti_order is 'up'"),
        ({"reweight_alpha": 0.3}, {"importance_sampling_level": "sequence"}, "importance_sampling_level='sequence'"),
        ({"lopti_eta": 0.5}, {"loss_type": "vespo"}, "loss_type='vespo'"),
        ({"lopti_eta": 0.5}, {"entropy_coef": 0.01}, "an entropy bonus"),
        ({"lopti_eta": 0.5}, {"top_entropy_quantile": 0.2}, "top_entropy_quantile"),
        ({"lopti_eta": 0.5}, {"off_policy_mask_threshold": 0.1}, "off_policy_mask_threshold"),
        ({"lopti_eta": 0.5}, {"optim": "adalomo"}, "adalomo"),
        ({"weighting": "cispos"}, {}, "did you mean cispo?"),
        ({"weighting": "cispo", "lopti_eta": 0.5}, {}, "give one of them"),
        ({"weighting": "random-split"}, {}, "takes two optimizer steps"),
        ({"weighting": "icepop"}, {}, "no 'sampler_logprob'"),
        ({"weighting": "sapo"}, {"loss_type": "sapo"}, "loss_type='sapo'"),
        ({"weighting": "sapo"}, {"beta": 0.1, "use_bias_correction_kl": True}, "use_bias_correction_kl"),
    ],
)
def test_what_the_methods_cannot_do_is_refused_in_one_line(checkpoint, tmp_path, ours, methods, settings, words):
    with pytest.raises(InputError) as caught:
        make_trainer(checkpoint, tmp_path, kind=ours, methods=methods, **settings)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_the_sampler_is_corrected_for_once(checkpoint, tmp_path, ours):
    """vLLM itself is not run here: its settings are put into those of a trainer that was made without it."""
    for name, twice in (("sequence-mask", True), ("dppo-tv:sampler=1", True), ("dppo-tv", False)):
        trainer = make_trainer(checkpoint, tmp_path, kind=ours, methods={"weighting": "cispo"})
        trainer.weighting, trainer.args.use_vllm = make_weighting(name), True
        for correction in (True, False):
            trainer.args.vllm_importance_sampling_correction = correction
            if twice and correction:
                assert "vllm_importance_sampling_correction" in complaint(_refuse_unsupported, trainer)
            else:
                _refuse_unsupported(trainer)
