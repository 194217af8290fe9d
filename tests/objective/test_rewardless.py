"""Weights of losses without a reward, against autograd of the printed losses, one response at a time."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import torch
from support.cli import complaint
from torch import Tensor
from torch.nn.functional import logsigmoid

from gradscope.objective import WEIGHTINGS, LossSettings, batch_loss, batch_weights, make_weighting, settle_loss
from gradscope.objective.rewardless import REWARDLESS
from gradscope.rollouts import Response, collate

LENGTHS = (5, 9, 1, 12, 7, 3)
PAIRS, CHOSEN = (4, 2, 4, 9, 2, 9), (1, 0, 0, 0, 1, 1)


def plant(seed: int = 0, *, moved: float = 0.3) -> pd.DataFrame:
    """Tokens of three pairs whose sides do not lie side by side."""
    rng = np.random.default_rng(seed)
    response = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    logprob = np.log(rng.beta(0.6, 0.3, len(response)).clip(1e-3, 0.99))
    away = {name: logprob + rng.normal(0, moved, len(response)) for name in ("old_logprob", "ref_logprob")}
    columns = {"response": response, "position": np.concatenate([np.arange(n) for n in LENGTHS]), "logprob": logprob}
    columns |= away | {"teacher_logprob": logprob + rng.normal(0, 1.0, len(response))}
    columns |= {"pair": np.array(PAIRS)[response], "chosen": np.array(CHOSEN)[response]}
    columns |= {"advantage": rng.choice([-1.0, 0.0, 2.0], len(LENGTHS))[response]}
    table = pd.DataFrame(columns)
    ratio = np.exp(table["logprob"] - table["old_logprob"])
    return table.assign(policy_weight=ratio * table["advantage"])


def slopes(table: pd.DataFrame, loss) -> np.ndarray:
    """−∂/∂ log π of the sum of `loss(columns)`, a term per token, response or pair."""
    columns = {name: torch.tensor(table[name].to_numpy(float)) for name in table}
    log_pi = columns["logprob"].requires_grad_(True)
    (found,) = torch.autograd.grad(loss(columns).sum(), log_pi)
    return -found.numpy()


def each(columns: dict[str, Tensor], values: Tensor, *, mean: bool = False) -> dict[int, Tensor]:
    """The sum, or mean, over each response."""
    return {int(i): (values[own].mean() if mean else values[own].sum()) for i in columns["response"].unique()
            if (own := columns["response"] == i) is not None}  # fmt: skip


def sides(columns: dict[str, Tensor], values: Tensor, *, mean: bool = False) -> tuple[Tensor, Tensor]:
    """A number of the chosen and of the rejected response of each pair."""
    found = each(columns, values, mean=mean)
    order = [[next(i for i in range(len(PAIRS)) if (PAIRS[i], CHOSEN[i]) == (pair, side)) for pair in sorted({*PAIRS})]
             for side in (1, 0)]  # fmt: skip
    return tuple(torch.stack([found[i] for i in rows]) for rows in order)


def dpo(c: dict[str, Tensor], beta: float = 0.1) -> Tensor:
    won, lost = sides(c, c["logprob"] - c["ref_logprob"])
    return -logsigmoid(beta * (won - lost))


def ipo(c: dict[str, Tensor], beta: float = 0.1) -> Tensor:
    won, lost = sides(c, c["logprob"] - c["ref_logprob"], mean=True)
    return (won - lost - 1 / (2 * beta)) ** 2


def simpo(c: dict[str, Tensor], beta: float = 2.0, gamma: float = 0.5) -> Tensor:
    won, lost = sides(c, c["logprob"], mean=True)
    return -logsigmoid(beta * (won - lost) - gamma)


def orpo(c: dict[str, Tensor], beta: float = 0.1) -> Tensor:
    won, lost = (p.exp() for p in sides(c, c["logprob"], mean=True))
    return -beta * logsigmoid(torch.log(won / (1 - won)) - torch.log(lost / (1 - lost)))


def kto(c: dict[str, Tensor], beta: float = 0.1, z0: float = 0.4, desirable: float = 1.0, undesirable: float = 1.0):
    losses = []
    for i, ratio in each(c, c["logprob"] - c["ref_logprob"]).items():
        good = bool(CHOSEN[i])
        inside = beta * (ratio - z0) if good else beta * (z0 - ratio)
        losses.append((desirable if good else undesirable) * (1 - torch.sigmoid(inside)))
    return torch.stack(losses)


def estimate(name: str, log_pi: Tensor, teacher: Tensor) -> Tensor:
    apart = log_pi - teacher
    return {"k1": apart, "k2": apart.square() / 2, "k3": (-apart).exp() - 1 + apart, "abs": apart.abs()}[name]


def opd_loss(c: dict[str, Tensor], estimator: str, coef: float = 1.0, clamp: float = math.inf) -> Tensor:
    return coef * estimate(estimator, c["logprob"], c["teacher_logprob"]).clamp(-clamp, clamp)


def opd_policy_gradient(
    c, estimator, coef=1.0, clamp=math.inf, low=1.0, high=math.inf, dual=math.inf, add=0.0, old=0, fall=1.0
):
    at = c["old_logprob"] if old else c["logprob"].detach()
    advantage = -coef * estimate(estimator, at, c["teacher_logprob"]).clamp(-clamp, clamp) + add
    ratio = (c["logprob"] - c["old_logprob"]).exp()
    plain = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    kept = c["logprob"].detach().exp() - c["old_logprob"].exp() >= -fall
    return -torch.where(kept, torch.where(advantage < 0, torch.maximum(plain, dual * advantage), plain), 0.0)


ESTIMATORS = ("k1", "k2", "k3", "abs")
PRINTED = {
    "sft": lambda c: -c["logprob"],
    "dft": lambda c: -c["logprob"].exp().detach() * c["logprob"],
    "dpo": dpo,
    "dpo:beta=1.3": lambda c: dpo(c, 1.3),
    "ipo": ipo,
    "ipo:beta=0.7": lambda c: ipo(c, 0.7),
    "simpo": simpo,
    "simpo:beta=0.3,gamma=1.5": lambda c: simpo(c, 0.3, 1.5),
    "orpo": orpo,
    "orpo:beta=0.9": lambda c: orpo(c, 0.9),
    "kto:z0=0.4": kto,
    "kto:beta=0.8,z0=0,desirable=0.5,undesirable=1.5": lambda c: kto(c, 0.8, 0.0, 0.5, 1.5),
} | {
    f"opd:estimator={name},policy_gradient=0{more}": lambda c, name=name, own=own: opd_loss(c, name, **own)
    for name in ESTIMATORS
    for more, own in (("", {}), (",coef=0.3,clamp=0.2", {"coef": 0.3, "clamp": 0.2}))
} | {
    f"opd:estimator={name}{more}": lambda c, name=name, own=own: opd_policy_gradient(c, name, **own)
    for name in ESTIMATORS
    for more, own in (
        ("", {}),
        (",at_old=1,coef=0.5", {"old": 1, "coef": 0.5}),
        (",fall=0.05", {"fall": 0.05}),
        (",eps_low=0.1,eps_high=0.05,dual=1.2,clamp=0.6", {"low": 0.1, "high": 0.05, "dual": 1.2, "clamp": 0.6}),
    )
}  # fmt: skip


def test_every_loss_without_a_reward_is_looked_at():
    assert {name.partition(":")[0] for name in PRINTED} == {kind.NAME for kind in REWARDLESS} <= {*WEIGHTINGS}


@pytest.mark.parametrize("name", PRINTED)
def test_weights_are_the_slopes_of_the_printed_loss(name):
    table = plant()
    found = make_weighting(name).weights(table)["all"]
    np.testing.assert_allclose(found, slopes(table, PRINTED[name]), rtol=1e-9, atol=1e-12)
    assert len(np.unique(found.round(12))) > 1 or name in ("sft", "opd:estimator=k1,policy_gradient=0")


def test_a_distillation_is_added_to_a_reward_under_one_clip_or_as_a_second_term():
    table = plant()
    clips = {"low": 0.2, "high": 0.2, "dual": 3.0}
    spelled = "opd:eps_low=0.2,eps_high=0.2,dual=3,reward="
    together = slopes(table, lambda c: opd_policy_gradient(c, "k1", **clips, add=c["advantage"]))
    np.testing.assert_allclose(make_weighting(f"{spelled}sum").weights(table)["all"], together, rtol=1e-9, atol=1e-12)
    apart = table["policy_weight"] + slopes(table, lambda c: opd_policy_gradient(c, "k1", **clips))
    np.testing.assert_allclose(make_weighting(f"{spelled}term").weights(table)["all"], apart, rtol=1e-9, atol=1e-12)
    assert [make_weighting(f"opd:reward={word}").is_whole for word in ("none", "sum", "term")] == [True, False, False]


def test_tokens_that_the_teacher_did_not_score_are_not_distilled():
    table = plant()
    lacking = np.arange(len(table)) % 3 == 0
    for name in ("opd", "opd:estimator=k3,policy_gradient=0"):
        whole = make_weighting(name).weights(table)["all"]
        found = make_weighting(name).weights(table.assign(teacher_logprob=table["teacher_logprob"].mask(lacking)))
        np.testing.assert_array_equal(found["all"], np.where(lacking, 0.0, whole))


def test_a_shared_prefix_cancels_where_the_weights_of_both_sides_are_equal():
    """DPO's weights are ±βσ(−βh), one number for all tokens of a pair."""
    table = plant()
    found = make_weighting("dpo").weights(table)["all"]
    for _, own in pd.Series(found).groupby(table["pair"]):
        assert len(own.abs().round(14).unique()) == 1 and {*np.sign(own)} == {1.0, -1.0}


@pytest.mark.parametrize("name", ["dpo", "ipo", "simpo", "orpo"])
def test_one_side_of_a_pair_missing_is_named(name):
    table = plant()
    said = complaint(make_weighting(name).weights, table[table["response"] != 3])
    assert "1 of 3 pairs" in said and "rejected" in said and "pair 9" in said and "both sides" in said


def test_what_kto_needs_from_the_trainer_is_asked_for():
    assert "z0" in complaint(make_weighting("kto").weights, plant())
    assert complaint(make_weighting, "kto:z0=-2").startswith("kto: z0 is -2")
    assert complaint(make_weighting, "opd:estimator=k4").startswith("opd: estimator is 'k4'; give one of k1, k2, k3")


@pytest.mark.parametrize(("name", "examples"), [("dpo", 3), ("simpo", 3), ("kto:z0=0.4", 6), ("sft", len(plant()))])
def test_the_batchs_weights_have_the_losss_own_denominator(name, examples):
    """−N · ∂/∂ log π of the mean over pairs, responses or tokens; float32 rounds to 1e-6 of a weight."""
    table = plant()
    rows = []
    for i, own in table.groupby("response"):
        ids = list(range(len(own)))
        rows.append(Response([1], ids, ref_logprobs=own["ref_logprob"].tolist(), pair=PAIRS[i], chosen=CHOSEN[i]))
    loss = LossSettings(weighting=name)
    batch = settle_loss(collate(rows), loss)
    logprobs = torch.zeros(batch.input_ids.shape).masked_scatter_(
        batch.response_mask, torch.tensor(table["logprob"].to_numpy(np.float32))
    )
    found = batch_weights(logprobs, batch, loss, num_tokens=batch.num_tokens)
    expected = slopes(table, PRINTED[name]) * len(table) / examples
    np.testing.assert_allclose(found.total[batch.response_mask].numpy(), expected, rtol=2e-6, atol=1e-7)
    logprobs.requires_grad_(True)
    batch_loss(logprobs, batch, loss, num_tokens=batch.num_tokens).backward()
    own = -batch.num_tokens * logprobs.grad[batch.response_mask]
    np.testing.assert_allclose(own.numpy(), expected, rtol=2e-6, atol=1e-7)
