"""What tokens hold of ‖G‖², against J itself: one autograd call per token, in float64."""

import gc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.gradients import dense_jacobian, fused, used_again
from support.groups import CASTS, NARROW
from support.policies import PAD, make_policy, make_responses, save_checkpoint
from support.processes import launch
from support.refusals import refused
from support.tiers import every
from torch import Tensor
from torch.autograd import forward_ad

from gradscope import diagnose, read_rollouts
from gradscope.diagnosis import DiagnosisSettings
from gradscope.errors import SelfCheckError
from gradscope.gradients import Contributions, Resources, TokenJacobian, Vectors, vector_bytes
from gradscope.objective import batch_weights, resolve_advantages
from gradscope.objective.equations import TokenWeights
from gradscope.policy import AdamWSettings, AdamWState, Policy, float_parameters, load_policy, without_packing
from gradscope.rollouts import TokenBatch, collate, write_rollouts

EXACT = 1e-9
"""GPT-2 alone computes everything in float64."""
LENGTHS = (7, 1, 11, 4, 9, 6, 5, 8, 3, 6, 4, 4, 6, 2)
IDLE = (2, 5)
"""Prompts whose responses have equal rewards, and hence no weights on-policy without a KL term."""
QUICK = DiagnosisSettings(resamples=2, influence_tokens=None, actual_step=False, compare=False, loss=NARROW)


def make_rollouts(policy: Policy, *, idle: bool = False) -> TokenBatch:
    """Seven prompts of two responses, each with a temperature of its own; off-policy with a reference, or idle."""
    batch = collate(make_responses(policy, lengths=LENGTHS, prompt_lengths=(5, 5, 3, 3, 8, 8) * 2 + (4, 4)), pad_id=PAD)
    batch = replace(batch, temperature=torch.linspace(0.6, 1.4, len(batch)))
    if not idle:
        return batch
    equal = torch.isin(batch.group_ids, torch.tensor(IDLE))
    return replace(batch, old_logprobs=None, ref_logprobs=None, rewards=batch.rewards.masked_fill(equal, 1.0))


def weigh(J: TokenJacobian) -> TokenWeights:
    """Eq. 2's w_t, clipped on both sides."""
    batch, logprobs = replace(J.batch, advantages=resolve_advantages(J.batch)), J.statistics.logprob
    if batch.old_logprobs is None:
        batch = replace(batch, old_logprobs=logprobs)
    return batch_weights(logprobs, batch, NARROW, num_tokens=batch.num_tokens)


def weights_of(J: TokenJacobian) -> Tensor:
    return J.kept(weigh(J).total)


def prompts_of(batch: TokenBatch) -> Tensor:
    return batch.group_ids[:, None].expand_as(batch.response_mask)[batch.response_mask]


def assert_near(found: Tensor | np.ndarray, expected: Tensor | np.ndarray, tolerance: float) -> None:
    found, expected = (torch.as_tensor(values).double() for values in (found, expected))
    assert (found - expected).norm() <= tolerance * expected.norm()


def assert_products(found: Contributions, terms: Tensor, prompts: Tensor, tolerance: float) -> None:
    """terms: w_t·g_t [K, P]; every column against sums over pairs of tokens."""
    pairs, same = terms @ terms.T, prompts[:, None] == prompts
    n, others = len(prompts.unique()), (pairs * ~same).sum(1)
    assert_near(found.along, pairs.sum(1), tolerance)
    assert_near(found.own, (pairs * same).sum(1), tolerance)
    rounded = tolerance if tolerance == EXACT else tolerance * float(pairs.sum(1).norm() / others.norm())
    assert_near(found.signal, n / (n - 1) * others, rounded)  # a difference of the two before
    assert_near(found.gradient_share, pairs.sum(1) / pairs.sum(), tolerance)
    assert_near(found.own_share, (pairs * same).sum(1) / pairs.sum(), tolerance)
    assert found.gradient_share.sum().item() == pytest.approx(1, rel=1e-12)
    assert found.square_norm == pytest.approx(terms.sum(0).square().sum().item(), rel=tolerance)
    assert found.num_prompts == n and found.self_check < tolerance
    assert torch.equal(prompts.unique()[found.prompts], prompts)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory) -> Policy:
    from support.adapters import save_adapter

    folder = tmp_path_factory.mktemp("adapter")
    base = save_checkpoint(folder / "base", "gpt2")
    settings = {"r": 2, "target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}
    return load_policy(save_adapter(folder / "lora", base, **settings), params="adapter", dtype="float64")


@pytest.fixture(scope="module")
def policy() -> Policy:
    """Tied weights, all in float64."""
    return make_policy("gpt2", torch.float64)


@pytest.mark.parametrize("idle", [False, True], ids=["off-policy with a reference", "idle prompts"])
@pytest.mark.parametrize(
    ("name", "tolerance"), every(3, [("gpt2", EXACT), ("adapter", EXACT), ("qwen2", CASTS), ("mixtral", CASTS)])
)
def test_contributions_are_products_of_the_dense_jacobians_rows(name, tolerance, idle, request):
    policy = request.getfixturevalue("adapted") if name == "adapter" else make_policy(name, torch.float64)
    batch = make_rollouts(policy, idle=idle)
    J = TokenJacobian(policy, batch, Resources(1 << 34, micro_batch=4))
    weights = weights_of(J)
    if idle:
        assert (weights[torch.isin(prompts_of(batch), torch.tensor(IDLE))] == 0).all()
    else:
        assert 0 < weigh(J).clipped.sum() < len(weights)
    terms = weights.double()[:, None] * dense_jacobian(policy, batch).double()
    assert_products(J.contributions(weights), terms, prompts_of(batch), tolerance)


def test_prompts_are_any_groups_of_responses(policy):
    batch = make_rollouts(policy)
    J, ids = TokenJacobian(policy, batch), torch.tensor([9, 2, 9, 2, 5, 5, 9, 9, 2, 5, 5, 9, 2, 2])
    weights = weights_of(J)
    terms = weights[:, None] * dense_jacobian(policy, batch)
    of = ids[:, None].expand_as(batch.response_mask)[batch.response_mask]
    assert_products(J.contributions(weights, groups=ids), terms, of, EXACT)


def test_in_adamws_metric_every_entry_is_scaled_on_both_sides(policy):
    batch = make_rollouts(policy)
    J = TokenJacobian(policy, batch)
    weights = weights_of(J)
    terms = weights[:, None] * dense_jacobian(policy, batch)
    moments = {name: parameter.detach().square() for name, parameter in float_parameters(policy.model)}
    state = AdamWState(moments, dict.fromkeys(moments, 3), dict.fromkeys(moments, AdamWSettings()), 1.0)
    scale = state.scale(policy.model, J.vjp(weights[None]).rows[0])
    found = J.contributions(weights, scale=scale, folds=3)
    assert_products(found, terms * scale, prompts_of(batch), EXACT)


@pytest.mark.all
def test_their_signal_is_that_of_the_diagnosis(policy):
    batch = make_rollouts(policy)
    J = TokenJacobian(policy, batch)
    found = J.contributions(weights_of(J))
    rows = diagnose(policy, batch, settings=QUICK).statistics
    rows = rows[(rows["statistic"] == "signal") & (rows["metric"] == "raw")].set_index("interval")["value"]
    intervals = torch.bucketize(J.kept(J.statistics.logprob).exp(), torch.tensor([0.25, 0.5, 0.75]), right=True)
    assert found.signal.sum().item() / J.num_tokens**2 == pytest.approx(rows["all"], rel=1e-6)
    grouped = found.grouped(intervals)
    assert grouped.signal[-1] * found.num_prompts**2 == pytest.approx(found.signal.sum().item(), rel=1e-9)
    each = torch.stack([found.signal[intervals == a].sum() for a in range(4)])
    assert_near(grouped.signal[:-1] * found.num_prompts**2, each, EXACT)


def test_idle_prompts_count_as_drawn_and_one_prompt_has_no_signal(policy):
    batch = make_rollouts(policy, idle=True)
    J = TokenJacobian(policy, batch)
    weights = weights_of(J)
    found = J.contributions(weights)
    live = J.of_prompts([p for p in range(7) if p not in IDLE])
    some = live.contributions(live.kept(J.spread(weights)))
    assert (found.num_prompts, some.num_prompts) == (7, 5)
    assert found.signal.sum().item() == pytest.approx(7 / 6 * 4 / 5 * some.signal.sum().item(), rel=1e-9)
    one = J.of_prompts([0])
    alone = one.contributions(one.kept(J.spread(weights)))
    assert alone.signal.isnan().all() and torch.equal(alone.along, alone.own)
    nothing = J.contributions(0 * weights)
    assert not nothing.along.any() and nothing.self_check == 0


@pytest.mark.all
@pytest.mark.parametrize("folds", every(3, [3, 4, 7]))
def test_folds_give_every_groupings_signal_without_each_of_them_exactly(policy, folds):
    batch = make_rollouts(policy, idle=True)
    J = TokenJacobian(policy, batch)
    weights = weights_of(J)
    plain = J.contributions(weights)
    found = J.contributions(weights, folds=folds, generator=torch.Generator().manual_seed(5))
    again = J.contributions(weights, folds=folds, generator=torch.Generator().manual_seed(6))
    assert folds == 7 or not torch.equal(found.folds, again.folds)
    sizes = found.folds.bincount(minlength=folds)
    assert sizes.sum() == 7 and sizes.max() - sizes.min() <= 1
    assert_near(found.along, plain.along, EXACT)
    assert_near(found.own, plain.own, EXACT)
    labels = torch.randint(3, (J.num_tokens,), generator=torch.Generator().manual_seed(1))
    grouped = found.grouped(labels, size=4)  # of the last there is no token
    terms, prompts = weights[:, None] * dense_jacobian(policy, batch), prompts_of(batch)
    parts = torch.stack(
        [torch.stack([terms[(labels == a) & (prompts == p)].sum(0) for p in range(7)]) for a in range(4)]
    )
    for fold in range(folds):
        kept = [p for p in range(7) if found.folds[p] != fold]
        m, whole = len(kept), parts.sum(0)
        for a in range(5):
            own = sum(parts[a, p] @ whole[p] if a < 4 else whole[p] @ whole[p] for p in kept)
            both = sum((parts[a, p] if a < 4 else whole[p]) @ whole[q] for p in kept for q in kept if p != q)
            scale = float(whole.square().sum())
            assert grouped.left_own[fold, a] == pytest.approx(float(own) / m, rel=EXACT, abs=EXACT * scale)
            assert grouped.left_signal[fold, a] == pytest.approx(
                float(both) / (m * (m - 1)), rel=EXACT, abs=EXACT * scale
            )
    assert grouped.touched[-1] == 5 and grouped.touched[3] == 0


@pytest.mark.all
def test_bounds_need_folds_and_six_prompts_with_a_gradient(policy):
    batch = make_rollouts(policy)
    J = TokenJacobian(policy, batch)
    weights, labels = weights_of(J), (prompts_of(batch) > 4).long()
    with refused("folds"):
        J.contributions(weights).grouped(labels).signal_bounds()
    found = J.contributions(weights, folds=7).grouped(labels)
    signal, share = found.signal_bounds(), found.share_bounds()
    assert signal.shape == (3, 3) and share.shape == (3, 2)
    assert np.isnan(signal[1:, :2]).all() and np.isfinite(signal[:, 2]).all()  # five and two of the seven prompts
    assert np.isnan(share[1:]).all()
    for wrong in (labels - 1, labels[1:], labels + 1):
        with refused():
            J.contributions(weights).grouped(wrong, size=2)


@pytest.mark.all
def test_nine_forward_passes_are_the_most_and_idle_prompts_cost_none(policy, monkeypatch):
    """A derivative counts three forward passes, a backward pass two; each is counted where it happens."""
    counts = {"part": 0.0, "passes": 0.0}
    batches = {idle: make_rollouts(policy, idle=idle) for idle in (False, True)}

    def count(_module, _args, given, _output):
        counts["part"] = given["input_ids"].shape[0] / len(LENGTHS)
        counts["passes"] += counts["part"] * (3 if forward_ad._current_level >= 0 else 1)

    def counted(make):
        def call(*arguments, **keywords):
            counts["passes"] += 2 * counts["part"]
            return make(*arguments, **keywords)

        return call

    monkeypatch.setattr(torch.autograd, "grad", counted(torch.autograd.grad))
    monkeypatch.setattr(torch.Tensor, "backward", counted(torch.Tensor.backward))
    handle = policy.model.register_forward_hook(count, with_kwargs=True)
    for idle, folds, most in ((False, None, 9), (True, None, 9 * 5 / 7), (False, 3, 15)):
        for memory in (1 << 34, 0):
            J = TokenJacobian(policy, batches[idle], Resources(memory))
            weights = weights_of(J)
            counts["passes"] = 0.0
            with without_packing():  # which takes fewer positions
                J.contributions(weights, folds=folds)
            if folds is None or memory == 0:  # else folds share the forward passes of their derivatives
                assert counts["passes"] == pytest.approx(most)
            assert counts["passes"] < most + 1e-9
    handle.remove()


@pytest.mark.all
def test_two_vectors_live_beside_autograds_whatever_the_number_of_folds(policy):
    batch, most = make_rollouts(policy), []
    J = TokenJacobian(policy, batch, Resources(3 * vector_bytes(policy.model)))
    weights = weights_of(J)
    one, before = vector_bytes(policy.model), {id(each) for each in gc.get_objects() if type(each) is Vectors}

    def count(*_: object) -> None:
        found = [each for each in gc.get_objects() if type(each) is Vectors and id(each) not in before]
        held = {each.rows.untyped_storage().data_ptr(): each.rows.untyped_storage().nbytes() for each in found}
        most.append(sum(held.values()) / one)

    handle = policy.model.register_forward_hook(count)
    J.contributions(weights, folds=3)
    handle.remove()
    assert max(most) == 2


def test_vectors_in_scratch_files_give_the_same_numbers_bit_for_bit():
    policy = make_policy("qwen2")
    batch = make_rollouts(policy)
    found = []
    for memory in (3 * vector_bytes(policy.model), 3 * vector_bytes(policy.model) - 1):
        J = TokenJacobian(policy, batch, Resources(memory))
        found.append(J.contributions(weights_of(J), folds=3))
    for name in ("along", "own", "by_fold", "folds"):
        assert torch.equal(*(getattr(each, name) for each in found))
    assert found[0].self_check < 1e-5  # of float32


WORK = """
import sys
import torch
from gradscope import Resources, TokenJacobian, read_rollouts
from gradscope.policy import join_launch, load_policy
torch.set_num_threads(1)
model, rollouts, out = sys.argv[1:]
processes, device = join_launch("cpu")
policy = load_policy(model, device=device, dtype="float64")
J = TokenJacobian(policy, read_rollouts(rollouts, policy), Resources(1 << 34, processes=processes))
weights = torch.randn(J.num_tokens, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
found = J.contributions(weights, folds=3)
torch.save((found.along, found.own, found.by_fold, found.folds, found.self_check), f"{out}/{processes.rank}.pt")
"""


def test_two_processes_share_the_prompts_and_both_get_all_contributions(tmp_path: Path):
    model = save_checkpoint(tmp_path / "model", "gpt2")
    policy = load_policy(model, device="cpu", dtype="float64")
    write_rollouts(tmp_path / "rollouts.jsonl", make_rollouts(policy))
    batch = read_rollouts(tmp_path / "rollouts.jsonl", policy)
    ended = launch("-c", WORK, model, tmp_path / "rollouts.jsonl", tmp_path)
    assert [process.status for process in ended] == [0, 0], ended[0].stderr + ended[1].stderr
    J = TokenJacobian(policy, batch)
    weights = torch.randn(J.num_tokens, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    alone = J.contributions(weights, folds=3)
    for rank in (0, 1):
        along, own, by_fold, folds, self_check = torch.load(tmp_path / f"{rank}.pt")
        assert torch.equal(folds, alone.folds) and self_check < EXACT
        for found, expected in ((along, alone.along), (own, alone.own), (by_fold, alone.by_fold)):
            assert_near(found, expected, EXACT)


def test_a_model_without_forward_mode_is_refused_and_a_hidden_part_of_its_gradient_is_seen():
    policy = make_policy("gpt2")
    J = TokenJacobian(policy, make_rollouts(policy))
    weights = weights_of(J)
    for wrong in (weights[1:], weights[None], weights.masked_fill(weights == weights.max(), torch.nan)):
        with refused():
            J.contributions(wrong)
    for folds in (0, 2, 8):
        with refused(folds):
            J.contributions(weights, folds=folds)
    for broken, kind in (
        (fused(make_policy("gpt2")), None),
        (used_again(make_policy("gpt2"), "transformer.h.1.ln_1"), SelfCheckError),
    ):
        J = TokenJacobian(broken, J.batch)
        with refused(**({"kind": kind} if kind else {})):
            J.contributions(weights)
