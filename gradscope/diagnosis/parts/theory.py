"""Prop. 4.2 on every token's logits, and norms against 1 − π below them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from gradscope import plots
from gradscope.diagnosis.findings import Finding, Verdict
from gradscope.diagnosis.measured import Measured
from gradscope.diagnosis.page.page import Block, Paragraph
from gradscope.diagnosis.page.sheets import TOKENS, Sheets, csv, define, redraw
from gradscope.diagnosis.result import Diagnosis
from gradscope.diagnosis.rows import Rows, join_rows, one_row
from gradscope.errors import InputError, first_line
from gradscope.gradients import LAYER, LOGITS, PARAMETERS
from gradscope.runs import counted, digits
from gradscope.theory import logit_grad_bounds, measured_cones, rounding_tolerance, theory_report

TITLE = "Norms against 1 − π"
ASKS = ("table",)
FOLDED = True
LABELS = {
    "bound_violations": "violations of Prop. 4.2",
    "bound_lower_margin": "distance from the lower bound",
    "bound_upper_margin": "distance from the upper bound",
}
DEFINITIONS = {
    "Prop. 4.2": (
        "√(N/(N−1))·(1−π) ≤ ‖e − π‖ ≤ √2·(1−π) for the gradient with respect to the logits. This is a theorem, so a "
        "violation would be an error of the measurement."
    ),
}


@dataclass(frozen=True)
class BoundMargins:
    """Prop. 4.2 on the logits of every token: violations and the smallest margins."""

    num_tokens: int
    violations: int
    """Number of tokens outside a bound by more than rounding."""
    lower_margin: float
    """Smallest ‖e − π‖ / lower bound − 1 over tokens that are not certain; negative from rounding or a violation."""
    upper_margin: float
    """Smallest 1 − ‖e − π‖ / upper bound."""
    tolerance: float
    """Largest relative slack allowed for a token because of float32 rounding."""


def rows(m: Measured) -> Rows:
    """bound_violations, bound_lower_margin and bound_upper_margin of `bound_margins`; powers, the fitted powers of
    1 − π, and cones, the spans of the gains, of a few layers (`theory_report`)."""
    bounds, vocabulary = bound_margins(m.table, m.policy.vocab_size), m.policy.vocab_size
    told = [
        one_row("bound_violations", float(bounds.violations), bounds.num_tokens, unit="tokens"),
        one_row("bound_lower_margin", bounds.lower_margin, bounds.num_tokens, unit="ratio"),
        one_row("bound_upper_margin", bounds.upper_margin, bounds.num_tokens, unit="ratio"),
    ]
    frames, kept = {}, {"bounds": bounds, "vocab_size": vocabulary}
    depth = sum(name.startswith(LAYER) for name in m.table) - 1
    if depth >= 0 and m.settings.edges[0] == 0:
        try:
            theory = theory_report(m.table, vocab_size=vocabulary, seed=np.random.default_rng(m.settings.seed))
        except InputError as error:  # too few tokens for a fit
            kept["why"] = first_line(error)
        else:
            shown = [f"{LAYER}{layer}" for layer in sorted({0, depth // 2, depth})]
            frames["powers"] = theory.powers[theory.powers["quantity"].isin([*shown, PARAMETERS])]
            frames["cones"] = measured_cones(theory, shown)
    return Rows(join_rows(told), frames, unweighted=("powers", "cones"), kept=kept)


def bound_margins(table: pd.DataFrame, vocab_size: int) -> BoundMargins:
    """Compare every token's `logit_grad_norm` with √(N/(N−1))·(1−π) and √2·(1−π), ignoring NaN."""
    import torch

    known = table[table[LOGITS].notna()]
    norms, log_rest = (torch.tensor(known[c].to_numpy(np.float32)) for c in (LOGITS, "log_one_minus_prob"))
    lower, upper = (bound.double() for bound in logit_grad_bounds(log_rest, vocab_size))
    slack, norms = rounding_tolerance(log_rest).double(), norms.double()
    outside = (norms < lower * (1 - slack)) | (norms > upper * (1 + slack))
    open_ = lower > 0
    margins = [(norms[open_] / lower[open_] - 1), (1 - norms[open_] / upper[open_])]
    least = [margin.min().item() if len(margin) else float("nan") for margin in margins]
    return BoundMargins(len(norms), int(outside.sum()), *least, slack.max().item() if len(slack) else 0.0)


def say(found: Diagnosis) -> list[Finding]:
    """Say whether Prop. 4.2 holds, as a test of the measurement."""
    b = found.rows["theory"].kept["bounds"]
    if not b.num_tokens:
        return []
    detail = (
        f"Smallest distance of a norm from the lower bound {digits(b.lower_margin)}, from the upper "
        f"{digits(b.upper_margin)}, relative; rounding is allowed at most {digits(b.tolerance, 1)}."
    )
    if b.violations:
        words = f"The bounds of Prop. 4.2 fail on {b.violations:,} of {b.num_tokens:,} tokens"
        return [Finding("bounds", Verdict.BROKEN, f"{words}: do not trust these measurements.", detail, "bad")]
    words = f"The bounds of Prop. 4.2 hold at the logits of all {counted(b.num_tokens, 'token')}."
    return [Finding("bounds", Verdict.FACT, words, detail)]


def show(found: Diagnosis, sheets: Sheets) -> list[Block]:
    kept, over = found.rows["theory"].kept, found.scope.parameters
    if "why" in kept:
        return [Paragraph(f"Not drawn: {kept['why']}.")]
    if "powers" not in found.frames:
        return []
    powers, cones, size = found.frames["powers"], found.frames["cones"], kept["vocab_size"]
    sheets.keep("powers", powers)
    sheets.keep("cones", cones)
    drawn = [
        sheets.figure(
            "figure_2",
            lambda: plots.plot_figure_2(found.table, cones, vocab_size=size),
            "Fig. 2 of the paper: at the logits the feasible cone of Prop. 4.2, which is a theorem; below them the "
            "span of the measured gains of these same tokens, which they lie in by construction.",
            again=redraw(plots.plot_figure_2, TOKENS, csv("cones"), f"vocab_size={size}"),
            token_column="norm",
        ),
        sheets.figure(
            "norm_against_one_minus_prob",
            lambda: plots.plot_norm_against_one_minus_prob(found.table, powers, parameters=over),
            "Norms against 1 − π with the fitted power, the slope (the theory's is 1), by layer and of all parameters.",
            again=redraw(plots.plot_norm_against_one_minus_prob, TOKENS, csv("powers"), f"parameters={over!r}"),
            token_column="norm",
        ),
    ]
    return [*drawn, *define(DEFINITIONS)]
