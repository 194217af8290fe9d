"""What analyses/measure/proxies.py measures beside a token table."""

from __future__ import annotations

import pytest
import torch
from support.policies import make_policy
from torch import nn

from analyses.measure.proxies import position_norms
from gradscope.rollouts import Response, collate


def test_where_there_is_one_position_its_gradient_is_that_of_all_linear_weights():
    policy = make_policy("llama")
    batch = collate([Response([5], [10], 0, 0.7, None, 1.0, [-0.1])])
    logits = policy.model(input_ids=torch.tensor([[5]])).logits[0, 0] / 0.7
    weights = [module.weight for module in policy.model.modules() if isinstance(module, nn.Linear)]
    gradients = torch.autograd.grad(torch.log_softmax(logits, -1)[10], weights)
    wanted = torch.stack([gradient.norm() for gradient in gradients]).norm().item()
    assert position_norms(policy.model, batch, 0) == pytest.approx([wanted], rel=1e-5)


def test_later_tokens_pull_at_an_earlier_position():
    policy = make_policy("llama")
    one, two = (
        collate([Response([5, 6], [10, 11], 0, 1.0, None, 1.0, None, response_mask=mask)])
        for mask in ([True, False], [True, True])
    )
    alone, together = position_norms(policy.model, one, 0), position_norms(policy.model, two, 0)
    assert len(alone) == 1 and len(together) == 2
    assert together[0] != pytest.approx(alone[0], rel=1e-3)
