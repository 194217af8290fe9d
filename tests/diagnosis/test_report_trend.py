"""The page of a trend: what its sentences say of two checkpoints, and what they do not."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from gradscope.diagnosis import make_trend_report
from gradscope.diagnosis.result import join_rows, make_rows, one_row

LOW = "[0, ¼)"


def checkpoint(step: int, share: tuple[float, float, float], prompts: int) -> pd.DataFrame:
    """Statistics with one number that is followed: value, lower and upper."""
    rows = make_rows("token_share", np.array(share)[:, None], 1000, unit="share", intervals=[LOW])
    return join_rows([rows, one_row("prompts", float(prompts), 1000, unit="prompts")]).assign(step=step)


@pytest.mark.parametrize(
    ("last", "prompts", "word"),
    [
        ((0.4, 0.35, 0.45), 6, "rose"),
        ((0.1, 0.05, 0.14), 6, "fell"),
        ((0.3, 0.22, 0.45), 6, "cannot be told to have changed"),
        ((0.4, 0.35, 0.45), 5, "cannot be judged by so few prompts"),
        ((0.4, np.nan, np.nan), 6, "is known without intervals"),
    ],
)
def test_a_trend_is_told_by_intervals_apart_from_prompts_enough(last, prompts, word):
    first = checkpoint(10, (0.2, 0.15, 0.25), 8)
    trend = pd.concat([first, checkpoint(30, last, prompts)], ignore_index=True)
    (finding,) = make_trend_report(trend).page.findings
    assert finding.statement.startswith(f"The share of the tokens with π in {LOW} {word}: 20 % [15, 25] at step 10, ")
    assert f"{100 * last[0]:.0f} %" in finding.statement


def test_notes_of_a_page_are_sentences():
    trend = pd.concat([checkpoint(step, (0.2, 0.1, 0.3), 8) for step in (1, 2)], ignore_index=True)
    notes = ("the dump holds text", "TRL's tools are lost.", "optimizer.pt beside the checkpoint is left out")
    page = make_trend_report(trend, notes=notes).page
    assert page.notes == (
        "The dump holds text.",
        "TRL's tools are lost.",
        "optimizer.pt beside the checkpoint is left out.",
    )
