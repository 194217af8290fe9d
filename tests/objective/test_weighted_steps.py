"""An optimizer step under a weighting trains the published loss: held against that loss, differentiated as printed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.policies import make_batch, make_policy
from support.refusals import refused
from support.tiers import every
from torch import Tensor

from gradscope.objective import LossSettings, Updater, Weighting, make_weighting, resolve_advantages, split_steps
from gradscope.rollouts import TokenBatch

SETTINGS = LossSettings(clip_ratio_low=0.05, clip_ratio_high=0.04, kl_coef=0.0)


def cispo(log_pi: Tensor, batch: TokenBatch, _entropy: Tensor) -> Tensor:
    ratio = (log_pi - batch.old_logprobs).exp().clamp(max=1.05).detach()
    return -ratio * batch.advantages * log_pi


def sapo(log_pi: Tensor, batch: TokenBatch, _entropy: Tensor) -> Tensor:
    ratio = (log_pi - batch.old_logprobs).exp()
    tau = torch.where(batch.advantages > 0, 1.0, 1.05)
    return -4 / tau * torch.sigmoid(tau * (ratio - 1)) * batch.advantages


def top_entropy(log_pi: Tensor, batch: TokenBatch, entropy: Tensor) -> Tensor:
    ratio = (log_pi - batch.old_logprobs).exp()
    surrogate = torch.min(ratio * batch.advantages, ratio.clamp(0.95, 1.04) * batch.advantages)
    return -surrogate * (entropy >= torch.quantile(entropy[batch.response_mask], 0.6))


def icepop(log_pi: Tensor, batch: TokenBatch, _entropy: Tensor) -> Tensor:
    ratio, of_sampler = (log_pi - batch.old_logprobs).exp(), (batch.old_logprobs - batch.sampler_logprobs).exp()
    surrogate = torch.min(ratio * batch.advantages, ratio.clamp(0.95, 1.04) * batch.advantages)
    return -surrogate * torch.where((of_sampler >= 0.9) & (of_sampler <= 1.1), of_sampler, 0.0)


def fipo(log_pi: Tensor, batch: TokenBatch, _entropy: Tensor) -> Tensor:
    ratio = (log_pi - batch.old_logprobs).exp()
    surrogate = torch.min(ratio * batch.advantages, ratio.clamp(0.95, 1.04) * batch.advantages)
    moved = torch.where(batch.response_mask, ratio.detach().log(), 0.0)
    places = torch.arange(moved.shape[1])
    fades = (2.0 ** (-(places[:, None] - places).double() / 4)).tril()  # of later token, of token
    return -surrogate * (moved @ fades).exp().clamp(1, 1.5)


LOSSES = {
    "cispo:eps_high=1.05": cispo,
    "sapo": sapo,
    "fipo:decay_rate=4,clip_range=0.5": fipo,
    "top-entropy:q=0.4": top_entropy,
    "icepop:low=0.9,high=1.1": icepop,
}


def make_mini_batch(policy) -> TokenBatch:
    batch = make_batch(policy, side="right")
    batch = replace(batch, old_logprobs=batch.old_logprobs.double(), advantages=resolve_advantages(batch).double())
    generator = torch.Generator().manual_seed(4)
    drift = 0.1 * torch.randn(batch.input_ids.shape, generator=generator, dtype=torch.float64)
    return replace(batch, sampler_logprobs=batch.old_logprobs + drift)


def gradient_of(policy, batch: TokenBatch, loss: Callable[..., Tensor]) -> list[Tensor]:
    known = {name: getattr(batch, name).nan_to_num() for name in ("old_logprobs", "sampler_logprobs")}
    batch = replace(batch, **known)  # NaN at what was not sampled would come back as 0 · NaN
    logits = policy.model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits[:, :-1]
    logits = logits / batch.temperature[:, None, None].double()
    distribution = torch.log_softmax(logits, -1)
    own = distribution.gather(2, batch.input_ids[:, 1:, None])[..., 0]
    log_pi, entropy = torch.zeros(2, *batch.input_ids.shape, dtype=torch.float64)
    log_pi = torch.cat([log_pi[:, :1], own], 1)
    entropy = torch.cat([entropy[:, :1], -(distribution.exp() * distribution).sum(-1)], 1).detach()
    total = torch.where(batch.response_mask, loss(log_pi, batch, entropy), 0.0).sum() / batch.num_tokens
    return list(torch.autograd.grad(total, list(policy.model.parameters())))


def stepped(policy, batch: TokenBatch, weighting: Weighting, settings: LossSettings = SETTINGS) -> list[Tensor]:
    """What a step of SGD, of rate 1 and without clipping, takes off each parameter."""
    before = [p.detach().clone() for p in policy.model.parameters()]
    optimizer = torch.optim.SGD(policy.model.parameters(), lr=1.0)
    updater = Updater(policy.model, optimizer, policy.device, 2, None)
    (part,) = split_steps(batch, len(batch), [("all", batch.response_mask)])
    result = updater.step(part, settings, weighting=weighting)
    assert result.outcome == "taken"
    return [old - p.detach() for old, p in zip(before, policy.model.parameters(), strict=True)]


@pytest.mark.parametrize("name", every(2, LOSSES))
def test_a_step_is_on_the_gradient_of_the_printed_loss(name):
    policy = make_policy("llama", torch.float64)
    batch = make_mini_batch(policy)
    expected = gradient_of(policy, batch, LOSSES[name])
    for found, wanted in zip(stepped(policy, batch, make_weighting(name)), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_the_kl_part_stays():
    policy, other = make_policy("llama", torch.float64), make_policy("llama", torch.float64)
    batch = make_mini_batch(policy)
    settings = replace(SETTINGS, kl_coef=0.3)
    plain, with_kl = (
        stepped(policy, batch, make_weighting("grpo")),
        stepped(other, batch, make_weighting("grpo"), settings),
    )
    assert not all(torch.allclose(a, b) for a, b in zip(plain, with_kl, strict=True))
    usual = make_policy("llama", torch.float64)
    before = [p.detach().clone() for p in usual.model.parameters()]
    optimizer = torch.optim.SGD(usual.model.parameters(), lr=1.0)
    (part,) = split_steps(batch, len(batch), [("all", batch.response_mask)])
    Updater(usual.model, optimizer, usual.device, 2, None).step(part, settings)
    for old, new, found in zip(before, usual.model.parameters(), with_kl, strict=True):
        torch.testing.assert_close(old - new.detach(), found, rtol=1e-5, atol=1e-8)


class Two(Weighting):
    NAME = "two"

    def factors(self, tokens):
        return {"one": tokens.plain, "other": tokens.plain}


def test_a_weighting_of_several_steps_is_refused():
    policy = make_policy("llama", torch.float64)
    with refused():
        stepped(policy, make_mini_batch(policy), Two())
