"""How much of the summed gradient other prompts would share, and how much is noise; cosines between intervals."""

from __future__ import annotations

from math import isnan

from gradscope import plots
from gradscope.diagnosis.findings import Finding, Verdict, judge, lack_words
from gradscope.diagnosis.format import share_words
from gradscope.diagnosis.measured import Measured
from gradscope.diagnosis.page.page import Block, Paragraph
from gradscope.diagnosis.page.sheets import Sheets, csv, define, redraw, series_of
from gradscope.diagnosis.result import Diagnosis
from gradscope.diagnosis.rows import Rows, join_rows
from gradscope.diagnosis.sums import cosine_matrix, signal_rows
from gradscope.intervals import name_interval
from gradscope.plots import METRICS

TITLE = "Signal, noise and cosines"
ASKS = ("sums",)
FOLLOWED = {("signal_fraction", "raw"): ("signal fraction", "")}
DEFINITIONS = {
    "signal fraction": (
        "With prompts as draws from one distribution, signal is the unbiased estimate of ‖E G_a‖², the part of the "
        "squared norm that another batch of equally many prompts would share; the rest is noise. The fraction is "
        "signal/‖G_a‖², roughly the expected cosine with the G_a of such a batch. The estimate can fall below 0."
    ),
}
COSINES = {"raw": ("cosines", ""), "adamw": ("adamw_cosines", ", AdamW-preconditioned")}
"""Metric → frame, and words."""
FRACTIONS = (("signal_fraction", "raw", METRICS["raw"], 2), ("signal_fraction", "adamw", METRICS["adamw"], 4))


def rows(m: Measured) -> Rows:
    """The numbers of `sums.signal_rows` in each metric, and the cosines between the intervals' sums."""
    made = m.made["sums"]
    each = [signal_rows(gram, made.tokens, m.labels, metric=name) for name, gram in made.grams.items()]
    return Rows(
        join_rows(each), {COSINES[name][0]: cosine_matrix(gram.products) for name, gram in made.grams.items()}
    )


def say(found: Diagnosis) -> list[Finding]:
    """Say for which intervals the summed gradient is told from noise."""
    picked = [(label, found.pick("signal_fraction", "raw", label)) for label in (*found.labels, "all")]
    known = [(label, row) for label, row in picked if row is not None and not isnan(row["lower"])]
    if not known or found.scope.supply.too_few:
        return []
    summed, low = found.scope.summed_prompts, found.scope.low
    each = "; ".join(f"{_group(name)}: {share_words(row)}" for name, row in known if name != "all")
    detail = f"Signal fraction of ‖G_a‖², over {summed}: {each}. Negative estimates arise by chance."
    clear = [name for name, row in known if judge(row) is Verdict.MORE]
    about = tuple(("signal_fraction", "raw", name) for name, _ in known)
    if not clear:
        words = f"{summed[:1].upper()}{summed[1:]} are too few to separate any interval's summed gradient from noise."
        return [Finding("signal", Verdict.UNDECIDED, words, detail, "warn", about=about)]
    statement = f"The summed gradient has detectable signal in: {', '.join(map(_group, clear))}"
    missing = low not in clear and low in dict(known)
    statement += f". For {name_interval(low)} none is detectable." if missing else "."
    tone, verdict = ("warn", Verdict.UNDECIDED) if missing else ("plain", Verdict.MORE)
    return [Finding("signal", verdict, statement, detail, tone, about=about)]


def _group(label: str) -> str:
    return "all tokens" if label == "all" else name_interval(label)


def show(found: Diagnosis, sheets: Sheets) -> list[Block]:
    places, of = [*found.labels, "all"], found.scope.of_summed
    fractions = [found.pick("signal_fraction", "raw", label) for label in places]
    blocks: list[Block] = []
    if all(isnan(row["lower"]) for row in fractions):
        few = f"Signal and noise were not judged: {lack_words(fractions[-1])}."
        blocks.append(Paragraph(found.scope.supply.too_few or few))
    else:
        # Far below 0 says no more than below 0.
        look = {"ylabel": "signal / ‖$G_a$‖²", "xlabel": "π of the tokens", "limits": (-1.2, 1.0)}
        caption = f"Share of each interval's ‖G_a‖² that other prompts would share{of}; 0 is pure noise."
        series = series_of(found.statistics, places, FRACTIONS)
        blocks.append(sheets.series("signal", series, caption, bars="95 %, a jackknife", **look))
    edges = found.scope.settings.edges
    for name, words in COSINES.values():
        if (matrix := found.frames.get(name)) is not None:
            draw = lambda matrix=matrix: plots.plot_cosines(matrix, edges=edges)  # noqa: E731
            caption = f"Cosines between the intervals' summed gradients{words}{of}; near 0 if either is noise."
            again = redraw(plots.plot_cosines, f'{csv(name)}.drop(columns="interval")', edges=edges)
            blocks.append(sheets.figure(name, draw, caption, again=again))
    return blocks + define(DEFINITIONS)
