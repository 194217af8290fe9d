"""Proposition 4.2 on token tables: counted by hand where bounds are broken on purpose, and reported."""

import math

import pandas as pd
from support.tables import make_table, rng

from gradscope.theory import theory_report
from gradscope.theory.bounds import check_logit_bounds


def test_the_logit_bounds_line_says_how_many_hold():
    table = pd.DataFrame({"logit_grad_norm": [0.6, 0.69, 0.9], "log_one_minus_prob": math.log(0.5)})
    bounds = check_logit_bounds(table, vocab_size=8)
    assert (bounds.held, bounds.violations, bounds.num_tokens) == (False, 1, 3)
    assert str(bounds).startswith("logit bounds hold to rounding for 2 of 3 tokens, with 1−π uncancelled")
    assert check_logit_bounds(table.head(2), vocab_size=8).held


def test_the_report_has_every_table_that_it_is_made_of():
    table = make_table(0.8)
    report = theory_report(table, vocab_size=1000, seed=rng())
    assert report.logit_bounds.held and (report.powers["tokens"] > 0).all()
    text = str(report)
    assert f"{len(table)} of {len(table)} tokens" in text and "theory 1, √ law ½ (20 prompts)" in text
    assert max(map(len, text.splitlines())) <= 120
    assert report._repr_html_().count("<table") == 4
