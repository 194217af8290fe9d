"""Long sequences: attention in strips of queries, blocks computed again for each wave of tokens; the numbers stay."""

from __future__ import annotations

import pytest
import torch
from support.decoders import COMMON, SANDWICHED
from support.exact import TRUE_FLOAT64, assert_same, cached_policy, random_ids
from support.gradients import raising
from support.oracle import TrueFloat64, brute_force, largest_error
from support.policies import LAYERS, make_policy
from support.tiers import every

from gradscope.gradients import SequenceTokens, TokenGradientMeter, attention, measuring
from gradscope.gradients.engine import norms
from gradscope.gradients.engine.results import TokenGradients
from gradscope.policy import Policy

NARROW = norms.Widths(narrowest=3, narrowest_queries=5, widest=16)
"""Strips that a short sequence has many of."""
SMALL = 30_000
"""Bytes: too few for three blocks' activations of 31 positions, enough for what flows back of some tokens."""


class Forwards:
    """How often the first block runs forwards while this is open."""

    def __init__(self, policy: Policy) -> None:
        self.block, self.count = policy.blocks[0], 0

    def __enter__(self) -> Forwards:
        self._handle = self.block.register_forward_hook(self._add)
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def _add(self, *_: object) -> None:
        self.count += 1


def measure(policy: Policy, sequences: list[SequenceTokens], memory: int) -> tuple[list[TokenGradients], int]:
    """(numbers of all targets, how often the first block ran)."""
    with measuring(policy.model, max(len(s.ids) for s in sequences)):
        meter = TokenGradientMeter(policy, random_ids(20), memory=memory)
        meter.graph.record = raising(AssertionError("a sequence goes along the graph"))
        with Forwards(policy) as forwards:
            return meter.measure_together(sequences), forwards.count


def sequence(length: int, targets: range) -> SequenceTokens:
    ids = random_ids(length, seed=length)
    ids[2::5] = 9
    return SequenceTokens(ids, torch.tensor([*targets]), torch.arange(len(targets)))


@pytest.fixture(params=["in strips", "plain"])
def narrow(request, monkeypatch) -> None:
    """Narrow strips of the backward pass, and the model's own attention in strips (a band tells of windows) or not (a
    mask does)."""
    monkeypatch.setitem(norms.WIDTHS, "cpu", NARROW)
    monkeypatch.setattr(attention, "PLAIN", 0 if request.param == "in strips" else 1 << 30)
    monkeypatch.setattr(attention, "SCORES", {"cpu": 1, "cuda": 1})


# With biases, norms of heads, soft caps, windows of 4 and 20 positions, and one head of keys for all.
KINDS = every(9, [*COMMON, *SANDWICHED, "mistral_longer_window", "llama_biases_tied", "llama_one_key_head"])


@pytest.mark.parametrize("name", KINDS)
def test_blocks_that_are_computed_again_in_strips_are_exact(name, narrow):
    policy, alone = cached_policy(name), sequence(60, range(8, 60, 2))
    with TrueFloat64():
        (ours,), forwards = measure(policy, [alone], SMALL)
        truth = brute_force(policy, alone.ids, alone.targets)
    assert largest_error(ours, truth) < TRUE_FLOAT64
    # The head's pass, or some, then one for each wave: of more than a token each, and more than one.
    assert 3 < forwards < len(alone.targets) / 2


@pytest.mark.parametrize("name", every(2, ["qwen3", "gemma2"]))
def test_sequences_beside_one_another_are_computed_again_together(name, narrow):
    policy, both = cached_policy(name), [sequence(48, range(20, 48, 3)), sequence(31, range(9, 31, 4))]
    with TrueFloat64():
        found, _ = measure(policy, both, SMALL)
        for ours, one in zip(found, both, strict=True):
            assert largest_error(ours, brute_force(policy, one.ids, one.targets)) < TRUE_FLOAT64


LONG = 1200
ROUNDINGS = LAYERS * (2 * (32 + 32 + 32 + 48 + 32) + 4 * LONG) + LONG
"""One after another on the longest way there and back: in each layer sums over the widths of its matrices and norms,
and in attention over keys or queries; then over positions in a norm."""
FLOAT32 = 2 * 4 * ROUNDINGS**0.5 * 2**-24
"""λ √n u with λ = 4 (see support.exact), twice: neither side is exact. 6e-5."""


@pytest.mark.parametrize("name", every(2, ["qwen2", "gemma3"]))
def test_a_long_sequence_in_strips_and_waves_has_the_numbers_of_one_that_is_held_whole(name):
    policy, alone = make_policy(name), sequence(LONG, range(500, LONG, 50))
    (whole,), once = measure(policy, [alone], 1 << 40)
    (ours,), forwards = measure(policy, [alone], 1 << 20)
    assert once == 1 and forwards > 2
    assert_same(ours, whole, FLOAT32)


@pytest.mark.all
@pytest.mark.parametrize("name", [*COMMON, *SANDWICHED])
def test_norms_of_a_prefix_of_2048_tokens_are_exact(name):
    """With the strips of any run; the memory is what a large policy has of it, in proportion."""
    policy, alone = cached_policy(name), sequence(2049, range(2000, 2049, 12))
    with TrueFloat64():
        (ours,), forwards = measure(policy, [alone], 1 << 19)
        truth = brute_force(policy, alone.ids, alone.targets)
    assert forwards > 2
    assert largest_error(ours, truth) < TRUE_FLOAT64


@pytest.mark.all
@pytest.mark.parametrize("name", ["qwen2", "gemma3"])
def test_norms_of_a_prefix_of_8192_tokens_are_those_that_are_found_without_strips(name, monkeypatch):
    policy, alone = make_policy(name), sequence(8193, range(8100, 8193, 31))
    (ours,), forwards = measure(policy, [alone], 1 << 21)
    monkeypatch.setattr(attention, "PLAIN", 1 << 50)
    (whole,), once = measure(policy, [alone], 1 << 50)
    assert once == 1 and forwards > 2
    # As FLOAT32, of sums over more positions: 1.6e-4.
    assert_same(ours, whole, 2 * 4 * (3 * (2 * 176 + 4 * 8192) + 8192) ** 0.5 * 2**-24)
