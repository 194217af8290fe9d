"""A step of TRL's AdamW, reproduced from a checkpoint and the log: each parameter group has settings of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.trl_runs import make_trainer, needs_trl, save_policy, train

from gradscope import load_policy
from gradscope.integrations.trl import RolloutWriter
from gradscope.objective import LossSettings
from gradscope.policy import flat_slices, optimizer_names, read_state
from gradscope.rollouts import read_dump
from gradscope.updates import apply_update, influence, state_step

pytestmark = needs_trl

SETTINGS = {
    "weight_decay": 0.1,
    "learning_rate": 1e-3,
    "max_grad_norm": 0.5,
    "beta": 0.0,
    # The policy is in float64, but TRL's head gives log π in float32: a smaller ε would magnify that rounding where the
    # gradient is small.
    "adam_epsilon": 1e-2,
    "save_strategy": "steps",
    "save_steps": 1,
    "gradient_accumulation_steps": 2,
    "per_device_train_batch_size": 4,
}


def test_the_step_of_a_run_with_weight_decay_is_reproduced_in_every_group(tmp_path):
    trainer = make_trainer(save_policy(tmp_path / "policy"), tmp_path / "run", **SETTINGS)
    trainer.model.double()
    trainer.add_callback(RolloutWriter(trainer))
    train(trainer)
    before, after = (load_policy(tmp_path / f"run/checkpoint-{n}", dtype="float64") for n in (2, 3))
    dump = read_dump(tmp_path / "run" / "gradscope" / "rollouts" / "step_000003.parquet")
    state = read_state(before.path)
    assert [group["weight_decay"] for group in state["param_groups"]] == [0.1, 0.0]
    step = replace(state_step(state), max_grad_norm=0.5)
    given = {"loss": LossSettings.from_log(dump.loss), "step": step, "optimizer_state": state}
    found = apply_update(before, dump.batch, displacement=True, **given)
    assert found.results[0].grad_norm > 0.5
    names, places = iter(optimizer_names(before.model, state)), flat_slices(before.model)
    moved = {name: after.model.get_parameter(name).detach() - before.model.get_parameter(name) for name in places}
    for group in state["param_groups"]:
        own = [next(names) for _ in group["params"]]
        real = torch.cat([moved[name].flatten() for name in own])
        ours = torch.cat([found.displacement[places[name]] for name in own])
        assert (ours - real).norm() < 1e-6 * real.norm()
    whole = torch.cat([part.flatten() for part in moved.values()])
    assert influence(before, dump.batch, **given).update_norm == pytest.approx(whole.norm().item(), rel=1e-6)
