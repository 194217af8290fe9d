"""Proposition 4.2 on token tables: counted by hand where bounds are broken on purpose, and reported."""

import math

import torch
from support.tables import make_table, rng

from gradscope.theory import theory_report
from gradscope.theory.bounds import check_logit_bounds


def test_the_logit_bounds_line_says_how_many_hold():
    norms, log_rest = torch.tensor([0.6, 0.69, 0.9]), torch.full((3,), math.log(0.5))
    bounds = check_logit_bounds(norms, log_rest, vocab_size=8)
    assert (bounds.held, bounds.violations, bounds.num_tokens) == (False, 1, 3)
    assert str(bounds).startswith("logit bounds hold to rounding for 2 of 3 tokens, with 1−π uncancelled")
    assert check_logit_bounds(norms[:2], log_rest[:2], vocab_size=8).held
    assert check_logit_bounds(torch.tensor([torch.nan]), log_rest[:1], vocab_size=8).violations == 1


def test_the_report_has_every_table_that_it_is_made_of():
    table = make_table(0.8)
    report = theory_report(table, vocab_size=1000, seed=rng())
    assert report.logit_bounds.held and (report.powers["tokens"] > 0).all()
    text = str(report)
    assert f"{len(table)} of {len(table)} tokens" in text and "theory 1, √ law ½ (20 prompts)" in text
    assert max(map(len, text.splitlines())) <= 120
    assert report._repr_html_().count("<table") == 4
