"""Each rule of a decoder's block against autograd of the plain forward formula in float64, one token at a time."""

from __future__ import annotations

import random as chance
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradscope.gradients.engine.decoder.rules import (
    Rows,
    attention_backward,
    attention_backward_at,
    linear_backward,
    rms_norm_backward,
    rotary_backward,
)
from gradscope.gradients.engine.grouping import (
    MOST_SEQUENCES,
    POSITION_COST,
    Chunk,
    Limits,
    Span,
    group_sequences,
    neighbours,
)
from gradscope.gradients.engine.norms import linear_square_norms, prefix_factor
from gradscope.gradients.engine.products import PRODUCTS, multiply_in_bfloat16

BATCH, TOKENS, WIDTH, SCALING = 2, 3, 6, 0.4
CLOSE = {"rtol": 1e-12, "atol": 1e-12}
"""Both sides in float64, some hundred roundings of 1e-16 of numbers around 1 to 10."""


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def gradients(outputs: Tensor, inputs: list[Tensor], delta: Tensor) -> list[Tensor]:
    """∂(outputs · delta[:, :, k])/∂inputs for every token k, stacked as the rules have them: [B, n, K, …].

    One call serves token k of every sequence, as no sequence's outputs depend on another's inputs.
    """
    each = [torch.autograd.grad(outputs, inputs, delta[:, :, k], retain_graph=True) for k in range(delta.shape[2])]
    return [torch.stack(rows, 2) for rows in zip(*each, strict=True)]


@pytest.mark.parametrize("n", [1, 7])
def test_linear_backward_is_autograds(n):
    x, weight, delta = random(BATCH, n, 5).requires_grad_(), random(4, 5, seed=1), random(BATCH, n, TOKENS, 4, seed=2)
    (expected,) = gradients(x @ weight.T + 1.0, [x], delta)
    torch.testing.assert_close(linear_backward(delta, weight), expected, **CLOSE)
    before = random(BATCH, n, TOKENS, 5, seed=3)
    torch.testing.assert_close(linear_backward(delta, weight, into=before.clone()), before + expected, **CLOSE)


@pytest.mark.parametrize("heads", [(), (3,)], ids=["whole rows", "each head"])
def test_rms_norm_backward_is_autograds_for_the_input_and_the_scale(heads):
    x, scale, eps = random(BATCH, 5, *heads, WIDTH).requires_grad_(), random(WIDTH, seed=1), 0.1
    # A scale of each sequence's own, lest autograd adds their gradients up.
    scales = scale.expand(BATCH, *(1 for _ in (0, *heads)), WIDTH).clone().requires_grad_()
    inverse_rms = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    delta = random(BATCH, 5, TOKENS, *heads, WIDTH, seed=2)
    back, slope = rms_norm_backward(
        delta, (x * inverse_rms).detach().unsqueeze(2), scale, inverse_rms.detach().unsqueeze(2)
    )
    expected, expected_slope = gradients(scales * x * inverse_rms, [x, scales], delta)
    torch.testing.assert_close(back, expected, **CLOSE)
    torch.testing.assert_close(slope, expected_slope.reshape(BATCH, TOKENS, WIDTH), **CLOSE)


def test_rms_norm_backward_takes_an_input_for_each_token():
    shape = (BATCH, 1, TOKENS, 2, WIDTH)
    x, scale, delta = random(*shape), random(WIDTH, seed=1), random(*shape, seed=2)
    inverse_rms = (x.square().mean(-1, keepdim=True) + 0.1).rsqrt()
    back, slope = rms_norm_backward(delta, x * inverse_rms, scale, inverse_rms)
    for k in range(TOKENS):
        one, seen, rms = (t[:, :, [k]] for t in (delta, x * inverse_rms, inverse_rms))
        alone = rms_norm_backward(one, seen, scale, rms)
        torch.testing.assert_close(back[:, :, [k]], alone[0], **CLOSE)
        torch.testing.assert_close(slope[:, [k]], alone[1], **CLOSE)


def test_rotary_backward_is_autograds_also_where_the_halves_have_angles_of_their_own():
    x, delta = random(BATCH, 5, 2, WIDTH).requires_grad_(), random(BATCH, 5, TOKENS, 2, WIDTH, seed=1)
    cos, sin = random(BATCH, 5, 1, WIDTH, seed=2), random(BATCH, 5, 1, WIDTH, seed=3)
    a, b = x.chunk(2, -1)
    (expected,) = gradients(x * cos + torch.cat([-b, a], -1) * sin, [x], delta)
    torch.testing.assert_close(rotary_backward(delta, cos[:, :, None], sin[:, :, None]), expected, **CLOSE)


def attend(
    n: int, heads: int, groups: int, window: int | None = None, sharpness: float = 1.0, cap: float | None = None
) -> tuple[list[Tensor], list[Tensor | None], Tensor]:
    """([queries, keys, values], [probabilities, slopes of capped scores], what they attend to) of causal attention, by
    head."""
    q, k, v = (random(BATCH, n, h, WIDTH, seed=s).requires_grad_() for s, h in enumerate((heads, groups, groups)))
    row, column = torch.arange(n)[:, None], torch.arange(n)
    seen = (column <= row) & (row - column < (window or n))
    probs, slopes = [], []
    for h in range(heads):
        scores = SCALING * sharpness * q[:, :, h] @ k[:, :, h * groups // heads].mT
        if cap is not None:
            slopes.append(1 / (scores / cap).cosh().square())
            scores = cap * (scores / cap).tanh()
        probs.append(scores.masked_fill(~seen, -torch.inf).softmax(-1))
    outputs = torch.stack([p @ v[:, :, h * groups // heads] for h, p in enumerate(probs)], 2)
    return [q, k, v], [torch.stack(probs, 1), torch.stack(slopes, 1) if slopes else None], outputs


def of_strips(probs: Tensor, slopes: Tensor | None) -> Callable[[int, int], Rows]:
    """The rows of a strip, out of the whole."""

    def rows(start: int, end: int) -> Rows:
        p, slope = plain(probs, slopes)
        return p[:, :, start:end, :end], slope if slope is None else slope[:, :, start:end, :end]

    return rows


def plain(*tensors: Tensor | None) -> list[Tensor | None]:
    return [t if t is None else t.detach() for t in tensors]


@pytest.mark.parametrize("heads, groups", [(4, 4), (4, 2), (4, 1), (1, 1), (6, 2)])
@pytest.mark.parametrize("cap", [None, 0.5])
def test_attention_backward_is_autograds_for_every_sharing_of_keys(heads, groups, cap):
    inputs, probs, outputs = attend(9, heads, groups, cap=cap)
    delta = random(BATCH, 9, TOKENS, heads, WIDTH, seed=5)
    ours = attention_backward(delta, of_strips(*probs), *plain(outputs, *inputs), scaling=SCALING)
    for a, b in zip(ours, gradients(outputs, inputs, delta), strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


# One strip, two, four, and more than four of the greatest width; at their edges.
@pytest.mark.parametrize("n", [1, 2, 55, 56, 57, 111, 112, 113, 200, 223, 224, 225, 513])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("cap", [None, 0.5])
def test_strips_of_attention_leave_nothing_out(n, window, cap):
    inputs, probs, outputs = attend(n, 2, 1, window, cap=cap)
    delta = random(BATCH, n, 2, 2, WIDTH, seed=5)
    ours = attention_backward(delta, of_strips(*probs), *plain(outputs, *inputs), scaling=SCALING)
    for a, b in zip(ours, gradients(outputs, inputs, delta), strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


@pytest.mark.parametrize("heads, groups", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("cap", [None, 0.5])
def test_attention_backward_at_one_position_of_each_token_is_autograds(heads, groups, window, cap):
    inputs, probs, outputs = attend(9, heads, groups, window, cap=cap)
    positions = torch.tensor([[0, 4, 4, 8], [1, 2, 7, 7]])
    at = torch.arange(BATCH)[:, None], positions, torch.arange(4)
    rows = random(BATCH, 4, heads, WIDTH, seed=5)
    delta = random(BATCH, 9, 4, heads, WIDTH) * 0
    delta[at] = rows
    of_positions = [p if p is None else p.detach().transpose(1, 2)[at[:2]].transpose(1, 2) for p in probs]
    q, k, v = attention_backward_at(rows, positions, of_positions, *plain(outputs, *inputs), scaling=SCALING)
    expected_q, expected_k, expected_v = gradients(outputs, inputs, delta)
    torch.testing.assert_close(q, expected_q[at], **CLOSE)
    torch.testing.assert_close(k, expected_k, **CLOSE)
    torch.testing.assert_close(v, expected_v, **CLOSE)


def test_attention_that_sees_one_key_alone_sends_nothing_to_queries_and_keys():
    # Probabilities of 0 and 1 to the last digit: δ v − δ o is the difference of equal numbers.
    inputs, probs, outputs = attend(40, 2, 1, sharpness=1e6)
    assert (probs[0].max(-1).values == 1).all()
    delta = random(BATCH, 40, TOKENS, 2, WIDTH, seed=5)
    q, k, v = attention_backward(delta, of_strips(*probs), *plain(outputs, *inputs), scaling=SCALING)
    assert q.abs().max() < 1e-14 and k.abs().max() < 1e-14
    torch.testing.assert_close(v, gradients(outputs, inputs, delta)[2], **CLOSE)


@pytest.mark.parametrize("n, d", [(200, 30), (129, 128), (300, 130), (33, 32), (65, 31)])
def test_a_sequence_longer_than_its_width_has_the_norm_of_the_whole_sum(n, d):
    inputs, delta = random(BATCH, n, d), random(BATCH, n, TOKENS, 4, seed=1)
    sums = [[delta[b, :, k].T @ inputs[b] for k in range(TOKENS)] for b in range(BATCH)]
    expected = torch.tensor([[part.square().sum() for part in parts] for parts in sums], dtype=torch.float64)
    ours = linear_square_norms(delta, prefix_factor(inputs, bias=False))
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=0.0)


# Runs of tokens.


def runs_by_a_double_loop(lengths: list[list[int]], limits: Limits) -> list[Span]:
    """Each run as long as it may be, from the last tokens on, everything counted again for every token."""
    runs, start = [], 0
    while start < max(map(len, lengths)):
        present = [tokens for tokens in lengths if len(tokens) > start]
        parts = [tokens[: len(tokens) - start] for tokens in present]
        longest, size = max(part[-1] for part in parts), 1
        while size < len(parts[0]):
            run = [part[-size - 1 :] for part in parts]
            places = len(parts) * (size + 1)
            if limits.start is None:
                far = longest > max(run[0][0] + 16, run[0][0] * 5 // 4)
            else:
                fixed = limits.start + limits.shared * len(parts) * longest
                far = longest * places - sum(map(sum, run)) > fixed
            if far or longest * places > limits.rows:
                break
            size += 1
        runs.append(Span(tuple(slice(max(0, len(part) - size), len(part)) for part in parts), longest))
        start += size
    return runs


def some_lengths(dice: chance.Random, most: int) -> list[list[int]]:
    """Ascending prefix lengths of some sequences, those with more tokens first."""
    step, lengths = dice.choice([1, 2, 40]), []
    for _ in range(dice.randint(1, most)):
        tokens = [dice.randint(1, 30)]
        for _ in range(dice.randint(0, 60)):
            tokens.append(tokens[-1] + dice.randint(1, step))
        lengths.append(tokens)
    return sorted(lengths, key=len, reverse=True)


@pytest.mark.parametrize("seed", range(40))
def test_every_token_is_in_one_run_and_runs_are_as_long_as_their_limits_allow(seed):
    dice = chance.Random(seed)
    for _ in range(10):
        rows, start = dice.choice([1, 50, 400, 10**6]), dice.choice([None, 0, 1, 30, 10**6])
        limits = Limits(rows, start, dice.choice([0.0, 0.5]))
        lengths = some_lengths(dice, 1 if start is None else 4)
        runs = list(neighbours(lengths, limits))
        assert runs == runs_by_a_double_loop(lengths, limits)
        for b, tokens in enumerate(lengths):
            mine = [run.tokens[b] for run in runs if len(run.tokens) > b]
            assert [i for part in reversed(mine) for i in range(part.start, part.stop)] == list(range(len(tokens)))
        for run in runs:
            parts = [tokens[part] for tokens, part in zip(lengths, run.tokens, strict=False)]
            assert run.rows == len(parts) * max(map(len, parts)) * max(map(max, parts))
            assert run.width == 1 or run.rows <= rows
            wasted, fixed = run.rows - sum(map(sum, parts)), (start or 0) + limits.shared * len(parts) * run.length
            assert start is None or run.width == 1 or wasted <= fixed


@pytest.mark.parametrize("seed", range(20))
def test_sequences_are_together_only_where_that_costs_less(seed):
    def cost(group):
        lengths = sorted((every[i] for i in group), key=len, reverse=True)
        runs = runs_by_a_double_loop(lengths, limits)
        return sum(run.rows + limits.start + limits.shared * len(run.tokens) * run.length for run in runs)

    dice = chance.Random(seed)
    every = [tokens for _ in range(6) for tokens in some_lengths(dice, 4)]
    limits, most = Limits(dice.choice([100, 1000]), dice.choice([0, 20, 200]), 0.3), dice.choice([1, 3, 100])
    reaches = [tokens[-1] + dice.choice([0, 0, 200]) for tokens in every]
    groups = group_sequences(every, reaches, limits, most=lambda _length: most)
    assert sorted(i for group in groups for i in group) == list(range(len(every)))
    for group in groups:
        assert len(group) <= min(most, MOST_SEQUENCES)
        counts = [len(every[i]) for i in group]
        assert counts == sorted(counts, reverse=True)
        longest = max(reaches[i] for i in group)
        apart = sum(cost([i]) + POSITION_COST * reaches[i] for i in group)
        assert cost(group) + POSITION_COST * longest * len(group) <= apart


def test_a_chunk_holds_the_tokens_of_its_run_on_the_right():
    positions = torch.tensor([10, 11, 12, 20, 21])  # of three targets of one sequence and two of another
    picks = [torch.tensor([0, 1, 2]), torch.tensor([3, 4])]
    chunk = Chunk.of(Span((slice(0, 3), slice(0, 2)), 22), picks, positions)
    assert chunk.picks.tolist() == [[0, 1, 2], [0, 3, 4]] and chunk.positions.tolist() == [[10, 11, 12], [0, 20, 21]]
    assert chunk.held.tolist() == [0, 1, 2, 4, 5]
    assert chunk.values(chunk.picks).tolist() == [0, 1, 2, 3, 4]
    full = Chunk.of(Span((slice(1, 3), slice(0, 2)), 22), picks, positions)
    assert full.held is None and full.values(full.positions).tolist() == [11, 12, 20, 21]


# Products.


@pytest.mark.parametrize("shapes", [((5, 7), (7, 3)), ((2, 5, 7), (2, 7, 3))], ids=str)
def test_every_product_has_the_left_factors_dtype_and_its_precisions_error(shapes):
    left, right = (random(*shape, seed=s).float() for s, shape in enumerate(shapes))
    exact = left.double() @ right.double()
    # 2⁻⁹ for each factor rounded to 8 bits; on a CPU tf32 is float32.
    size = left.double().abs() @ right.double().abs()
    for precision, tolerance in {"exact": 1e-6, "bfloat16": 2**-8, "tf32": 1e-3}.items():
        ours = PRODUCTS[precision](left, right)
        assert ours.dtype == torch.float32
        # The sum is rounded once more, to the 8 bits of bfloat16.
        assert ((ours - exact).abs() <= tolerance * (size + exact.abs())).all()
    assert not torch.equal(multiply_in_bfloat16(left, right), left @ right)
