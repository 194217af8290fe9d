"""Proxies of a token's norm, against scipy and loops over redrawn prompts."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy.stats import spearmanr
from support.refusals import refused

from analyses.parts.proxies import PROXIES, judge_proxies, plot_proxies
from gradscope.plots import drawn_numbers
from gradscope.resampling import draw_clusters


def plant(seed: int = 0, tokens: int = 400, prompts: int = 8) -> pd.DataFrame:
    """Norms that follow ‖e − π‖ up to noise; entropy is only loosely the same."""
    rng = np.random.default_rng(seed)
    prob = rng.beta(0.6, 0.3, tokens).clip(1e-6, 1 - 1e-6)
    logits = (1 - prob) * rng.uniform(1, 1.4, tokens)
    return pd.DataFrame(
        {
            "group": rng.integers(prompts, size=tokens),
            "logprob": np.log(prob),
            "log_one_minus_prob": np.log1p(-prob),
            "entropy": (1 - prob) * rng.gamma(1.0, 1.0, tokens),
            "logit_grad_norm": logits,
            "act_grad_norm.0": logits * rng.lognormal(0, 0.8, tokens),
            "act_grad_norm.1": logits * rng.lognormal(0, 0.3, tokens),
            "param_grad_norm": logits * rng.lognormal(0, 0.5, tokens),
        }
    )


def row_of(found: pd.DataFrame, quantity: str, proxy: str) -> pd.Series:
    return found[(found["quantity"] == quantity) & (found["proxy"] == proxy)].iloc[0]


def share_found(norm: np.ndarray, proxy: np.ndarray, top: float) -> float:
    count = int(top * len(norm))
    best = set(np.argsort(-norm, kind="stable")[:count])
    return len(best & set(np.argsort(-proxy, kind="stable")[:count])) / count


@pytest.mark.parametrize("quantity", ["act_grad_norm.0", "act_grad_norm.1", "param_grad_norm"])
def test_numbers_are_scipys_and_numpys(quantity):
    table = plant()
    found = judge_proxies(table, top=0.05, floor=0.02, seed=None)
    above = (np.exp(table["log_one_minus_prob"]) > 0.02).to_numpy()
    assert 0 < above.sum() < len(table)
    norm = table[quantity].to_numpy()
    prob = np.exp(table["logprob"])
    bound = np.sqrt(1 - 2 * prob + np.maximum(np.exp(-table["entropy"]), prob**2))
    for proxy, values in (
        ("1 − π", np.exp(table["log_one_minus_prob"])),
        ("‖e − π‖", table["logit_grad_norm"]),
        ("entropy", table["entropy"]),
        ("−log π", -table["logprob"]),
        ("bound by π and entropy", bound),
    ):
        row = row_of(found, quantity, proxy)
        assert row["spearman"] == pytest.approx(spearmanr(norm[above], values[above]).statistic)
        assert row["r2"] == pytest.approx(np.corrcoef(np.log(norm[above]), np.log(values[above]))[0, 1] ** 2)
        assert row["found"] == share_found(norm, values.to_numpy(), 0.05) and row["tokens"] == 400
        assert np.isnan(row[["spearman_lower", "r2_upper", "found_lower"]].to_numpy(float)).all()
    last = found[found["proxy"].str.startswith("last")]
    assert set(last["quantity"]) == {"act_grad_norm.0", "param_grad_norm"}


def test_pi_and_entropy_bound_the_logit_norm_from_below():
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(400):
        probs = rng.dirichlet(np.full(12, rng.uniform(0.05, 2)))
        token = rng.choice(12, p=probs)
        rows.append((probs[token], -(probs * np.log(np.maximum(probs, 1e-300))).sum(), np.eye(12)[token] - probs))
    prob, entropy, gradients = (np.array(values) for values in zip(*rows, strict=True))
    table = plant(tokens=400).assign(logprob=np.log(prob), log_one_minus_prob=np.log1p(-prob), entropy=entropy)
    norms = np.linalg.norm(gradients, axis=1)
    bound = PROXIES["bound by π and entropy"](table).to_numpy()
    assert (bound <= norms * (1 + 1e-12)).all() and np.corrcoef(bound, norms)[0, 1] > 0.8


def test_a_column_of_ones_own_is_a_proxy_too():
    table = plant().assign(own=lambda t: t["param_grad_norm"] ** 2)
    row = row_of(judge_proxies(table, more={"mine": "own"}, top=0.05, seed=None), "param_grad_norm", "mine")
    assert (row["spearman"], row["r2"], row["found"]) == pytest.approx((1, 1, 1))
    few = judge_proxies(table, seed=None)  # four tokens are the top 1 %: a share of them says nothing
    assert few["found"].isna().all() and few["spearman"].notna().all()
    with refused("gone"):
        judge_proxies(table, more={"mine": "gone"}, seed=None)


@pytest.mark.usefixtures("few_prompts_are_many")
def test_bounds_redraw_prompts():
    table = plant(prompts=5)
    found = row_of(
        judge_proxies(table, floor=1e-9, seed=np.random.default_rng(3), resamples=40), "param_grad_norm", "entropy"
    )
    clusters = np.unique(table["group"], return_inverse=True)[1]
    x, y = np.log(table["param_grad_norm"]), np.log(table["entropy"])
    draws = []
    for counts in draw_clusters(5, 40, np.random.default_rng(int(np.random.default_rng(3).integers(2**32)))):
        draws.append(np.corrcoef(np.repeat(x, counts[clusters]), np.repeat(y, counts[clusters]))[0, 1] ** 2)
    assert found[["r2_lower", "r2_upper"]].tolist() == pytest.approx(np.quantile(draws, [0.025, 0.975]).tolist())


def test_a_sampled_token_counts_for_one_over_its_chance():
    table = plant()
    twice = pd.concat([table, table[:100]], ignore_index=True)
    weighted = table.assign(sampling_probability=np.where(np.arange(400) < 100, 0.5, 1.0))
    for name in ("spearman", "r2"):
        one, other = (
            row_of(judge_proxies(t, seed=None), "param_grad_norm", "entropy")[name] for t in (twice, weighted)
        )
        assert one == pytest.approx(other)


def test_unmeasured_tokens_and_impossible_questions():
    table = plant()
    half = table.copy()
    half.loc[200:, ["act_grad_norm.0", "act_grad_norm.1", "param_grad_norm"]] = np.nan
    found = row_of(judge_proxies(half, seed=None), "param_grad_norm", "1 − π")
    assert found["spearman"] == row_of(judge_proxies(table[:200], seed=None), "param_grad_norm", "1 − π")["spearman"]
    for change in ({"top": 1.5}, {"table": table[:5]}):
        with refused():
            judge_proxies(change.pop("table", table), seed=None, **change)
    with refused("log_one_minus_prob"):
        judge_proxies(table.drop(columns="log_one_minus_prob"), seed=None)


def test_the_picture_holds_the_numbers():
    table = plant()
    proxies = judge_proxies(table.assign(param_grad_norm_adamw=table["param_grad_norm"] * 2), seed=None)
    drawn = drawn_numbers(plot_proxies(proxies))
    assert set(drawn["quantity"]) == {"param_grad_norm", "param_grad_norm_adamw"} and len(drawn) == 3 * 2 * 6
