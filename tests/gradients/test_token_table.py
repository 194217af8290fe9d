"""The token table: what its columns hold, which tokens are measured, and that nothing else makes a difference."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from support.cli import complaint
from support.oracle import brute_force, in_float64
from support.policies import CONTEXT, LAYERS, VOCAB, make_batch, make_policy, pad_both_sides
from support.refusals import refused
from support.tiers import every

from gradscope.gradients import interval_gradients, measure
from gradscope.objective import LossSettings, logprobs, make_weighting, reweight
from gradscope.objective.equations import grpo_advantages, policy_loss
from gradscope.policy import Policy
from gradscope.rollouts import Response, TokenBatch, collate
from gradscope.updates import apply_update, compare, influence

refusal = partial(complaint, measure)

LAYER_COLUMNS = [f"act_grad_norm.{layer}" for layer in range(LAYERS + 1)]
NORMS = [*LAYER_COLUMNS, "param_grad_norm"]
WEIGHTS = ["policy_weight", "kl_weight", "weight"]
COLUMNS = [
    *("response", "group", "position", "token_id", "token", "logprob", "prob", "log_one_minus_prob", "entropy"),
    *("old_logprob", "ref_logprob", "advantage", *WEIGHTS, "clipped", "interval", "logit_grad_norm", *NORMS),
]
ROUNDING = {"rtol": 1e-4, "atol": 1e-6}
"""float32 against float64, and float32 sums in another order."""


@pytest.fixture(scope="module")
def policy() -> Policy:
    return make_policy("qwen2", sharpness=5.0)


@pytest.fixture(scope="module")
def batch(policy) -> TokenBatch:
    return make_batch(policy)


@pytest.fixture(scope="module")
def table(policy, batch) -> pd.DataFrame:
    return measure(policy, batch)


def assert_close(ours: pd.DataFrame, theirs: pd.DataFrame, **tolerance) -> None:
    pd.testing.assert_frame_equal(ours, theirs, check_exact=False, **(tolerance or ROUNDING))


def kept_tokens(batch: TokenBatch) -> list[tuple[int, int]]:
    """(row, column) of every response token that the mask keeps, in the table's order."""
    rows, width = batch.input_ids.shape
    return [(row, column) for row in range(rows) for column in range(width) if batch.response_mask[row, column]]


def test_the_table_has_the_columns_and_dtypes_of_the_contract(table):
    assert list(table.columns) == COLUMNS
    whole = {"response", "group", "position", "token_id", "interval"}
    for name in COLUMNS:
        if name in whole:
            assert pd.api.types.is_integer_dtype(table[name]), name
        elif name == "token":
            assert pd.api.types.is_string_dtype(table[name])
        else:
            assert table[name].dtype == ("bool" if name == "clipped" else "float32"), name


@pytest.mark.parametrize("side", ["left", "right"])
def test_there_is_a_row_per_kept_token_in_order_with_its_ids_and_position(policy, side):
    policy = replace(policy, tokenizer=make_policy("qwen2", tokenizer=True).tokenizer)
    batch = make_batch(policy, side=side)
    table = measure(policy, batch, self_check=False)
    assert not batch.response_mask.all() and len(table) == batch.num_tokens
    for (row, column), line in zip(kept_tokens(batch), table.itertuples(), strict=True):
        token_id = int(batch.input_ids[row, column])
        assert (line.response, line.group, line.token_id) == (row, int(batch.group_ids[row]), token_id)
        assert line.position == column - int(batch.response_start[row])
        assert line.token == policy.tokenizer.decode([token_id]) == f"w{token_id}"


@pytest.mark.parametrize(
    ("name", "at_once"),
    every(3, [("qwen2", 2**18), ("qwen2", 3 * VOCAB), ("gpt2", VOCAB), ("mixtral", 2**18), ("opt", 2**18)]),
)
def test_statistics_and_norms_equal_brute_force_in_float64(name, at_once, monkeypatch):
    monkeypatch.setattr(logprobs, "CACHED", at_once)  # of some tokens at a time
    policy = make_policy(name, sharpness=5.0)
    batch = make_batch(policy, lengths=(6, 1, 5, 4), prompt_lengths=(5, 5, 3, 3))
    batch = replace(batch, temperature=torch.tensor([1.0, 0.7, 0.7, 1.3]))
    double, rows = in_float64(policy), []
    for row in range(len(batch)):
        temperature = float(batch.temperature[row])
        ids, targets = batch.sequence(row)
        with torch.no_grad():
            each = (double.model(input_ids=ids[None]).logits[0, targets - 1] / temperature).log_softmax(-1)
        truth = brute_force(double, ids, targets, temperature=temperature)
        for k, token_id in enumerate(ids[targets].tolist()):
            probs = each[k].exp()
            others = probs[torch.arange(VOCAB) != token_id].sum()
            entropy = -sum(p * q for p, q in zip(probs.tolist(), each[k].tolist(), strict=True))
            seed = -probs + torch.nn.functional.one_hot(torch.tensor(token_id), VOCAB)
            values = [each[k, token_id], probs[token_id], others.log(), entropy, seed.norm()]
            rows.append([float(v) for v in (*values, *truth.layers[k], truth.parameters[k])])
    columns = ["logprob", "prob", "log_one_minus_prob", "entropy", "logit_grad_norm", *NORMS]
    assert_close(measure(policy, batch)[columns].astype("float64"), pd.DataFrame(rows, columns=columns))


@pytest.mark.parametrize(
    "loss", [LossSettings(), LossSettings(0.01, 0.01, 1.05, 0.1, 0.3)], ids=["paper", "all active"]
)
def test_weights_are_the_losss_derivatives_by_autograd(policy, batch, loss):
    table = measure(policy, batch, loss=loss, self_check=False)
    logprobs = torch.zeros(batch.input_ids.shape, dtype=torch.float64)
    for (row, column), value in zip(kept_tokens(batch), table["logprob"], strict=True):
        logprobs[row, column] = value
    logprobs.requires_grad_(True)
    advantages = grpo_advantages(batch.rewards.double(), batch.group_ids)[:, None].expand(logprobs.shape)
    if loss.reweight_alpha is not None:
        advantages = reweight(advantages, batch.old_logprobs.double(), alpha=loss.reweight_alpha)
    arguments = {
        "old_logprobs": batch.old_logprobs.double(),
        "advantages": advantages,
        "response_mask": batch.response_mask,
        "clip_ratio_low": loss.clip_ratio_low,
        "clip_ratio_high": loss.clip_ratio_high,
        "clip_ratio_c": loss.clip_ratio_c,
        "num_tokens": batch.num_tokens,
    }
    for column, kl in (
        ("policy_weight", {}),
        ("weight", {"ref_logprobs": batch.ref_logprobs.double(), "kl_coef": loss.kl_coef}),
    ):
        (slope,) = torch.autograd.grad(policy_loss(logprobs, **arguments, **kl), logprobs)
        expected = -batch.num_tokens * slope[batch.response_mask]
        np.testing.assert_allclose(table[column], expected.numpy(), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(table["policy_weight"] + table["kl_weight"], table["weight"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(table["advantage"], advantages_of(batch), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(table["old_logprob"], batch.old_logprobs[batch.response_mask], rtol=0)
    np.testing.assert_allclose(table["ref_logprob"], batch.ref_logprobs[batch.response_mask], rtol=0)
    clipped_away = (table["policy_weight"] == 0) & (table["advantage"] != 0)
    assert (table["clipped"] == clipped_away).all() and (loss == LossSettings() or clipped_away.any())


def advantages_of(batch: TokenBatch) -> list[float]:
    """GRPO's, group by group, in plain Python."""
    out = []
    for row, _ in kept_tokens(batch):
        rewards = batch.rewards[batch.group_ids == batch.group_ids[row]].double()
        out.append(float((batch.rewards[row] - rewards.mean()) / (rewards.std() + 1e-6)))
    return out


def test_without_advantages_and_rewards_weights_are_nan_and_all_else_is_the_same(policy, batch, table):
    bare = measure(policy, replace(batch, rewards=None))
    unknown = ["advantage", *WEIGHTS]
    assert bare[unknown].isna().all(axis=None) and not bare["clipped"].any()
    rest = [name for name in COLUMNS if name not in (*unknown, "clipped")]
    pd.testing.assert_frame_equal(bare[rest], table[rest])


def test_unknown_log_probabilities_of_other_policies_are_nan_and_mean_on_policy(policy, batch):
    table = measure(policy, replace(batch, old_logprobs=None, ref_logprobs=None), self_check=False)
    assert table[["old_logprob", "ref_logprob"]].isna().all(axis=None)
    np.testing.assert_allclose(table["weight"], table["advantage"], rtol=1e-6)
    assert (table["kl_weight"] == 0).all() and not table["clipped"].any()


@pytest.mark.filterwarnings("ignore::gradscope.gradients.ContradictionWarning")  # planted, far off
def test_the_samplers_own_log_probabilities_are_a_column_where_the_log_has_them(policy, batch):
    assert "sampler_logprob" not in measure(policy, batch, self_check=False)
    noise = torch.randn(batch.input_ids.shape, generator=torch.Generator().manual_seed(3))
    both = replace(batch, sampler_logprobs=(batch.old_logprobs - noise.abs() / 2).nan_to_num(-1.0))
    table = measure(policy, both, self_check=False)
    ratio = (both.old_logprobs - both.sampler_logprobs)[batch.response_mask].exp().numpy()
    expected = np.where(ratio <= 1.5, ratio, 0.0) * table["policy_weight"]
    found = make_weighting("icepop:low=0,high=1.5").weights(table)["all"]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert 0 < (found == 0).sum() < len(found)


def test_an_advantage_beats_a_reward_and_is_known_token_by_token(policy, batch, table):
    advantages = torch.full(batch.input_ids.shape, 2.0)
    row, column = kept_tokens(batch)[3]
    advantages[row, column] = float("nan")
    given = measure(policy, replace(batch, advantages=advantages), self_check=False)
    unknown = np.arange(len(given)) == 3
    assert (given["advantage"][~unknown] == 2).all() and not np.allclose(table["advantage"], 2)
    assert (given[["advantage", *WEIGHTS]].isna().to_numpy() == unknown[:, None]).all()
    assert given[NORMS].notna().all(axis=None)


@pytest.mark.filterwarnings("ignore::gradscope.gradients.ContradictionWarning")  # planted, far off
def test_the_given_temperature_beats_the_responses_own(policy, batch):
    own = replace(batch, temperature=torch.tensor([0.5, 0.7, 1.0, 1.0, 1.3, 2.0]))
    table = measure(policy, own, self_check=False)
    for row, temperature in ((0, 0.5), (5, 2.0)):
        alone = measure(policy, batch, temperature=temperature, self_check=False)
        statistics = ["logprob", "entropy", "logit_grad_norm", *NORMS]
        assert_close(table[statistics][table["response"] == row], alone[statistics][alone["response"] == row])
        pd.testing.assert_frame_equal(alone, measure(policy, own, temperature=temperature, self_check=False))


def test_tokens_names_those_that_are_measured(policy, batch, table):
    chosen = torch.tensor([0, 5, 6, len(table) - 1])
    part = measure(policy, batch, tokens=chosen)
    assert_close(part.loc[chosen, NORMS], table.loc[chosen, NORMS])
    assert part.drop(index=chosen)[NORMS].isna().all(axis=None)
    rest = [name for name in COLUMNS if name not in NORMS]
    pd.testing.assert_frame_equal(part[rest], table[rest])


def test_a_subset_has_so_many_of_each_interval_or_all_and_the_full_tables_numbers(policy, batch, table):
    part = measure(policy, batch, tokens_per_interval=3, self_check=False)
    measured = part["param_grad_norm"].notna()
    for interval, count in table["interval"].value_counts().items():
        assert measured[part["interval"] == interval].sum() == min(3, count)
    assert (part[NORMS].notna().to_numpy() == measured.to_numpy()[:, None]).all()
    assert_close(part.loc[measured, NORMS], table.loc[measured, NORMS])
    rest = [name for name in COLUMNS if name not in NORMS]
    pd.testing.assert_frame_equal(part[rest], table[rest])
    again = measure(policy, batch, tokens_per_interval=3)  # the self-check draws after the subset
    pd.testing.assert_frame_equal(again, part)
    other = measure(policy, batch, tokens_per_interval=3, seed=1, self_check=False)
    assert (other["param_grad_norm"].notna() != measured).any()
    every = measure(policy, batch, tokens_per_interval=10**6, self_check=False)
    pd.testing.assert_frame_equal(every, table)


@pytest.mark.parametrize("name", ["qwen2", "gpt2", "qwen3_moe"])
def test_the_modules_squares_add_up_to_the_whole(name):
    policy = make_policy(name)
    table = measure(policy, make_batch(policy), per_module=True, self_check=False, tokens_per_interval=4)
    modules = [column for column in table.columns if column.startswith("param_grad_norm.")]
    owners = {n.rpartition(".")[0] for n, _ in policy.model.named_parameters()}
    assert modules == [f"param_grad_norm.{name}" for name in sorted(owners)]
    squares = (table[modules].astype("float64") ** 2).sum(axis=1, skipna=False)
    np.testing.assert_allclose(squares**0.5, table["param_grad_norm"], rtol=1e-5)


def test_padding_on_any_side_changes_nothing(policy, batch, table):
    for padded in (make_batch(policy, side="left"), pad_both_sides(batch, 3, 2)):
        assert (padded.input_ids.shape != batch.input_ids.shape) or not padded.response_mask.equal(batch.response_mask)
        pd.testing.assert_frame_equal(measure(policy, padded), table)


def test_a_response_that_keeps_nothing_has_no_row_and_disturbs_nobody(policy, batch, table):
    mask = batch.response_mask.clone()
    mask[2] = False
    part = measure(policy, replace(batch, response_mask=mask))
    assert set(part["response"]) == {0, 1, 3, 4, 5}
    same = ["logprob", "token_id", *NORMS]
    assert_close(part[same], table[table["response"] != 2][same].reset_index(drop=True))


@pytest.mark.parametrize("name", every(2, ["qwen2", "mixtral"]))
def test_a_policy_in_bfloat16_gives_a_float32_table_near_the_exact_one(name):
    exact, policy = make_policy(name, sharpness=5.0), make_policy(name, torch.bfloat16, sharpness=5.0)
    batch = make_batch(exact)
    ours, truth = measure(policy, batch), measure(exact, batch, self_check=False)
    assert {str(ours[name].dtype) for name in NORMS} == {"float32"}
    off = (ours["param_grad_norm"] / truth["param_grad_norm"] - 1).abs()
    assert 0 < off.median() < 0.1  # eight bits of mantissa; on single tokens more, where the router changes its mind


def certain_policy(token_id: int, bias: float) -> Policy:
    """A policy whose head's bias decides about one token."""
    policy = make_policy("phi")
    with torch.no_grad():
        policy.model.lm_head.bias[token_id] = bias
    return policy


def test_a_token_of_probability_one_has_zero_norms_and_finite_numbers():
    policy = certain_policy(7, 1e4)
    table = measure(policy, collate([Response([5, 6], [7, 7, 9], reward=1.0), Response([5, 6], [7], reward=0.0)]))
    sure = table[table["token_id"] == 7]
    assert (sure["prob"] == 1).all() and (sure["logprob"] == 0).all() and (sure["interval"] == 3).all()
    assert (sure["log_one_minus_prob"] < -9e3).all() and (sure["entropy"] == 0).all()
    assert (sure[["logit_grad_norm", *NORMS]] == 0).all(axis=None)
    assert not np.signbit(sure[["logit_grad_norm", *NORMS]].to_numpy(float)).any()  # nor −0
    other = table[table["token_id"] == 9].iloc[0]
    assert other["prob"] == 0 and other["interval"] == 0 and np.isfinite(other[["logprob", *NORMS]].astype(float)).all()
    assert table["weight"].notna().all()


def test_a_token_of_probability_exactly_zero_is_refused_by_place():
    policy = certain_policy(9, float("-inf"))
    with refused("response 1", "position 1"):
        measure(policy, collate([Response([5, 6], [8]), Response([5, 6], [8, 9])]))


def test_logits_that_are_nan_are_refused_by_response(policy, batch):
    broken = make_policy("llama")
    with torch.no_grad():
        broken.model.lm_head.weight[5] = float("nan")
    with refused("response 0"):
        measure(broken, batch)


# What cannot be measured is refused with a line that helps.


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"temperature": 0}, "temperature is 0"),
        ({"temperature": -1.0}, "temperature is -1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"tokens_per_interval": 0}, "tokens_per_interval is 0"),
        ({"tokens_per_interval": -2}, "tokens_per_interval is -2"),
        ({"seed": -1}, "seed is -1"),
        ({"advantage_eps": -1.0}, "advantage_eps is -1"),
        ({"loss": LossSettings(kl_coef=float("nan"))}, "kl_coef is nan"),
        ({"loss": LossSettings(clip_ratio_low=-0.1)}, "clip_ratio_low is -0.1"),
        ({"loss": LossSettings(reweight_alpha=1.5)}, "reweight_alpha is 1.5"),
        ({"tokens": torch.tensor([0, 99])}, "tokens holds indices from 0 to 99"),
        ({"tokens": torch.tensor([-1])}, "tokens holds indices from -1"),
        ({"edges": (0.0, 0.5)}, "outside"),
    ],
)
def test_settings_that_make_no_sense_are_refused(policy, batch, settings, words):
    assert words in refusal(policy, batch, **settings)


def test_a_batch_that_does_not_fit_the_policy_is_refused_by_its_response(policy):
    fine = Response([5, 6], [7])
    assert "response 1 or its prompt holds the id 96" in refusal(policy, collate([fine, Response([5], [VOCAB])]))
    assert "response 1 or its prompt holds the id -1" in refusal(policy, collate([fine, Response([-1], [5])]))
    long = collate([fine, Response([5] * CONTEXT, [7])])
    assert "response 1 and its prompt are 65 tokens long" in refusal(policy, long)
    cold = replace(collate([fine, fine]), temperature=torch.tensor([1.0, 1e-30]))
    assert "the temperature of response 1 is 1e-30" in refusal(policy, cold)
    dear = replace(collate([fine, fine]), rewards=torch.tensor([1.0, math.inf]))
    assert "the reward of response 1 is inf" in refusal(policy, dear)
    nothing = collate([Response([5], [7], response_mask=[False])])
    assert "keeps no token" in refusal(policy, nothing)


@pytest.mark.parametrize("name", every(2, ["old_logprobs", "ref_logprobs", "sampler_logprobs", "advantages"]))
@pytest.mark.parametrize("value", every(3, [math.inf, -math.inf, 0.5, 1e13]))
def test_what_readers_refuse_is_refused_where_it_counts_at_every_door(policy, batch, name, value):
    if (name, value) == ("advantages", 0.5):
        return
    known = {"sampler_logprobs": batch.old_logprobs, "advantages": batch.spread_over_tokens(batch.rewards)}
    batch = replace(batch, **known)
    row, column = batch.response_mask.nonzero()[3].tolist()
    wrong = getattr(batch, name).clone()
    wrong[row, column] = value
    place = f"{name} is {value:g} at position {int(batch.positions()[row, column])} of response {row}"
    assert place in refusal(policy, replace(batch, **{name: wrong}))
    for door in (interval_gradients, influence, apply_update, compare):
        assert place in complaint(door, policy, replace(batch, **{name: wrong}))
    masked = batch.response_mask.clone()
    masked[row, column] = False
    assert len(measure(policy, replace(batch, **{name: wrong}, response_mask=masked))) == batch.num_tokens - 1
