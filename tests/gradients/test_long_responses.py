"""Sums, derivatives and statistics of long responses: as of short ones, in memory that grows by the token."""

import pytest
import torch
from support.oracle import TrueFloat64
from support.policies import HIDDEN, VOCAB, make_batch, make_policy
from torch import nn

from analyses.benchmarks.token_gradients import allocated_peak
from gradscope.gradients import Resources, TokenJacobian, Vectors, attention, sweep
from gradscope.objective import batch_logprobs
from gradscope.policy import Policy
from gradscope.rollouts import Response, collate

EXACT = 1e-12
"""Of sums of some dozens of token gradients in float64, in parts of the largest entry: the order of sums differs."""


@pytest.fixture
def small_machine(monkeypatch):
    """A machine on which nothing fits: attention in strips, blocks one at a time, a few tokens through the head."""

    def shrink(tokens: int) -> None:
        monkeypatch.setattr(attention, "SCORES", {"cpu": 1, "cuda": 1})
        monkeypatch.setattr(attention, "PLAIN", 0)
        monkeypatch.setattr(sweep, "GRAPH", {"cpu": 0, "cuda": 0})
        few = tokens * batch_logprobs.COPIES * VOCAB * 8
        monkeypatch.setattr(batch_logprobs, "LOGITS", {"cpu": few, "cuda": few})

    return shrink


def multiply(model: Policy | nn.Module, batch, weights) -> dict[str, torch.Tensor]:
    J = TokenJacobian(model, batch)
    sums = J.vjp(weights)
    gram, moved = J.gram(weights, pairs="within", totals=True), J.jvp(sums, of=("logprob", "entropy"))
    return {
        "logprob": J.statistics.logprob,
        "entropy": J.statistics.entropy,
        "vjp": sums.rows,
        "scratch vjp": TokenJacobian(model, batch, Resources(vectors=1)).vjp(weights).rows,
        "gram": torch.from_numpy(J.gram(weights).products),
        "totals": gram.totals.rows,
        "jvp": moved.logprob,
        "entropy jvp": moved.entropy,
    }


@pytest.mark.parametrize("name", ["qwen2", "llama", "gpt2", "gemma3", "qwen3_moe"])
def test_products_are_the_same_where_nothing_fits(small_machine, name):
    """Gemma 3 sees windows of 4 of some 15 tokens."""
    policy = make_policy(name, torch.float64)
    batch = make_batch(policy, temperature=0.7)
    weights = torch.randn(2, batch.num_tokens, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights[0, :6] = 0
    with TrueFloat64():
        expected = multiply(policy, batch, weights)
        small_machine(tokens=5)
        for model in (policy, policy.model):
            for product, values in multiply(model, batch, weights).items():
                largest = expected[product].abs().max().item()
                assert (values - expected[product]).abs().max().item() <= EXACT * largest, product


def peak(name: str, product: str, length: int) -> int:
    """Bytes that a product takes at most, of one response of this many tokens."""
    policy = make_policy(name)
    ids = torch.randint(4, VOCAB, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    J = TokenJacobian(policy, collate([Response(ids[:8], ids[8:])]))
    weights, vector = torch.ones(1, J.num_tokens), Vectors.zeros(policy.model, 1, None)
    vector.rows.fill_(0.01)
    return allocated_peak(
        {
            "statistics": lambda: J.statistics,
            "vjp": lambda: J.vjp(weights),
            "gram": lambda: J.gram(weights, pairs="within"),
            "jvp": lambda: J.jvp(vector, of=("logprob", "entropy")),
        }[product]
    )


@pytest.mark.parametrize(
    ("name", "product"),
    [("qwen2", "statistics"), ("qwen2", "vjp"), ("qwen2", "jvp"), ("gemma3", "vjp"), ("qwen3_moe", "gram")],
)
def test_memory_grows_by_the_token(small_machine, name, product):
    """Twice the tokens more are twice the bytes more; anything of n² would make them four times as many."""
    small_machine(tokens=16)
    first, second, third = (peak(name, product, length) for length in (128, 256, 512))
    # Experts have not quite the same share of the tokens.
    assert third - second == pytest.approx(2 * (second - first), rel=0.05 if name == "qwen3_moe" else 0.01)
    # Some dozens of states for each token, where plain attention's probabilities are 24 KiB.
    assert third - second < 256 * 100 * HIDDEN * 4
