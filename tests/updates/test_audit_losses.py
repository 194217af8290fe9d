"""What audits say of losses under a weighting: of each whose columns a log may have, and of pairs' references."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from support.policies import VOCAB, make_policy
from support.tiers import every
from support.words import make_merging_tokenizer
from torch import Tensor

from gradscope.gradients import TokenJacobian
from gradscope.objective import batch_weights, settle_loss
from gradscope.policy import Policy, float_parameters
from gradscope.rollouts import Response, TokenBatch, collate
from gradscope.updates import Audit, TrainedLoss, audit

BETA = 0.05


@cache
def make_step(seed: int = 0, pairs: int = 6) -> tuple[Policy, TokenBatch]:
    """Pairs of a chosen and a rejected response, with every column that a weighting reads; most would have other ids if
    their text were encoded again."""
    policy, draw = replace(make_policy("qwen2"), tokenizer=make_merging_tokenizer()), torch.Generator()
    draw.manual_seed(seed)
    rows = []
    for row in range(2 * pairs):
        prompt, ids = (torch.randint(4, VOCAB, (size,), generator=draw).tolist() for size in (3, 5 + row % 4))
        told = {"advantage": float(torch.randn(1, generator=draw)), "response_mask": [n != 2 for n in range(len(ids))]}
        told |= {"pair": row // 2, "chosen": 1 - row % 2, "z0": 0.1}
        rows.append(Response(prompt, ids, group=row // 2, temperature=1.0, **told))
    batch = collate(rows)
    own, columns = TokenJacobian(policy, batch).statistics.logprob, {}
    for name in ("old", "ref", "sampler", "teacher"):
        moved = (own + 0.3 * torch.randn(own.shape, generator=draw)).clamp(max=0.0)
        columns[f"{name}_logprobs"] = torch.where(batch.response_mask, moved, torch.nan)
    return policy, replace(batch, **columns)


OF_COLUMNS = ("dpo", "opd", "kto", "ipo", "simpo", "orpo", "sft", "dft", "tis", "seq-mask-tis:high=5", "kl")
"""Weightings without rewards, and of the sampler's or the reference's log-probabilities."""


@pytest.mark.parametrize("name", every(len(OF_COLUMNS), OF_COLUMNS))
def test_a_weighting_is_audited_whether_its_gradient_is_right_or_of_no_reading(name):
    """By all that is tried, also responses of other ids, of which some columns are not known."""
    policy, batch = make_step(pairs=2)
    loss = TrainedLoss(weighting=name, kl_coef=0.0, clip_ratio_c=None)
    settled, J = settle_loss(batch, loss), TokenJacobian(policy, batch)
    own = batch_weights(J.statistics.logprob, settled, loss, num_tokens=batch.num_tokens, entropy=J.statistics.entropy)
    right = J.vjp(-J.kept(own.policy)[None] / batch.num_tokens)
    noise = torch.randn(right.rows.shape, generator=torch.Generator().manual_seed(0))
    found = []
    for rows in (right.rows, right.rows + noise * right.rows.norm() / noise.norm()):
        gradient = {key: rows[0, part].view_as(policy.model.get_parameter(key)) for key, part in right.slices.items()}
        found.append(audit(policy, batch, gradient, loss=loss, micro_batch=2))
    assert (found[0].kind, found[0].fault) == ("same", None) and found[1].kind == "other"
    assert "retokenised" not in found[1].unseen


@dataclass(frozen=True)
class Trainer:
    """A loop over responses that adds up the gradient of a loss on sums, or means, of log π − log π_ref."""

    name: str
    policy: Policy
    batch: TokenBatch
    reference: Tensor
    """Of each response, the sum or mean over its tokens."""

    def gradient(self) -> dict[str, Tensor]:
        named, scores = dict(float_parameters(self.policy.model)), []
        for row, (ids, kept) in enumerate(map(self.batch.sequence, range(len(self.batch)))):
            logprobs = self.policy.model(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
            own = logprobs.gather(1, ids[1:, None])[kept - 1, 0]
            scores.append((own.mean() if self.name == "ipo" else own.sum()) - self.reference[row])
        chosen, rejected = torch.stack(scores).view(-1, 2).T
        losses = {
            "dpo": lambda: -torch.nn.functional.logsigmoid(BETA * (chosen - rejected)).mean(),
            "ipo": lambda: (chosen - rejected - 1 / (2 * BETA)).square().mean(),
            "kto": lambda: 1 - torch.cat([BETA * (chosen - 0.1), BETA * (0.1 - rejected)]).sigmoid().mean(),
        }
        found = torch.autograd.grad(losses[self.name](), [*named.values()], allow_unused=True)
        return {name: own for name, own in zip(named, found, strict=True) if own is not None}


def check(name: str, order: list[int], noise: float = 0.0) -> Audit:
    """Audit a step whose rows have the reference of others."""
    policy, batch = make_step()
    own = torch.where(batch.response_mask, batch.ref_logprobs, 0.0).sum(1)
    own = own / batch.response_mask.sum(1) if name == "ipo" else own
    own = own[order] + noise * torch.randn(len(own), generator=torch.Generator().manual_seed(1))
    loss = TrainedLoss(weighting=f"{name}:beta={BETA}")
    return audit(policy, batch, Trainer(name, policy, batch, own).gradient(), loss=loss, micro_batch=4)


@pytest.mark.parametrize("name", every(3, ["dpo", "ipo", "kto"]))
def test_whose_reference_each_pair_has_is_told(name):
    """Pairs, or for KTO single responses, are shuffled after their references were computed."""
    whose = torch.randperm(6 if name != "kto" else 12, generator=torch.Generator().manual_seed(3)).tolist()
    order = whose if name == "kto" else [2 * own + side for own in whose for side in (0, 1)]
    found = check(name, order)
    assert found.kind == "tokens" and found.fault is None and "shuffle" in " ".join(found.remedies)
    assert {*found.explained["kind"]} == {"response" if name == "kto" else "pair"}
    told = dict(zip(found.explained["index"], found.explained["reference"], strict=True))
    assert told == {own: other for own, other in enumerate(whose) if own != other}


@pytest.mark.parametrize("how", every(3, ["another model", "reversed", "sound"]))
def test_references_of_no_other_pair_are_told_by_pairs_and_those_in_a_known_order_are_named(how):
    order = [*range(12)][::-1] if how == "reversed" else [*range(12)]
    found = check("dpo", order, noise=10.0 * (how == "another model"))
    if how == "another model":
        assert found.kind == "tokens" and {*found.explained["kind"]} == {"pair"} and "reference" not in found.explained
        assert "margin" in " ".join(found.remedies)
    else:
        assert (found.kind, found.fault) == ("same", "ref-reversed" if how == "reversed" else None)
