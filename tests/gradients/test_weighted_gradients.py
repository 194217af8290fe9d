"""Weighted sums of token gradients and predicted changes, against one autograd call per token and differences."""

import copy
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from support.gradients import flat_gradient, fused, predict_changes, raising, sum_gradients, token_gradients
from support.oracle import TrueFloat64
from support.policies import make_batch, make_policy, pad_both_sides
from support.refusals import refused
from support.tiers import every
from torch import Tensor, nn

from gradscope.objective import LossSettings, batch_loss, batch_weights, resolve_advantages
from gradscope.policy import Policy
from gradscope.rollouts import TokenBatch

NAMES = ["qwen2", "llama", "gpt2", "gemma2", "mixtral", "qwen3_moe"]
NARROW = LossSettings(clip_ratio_low=0.05, clip_ratio_high=0.04, clip_ratio_c=1.1, kl_coef=0.2)


def random_seeds(batch: TokenBatch, rows: int = 2) -> Tensor:
    return torch.randn(rows, *batch.input_ids.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def random_directions(policy: Policy, rows: int = 2) -> Tensor:
    size = sum(p.numel() for p in policy.model.parameters())
    generator = torch.Generator().manual_seed(5)
    return torch.randn(rows, size, generator=generator, dtype=torch.float64).to(policy.dtype)


@torch.no_grad()
def moved_logprobs(policy: Policy, batch: TokenBatch, direction: Tensor, size: float) -> Tensor:
    """log π of the kept tokens after a step of that size along the direction, in a copy of the model."""
    model, start = copy.deepcopy(policy.model), 0
    for parameter in model.parameters():
        parameter += size * direction[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    out = []
    for row in range(len(batch)):
        ids, kept = batch.sequence(row)
        logits = model(input_ids=ids[None], use_cache=False).logits[0].double() / batch.temperature[row]
        out.append(torch.log_softmax(logits[kept - 1], -1).gather(1, ids[kept, None])[:, 0])
    return torch.cat(out)


def central_difference(policy: Policy, batch: TokenBatch, direction: Tensor, size: float) -> Tensor:
    """The derivative of log π of the kept tokens, with an error of order size⁴."""
    near, far = (
        (moved_logprobs(policy, batch, direction, h) - moved_logprobs(policy, batch, direction, -h)) / (2 * h)
        for h in (size, 2 * size)
    )
    return (4 * near - far) / 3


def distance(found: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over the norm."""
    return ((found - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("name", every(4, NAMES))
def test_both_products_equal_those_with_one_autograd_call_per_token(name):
    policy = make_policy(name, torch.float64)
    batch = make_batch(policy, temperature=0.7, side="left")
    seeds, directions = random_seeds(batch), random_directions(policy)
    with TrueFloat64():
        jacobian = token_gradients(policy, batch)
        sums = sum_gradients(policy.model, batch, seeds, 4)
        changes, method = predict_changes(policy.model, batch, directions, 4)
    # Everything is in float64: what differs is the order of sums.
    assert distance(sums, seeds[:, batch.response_mask] @ jacobian) < 1e-12
    assert distance(changes[:, batch.response_mask], directions @ jacobian.T) < 1e-12
    assert method == "forward mode"
    assert not changes[:, ~batch.response_mask].any()


@pytest.mark.parametrize("name", every(4, NAMES))
@pytest.mark.parametrize(("patched", "size", "tolerance"), [(True, 1e-4, 1e-6), (False, 3e-2, 1e-4)])
def test_forward_mode_agrees_with_central_differences(name, patched, size, tolerance):
    policy = make_policy(name, torch.float64)
    batch = make_batch(policy, temperature=0.7).select([0, 1, 3])
    with TrueFloat64() if patched else nullcontext():
        direction = sum_gradients(policy.model, batch, random_seeds(batch, 3), 8)[2]
        (changes,), _ = predict_changes(policy.model, batch, direction[None], 8)
        found = changes[batch.response_mask]
        # A step after which log π has changed by `size`: the casts round to 1e-7, curvature is of order size⁴; no step
        # along this direction sends a token to other experts.
        wanted = central_difference(policy, batch, direction, size / found.square().mean().sqrt().item())
    assert distance(found, wanted) < tolerance


@pytest.mark.parametrize("name", ["qwen2", "mixtral"])
def test_with_the_weights_of_the_loss_it_is_the_losss_gradient(name):
    policy = make_policy(name)
    batch = make_batch(policy)
    batch = replace(batch, advantages=resolve_advantages(batch))
    attended = batch.attention_mask.long()
    places = (attended.cumsum(1) - 1).clamp(min=0)
    logits = policy.model(input_ids=batch.input_ids, attention_mask=attended, position_ids=places).logits
    chosen = logits[:, :-1].log_softmax(-1).gather(2, batch.input_ids[:, 1:, None])[..., 0]
    logprobs = torch.nn.functional.pad(chosen, (1, 0))
    expected = flat_gradient(policy.model, batch_loss(logprobs, batch, NARROW, num_tokens=batch.num_tokens))
    weights = batch_weights(logprobs.detach(), batch, NARROW, num_tokens=batch.num_tokens)
    assert weights.clipped.any()
    parts = torch.stack([weights.policy, weights.kl]) / -batch.num_tokens
    sums = sum_gradients(policy.model, batch, parts, 8)
    assert sums.dtype == torch.float32
    assert sums[0].norm() > 0.1 * expected.norm() < 10 * sums[0].norm()
    assert distance(sums.sum(0), expected) < 1e-6


@pytest.mark.parametrize("tied", [False, True])
def test_a_padding_id_within_the_text_moves_nothing_by_its_embedding_as_no_gradient_flows_there(tied):
    policy = make_policy("qwen2" if tied else "llama", torch.float64)
    batch = make_batch(policy)
    padding = policy.model.get_input_embeddings().padding_idx
    assert padding is not None
    ids = batch.input_ids.clone()
    ids[:, ::3] = padding
    batch = replace(batch, input_ids=torch.where(batch.attention_mask, ids, batch.input_ids))
    directions = random_directions(policy)
    changes, method = predict_changes(policy.model, batch, directions, 2)
    assert method == "forward mode"
    # transformers casts to float32 inside.
    torch.testing.assert_close(
        changes[:, batch.response_mask], directions @ token_gradients(policy, batch).T, rtol=1e-4, atol=1e-5
    )


def test_padding_micro_batches_and_masked_seeds_change_nothing_beyond_rounding():
    policy = make_policy("gpt2", torch.float64)
    batch = make_batch(policy)
    seeds, directions = random_seeds(batch), random_directions(policy)
    sums = sum_gradients(policy.model, batch, seeds, 8)
    changes, _ = predict_changes(policy.model, batch, directions, 8)
    wide = pad_both_sides(batch, 3, 2)
    seeds = nn.functional.pad(seeds, (3, 2)).masked_fill(~wide.response_mask, torch.nan)
    assert distance(sum_gradients(policy.model, wide, seeds, 1), sums) < 1e-12
    moved, _ = predict_changes(policy.model, wide, directions, 1)
    assert distance(moved[:, :, 3:-2], changes) < 1e-12


@pytest.mark.parametrize("name", every(2, ["qwen2", "gpt2", "gemma2", "mixtral"]))
def test_without_forward_mode_the_same_comes_from_central_differences_and_is_called_so(name):
    policy = make_policy(name)
    batch = make_batch(policy, temperature=0.7)
    directions = 1e-3 * sum_gradients(policy.model, batch, random_seeds(batch, 3), 4)
    directions[1] = 0
    directions[2] *= 1e6
    expected, _ = predict_changes(policy.model, batch, directions, 4)
    with pytest.warns(UserWarning):
        changes, method = predict_changes(fused(policy).model, batch, directions, 4)
    assert method == "central differences"
    assert not changes[1].any()
    for row in (0, 2):  # curvature and rounding of float32, each about 1e-4 at the change that is aimed at
        assert distance(changes[row], expected[row]) < 1e-3


def test_running_out_of_memory_is_not_taken_for_a_missing_forward_mode():
    policy = make_policy("gpt2")
    batch = make_batch(policy)
    policy.model.register_forward_hook(raising(torch.OutOfMemoryError("full")))
    with pytest.raises(torch.OutOfMemoryError):
        predict_changes(policy.model, batch, random_directions(policy), 8)


def test_a_policy_in_half_precision_has_no_changes():
    half = make_policy("gpt2", torch.bfloat16)
    with refused():
        predict_changes(half.model, make_batch(half), random_directions(half), 8)
