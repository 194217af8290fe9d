"""Eq. 3 with the constants of tokens' own contexts, and the parts that a user adds to the report."""

import html
import math
import re

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import spearmanr
from support.cli import run
from support.pages import BRIEF, read_page
from support.policies import VOCAB, make_batch, make_policy, write_jsonl
from support.refusals import refused
from support.tiers import every

from analyses.parts.constants import (
    add_constants,
    check_layer_bounds,
    layer_constants,
    report_constants,
    token_contexts,
)
from gradscope import measure
from gradscope.gradients import TokenGradientMeter, measuring
from gradscope.plots import drawn_numbers
from gradscope.policy import Policy
from gradscope.rollouts import TokenBatch

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


def test_the_reports_sentences_say_what_its_tables_hold():
    policy = make_policy("qwen2", torch.float64)
    batch = make_batch(policy, lengths=(8, 8, 8, 8), prompt_lengths=(3, 3, 4, 4))
    table = measure_tokens(policy, batch, dtype="float32")
    picks = table.index[::7]
    constants = layer_constants(policy, token_contexts(batch, table.loc[picks]), temperature=1.0, max_exact=100)
    table.loc[picks, "context"] = np.arange(len(picks))
    report = report_constants(table, constants, vocab_size=VOCAB)
    assert (report.bounds["tokens"] > 0).all() and {*report.spreads["product_kind"]} == {"certified", "estimated"}
    gains = table["act_grad_norm.0"] / table["logit_grad_norm"]
    assert report.spreads.query("layer == 0")["gain_max"].tolist() == pytest.approx([gains.max()] * 2)
    text = str(report)
    assert f"σ_min(Jᵀ) is 0, for {VOCAB} logits > 32 dimensions leave a null space" in text
    assert "∏d/∏c at a context" in text and "violated by 0 of" in text
    assert max(map(len, text.splitlines())) <= 120


def test_constants_belong_to_the_shortest_measured_contexts_of_different_prompts():
    policy = make_policy("qwen2", sharpness=6.0)
    batch = make_batch(policy, lengths=(14, 9, 12, 7, 10, 6))
    table = measure(policy, batch)
    table.loc[table["response"] == 0, "param_grad_norm"] = math.nan
    tokens, constants = add_constants(policy, batch, table, 2)
    assert constants["context"].nunique() == 2 and len(constants) == 2 * (len(policy.blocks) + 1)
    chosen = tokens.dropna(subset="context")
    assert chosen["context"].tolist() == [0, 1] or chosen["context"].tolist() == [1, 0]
    assert chosen["group"].nunique() == 2 and chosen["param_grad_norm"].notna().all()
    wanted = [len(ids) for ids in token_contexts(batch, chosen.sort_values("context"))]
    known = table[table["param_grad_norm"].notna() & (table["log_one_minus_prob"] > math.log(1e-3))]
    lengths = known.assign(length=[len(ids) for ids in token_contexts(batch, known)]).groupby("group")["length"].min()
    assert wanted == sorted(lengths)[:2]
    bounds = check_layer_bounds(tokens, constants, VOCAB)
    assert (bounds[["lower_violated", "upper_violated"]] == 0).all(axis=None) and bounds["tokens"].sum() > 0
    with refused("no measured token"):
        add_constants(policy, batch, table.assign(log_one_minus_prob=-20.0), 2)


def test_a_page_has_the_sections_of_both_parts(repository, tmp_path, monkeypatch):
    draw = np.random.default_rng(0)
    rows = [
        {"prompt_ids": [5 + row // 2, 9, 12], "response_ids": draw.integers(4, 180, 5).tolist(), "reward": row % 2}
        for row in range(12)
    ]
    rollouts = write_jsonl(tmp_path / "rollouts.jsonl", [row | {"temperature": 1.0} for row in rows])
    parts = repository / "analyses" / "parts"
    own = ("--part", parts / "proxies.py:proxies", "--part", parts / "constants.py:constants")
    run("diagnose", "embedded", "--rollouts", rollouts, "--out", tmp_path / "out", *own, *BRIEF)
    page, names = read_page(tmp_path / "out"), ("proxies", "constants")
    assert [value for name, value in page.attributes if name == "id" and value in names] == [*names]
    assert "Eq. 3 on tokens × layers" in page.text and "rank correlation" in page.text
    tables = {name: pd.read_csv(tmp_path / "out" / "data" / f"{name}.csv") for name in names}
    assert tables["constants"].groupby("layer")["context"].nunique().tolist() == [3] * 5
    table = pd.read_parquet(tmp_path / "out" / "tokens.parquet")
    assert set(tables["proxies"]["tokens"]) == {len(table)}
    judged = tables["proxies"].set_index(["quantity", "proxy"]).loc[("param_grad_norm", "entropy"), "spearman"]
    assert judged == pytest.approx(spearmanr(table["param_grad_norm"], table["entropy"]).statistic)
    # What the page offers to draw it again draws what it shows.
    written = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    again = re.search(r"import pandas as pd; from analyses\.parts\.proxies .*?\nplot_proxies\(.*\)", written)
    first, last = html.unescape(again[0]).split("\n")
    space: dict[str, object] = {}
    monkeypatch.chdir(tmp_path / "out")
    exec(first, space)
    drawn = pd.read_csv("data/proxies_drawn.csv")
    pd.testing.assert_frame_equal(drawn_numbers(eval(last, space)), drawn, check_dtype=False)
