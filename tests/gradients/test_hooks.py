"""Hooks record what a module returned and the gradient with respect to it, and nothing of them stays behind."""

from __future__ import annotations

import pandas as pd
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from support.policies import make_batch, make_policy
from support.refusals import refused
from torch import Tensor, nn

from gradscope import TokenJacobian, measure
from gradscope.gradients import capture_activations, capture_gradients, measuring


def network(*, inplace: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(inplace=inplace), nn.Linear(5, 2)).double()


def has_hooks(module: nn.Module) -> bool:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(m, kind) for m in module.modules() for kind in kinds)


def inputs(*shape: int) -> Tensor:
    return torch.randn(*shape, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("shape", [(4,), (2, 4)])
@pytest.mark.parametrize("inplace", [False, True])
def test_gradients_belong_to_the_values_as_they_were_returned(inplace, shape):
    x, model = inputs(*shape), network(inplace=inplace)
    with capture_gradients(model, ["0", "1", "2"]) as ours:
        model(x).square().sum().backward()
    # The same by hand, with nothing changed in place.
    a = model[0](x).detach().requires_grad_(True)
    b = a.relu()
    c = model[2](b)
    expected = torch.autograd.grad(c.square().sum(), [a, b, c])
    assert list(ours) == ["2", "1", "0"]  # in the order of backward
    for name, gradient in zip("012", expected, strict=True):
        torch.testing.assert_close(ours[name], gradient)


def test_activations_are_recorded_without_their_graph_and_with_repeats():
    model = network()
    with capture_activations(model, ["0", ""]) as seen:
        first, second = model(inputs(4)), model(inputs(4) + 1)
    assert list(seen) == ["0", "", "0#1", "#1"]
    torch.testing.assert_close(seen[""], first.detach())
    torch.testing.assert_close(seen["#1"], second.detach())
    torch.testing.assert_close(seen["0#1"], model[0](inputs(4) + 1).detach())
    assert not any(tensor.requires_grad for tensor in seen.values())


@pytest.mark.parametrize("capture", [capture_activations, capture_gradients])
def test_no_hook_is_left_behind_even_when_the_body_raises(capture):
    model = network()
    with capture(model, ["0", "1"]):
        assert has_hooks(model)
        out = model(inputs(4))
    assert not has_hooks(model)
    with pytest.raises(ZeroDivisionError), capture(model, ["0", "1"]) as late:
        out = model(inputs(4))
        raise ZeroDivisionError
    assert not has_hooks(model)
    before = len(late)
    out.sum().backward()  # Tensor hooks are gone too.
    assert len(late) == before


@pytest.mark.parametrize("capture", [capture_activations, capture_gradients])
def test_an_unknown_name_is_an_input_error_and_leaves_no_hook(capture):
    model = network()
    with refused("layers.7"), capture(model, ["0", "layers.7"]):
        pass
    assert not has_hooks(model)


def test_gradients_of_a_real_model_are_those_of_autograd():
    policy = make_policy("gpt2", torch.float64)
    names = [f"{policy.blocks_name}.{i}" for i in range(len(policy.blocks))]
    ids = torch.arange(4, 14)[None]
    hidden = []
    handles = [b.register_forward_hook(lambda m, a, out: hidden.append(out)) for b in policy.blocks]
    with capture_gradients(policy.model, names) as ours:
        loss = policy.model(input_ids=ids).logits.log_softmax(-1)[0, 3:, 5].sum()
        expected = torch.autograd.grad(loss, [h if isinstance(h, Tensor) else h[0] for h in hidden], retain_graph=True)
        ours.clear()  # What the line before recorded: autograd.grad passes the hooks as well.
        loss.backward()
    for handle in handles:
        handle.remove()
    for name, gradient in zip(names, expected, strict=True):
        torch.testing.assert_close(ours[name], gradient)


@pytest.mark.parametrize("name", ["mixtral", "gpt2"])
@pytest.mark.parametrize("fails", [False, True])
def test_measuring_freezes_and_everything_comes_back(name, fails):
    model = make_policy(name, attention="sdpa").model.train()
    model.set_experts_implementation("grouped_mm" if name == "mixtral" else "eager")
    frozen = {n for n, _ in list(model.named_parameters())[::3]}
    for n, p in model.named_parameters():
        p.requires_grad_(n not in frozen)
    next(m for m in model.modules() if isinstance(m, nn.Dropout) or m is model).eval()
    modes = {n: m.training for n, m in model.named_modules()}
    try:
        with measuring(model):
            assert not any(m.training for m in model.modules())
            assert not any(p.requires_grad for p in model.parameters())
            assert model.config._attn_implementation == model.config._experts_implementation == "eager"
            if fails:
                raise ZeroDivisionError
    except ZeroDivisionError:
        assert fails
    assert {n: m.training for n, m in model.named_modules()} == modes
    assert {n for n, p in model.named_parameters() if not p.requires_grad} == frozen
    assert model.config._attn_implementation == "sdpa"
    assert model.config._experts_implementation == ("grouped_mm" if name == "mixtral" else "eager")


@pytest.fixture
def prepare():
    """What transformers' Trainer does to its model under `bf16=True`."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator(mixed_precision="bf16", cpu=True).prepare_model
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_model_that_trains_under_autocast_is_measured_in_the_precision_of_its_weights(prepare, name):
    policy, ids = make_policy(name), torch.arange(12)[None] % 7
    batch = make_batch(policy)
    weights = torch.ones(1, batch.num_tokens)
    alone, total = measure(policy, batch, self_check=False), TokenJacobian(policy, batch).vjp(weights).rows
    plain = policy.model(ids).logits
    prepare(policy.model)
    rounded = policy.model(ids).logits
    assert (rounded - plain).abs().max() > 1e-3 * plain.abs().max()  # bfloat16 has eight bits
    with torch.autocast("cpu", torch.bfloat16):
        pd.testing.assert_frame_equal(measure(policy, batch, self_check=False), alone, rtol=1e-5)
        torch.testing.assert_close(TokenJacobian(policy, batch).vjp(weights).rows, total)
    torch.testing.assert_close(policy.model(ids).logits, rounded)  # it trains on as before
