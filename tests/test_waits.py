"""An optimizer step reads as many numbers of a deep model: a GPU is never waited for once a parameter."""

from __future__ import annotations

from copy import copy
from typing import Any

import pytest
import torch
from support.policies import make_policy
from support.training import make_steps
from torch.utils._python_dispatch import TorchDispatchMode

from gradscope.objective import LossSettings, Updater
from gradscope.policy import AdamWSettings, AdamWState, Policy, find_blocks

READ = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_consecutive", "is_nonzero"}
"""Operations that give the host a number, or a tensor whose shape depends on numbers."""


class Reads(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.count += func._schema.name.partition("::")[2] in READ
        return func(*args, **(kwargs or {}))


def with_blocks(blocks: int) -> Policy:
    like = make_policy("llama").model
    config = copy(like.config)
    config.num_hidden_layers, config.layer_types = blocks, None
    model = type(like)(config)
    return Policy(model, None, find_blocks(model))


def optimizer_step(policy: Policy) -> None:
    (part,) = make_steps(policy)
    optimizer = torch.optim.SGD(policy.model.parameters(), 1e-3)
    updater = Updater(policy.model, optimizer, policy.device, micro_batch_size=3)
    assert updater.step(part, LossSettings()).outcome == "taken"


def metric(policy: Policy) -> None:
    moments = {name: torch.rand_like(p) for name, p in policy.model.named_parameters()}
    state = AdamWState(moments, dict.fromkeys(moments, 3), dict.fromkeys(moments, AdamWSettings()), 1.0)
    state.scale(policy.model, torch.ones(sum(map(torch.numel, moments.values()))))


@pytest.mark.parametrize("work", [optimizer_step, metric])
def test_no_number_is_read_once_a_parameter(work):
    counts = []
    for policy in (with_blocks(1), with_blocks(4)):
        with Reads() as reads:
            work(policy)
        counts.append(reads.count)
    assert counts[0] == counts[1]
