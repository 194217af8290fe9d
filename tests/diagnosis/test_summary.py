"""What is printed after a measurement: the numbers are those of a double loop, and what is unknown is left out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from support.policies import make_batch, make_policy

from gradscope.diagnosis import Summary, interval_summary, summarize_measurement, write_figures
from gradscope.gradients import MeasureSettings, Resources, interval_gradients, measure
from gradscope.policy import Policy
from gradscope.resampling import TOO_FEW, Supply
from gradscope.rollouts import TokenBatch

pytestmark = pytest.mark.usefixtures("undrawn")

LENGTHS = {"lengths": (14, 9, 12, 7, 10, 6)}
ENOUGH = {"supply": Supply(6, 6)}
"""As if there were prompts enough for a verdict."""


@pytest.fixture(scope="module")
def policy() -> Policy:
    return make_policy("qwen2", sharpness=6.0)


@pytest.fixture(scope="module")
def batch(policy) -> TokenBatch:
    return make_batch(policy, **LENGTHS)


@pytest.fixture(scope="module")
def table(policy, batch) -> pd.DataFrame:
    return measure(policy, batch)


@pytest.fixture(scope="module")
def summary(policy, batch, table) -> Summary:
    return summarize_measurement(policy, batch, table, MeasureSettings())


def test_counts_shares_and_mean_norms_are_those_of_a_loop(summary, table):
    squares = {a: 0.0 for a in range(4)}
    norms: dict[int, list[float]] = {a: [] for a in range(4)}
    for line in table.itertuples():
        squares[line.interval] += float(line.weight * line.param_grad_norm) ** 2
        norms[line.interval].append(float(line.param_grad_norm))
    for a, row in summary.intervals.iterrows():
        assert row["tokens"] == row["measured"] == len(norms[a]) > 0
        assert row["token_share"] == pytest.approx(len(norms[a]) / len(table))
        assert row["mean_norm"] == pytest.approx(sum(norms[a]) / len(norms[a]), rel=1e-6)
        assert row["squared_share"] == pytest.approx(squares[a] / sum(squares.values()), rel=1e-6)
        assert not row["norm_lower"] > row["mean_norm"] and not row["norm_upper"] < row["mean_norm"]


def test_shares_of_the_gradient_are_those_of_the_networks_own_sums(summary):
    sums = summary.gradients.table
    np.testing.assert_allclose(summary.intervals["gradient_share"], sums["share"][:4])
    np.testing.assert_allclose(summary.intervals["gradient_norm"], sums["norm"][:4] / sums["norm"][4])
    assert summary.intervals["gradient_share"].sum() == pytest.approx(1, rel=1e-5)


def test_sums_of_some_prompts_are_said_to_be_of_so_many(policy, batch, table, summary):
    whole = batch.group_ids.unique().tolist()
    late = summarize_measurement(policy, batch, table, MeasureSettings(), resources=Resources(deadline=0.0))
    looked = summarize_measurement(policy, batch, table[table["group"] != whole[0]], MeasureSettings())
    for found, count in ((late, 1), (looked, len(whole) - 1)):
        assert (found.gradients.num_prompts, found.of_prompts) == (count, len(whole))
        assert f"{count} of this batch's {len(whole)} prompts" in replace(found, **ENOUGH).sentences()
    assert "prompts, drawn" not in replace(summary, **ENOUGH).sentences()
    # By a deadline that is over there is one of them, with the numbers that it has alone.
    own = late.gradients.table[["num_tokens", "norm", "share"]]
    intervals = torch.zeros(batch.input_ids.shape, dtype=torch.long)
    intervals[batch.response_mask] = torch.tensor(table["interval"].tolist())
    some = [batch.of_prompts([prompt]) for prompt in whole]
    alone = [interval_gradients(policy, one, intervals=intervals).table[[*own]] for one in some]
    assert sum(np.allclose(own, one, rtol=1e-4, equal_nan=True) for one in alone) == 1


def test_an_interval_of_which_a_subset_was_measured_counts_by_all_of_its_tokens(policy, batch, table):
    part = table.copy()
    part.loc[(part["interval"] == 0) & (np.arange(len(part)) % 2 == 0), "param_grad_norm"] = np.nan
    intervals = interval_summary(part, None, seed=np.random.default_rng(0))
    full = interval_summary(table, None, seed=np.random.default_rng(0))
    assert intervals["measured"][0] < intervals["tokens"][0] == full["tokens"][0]
    assert "squared_share" not in intervals
    pd.testing.assert_frame_equal(intervals.iloc[1:], full.iloc[1:])


def test_the_sentences_say_what_the_columns_hold(summary, table):
    few, summary = summary.sentences(), replace(summary, **ENOUGH)
    low, high = summary.intervals.iloc[0], summary.intervals.iloc[-1]
    text = summary.sentences()
    assert few.startswith(f"{TOO_FEW}: 3 prompts") and "%" not in few and "times" not in few
    assert f"{low['mean_norm'] / high['mean_norm']:.1f} times the gradient norm" in text
    for _, row in summary.intervals.iterrows():
        share = f"{row['gradient_share']:.0%} by {row['token_share']:.1%} of the tokens (π in {row['interval']})"
        assert share in text
    assert f"cosines {', '.join(f'{c:.2f}' for c in summary.intervals['half_cosine'])}:" in text
    assert text.startswith(f"{len(table)} of {len(table)} response tokens were measured.")
    assert text in str(summary) and "Cosines between" in str(summary) and "Prop. 4.2" in summary.theory_words()
    assert "nan" not in text and text.splitlines()[0] in summary._repr_html_()
    below = summary.theory.powers.query("quantity != 'logit_grad_norm' and tokens >= 30").sort_values("slope")
    ends = [f"{r.slope:.2f}" for r in below.iloc[[0, -1]].itertuples()]
    assert f"(1−π)^s with s from {ends[0]} to {ends[1]} by layer" in summary.theory_words()


def test_the_figures_and_the_summary_are_written_with_their_numbers(policy, batch, table, summary, tmp_path):
    write_figures(tmp_path, policy, table, summary)
    assert (tmp_path / "summary.txt").read_text(encoding="utf-8") == f"{summary}\n"
    pictures = {p.stem for p in tmp_path.glob("*.png")}
    assert (
        pictures
        == {p.stem for p in tmp_path.glob("*.csv")}
        == {*("figure_1", "figure_2", "cosines", "layers_by_interval", "norm_against_one_minus_prob")}
    )
