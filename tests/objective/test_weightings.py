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

from gradscope.objective import WEIGHTINGS, make_weighting

LOW, HIGH = 0.2, 0.24


def plant(case: str, seed: int = 0, lengths: tuple[int, ...] = (5, 9, 1, 12, 7, 3)) -> pd.DataFrame:
    """Tokens of six responses, as a token table has them; case: "on-policy", "old", or "other sampler"."""
    rng = np.random.default_rng(seed)
    response = np.repeat(np.arange(len(lengths)), lengths)
    old = np.log(rng.beta(0.6, 0.3, len(response)).clip(1e-4, 0.999))
    moved = 0.0 if case == "on-policy" else rng.normal(0, 0.4, len(response))
    logprob = np.minimum(old + moved, np.log(0.999))
    sampler = old + (rng.normal(0, 1.2, len(response)) if case == "other sampler" else 0.0)
    columns = {
        "response": response,
        "logprob": logprob,
        "old_logprob": np.nan if case == "on-policy" else old,
        "sampler_logprob": sampler,
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


def up_weight(log_pi, old, advantage, alpha=1.0, **_):
    return per_token(log_pi, old, (1 + alpha * (1 - old.exp())) * advantage).sum()


def top_entropy(log_pi, old, advantage, entropy, q=0.2, **_):
    return per_token(log_pi, old, advantage)[entropy >= torch.quantile(entropy, 1 - q)].sum()


def kl_cov(log_pi, old, advantage, share=2e-3, beta=1.0, **_):
    losses = -(log_pi - old).exp() * advantage
    own = log_pi.detach()
    cov = (advantage - advantage.mean()) * (own - own.mean())
    top = cov.topk(max(1, int(share * len(cov)))).indices
    return losses.sum() + beta * (log_pi - old).abs()[top].sum()


def cispo(log_pi, old, advantage, eps_high=5.0, **_):
    return -((log_pi - old).exp().clamp(max=eps_high).detach() * advantage * log_pi).sum()


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


def dppo_tv(log_pi, old, advantage, delta=0.2, cap=20.0, **_):
    moved = log_pi.detach().exp() - old.exp()
    valid = torch.where(advantage > 0, moved <= delta, moved >= -delta)
    return -(advantage * (log_pi - old).exp().clamp(max=cap).detach() * log_pi)[valid].sum()


def icepop(log_pi, old, advantage, sampler_logprob, low=0.5, high=5.0, **_):
    k = (old - sampler_logprob).exp()
    return (torch.where((k < low) | (k > high), 0.0, k) * per_token(log_pi, old, advantage)).sum()


def delightful(log_pi, old, advantage, eta=1.0, **_):
    return (torch.sigmoid(advantage * -old / eta) * per_token(log_pi, old, advantage)).sum()


PRINTED = {
    "grpo": (grpo, {}),
    "reweight": (reweight, {"alpha": 0.7}),
    "mask": (mask, {"low": 0.3, "high": 0.8}),
    "up-weight": (up_weight, {"alpha": 0.4}),
    "top-entropy": (top_entropy, {"q": 0.45}),
    "kl-cov": (kl_cov, {"share": 0.3, "beta": 0.6}),
    "cispo": (cispo, {"eps_high": 1.1}),
    "sapo": (sapo, {"tau_pos": 3.0, "tau_neg": 0.4}),
    "gspo": (gspo, {"eps_low": 0.1, "eps_high": 0.05}),
    "dppo-tv": (dppo_tv, {"delta": 0.03, "cap": 1.05}),
    "icepop": (icepop, {"low": 0.9, "high": 1.6}),
    "delightful": (delightful, {"eta": 0.3}),
}
"""Name → its loss, and other parameters than the published ones."""
DRAWN = ("lopti", "random-split", "permuted-weights", "matched-norm", "clip-cov")
"""Those that are drawn, or take two steps; they have tests of their own."""


def spell(name: str, parameters: dict[str, float]) -> str:
    return f"{name}:" + ",".join(f"{key}={value}" for key, value in parameters.items())


def test_every_weighting_is_looked_at():
    assert {*PRINTED, *DRAWN} == {*WEIGHTINGS}


@pytest.mark.parametrize("case", ["on-policy", "old", "other sampler"])
@pytest.mark.parametrize("name", PRINTED)
def test_weights_are_the_slopes_of_the_published_loss(name, case):
    loss, others = PRINTED[name]
    table = plant(case)
    for parameters in ({}, others):
        found = make_weighting(spell(name, parameters)).weights(table)
        assert list(found) == ["all"]
        np.testing.assert_allclose(found["all"], derivative(loss, table, **parameters), rtol=1e-9, atol=1e-12)


def test_published_parameters_change_something_off_policy():
    """Else the comparison above would be of losses that never reach their own edges."""
    table = plant("other sampler", lengths=(4,) * 50)
    plain = make_weighting("grpo").weights(table)["all"]
    for name, (_, others) in PRINTED.items():
        if name != "grpo":
            assert not np.allclose(make_weighting(name).weights(table)["all"], plain), name
            one, other = (make_weighting(spell(name, p)).weights(table)["all"] for p in ({}, others))
            assert not np.allclose(one, other) or not others, name


def test_on_policy_those_that_only_clip_are_grpo():
    table = plant("on-policy")
    plain = make_weighting("grpo").weights(table)["all"]
    np.testing.assert_allclose(plain, table["advantage"])
    for name in ("cispo", "sapo", "gspo", "dppo-tv", "kl-cov", "icepop"):
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
        ("grpo:alpha=1", "known: none"),
    ],
)
def test_what_is_no_weighting_is_one_line_that_names_it(text, word):
    assert word in complaint(lambda: make_weighting(text).weights(plant("old")))


@pytest.mark.parametrize(("name", "column"), [("icepop", "sampler_logprob"), ("top-entropy", "entropy")])
def test_a_column_that_the_log_lacks_is_named(name, column):
    assert column in complaint(make_weighting(name).weights, plant("old").drop(columns=column))
    assert column in complaint(make_weighting(name).weights, plant("old").assign(**{column: np.nan}))
    assert "aggregation is 'mean'" in complaint(make_weighting("grpo").weights, plant("old"), aggregation="mean")


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
    table = plant("old", lengths=(20, 30, 10))
    rows = table.to_dict("records")
    mean = sum(row["entropy"] for row in rows) / len(rows)
    surprisals = sorted((-row["old_logprob"] for row in rows if row["advantage"] > 0), reverse=True)
    least = surprisals[int(0.1 * len(surprisals)) - 1]
    changes = []
    for row in rows:
        prob = math.exp(row["logprob"])
        spread = prob * (1 - prob) * (row["logprob"] + row["entropy"])
        changes.append(abs(row["advantage"] / math.exp(row["old_logprob"]) * spread))
    assert max(changes) > 0.02
    expected = {
        "gtpo:beta=0.5": [1 + 0.5 * (row["entropy"] / mean - 1) for row in rows],
        "rsi-s": [float(0.1 <= -row["old_logprob"] / row["entropy"] <= 3) for row in rows],
        "stare": [1.1 if row["advantage"] > 0 and -row["old_logprob"] >= least else 1.0 for row in rows],
        "stare:target=0.001": [1.0 for _ in rows],
        "steer": [1.2 - 0.4 * (change - min(changes)) / (max(changes) - min(changes)) for change in changes],
        "steer:linear=0,low=0.7": [math.exp(math.log(0.7) * change / max(changes)) for change in changes],
    }
    for name, factors in expected.items():
        found = make_weighting(f"{repository}/analyses/methods/entropy.py:{name}").weights(table)["all"]
        np.testing.assert_allclose(found, np.array(factors) * table["policy_weight"], err_msg=name)
        assert name == "stare:target=0.001" or len({*factors}) > 1


def test_a_weighting_is_spelled_as_it_is_read():
    for name, kind in WEIGHTINGS.items():
        others = {f.name: f.default for f in fields(kind)}
        assert str(make_weighting(spell(name, others) if others else name)) == name
        assert make_weighting(str(make_weighting(name))) == kind()
