"""Optimizer steps and their first-order predictions, by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from gradscope.objective import LossSettings
from gradscope.objective.equations import grpo_advantages
from gradscope.policy import Policy
from gradscope.rollouts import TokenBatch
from gradscope.updates import StepSettings
from gradscope.updates.influence import Influence
from support.gradients import token_gradients

# Old log-probabilities of the batches drift by about 0.1: narrow clips are active on both sides, and so is the KL.
NARROW = LossSettings(clip_ratio_low=0.05, clip_ratio_high=0.04, clip_ratio_c=1.1, kl_coef=0.2)


BETAS, EPS = (0.8, 0.95), 1e-6


SETTINGS = {"betas": BETAS, "eps": EPS}


STEPS = [
    StepSettings("sgd", 1e-3, max_grad_norm=0.01),
    StepSettings("sgd", 1e-2, 0.1, max_grad_norm=1e6),
    StepSettings("adamw", 1e-4, 0.1, max_grad_norm=0.01, **SETTINGS),
    StepSettings("adamw", 1e-3, 0.2, max_grad_norm=None, **SETTINGS),
]


@dataclass(frozen=True)
class Brute:
    """Single-token gradients by plain autograd, and Eq. 2's weights token by token."""

    jacobian: Tensor
    """∇ log π_t, [tokens, P] in float64."""
    interval: list[int]
    policy: list[float]
    kl: list[float]
    logprob: list[float]
    entropy: list[float]

    def gradients(self) -> dict[str, Tensor]:
        """The gradient of the loss by source."""
        out = {name: torch.zeros(self.jacobian.shape[1], dtype=torch.float64) for name in ("0", "1", "2", "3", "kl")}
        for gradient, interval, policy, kl in zip(self.jacobian, self.interval, self.policy, self.kl, strict=True):
            out[str(interval)] -= policy / len(self.kl) * gradient
            out["kl"] -= kl / len(self.kl) * gradient
        return out


def brute_force(policy: Policy, batch: TokenBatch, settings: LossSettings) -> Brute:
    intervals, policies, kls, owns, entropies = [], [], [], [], []
    advantages = grpo_advantages(batch.rewards, batch.group_ids)
    for row in range(len(batch)):
        ids, kept = batch.sequence(row)
        first = int(batch.attention_mask[row].nonzero()[0])
        logits = policy.model(input_ids=ids[None], use_cache=False).logits[0].detach().double()
        for t in kept.tolist():
            log_softmax = torch.log_softmax(logits[t - 1] / batch.temperature[row], -1)
            own = log_softmax[ids[t]].item()
            old, ref = (values[row, first + t].item() for values in (batch.old_logprobs, batch.ref_logprobs))
            ratio, advantage = math.exp(own - old), advantages[row].item()
            clipped = (advantage > 0 and ratio > 1 + settings.clip_ratio_high) or (
                advantage < 0 and (ratio < 1 - settings.clip_ratio_low or ratio > settings.clip_ratio_c)
            )
            intervals.append(sum(math.exp(old) >= edge for edge in (0.25, 0.5, 0.75)))
            policies.append(0.0 if clipped else ratio * advantage)
            kls.append(settings.kl_coef * (math.exp(ref - own) - 1))
            owns.append(own)
            entropies.append(-(log_softmax.exp() @ log_softmax).item())
    assert 0 < policies.count(0.0) < len(policies)
    return Brute(token_gradients(policy, batch), intervals, policies, kls, owns, entropies)


def warm_state(policy: Policy, names: list[str] | None = None, steps: int = 7) -> dict:
    """state_dict of an AdamW some steps old, over these parameters; its moments span orders of magnitude."""
    named = dict(policy.model.named_parameters())
    names = list(named) if names is None else names
    optimizer = torch.optim.AdamW([(name, named[name]) for name in names], lr=0.5, betas=BETAS, eps=EPS)
    generator = torch.Generator().manual_seed(5)
    for i, name in enumerate(names):
        first, second = (torch.randn(named[name].shape, generator=generator, dtype=policy.dtype) for _ in range(2))
        optimizer.state[named[name]] = {
            "step": torch.tensor(float(steps + i % 3)),
            "exp_avg": 1e-3 * first,
            "exp_avg_sq": 1e-5 * second.exp(),
        }
    return optimizer.state_dict()


def flat_state(policy: Policy, state: dict, key: str, default: float) -> Tensor:
    """Moments or step counts [P], in the order of the parameters; `default` where the state has none."""
    names = state["param_groups"][0]["param_names"]
    parts = []
    for name, parameter in policy.model.named_parameters():
        value = state["state"][names.index(name)][key] if name in names else torch.tensor(default)
        parts.append(value.double().expand(parameter.shape).flatten())
    return torch.cat(parts)


def split_step(policy: Policy, brute: Brute, step: StepSettings, state: dict | None) -> dict[str, Tensor]:
    """Δθ of one step by source, written out as in the optimizers' papers."""
    gradients = brute.gradients()
    theta = torch.cat([p.detach().double().flatten() for p in policy.model.parameters()])
    held = torch.ones_like(theta)
    if state is not None:
        held = (flat_state(policy, state, "step", -1.0) >= 0).double()
    gradients = {name: held * gradient for name, gradient in gradients.items()}
    norm = sum(gradients.values()).norm().item()
    clip = 1.0 if step.max_grad_norm is None else min(1.0, step.max_grad_norm / (norm + 1e-6))
    decay = {"decay": -step.learning_rate * step.weight_decay * held * theta}
    if step.optimizer == "sgd":
        return {name: -step.learning_rate * clip * gradient for name, gradient in gradients.items()} | decay
    m = v = n = torch.zeros_like(theta)
    if state is not None:
        m, v, n = (flat_state(policy, state, key, 0.0) for key in ("exp_avg", "exp_avg_sq", "step"))
    beta1, beta2 = step.betas
    second = (beta2 * v + (1 - beta2) * (clip * sum(gradients.values())) ** 2) / (1 - beta2 ** (n + 1))
    rate = -step.learning_rate / (1 - beta1 ** (n + 1)) / (second.sqrt() + step.eps)
    parts = {name: rate * (1 - beta1) * clip * gradient for name, gradient in gradients.items()}
    return parts | {"momentum": rate * beta1 * m} | decay


def contributions_of(result: Influence) -> dict[str, Tensor]:
    table = result.contributions
    return {name.removeprefix("by."): torch.tensor(table[name].to_numpy(copy=True)) for name in table if "by." in name}


def assert_split_as(result: Influence, brute: Brute, parts: dict[str, Tensor], tolerance: float) -> None:
    found = contributions_of(result)
    assert list(found) == list(parts)
    for name, part in parts.items():
        wanted = brute.jacobian @ part
        torch.testing.assert_close(found[name], wanted, rtol=0, atol=tolerance * wanted.abs().max().item())
    assert result.update_norm == pytest.approx(sum(parts.values()).norm().item(), rel=tolerance)
