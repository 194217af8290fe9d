"""The operator against J itself: one autograd call per token, in float64, written here."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from support.gradients import dense_jacobian
from support.policies import make_batch, make_policy
from support.tiers import every
from torch import Tensor, nn

from gradscope.errors import InputError
from gradscope.gradients import Gram, Resources, TokenJacobian, Vectors, measure, statistics_of
from gradscope.policy import AdamWSettings, AdamWState, Policy, float_parameters, restoring
from gradscope.rollouts import TokenBatch

ROWS = 3
NORMS = ("param_grad_norm", "scaled_grad_norm")
TOLERANCE = 2e-6
"""transformers' rotary embeddings and norms pass through float32, whatever the weights are."""


def make_weights(batch: TokenBatch, rows: int = ROWS) -> Tensor:
    """Random numbers, some of them 0, the last row 0 on the first prompt."""
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(rows, batch.num_tokens, generator=generator, dtype=torch.float64)
    weights *= torch.rand(weights.shape, generator=generator) < 0.6
    weights[-1, (batch.group_ids[:, None] == 0).expand_as(batch.response_mask)[batch.response_mask]] = 0.0
    return weights


def groups_of(batch: TokenBatch) -> Tensor:
    """The prompt of each kept token."""
    return batch.group_ids[:, None].expand_as(batch.response_mask)[batch.response_mask]


def by_group(jacobian: Tensor, weights: Tensor, groups: Tensor) -> Tensor:
    """u [n, R, P]."""
    return torch.stack([(weights * (groups == group)) @ jacobian for group in groups.unique()])


def distance(found: Tensor | np.ndarray, expected: Tensor | np.ndarray) -> float:
    found, expected = (torch.as_tensor(values).double() for values in (found, expected))
    return ((found - expected).norm() / expected.norm()).item()


CASES = [
    ("qwen2", torch.float64, TOLERANCE),
    ("gpt2", torch.float64, TOLERANCE),
    ("mixtral", torch.float64, TOLERANCE),
    ("opt", torch.float64, TOLERANCE),
    ("qwen2", torch.float32, 2e-5),
]
"""A tied head, matrices stored the other way round, experts, learned positions; and rounding."""


@pytest.mark.parametrize(("name", "dtype", "tolerance"), every(4, CASES))
def test_vjp_jvp_and_gram_are_products_with_the_dense_jacobian(name, dtype, tolerance):
    policy = make_policy(name, dtype)
    batch = make_batch(policy, temperature=0.7)
    expected, weights, groups = dense_jacobian(policy, batch), make_weights(batch), groups_of(batch)
    J = TokenJacobian(policy, batch, Resources(1 << 34, micro_batch=2))
    sums = J.vjp(weights)
    assert distance(sums.rows, weights @ expected.double()) < tolerance
    changes = J.jvp(sums)
    assert changes.how == "forward mode" and changes.entropy is None
    assert distance(changes.logprob, (weights @ expected.double()) @ expected.double().T) < tolerance
    vectors = by_group(expected.double(), weights, groups)
    gram = J.gram(weights)
    assert gram.plan.way == "whole"
    assert distance(gram.products, torch.einsum("prx,qsx->prqs", vectors, vectors)) < tolerance
    within = J.gram(weights, pairs="within")
    assert distance(within.products, torch.einsum("prx,psx->prs", vectors, vectors)) < tolerance
    for found in (gram, within):
        assert (found.error(lambda products, total: total) == 0).all()
        assert distance(found.total, vectors.sum(0) @ vectors.sum(0).T) < tolerance
    for found in (gram, within, J.gram(weights, way="sketches", totals=True)):
        assert distance(found.totals.rows, vectors.sum(0)) < tolerance


def test_row_norms_are_those_of_the_dense_jacobians_rows_plain_and_scaled():
    policy = make_policy("qwen2", torch.float64)
    batch = make_batch(policy, temperature=0.7)
    J, rows = TokenJacobian(policy, batch), dense_jacobian(policy, batch)
    scale = Vectors.zeros(policy.model, 1)
    scale.rows.copy_(torch.linspace(0.5, 2.0, rows.shape[1], dtype=torch.float64)[None])
    tokens = torch.arange(len(rows)) % 3 > 0
    found = dict(J.row_norms(tokens, scale=scale.rows[0]))
    plain, scaled = (torch.cat([getattr(found[row], name) for row in range(len(batch))]) for name in NORMS)
    assert plain[~tokens].isnan().all() and scaled[~tokens].isnan().all()
    assert distance(plain[tokens], rows.norm(dim=1)[tokens]) < TOLERANCE
    assert distance(scaled[tokens], (rows * scale.rows).norm(dim=1)[tokens]) < TOLERANCE
    some = J.select([2, 0])
    assert some.meter is J.meter
    again = dict(some.row_norms())
    of = torch.arange(len(batch)).repeat_interleave(batch.response_mask.sum(1))
    for row, response in enumerate((2, 0)):
        assert again[row].scaled_grad_norm is None
        assert distance(again[row].param_grad_norm, rows.norm(dim=1)[of == response]) < TOLERANCE


def test_row_norms_freeze_the_model_inside_a_call_only():
    policy = make_policy("gpt2")
    policy.model.train()
    norms = TokenJacobian(policy, make_batch(policy)).row_norms()
    for _ in norms:
        assert policy.model.training and all(p.requires_grad for p in policy.model.parameters())


def test_entropies_change_along_a_vector_as_a_small_step_changes_them_and_cost_no_pass_beside_log_pi():
    policy = make_policy("gpt2", torch.float64)
    batch = make_batch(policy, temperature=0.7)
    J, passes = TokenJacobian(policy, batch), []
    vector = J.vjp(make_weights(batch, 1))
    handle = policy.blocks[0].register_forward_hook(lambda *_: passes.append(1))
    changes = J.jvp(vector, of=("logprob", "entropy"))
    both = len(passes)
    assert torch.equal(J.jvp(vector).logprob, changes.logprob) and len(passes) == 2 * both
    assert distance(J.jvp(vector, of=("entropy",)).entropy, changes.entropy) < 1e-12
    handle.remove()
    twice = J.jvp(Vectors(torch.cat([vector.rows, -2 * vector.rows]), vector.slices), of=("entropy", "logprob"))
    for found, one in ((twice.logprob, changes.logprob), (twice.entropy, changes.entropy)):  # vectors go together
        assert distance(found, torch.cat([one, -2 * one])) < 1e-12
    assert changes.how == twice.how == "forward mode"
    found = []
    for size in (1e-6, -2e-6):
        with torch.no_grad():
            for name, part in vector.slices.items():
                parameter = policy.model.get_parameter(name)
                parameter += size * vector.rows[0, part].view_as(parameter)
        found.append(J.kept(J.moved().statistics.entropy))
    # A central difference errs by size² and by rounding, 1e-16 of entropies of about 3 over 2e-6.
    assert distance(changes.entropy[0], (found[0] - found[1]) / 2e-6) < 1e-6


@pytest.mark.parametrize("pairs", ["all", "within"])
@pytest.mark.parametrize("way", every(2, ["whole", "sketches"]))
def test_a_gram_in_adamws_metric_multiplies_each_entry(way, pairs):
    policy = make_policy("qwen2", torch.float64)
    batch = make_batch(policy)
    weights, vectors = make_weights(batch), None
    vectors = by_group(dense_jacobian(policy, batch), weights, groups_of(batch))
    optimizer = torch.optim.AdamW(policy.model.parameters())
    generator = torch.Generator().manual_seed(1)
    for parameter in policy.model.parameters():
        square = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
        optimizer.state[parameter] = {"step": torch.tensor(9.0), "exp_avg": 0 * square, "exp_avg_sq": square}
    state = AdamWState.from_state_dict(policy.model, optimizer.state_dict(), max_grad_norm=0.5)
    scaled = vectors * state.scale(policy.model, vectors.sum((0, 1)))
    gram = TokenJacobian(policy, batch, Resources(1 << 34, micro_batch=1)).gram(
        weights, pairs=pairs, metric=state, way=way
    )
    for found, expected in ((gram, vectors), (gram.scaled, scaled)):
        assert_products(found, expected, pairs)


def assert_products(found: Gram, vectors: Tensor, pairs: str) -> None:
    """Exact, or within four of their own standard errors, which are not 0."""
    path = "prx,qsx->prqs" if pairs == "all" else "prx,psx->prs"
    expected, total = torch.einsum(path, vectors, vectors).numpy(), (vectors.sum(0) @ vectors.sum(0).T).numpy()
    if found.plan.way == "whole":
        assert distance(found.products, expected) < TOLERANCE and distance(found.total, total) < TOLERANCE
        return
    for values, truth, error in (
        (found.products, expected, found.error(lambda products, total: products)),
        (found.total, total, found.error(lambda products, total: total)),
    ):
        apart = np.abs(values - truth)
        assert (apart <= 5 * error + 1e-12 * np.abs(truth).max()).all()
        assert error.max() > 0


@pytest.mark.parametrize("shared", every(2, [False, True]), ids=["block by block", "by the whole graph"])
def test_sketches_are_those_of_the_whole_vectors(shared):
    from gradscope.gradients.operator.gram import SEED
    from gradscope.gradients.operator.sketches import Sketcher

    policy = make_policy("llama", torch.float64)
    if shared:
        policy.blocks[2].self_attn.q_proj.weight = policy.blocks[0].self_attn.q_proj.weight
    batch = make_batch(policy)
    weights = make_weights(batch)
    vectors = by_group(dense_jacobian(policy, batch), weights, groups_of(batch))
    gram = TokenJacobian(policy, batch, Resources(1 << 34, micro_batch=1)).gram(weights, way="sketches")
    slices = Vectors.zeros(policy.model, 0).slices
    sketcher = Sketcher(gram.plan.sketch_size, seed=SEED)
    expected = torch.zeros(len(vectors), ROWS, gram.plan.sketch_size, dtype=torch.float64)
    for number, part in enumerate(slices.values()):
        for group, rows in enumerate(vectors):
            for row, vector in enumerate(rows):
                sketcher.add(vector[part], number, expected[group, row])
    assert distance(gram.sketches, expected) < TOLERANCE


def test_sketches_beside_whole_vectors_tell_how_groups_lie_to_each_other():
    policy = make_policy("gpt2", torch.float64)
    batch = make_batch(policy)
    weights = make_weights(batch)
    J = TokenJacobian(policy, batch, Resources(1 << 34))
    exact, found = J.gram(weights), J.gram(weights, pairs="within", sketch=True)
    norms = np.sqrt(np.einsum("prpr->pr", exact.products))
    between = torch.einsum("prk,qrk->rpq", found.sketches, found.sketches).numpy()
    truth = np.einsum("prqr->rpq", exact.products)
    scale = np.einsum("pr,qr->rpq", norms, norms)
    apart = np.abs(between - truth)[scale > 0] / scale[scale > 0]
    assert 0 < apart.max() < 5 / (1 << 12) ** 0.5 * 2**0.5  # one standard deviation is up to √2/√k


def test_sums_in_a_scratch_file_are_those_in_memory_bit_for_bit():
    policy = make_policy("qwen2")
    batch = make_batch(policy)
    weights = make_weights(batch).float()
    inside, outside = (TokenJacobian(policy, batch, Resources(v)).vjp(weights) for v in (1 << 40, 0))
    assert torch.equal(inside.rows, outside.rows)


def test_selected_responses_have_their_rows_and_statistics_are_of_the_weights_as_they_are():
    policy = make_policy("llama", torch.float64)
    batch = make_batch(policy)
    J = TokenJacobian(policy, batch)
    before = J.statistics
    some = J.select([2, 0])
    assert torch.equal(some.statistics.logprob, before.logprob[[2, 0]])
    expected = dense_jacobian(policy, batch.select([2, 0])).sum(0)
    assert distance(some.vjp(torch.ones(1, some.num_tokens)).rows, expected) < 1e-5
    with torch.no_grad():
        policy.model.get_output_embeddings().weight.mul_(1.1)
    after = J.moved().statistics.logprob
    assert not torch.equal(after, before.logprob)
    assert torch.equal(J.statistics.logprob, after)
    assert torch.equal(J.select([2, 0]).statistics.logprob, after[[2, 0]])
    assert torch.equal(J.of_prompts([0]).statistics.logprob, after)


def test_statistics_that_were_given_or_kept_are_not_those_of_other_weights_and_survive_a_step_taken_back(monkeypatch):
    policy = make_policy("llama", torch.float64)
    batch = make_batch(policy)
    known = TokenJacobian(policy, batch).statistics
    J = TokenJacobian(policy, batch, statistics=known)
    with restoring(policy.model), torch.no_grad():
        policy.model.get_output_embeddings().weight.mul_(1.1)
        assert not torch.equal(J.statistics.logprob, known.logprob)
    again, passes = J.statistics, []
    assert torch.equal(again.logprob, known.logprob)
    policy.model.register_forward_hook(lambda *_: passes.append(None))
    with restoring(policy.model), torch.no_grad():
        policy.model.get_output_embeddings().weight.mul_(1.2)
    assert J.statistics is again and not passes


def test_row_norms_after_the_weights_have_changed_are_those_of_a_new_jacobian():
    policy = make_policy("qwen2", torch.float64)
    batch = make_batch(policy)
    J = TokenJacobian(policy, batch)
    before = torch.cat([norms.param_grad_norm for _, norms in J.row_norms()])
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.1)
    found, wanted = (torch.cat([norms.param_grad_norm for _, norms in each.row_norms()]) for each in (J, J.moved()))
    assert distance(found, wanted) < TOLERANCE < 0.01 < distance(before, wanted)


@pytest.mark.parametrize("made", [False, True])
def test_products_inside_inference_mode_are_those_outside_it(made):
    """made: the batch and the weights are made inside it, too."""
    policy = make_policy("llama")
    outside = make_batch(policy)
    J, weights = TokenJacobian(policy, outside), make_weights(outside).float()
    direction = Vectors(torch.randn(1, sum(p.numel() for p in policy.model.parameters())), J.vjp(weights).slices)

    def products(batch: TokenBatch, weights: Tensor) -> list[Tensor]:
        J = TokenJacobian(policy, batch)
        norms = torch.cat([norms.param_grad_norm for _, norms in J.row_norms()])
        gram = torch.from_numpy(J.gram(weights, pairs="within", totals=True).products)
        return [J.vjp(weights).rows, J.vjp(weights, of="entropy").rows, J.jvp(direction).logprob, gram, norms]

    wanted = products(outside, weights)
    with torch.inference_mode():
        batch = make_batch(policy) if made else outside
        found = products(batch, weights.clone() if made else weights)
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))
    batch.input_ids.clone().float().requires_grad_()  # what came out takes part in gradients


def test_weights_that_were_made_inside_inference_mode_are_refused():
    with torch.inference_mode():
        policy = make_policy("gpt2")
    with pytest.raises(InputError, match="inference_mode"):
        measure(policy, make_batch(make_policy("gpt2")))


@pytest.mark.parametrize("other", ["itself", "weights", "precision"])
def test_a_tables_statistics_are_taken_from_the_policy_that_it_is_of_alone(other):
    policy = make_policy("llama")
    batch = make_batch(policy)
    table = measure(policy, batch, self_check=False)
    if other == "weights":
        with torch.no_grad():
            policy.model.get_output_embeddings().weight.mul_(1.01)
        with pytest.raises(InputError):
            statistics_of(table, policy, batch)
        return
    if other == "precision":
        policy = make_policy("llama", torch.float64)
    found = statistics_of(table, policy, batch)
    assert (found is not None) == (other == "itself")
    if found is not None:
        again = TokenJacobian(policy, batch).statistics
        assert all((getattr(found, name) - getattr(again, name)).abs().max() < 1e-5 for name in vars(again))


@pytest.mark.parametrize("groups", ["response", "all"])
def test_groups_are_any_that_responses_have(groups):
    policy = make_policy("gpt2", torch.float64)
    batch = make_batch(policy)
    ids = torch.arange(len(batch)) if groups == "response" else torch.zeros(len(batch), dtype=torch.long)
    tokens = ids[:, None].expand_as(batch.response_mask)[batch.response_mask]
    weights = make_weights(batch)
    vectors = by_group(dense_jacobian(policy, batch), weights, tokens)
    found = TokenJacobian(policy, batch).gram(weights, groups=ids)
    assert found.groups == tuple(tokens.unique().tolist())
    assert distance(found.products, torch.einsum("prx,qsx->prqs", vectors, vectors)) < TOLERANCE


def test_what_does_not_fit_is_refused_in_one_line():
    policy = make_policy("gpt2")
    batch = make_batch(policy)
    J = TokenJacobian(policy, batch, Resources(1 << 10))
    for call in (
        lambda: J.vjp(torch.zeros(2, 3)),
        lambda: J.jvp(Vectors(torch.zeros(1, 7), {})),
        lambda: J.jvp(Vectors.zeros(policy.model, 1), of="entropy"),
        lambda: TokenJacobian(policy.model, batch).row_norms(),
        lambda: J.gram(torch.zeros(2, batch.num_tokens)),
        lambda: TokenJacobian(
            policy, batch[[0]].__class__(**vars(batch) | {"response_mask": batch.response_mask & False})
        ),
        lambda: Resources(micro_batch=0),
    ):
        with pytest.raises(InputError) as caught:
            call()
        assert "\n" not in str(caught.value)


class Ticking:
    """A clock that goes a second at every look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


class Slowing:
    """A clock that goes a second with every pass through a model; from some pass on, `then` seconds."""

    def __init__(self, model: nn.Module, fast: int, then: float) -> None:
        self.now, self.fast, self.then = 0.0, fast, then
        model.get_input_embeddings().register_forward_hook(self.count)

    def __call__(self) -> float:
        return self.now

    def count(self, *_: object) -> None:
        self.fast -= 1
        self.now += 1.0 if self.fast >= 0 else self.then


@pytest.mark.parametrize(
    ("way", "pairs", "late"), every(3, product(["whole", "sketches"], ["all", "within"], [0.0, 5.0]))
)
def test_sums_end_at_the_deadline_with_the_groups_that_are_made(monkeypatch, way, pairs, late):
    policy = make_policy("qwen2", torch.float64)
    batch = make_batch(policy)
    weights = make_weights(batch)
    state = make_metric(policy)
    monkeypatch.setattr("gradscope.gradients.operator.gram.monotonic", Ticking())
    late = TokenJacobian(policy, batch, Resources(deadline=late)).gram(weights, pairs=pairs, way=way, metric=state)
    assert 1 <= len(late.groups) < len(batch.group_ids.unique())
    some = batch.of_prompts(late.groups)
    kept = torch.isin(groups_of(batch), torch.tensor(late.groups))
    # As a mean over the tokens of these groups alone.
    weights = weights[:, kept] * batch.num_tokens / some.num_tokens
    alone = TokenJacobian(policy, some).gram(weights, pairs=pairs, way=way, metric=state)
    assert late.groups == alone.groups
    scaled = (late.scaled, alone.scaled)
    if way == "sketches" or pairs == "within":  # a second pass, for which no time is left
        assert late.scaled is None
        scaled = (late, alone)
    for ours, theirs in ((late, alone), scaled):
        assert max(distance(ours.products, theirs.products), distance(ours.total, theirs.total)) < TOLERANCE


def make_metric(policy: Policy) -> AdamWState:
    moments = {name: parameter.detach().square() for name, parameter in float_parameters(policy.model)}
    return AdamWState(moments, dict.fromkeys(moments, 3), dict.fromkeys(moments, AdamWSettings()), 1.0)


def on_a_slowing_machine(monkeypatch, fast: int, deadline: float, **asked: object) -> tuple[Gram, Gram, Slowing]:
    """(the Gram by the deadline, that of its groups alone and at leisure, the clock)."""
    policy = make_policy("qwen2", torch.float64)
    batch = make_batch(policy)
    weights = make_weights(batch)
    TokenJacobian(policy, batch).vjp(weights)  # so that the trial of packed prompts is not timed
    clock = Slowing(policy.model, fast, then=1000.0)
    if asked.pop("in_metric", False):
        asked["metric"] = make_metric(policy)
    with monkeypatch.context() as patch:
        patch.setattr("gradscope.gradients.operator.gram.monotonic", clock)
        some = TokenJacobian(policy, batch, Resources(deadline=deadline)).gram(weights, **asked)
    end = clock.now
    few = batch.of_prompts(some.groups)
    kept = torch.isin(groups_of(batch), torch.tensor(some.groups))
    alone = TokenJacobian(policy, few).gram(weights[:, kept] * batch.num_tokens / few.num_tokens, **asked)
    clock.now = end
    assert alone.groups == some.groups
    for ours, theirs in ((some, alone), (some.scaled, alone.scaled))[: 1 + (some.scaled is not None)]:
        assert max(distance(ours.products, theirs.products), distance(ours.total, theirs.total)) < TOLERANCE
    return some, alone, clock


EVER = 1 << 30


@pytest.mark.all
@pytest.mark.parametrize("totals", [False, True])
@pytest.mark.parametrize("way", every(3, ["whole", "sketches"]))
def test_a_prompt_that_would_end_long_after_the_deadline_is_given_up(monkeypatch, way, totals):
    asked = {"way": way, "totals": totals}
    whole, _, clock = on_a_slowing_machine(monkeypatch, EVER, 1e9, **asked)
    groups, passes = len(whole.groups), int(clock.now)
    for fast in range(0, passes, 1 + passes // 4):
        some, alone, _ = on_a_slowing_machine(monkeypatch, fast, 400.0, **asked)
        # The first one counts whenever it ends.
        assert len(some.groups) == max(1, fast * groups // passes)
        if totals:
            assert distance(some.totals.rows, alone.totals.rows) < TOLERANCE


@pytest.mark.parametrize(("way", "pairs"), every(2, [("whole", "within"), ("sketches", "all")]))
def test_sums_in_the_optimizers_metric_are_of_the_prompts_of_the_plain_ones_or_none(monkeypatch, way, pairs):
    asked = {"way": way, "pairs": pairs, "in_metric": True}
    whole, _, clock = on_a_slowing_machine(monkeypatch, EVER, 1e9, **asked)
    passes = int(clock.now)
    # Both passes end in time, and then the first one alone.
    same, _, _ = on_a_slowing_machine(monkeypatch, EVER, float(passes), **asked)
    assert same.groups == same.scaled.groups == whole.groups
    fast = passes // 2 + 1
    late, _, clock = on_a_slowing_machine(monkeypatch, fast, float(passes), **asked)
    assert late.groups == whole.groups and late.scaled is None
    assert clock.now < (passes - fast) * clock.then  # not all of the slow ones


@pytest.mark.all
def test_prompts_whose_products_do_not_fit_are_drawn_and_count_for_all():
    policy = make_policy("qwen2", torch.float64)
    few = make_batch(policy)
    batch = replace(few.select([row % len(few) for row in range(60)]), group_ids=torch.arange(60))
    weights = make_weights(batch, 12)

    def within(memory: int) -> TokenJacobian:
        return TokenJacobian(policy, batch, Resources(memory))

    # Less and less, until not all inner products fit.
    sizes = (2**n for n in range(28, 18, -1))
    memory = next(size for size in sizes if within(size).plan_gram(12, way="sketches").groups < 60)
    some = within(memory).gram(weights, way="sketches")
    assert 6 <= len(some.groups) == some.plan.groups < 60
    kept = torch.isin(groups_of(batch), torch.tensor(some.groups))
    chosen = batch.of_prompts(some.groups)
    weights = weights[:, kept] * batch.num_tokens / chosen.num_tokens
    alone = TokenJacobian(policy, chosen, Resources(memory)).gram(weights, way="sketches")
    assert alone.groups == some.groups
    assert distance(some.products, alone.products) < TOLERANCE
