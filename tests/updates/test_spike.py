"""A step out of line, explained: against the whole Jacobian in float64, and with culprits that were planted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.gradients import dense_jacobian
from support.policies import PAD, make_policy, make_responses
from torch import Tensor

from gradscope.diagnosis import describe_spike, make_spike_report
from gradscope.gradients import TokenJacobian, Vectors
from gradscope.objective import TokenWeights
from gradscope.rollouts import collate
from gradscope.updates import Spike, SpikedStep, explain_spike, tabulate_step

EXACT = 1e-9
"""GPT-2 alone computes everything in float64; the sums here are of 60 tokens."""
LENGTHS = (9, 7, 11, 6, 9, 6, 5, 8)
RESPONSE, TOKEN = 4, 3
TIMES = 3.0


class Case:
    """Eight responses to four prompts: advantages of ±1 on the policy, until something is planted in them."""

    def __init__(self) -> None:
        self.policy = make_policy("gpt2")
        self.policy.model.double()
        responses = make_responses(self.policy, lengths=LENGTHS, prompt_lengths=(5, 5, 3, 3, 8, 8, 4, 4), holes=False)
        batch = collate(responses, pad_id=PAD)
        advantages = torch.tensor([1.0, -1.0] * 4)[:, None].expand(batch.input_ids.shape).clone()
        self.batch = replace(batch, advantages=advantages, old_logprobs=None, ref_logprobs=None, rewards=None)
        self.ratios = torch.ones(batch.input_ids.shape, dtype=torch.float64)

    def token(self, row: int, number: int) -> tuple[int, int]:
        """Where the response's token of this number is in the batch."""
        return row, int(self.batch.response_mask[row].nonzero()[number])

    def table(self, J: TokenJacobian):
        logprob, zero = J.statistics.logprob.double(), torch.zeros(self.batch.input_ids.shape)
        weights = TokenWeights(self.ratios * self.batch.advantages.double(), zero, zero.bool())
        batch = replace(self.batch, old_logprobs=logprob - self.ratios.log())
        return tabulate_step(batch, weights, logprob, J.statistics.entropy)

    def explain(self, norm: float | None = None) -> tuple[Spike, SpikedStep, Tensor]:
        """The step with what was planted; in line is three times the norm of the step without."""
        J = TokenJacobian(self.policy, self.batch)
        quiet = SpikedStep(J, Case().table(J), self.policy.decode)
        step = SpikedStep(J, self.table(J), self.policy.decode)
        with np.errstate(invalid="ignore"):
            whole = step.norm(step.weights) if norm is None else norm
        found = explain_spike(step, whole, line=TIMES * quiet.norm(quiet.weights))
        return found, step, dense_jacobian(self.policy, self.batch).double()


def one_token(case: Case) -> set[tuple[int, int]]:
    """One token's advantage, times 300."""
    case.batch.advantages[place := case.token(RESPONSE, TOKEN)] *= 300
    return {place}


def overflowing_ratio(case: Case) -> set[tuple[int, int]]:
    """A ratio of 10⁶, of an old log π of another policy."""
    case.ratios[place := case.token(1, 2)] = 1e6
    return {place}


def fabricated_end(case: Case) -> set[tuple[int, int]]:
    """An end token that the policy would hardly ever sample, and that is rewarded for it."""
    place = case.token(6, LENGTHS[6] - 1)
    with torch.no_grad():
        logits = case.policy.model(case.batch.input_ids[6:7, : place[1]]).logits[0, -1]
    case.batch.input_ids[place], case.batch.advantages[place] = int(logits.argmin()), 200.0
    return {place}


def cancelling_pair(case: Case) -> set[tuple[int, int]]:
    """Two equal tokens after equal texts, whose huge terms cancel to a twentieth."""
    rows = [row for row in range(8) if case.batch.group_ids[row] == case.batch.group_ids[0]][:2]
    places = [case.token(row, 0) for row in rows]
    case.batch.input_ids[places[1]] = int(case.batch.input_ids[places[0]])
    case.batch.advantages[places[0]], case.batch.advantages[places[1]] = 4000.0, -3800.0
    return {*places}


def whole_response(case: Case) -> set[tuple[int, int]]:
    """All of a response's advantages, times 300."""
    case.batch.advantages[RESPONSE] *= 300
    return {case.token(RESPONSE, number) for number in range(LENGTHS[RESPONSE])}


PLANTED = (one_token, overflowing_ratio, fabricated_end, cancelling_pair, whole_response)


@pytest.fixture(scope="module", params=PLANTED, ids=lambda plant: plant.__name__)
def planted(request):
    case = Case()
    places = request.param(case)
    return places, *case.explain()


def test_the_culprits_are_those_that_were_planted(planted):
    places, found, step, _ = planted
    kept = step.jacobian.batch.response_mask.nonzero().tolist()
    assert found.found and {tuple(kept[t]) for t in np.flatnonzero(found.culprits)} == places


def test_shares_and_norms_are_those_of_the_whole_jacobian(planted):
    _, found, step, jacobian = planted
    terms = jacobian * torch.from_numpy(-step.weights / len(step.weights))[:, None]
    total = terms.sum(0)
    shares = terms @ total / (total @ total)
    largest = shares.abs().max()  # of the pair that cancels, 20
    assert found.norm == pytest.approx(float(total.norm()), rel=EXACT)
    assert np.abs(found.shares - shares.numpy()).max() <= EXACT * float(largest)
    assert found.explained == pytest.approx(1, abs=EXACT * len(shares) * float(largest))
    norms = terms.norm(dim=1)[found.tokens["token"].tolist()]
    assert found.tokens["term_norm"].to_numpy() == pytest.approx(norms.numpy(), rel=EXACT)
    for left_out, norm in zip(found.left_out, found.without["norm"], strict=True):
        assert norm == pytest.approx(float(terms[~torch.from_numpy(left_out)].sum(0).norm()), rel=1e-6)


def test_it_stops_at_the_first_set_that_brings_the_norm_in_line(planted):
    _, found, _, _ = planted
    assert (found.without["norm"].iloc[:-1] > found.line).all() or found.without["what"].iloc[-1] == "response"
    assert found.without["norm"].iloc[-1] <= found.line < found.norm


def test_the_trainers_own_gradient_gives_the_same_shares(planted):
    _, found, step, _ = planted
    total = step.gradient(step.weights)
    total.rows.mul_(0.01 / found.norm)  # clipped to a norm of .01
    unit = Vectors(total.rows / total.rows.norm(), total.slices)
    again = explain_spike(step, found.norm, line=found.line, direction=unit)
    assert again.shares == pytest.approx(found.shares, abs=EXACT * np.abs(found.shares).max())


def test_the_page_and_the_line_name_what_was_found(planted, tmp_path):
    places, found, _, _ = planted
    line = describe_spike(found, found.line / TIMES)
    row = next(iter(places))[0]
    assert f"response {row}" in line or len(places) > 1
    page = make_spike_report(found, title="step 8", typical=found.line / TIMES).to_html(tmp_path / "spike.html")
    assert f"{found.norm:.4g}" in page.read_text(encoding="utf-8")


def test_weightings_that_would_have_removed_a_ratio_are_named_with_their_norm():
    case = Case()
    overflowing_ratio(case)
    found, step, jacobian = case.explain()
    clipped = found.remedies.set_index("weighting")
    assert not {"sft", "dft"} & {*clipped.index}  # losses of their own are no remedy
    assert {"clip", "cispo"} <= {*clipped.index} and not {"reweight", "top-entropy"} & {*clipped.index}
    weights = np.where(found.culprits, 0.0, step.weights)  # the only ratio that is not 1
    expected = (jacobian * torch.from_numpy(weights / len(weights))[:, None]).sum(0).norm()
    assert clipped.loc["clip", "norm"] == pytest.approx(float(expected), rel=1e-6)
    assert clipped.loc["clip", "left"] == 0


def test_no_culprit_is_named_where_the_whole_batch_grows():
    case = Case()
    case.batch.advantages.mul_(100)
    found, _, _ = case.explain()
    assert not found.found and not found.culprits.any() and {*found.without["what"]} == {"tokens", "response", "group"}
    assert "no few tokens" in describe_spike(found, None)


# ---- not finite


def test_a_weight_that_is_not_finite_is_found_first():
    case = Case()
    case.batch.advantages[place := case.token(2, 4)] = torch.nan
    found, step, jacobian = case.explain(norm=float("nan"))
    kept = step.jacobian.batch.response_mask.nonzero().tolist()
    assert found.nonfinite.kind == "w" and kept[int(np.flatnonzero(found.culprits)[0])] == [*place]
    weights = np.nan_to_num(step.weights)
    expected = (jacobian * torch.from_numpy(weights / len(weights))[:, None]).sum(0).norm()
    assert found.without["norm"].iloc[0] == pytest.approx(float(expected), rel=EXACT)


def test_a_broken_parameter_is_named_before_what_it_breaks():
    case = Case()
    J = TokenJacobian(case.policy, case.batch)
    step = SpikedStep(J, case.table(J), case.policy.decode)
    broken = case.policy.model.transformer.h[1].mlp.c_fc.weight
    with torch.no_grad():
        broken[0, 0] = torch.nan
    found = explain_spike(step, float("nan"), line=1.0)
    assert found.nonfinite.kind == "weights" and "h.1.mlp.c_fc.weight" in found.nonfinite.words and not found.found


def test_a_response_whose_gradient_alone_overflows_is_found():
    case = Case()
    own = case.batch.input_ids[RESPONSE][case.batch.response_mask[RESPONSE]][:-1]  # the last is never put in
    others = {*case.batch.input_ids[torch.arange(8) != RESPONSE].flatten().tolist()}
    only = next(i for i in own.tolist() if i not in others)

    def break_derivative(_module, ids, embedded):
        there, broken = ids[0] == only, embedded.clone()
        broken[there] = embedded[there] + (0 * embedded[there]).abs().sqrt()  # adds 0, whose derivative is 0 · ∞
        return broken

    J = TokenJacobian(case.policy, case.batch)
    step = SpikedStep(J, case.table(J), case.policy.decode)
    line = TIMES * step.norm(step.weights)
    with case.policy.model.transformer.wte.register_forward_hook(break_derivative):
        found = explain_spike(step, float("inf"), line=line)
    assert found.nonfinite.kind == "gradient"
    assert {*step.table["response"][found.culprits]} == {RESPONSE} and found.found


def test_a_norm_that_only_the_trainers_precision_makes_infinite_is_said_to_be_so():
    found, _, _ = Case().explain(norm=float("inf"))
    assert found.nonfinite.kind == "precision"
