"""What is computed inside `torch.inference_mode` is what is computed outside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
import torch
from support.policies import make_batch, make_policy, save_checkpoint
from support.tiers import every

import gradscope
from gradscope.policy import Policy
from gradscope.rollouts import TokenBatch
from gradscope.updates import audit, influence

CALLS: dict[str, Callable[[Policy, TokenBatch], Any]] = {
    "measure": gradscope.measure,
    "interval_gradients": lambda policy, batch: gradscope.interval_gradients(policy, batch).table,
    "influence": lambda policy, batch: influence(policy, batch).contributions,
    "compare": lambda policy, batch: gradscope.compare(policy, batch, ["reweight"]).table,
    "audit": lambda policy, batch: (
        audit(policy, batch, {name: torch.ones_like(p) for name, p in policy.model.named_parameters()}).readings
    ),
    "apply_update": lambda policy, batch: gradscope.apply_update(policy, batch).after.logprob,
}


@pytest.mark.parametrize("name", every(6, CALLS))
def test_a_call_inside_inference_mode_gives_what_it_gives_outside(name, tmp_path):
    policy = make_policy("llama")
    wanted = CALLS[name](policy, make_batch(policy))
    with torch.inference_mode():
        loaded = gradscope.load_policy(save_checkpoint(tmp_path, "llama", tokenizer=False), device="cpu")
        found = CALLS[name](loaded, make_batch(policy))
    if isinstance(wanted, pd.DataFrame):
        pd.testing.assert_frame_equal(found, wanted, rtol=1e-5)
    else:
        torch.testing.assert_close(found, wanted)
    assert not any(p.is_inference() for p in loaded.model.parameters())
