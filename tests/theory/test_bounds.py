"""Proposition 4.2 on token tables: counted by hand where bounds are broken on purpose, and on a real policy's."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from support.policies import VOCAB, make_batch, make_policy
from support.refusals import refused
from support.tables import rng
from support.tiers import every

from gradscope.gradients import TokenGradientMeter, measuring
from gradscope.policy import Policy
from gradscope.rollouts import TokenBatch
from gradscope.theory import layer_constants, theory_report, token_contexts
from gradscope.theory.bounds import check_layer_bounds, check_logit_bounds

pytestmark = pytest.mark.usefixtures("undrawn")


def measure_tokens(policy: Policy, batch: TokenBatch, *, dtype: str) -> pd.DataFrame:
    """The columns of a token table that the theory needs, for every kept token, plus `group`."""
    parts = []
    with measuring(policy.model):
        meter = TokenGradientMeter(policy, batch.sequence(0)[0])
        for row in range(len(batch)):
            ids, targets = batch.sequence(row)
            found = meter.measure(ids, targets, torch.arange(len(targets)), temperature=batch.temperature[row].item())
            columns = {
                "logit_grad_norm": found.logit_grad_norm,
                "param_grad_norm": found.param_grad_norm,
                "log_one_minus_prob": found.statistics.log_one_minus_prob,
            }
            columns |= {f"act_grad_norm.{layer}": norms for layer, norms in enumerate(found.act_grad_norm.T)}
            part = pd.DataFrame({name: values.numpy() for name, values in columns.items()}).astype(dtype)
            positions = batch.positions()[row][batch.response_mask[row]].numpy()
            parts.append(part.assign(response=row, position=positions, group=int(batch.group_ids[row])))
    return pd.concat(parts, ignore_index=True)


def make_constants(c: float, d: float) -> pd.DataFrame:
    """Constants of context 0, two layers of which the upper is the head."""
    lower = {"context": 0, "layer": 0, "module": "block 1", "product_kind": "certified"}
    return pd.DataFrame(
        [
            lower | {"product_c": c, "product_d": d, "reach_min": 1.0, "reach_max": 3.0},
            lower
            | {"layer": 1, "module": "head", "product_c": 1.0, "product_d": 2.0, "reach_min": 1.0, "reach_max": 2.0},
        ]
    ).assign(outputs=8, inputs=4, c=1.0, d=2.0, sigma_min=0.0)


def make_tokens(norms: list[float], *, rest: float = 0.5) -> pd.DataFrame:
    """Tokens that follow context 0, with these norms at layer 0 and norm 1 · (1−π) at layer 1."""
    table = pd.DataFrame({"act_grad_norm.0": norms, "act_grad_norm.1": 1.2 * rest})
    return table.assign(log_one_minus_prob=math.log(rest), context=0)


def test_the_logit_bounds_line_says_how_many_hold():
    table = pd.DataFrame({"logit_grad_norm": [0.6, 0.69, 0.9], "log_one_minus_prob": math.log(0.5)})
    bounds = check_logit_bounds(table, vocab_size=8)
    assert (bounds.held, bounds.violations, bounds.num_tokens) == (False, 1, 3)
    assert str(bounds).startswith("logit bounds hold to rounding for 2 of 3 tokens, with 1−π uncancelled")
    assert check_logit_bounds(table.head(2), vocab_size=8).held


@pytest.mark.parametrize("c", [0.0, 1e-20, math.nan])
def test_a_vacuous_bound_is_said_to_be_so_and_is_never_violated(c):
    checked = check_layer_bounds(make_tokens([0.0, 1.0, 9.0]), make_constants(c, math.nan), VOCAB).iloc[0]
    assert (checked["lower_vacuous"], checked["lower_violated"]) == (3, 0)
    assert (checked["upper_vacuous"], checked["upper_violated"]) == (3, 0)
    assert math.isnan(checked["lower_slack"])


def test_only_tokens_of_a_known_context_with_a_norm_are_compared():
    tokens = make_tokens([1.0, 1.0, 1.0, math.nan])
    tokens["context"] = [0, math.nan, 5, 0]
    assert check_layer_bounds(tokens, make_constants(1.0, 3.0), 2).set_index("layer").loc[0, "tokens"] == 1
    with refused():
        check_layer_bounds(tokens.assign(context=5), make_constants(1.0, 3.0), 2)
    with refused("context"):
        check_layer_bounds(tokens.drop(columns="context"), make_constants(1.0, 3.0), 2)


@pytest.mark.parametrize("name", every(2, ["qwen2", "gpt2", "gemma2", "mixtral"]))
def test_eq_3_holds_with_certified_constants_for_every_token_of_a_real_table(name):
    policy = make_policy(name, torch.float64)
    batch = make_batch(policy, temperature=0.7, lengths=(4, 3, 4, 1), prompt_lengths=(3, 3, 4, 4))
    table = measure_tokens(policy, batch, dtype="float64")
    constants = layer_constants(policy, token_contexts(batch, table), temperature=0.7)
    checked = check_layer_bounds(table.assign(context=range(len(table))), constants, VOCAB)
    assert (checked["product_kind"] == "certified").all()
    assert (checked["tokens"] == len(table)).all() and len(checked) == 4
    assert (checked["lower_violated"] == 0).all() and (checked["upper_violated"] == 0).all()
    assert (checked["upper_vacuous"] == 0).all()
    assert checked["lower_vacuous"].iloc[-1] == 0  # the head's constant always means something
    assert (checked[["lower_slack", "upper_slack"]].dropna() >= 1).all(axis=None)


def test_the_report_states_the_three_caveats_as_measured():
    policy = make_policy("qwen2", torch.float64)
    batch = make_batch(policy, lengths=(8, 8, 8, 8), prompt_lengths=(3, 3, 4, 4))
    table = measure_tokens(policy, batch, dtype="float32")
    picks = table.index[::7]
    constants = layer_constants(policy, token_contexts(batch, table.loc[picks]), temperature=1.0, max_exact=100)
    table.loc[picks, "context"] = np.arange(len(picks))
    report = theory_report(table, constants, vocab_size=VOCAB, seed=rng())
    text = str(report)
    assert report.logit_bounds.held and f"{len(table)} of {len(table)} tokens" in text
    assert "theory 1, √ law ½ (2 prompts)" in text and "shows nothing" in text
    assert f"σ_min(Jᵀ) is 0, for {VOCAB} logits > 32 dimensions leave a null space" in text
    assert "∏d/∏c at a context" in text and "estimated" in text and "violated by 0 of" in text
    assert max(map(len, text.splitlines())) <= 120
    html = report._repr_html_()
    assert html.count("<table") == 7 and "<h4>layer bounds</h4>" in html
