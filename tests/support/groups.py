"""Intervals' summed gradients by brute force."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradscope.objective import LossSettings
from gradscope.objective.equations import grpo_advantages
from gradscope.policy import Policy
from gradscope.rollouts import TokenBatch

# Old log-probabilities of the batches drift by about 0.1: narrow clips are active on both sides, and so is the KL.
NARROW = LossSettings(clip_ratio_low=0.05, clip_ratio_high=0.04, clip_ratio_c=1.1, kl_coef=0.2)


EDGES = (0.0, 0.25, 0.5, 0.75, 1.0)


# transformers computes norms, softmax and rotary embeddings in float32 even in a float64 model; padding reorders them.
CASTS = 2e-6


@dataclass(frozen=True)
class Brute:
    """One gradient per token, by plain autograd on its response alone."""

    gradients: Tensor
    """w_t-weighted: −w_t/num_tokens · ∇ log π_t, [tokens, P] in float64."""
    interval: list[int]
    prompt: list[int]
    weight: list[float]
    clipped: int

    def sums(self, prompts: set[int] | None = None) -> Tensor:
        """G_a of the tokens of these prompts (all of them), and G as the last row: [A + 1, P]."""
        out = torch.zeros(5, self.gradients.shape[1], dtype=torch.float64)
        for gradient, a, p in zip(self.gradients, self.interval, self.prompt, strict=True):
            if prompts is None or p in prompts:
                out[a] += gradient
                out[4] += gradient
        return out


def flat_gradient(policy: Policy, scalar: Tensor, *, retain: bool = False) -> Tensor:
    parameters = list(policy.model.parameters())
    found = torch.autograd.grad(scalar, parameters, retain_graph=retain, allow_unused=True)
    return torch.cat(
        [(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(parameters, found, strict=True)]
    )


def brute_force(policy: Policy, batch: TokenBatch, settings: LossSettings) -> Brute:
    """A double loop over responses and tokens, with w_t written out as in Eq. 2."""
    gradients, intervals, prompts, weights, num_clipped = [], [], [], [], 0
    advantages = batch.advantages
    if advantages is None:
        advantages = grpo_advantages(batch.rewards, batch.group_ids)[:, None].expand(batch.input_ids.shape)
    for row in range(len(batch)):
        ids, kept = batch.sequence(row)
        first = int(batch.attention_mask[row].nonzero()[0])
        logits = policy.model(input_ids=ids[None], use_cache=False).logits[0].double()
        for t in kept.tolist():
            logprob = torch.log_softmax(logits[t - 1] / batch.temperature[row], -1)[ids[t]]
            own, advantage = logprob.item(), advantages[row, first + t].item()
            old = own if batch.old_logprobs is None else batch.old_logprobs[row, first + t].item()
            if settings.reweight_alpha is not None:
                advantage *= settings.reweight_alpha * math.exp(old) + 1 - settings.reweight_alpha
            ratio, dual = math.exp(own - old), settings.clip_ratio_c or math.inf
            clipped = (advantage > 0 and ratio > 1 + settings.clip_ratio_high) or (
                advantage < 0 and (ratio < 1 - settings.clip_ratio_low or ratio > dual)
            )
            weight = 0.0 if clipped else ratio * advantage
            if batch.ref_logprobs is not None:
                ref = batch.ref_logprobs[row, first + t].item()
                weight += settings.kl_coef * (math.exp(ref - own) - 1)
            gradients.append(-weight / batch.num_tokens * flat_gradient(policy, logprob, retain=True))
            intervals.append(sum(math.exp(old) >= edge for edge in EDGES[1:-1]))
            prompts.append(int(batch.group_ids[row]))
            weights.append(weight)
            num_clipped += clipped
    return Brute(torch.stack(gradients), intervals, prompts, weights, num_clipped)


def cosine(a: Tensor, b: Tensor) -> float:
    return (a @ b / (a.norm() * b.norm())).item()
