"""An audit of TRL's own gradient: the reading of each of its losses is named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.trl_runs import TEMPERATURE, Recorder, make_trainer, needs_trl, save_policy, train

from gradscope import load_policy
from gradscope.integrations.trl import batch_from_trl, response_denominators, trl_settings
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
