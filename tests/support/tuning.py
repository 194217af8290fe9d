"""Optimizer states that a tuned step starts from."""

from __future__ import annotations

import torch

from gradscope.policy import Policy

BETAS, EPS, STEPS_TAKEN = (0.8, 0.95), 1e-6, 6


def make_state(policy: Policy, betas: tuple[float, float], steps: int) -> dict:
    """An AdamW so many steps old, with moments so large that one gradient hardly changes the second."""
    optimizer = torch.optim.AdamW(policy.model.named_parameters(), lr=0.5, betas=betas, eps=EPS)
    generator = torch.Generator().manual_seed(5)
    for parameter in policy.model.parameters():
        first, second = (torch.randn(parameter.shape, generator=generator, dtype=policy.dtype) for _ in range(2))
        optimizer.state[parameter] = {
            "step": torch.tensor(float(steps)),
            "exp_avg": 1e-3 * first,
            "exp_avg_sq": 1e-2 * second.exp(),
        }
    return optimizer.state_dict()
