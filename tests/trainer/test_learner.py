"""What trains: no noise, activations recomputed, bfloat16, low-rank adapters, and the launches that are refused."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from support.policies import distance, make_batch, make_model, make_policy, save_checkpoint
from support.refusals import refused
from support.tiers import every
from support.training import make_learner, make_steps
from torch import Tensor

from gradscope import load_policy
from gradscope.objective import StepTokens, batch_statistics
from gradscope.trainer import TrainConfig
from gradscope.trainer.checkpoints import restore_checkpoint, save_checkpoint as save_learner
from gradscope.trainer.learner import Learner, build_learner

NOISE = {
    "gpt2": {"attn_pdrop": 0.2, "resid_pdrop": 0.2, "embd_pdrop": 0.2},
    "opt": {"dropout": 0.2, "attention_dropout": 0.2, "layerdrop": 0.5},
    "phi": {"attention_dropout": 0.2, "resid_pdrop": 0.2, "embd_pdrop": 0.2},
    "gpt_neox": {"attention_dropout": 0.2, "hidden_dropout": 0.2},
    "mixtral": {"attention_dropout": 0.2, "router_jitter_noise": 0.2},
    "qwen2": {"attention_dropout": 0.2},
}
"""Where each architecture keeps what makes it random in training mode."""


def gradients(learner: Learner, part: StepTokens, **settings: object) -> dict[str, Tensor]:
    """The gradient of one pass by parameter name."""
    with learner.computing():
        learner.updater.accumulate(part, TrainConfig(**settings).loss)
    found = {n: p.grad.clone() for n, p in learner.policy.model.named_parameters() if p.grad is not None}
    learner.optimizer.zero_grad()
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Tiny checkpoints with tokenizers, by architecture."""
    root = tmp_path_factory.mktemp("models")
    return {name: save_checkpoint(root / name, name) for name in ("qwen2", "llama", "gpt2", "mixtral")}


@pytest.mark.parametrize("name", every(3, NOISE))
def test_the_policy_has_no_noise_in_training_mode_whatever_its_configuration_says(name, tmp_path):
    noisy = make_model(name)
    for setting, value in NOISE[name].items():
        assert hasattr(noisy.config, setting)
        setattr(noisy.config, setting, value)
    noisy.save_pretrained(tmp_path / name)
    learner, batch = make_learner(tmp_path / name), make_batch(make_policy(name))
    plain = learner.statistics(batch).logprob
    learner.policy.model.train()
    assert torch.equal(learner.statistics(batch).logprob, plain)
    # The noise is real: the same folder without the learner's hand has it.
    left = load_policy(tmp_path / name).model.train()
    device = torch.device("cpu")
    assert not torch.allclose(batch_statistics(left, batch, micro_batch_size=3, device=device).logprob, plain)


@pytest.mark.parametrize("name", ["qwen2", "gpt2", "mixtral"])
def test_gradient_checkpointing_changes_no_gradient_and_recomputes_every_block(name, folders):
    plain, frugal = make_learner(folders[name]), make_learner(folders[name], gradient_checkpointing=True)
    part = make_steps(plain.policy)[0]
    calls = []
    # Of a part of the block: transformers 5.24 recomputes the block without calling its own hooks.
    part_of_block = next(frugal.policy.blocks[1].children())
    hook = part_of_block.register_forward_pre_hook(lambda *_: calls.append(1))
    ours = gradients(frugal, part)
    hook.remove()
    assert len(calls) == 4  # two micro-batches, forward and backward
    # Rounding: without checkpointing, prompts are computed once and tokens go through the network in another order.
    assert distance(ours, gradients(plain, part)) < 1e-5
    # Sampling puts the model into eval mode and back: the next pass recomputes too.
    assert frugal.policy.model.training


def test_bfloat16_is_of_the_passes_alone_and_near_float32(folders):
    plain, mixed = make_learner(folders["qwen2"]), make_learner(folders["qwen2"], precision="bfloat16")
    part = make_steps(plain.policy)[0]
    # On-policy: rounding carries no token across the edge of clipping.
    part = replace(part, batch=replace(part.batch, old_logprobs=None, ref_logprobs=None))
    ours, exact = gradients(mixed, part), gradients(plain, part)
    # Eight bits of mantissa round by up to 2⁻⁹ per operation; some dozens of them follow one another.
    assert 1e-3 < distance(ours, exact) < 0.05
    mixed.updater.step(part, TrainConfig().loss)
    state = mixed.optimizer.state_dict()["state"]
    kept = [*mixed.policy.model.parameters(), *ours.values(), *(m for s in state.values() for m in s.values())]
    assert {tensor.dtype for tensor in kept} == {torch.float32}


def test_a_pass_in_bfloat16_sees_the_weights_that_the_pass_before_it_made(folders):
    one, other = (make_learner(folders["qwen2"], precision="bfloat16") for _ in range(2))
    steps = make_steps(one.policy, size=3)
    with one.computing():  # as the loop does it: autocast keeps copies of the weights
        together = [one.updater.step(part, TrainConfig().loss).grad_norm for part in steps]
    apart = []
    for part in steps:
        with other.computing():
            apart.append(other.updater.step(part, TrainConfig().loss).grad_norm)
    assert together == apart


@pytest.mark.filterwarnings("error")  # what peft asks of transformers, too
@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_adapters_alone_are_trained_and_the_reference_is_the_policy_without_them(name, folders):
    learner = make_learner(folders[name], lora_rank=2, kl_coef=0.1)
    base = load_policy(folders[name])
    parts = make_steps(base, size=3)
    for part in parts:
        learner.updater.step(part, TrainConfig().loss)
    changed = {n for n, p in learner.policy.model.named_parameters() if p.requires_grad}
    assert changed and all(".lora_" in name for name in changed)
    assert len(learner.optimizer.state_dict()["param_groups"][0]["param_names"]) == len(changed)
    original = dict(base.model.named_parameters())
    for parameter, frozen in learner.policy.model.named_parameters():
        if ".lora_" not in parameter:
            assert torch.equal(frozen, original[parameter.replace(".base_layer.", ".")]), parameter
    expected = batch_statistics(base.model, parts[0].batch, micro_batch_size=3, device=base.device).logprob
    assert torch.equal(learner.reference_logprobs(parts[0].batch), expected)
    assert not torch.allclose(learner.statistics(parts[0].batch).logprob, expected, atol=1e-3)


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_merged_weights_are_those_of_peft_under_the_plain_models_names(name, folders):
    learner = make_learner(folders[name], lora_rank=2)
    for part in make_steps(load_policy(folders[name]), size=3):
        learner.updater.step(part, TrainConfig().loss)
    plain = dict(load_policy(folders[name]).model.named_parameters())
    # peft merges in place: in a copy.
    merged = dict(copy.deepcopy(learner.adapters).merge_and_unload().named_parameters())
    with learner.computing():
        ours = dict(learner.weights())
    assert ours.keys() == plain.keys() == merged.keys()
    assert all(torch.equal(ours[n], merged[n]) for n in ours)
    assert sum(not torch.equal(ours[n], plain[n]) for n in ours) >= 3


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_a_checkpoint_of_adapters_is_a_plain_policy_with_the_same_logprobs_and_the_adapters_by_themselves(
    name, folders, tmp_path
):
    from peft import PeftModel

    learner = make_learner(folders[name], lora_rank=2)
    base = load_policy(folders[name])
    part = make_steps(base)[0]
    learner.updater.step(part, TrainConfig().loss)
    folder = save_learner(tmp_path, 1, learner)
    loaded = load_policy(folder)
    assert not any(".lora_" in n for n, _ in loaded.model.named_parameters())

    def logprobs(model) -> Tensor:
        return batch_statistics(model, part.batch, micro_batch_size=3, device=base.device).logprob

    wanted = learner.statistics(part.batch).logprob
    # (W + BA)x and Wx + BAx are rounded apart, some 1e-7 a layer, against logits of about 3.
    torch.testing.assert_close(logprobs(loaded.model), wanted, atol=2e-5, rtol=0)
    adapted = PeftModel.from_pretrained(base.model, folder / "adapter").eval()
    assert torch.equal(logprobs(adapted.base_model.model), wanted)
    assert json.loads((folder / "adapter/adapter_config.json").read_text())["r"] == 2


def test_adapters_go_on_from_a_checkpoint_to_the_same_numbers(folders, tmp_path):
    first = make_learner(folders["qwen2"], lora_rank=2)
    parts = make_steps(load_policy(folders["qwen2"]), size=3)
    first.updater.step(parts[0], TrainConfig().loss)
    folder = save_learner(tmp_path, 1, first)
    second = make_learner(folders["qwen2"], folder, lora_rank=2)
    restore_checkpoint(folder, second)
    results = [learner.updater.step(parts[1], TrainConfig().loss) for learner in (first, second)]
    assert results[0] == results[1]
    again = dict(second.policy.model.named_parameters())
    assert all(torch.equal(p, again[n]) for n, p in first.policy.model.named_parameters())


def test_adapters_start_from_the_seed(folders):
    starts = [make_learner(folders["qwen2"], lora_rank=2, seed=seed) for seed in (0, 0, 1)]
    factors = [dict(learner.policy.model.named_parameters()) for learner in starts]
    name = next(n for n in factors[0] if ".lora_A." in n)
    assert torch.equal(factors[0][name], factors[1][name])
    assert not torch.equal(factors[0][name], factors[2][name])


def test_the_reference_stays_what_the_policy_was(folders):
    learner = make_learner(folders["llama"], kl_coef=0.1)
    part = make_steps(learner.policy)[0]
    before = learner.statistics(part.batch).logprob
    learner.updater.step(part, TrainConfig().loss)
    assert torch.equal(learner.reference_logprobs(part.batch), before)
    assert not torch.allclose(learner.statistics(part.batch).logprob, before, atol=1e-3)
    assert make_learner(folders["llama"], kl_coef=0.0).reference is None


@pytest.mark.parametrize(
    "environment",
    [
        {"WORLD_SIZE": "2"},
        {"ACCELERATE_MIXED_PRECISION": "bf16"},
        {"ACCELERATE_MIXED_PRECISION": "fp16"},
        {"ACCELERATE_USE_FSDP": "true"},
    ],
)
def test_a_launch_that_would_train_otherwise_than_it_says_is_refused(environment, folders, monkeypatch):
    accelerator = Accelerator(cpu=True)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with refused():
        build_learner(TrainConfig(model=str(folders["llama"])), accelerator)
