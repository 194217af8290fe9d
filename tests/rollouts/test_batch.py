"""TokenBatch: padding and batching move nothing, and whatever would misalign is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.policies import make_batch, make_policy, make_responses, pad_both_sides
from support.refusals import refused

from gradscope.errors import InputError
from gradscope.rollouts import Response, TokenBatch, collate

PER_TOKEN = ("advantages", "old_logprobs", "ref_logprobs")


@pytest.fixture(scope="module")
def policy():
    return make_policy("llama")


def contents(batch: TokenBatch) -> list[dict]:
    """What each row says about its response's tokens, by a plain loop over columns."""
    out = []
    for row in range(len(batch)):
        tokens = []
        for column in range(batch.input_ids.shape[1]):
            if not batch.attention_mask[row, column]:
                continue
            kept = bool(batch.response_mask[row, column])
            values = [
                float(getattr(batch, n)[row, column]) for n in PER_TOKEN if kept and getattr(batch, n) is not None
            ]
            position = column - int(batch.response_start[row])
            tokens.append((int(batch.input_ids[row, column]), kept, position, values))
        out.append({"tokens": tokens, "group": int(batch.group_ids[row]), "temperature": float(batch.temperature[row])})
    return out


def test_padding_on_the_left_the_right_and_both_sides_holds_the_same_tokens(policy):
    right = make_batch(policy, side="right")
    left = make_batch(policy, side="left")
    both = pad_both_sides(right, 2, 3)
    assert not torch.equal(left.input_ids, right.input_ids)
    assert contents(left) == contents(right) == contents(both)
    for row in range(len(right)):
        for batch in (left, both):
            for ours, theirs in zip(batch.sequence(row), right.sequence(row), strict=True):
                assert torch.equal(ours, theirs)


def test_positions_count_dropped_tokens_too_wherever_the_padding_is(policy):
    for batch in (make_batch(policy, side="left"), pad_both_sides(make_batch(policy), 3, 1)):
        for row, response in enumerate(make_responses(policy)):
            kept = [s for s, keep in enumerate(response.response_mask) if keep]
            assert batch.positions()[row][batch.response_mask[row]].tolist() == kept
            ids, index = batch.sequence(row)
            assert index.tolist() == [len(response.prompt_ids) + s for s in kept]
            assert ids.tolist() == response.prompt_ids + response.response_ids


def test_a_mask_with_holes_counts_only_the_kept_tokens(policy):
    responses = make_responses(policy)
    assert any(not all(r.response_mask) for r in responses)
    assert collate(responses).num_tokens == sum(sum(r.response_mask) for r in responses)


def test_micro_batches_hold_every_row_once_and_in_order(policy):
    batch = make_batch(policy)
    parts = list(batch.micro_batches(4))
    assert [len(p) for p in parts] == [4, 2]
    assert [row for p in parts for row in contents(p)] == contents(batch)
    assert sum(p.num_tokens for p in parts) == batch.num_tokens


@pytest.mark.parametrize("side", ["right", "left", "both"])
def test_left_aligned_rows_start_at_column_zero_and_say_the_same(policy, side):
    batch = pad_both_sides(make_batch(policy), 2, 3) if side == "both" else make_batch(policy, side=side)
    aligned, columns = batch.left_aligned()
    assert contents(aligned) == contents(batch)
    lengths = [int(mask.sum()) for mask in batch.attention_mask]
    assert aligned.input_ids.shape == columns.shape == (6, max(lengths))
    for row, length in enumerate(lengths):
        assert aligned.attention_mask[row].tolist() == [s < length for s in range(max(lengths))]
        real = batch.attention_mask[row].nonzero()[:, 0]
        assert columns[row, :length].tolist() == real.tolist()
        assert aligned.input_ids[row, length:].tolist() == [0] * (max(lengths) - length)
        # What is put at `columns` comes back to where it was: how a result finds its token.
        assert batch.input_ids[row, columns[row, :length]].tolist() == aligned.input_ids[row, :length].tolist()
    assert columns.max() < batch.input_ids.shape[1]


def test_narrow_keeps_the_first_columns_of_every_tensor(policy):
    batch = make_batch(policy)
    narrow = batch.narrow(7)
    assert narrow.tensors().keys() == batch.tensors().keys()
    for name, value in batch.tensors().items():
        wanted = value[:, :7] if value.dim() == 2 else value
        torch.testing.assert_close(narrow.tensors()[name], wanted, rtol=0, atol=0, equal_nan=True)
    assert [row["tokens"] for row in contents(narrow)] == [row["tokens"][:7] for row in contents(batch)]
    assert narrow.num_tokens == int(batch.response_mask[:, :7].sum())
    assert contents(batch.narrow(batch.input_ids.shape[1])) == contents(batch)


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
)
def test_to_moves_every_tensor_and_changes_none(policy, device):
    batch = make_batch(policy)
    moved = batch.to(torch.device(device))
    assert {value.device.type for value in moved.tensors().values()} == {device}
    assert moved.advantages is None
    assert contents(moved.to(torch.device("cpu"))) == contents(batch)


def test_a_field_that_only_some_responses_have_is_nan_for_the_others():
    batch = collate(
        [Response([4], [5, 6], advantage=2.0, reward=1.0), Response([4], [5, 6, 7], old_logprobs=[-1.0, -2.0, -3.0])]
    )
    assert batch.advantages.isnan().tolist() == [[True, False, False, True], [True] * 4]
    assert batch.old_logprobs[1].tolist()[1:] == [-1.0, -2.0, -3.0]
    assert batch.rewards.isnan().tolist() == [False, True]
    assert batch.ref_logprobs is None


def test_an_advantage_per_token_stays_with_its_token_and_one_number_is_spread():
    batch = collate([Response([4, 4], [5, 6], advantage=[0.5, -0.5]), Response([4], [5, 6, 7], advantage=3.0)])
    assert batch.advantages[0, 2:4].tolist() == [0.5, -0.5]
    assert batch.advantages[1, 1:4].tolist() == [3.0, 3.0, 3.0]


def test_masks_that_would_misalign_are_refused():
    batch = collate([Response([4, 5], [6, 7])])
    with refused():
        replace(batch, attention_mask=torch.tensor([[True, False, True, True]]), response_mask=torch.zeros(1, 4).bool())
    with refused():
        replace(batch, attention_mask=torch.zeros(1, 4).bool(), response_mask=torch.zeros(1, 4).bool())
    with refused():
        replace(batch, attention_mask=torch.tensor([[True, True, True, False]]))


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_a_temperature_without_a_gradient_is_refused(temperature):
    with refused("temperature"):
        collate([Response([4], [5], temperature=temperature)])


HANDMADE = {
    "a mask of numbers": lambda b: {"response_mask": b.response_mask.long()},
    "ids of fractions": lambda b: {"input_ids": b.input_ids.float()},
    "a column too few": lambda b: {"old_logprobs": b.old_logprobs[:, 1:]},
    "a row too many": lambda b: {"rewards": torch.zeros(len(b) + 1)},
    "one number for all": lambda b: {"temperature": torch.tensor(1.0)},
    "an advantage per response": lambda b: {"advantages": torch.zeros(len(b))},
    "a list": lambda b: {"rewards": [0.0] * len(b)},
    "no groups": lambda b: {"group_ids": None},
    "a response from its first token on": lambda b: {
        "response_mask": b.attention_mask,
        "response_start": b.group_ids * 0,
    },
    "a response before its start": lambda b: {"response_start": b.response_start + 1},
}


@pytest.mark.parametrize("what", HANDMADE)
def test_tensors_that_do_not_fit_together_are_refused(policy, what):
    batch = make_batch(policy)
    with pytest.raises((InputError, TypeError)) as caught:  # TypeError: of jaxtyping, where shapes are checked
        replace(batch, **HANDMADE[what](batch))
    assert any(name in str(caught.value) for name in HANDMADE[what](batch))


def test_an_empty_batch_is_refused():
    with refused():
        collate([])
    with refused():
        collate([Response([4], [5])]).select(torch.arange(0))
