"""Gradients of entropies and of divergences from a teacher, against one autograd call per token in float64."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from support.oracle import TrueFloat64, in_float64
from support.policies import VOCAB, make_batch, make_policy, make_tokenizer
from support.tiers import every
from torch import Tensor

from gradscope.errors import InputError
from gradscope.gradients import Resources, TokenGradientMeter, TokenJacobian
from gradscope.gradients.budget import graph_memory
from gradscope.gradients.engine import meter as meters
from gradscope.gradients.engine.self_check import check_engine
from gradscope.objective import Divergence, Quantity, batch_logprobs, make_quantity
from gradscope.policy import Policy, float_parameters, without_packing
from gradscope.rollouts import TokenBatch

SIX = ("llama", "qwen2", "gemma2", "gpt2", "gpt_neox", "mixtral")
TOP = 6
NAMES = ("reverse", "entropy", "forward", "jsd", "forward top", "forward tail", "reverse tail", "jsd renormalised")
FLOAT32 = 1e-5
FLOAT64 = 1e-9
"""In float64 all through: some thousand roundings of 1e-16, and what cancels in them."""


def make_teacher(dtype: torch.dtype = torch.float32) -> Policy:
    return make_policy("qwen3", dtype, seed=5)


def make_quantities(teacher: Policy | None) -> dict[str, Quantity]:
    """With no teacher: what can be had from logged candidates."""
    few = {
        "forward top": Divergence(0, teacher, TOP, least_logprob=-10.0, least=0.0, most=10.0),
        "forward tail": Divergence(0, teacher, TOP, rest="tail"),
        "reverse tail": Divergence(1, teacher, TOP, rest="tail"),
        "jsd renormalised": Divergence(0.3, teacher, TOP, rest="renormalise"),
    }
    if teacher is None:
        return few
    whole = {"reverse": Divergence(1, teacher), "forward": Divergence(0, teacher), "jsd": Divergence(0.5, teacher)}
    return {"entropy": make_quantity("entropy"), **whole, **few}


def loss_of(name: str, own: Tensor, other: Tensor) -> Tensor:
    """A token's loss, of the log π and log ν of the vocabulary, written out."""
    best = other.topk(TOP).indices
    a, b = own[best], other[best]
    if name == "entropy":
        return -(own.exp() * own).sum()
    if name == "reverse":
        return (own.exp() * (own - other)).sum()
    if name == "forward":
        return (other.exp() * (other - own)).sum()
    if name == "forward top":
        a, b = a.clamp(min=-10), b.clamp(min=-10)
        return (b.exp() * (b - a)).sum().clamp(0, 10)
    if name.endswith("tail"):
        a, b = (torch.cat([each, (1 - each.exp().sum()).log()[None]]) for each in (a, b))
        return (b.exp() * (b - a)).sum() if name == "forward tail" else (a.exp() * (a - b)).sum()
    a, b, beta = (own, other, 0.5) if name == "jsd" else (a.log_softmax(0), b.log_softmax(0), 0.3)
    middle = (beta * b.exp() + (1 - beta) * a.exp()).log()
    return beta * (b.exp() * (b - middle)).sum() + (1 - beta) * (a.exp() * (a - middle)).sum()


def logprobs_of(policy: Policy, batch: TokenBatch, row: int) -> Tensor:
    """log π of the whole vocabulary at each kept token of a response [m, N]."""
    ids, targets = batch.sequence(row)
    logits = policy.model(input_ids=ids[None], use_cache=False).logits[0, targets - 1]
    return (logits / batch.temperature[row].double()).log_softmax(-1)


def dense_rows(
    policy: Policy, teacher: Policy, batch: TokenBatch, name: str, *, exact: bool = True
) -> tuple[Tensor, Tensor]:
    """Each kept token's value [K], and its gradient by all parameters [K, P], token by token.

    exact: in float64 all through; else log π and its gradient are of the models as they are.
    """
    if exact:
        policy, teacher = in_float64(policy), in_float64(teacher)
    parameters = [p.requires_grad_(True) for _, p in float_parameters(policy.model)]
    values, rows = [], []
    for row in range(len(batch)):
        if not batch.response_mask[row].any():
            continue
        with torch.no_grad():
            others = logprobs_of(teacher, batch, row)
        for own, other in zip(logprobs_of(policy, batch, row), others, strict=True):
            values.append(loss_of(name, own.double(), other.double()))
            found = torch.autograd.grad(values[-1], parameters, retain_graph=True, allow_unused=True)
            pairs = zip(found, parameters, strict=True)
            rows.append(torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs]))
    return torch.stack(values).detach(), torch.stack(rows)


def log_candidates(teacher: Policy, batch: TokenBatch, top: int) -> TokenBatch:
    """The batch with the teacher's likeliest tokens at each response token, as a server logs them."""
    shape = (*batch.input_ids.shape, top)
    ids, logprobs = torch.full(shape, -1), torch.full(shape, -torch.inf, dtype=torch.float64)
    with torch.no_grad():
        for row, kept in enumerate(batch.response_mask):
            if kept.any():
                best = logprobs_of(teacher, batch, row).double().topk(top)
                ids[row, kept], logprobs[row, kept] = best.indices, best.values
    return replace(batch, teacher_top_ids=ids, teacher_top_logprobs=logprobs)


def norms_of(J: TokenJacobian, of: Quantity | str, name: str = "param_grad_norm", **settings: object) -> Tensor:
    found = dict(J.row_norms(of=of, **settings))
    return torch.cat([getattr(found[row], name) for row in range(len(J.batch))])


@pytest.fixture
def exactly():
    with TrueFloat64():
        yield


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("architecture", every(3, SIX))
def test_norms_of_every_quantity_are_those_of_float64_autograd_on_six_architectures(architecture):
    policy, teacher = make_policy(architecture), make_teacher()
    batch = make_batch(policy, temperature=0.7)
    J = TokenJacobian(policy, batch)
    for name, of in make_quantities(teacher).items():
        values, rows = dense_rows(policy, teacher, batch, name)
        found, clamped = J.evaluate(of)
        assert distance(found, values) < FLOAT32, name
        wanted, norms = rows.norm(dim=1), norms_of(J, of)
        live = wanted > 0
        assert torch.equal(clamped, ~live) and (norms[~live] == 0).all(), name
        assert (name == "forward top") == bool(clamped.any())
        errors = ((norms - wanted) / wanted)[live]
        assert errors.square().mean().sqrt() < FLOAT32, name
        # Where slopes cancel, rounded logits alone cost a single token more: plain autograd in float32 as much.
        if errors.abs().max() > FLOAT32:
            plain = dense_rows(deepcopy(policy), teacher, batch, name, exact=False)[1].norm(dim=1)
            assert errors.abs().max() < 2 * ((plain - wanted) / wanted)[live].abs().max(), name


@pytest.mark.parametrize("architecture", every(3, ["qwen2", "gpt2", "mixtral"]))
def test_vjp_jvp_and_contributions_are_products_with_the_dense_rows(architecture, exactly):
    policy, teacher = make_policy(architecture, torch.float64), make_teacher(torch.float64)
    batch = make_batch(policy, temperature=0.7)
    J, quantities = TokenJacobian(policy, batch, Resources(micro_batch=2)), make_quantities(teacher)
    weights = torch.randn(2, J.num_tokens, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = {name: dense_rows(policy, teacher, batch, name)[1] for name in quantities}
    vectors = J.vjp(weights)
    changes = J.jvp(vectors, [*quantities.values(), "logprob"])
    assert changes.how == "forward mode"
    prompts = (
        batch.group_ids[:, None].expand_as(batch.response_mask)[batch.response_mask].unique(return_inverse=True)[1]
    )
    for name, of in quantities.items():
        assert distance(J.vjp(weights, of).rows, weights @ rows[name]) < FLOAT64, name
        assert distance(changes[of], vectors.rows @ rows[name].T) < FLOAT64, name
        scaled = weights[0][:, None] * rows[name]
        own = torch.stack([scaled[prompts == p].sum(0) for p in range(3)])
        found = J.contributions(weights[0], of=of)
        assert distance(found.along, scaled @ scaled.sum(0)) < FLOAT64, name
        assert distance(found.own, (scaled * own[prompts]).sum(1)) < FLOAT64, name
    assert distance(changes.logprob, J.jvp(vectors).logprob) < FLOAT64
    assert distance(changes["entropy"], changes.entropy) == 0


@pytest.mark.parametrize("name", every(4, NAMES))
def test_layers_modules_and_scaled_norms_are_those_of_plain_autograd_along_every_path(name, monkeypatch, exactly):
    policy, teacher = make_policy("qwen2", torch.float64), make_teacher(torch.float64)
    batch = make_batch(policy, temperature=0.7, lengths=(5, 4, 3, 2), prompt_lengths=(5, 5, 3, 3))
    J, of = TokenJacobian(policy, batch), make_quantities(teacher)[name]
    scale = torch.linspace(0.5, 2, sum(p.numel() for _, p in float_parameters(policy.model)), dtype=torch.float64)
    wanted, rows = norms_of(J, of, "scaled_grad_norm", scale=scale), J.row_norms(of=of, scale=scale)
    assert distance(wanted, (dense_rows(policy, teacher, batch, name)[1] * scale).norm(dim=1)) < FLOAT64
    with rows.engine() as meter:  # the rules, then the graph, against plain autograd: layers, modules, the scaled norm
        graph = TokenGradientMeter(policy, batch.sequence(0)[0], rules=False)
        graph.use(of, meter.metric)
        assert meter.decoder is not None
        for each in (meter, graph):
            assert check_engine(each, rows.sequences).largest_difference < FLOAT64
        for s in rows.sequences:
            cheap = graph.measure_cheaply(s.ids, s.targets, temperature=s.temperature, candidates=s.candidates)
            assert distance(cheap[1], graph.measure_together([s])[0].logit_grad_norm) < FLOAT64
        monkeypatch.setattr(meters, "graph_fits", lambda *_: False)
        plain = torch.cat([graph.measure_together([s])[0].scaled_grad_norm for s in rows.sequences])
        assert distance(plain, wanted) < FLOAT64


@pytest.mark.parametrize("name", every(4, NAMES))
def test_products_are_the_same_where_nothing_fits(name, monkeypatch, exactly):
    policy, teacher = make_policy("llama", torch.float64), make_teacher(torch.float64)
    batch = make_batch(policy, temperature=0.7)
    weights = torch.randn(1, batch.num_tokens, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    vector = TokenJacobian(policy, batch).vjp(weights)

    def products(of: Quantity, **settings: int) -> list[Tensor]:
        J = TokenJacobian(policy, batch, Resources(**settings))
        return [J.vjp(weights, of).rows, J.jvp(vector, [of])[of], J.evaluate(of)[0], norms_of(J, of)]

    of = make_quantities(teacher)[name]
    wanted = products(of)
    few = 5 * 10 * VOCAB * 8
    monkeypatch.setattr(graph_memory, "GRAPH", {"cpu": 0, "cuda": 0})
    monkeypatch.setattr(batch_logprobs, "LOGITS", {"cpu": few, "cuda": few})
    for found, expected in zip(products(of, vectors=1, activations=1 << 14), wanted, strict=True):
        assert distance(found, expected) < FLOAT64


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", every(2, ["forward top", "reverse tail", "forward tail", "jsd renormalised"]))
def test_logged_candidates_stand_for_the_teacher_wherever_a_batch_is_cut(name, side, exactly):
    policy, teacher = make_policy("gemma2", torch.float64), make_teacher(torch.float64)
    batch = log_candidates(teacher, make_batch(policy, temperature=0.7, side=side), TOP)
    J, weights = TokenJacobian(policy, batch), torch.ones(1, batch.num_tokens)
    of, model = make_quantities(None)[name], make_quantities(teacher)[name]
    (value, clamped), (wanted, known) = J.evaluate(of), J.evaluate(model)
    assert distance(value, wanted) < FLOAT64 and torch.equal(clamped, known)
    assert distance(norms_of(J, of), norms_of(J, model)) < FLOAT64
    assert distance(J.vjp(weights, of).rows, J.vjp(weights, model).rows) < FLOAT64
    some, parts = J.select([3, 0]), norms_of(J, of).split(batch.response_mask.sum(1).tolist())
    assert distance(norms_of(some, of), torch.cat([parts[3], parts[0]])) < FLOAT64
    ones = torch.ones(some.num_tokens)
    square = some.vjp(ones[None], of).rows.square().sum()
    assert distance(some.contributions(ones, of=of).along.sum()[None], square[None]) < FLOAT64


def test_a_teacher_is_left_as_it_was_and_costs_one_pass_a_micro_batch():
    policy, teacher, passes = make_policy("llama"), make_teacher(), []
    batch = make_batch(policy)
    teacher.model.train()
    teacher.model.set_attn_implementation("sdpa")
    J, of = TokenJacobian(policy, batch, Resources(micro_batch=3)), Divergence(1, teacher)
    handle = teacher.blocks[0].register_forward_hook(lambda _module, args, _output: passes.append(args[0].shape[1]))
    weights = torch.ones(3, batch.num_tokens)
    with without_packing():  # whose trial makes more
        J.vjp(weights, of)
    assert len([length for length in passes if length > 1]) == 2
    norms_of(J, of)
    handle.remove()
    assert teacher.model.training and teacher.model.config._attn_implementation == "sdpa"
    assert all(p.requires_grad and p.grad is None for p in teacher.model.parameters())
    bare = Divergence(1, teacher.model)
    assert distance(norms_of(J, bare), norms_of(J, of)) < FLOAT32
    assert distance(TokenJacobian(policy.model, batch).vjp(weights, bare).rows, J.vjp(weights, of).rows) < FLOAT32


def test_a_log_probs_norms_are_unchanged_by_another_quantity_before_them():
    policy = make_policy("llama")
    J = TokenJacobian(policy, make_batch(policy))
    before = norms_of(J, "logprob")
    rows = J.row_norms()
    norms_of(J, "entropy")
    again = dict(rows)
    assert torch.equal(torch.cat([again[row].param_grad_norm for row in range(len(J.batch))]), before)


def test_what_does_not_fit_the_policy_is_refused_in_one_line():
    policy, teacher = make_policy("llama", tokenizer=True), make_policy("qwen3", seed=5, tokenizer=True)
    batch = make_batch(policy)
    logged = log_candidates(teacher, batch, TOP)
    ids, logprobs = logged.candidates
    wider = make_policy("qwen3")
    wider.model.resize_token_embeddings(VOCAB + 3)
    other = replace(teacher, tokenizer=make_tokenizer())
    other.tokenizer.add_tokens("a-word-that-it-had-not")
    few = torch.where(batch.response_mask[..., None], ids, -1)
    few[2, batch.response_mask[2].nonzero()[0]] = few[2, batch.response_mask[2].nonzero()[0], :1]
    cases = (
        (batch, "forward-kl"),
        (batch, "backward-kl"),
        (batch, Divergence(1, policy)),
        (batch, Divergence(1, policy.model)),
        (batch, Divergence(1, wider)),
        (batch, Divergence(1, other)),
        (logged, Divergence(1, top_of="policy")),
        (replace(logged, teacher_top_ids=ids + VOCAB), "jsd"),
        (replace(logged, teacher_top_ids=few), "jsd"),
        (replace(logged, teacher_top_logprobs=logprobs - torch.inf), "jsd"),
        (replace(logged, teacher_top_logprobs=-logprobs), "jsd"),
    )
    for wrong, of in cases:
        J = TokenJacobian(policy, wrong)
        for call in (J.row_norms, J.evaluate, lambda of, J=J: J.vjp(torch.ones(1, J.num_tokens), of)):
            with pytest.raises(InputError) as caught:
                call(of=of)
            assert "\n" not in str(caught.value)
    for wrong in ({"teacher_top_ids": None}, {"teacher_top_ids": ids[0]}, {"teacher_top_ids": ids.double()}):
        with pytest.raises(InputError):
            replace(logged, **wrong)
