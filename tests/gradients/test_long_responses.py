"""Sums, derivatives and statistics of long responses: as of short ones, in memory that grows by the token."""

import pytest
import torch
import transformers
from support.oracle import TrueFloat64, as_policy
from support.policies import HIDDEN, VOCAB, make_batch, make_policy
from support.tiers import every
from torch import nn

from analyses.benchmarks.peers import allocated_peak
from gradscope.gradients import (
    Resources,
    TokenGradientMeter,
    TokenJacobian,
    Vectors,
    attention,
    measuring,
)
from gradscope.gradients.budget import graph_memory
from gradscope.gradients.engine.metric import Metric
from gradscope.objective import batch_logprobs
from gradscope.policy import Policy
from gradscope.rollouts import Response, collate

EXACT = 1e-12
"""Of sums of some dozens of token gradients in float64, in parts of the largest entry: the order of sums differs."""
ROUNDED = 8 * torch.finfo(torch.float32).eps
"""Relative, of two orders of one computation in float64 in which transformers' norms cast to float32."""


@pytest.fixture
def small_machine(monkeypatch):
    """A machine on which nothing fits: attention in strips, blocks one at a time, a few tokens through the head."""

    def shrink(tokens: int) -> None:
        monkeypatch.setattr(attention, "SCORES", {"cpu": 1, "cuda": 1})
        monkeypatch.setattr(attention, "PLAIN", 0)
        monkeypatch.setattr(graph_memory, "GRAPH", {"cpu": 0, "cuda": 0})
        few = tokens * 6 * VOCAB * 8
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
        "entropy vjp": J.vjp(weights, of="entropy").rows,
        "scratch entropy vjp": TokenJacobian(model, batch, Resources(vectors=1)).vjp(weights, of="entropy").rows,
        "gram": torch.from_numpy(J.gram(weights).products),
        "totals": gram.totals.rows,
        "jvp": moved.logprob,
        "entropy jvp": moved.entropy,
    }


@pytest.mark.parametrize("name", every(5, ["qwen2", "llama", "gpt2", "gemma3", "qwen3_moe"]))
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
    every(5, [("qwen2", "vjp"), ("qwen2", "statistics"), ("qwen2", "jvp"), ("gemma3", "vjp"), ("qwen3_moe", "gram")]),
)
def test_memory_grows_by_the_token(small_machine, name, product):
    """Twice the tokens more are twice the bytes more; anything of n² would make them four times as many."""
    small_machine(tokens=16)
    first, second, third = (peak(name, product, length) for length in (128, 256, 512))
    # Experts have not quite the same share of the tokens.
    assert third - second == pytest.approx(2 * (second - first), rel=0.05 if name == "qwen3_moe" else 0.01)
    # Some dozens of states for each token, where plain attention's probabilities are 24 KiB.
    assert third - second < 256 * 100 * HIDDEN * 4


@pytest.mark.parametrize("name", ["gpt2", "gemma3", "qwen3_moe"])
def test_norms_are_the_same_where_a_graph_does_not_fit(monkeypatch, name):
    """Along the graph with backward rules for modules, and by one gradient a token with blocks that are run again."""
    policy = make_policy(name, torch.float64)
    ids = torch.randint(4, VOCAB, (24,), generator=torch.Generator().manual_seed(0))
    targets, found = torch.tensor([9, 17, 20, 23]), []
    numbers = sum(p.numel() for p in policy.model.parameters())
    scale = torch.rand(numbers, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for room in (1 << 30, 0):
        monkeypatch.setattr(graph_memory, "GRAPH", {"cpu": room, "cuda": room})
        with measuring(policy.model):
            meter = TokenGradientMeter(policy, ids, rules=False)
            meter.use(metric=Metric(policy.model, scale))
            found.append(meter.measure(ids, targets, torch.tensor([0, 2, 3]), temperature=0.7))
    whole, again = found
    for part in ("logit_grad_norm", "act_grad_norm", "param_grad_norm", "scaled_grad_norm"):
        torch.testing.assert_close(getattr(again, part), getattr(whole, part), rtol=ROUNDED, atol=0, equal_nan=True)
    assert again.module_grad_norm.keys() >= whole.module_grad_norm.keys()
    slack = ROUNDED * float(whole.param_grad_norm.nansum())
    for module, norms in again.module_grad_norm.items():
        expected = whole.module_grad_norm.get(module, 0 * whole.param_grad_norm)
        torch.testing.assert_close(norms, expected, rtol=0, atol=slack, equal_nan=True)


def test_a_block_more_costs_its_input_alone_where_blocks_are_run_again(monkeypatch):
    """Of 256 tokens: a graph holds some 3,600 bytes of each in a block, its input is 128."""
    monkeypatch.setattr(graph_memory, "GRAPH", {"cpu": 0, "cuda": 0})
    monkeypatch.setattr(attention, "PLAIN", 0)
    ids, peaks = torch.randint(4, VOCAB, (256,), generator=torch.Generator().manual_seed(0)), []
    for blocks in (4, 12):
        sizes = {"n_embd": HIDDEN, "n_layer": blocks, "n_head": 4, "vocab_size": VOCAB, "n_positions": 256}
        policy = as_policy(transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)))
        with measuring(policy.model, 256):
            meter = TokenGradientMeter(policy, ids[:24], rules=False)
            targets = torch.tensor([254, 255])
            both = torch.arange(2)
            peaks.append(allocated_peak(lambda m=meter, t=targets, b=both: m.measure(ids, t, b, temperature=1.0)))
    assert peaks[1] - peaks[0] <= 8 * 256 * 2 * 4 * HIDDEN


@pytest.mark.all
@pytest.mark.parametrize("room", [1 << 40, 0])
@pytest.mark.parametrize(("name", "length"), [("gpt2", 24), ("gemma3", 256), ("qwen3_moe", 256)])
def test_memory_along_the_graph_has_a_bound_that_is_not_far_off(monkeypatch, name, length, room):
    monkeypatch.setattr(graph_memory, "GRAPH", {"cpu": room, "cuda": room})
    policy, ids = make_policy(name), torch.randint(4, VOCAB, (length,), generator=torch.Generator().manual_seed(0))
    targets, both = torch.tensor([length - 2, length - 1]), torch.arange(2)
    with measuring(policy.model, length):
        meter = TokenGradientMeter(policy, ids[:16], rules=False, memory=1 << 20)
        peak = allocated_peak(lambda: meter.measure(ids, targets, both, temperature=1.0))
    bound = graph_memory.norms_bytes(policy.model, policy.blocks, length)
    assert bound / 3 <= peak <= bound
