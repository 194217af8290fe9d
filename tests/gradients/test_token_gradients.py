"""The engine against float64 brute force: every architecture, every token, every layer, however it is cut up."""

from __future__ import annotations

import contextlib
import functools
from itertools import product

import pytest
import torch
from support import handmade
from support.decoders import COMMON, SANDWICHED
from support.exact import FLOAT32, TRUE_FLOAT64, assert_same, cached_policy, random_ids
from support.oracle import TrueFloat64, Truth, as_policy, brute_force, in_float64, largest_error, measure_all, sequences
from support.policies import CAUSAL, VOCAB, make_batch, make_policy
from support.refusals import refused
from support.tiers import every
from torch import Tensor

from gradscope.errors import InputError, SelfCheckError
from gradscope.gradients import SequenceTokens, TokenGradientMeter, check_engine, measuring
from gradscope.gradients.engine.results import TokenGradients
from gradscope.policy import Policy
from gradscope.rollouts import TokenBatch

CASTS = 1e-5
"""transformers computes norms, softmax and rotations in float32 even in a float64 model: 6e-8 each, some dozens."""
PATHS = [*((name, True) for name in CAUSAL), *((name, False) for name in (*COMMON, *SANDWICHED))]
"""(name, rules): the decoders that backward rules know go along their graph too."""


@functools.cache
def cached_batch(name: str, temperature: float = 1.0) -> TokenBatch:
    return make_batch(cached_policy(name), temperature=temperature)


@pytest.mark.parametrize("name", ["qwen2", "gpt2", "gemma2"])
def test_the_oracle_agrees_with_plain_autograd_from_log_softmax_where_float64_does_not_cancel(name):
    policy = cached_policy(name)
    for ids, targets, temperature in sequences(cached_batch(name))[:2]:
        ours, plain = (brute_force(policy, ids, targets, temperature=temperature, cancelling=c) for c in (False, True))
        torch.testing.assert_close(ours.layers, plain.layers, rtol=1e-9, atol=0.0)
        torch.testing.assert_close(ours.parameters, plain.parameters, rtol=1e-9, atol=0.0)
        picked = torch.log_softmax(policy.model(input_ids=ids[None]).logits[0, targets - 1], -1)
        torch.testing.assert_close(ours.logprob, picked.gather(1, ids[targets][:, None])[:, 0].detach())


_TRUTHS: dict[tuple, Truth] = {}


def true_norms(name: str, ids: Tensor, targets: Tensor, temperature: float) -> Truth:
    """What brute force finds, once for both paths."""
    key = name, tuple(ids.tolist()), tuple(targets.tolist()), temperature
    if key not in _TRUTHS:
        _TRUTHS[key] = brute_force(cached_policy(name), ids, targets, temperature=temperature)
    return _TRUTHS[key]


@pytest.mark.parametrize("path, temperature", every(11, product(PATHS, [1.0, 0.7])))
def test_float64_equals_brute_force_for_every_token_layer_and_module(path, temperature):
    name, rules = path
    with TrueFloat64():
        policy = cached_policy(name)
        rows = sequences(cached_batch(name, temperature))
        with measuring(policy.model):
            meter = TokenGradientMeter(policy, rows[0][0], rules=rules)
        for ids, targets, t in rows if temperature == 1.0 else rows[:3]:
            assert t == pytest.approx(temperature)
            truth = true_norms(name, ids, targets, temperature)
            with measuring(policy.model):
                ours = meter.measure(ids, targets, torch.arange(len(targets)), temperature=temperature)
            assert largest_error(ours, truth) < TRUE_FLOAT64
            torch.testing.assert_close(ours.statistics.logprob, truth.logprob, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", every(3, CAUSAL))
def test_float64_equals_brute_force_with_the_casts_of_transformers_left_in(name):
    for ids, targets, temperature in sequences(cached_batch(name))[:1]:
        truth = brute_force(cached_policy(name), ids, targets, temperature=temperature)
        assert largest_error(measure_all(cached_policy(name), ids, targets, temperature=temperature), truth) < CASTS


@torch.no_grad()
def sure_sequence(policy: Policy, length: int = 20) -> Tensor:
    """Of many random sequences the one with the surest next token somewhere, and that token put there."""
    ids = torch.randint(4, VOCAB, (200, length), generator=torch.Generator().manual_seed(0))
    logits = policy.model(input_ids=ids, use_cache=False).logits[:, 3:-1]
    top = logits.topk(2).values
    row, position = divmod(int((top[..., 0] - top[..., 1]).argmax()), logits.shape[1])
    ids[row, position + 4] = logits[row, position].argmax()
    return ids[row]


@pytest.mark.parametrize("name, rules", every(5, PATHS))
def test_float32_equals_float64_also_for_tokens_that_are_nearly_certain(name, rules, temperature=0.7):
    policy = make_policy(name, sharpness=14.0)
    sampled = sequences(make_batch(policy, lengths=(8,), prompt_lengths=(5,), temperature=temperature))
    surest = 1.0
    for ids, targets in ((sure_sequence(policy), torch.arange(3, 20)), sampled[0][:2]):
        with TrueFloat64():
            truth = brute_force(in_float64(policy), ids, targets, temperature=temperature)
        ours = measure_all(policy, ids, targets, temperature=temperature, rules=rules)
        assert largest_error(ours, truth) < FLOAT32
        surest = min(surest, float(truth.logits.min()))
    # ‖e − π‖ lies between 1 − π and √2 (1 − π): there was a token to be wrong about.
    assert surest < 1e-7


def test_a_token_whose_square_is_below_float32_keeps_its_norms():
    policy = make_policy("llama", sharpness=60.0)
    found = 0
    for ids, targets, _ in sequences(make_batch(policy, holes=False, surprise=0.0)):
        with TrueFloat64():
            truth = brute_force(in_float64(policy), ids, targets)
        sure = truth.logits < 1e-22
        ours, found = measure_all(policy, ids, targets), found + int(sure.sum())
        # A logit of 300 is rounded by 3e-5 here.
        torch.testing.assert_close(ours.param_grad_norm[sure].double(), truth.parameters[sure], rtol=1e-3, atol=0.0)
        torch.testing.assert_close(ours.act_grad_norm[sure].double(), truth.layers[sure], rtol=1e-3, atol=0.0)
        torch.testing.assert_close(ours.logit_grad_norm[sure].double(), truth.logits[sure], rtol=1e-3, atol=0.0)
    assert found


# However it is cut up.


@pytest.mark.parametrize("name", every(3, ["qwen2", "gpt2", "mixtral"]))
@pytest.mark.parametrize(
    "settings",
    every(2, [{"rows": 1}, {"rows": 64}, {"rows": 64, "rules": False}, {"rows": 4096}, {"memory": 1}]),
    ids=str,
)
def test_chunks_and_slices_of_the_head_change_nothing(name, settings):
    with TrueFloat64():
        ids, targets = random_ids(24), torch.arange(3, 24)
        expected = measure_all(cached_policy(name), ids, targets)
        assert_same(measure_all(cached_policy(name), ids, targets, **settings), expected)


@pytest.mark.parametrize("rows", [1, 100])
def test_a_prefix_shorter_than_the_width_in_a_sequence_twice_as_long_is_exact(rows):
    # Here the factor of the whole sequence is the input itself, and the prefix must keep all of its columns.
    policy = as_policy(handmade.make("plain"))
    ids, targets = random_ids(3 * handmade.WIDTH, handmade.VOCAB), torch.arange(1, 3 * handmade.WIDTH)
    truth = brute_force(policy, ids, targets)
    assert largest_error(measure_all(policy, ids, targets, rows=rows), truth) < TRUE_FLOAT64


SEQUENCES = {
    "one token of a response": (random_ids(12), [11]),
    "one token kept in the middle": (random_ids(12), [6]),
    "the response starts at index 1": (random_ids(9), [1, 2, 3, 5, 8]),
    "two tokens in all": (random_ids(2), [1]),
    "three tokens in all": (random_ids(3), [1, 2]),
    "one token repeated": (torch.full((14,), 9), list(range(2, 14))),
    "two tokens in turn": (torch.tensor([5, 9] * 8), list(range(1, 16))),
    "padding's id within the text": (torch.tensor([5, 0, 9, 0, 0, 7, 0, 8]), [1, 3, 4, 6, 7]),
    "a wide gap": (random_ids(40), [2, 3, 38, 39]),
}


@pytest.mark.parametrize("case", every(6, SEQUENCES))
@pytest.mark.parametrize(
    "name, rules", every(3, [("qwen2", True), ("qwen2", False), ("qwen3", True), ("mixtral", False), ("opt", False)])
)
def test_unusual_sequences_are_exact_on_both_paths_and_close_in_float32(name, rules, case):
    ids, targets = SEQUENCES[case][0], torch.tensor(SEQUENCES[case][1])
    policy, probe = cached_policy(name), random_ids(20)
    with TrueFloat64():
        truth = brute_force(policy, ids, targets)
        assert largest_error(measure_all(policy, ids, targets, rules=rules), truth) < TRUE_FLOAT64
        for settings in ({}, {"memory": 1}):  # one token a chunk, one of them a pass of the head
            # With the structure learned from another, longer sequence, as a table does.
            ours = measure_all(policy, ids, targets, probe_ids=probe, rules=rules, **settings)
            assert largest_error(ours, truth) < TRUE_FLOAT64
    narrow = measure_all(make_policy(name), ids, targets, probe_ids=probe, rules=rules)
    assert largest_error(narrow, truth) < FLOAT32


@pytest.mark.parametrize("length", [4, 5, 6, 8])
def test_a_sequence_as_long_as_there_are_heads_is_exact(length):
    # A norm over [1, heads, positions, …] must not take heads for positions.
    policy = as_policy(handmade.make("modules_that_see_heads_before_positions"))
    ids, targets = random_ids(length, handmade.VOCAB), torch.arange(1, length)
    truth = brute_force(policy, ids, targets)
    assert largest_error(measure_all(policy, ids, targets, rows=1), truth) < TRUE_FLOAT64


# Models that nobody wrote with this engine in mind.


def measure_like_a_table(policy: Policy, ids: Tensor, targets: Tensor, *, rows: int) -> TokenGradients:
    """First the self-check on a few tokens, then everything."""
    some = torch.tensor([0, len(targets) // 2, len(targets) - 1]).unique()
    with measuring(policy.model):
        meter = TokenGradientMeter(policy, ids, rows=rows)
        check_engine(meter, [SequenceTokens(ids, targets, some)])
        return meter.measure(ids, targets, torch.arange(len(targets)), temperature=1.0)


def handmade_sequences() -> list[tuple[Tensor, Tensor, int]]:
    """(ids, targets, rows): with repeats; token by token, short, and twice as long as the width."""
    cases = []
    for length, first, step, rows in ((14, 1, 1, 1), (5, 1, 1, 1024), (36, 2, 3, 60)):
        ids = random_ids(length, handmade.VOCAB, seed=length)
        ids[2::3] = 7
        cases.append((ids, torch.arange(first, length, step), rows))
    return cases


def truth_in_eval_mode(policy: Policy, ids: Tensor, targets: Tensor) -> Truth:
    modes = [(m, m.training) for m in policy.model.modules()]
    policy.model.eval()
    truth = brute_force(policy, ids, targets)
    for module, mode in modes:
        module.training = mode
    return truth


@pytest.mark.parametrize("name", every(8, handmade.EXACT))
def test_a_handmade_decoder_is_measured_exactly(name):
    policy = as_policy(handmade.make(name))
    policy.model.train("training_mode" in name)
    for ids, targets, rows in handmade_sequences():
        truth = truth_in_eval_mode(policy, ids, targets)
        assert largest_error(measure_like_a_table(policy, ids, targets, rows=rows), truth) < TRUE_FLOAT64


@pytest.mark.parametrize("name", handmade.REFUSED)
def test_a_handmade_decoder_is_refused_or_measured_exactly(name):
    policy = as_policy(handmade.make(name))
    for ids, targets, rows in handmade_sequences():
        # Refused is fine, and so is exact; a wrong number is not.
        with contextlib.suppress(InputError, SelfCheckError):
            ours = measure_like_a_table(policy, ids, targets, rows=rows)
            assert largest_error(ours, brute_force(policy, ids, targets)) < TRUE_FLOAT64


def test_a_model_that_sees_later_tokens_is_refused():
    model = handmade.make("plain")
    model.model.layers[0].mix = lambda q, k, v: (q @ k.mT).softmax(-1) @ v
    with refused():
        measure_all(as_policy(model), random_ids(12, handmade.VOCAB), torch.arange(3, 12))
