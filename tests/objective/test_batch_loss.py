"""Loss and weights of a batch, against Eq. 1 differentiated by autograd and Eq. 2 written out token by token."""

import math
from dataclasses import replace

import pytest
import torch
from support.losses import weight_by_loop
from support.refusals import refused
from torch import Tensor

from gradscope.objective import PAPER, LossSettings, batch_loss, batch_weights, fill_unknown, resolve_advantages
from gradscope.rollouts import Response, TokenBatch, collate

NAN = math.nan
# Old and reference log-probabilities below differ from the policy's by about 0.2: clips, dual clip and KL are active.
NARROW = LossSettings(clip_ratio_low=0.05, clip_ratio_high=0.04, clip_ratio_c=1.1, kl_coef=0.2)
SETTINGS = [PAPER, NARROW, replace(NARROW, reweight_alpha=0.3), replace(NARROW, clip_ratio_c=None, kl_coef=0)]


@pytest.fixture(scope="module")
def batch() -> TokenBatch:
    """Three prompts of two responses each, with a hole in the mask; old and reference log-probabilities half known."""
    generator = torch.Generator().manual_seed(0)

    def numbers(length: int) -> list[float]:
        values = torch.empty(length).uniform_(-2.0, -0.1, generator=generator)
        return torch.where(torch.rand(length, generator=generator) < 0.3, NAN, values).tolist()

    return collate(
        [
            Response(
                prompt_ids=[5, 6],
                response_ids=[7] * length,
                group=row // 2,
                reward=float(row % 3),
                old_logprobs=numbers(length),
                ref_logprobs=numbers(length),
                response_mask=[s != 2 for s in range(length)],
            )
            for row, length in enumerate([9, 4, 12, 1, 8, 6])
        ]
    )


@pytest.fixture(scope="module")
def logprobs(batch) -> Tensor:
    """The policy's own, in float64 and near the old ones where these are known."""
    generator = torch.Generator().manual_seed(1)
    drift = 0.2 * torch.randn(batch.input_ids.shape, generator=generator, dtype=torch.float64)
    return (torch.nan_to_num(batch.old_logprobs.double(), nan=-1.0) + drift).clamp(max=0.0)


def slopes(logprobs: Tensor, batch: TokenBatch, settings: LossSettings, num_tokens: float) -> Tensor:
    """∂ loss / ∂ log π by autograd."""
    own = logprobs.clone().requires_grad_(True)
    return torch.autograd.grad(batch_loss(own, batch, settings, num_tokens=num_tokens), own)[0]


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_gradient_of_the_loss_is_minus_the_weight_over_num_tokens_and_zero_off_the_mask(batch, logprobs, settings):
    weights = batch_weights(logprobs, batch, settings, num_tokens=37)
    expected = -(batch.response_mask * weights.total) / 37
    assert (expected != 0).sum() > batch.num_tokens / 3
    torch.testing.assert_close(slopes(logprobs, batch, settings, 37), expected, rtol=1e-13, atol=1e-16)


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_weights_are_those_of_eq_2_written_out_for_each_token(batch, logprobs, settings):
    weights = batch_weights(logprobs, batch, settings, num_tokens=batch.num_tokens)
    advantages = resolve_advantages(batch)
    for row, column in batch.response_mask.nonzero().tolist():
        at = (row, column)
        known = (logprobs[at], batch.old_logprobs[at], batch.ref_logprobs[at], advantages[at])
        own, old, ref, advantage = (value.item() for value in known)
        old, ref = (own if math.isnan(value) else value for value in (old, ref))  # unknown: the policy's own
        alpha = settings.reweight_alpha or 0.0
        by_hand, _ = weight_by_loop(own, old, ref, advantage * (alpha * math.exp(old) + 1 - alpha), settings)
        assert weights.total[at].item() == pytest.approx(by_hand, rel=1e-12, abs=1e-15)
    assert (weights.total[~batch.response_mask] == 0).all()
    assert settings is PAPER or 0 < (weights.clipped & batch.response_mask).sum() < batch.num_tokens


def test_an_unknown_logprob_is_the_policys_own_and_has_no_gradient_of_its_own():
    own = torch.tensor([[-1.0, -2.0, -3.0]], dtype=torch.float64, requires_grad=True)
    known = torch.tensor([[-0.5, NAN, -1.5]])
    assert fill_unknown(known, own).tolist() == [[-0.5, -2.0, -1.5]]
    assert fill_unknown(None, own).tolist() == [[-1.0, -2.0, -3.0]]
    for filled in (fill_unknown(known, own), fill_unknown(None, own)):
        assert filled.dtype == torch.float64
        assert not filled.requires_grad


@pytest.mark.parametrize("unknown", [None, NAN])
@pytest.mark.parametrize("alpha", [None, 0.3])
def test_without_old_and_reference_logprobs_the_weight_is_the_advantage_reweighted_or_not(
    batch, logprobs, unknown, alpha
):
    nothing = None if unknown is None else torch.full_like(batch.old_logprobs, unknown)
    batch = replace(batch, old_logprobs=nothing, ref_logprobs=nothing)
    expected = resolve_advantages(batch).double()
    if alpha is not None:
        expected = expected * (alpha * logprobs.exp() + 1 - alpha)
    weights = batch_weights(logprobs, batch, replace(PAPER, reweight_alpha=alpha), num_tokens=1)
    torch.testing.assert_close(weights.policy, expected * batch.response_mask, rtol=1e-14, atol=0)
    assert (weights.kl == 0).all()
    assert not weights.clipped.any()


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("unknown", ["some", "all", "absent"])
def test_no_estimator_of_kl_pulls_a_token_without_a_reference(batch, logprobs, unknown, estimator, corrected):
    settings = LossSettings(kl_coef=0.2, kl_estimator=estimator, kl_corrected=corrected)
    ref = torch.where(batch.ref_logprobs.isnan(), logprobs.detach().float() - 0.3, batch.ref_logprobs)
    lacking = torch.ones_like(batch.response_mask)
    if unknown == "some":
        lacking[:, ::2] = False
    given = replace(batch, ref_logprobs=None if unknown == "absent" else ref.masked_fill(lacking, NAN))
    found = batch_weights(logprobs, given, settings, num_tokens=37)
    wanted = batch_weights(logprobs, replace(batch, ref_logprobs=ref), settings, num_tokens=37).kl
    torch.testing.assert_close(found.kl, wanted.masked_fill(lacking, 0.0), rtol=0, atol=0)
    assert wanted[batch.response_mask & lacking].any()
    torch.testing.assert_close(slopes(logprobs, given, settings, 37), -found.total / 37, rtol=1e-13, atol=1e-16)


def test_the_losses_of_micro_batches_add_up_once_advantages_are_resolved(batch, logprobs):
    resolved = replace(batch, advantages=resolve_advantages(batch))
    whole = batch_loss(logprobs, batch, NARROW, num_tokens=batch.num_tokens)
    rows = [[0, 3], [1, 2, 5], [4]]
    parts = [batch_loss(logprobs[r], resolved.select(r), NARROW, num_tokens=batch.num_tokens) for r in rows]
    assert sum(parts).item() == pytest.approx(whole.item(), rel=1e-13)


def test_advantages_beat_rewards_and_rewards_are_compared_within_their_group(batch):
    given = torch.arange(batch.input_ids.numel(), dtype=torch.float32).reshape(batch.input_ids.shape)
    assert torch.equal(resolve_advantages(replace(batch, advantages=given)), given)
    advantages = resolve_advantages(replace(batch, rewards=torch.tensor([1.0, 0.0, 3.0, 3.0, 0.0, 5.0])))
    half = math.sqrt(0.5)
    assert advantages.shape == batch.input_ids.shape
    assert advantages[:, 0].tolist() == pytest.approx([half, -half, 0, 0, -half, half], rel=1e-5)
    assert (advantages == advantages[:, :1]).all()
    per_token = torch.where(batch.response_mask, given, NAN)
    found = resolve_advantages(replace(batch, advantages=per_token))
    torch.testing.assert_close(found, per_token, rtol=0, atol=0, equal_nan=True)
    with refused():
        resolve_advantages(replace(batch, rewards=None))


@pytest.mark.parametrize(
    "setting",
    [
        {"kl_coef": NAN},
        {"clip_ratio_low": -0.1},
        {"clip_ratio_low": 1.1},
        {"clip_ratio_c": 0.5},
        {"reweight_alpha": 1.5},
    ],
)
def test_settings_that_make_no_loss_are_refused(setting):
    with refused(*setting):
        LossSettings(**setting).check()
