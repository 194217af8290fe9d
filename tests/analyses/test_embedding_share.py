"""What analyses/measure/embedding_share.py measures of the table that embedding and head share."""

from __future__ import annotations

import pytest
import torch
from support.gradients import token_gradients
from support.policies import make_batch, make_policy

from analyses.measure.embedding_share import TABLE, tabulate


def test_its_norm_is_that_of_the_tables_own_gradient():
    policy = make_policy("qwen2", torch.float64)
    batch = make_batch(policy)
    found = tabulate(policy, batch, 1000)
    gradients = token_gradients(policy, batch)
    embedding = policy.model.get_input_embeddings().weight
    place = 0
    for parameter in policy.model.parameters():
        if parameter is embedding:
            break
        place += parameter.numel()
    wanted = gradients[:, place : place + embedding.numel()].norm(dim=1)
    assert found[TABLE].tolist() == pytest.approx(wanted.tolist(), rel=1e-5)
    assert found["param_grad_norm"].tolist() == pytest.approx(gradients.norm(dim=1).tolist(), rel=1e-5)
