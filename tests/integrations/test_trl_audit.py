"""An audit of TRL's own gradient: the reading of each of its losses is named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.trl_runs import TEMPERATURE, Recorder, make_trainer, needs_trl, save_policy, train

from gradscope import load_policy
from gradscope.integrations.trl import RolloutWriter, batch_from_trl, response_denominators, trl_settings
from gradscope.updates import audit

pytestmark = needs_trl


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.mark.parametrize(
    ("loss_type", "reading"), [("dapo", "token-mean"), ("grpo", "sequence-mean"), ("bnpo", "micro-batches")]
)
def test_the_reading_of_trls_losses_is_named(checkpoint, tmp_path, loss_type, reading):
    small = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 1, "beta": 0.0}
    trainer = make_trainer(checkpoint, tmp_path, loss_type=loss_type, **small)
    recorder = Recorder(trainer)
    train(trainer)
    step = recorder.steps[0]
    batch, loss = batch_from_trl(step["window"], TEMPERATURE), trl_settings(trainer.args).loss
    scales = batch.num_tokens / response_denominators(trainer.args, step["window"])
    told = audit(load_policy(checkpoint), replace(batch, loss_scales=scales), step["gradient"], loss=loss)
    assert (told.kind, told.reading) == ("same", "logged")
    found = audit(load_policy(checkpoint), batch, step["gradient"], loss=loss, micro_batch=4)
    typical = found.readings.set_index("reading")["typical"]
    assert found.kind == "same" and found.odd == ()
    # Where all responses are as long as each other these readings are one.
    assert typical[reading] == pytest.approx(typical.min(), abs=1e-4)


def test_a_constant_divisor_is_the_logs_or_a_factor(checkpoint, tmp_path):
    small = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 1, "beta": 0.0}
    trainer = make_trainer(checkpoint, tmp_path, loss_type="dr_grpo", **small)
    recorder = Recorder(trainer)
    train(trainer)
    step, loss = recorder.steps[0], trl_settings(trainer.args).loss
    batch = batch_from_trl(step["window"], TEMPERATURE)
    divisor = float(response_denominators(trainer.args, step["window"])[0])
    found = audit(load_policy(checkpoint), batch, step["gradient"], loss=loss)
    assert found.factor == pytest.approx(batch.num_tokens / divisor, rel=1e-4)
    scales = torch.full((len(batch),), batch.num_tokens / divisor)
    told = audit(load_policy(checkpoint), replace(batch, loss_scales=scales), step["gradient"], loss=loss)
    assert (told.kind, told.reading) == ("same", "logged")


@pytest.mark.parametrize("strength", [72.0, 1.5, 1.03, 1.0])
def test_a_layers_adapter_b_that_is_scaled_is_named(checkpoint, tmp_path, strength):
    """TRL with a LoRA on two modules of three layers; in the last one B's gradient is scaled while TRL makes it."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    trainer = make_trainer(checkpoint, tmp_path, peft=lora, gradient_accumulation_steps=2, max_steps=1, beta=0.0)
    draw = torch.Generator().manual_seed(0)
    scaled = [name for name, _ in trainer.model.named_parameters() if ".layers.2." in name and "lora_B" in name]
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:  # without it A has no gradient
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=draw)
        if name in scaled:
            parameter.register_hook(lambda own: strength * own)
    trainer.save_model(str(tmp_path / "adapter"))
    writer, recorder = RolloutWriter(trainer), Recorder(trainer)
    trainer.add_callback(writer)
    train(trainer)
    policy = load_policy(tmp_path / "adapter", params="adapter")
    found = audit(policy, writer.folder, recorder.steps[0]["gradient"])
    assert found.reading == "logged" and len(found.parameters) == 12
    if strength == 1.0:
        assert found.kind == "same" and found.parting.empty
        return
    (row,) = found.parting.to_dict("records")
    assert (found.kind, row["layer"], row["group"]) == ("parameters", "2", "adapter B")
    assert row["parameters"] == len(scaled) == len(found.odd) == 2
    assert row["ratio"] == pytest.approx(strength, rel=1e-3)
