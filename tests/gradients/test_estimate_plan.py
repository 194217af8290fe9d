"""What is estimated follows from its cost, says so, and is checked against plain autograd first."""

from __future__ import annotations

import pytest
import torch
from support.policies import CAUSAL, make_batch, make_policy
from support.tiers import every

from gradscope.errors import InputError, SelfCheckError
from gradscope.gradients import MeasureSettings, TableMeasurement, estimate_plan, estimates as norm_estimates, measure
from gradscope.gradients.estimate_plan import check_estimates, plan_estimate
from gradscope.gradients.estimates import EstimateCounts
from gradscope.policy import Policy
from gradscope.rollouts import TokenBatch

# torch itself calls torch.jit.script the first time that forward mode is used.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")

BOTH = EstimateCounts(passes=1, draws=1)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return make_policy("qwen2")


@pytest.fixture(scope="module")
def batch(policy) -> TokenBatch:
    return make_batch(policy)


@pytest.fixture(scope="module")
def long(policy) -> TokenBatch:
    return make_batch(policy, lengths=(58, 58), prompt_lengths=(5, 5), holes=False)


def plan(policy, batch, *, intervals=4, weighted=False, **counts):
    return plan_estimate(policy.model, batch, intervals=intervals, weighted=weighted, **counts)


def test_costs_are_counted_token_by_token(policy, batch):
    positions = prefixes = 0
    for row in range(len(batch)):
        start = int(batch.attention_mask[row].int().argmax())
        kept = [c for c in range(batch.input_ids.shape[1]) if batch.response_mask[row, c]]
        positions += max(kept) - start
        prefixes += sum(column - start for column in kept)
    found = plan(policy, batch, passes=3, draws=5, weighted=True)
    assert found.exact_cost == pytest.approx(0.7 * prefixes / positions)
    assert (found.sums, found.passes_cost, found.draws_cost) == (8, 1 + 2 * 3 * 8, 5 * 7)
    assert plan(policy, batch, passes=3, intervals=2).passes_cost == 1 + 2 * 3 * 2


def test_what_is_given_is_done_and_nothing_else(policy, batch):
    for passes, draws in ((3, None), (None, 5), (3, 5)):
        found = plan(policy, batch, passes=passes, draws=draws)
        assert (found.counts, found.reason) == (EstimateCounts(passes, draws), "as asked")
        assert ("passes of random signs" in str(found)) == (passes is not None)
        assert ("draws of forward mode, ±32.3% for each token" in str(found)) == (draws is not None)


def test_short_responses_get_no_draws_and_hear_that_exact_norms_cost_less(policy, batch):
    found = plan(policy, batch)
    assert found.counts == EstimateCounts(4, None) and found.exact_cost < found.passes_cost == 33
    assert "32 draws would bring the cost to 257" in str(found)
    assert str(found).endswith("exact norms cost less: leave out --norms estimate")


def test_long_responses_get_both(policy, long, monkeypatch):
    monkeypatch.setattr(estimate_plan, "PASSES", 1)
    monkeypatch.setattr(estimate_plan, "DRAWS", 1)
    found = plan(policy, long)
    assert (found.counts, found.reason) == (EstimateCounts(1, 1), "less than exact norms cost")
    # Prefixes of 5 to 62 tokens, over 62 positions.
    exact = 0.7 * sum(range(5, 63)) / 62
    assert found.passes_cost + found.draws_cost == 9 + 7 < found.exact_cost == pytest.approx(exact)
    assert "leave out" not in str(found)
    monkeypatch.setattr(estimate_plan, "DRAWS", 2)
    assert plan(policy, long).counts.draws is None


def test_a_model_without_forward_mode_gets_no_draws_unless_asked_and_then_a_refusal(policy, long, monkeypatch):
    def fail(*_args, **_settings):
        raise NotImplementedError("no rule for this operation")

    monkeypatch.setattr(torch.func, "jvp", fail)
    monkeypatch.setattr(estimate_plan, "DRAWS", 1)
    monkeypatch.setattr(estimate_plan, "PASSES", 1)
    found = plan(policy, long, intervals=1)
    assert found.counts == EstimateCounts(1, None) and "no forward mode" in found.reason
    assert "--" not in found.reason
    with pytest.raises(InputError, match=r"the model has no forward mode.*; give --passes alone"):
        measure(policy, long, norms="estimate", draws=1)


# The self-check.


@pytest.mark.parametrize("name", every(3, CAUSAL))
def test_both_estimators_are_of_the_right_gradients_on_every_architecture(name):
    policy = make_policy(name)
    batch = make_batch(policy, temperature=0.7)
    with TableMeasurement(policy, batch, MeasureSettings(norms="estimate", passes=1, draws=1)) as measurement:
        check = measurement.check
    assert 4 <= check.tokens <= 8 and 0 < check.largest_difference < 1e-3 == check.tolerance


@pytest.mark.parametrize(
    ("name", "what"), [("random signs", "signed_square_norms"), ("forward mode", "predict_changes")]
)
def test_an_estimator_that_is_two_percent_off_is_not_believed(policy, batch, monkeypatch, name, what):
    right = getattr(estimate_plan, what)

    def wrong(*args, **settings):
        found = right(*args, **settings)
        return 1.04 * found if name == "random signs" else (1.02 * found[0], found[1])

    monkeypatch.setattr(estimate_plan, what, wrong)
    with pytest.raises(SelfCheckError, match=f"self-check failed at token .* {name} differs"):
        measure(policy, batch, norms="estimate", passes=1, draws=1)
    assert len(measure(policy, batch, norms="estimate", passes=1, draws=1, self_check=False)) == batch.num_tokens


def test_a_number_that_is_none_fails_the_check(policy, batch, monkeypatch):
    monkeypatch.setattr(norm_estimates, "_square_norm", lambda _: float("nan"))
    with pytest.raises(SelfCheckError, match="random signs"):
        check_estimates(policy.model, batch, [(0, 0)], BOTH, seed=0)
