"""Each weighting against its published loss, written out token by token and differentiated in float64."""

from __future__ import annotations

import math
from dataclasses import fields

import numpy as np
import pandas as pd
import pytest
import torch
from support.cli import complaint
from torch import Tensor

from gradscope.objective import SOURCES, WEIGHTINGS, make_weighting, spell_out
from gradscope.objective.rewardless import REWARDLESS

LOW, HIGH = 0.2, 0.24


def plant(case: str, seed: int = 0, lengths: tuple[int, ...] = (5, 9, 1, 12, 7, 3)) -> pd.DataFrame:
    """Tokens of six responses, as a token table has them; case: "on-policy", "old", or "other sampler"."""
    rng, places = np.random.default_rng(seed), np.random.default_rng(seed + 1)
    response = np.repeat(np.arange(len(lengths)), lengths)
    old = np.log(rng.beta(0.6, 0.3, len(response)).clip(1e-4, 0.999))
    moved = 0.0 if case == "on-policy" else rng.normal(0, 0.4, len(response))
    logprob = np.minimum(old + moved, np.log(0.999))
    sampler = np.minimum(old + (rng.normal(0, 1.2, len(response)) if case == "other sampler" else 0.0), np.log(0.999))
    columns = {
        "response": response,
        "position": np.concatenate([np.sort(places.permutation(2 * n)[:n]) for n in lengths]),  # some are masked
        "logprob": logprob,
        "old_logprob": np.nan if case == "on-policy" else old,
        "sampler_logprob": sampler,
        "ref_logprob": np.minimum(logprob + places.normal(0, 0.5, len(response)), -1e-3),
        "entropy": rng.gamma(0.5, 0.6, len(response)),
        "advantage": rng.choice([-1.3, -0.4, 0.0, 0.7, 1.9], len(lengths))[response],
    }
    table = pd.DataFrame(columns)
    table["policy_weight"] = derivative(grpo, table)
    return table


def tensors(table: pd.DataFrame) -> dict[str, Tensor]:
    found = {name: torch.tensor(table[name].to_numpy(float)) for name in table}
    found["old"] = torch.where(found["old_logprob"].isnan(), found["logprob"], found["old_logprob"])
    return found


def derivative(loss, table: pd.DataFrame, **parameters: float) -> np.ndarray:
    """−N · ∂loss/∂ log π of each token, of the sum of `loss` over the tokens divided by N."""
    columns = tensors(table)
    log_pi = columns["logprob"].clone().requires_grad_(True)
    total = loss(log_pi, **{n: v for n, v in columns.items() if n not in ("logprob", "old_logprob")}, **parameters)
    return -torch.autograd.grad(total, log_pi)[0].numpy()


# The losses as they are printed; the sum over tokens.


def grpo(log_pi, old, advantage, **_):
    ratio = (log_pi - old).exp()
    surrogate = torch.min(ratio * advantage, ratio.clamp(1 - LOW, 1 + HIGH) * advantage)
    return -surrogate.sum()


def per_token(log_pi, old, advantage) -> Tensor:
    ratio = (log_pi - old).exp()
    return -torch.min(ratio * advantage, ratio.clamp(1 - LOW, 1 + HIGH) * advantage)


def reweight(log_pi, old, advantage, alpha=0.3, **_):
    return per_token(log_pi, old, (alpha * old.exp() + 1 - alpha) * advantage).sum()


def mask(log_pi, old, advantage, low=0.0, high=0.25, **_):
    inside = (old.exp() >= low) & (old.exp() < high)
    return per_token(log_pi, old, advantage)[~inside].sum()


def up_weight(log_pi, old, advantage, alpha=0.2, **_):
    return per_token(log_pi, old, (1 + alpha * (1 - old.exp())) * advantage).sum()


def top_entropy(log_pi, old, advantage, entropy, q=0.2, **_):
    return per_token(log_pi, old, advantage)[entropy >= torch.quantile(entropy, 1 - q)].sum()


def kl_cov(log_pi, old, advantage, share=2e-3, beta=1.0, **_):
    losses = -(log_pi - old).exp() * advantage
    own = log_pi.detach()
    cov = (advantage - advantage.mean()) * (own - own.mean())
    top = cov.topk(max(1, int(share * len(cov)))).indices
    return losses.sum() + beta * (log_pi - old).abs()[top].sum()


def cispo(log_pi, old, advantage, eps_low=0.0, eps_high=5.0, **_):
    return -((log_pi - old).exp().clamp(eps_low, eps_high).detach() * advantage * log_pi).sum()


def sapo(log_pi, old, advantage, tau_pos=1.0, tau_neg=1.05, **_):
    tau = torch.where(advantage > 0, tau_pos, tau_neg * torch.ones_like(advantage))
    return -(torch.sigmoid(tau * ((log_pi - old).exp() - 1)) * 4 / tau * advantage).sum()


def gspo(log_pi, old, advantage, response, eps_low=3e-4, eps_high=4e-4, **_):
    total = 0.0
    for i in response.unique():
        own = response == i
        ratio = (log_pi - old)[own].mean().exp()
        clipped = ratio.clamp(1 - eps_low, 1 + eps_high)
        total = total - torch.min(ratio * advantage[own], clipped * advantage[own]).sum()
    return total


def gmpo(log_pi, old, advantage, response, eps_low=0.4, eps_high=0.4, **_):
    total = 0.0
    for i in response.unique():
        own = response == i
        moved, sign = (log_pi - old)[own], advantage[own].sign()
        clipped = sign * torch.min(sign * moved, sign * moved.clamp(-eps_low, eps_high))
        total = total - own.sum() * clipped.mean().exp() * advantage[own].mean()
    return total


def vespo(log_pi, old, advantage, response, sampler_logprob, sampler=0, cap=3.0, **given):
    total = 0.0
    for i in response.unique():
        own = response == i
        ratio = (log_pi - old)[own].detach().exp().prod()
        if sampler:
            ratio = ratio * (old - sampler_logprob)[own].exp().clamp(max=cap).prod()
        side = "pos" if advantage[own][0] >= 0 else "neg"
        known = {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0} | given
        power, rate = known[f"k_{side}"], known[f"lambda_{side}"]
        total = total - (math.exp(rate) * ratio**power * (-rate * ratio).exp() * advantage[own] * log_pi[own]).sum()
    return total


def dppo(log_pi, old, advantage, delta, cap, kl_tau, divergence):
    """Valid is what did not move far, or moved against the advantage."""
    away = torch.where(advantage > 0, log_pi > old, log_pi < old)
    valid = ~(away & (divergence(log_pi.detach().exp(), old.exp()) > delta))
    loss = -(advantage * (log_pi - old).exp().clamp(max=cap).detach() * log_pi)[valid].sum()
    return loss + kl_tau * ((log_pi - old) ** 2).sum()


def dppo_tv(log_pi, old, advantage, sampler_logprob, delta=0.2, cap=20.0, kl_tau=0.0, sampler=0, **_):
    before = sampler_logprob if sampler else old
    return dppo(log_pi, before, advantage, delta, cap, kl_tau, lambda p, q: (p - q).abs())


def dppo_kl(log_pi, old, advantage, sampler_logprob, delta=0.05, cap=20.0, kl_tau=0.0, sampler=0, **_):
    def divergence(p, q):
        return q * (q / p).log() + (1 - q) * ((1 - q + 1e-8) / (1 - p + 1e-8)).log()

    return dppo(log_pi, sampler_logprob if sampler else old, advantage, delta, cap, kl_tau, divergence)


def cppo(log_pi, old, advantage, response, sampler_logprob, delta=0.2, w_min=0.8, delta_b=0.02, sampler=0, **_):
    old = sampler_logprob if sampler else old
    total = 0.0
    for i in response.unique():
        rows = (response == i).nonzero()[:, 0].tolist()
        divergence = [abs(float(log_pi[t].detach().exp() - old[t].exp())) for t in rows]
        budget = min(max(float(np.percentile(divergence, 90)), delta_b), 2 * delta_b)
        spent = allowed = 0.0
        for number, (t, moved) in enumerate(zip(rows, divergence, strict=True)):
            weight = 1 - (1 - w_min) * number / max(len(rows) - 1, 1)
            ratio = (log_pi[t] - old[t]).exp()
            if advantage[t] * (ratio - 1) <= 0 or weight * moved <= min(delta, delta + budget * allowed - spent):
                total = total - ratio * advantage[t]
            spent, allowed = spent + weight * moved, allowed + weight
    return total


def fipo(log_pi, old, advantage, response, position, decay_rate=32.0, clip_range=0.2, threshold=4.0, **_):
    factors = []
    for t in range(len(old)):
        later = [s for s in range(len(old)) if response[s] == response[t] and position[s] >= position[t]]
        future = sum(
            2 ** (-float(position[s] - position[t]) / decay_rate) * float(log_pi[s].detach() - old[s]) for s in later
        )
        factor = min(max(math.exp(future), 1.0), 1 + clip_range)
        factors.append(1.0 if advantage[t] < 0 and (log_pi[t] - old[t]).exp() > threshold else factor)
    return (torch.tensor(factors, dtype=old.dtype) * per_token(log_pi, old, advantage)).sum()


def topr(log_pi, old, advantage, **_):
    ratio = (log_pi - old).exp().clamp(0, 1).detach()
    return -(torch.where(advantage > 0, torch.ones_like(ratio), ratio) * advantage * log_pi).sum()


def dro(log_pi, old, advantage, sampler_logprob, beta=0.05, sampler=0, **_):
    return -(log_pi * advantage - beta / 2 * (log_pi - (sampler_logprob if sampler else old)) ** 2).sum()


def opsm(log_pi, old, advantage, response, sampler_logprob, delta=0.5, sampler=0, **_):
    losses, total = per_token(log_pi, old, advantage), 0.0
    for i in response.unique():
        own = response == i
        drift = ((sampler_logprob if sampler else old) - log_pi)[own].mean()
        total = total + losses[own & ~((advantage < 0) & (drift > delta))].sum()
    return total


def by_token(old, sampler_logprob, response):
    return (old - sampler_logprob).exp()


def by_response(old, sampler_logprob, response, *, mean=False):
    ratios = by_token(old, sampler_logprob, response)
    own = [response == i for i in response]
    return torch.stack([ratios[same].prod() ** (1 / same.sum() if mean else 1) for same in own])


def masked(ratio, low, high):
    return torch.where((ratio < low) | (ratio > high), 0.0, ratio)


def icepop(log_pi, old, advantage, sampler_logprob, response, low=0.5, high=5.0, **_):
    k = by_token(old, sampler_logprob, response)
    return (masked(k, low, high) * per_token(log_pi, old, advantage)).sum()


def tis(log_pi, old, advantage, sampler_logprob, response, low=0.0, high=2.0, **_):
    return (by_token(old, sampler_logprob, response).clamp(low, high) * per_token(log_pi, old, advantage)).sum()


def sequence_tis(log_pi, old, advantage, sampler_logprob, response, low=0.0, high=3.0, **_):
    return (by_response(old, sampler_logprob, response).clamp(low, high) * per_token(log_pi, old, advantage)).sum()


def sequence_mask(log_pi, old, advantage, sampler_logprob, response, low=0.0, high=3.0, **_):
    return (masked(by_response(old, sampler_logprob, response), low, high) * per_token(log_pi, old, advantage)).sum()


def seq_mask_tis(log_pi, old, advantage, sampler_logprob, response, low=0.999, high=1.002, **_):
    kept = masked(by_response(old, sampler_logprob, response, mean=True), low, high) > 0
    return (kept * by_token(old, sampler_logprob, response) * per_token(log_pi, old, advantage)).sum()


def delightful(log_pi, old, advantage, eta=1.0, **_):
    return (torch.sigmoid(advantage * -old / eta) * per_token(log_pi, old, advantage)).sum()


def kl(log_pi, old, advantage, ref_logprob, k=3, beta=0.001, **_):
    difference = log_pi - ref_logprob
    value = {1: difference, 2: difference**2 / 2, 3: torch.exp(-difference) - 1 + difference}[k]
    return (per_token(log_pi, old, advantage) + beta * value).sum()


PRINTED = {
    "grpo": (grpo, {}),
    "kl": (kl, {"k": 1, "beta": 0.2}),
    "reweight": (reweight, {"alpha": 0.7}),
    "mask": (mask, {"low": 0.3, "high": 0.8}),
    "up-weight": (up_weight, {"alpha": 0.4}),
    "top-entropy": (top_entropy, {"q": 0.45}),
    "kl-cov": (kl_cov, {"share": 0.3, "beta": 0.6}),
    "cispo": (cispo, {"eps_low": 0.8, "eps_high": 1.1}),
    "sapo": (sapo, {"tau_pos": 3.0, "tau_neg": 0.4}),
    "gspo": (gspo, {"eps_low": 0.1, "eps_high": 0.05}),
    "gmpo": (gmpo, {"eps_low": 0.2, "eps_high": 0.1}),
    "vespo": (vespo, {"k_pos": 1.0, "lambda_pos": 0.5, "k_neg": 0.7, "lambda_neg": 0.6, "sampler": 1, "cap": 1.3}),
    "dppo-tv": (dppo_tv, {"delta": 0.03, "cap": 1.05, "kl_tau": 0.01, "sampler": 1}),
    "dppo-kl": (dppo_kl, {"delta": 0.002, "cap": math.inf, "kl_tau": 0.01, "sampler": 1}),
    "cppo": (cppo, {"delta": 0.05, "w_min": 0.4, "delta_b": 0.001, "sampler": 1}),
    "fipo": (fipo, {"decay_rate": 3.0, "clip_range": 0.5, "threshold": 1.2}),
    "topr": (topr, {}),
    "dro": (dro, {"beta": 0.7, "sampler": 1}),
    "opsm": (opsm, {"delta": 0.02, "sampler": 1}),
    "icepop": (icepop, {"low": 0.9, "high": 1.6}),
    "tis": (tis, {"low": 0.6, "high": 1.2}),
    "sequence-tis": (sequence_tis, {"low": 0.5, "high": 1.5}),
    "sequence-mask": (sequence_mask, {"low": 0.2, "high": 30.0}),
    "seq-mask-tis": (seq_mask_tis, {"low": 0.8, "high": 1.4}),
    "delightful": (delightful, {"eta": 0.3}),
}
"""Name → its loss, and other parameters than the published ones."""
DRAWN = ("lopti", "random-split", "permuted-weights", "matched-norm", "clip-cov")
"""Those that are drawn, or take two steps; they have tests of their own."""


def spell(name: str, parameters: dict[str, float]) -> str:
    return f"{name}:" + ",".join(f"{key}={value}" for key, value in parameters.items())


def test_every_weighting_is_looked_at():
    assert {*PRINTED, *DRAWN} == {*WEIGHTINGS} - {kind.NAME for kind in REWARDLESS}


@pytest.mark.parametrize("case", ["on-policy", "old", "other sampler"])
@pytest.mark.parametrize("name", PRINTED)
def test_weights_are_the_slopes_of_the_published_loss(name, case):
    loss, others = PRINTED[name]
    table = plant(case)
    for parameters in ({}, others):
        found = make_weighting(spell(name, parameters)).weights(table)
        assert list(found) == ["all"]
        np.testing.assert_allclose(found["all"], derivative(loss, table, **parameters), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_penalty_towards_the_reference_leaves_tokens_without_one_alone(k):
    table = plant("old")
    lacking = np.arange(len(table)) % 2 == 0
    weighting, plain = make_weighting(f"kl:k={k},beta=.2"), make_weighting("grpo").weights(table)["all"]
    whole = weighting.weights(table)["all"]
    found = weighting.weights(table.assign(ref_logprob=table["ref_logprob"].mask(lacking)))["all"]
    np.testing.assert_array_equal(found, np.where(lacking, plain, whole))
    assert not np.allclose(whole[lacking], plain[lacking])


def test_published_parameters_change_something_off_policy():
    """Else the comparison above would be of losses that never reach their own edges."""
    table = plant("other sampler", lengths=(4,) * 50)
    plain = make_weighting("grpo").weights(table)["all"]
    for name, (_, others) in PRINTED.items():
        if name != "grpo":
            one, other = (make_weighting(spell(name, p)).weights(table)["all"] for p in ({}, others))
            assert not np.allclose(other, plain), name
            assert not np.allclose(one, other) or not others, name


def test_on_policy_those_that_only_clip_are_grpo():
    table = plant("on-policy")
    plain = make_weighting("grpo").weights(table)["all"]
    np.testing.assert_allclose(plain, table["advantage"])
    only_clip = ("cispo", "sapo", "gspo", "gmpo", "vespo", "dppo-tv", "dppo-kl", "cppo", "fipo", "topr", "dro", "opsm")
    for name in (*only_clip, "kl-cov", "icepop", "tis", "sequence-tis", "sequence-mask", "seq-mask-tis"):
        np.testing.assert_allclose(make_weighting(name).weights(table)["all"], plain, err_msg=name)
    rounded = table.assign(old_logprob=table["logprob"] + np.tile([3e-5, -3e-5], len(table))[: len(table)])
    np.testing.assert_allclose(make_weighting("kl-cov").weights(rounded)["all"], plain, rtol=1e-4)


def test_under_the_mean_over_responses_each_response_has_the_same_part():
    table = plant("old")
    responses = table["response"].nunique()
    for name, (loss, _) in PRINTED.items():
        if name == "kl-cov":
            continue  # of one response at a time its covariances are others

        def by_sequence(log_pi, response, loss=loss, **columns):
            parts = []
            for i in response.unique():
                own = response == i
                kept = {n: c[own] for n, c in columns.items()}
                if loss is top_entropy:  # the threshold is the batch's
                    kept["q"] = 1.0
                    own_mask = kept["entropy"] >= torch.quantile(columns["entropy"], 0.8)
                    losses = per_token(log_pi[own], kept["old"], kept["advantage"])
                    parts.append(losses[own_mask].sum() / own.sum())
                else:
                    parts.append(loss(log_pi[own], response=response[own], **kept) / own.sum())
            return torch.stack(parts).mean() * len(response)

        found = make_weighting(name).weights(table, aggregation="sequence")["all"]
        np.testing.assert_allclose(found, derivative(by_sequence, table), rtol=1e-9, atol=1e-12, err_msg=name)
    assert responses > 2


def test_lopti_has_two_steps_and_its_control_as_many_tokens_in_each():
    table = plant("old")
    plain = table["policy_weight"].to_numpy()
    rare = table["old_logprob"].to_numpy() < math.log(0.6)
    found = make_weighting("lopti:eta=0.6").weights(table)
    np.testing.assert_array_equal(found["low"], np.where(rare, plain, 0.0))
    np.testing.assert_array_equal(found["high"], np.where(rare, 0.0, plain))
    table["policy_weight"] = plain = 1.0 + np.arange(len(table))  # so that a weight of 0 is of a token left out
    drawn = [make_weighting(f"random-split:eta=0.6,seed={seed}").weights(table) for seed in range(200)]
    for split in drawn:
        assert (split["low"] > 0).sum() == rare.sum()
        np.testing.assert_array_equal(split["low"] + split["high"], plain)
    # Each token is as often in the first step as any other: 5 standard errors of 37 shares.
    shares = np.mean([split["low"] > 0 for split in drawn], axis=0)
    assert np.abs(shares - rare.mean()).max() < 5 * (rare.mean() * (1 - rare.mean()) / 200) ** 0.5


def test_permuted_weights_are_reweights_factors_on_other_tokens():
    table = plant("old").assign(policy_weight=1.0)
    factors = make_weighting("reweight:alpha=0.6").weights(table)["all"]
    drawn = [make_weighting(f"permuted-weights:alpha=0.6,seed={seed}").weights(table)["all"] for seed in range(200)]
    for dealt in drawn:
        np.testing.assert_allclose(np.sort(dealt), np.sort(factors))
    assert np.abs(np.mean(drawn, axis=0) - factors.mean()).max() < 5 * factors.std() / 200**0.5


def test_controls_are_drawn_as_a_mini_batch_of_training_draws_them():
    table = plant("old")
    old = torch.from_numpy(table["old_logprob"].to_numpy(np.float64, copy=True))[None]
    batch, plain = (old, torch.ones_like(old, dtype=torch.bool), 1), table["policy_weight"].to_numpy()
    permuted, split = (
        make_weighting(f"{name},seed=5") for name in ("permuted-weights:alpha=0.6", "random-split:eta=0.6")
    )
    factors = permuted.rule.permuted_factors(*batch, torch.Generator().manual_seed(5))[0].numpy()
    np.testing.assert_array_equal(permuted.weights(table)["all"], factors * plain)
    (_, low), (_, high) = split.rule.drawn_groups(*batch, torch.Generator().manual_seed(5))
    found = split.weights(table)
    np.testing.assert_array_equal(found["low"], np.where(low[0].numpy(), plain, 0.0))
    np.testing.assert_array_equal(found["high"], np.where(high[0].numpy(), plain, 0.0))


def test_clip_cov_leaves_out_a_random_few_of_the_band():
    table = plant("old", lengths=(300, 500, 200))
    plain, own = (table[name].to_numpy() for name in ("policy_weight", "logprob"))
    advantage = table["advantage"].to_numpy()
    cov = (advantage - advantage.mean()) * (own - own.mean())
    band = (cov > 0.1) & (cov < 2) & ((plain != 0) | (advantage == 0))
    given = "clip-cov:share=0.03,low=0.1,high=2"
    drawn = [make_weighting(f"{given},seed={seed}").weights(table)["all"] for seed in range(30)]
    for weights in drawn:
        gone = weights != plain
        assert not gone[~band].any() and (weights[gone] == 0).all() and gone.sum() <= 30
    ever = np.any([weights != plain for weights in drawn], axis=0)
    assert ever.sum() > 200  # other seeds leave out others
    none = make_weighting("clip-cov:low=900,high=901").weights(table)["all"]
    np.testing.assert_array_equal(none, plain)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("cisp", "cispo"),
        ("gradient-surgery", "known: grpo"),
        ("cispo:eps=3", "eps_high"),
        ("cispo:eps_high=much", "much"),
        ("cispo:eps_high", "eps_high"),
        ("reweight:alpha=1.5", "1.5"),
        ("lopti:eta=nan", "nan"),
        ("clip-cov:seed=0.5", "0.5"),
        ("mask:low=0,high=1", "no token"),
        ("icepop:low=2,high=1", "below low"),
        ("cispo:eps_low=1.2,eps_high=0.8", "below eps_low"),
        ("dppo-tv:sampler=0.5", "whole number"),
        ("grpo:alpha=1", "known: none"),
    ],
)
def test_what_is_no_weighting_is_one_line_that_names_it(text, word):
    assert word in complaint(lambda: make_weighting(text).weights(plant("old")))


BY_SAMPLER = (
    *("icepop", "tis", "sequence-tis", "sequence-mask", "seq-mask-tis"),
    *(f"{name}:sampler=1" for name in ("vespo", "dppo-tv", "dppo-kl", "cppo", "dro", "opsm")),
)


@pytest.mark.parametrize(
    ("name", "column"), [("top-entropy", "entropy"), *((name, "sampler_logprob") for name in BY_SAMPLER)]
)
def test_a_column_that_the_log_lacks_is_named(name, column):
    assert column in complaint(make_weighting(name).weights, plant("old").drop(columns=column))
    assert column in complaint(make_weighting(name).weights, plant("old").assign(**{column: np.nan}))
    assert "aggregation is 'mean'" in complaint(make_weighting("grpo").weights, plant("old"), aggregation="mean")


def test_tokens_that_the_sampler_did_not_score_are_not_corrected():
    table = plant("other sampler")
    unknown = np.arange(len(table)) % 3 == 0
    part = table.assign(sampler_logprob=table["sampler_logprob"].mask(unknown))
    same = table.assign(sampler_logprob=table["sampler_logprob"].where(~unknown, table["old_logprob"]))
    for name in BY_SAMPLER:
        found, wanted = (make_weighting(name).weights(columns)["all"] for columns in (part, same))
        np.testing.assert_array_equal(found, wanted, err_msg=name)


OWN = """
from dataclasses import dataclass
import numpy as np
from gradscope.objective import Weighting, within

@dataclass(frozen=True)
class Surprise(Weighting):
    NAME = "surprise"
    least: float = within(0.1, 0, 9)

    def factors(self, tokens):
        return np.where(-tokens.old >= self.least, tokens.plain, 0.0)
"""


def test_a_users_own_file_has_weightings_too(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    table = plant("old")
    found = make_weighting(f"{tmp_path}/own.py:surprise:least=0.5").weights(table)["all"]
    np.testing.assert_array_equal(found, np.where(-table["old_logprob"] >= 0.5, table["policy_weight"], 0.0))
    for text, word in (("surprised", "did you mean surprise?"), ("surprise:least=-1", "-1"), ("grpo", "surprise")):
        assert word in complaint(make_weighting, f"{tmp_path}/own.py:{text}")
    assert "gone.py" in complaint(make_weighting, f"{tmp_path}/gone.py:surprise")
    (tmp_path / "broken.py").write_text("1 / 0")
    assert "ZeroDivisionError" in complaint(make_weighting, f"{tmp_path}/broken.py:surprise")


def test_the_examples_are_their_formulas_token_by_token(repository):
    table = plant("old", lengths=(21, 32, 14))
    rows = table.to_dict("records")
    mean = sum(row["entropy"] for row in rows) / len(rows)
    top = {}
    for sign in (1, -1):
        surprisals = sorted((-row["logprob"] for row in rows if sign * row["advantage"] > 0), reverse=True)
        top[sign] = surprisals[math.ceil(0.1 * len(surprisals)) - 1]
        assert len(surprisals) % 10 and sum(s >= top[sign] for s in surprisals) == math.ceil(0.1 * len(surprisals))
    changes = []
    for row in rows:
        prob = math.exp(row["logprob"])
        spread = prob * (1 - prob) * (row["logprob"] + row["entropy"])
        changes.append(abs(row["advantage"] / math.exp(row["old_logprob"]) * spread))
    assert max(changes) > 0.02
    expected = {
        "gtpo:beta=0.5": [1 + 0.5 * (row["entropy"] / mean - 1) for row in rows],
        "rsi-s": [float(0.1 <= -row["old_logprob"] / row["entropy"] <= 3) for row in rows],
        "stare:target=9": [1.1 if row["advantage"] > 0 and -row["logprob"] >= top[1] else 1.0 for row in rows],
        "stare:target=9,factor_neg=0.9": [
            (1.1 if row["advantage"] > 0 else 0.9) if -row["logprob"] >= top[np.sign(row["advantage"])] else 1.0
            for row in rows
        ],
        "stare": [1.0 for _ in rows],  # the entropy is not below .3
        "steer": [1.2 - 0.4 * (change - min(changes)) / (max(changes) - min(changes)) for change in changes],
        "steer:linear=0,low=0.7": [math.exp(math.log(0.7) * change / max(changes)) for change in changes],
    }
    for name, factors in expected.items():
        found = make_weighting(f"{repository}/analyses/methods/entropy.py:{name}").weights(table)["all"]
        np.testing.assert_allclose(found, np.array(factors) * table["policy_weight"], err_msg=name)
        assert name == "stare" or len({*factors}) > 1


def test_a_weighting_is_called_as_the_user_called_it():
    for name, kind in WEIGHTINGS.items():
        defaults = {f.name: f.default for f in fields(kind)}
        given = spell(name, defaults) if defaults else name
        found = make_weighting(given)
        assert (str(found), str(make_weighting(name))) == (given, name)
        assert found == kind() and hash(found) == hash(kind())
    assert str(WEIGHTINGS["cispo"](eps_high=4.0)) == "cispo:eps_high=4"
    exact = WEIGHTINGS["reweight"](alpha=0.123456789)
    assert make_weighting(str(exact)) == exact
    assert spell_out("reweight:alpha=.1/0.30") == ["reweight:alpha=.1", "reweight:alpha=0.30"]
    assert [str(make_weighting(text)) for text in spell_out("icepop:high=2/3.0,low=1")] == [
        *("icepop:high=2,low=1", "icepop:high=3.0,low=1"),
    ]


def test_every_parameter_has_a_range_and_every_trainers_own_is_in_it():
    for name, kind in WEIGHTINGS.items():
        for parameter in fields(kind):
            if words := parameter.metadata.get("words"):
                said = complaint(kind, **{parameter.name: "k9"})
                assert said == f"{name}: {parameter.name} is 'k9'; give one of {', '.join(words)}"
                continue
            low, high = parameter.metadata["range"]
            for wrong in (low - 1, high + 1, math.nan):
                if not math.isinf(wrong):
                    said = complaint(kind, **{parameter.name: wrong})
                    assert said.startswith(f"{name}: {parameter.name} is ") and f"{low:g}" in said
            assert f"did you mean {parameter.name}?" in complaint(make_weighting, f"{name}:{parameter.name}x=1")
        for trainer, written in kind.TRAINERS.items():
            assert trainer in SOURCES and isinstance(make_weighting(written), kind)
        assert {*kind.OWN_LOSSES} <= {*SOURCES}
