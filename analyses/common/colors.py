"""One colour and line style per variant of analyses/runs.toml, the same in all figures.

The four main variants have colours of Okabe and Ito's colour-blind safe palette; a control's colour differs from all it
is drawn beside. Sweeps go from light to dark through the colour of their middle. REINFORCE++ with a method has the
method's colour, dashed.
"""

from __future__ import annotations

COLORS: dict[str, str] = {
    "grpo": "#4D4D4D",
    "reweight": "#0072B2",
    "lopti": "#D55E00",
    "both": "#009E73",
    "random-split": "#E69F00",
    "permuted-weights": "#56B4E9",
    "matched-norm": "#CC79A7",
    "twice-the-steps": "#332288",
    "high-entropy": "#117733",
    "up-weight": "#999933",
    "masked": "#AA4499",
    "reversed": "#882255",
    "alpha-0.1": "#6BAED6",
    "alpha-0.5": "#08519C",
    "alpha-0.9": "#08306B",
    "eta-0.3": "#FD8D3C",
    "eta-0.7": "#A63603",
    "eta-0.9": "#7F2704",
    "rpp": "#4D4D4D",
    "rpp-reweight": "#0072B2",
    "rpp-lopti": "#D55E00",
    "rpp-both": "#009E73",
}
"""Variant → its colour, as matplotlib reads it."""

LINES: dict[str, str] = {variant: "-" for variant in COLORS} | {
    "random-split": "-.",
    "permuted-weights": "-.",
    "matched-norm": "-.",
    "twice-the-steps": "-.",
    "high-entropy": "-.",
    "up-weight": "-.",
    "masked": "-.",
    "reversed": "-.",
    "rpp": "--",
    "rpp-reweight": "--",
    "rpp-lopti": "--",
    "rpp-both": "--",
}
"""Variant → its line: solid, dash-dotted for controls and ablations, dashed for REINFORCE++."""
