"""The page of a trend: what its sentences say of two checkpoints, and what they do not."""

from __future__ import annotations

import matplotlib.colors as mcolors
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from gradscope.diagnosis import make_trend_report
from gradscope.diagnosis.page.trend import follow
from gradscope.diagnosis.rows import join_rows, make_rows, one_row
from gradscope.plots import drawn_numbers, plot_trend
from gradscope.resampling import TOO_FEW, Supply

LOW = "[0, ¼)"


def checkpoint(step: int, share: tuple[float, float, float]) -> pd.DataFrame:
    """Statistics with one number that is followed: value, lower and upper."""
    rows = make_rows("token_share", np.array(share)[:, None], 1000, unit="share", intervals=[LOW])
    return join_rows([rows, one_row("prompts", 8.0, 1000, unit="prompts")]).assign(step=step)


@pytest.mark.parametrize(
    ("last", "word"),
    [
        ((0.4, 0.35, 0.45), "rose"),
        ((0.1, 0.05, 0.14), "fell"),
        ((0.3, 0.22, 0.45), "shows no detectable change"),
        ((0.3, 0.251, 0.45), "shows no detectable change"),  # 25 % is printed at both
    ],
)
def test_a_trend_is_told_by_the_intervals_that_are_printed(last, word):
    trend = pd.concat([checkpoint(10, (0.2, 0.15, 0.25)), checkpoint(30, last)], ignore_index=True)
    (finding,) = make_trend_report(trend).page.findings
    assert finding.statement.startswith(f"The share of the tokens with π < ¼ {word}: 20 % [15, 25] at step 10, ")
    assert f"{100 * last[0]:.0f} %" in finding.statement


def test_without_an_interval_no_number_is_told_and_too_few_prompts_come_first_with_what_they_need():
    trend = pd.concat([checkpoint(10, (0.2, 0.15, 0.25)), checkpoint(30, (0.4, np.nan, np.nan))], ignore_index=True)
    supply = Supply(1, 2, 8, of_informative=9, of_prompts=16, minutes=24.2)
    trend["too_few"] = np.where(trend["step"] == 30, supply.too_few, "")
    page = make_trend_report(trend).page
    first, second = page.findings
    assert first.statement.startswith(TOO_FEW) and "25 minutes" in first.detail and "step 30" in first.statement
    assert "%" not in second.statement and "step 30" in second.statement
    assert "25 minutes" in page.next[0]


def test_the_largest_change_is_named_with_its_steps():
    shares = [(0.66, 0.6, 0.7), (0.2, 0.15, 0.25), (0.5, 0.3, 0.6), (0.62, 0.5, 0.7)]
    trend = pd.concat([checkpoint(10 * k, share) for k, share in enumerate(shares)], ignore_index=True)
    (finding,) = make_trend_report(trend).page.findings
    assert "shows no detectable change: 66 % [60, 70] at step 0, 62 % [50, 70] at step 30." in finding.statement
    assert "66 % [60, 70] at step 0, 20 % [15, 25] at step 10; it fell." in finding.detail


def test_rollouts_of_another_step_are_hollow_and_said_first():
    trend = pd.concat([checkpoint(step, (0.2, 0.1, 0.3)) for step in (1, 2, 3)], ignore_index=True)
    assert not make_trend_report(trend.assign(other_step=False)).page.warnings
    marked = trend.assign(other_step=trend["step"] == 3)
    (warning,) = make_trend_report(marked).page.warnings
    assert "at step 3 were sampled by a different checkpoint" in warning
    points = [line for line in plot_trend(follow(marked, [LOW])).axes[0].lines if line.get_marker() == "o"]
    inside = {mcolors.to_hex(line.get_markerfacecolor()): list(line.get_xdata()) for line in points}
    plt.close("all")
    assert inside.pop("#ffffff") == [3] and [*inside.values()] == [[1, 2]]


def test_a_lower_bound_of_nearly_0_does_not_flatten_an_index():
    indices = [(1.0, 0.5, 1.4), (-0.5, -23.0, -0.1), (1.5, 1.0, 1.9)]
    rows = [make_rows("dominance_index", np.array(own)[:, None], 9, unit="bits", intervals=[LOW]) for own in indices]
    trend = pd.concat([row.assign(step=step, metric="raw") for step, row in enumerate(rows)], ignore_index=True)
    low, high = plot_trend(follow(trend, [LOW])).axes[0].get_ylim()
    plt.close("all")
    assert low == -4.5 and high > 1.9


def test_bounds_that_a_sentence_calls_unusable_have_no_band():
    trend = pd.concat([checkpoint(step, bounds) for step, bounds in enumerate([(0.5, 0.0, 0.95), (0.5, -0.4, 0.6)])])
    (finding,) = make_trend_report(trend).page.findings
    assert "[no usable bounds] at step 0, 50 % [−40, 60] at step 1" in finding.statement
    drawn = drawn_numbers(plot_trend(follow(trend, [LOW])))
    plt.close("all")
    assert drawn.set_index("step")["lower"].isna().tolist() == [True, False]


def test_notes_of_a_page_are_sentences():
    trend = pd.concat([checkpoint(step, (0.2, 0.1, 0.3)) for step in (1, 2)], ignore_index=True)
    notes = ("the log holds text", "TRL's tools are lost.", "optimizer.pt beside the checkpoint is ignored")
    page = make_trend_report(trend, notes=notes).page
    assert page.notes == (
        "The log holds text.",
        "TRL's tools are lost.",
        "optimizer.pt beside the checkpoint is ignored.",
    )
