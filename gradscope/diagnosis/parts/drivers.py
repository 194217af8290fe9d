"""Whether the norms of tokens follow their probability or their entropy."""

from __future__ import annotations

from math import isnan

from gradscope import plots
from gradscope.diagnosis.findings import Finding, Verdict, judge
from gradscope.diagnosis.format import number_words
from gradscope.diagnosis.measured import Measured
from gradscope.diagnosis.page.page import Block
from gradscope.diagnosis.page.sheets import OVER_PROMPTS, Sheets, csv, redraw
from gradscope.diagnosis.result import Diagnosis
from gradscope.diagnosis.rows import Rows
from gradscope.gradients import PARAMETERS
from gradscope.theory import regress_norms

TITLE = "Probability or entropy"
ASKS = ("table",)
FOLDED = True


def rows(m: Measured) -> Rows:
    """drivers: the coefficients of `theory.regress_norms`."""
    return Rows(frames={"drivers": regress_norms(m.table, **m.draws("drivers"))}, unweighted=("drivers",))


def say(found: Diagnosis) -> list[Finding]:
    """Say which of the two the norms over all parameters follow."""
    drivers = found.frames["drivers"]
    rows = drivers[drivers["quantity"] == PARAMETERS].set_index("driver")
    row, names = rows.loc["difference"], ("log_one_minus_prob", "entropy")
    if row["collinear"]:
        words = "Probability and entropy are too strongly correlated here to say which of them the norms follow."
        return [Finding("driver", Verdict.UNDECIDED, words)]
    if isnan(row["lower"]):
        return []
    rows = rows.rename(columns={"coefficient": "value"})
    fits = ", ".join(
        f"{word} {number_words(rows.loc[name])}" for name, word in zip(names, ("log(1−π)", "entropy"), strict=True)
    )
    detail = f"Standardised coefficients of the log norm over {found.scope.parameters}, {row['tokens']:,} tokens that "
    detail += f"are not nearly certain: {fits}; R² of both {row['r2']:.2f}."
    row = rows.loc["difference"]
    verdict = judge(row, write="{:.2f}".format)
    words = {
        Verdict.MORE: "Token gradient norms follow probability more than entropy",
        Verdict.LESS: "Token gradient norms follow entropy more than probability",
    }.get(verdict, "Whether token gradient norms follow probability or entropy more is undecided")
    apart = f"{words}: the sizes of their coefficients differ by {number_words(row)}."
    return [Finding("driver", verdict, apart, detail)]


def show(found: Diagnosis, sheets: Sheets) -> list[Block]:
    drivers, over = found.frames["drivers"], found.scope.parameters
    return [
        sheets.figure(
            "drivers",
            lambda: plots.plot_norm_drivers(drivers, parameters=over),
            "What the norm of a token follows: standardised coefficients of its logarithm on log(1 − π) and entropy, "
            "fitted together, at each place in the network.",
            again=redraw(plots.plot_norm_drivers, csv("drivers"), f"parameters={over!r}"),
            bars=OVER_PROMPTS,
        )
    ]
