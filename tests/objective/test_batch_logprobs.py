"""log π of kept tokens alone: equal to the full logits' own, on every architecture, wherever the padding is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from support.gradients import raising
from support.oracle import TrueFloat64
from support.policies import CAUSAL, HIDDEN, PAD, Share, make_batch, make_policy, make_responses, pad_both_sides
from support.refusals import refused
from support.tiers import every
from torch import Tensor, nn

from gradscope.objective import batch_statistics, kept_logprobs, logprobs, micro_batches
from gradscope.objective.batch_logprobs import scored_loss_logprobs
from gradscope.objective.logprobs import token_statistics
from gradscope.policy import Policy, without_packing
from gradscope.rollouts import Response, TokenBatch, collate
from gradscope.runs import Processes

CPU = torch.device("cpu")
NAMES = ("logprob", "log_one_minus_prob", "entropy")


def mixed_responses(policy: Policy) -> list[Response]:
    """Ten responses at two temperatures: masks with holes, one-token prompts and responses, one that keeps nothing."""
    warm = make_responses(policy, temperature=0.7)
    cool = make_responses(policy, lengths=(1, 5, 6, 3), prompt_lengths=(1, 1, 2, 2), temperature=1.6, seed=1)
    return [*warm, *cool[:3], replace(cool[3], response_mask=[False] * 3)]


def pad(responses: list[Response], side: str) -> TokenBatch:
    if side == "both":
        return pad_both_sides(collate(responses, pad_id=PAD), 2, 3)
    return collate(responses, pad_id=PAD, side=side)


def mixed_batch(policy: Policy, side: str = "right") -> TokenBatch:
    return pad(mixed_responses(policy), side)


@torch.no_grad()
def naive_logits(model: nn.Module, batch: TokenBatch) -> Iterator[tuple[int, int, int, Tensor]]:
    """(row, column, id, logits / T) of every kept token: each response alone, without padding, all its logits."""
    for row in range(len(batch)):
        first = int(batch.attention_mask[row].nonzero()[0])
        ids, kept = batch.sequence(row)
        logits = model(input_ids=ids[None], use_cache=False).logits[0] / batch.temperature[row].item()
        for s in kept.tolist():
            yield row, first + s, int(ids[s]), logits[s - 1]


def naive_logprobs(model: nn.Module, batch: TokenBatch) -> Tensor:
    """log π of every kept token [B, S], by log_softmax; 0 elsewhere."""
    out = torch.zeros(batch.input_ids.shape, dtype=torch.float64)
    for row, column, token, logits in naive_logits(model, batch):
        out[row, column] = logits.double().log_softmax(-1)[token]
    return out


def spread(model: nn.Module, piece: TokenBatch) -> Tensor:
    """kept_logprobs, each where its token stands; 0 elsewhere."""
    found = kept_logprobs(model, piece)
    return found.new_zeros(piece.input_ids.shape).masked_scatter(piece.response_mask, found)


def put_back(batch: TokenBatch, size: int, model: nn.Module) -> Tensor:
    """kept_logprobs of the batch's micro-batches, each at the columns where its tokens stand in the batch."""
    out = torch.zeros(batch.input_ids.shape, dtype=torch.float64)
    for rows, piece in micro_batches(batch, size):
        values = spread(model, piece)
        for i, row in enumerate(rows.tolist()):
            first = int(batch.attention_mask[row].nonzero()[0])
            width = min(piece.input_ids.shape[1], out.shape[1] - first)
            assert not values[i, width:].any()
            out[row, first : first + width] += values[i, :width].detach()
    return out


@pytest.fixture(scope="module")
def policy() -> Policy:
    return make_policy("llama", torch.float64)


@pytest.mark.parametrize("name", every(2, CAUSAL))
def test_logprobs_are_those_of_the_full_logits_wherever_the_padding_and_however_small_the_pieces(name):
    policy = make_policy(name, torch.float64)
    responses = mixed_responses(policy)
    with TrueFloat64():
        right = pad(responses, "right")
        expected = naive_logprobs(policy.model, right)[right.response_mask]
        for side, sizes in [("right", (1, 10)), ("left", (2, 10)), ("both", (3,))]:
            batch = pad(responses, side)
            for size in sizes:
                found = put_back(batch, size, policy.model)
                # Everything is in float64: what differs is the order of sums.
                torch.testing.assert_close(found[batch.response_mask], expected, rtol=1e-11, atol=1e-12)
                assert not found[~batch.response_mask].any()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_float32_and_both_kinds_of_attention_give_the_same_to_rounding(attention):
    policy = make_policy("qwen2", attention=attention)
    batch = mixed_batch(policy, "left")
    expected = naive_logprobs(make_policy("qwen2", torch.float64).model, batch)
    # Logits of size 10 have float32's rounding of 1e-6, which the layers before them multiply.
    torch.testing.assert_close(put_back(batch, 4, policy.model), expected, rtol=0, atol=3e-5)


def test_a_model_in_half_precision_gives_logprobs_in_float32():
    policy = make_policy("llama", torch.bfloat16)
    batch = make_batch(policy)
    assert {kept_logprobs(policy.model, piece).dtype for _, piece in micro_batches(batch, 2)} == {torch.float32}
    found = batch_statistics(policy.model, batch, micro_batch_size=2, device=CPU)
    assert found.entropy.dtype == torch.float32


def test_the_head_sees_the_kept_tokens_alone_and_no_column_after_the_last_of_them_is_computed(policy):
    batch = mixed_batch(policy, "both")
    seen: list[tuple[int, ...]] = []
    handles = [
        policy.model.get_input_embeddings().register_forward_hook(lambda _, args, out: seen.append(args[0].shape)),
        policy.model.get_output_embeddings().register_forward_hook(lambda _, args, out: seen.append(args[0].shape)),
    ]
    try:
        for rows, piece in micro_batches(batch, 3):
            seen.clear()
            with without_packing():
                kept_logprobs(policy.model, piece)
            needed = 0
            for row in rows.tolist():
                first = int(batch.attention_mask[row].nonzero()[0])
                needed = max(needed, int(batch.response_mask[row].nonzero()[-1]) - first + 1)
            assert seen == [(len(rows), needed), (1, int(batch.response_mask[rows].sum()), HIDDEN)]
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 10, 99])
def test_micro_batches_hold_every_response_that_keeps_a_token_once_longest_first(policy, size):
    batch = mixed_batch(policy, "both")
    pieces = micro_batches(batch, size)
    rows = [row for piece_rows, _ in pieces for row in piece_rows.tolist()]
    assert sorted(rows) == [row for row in range(len(batch)) if batch.response_mask[row].any()]
    assert len(rows) == 9
    assert [len(r) for r, _ in pieces][:-1] == [size] * (len(pieces) - 1)
    widths = [piece.input_ids.shape[1] for _, piece in pieces]
    assert widths == sorted(widths, reverse=True)
    for piece_rows, piece in pieces:
        for i, row in enumerate(piece_rows.tolist()):
            for name in ("input_ids", "old_logprobs", "ref_logprobs"):
                theirs, ours = getattr(batch, name)[row], getattr(piece, name)[i]
                assert ours[piece.response_mask[i]].tolist() == theirs[batch.response_mask[row]].tolist()
            assert piece.temperature[i] == batch.temperature[row]


@pytest.mark.parametrize("size", [1, 2, 4, 99])
def test_by_group_the_responses_of_a_group_stand_together_that_of_the_longest_first(policy, size):
    batch = mixed_batch(policy, "both")
    pieces = micro_batches(batch, size, by_group=True)
    rows = [row for piece_rows, _ in pieces for row in piece_rows.tolist()]
    assert sorted(rows) == [row for row in range(len(batch)) if batch.response_mask[row].any()]
    ends = [int(batch.response_mask[row].nonzero()[-1] - batch.attention_mask[row].nonzero()[0]) for row in rows]
    groups = [int(batch.group_ids[row]) for row in rows]
    longest = {group: max(end for end, g in zip(ends, groups, strict=True) if g == group) for group in groups}
    expected = sorted(zip(groups, ends, strict=True), key=lambda pair: (-longest[pair[0]], pair[0], -pair[1]))
    assert list(zip(groups, ends, strict=True)) == expected
    assert len(set(longest.values())) > 1 and len(rows) > len(longest)


def test_one_pass_gives_logprobs_for_the_loss_and_statistics_of_the_same_tokens(policy):
    _, piece = micro_batches(mixed_batch(policy), 10)[0]
    parameters = list(policy.model.parameters())
    with TrueFloat64():
        expected = spread(policy.model, piece)
        found, statistics = scored_loss_logprobs(policy.model, piece)
        torch.testing.assert_close(found, torch.where(piece.response_mask, expected, 0.0), rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(statistics.logprob, expected[piece.response_mask], rtol=1e-11, atol=1e-12)
        wanted = torch.autograd.grad(expected[piece.response_mask].sum(), parameters)
        for ours, theirs in zip(torch.autograd.grad(found.sum(), parameters), wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("name", "side"), [("llama", "left"), ("gemma2", "right"), ("gpt2", "both"), ("opt", "left")])
def test_statistics_are_those_of_the_full_logits_token_by_token_and_zero_elsewhere(name, side, monkeypatch):
    policy = make_policy(name, torch.float64)
    batch = mixed_batch(policy, side)
    with TrueFloat64():
        expected = torch.zeros(3, *batch.input_ids.shape, dtype=torch.float64)
        for row, column, token, logits in naive_logits(policy.model, batch):
            alone = token_statistics(logits, torch.tensor(token))
            expected[:, row, column] = torch.stack([getattr(alone, n) for n in NAMES])
        for chunk, size in [(2048, 4), (1, 1), (3, 4), (7, len(batch))]:
            monkeypatch.setattr(logprobs, "CACHED", chunk * policy.vocab_size)
            found = batch_statistics(policy.model, batch, micro_batch_size=size, device=CPU)
            for index, field in enumerate(NAMES):
                # log(1−π) of a likely token is the log of a small number: its own digits are those of the logits.
                torch.testing.assert_close(getattr(found, field), expected[index], rtol=1e-9, atol=1e-12)


def test_processes_find_disjoint_shares_of_the_statistics_in_equally_many_forward_passes(policy):
    batch = mixed_batch(policy)
    whole = batch_statistics(policy.model, batch, micro_batch_size=2, device=CPU)
    calls: list[int] = []
    handle = policy.model.register_forward_hook(lambda *_: calls.append(1))
    try:
        shares = []
        for rank in range(2):
            calls.clear()
            share = Share(rank, 2)
            shares.append(batch_statistics(policy.model, batch, micro_batch_size=2, device=CPU, processes=share))
            assert len(calls) == 3  # of five pieces, and the second process runs an empty one
    finally:
        handle.remove()
    for name in NAMES:
        first, second = (getattr(share, name) for share in shares)
        assert not ((first != 0) & (second != 0)).any()
        assert torch.equal(first + second, getattr(whole, name))


def test_items_are_dealt_once_each_in_equally_long_shares():
    for count in range(1, 6):
        for number in range(9):
            shares = [Processes(rank, count).deal(range(number), None) for rank in range(count)]
            assert {len(share) for share in shares} == {-(-number // count)}
            dealt = [item for share in shares for item in share if item is not None]
            assert sorted(dealt) == list(range(number))
            fillers = [share.count(None) for share in shares]
            assert max(fillers) <= 1
            assert fillers == sorted(fillers)


def test_the_head_is_whole_again_afterwards_even_if_the_model_breaks(policy):
    batch = make_batch(policy)
    _, piece = micro_batches(batch, 6)[0]
    kept_logprobs(policy.model, piece)
    assert policy.model(input_ids=batch.input_ids).logits.shape[:2] == batch.input_ids.shape

    handle = policy.model.register_forward_hook(raising(MemoryError()))
    with pytest.raises(MemoryError):
        kept_logprobs(policy.model, piece)
    handle.remove()
    assert policy.model(input_ids=batch.input_ids).logits.shape[:2] == batch.input_ids.shape


def test_a_model_that_names_no_head_is_refused():
    policy = make_policy("llama")
    policy.model.get_output_embeddings = lambda: None
    _, piece = micro_batches(make_batch(policy), 6)[0]
    with refused("LlamaForCausalLM"):
        kept_logprobs(policy.model, piece)
