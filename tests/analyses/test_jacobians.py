"""Constants of blocks and head, against matrices of known singular values and one autograd call per row or token."""

from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import torch
from support.policies import CAUSAL, CONTEXT, VOCAB, make_batch, make_policy, pad_both_sides
from support.refusals import refused
from support.tiers import every

from analyses.parts.constants import LocalJacobian, block_constants, layer_constants, token_contexts
from gradscope.gradients import TokenGradientMeter, measuring

# transformers computes norms, softmax and rotations in float32 even in a float64 model.
CASTS = 1e-5


def random_ids(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(4, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


def matrix_of(sigma: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """A square float64 matrix with these singular values."""
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.linalg.qr(torch.randn(len(sigma), len(sigma), generator=generator).double())[0] for _ in "ab")
    return left * sigma @ right


def linear_jacobian(matrix: torch.Tensor, positions: int) -> LocalJacobian:
    inputs = torch.ones(1, positions, matrix.shape[1] // positions, dtype=matrix.dtype, requires_grad=True)
    return LocalJacobian(inputs, (matrix @ inputs.flatten()).sinh().asinh(), positions)


def run_whole(policy, ids: torch.Tensor, temperature: float) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The hidden states of layers 0 … L of one plain forward with its graph, and the last position's log π."""
    hidden = []
    blocks = policy.blocks
    keep = lambda out: hidden.append(out if isinstance(out, torch.Tensor) else out[0])  # noqa: E731
    handles = [
        blocks[0].register_forward_pre_hook(lambda m, a, k: keep(a[0] if a else k["hidden_states"]), with_kwargs=True)
    ]
    handles += [block.register_forward_hook(lambda m, a, out: keep(out)) for block in blocks]
    logits = policy.model(input_ids=ids[None], use_cache=False).logits[0, -1]
    for handle in handles:
        handle.remove()
    return hidden, (logits / temperature).log_softmax(-1)


@pytest.mark.parametrize("shape", [(6, 6), (10, 4), (4, 10)])
def test_products_and_the_explicit_matrix_are_the_jacobian(shape):
    matrix = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    jacobian = linear_jacobian(matrix, positions=2)
    seeds, directions = torch.eye(shape[0], dtype=torch.float64)[:3], torch.eye(shape[1], dtype=torch.float64)[:3]
    assert jacobian.shape == shape
    torch.testing.assert_close(jacobian.dense(), matrix)
    torch.testing.assert_close(jacobian.pull(seeds), matrix[:3])
    torch.testing.assert_close(jacobian.push(directions), matrix.T[:3])


def test_known_singular_values_are_certified_by_the_svd_and_estimated_by_lanczos():
    sigma = torch.linspace(1.0, 3.0, 48, dtype=torch.float64)
    sigma[0], sigma[-1] = 0.25, 9.0
    jacobian = linear_jacobian(matrix_of(sigma), positions=4)
    exact, estimate = (block_constants(jacobian, max_exact=limit) for limit in (48, 47))
    assert (exact.kind, exact.residual) == ("certified", 0.0)
    assert (exact.c, exact.d) == pytest.approx((0.25, 9.0), rel=1e-10)
    assert estimate.kind == "estimated"
    assert (estimate.c, estimate.d) == pytest.approx((0.25, 9.0), rel=1e-4)
    assert 0 < estimate.residual < 1e-4
    assert estimate.residual_c < 1e-2


@pytest.mark.parametrize("name", ["qwen2", "gpt2", "gemma2", "mixtral"])
def test_block_constants_are_the_singular_values_of_a_jacobian_made_row_by_row(name):
    policy, ids = make_policy(name, torch.float64, seed=3), random_ids(4)
    table = layer_constants(policy, [ids], temperature=0.7).set_index("layer")
    hidden, _ = run_whole(policy, ids, 0.7)
    for layer, (below, above) in enumerate(pairwise(hidden)):
        rows = [torch.autograd.grad(v, below, retain_graph=True)[0].flatten() for v in above.flatten()]
        sigma = torch.linalg.svdvals(torch.stack(rows))
        row = table.loc[layer]
        assert (row["kind"], row["outputs"], row["inputs"]) == ("certified", len(sigma), len(sigma))
        assert row["d"] == pytest.approx(sigma[0].item(), rel=CASTS)
        # A cast errs by a share of the largest value, whatever the smallest is.
        assert row["sigma_min"] == pytest.approx(sigma[-1].item(), abs=CASTS * sigma[0].item())


@pytest.mark.parametrize("name", every(2, CAUSAL))
def test_head_constants_and_reach_are_those_of_one_gradient_per_token_of_the_vocabulary(name):
    policy, ids = make_policy(name, torch.float64), random_ids(5, seed=1)
    table = layer_constants(policy, [ids], temperature=0.7)
    hidden, logprobs = run_whole(policy, ids, 0.7)
    gains = torch.empty(VOCAB, len(hidden), dtype=torch.float64)
    for k in range(VOCAB):
        seed = torch.nn.functional.one_hot(torch.tensor(k), VOCAB) - logprobs.detach().exp()
        deltas = torch.autograd.grad(logprobs[k], hidden, retain_graph=True)
        gains[k] = torch.stack([d.norm() for d in deltas]) / seed.norm()
    assert table["reach_min"].tolist() == pytest.approx(gains.amin(0).tolist(), rel=CASTS)
    assert table["reach_max"].tolist() == pytest.approx(gains.amax(0).tolist(), rel=CASTS)
    head = table.iloc[-1]
    assert (head["module"], head["kind"], head["outputs"]) == ("head", "certified", VOCAB)
    assert head["c"] == pytest.approx(gains[:, -1].min().item(), rel=CASTS)


def test_the_heads_constants_hold_the_soft_cap_and_the_temperature():
    policy, ids = make_policy("gemma2", torch.float64), random_ids(5)
    hidden, _ = run_whole(policy, ids, 1.0)
    logits = policy.model.lm_head(policy.model.model.norm(hidden[-1]))[0, -1]
    cap = policy.config.final_logit_softcapping
    capped = cap * torch.tanh(logits / cap) / 0.7
    rows = torch.stack([torch.autograd.grad(v, hidden[-1], retain_graph=True)[0][0, -1] for v in capped])
    head = layer_constants(policy, [ids], temperature=0.7).iloc[-1]
    assert head["d"] == pytest.approx(torch.linalg.matrix_norm(rows, 2).item(), rel=CASTS)


def test_near_certainty_the_heads_constant_does_not_cancel():
    # 1 − π of the likeliest token is below 1e-7 in some of these contexts; a cancelled ratio would be 0/0 or noise.
    policy, narrow = make_policy("llama", torch.float64, sharpness=14.0), make_policy("llama", sharpness=14.0)
    contexts = [random_ids(3, seed=s) for s in range(12)]
    wide, single = (layer_constants(p, contexts, temperature=0.5) for p in (policy, narrow))
    heads = [t[t["module"] == "head"]["c"].to_numpy() for t in (wide, single)]
    assert np.isfinite(heads[0]).all() and (heads[0] > 0).all()
    np.testing.assert_allclose(heads[0], heads[1], rtol=1e-3)  # the float32 model's own rounding


def test_products_multiply_everything_above_and_one_estimate_makes_them_estimated():
    policy = make_policy("qwen3", torch.float64)
    table = layer_constants(policy, [random_ids(3), random_ids(6)], temperature=1.0, max_exact=100)
    for context, kind in ((0, "certified"), (1, "estimated")):
        part = table[table["context"] == context]
        assert part["layer"].tolist() == [0, 1, 2, 3]
        assert part["product_d"].tolist() == pytest.approx(part["d"][::-1].cumprod()[::-1].tolist())
        assert part["product_kind"].tolist() == [kind] * 3 + ["certified"]
        assert part["kind"].tolist() == [kind] * 3 + ["certified"]
        # The exact reach of the whole way down lies inside the products, where these are known.
        assert (part["reach_max"] <= part["product_d"] * (1 + CASTS)).all()
        assert not (part["reach_min"] < part["product_c"] * (1 - CASTS)).any()


@pytest.mark.parametrize("name", every(2, CAUSAL))
def test_gradients_of_real_tokens_obey_the_certified_bounds_of_their_context(name):
    policy, ids = make_policy(name, torch.float64), random_ids(9, seed=2)
    targets = torch.tensor([3, 5, 8])
    with measuring(policy.model):
        meter = TokenGradientMeter(policy, ids)
        measured = meter.measure(ids, targets, torch.arange(3), temperature=0.7)
    table = layer_constants(policy, [ids[:t] for t in targets], temperature=0.7)
    assert (table["product_kind"] == "certified").all()
    for index in range(3):
        part = table[table["context"] == index]
        gains = (measured.act_grad_norm[index] / measured.logit_grad_norm[index]).numpy()
        for low, high in (("product_c", "product_d"), ("reach_min", "reach_max")):
            assert (gains >= part[low] * (1 - CASTS)).all()
            assert (gains <= part[high] * (1 + CASTS)).all()


def test_a_contexts_block_constants_hold_for_every_token_inside_it():
    policy, ids = make_policy("qwen2", torch.float64), random_ids(9, seed=2)
    with measuring(policy.model):
        act = (
            TokenGradientMeter(policy, ids)
            .measure(ids, torch.arange(1, 9), torch.arange(8), temperature=1.0)
            .act_grad_norm
        )
    blocks = layer_constants(policy, [ids[:8]], temperature=1.0).iloc[:-1]
    gains = (act[:, :-1] / act[:, 1:]).numpy()
    assert (gains >= blocks["c"].to_numpy() * (1 - CASTS)).all()
    assert (gains <= blocks["d"].to_numpy() * (1 + CASTS)).all()


def test_contexts_are_the_ids_before_each_token_whatever_the_padding_and_the_holes():
    batch = make_batch(make_policy("qwen2"))
    tokens = pd.DataFrame({"response": [0, 0, 2, 5], "position": [0, 6, 3, 5]})
    prompt_length = [5, 5, 3, 8]
    expected = [
        batch.sequence(r)[0][: n + p] for r, n, p in zip(tokens.response, prompt_length, tokens.position, strict=True)
    ]
    for same in (batch, pad_both_sides(batch, 3, 2)):
        for found, wanted in zip(token_contexts(same, tokens), expected, strict=True):
            assert found.tolist() == wanted.tolist()


def test_contexts_that_cannot_be_measured_are_refused():
    policy = make_policy("qwen2")
    for contexts in ([], [random_ids(0)]):
        with refused():
            layer_constants(policy, contexts, temperature=1.0)
    with refused("64"):
        layer_constants(policy, [random_ids(CONTEXT + 1)], temperature=1.0)
    with refused():
        layer_constants(policy, [random_ids(3)], temperature=0.0)
